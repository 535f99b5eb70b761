"""Examples: what files become before any token is counted.

Each class of examples knows how it is read from a record, its texts, its key and its labels, so that no
caller has to ask which class it holds. A `Shape` names the class and the columns it is read from.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import InputError, refuse
from clearhead.learn.data.tables import Record, shorten

Lowercase = bool | Literal["source", "target"]
_WHOLE = re.compile(r"-?[0-9]+\.0+")  # how spreadsheets and pandas write integers beside a missing value


class Example:
    """A row of a data set. A class names its fields with text; the rest follows."""

    TEXTS: ClassVar[tuple[str, ...]] = ()  # fields that hold text
    KEY: ClassVar[tuple[str, ...]] = ()  # those that the model is shown and that do not tell the answer
    PAIRED: ClassVar[tuple[str, ...]] = ()  # two fields with texts that may be swapped
    ASKED: ClassVar[tuple[str, ...]] = ()  # where a text is the answer: the fields that ask for it
    ANSWER: ClassVar[str] = ""  # and the field that holds it
    NAMED: ClassVar[str] = ""  # the field that holds a label or tags
    __slots__ = ()

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """Return the example of a record, given the column of each role; None where a text is empty."""
        texts = [record.text(roles[role]).strip() for role in cls.TEXTS]
        return cls(*texts) if all(texts) else None

    def texts(self) -> tuple[str, ...]:
        """Return the texts as a tokenizer learns from them."""
        values = (getattr(self, name) for name in self.TEXTS)
        return tuple(" ".join(_parts(value)) for value in values if value is not None)

    def key(self) -> tuple[str, ...]:
        """Return what decides the side of a split: rows with equal keys stay together."""
        return tuple(part for name in self.KEY for part in _parts(getattr(self, name)))

    def pair_key(self) -> tuple[str, ...]:
        """Return the texts of a pair, which stays together with the same one swapped; () for others."""
        texts = tuple(getattr(self, name) for name in self.PAIRED)
        return () if None in texts else texts

    def names(self) -> tuple[str, ...]:
        """Return the label or the tags; () where the example has none."""
        return _parts(getattr(self, self.NAMED)) if self.NAMED else ()

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the example with other names for its label or tags."""
        return self._changed([self.NAMED] if self.NAMED else [], names.__getitem__)

    def lowered(self, which: Lowercase) -> Self:
        """Return the example with its texts, or one side of a pair, in lower case."""
        return self._changed(self.TEXTS if which is True else [str(which)], str.lower)

    def _changed(self, fields: Iterable[str], change: Callable[[str], str]) -> Self:
        values = {name: getattr(self, name) for name in fields}
        changed: Any = {
            name: tuple(map(change, value)) if isinstance(value, tuple) else value and change(value)
            for name, value in values.items()
        }
        return replace(self, **changed)  # type: ignore[type-var]

    def size(self) -> int:
        """Return the number of bytes of text."""
        return sum(len(part.encode()) for name in self.TEXTS for part in _parts(getattr(self, name)))

    def asked(self) -> tuple[str, ...]:
        """Return what the model is asked, where the answer is a text."""
        return tuple(getattr(self, name) for name in self.ASKED)

    def answered(self) -> str:
        """Return the right answer, where it is a text."""
        return str(getattr(self, self.ANSWER))


def _parts(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (value or "",)


class Chunk(NamedTuple):
    """A piece of a document, at most a million characters, cut after a line or before a space if possible."""

    text: str
    ends: bool  # whether this is the last piece of its document

    def texts(self) -> tuple[str, ...]:
        """See `Example.texts`."""
        return (self.text,)


@dataclass(frozen=True, slots=True)
class Pair(Example):
    """A source text and its target text."""

    TEXTS, KEY, ASKED, ANSWER = ("source", "target"), ("source",), ("source",), "target"
    PAIRED = ("source", "target")
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Labelled(Example):
    """A text, or two texts that are read together, and its class."""

    TEXTS, KEY, NAMED = ("text", "pair"), ("text", "pair"), "label"
    PAIRED = ("text", "pair")
    text: str
    label: str
    pair: str | None = None

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`. A label may be a number or a truth value; 1.0 becomes "1"."""
        text = record.text(roles["text"]).strip()
        pair = record.text(roles["pair"]).strip() if "pair" in roles else None
        value = record.value(roles["label"])
        number = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
        if not (number or (isinstance(value, str) and value.strip())):
            raise InputError(
                f"{record.place}: the label in `{roles['label']}` must be text or a number, not "
                f"{shorten(str(value))}"
            )
        label = str(value).lower() if number else value.strip()
        label = label.partition(".")[0] if _WHOLE.fullmatch(label) else label
        return cls(text, label, pair) if text else None


@dataclass(frozen=True, slots=True)
class Tagged(Example):
    """The words of a sentence and one tag for each."""

    TEXTS, KEY, NAMED = ("words",), ("words",), "tags"
    words: tuple[str, ...]
    tags: tuple[str, ...]

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`."""
        words, tags = (record.words(roles[role]) for role in ("words", "tags"))
        refuse(len(words) != len(tags), f"{record.place} has {len(words)} words and {len(tags)} tags")
        return cls(words, tags) if words else None


@dataclass(frozen=True, slots=True)
class Question(Example):
    """A question whose answer stands in a context; questions on one context stay on one side of a split."""

    TEXTS, KEY, ASKED, ANSWER = ("question", "context"), ("context",), ("question", "context"), "answer"
    question: str
    context: str
    answer: str  # "": the context holds none
    start: int  # character of the context at which the answer begins; 0 where there is none

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`. Without a start, the answer is the first occurrence of its text."""
        question, context = record.text(roles["question"]).strip(), record.text(roles["context"])
        answer, start = next(_answers(record, roles), ("", 0))
        if not question or not context.strip():
            return None
        found = context.find(answer)
        start = found if start is None else start
        if start < 0 or context[start : start + len(answer)] != answer:
            where = f"at character {start} of the context, but at {found}" if found >= 0 else "in the context"
            raise InputError(f"{record.place}: the answer {shorten(answer)} is not {where}")
        return cls(question, context, answer, start)

    def lowered(self, which: Lowercase) -> Self:
        """See `Example.lowered`. Lowering may change lengths, so the start is counted again."""
        texts = self.question.lower(), self.context.lower(), self.answer.lower()
        return type(self)(*texts, start=len(self.context[: self.start].lower()))


def _answers(record: Record, roles: Mapping[str, str]) -> Iterator[tuple[str, int | None]]:
    """Yield the answers of a record, with their starts where given.

    A cell may hold one, a list or objects.
    """
    answers = record.cells.get(roles["answer"])
    starts = record.cells.get(roles.get("start", ""))
    for number, answer in enumerate(answers if isinstance(answers, list) else [answers]):
        start: Any = starts[number] if isinstance(starts, list) and number < len(starts) else starts
        text: Any = answer
        if isinstance(answer, dict):
            text, start = answer.get("text"), answer.get("answer_start")
        if text is None:
            continue
        if isinstance(start, str):  # CSV has only text
            start = start.strip().partition(".")[0] if _WHOLE.fullmatch(start.strip()) else start.strip()
            start = int(start) if start.isdecimal() and len(start) < 10 else start or None
        if not isinstance(text, str) or not (start is None or type(start) is int):
            given = shorten(f"{text}, {start}")
            raise InputError(f"{record.place}: an answer is text with an integer for its start, not {given}")
        yield (text, start) if text else ("", 0)


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures and the class number of each."""

    pixels: NDArray[np.uint8] | list[Path]  # N H W C; or the files, of pictures that a model prepares itself
    labels: NDArray[np.int64]  # N
    cropped: bool = False  # whether they were resized and cropped to one size

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return height, width and channels of pictures of one size."""
        assert not isinstance(self.pixels, list)
        height, width, channels = self.pixels.shape[1:]
        return height, width, channels

    def __len__(self) -> int:
        return len(self.labels)


Rows: TypeAlias = Iterable[Chunk] | Sequence[Example] | Images


@dataclass(frozen=True)
class Shape:
    """What the rows of a data set are, and the columns they are read from."""

    name: str
    row: type[Example] | None = None  # None: text, which is streamed in chunks, or images
    needed: tuple[str, ...] = ()  # roles of columns
    optional: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()  # roles that may stand in place of those needed
    lacking: str = "with an empty text"  # what is said of rows that are left out

    @property
    def roles(self) -> tuple[str, ...]:
        """Return all roles of columns."""
        return self.needed + self.instead + self.optional

    @property
    def asks(self) -> str:
        """Return the roles that a file must have, in words."""
        ways = filter(None, (self.needed, self.instead))
        return ", or ".join(" and ".join(roles) for roles in ways)

    def complete(self, found: Iterable[str]) -> bool:
        """Return True if roles are enough to read rows from."""
        known = set(found)
        return set(self.needed) <= known or (bool(self.instead) and set(self.instead) <= known)


TEXT = Shape("text", needed=("text",))
PAIRS = Shape("pairs", Pair, ("source", "target"))
LABELS = Shape("labels", Labelled, ("text", "label"), ("pair",))
TAGS = Shape("tags", Tagged, ("words", "tags"))
QUESTIONS = Shape("questions", Question, ("question", "context", "answer"), ("start",))
IMAGES = Shape("images")


@dataclass(frozen=True)
class Corpus:
    """The examples of a data set: those to train on and those to validate on.

    A split made here puts no example on both sides. A note says where validation data of the user's repeats
    training data.
    """

    shape: str
    train: Rows  # text: chunks, read from the files at each iteration; images: `Images`; otherwise a list
    validation: Rows
    labels: tuple[str, ...]  # names of the classes or tags, sorted (tags: O first); () where there are none
    fingerprint: str  # hash of the content and of everything in the plan that changes the examples
    notes: tuple[str, ...]  # one sentence for each guess
    size: int  # bytes of the training text; 0 for images
