"""Classes of texts, pairs of texts and images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.hub.encodings import framed
from clearhead.hub.pixels import Image, to_pixels
from clearhead.model.transformer import evaluating
from clearhead.tasks.results import Classification
from clearhead.tasks.run import check_head, logits_of, names_of

if TYPE_CHECKING:
    from clearhead.bundle import Model


def classify(loaded: Model, inputs: Any, batch_size: int = 32) -> Classification | list[Classification]:
    """The class of a text, of a pair of texts `("a", "b")`, or of an image; a list gives a list.

    Texts longer than the model takes are cut; of a pair, the longer one. Images are arrays, tensors or paths of files.
    """
    check_head(loaded, "classify")
    images = loaded.config.input == "patches"
    single = (
        not isinstance(inputs, list)
        if not images
        else not isinstance(inputs, list | tuple) and getattr(inputs, "ndim", 3) < 4
    )
    given = [inputs] if single else list(inputs)
    logits = _of_images(loaded, given, batch_size) if images else _of_texts(loaded, given, batch_size)
    kind = loaded.description.theirs.get("problem_type") if loaded.description is not None else None
    if kind == "regression":
        scores = logits
    elif kind == "multi_label_classification" or loaded.config.n_classes == 1:
        scores = [row.sigmoid() for row in logits]
    else:
        scores = [row.softmax(-1) for row in logits]
    names = names_of(loaded)
    made = [
        Classification(names[int(row.argmax())], float(row.max()), dict(zip(names, row.tolist())))
        for row in scores
    ]
    return made[0] if single else made


def _of_texts(loaded: Model, given: list[Any], batch_size: int) -> list[Tensor]:
    rows = []
    for item in given:
        pair = isinstance(item, tuple | list)
        if not all(isinstance(text, str) for text in (item if pair else [item])) or (pair and len(item) != 2):
            raise InputError(
                f"classify was given {item!r:.60}: it takes a text, a pair of texts, or a list of either"
            )
        rows.append(framed(loaded.text_tokenizer, loaded.max_length, *(item if pair else [item])))
    return logits_of(loaded, rows, batch_size)


def _of_images(loaded: Model, given: list[Image], batch_size: int) -> list[Tensor]:
    pixels = [to_pixels(image, loaded.config, loaded.images) for image in given]
    weight = next(loaded.model.parameters())
    made: list[Tensor] = []
    with evaluating(loaded.model), torch.inference_mode():
        for start in range(0, len(pixels), batch_size):
            batch = torch.stack(pixels[start : start + batch_size]).to(weight)
            made.extend(loaded.model(batch).logits.float().cpu())
    return made
