"""The data of an evaluation as the model knows it.

Its names of classes, its way to begin a text, its pictures.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.api import Model
from clearhead.batches.batch import Batch
from clearhead.batches.batching import Encoded, tensor
from clearhead.batches.even import EvenRows
from clearhead.batches.rows import Ints
from clearhead.data.corpus import place_of
from clearhead.data.examples import TAGS, Corpus, Example, Images
from clearhead.data.plan import DataPlan
from clearhead.errors import InputError, nearest
from clearhead.evaluation.metrics import Counts
from clearhead.hub.pixels import to_pixels
from clearhead.tasks.table import shape_of

LABEL = re.compile(r"LABEL_\d+")


class SeenPictures(EvenRows):
    """Pictures as the model's own settings prepare them."""

    def __init__(self, loaded: Model, images: Images, rows: int) -> None:
        self.loaded, self.images = loaded, images
        super().__init__(len(images), rows, seed=0, training=False)

    def _build(self, places: Ints, random: np.random.Generator) -> Batch:
        made = [
            to_pixels(self.images.pixels[place], self.loaded.config, self.loaded.images) for place in places
        ]
        pixels = torch.stack(made).to(next(self.loaded.model.parameters()).dtype)
        return Batch(pixels, tensor(self.images.labels[places]), numbers=tensor(places))


def led(encoded: Encoded, name: str, lead: Sequence[int]) -> Encoded:
    """Return the same rows of ids, each with a prefix; a text is one row."""
    if not lead:
        return encoded
    ids, offsets = encoded[name], encoded[f"{name}_offsets"]
    if name == "ids":
        return dataclasses.replace(
            encoded, arrays={**encoded.arrays, name: np.concatenate([np.array(lead, ids.dtype), ids])}
        )
    longer = np.insert(
        ids, np.repeat(offsets[:-1], len(lead)), np.tile(np.array(lead, ids.dtype), len(offsets) - 1)
    )
    moved = offsets + len(lead) * np.arange(len(offsets))
    return dataclasses.replace(encoded, arrays={**encoded.arrays, name: longer, f"{name}_offsets": moved})


def begun(encoded: Encoded, loaded: Model) -> tuple[Encoded, dict[str, int]]:
    """Return rows and special ids so that a decoder begins in training as in generation.

    `bos` is its first input.
    """
    if loaded.config.family != "encoder-decoder":
        return encoded, loaded.special
    start, *forced = loaded.start_ids
    if "target" in encoded.arrays:
        encoded = led(encoded, "target", forced or encoded.frame.special[0])
    return encoded, {**loaded.special, "bos": start}


# Examples --------------------------------------------------------------------------------------------------


def examples(rows: Sequence[Example]) -> tuple[dict[tuple[str, ...], int], list[list[str]]]:
    """Return the distinct questions with their places, and all right answers to each."""
    places: dict[tuple[str, ...], int] = {}
    references: list[list[str]] = []
    for row in rows:
        place = places.setdefault(row.asked(), len(places))
        if place == len(references):
            references.append([])
        if row.answered() not in references[place]:
            references[place].append(row.answered())
    return places, references


def summed_by(rows: Counts, places: NDArray[np.int64], count: int) -> Counts:
    """Add up rows [N, 2] by the example that each belongs to [N] -> [count, 2]."""
    sums = np.zeros((count, rows.shape[1]))
    np.add.at(sums, places, rows)
    return sums


def renamed(corpus: Corpus, loaded: Model, plan: DataPlan, notes: list[str]) -> Corpus:
    """Return the examples with the model's labels.

    Numbers stand for classes that the model has no names for.
    """
    labels = loaded.class_names
    theirs = {label: label for label in labels}
    if all(LABEL.fullmatch(label) for label in labels):
        theirs |= {str(number): label for number, label in enumerate(labels)}
        if any(name in theirs and name not in labels for name in corpus.labels):
            notes.append(
                "the model's classes have no names: "
                f"labels 0 to {len(labels) - 1} of the data are their numbers"
            )
    unknown = next((name for name in corpus.labels if name not in theirs), None)
    if unknown is not None:
        place = place_of(plan, shape_of(plan.task), unknown)
        listed = ", ".join(labels[:12]) + (" and more" if len(labels) > 12 else "")
        raise InputError(
            f"{place}{': ' if place else ''}the {'tag' if corpus.shape == TAGS.name else 'label'} "
            f"{unknown!r} "
            f"is none of the model's{nearest(unknown, theirs)}: {listed}"
        )
    if isinstance(corpus.validation, Images):
        numbers = np.array([labels.index(theirs[name]) for name in corpus.labels])
        images = Images(corpus.validation.pixels, numbers[corpus.validation.labels])
        return dataclasses.replace(corpus, validation=images)
    rows = [row.renamed(theirs) for row in cast(Sequence[Example], corpus.validation)]
    return dataclasses.replace(corpus, validation=rows)
