"""Classes of texts, pairs of texts and images."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.bundle import Bundle
from clearhead.errors import InputError
from clearhead.hub.encodings import framed
from clearhead.hub.pixels import Image, to_pixels
from clearhead.model.transformer import evaluating
from clearhead.tasks.results import Classification
from clearhead.tasks.run import check_head, logits_of


def classify(m: Bundle, inputs: Sequence[Any], batch_size: int = 32) -> list[Classification]:
    """Return the class of each text, pair of texts or image; see `Model.classify`."""
    check_head(m, "classify")
    run = _of_images if m.config.input == "patches" else _of_texts
    logits = run(m, inputs, batch_size)
    kind = m.description.theirs.get("problem_type") if m.description is not None else None
    if kind == "regression":
        scores = logits
    elif kind == "multi_label_classification" or m.config.n_classes == 1:
        scores = [row.sigmoid() for row in logits]
    else:
        scores = [row.softmax(-1) for row in logits]
    names = m.class_names
    return [
        Classification(names[int(row.argmax())], float(row.max()), dict(zip(names, row.tolist())))
        for row in scores
    ]


def _of_texts(m: Bundle, given: Sequence[Any], batch_size: int) -> list[Tensor]:
    rows = []
    for item in given:
        pair = isinstance(item, tuple | list)
        if not all(isinstance(text, str) for text in (item if pair else [item])) or (pair and len(item) != 2):
            raise InputError(
                f"classify was given {item!r:.60}: it takes a text, a pair of texts, or a list of either"
            )
        rows.append(framed(m.text_tokenizer, m.max_length, *(item if pair else [item])))
    return logits_of(m, rows, batch_size)


def _of_images(m: Bundle, given: Sequence[Image], batch_size: int) -> list[Tensor]:
    pixels = [to_pixels(image, m.config, m.images) for image in given]
    weight = next(m.model.parameters())
    made: list[Tensor] = []
    with evaluating(m.model), torch.inference_mode():
        for start in range(0, len(pixels), batch_size):
            batch = torch.stack(pixels[start : start + batch_size]).to(weight)
            made.extend(m.model(batch).logits.float().cpu())
    return made
