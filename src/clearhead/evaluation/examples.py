"""The data of an evaluation, as the model at hand knows it: its names of classes, its way to begin a text, its pictures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.api import Model
from clearhead.batches.batch import Batch
from clearhead.batches.encoded import Encoded
from clearhead.batches.even import EvenRows, tensor
from clearhead.batches.rows import Ints
from clearhead.data.cells import Row, names_of
from clearhead.data.corpora import CORPORA
from clearhead.data.examples import Corpus, Images, Labelled, Pair, Question, Tagged
from clearhead.data.guess import find_source
from clearhead.data.layout import lay_out, read_examples
from clearhead.data.plan import DataPlan, Task
from clearhead.errors import InputError, nearest
from clearhead.evaluation.metrics import Counts
from clearhead.hub.pixels import to_pixels

LABEL = re.compile(r"LABEL_\d+")


class SeenPictures(EvenRows):
    """Pictures as the model's own settings prepare them."""

    def __init__(self, loaded: Model, images: Images, rows: int) -> None:
        self.loaded, self.images = loaded, images
        super().__init__(len(images), rows, seed=0, training=False)

    def build(self, places: Ints, random: np.random.Generator) -> Batch:
        """See `EvenRows.build`."""
        made = [
            to_pixels(self.images.pixels[place], self.loaded.config, self.loaded.images) for place in places
        ]
        pixels = torch.stack(made).to(next(self.loaded.model.parameters()).dtype)
        return Batch(pixels, tensor(self.images.labels[places]), numbers=tensor(places))


def led(encoded: Encoded, name: str, lead: Sequence[int]) -> Encoded:
    """The same rows of ids, each with some before it; a text is one row."""
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


def begun(encoded: Encoded, task: Task, loaded: Model) -> tuple[Encoded, dict[str, int]]:
    """The rows and special ids such that a decoder begins in training as it does when it writes: `bos` is what it is given first."""
    if loaded.config.family != "encoder-decoder":
        return encoded, loaded.special
    start, *forced = loaded.start_ids
    rows = led(encoded, "target", tuple(forced) or encoded.frame.before) if task == "seq2seq" else encoded
    return rows, {**loaded.special, "bos": start}


# Examples ---------------------------------------------------------------------------------------------------------------


def key(row: Pair | Question) -> tuple[str, ...]:
    """What the model is asked."""
    return (row.source,) if isinstance(row, Pair) else (row.question, row.context)


def examples(rows: Sequence[Pair | Question]) -> tuple[dict[tuple[str, ...], int], list[list[str]]]:
    """The distinct questions with their places, in the order of the data, and all right answers to each."""
    places: dict[tuple[str, ...], int] = {}
    references: list[list[str]] = []
    for row in rows:
        place = places.setdefault(key(row), len(places))
        if place == len(references):
            references.append([])
        right = row.target if isinstance(row, Pair) else row.answer
        if right not in references[place]:
            references[place].append(right)
    return places, references


def summed_by(rows: Counts, places: NDArray[np.int64], count: int) -> Counts:
    """Rows [N, 2] added up by the example that each belongs to [N] -> [count, 2]."""
    sums = np.zeros((count, rows.shape[1]))
    np.add.at(sums, places, rows)
    return sums


def renamed(corpus: Corpus, loaded: Model, plan: DataPlan, said: list[str]) -> Corpus:
    """The examples with labels as the model has them: numbers stand for classes that the model has no names for."""
    labels = loaded.class_names
    theirs = {label: label for label in labels}
    if all(LABEL.fullmatch(label) for label in labels):
        theirs |= {str(number): label for number, label in enumerate(labels)}
        if any(name in theirs and name not in labels for name in corpus.labels):
            said.append(
                f"the model's classes have no names: labels 0 to {len(labels) - 1} of the data are their numbers"
            )
    unknown = next((name for name in corpus.labels if name not in theirs), None)
    if unknown is not None:
        noun = "tag" if corpus.shape == "tags" else "label"
        listed = ", ".join(labels[:12]) + (" and more" if len(labels) > 12 else "")
        raise InputError(
            f"{_place(corpus, plan, unknown)}the {noun} {unknown!r} is none of the model's{nearest(unknown, theirs)}: {listed}"
        )
    if isinstance(corpus.validation, Images):
        numbers = np.array([labels.index(theirs[name]) for name in corpus.labels])
        images = Images(corpus.validation.pixels, numbers[corpus.validation.labels])
        return dataclasses.replace(corpus, validation=images)
    rows = [_relabelled(row, theirs) for row in cast(Sequence[Row], corpus.validation)]
    return dataclasses.replace(corpus, validation=cast(Any, rows))


def _relabelled(row: Row, names: dict[str, str]) -> Row:
    match row:
        case Labelled():
            return row._replace(label=names[row.label])
        case Tagged():
            return row._replace(tags=tuple(names[tag] for tag in row.tags))
    return row


def _place(corpus: Corpus, plan: DataPlan, name: str) -> str:
    """Where a label stands first; nothing for pictures, whose folders say it."""
    if isinstance(corpus.validation, Images) or plan.paths[0] in CORPORA:
        return ""
    source = find_source(plan, plan.paths)
    layout, _ = lay_out(plan, source)
    rows = read_examples(layout, source.files)
    return next((f"{place}: " for place, row in rows if row is not None and name in names_of(row)), "")
