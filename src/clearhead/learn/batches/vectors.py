"""Texts to be embedded, as batches: each row holds the texts of one example side by side.

They are documents of the row, which do not see each other: an anchor, what is like it, perhaps what is not.

Shapes: N examples, B rows, T tokens of a row, K texts of a row.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from clearhead.errors import refuse
from clearhead.learn.batches.batch import Batch
from clearhead.learn.batches.batching import Setting, blank, tensor
from clearhead.learn.batches.bucketed import Bucketed, cut_note
from clearhead.learn.batches.encoding import Columns, Encoder, characters, flat, groups
from clearhead.learn.batches.rows import Ints, frame_rows
from clearhead.learn.data.examples import Example, Shape
from clearhead.learn.data.tables import Record

TEXTS = ("anchor", "positive", "negative")


@dataclass(frozen=True, slots=True)
class Alike(Example):
    """Two texts that are alike, perhaps one that is not, or how alike the two are."""

    TEXTS, KEY = ("anchor", "positive", "negative"), ("anchor",)
    PAIRED = ("anchor", "positive")
    anchor: str
    positive: str
    negative: str | None = None
    score: float | None = None

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`. A score may be a number written as text."""
        texts = [record.text(roles[role]).strip() if role in roles else None for role in TEXTS]
        score = None
        if "score" in roles:
            value = record.value(roles["score"])
            try:
                score = float(value)
            except (TypeError, ValueError):
                score = math.nan
            refuse(
                not math.isfinite(score) or isinstance(value, bool),
                f"{record.place}: the score in `{roles['score']}` must be a number, not {value!s:.40}",
            )
        anchor, positive, negative = texts
        empty = not anchor or not positive or negative == ""
        return None if empty else cls(str(anchor), str(positive), negative, score)

    def asked(self) -> tuple[str, ...]:
        """Return the anchor."""
        return (self.anchor,)


ALIKE = Shape("similar texts", Alike, ("anchor", "positive"), ("negative", "score"))


def encode_alike(rows: Iterable[Alike], encoder: Encoder) -> Iterator[Columns]:
    """Encode the texts of each example, a key of each that may be a candidate, and the score or NaN."""
    for group in groups(rows, characters):
        texts = {name: [getattr(row, name) for row in group] for name in TEXTS}
        keys = [[_key(row.positive), _key(row.negative or "")] for row in group]
        refuse(
            any((row.negative is None) != (group[0].negative is None) for row in group),
            "some rows have a negative text and some have none: give all one, or leave the column out",
        )
        yield {
            **{name: flat(encoder.ids(text or "" for text in texts[name])) for name in TEXTS},
            "several": np.array([row.negative is not None for row in group]),
            "keys": np.array(keys, dtype=np.int64).reshape(-1, 2),
            "scores": np.array([math.nan if row.score is None else row.score for row in group], np.float32),
        }


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


class AlikeBatches(Bucketed):
    """The texts of an example in each row, each framed as if alone; the targets are keys of candidates."""

    def __init__(self, setting: Setting) -> None:
        encoded, self.frame = setting.encoded, setting.encoded.frame
        room = setting.room(self.frame, "a text")
        several = bool(np.asarray(encoded["several"]).any())
        whole = [encoded.stretches(name) for name in TEXTS[: 3 if several else 2]]
        self.texts = [text.cut(room) for text in whole]
        longer = np.logical_or.reduce([text.lengths > room for text in whole])
        self.notes = cut_note(longer, "examples", setting.length)
        self.keys, self.scores = np.asarray(encoded["keys"]), np.asarray(encoded["scores"])
        if setting.training and np.isnan(self.scores).all():
            refuse(
                len(self.keys) < 2 or setting.plan.batch_size < 2,
                "the other rows of a batch are what a text is told from: set data.batch_size to 2 or more",
            )
        sizes = [text.lengths + self.frame.size for text in self.texts]
        super().__init__(setting, np.sum(sizes, axis=0))

    def _build(self, numbers: Ints) -> Batch:
        ids, mask = blank(self.sizes[0][numbers], self.setting.pad)
        documents = np.full_like(ids, len(self.texts) - 1)
        begin = np.zeros(len(numbers), dtype=np.int64)
        for number, text in enumerate(self.texts):
            part = text.take(numbers)
            framed = np.zeros((len(numbers), int(part.lengths.max()) + self.frame.size), dtype=np.int64)
            frame_rows(self.frame, [part], framed)
            ends = part.lengths + self.frame.size
            inside = np.arange(framed.shape[1]) < ends[:, None]
            rows, columns = np.nonzero(inside)
            ids[rows, begin[rows] + columns] = framed[rows, columns]
            documents[rows, begin[rows] + columns] = number
            begin = begin + ends
        return Batch(
            tensor(ids), tensor(self.keys[numbers]), mask, documents=tensor(documents),
            scores=tensor(self.scores[numbers]), numbers=tensor(numbers),
        )  # fmt: skip
