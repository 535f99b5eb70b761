"""What the tasks give."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Classification:
    """The class of one input."""

    label: str  # the best
    probability: float  # of the best; a model that regresses has its number here
    scores: dict[str, float]  # of every label, in the order of the classes


@dataclass(frozen=True)
class Word:
    """One word and its tag."""

    text: str
    label: str  # as the model has it, such as B-PER
    start: int  # characters of the text; given words count as joined by single spaces
    end: int
    score: float


@dataclass(frozen=True)
class Span:
    """Words that belong together: B-PER I-PER is one PER."""

    label: str
    text: str
    start: int
    end: int
    score: float  # mean over its words


@dataclass(frozen=True)
class Tags:
    """What a tagger says of one text."""

    words: list[Word]
    spans: list[Span]


@dataclass(frozen=True)
class Candidate:
    """A token for a mask."""

    token: str
    id: int
    probability: float
    text: str  # with the token in place of the mask


@dataclass(frozen=True)
class Answer:
    """The part of a context that answers a question."""

    text: str  # empty where the context has no answer
    start: int  # characters of the context
    end: int
    score: float  # probability that it begins there, times that it ends there
