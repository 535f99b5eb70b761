"""What a model of two towers is used for: vectors of texts and images in one space, and zero-shot classes.

Shapes: N texts, M images, P width of the common space.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import InputError, refuse
from clearhead.hub import preprocessor
from clearhead.hub.preprocessor import PREPROCESSOR
from clearhead.hub.towers import JoinedTowers
from clearhead.learn.batches.ragged import ROWS
from clearhead.learn.tasks.results import Classification
from clearhead.run.bundle import Bundle
from clearhead.variants.contexts import evaluating


def towers_of(m: Bundle, task: str) -> JoinedTowers:
    """Return both towers; refuse a model that has one."""
    if m.towers is None:
        kind = m.description.kind if m.description is not None else m.config.family
        raise InputError(
            f"{task} needs two towers, one of texts and one of images, and this model has one ({kind}): "
            "load a directory of CLIP or SigLIP"
        )
    return m.towers


def text_inputs(m: Bundle, texts: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Return ids and mask of texts, two tensors [N, T], as the model takes them.

    Some models take texts of one length, the longest. They read the padding too where the tokenizer's
    settings name no attention_mask, and there is no mask then.
    """
    towers = towers_of(m, "embed")
    rows, pad = m.encode(list(texts), m.max_length), m.special.get("pad", 0)
    length = m.max_length if towers.description.table.pads else max(map(len, rows))
    ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    named = m.settings.get("model_input_names")
    if isinstance(named, list) and "attention_mask" not in named:
        return ids, None
    return ids, torch.arange(length) < torch.tensor([[len(row)] for row in rows])


def image_pixels(m: Bundle, images: Iterable[Any]) -> Tensor:
    """Return the pixels of images [M, C, height, width], as the model takes them."""
    config = towers_of(m, "embed").config
    tensors = []
    for image in images:
        floating = (isinstance(image, Tensor) and image.is_floating_point()) or (
            isinstance(image, np.ndarray) and image.dtype.kind == "f"
        )
        refuse(
            not m.images and not floating,
            f"{m.folder or 'this model'} has no {PREPROCESSOR}, which says how an image becomes pixels: "
            "add it, or give pixels, floating-point numbers",
        )
        assert config.frame is not None
        tensors.append(preprocessor.pixels_for(image, config.image.n_channels, config.frame, m.images))
    return torch.stack(tensors)


@torch.inference_mode()
def embed(m: Bundle, inputs: Sequence[Any], batch_size: int | None = None) -> Tensor:
    """Return one vector of length one for each text or image, [N, P]; see `Model.embed`."""
    towers = towers_of(m, "embed")
    batch_size = ROWS if batch_size is None else batch_size
    refuse(batch_size < 1, f"batch_size {batch_size} must be 1 or more")
    for item in inputs:
        refuse(
            not isinstance(item, preprocessor.Image),
            f"embed was given {item!r:.60}: it takes texts, and images as paths (pathlib), arrays or tensors",
        )
    weight = next(towers.parameters())
    vectors = torch.empty(len(inputs), towers.config.width)
    of_texts = [place for place, item in enumerate(inputs) if isinstance(item, str)]
    of_images = [place for place, item in enumerate(inputs) if not isinstance(item, str)]
    with evaluating(towers):
        for numbers in _batches(of_texts, batch_size):
            ids, mask = text_inputs(m, [inputs[place] for place in numbers])
            on = ids.to(weight.device), None if mask is None else mask.to(weight.device)
            vectors[numbers] = nnf.normalize(towers.embed_texts(*on).float(), dim=-1).cpu()
        for numbers in _batches(of_images, batch_size):
            pixels = image_pixels(m, (inputs[place] for place in numbers)).to(weight)
            vectors[numbers] = nnf.normalize(towers.embed_images(pixels).float(), dim=-1).cpu()
    return vectors


def _batches(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


@torch.inference_mode()
def zero_shot(
    m: Bundle, images: Sequence[Any], labels: Sequence[str], batch_size: int = 32
) -> list[Classification]:
    """Return which of the labels fits each image best; see `Model.classify`."""
    towers = towers_of(m, "classify with labels")
    check_labels(labels)
    paths = [Path(image) if isinstance(image, str) else image for image in images]
    texts, pictures = embed(m, list(labels), batch_size), embed(m, paths, batch_size)
    weight = next(towers.parameters())
    logits = towers.compare(texts.to(weight), pictures.to(weight)).logits.float().cpu()  # M N
    scores = logits.softmax(-1) if towers.config.loss == "softmax" else logits.sigmoid()
    return [
        Classification(labels[int(row.argmax())], float(row.max()), dict(zip(labels, row.tolist())))
        for row in scores
    ]


def check_labels(labels: Sequence[str]) -> None:
    """Refuse labels that are none, not texts, empty or twice the same."""
    listed = not isinstance(labels, str) and all(isinstance(label, str) for label in labels)
    refuse(not listed or not len(labels), 'labels must be a list of texts, such as ["a cat", "a dog"]')
    refuse(not all(label.strip() for label in labels), "a label is empty: give a few words for each class")
    twice = next((label for number, label in enumerate(labels) if label in labels[:number]), None)
    refuse(twice is not None, f'label "{twice}" stands twice: give each class once')
