"""Raw examples: what files become before any token is counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Shape = Literal["text", "pairs", "labels", "tags", "questions", "images"]


class Chunk(NamedTuple):
    """A piece of a document, of a million characters at most, cut after a line or before a space where there is one."""

    text: str
    ends: bool  # is it the last piece of its document?


class Pair(NamedTuple):
    """A text and what it is to become."""

    source: str
    target: str


class Labelled(NamedTuple):
    """A text, or two that are read together, and its class."""

    text: str
    label: str
    pair: str | None = None


class Tagged(NamedTuple):
    """The words of a sentence and one tag for each."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


class Question(NamedTuple):
    """A question whose answer stands in a context."""

    question: str
    context: str
    answer: str  # "": the context holds none
    start: int  # character of the context at which the answer begins; 0 where there is none


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures of one size and the number of the class of each."""

    pixels: NDArray[np.uint8]  # N H W C
    labels: NDArray[np.int64]  # N

    def __len__(self) -> int:
        return len(self.labels)


Rows: TypeAlias = (
    Iterable[Chunk] | Sequence[Pair] | Sequence[Labelled] | Sequence[Tagged] | Sequence[Question] | Images
)


@dataclass(frozen=True)
class Corpus:
    """The examples of a data set, those to learn from and those to validate on.

    A split made here puts no example on both sides; where rows or pictures that the user set apart repeat training data, `said` says so.
    """

    shape: Shape
    train: Rows  # text: chunks streamed from the files anew at each iteration; images: `Images`; otherwise a list
    validation: Rows
    labels: tuple[str, ...]  # names of the classes or tags, sorted (tags: O first); () where there are none
    fingerprint: str  # hash of the content and of everything in the plan that changes the examples
    said: tuple[str, ...]  # what was guessed, a short sentence each
    size: int  # bytes of the training text; 0 for images
