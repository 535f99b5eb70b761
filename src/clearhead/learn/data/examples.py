"""Examples: what files become before any token is counted.

Each class of examples knows the columns it is read from, its texts, its key and its labels, so that no caller
has to ask which class it holds.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.chat import ASSISTANT, ChatTemplate, answers
from clearhead.learn.data.tables import Record, shorten

Lowercase = bool | Literal["source", "target"]
_WHOLE = re.compile(r"-?[0-9]+\.0+")  # how spreadsheets and pandas write integers next to a missing value


class Example:
    """A row of a data set. A class names its fields with text; the rest follows."""

    TEXTS: ClassVar[tuple[str, ...]] = ()  # fields that hold text
    KEY: ClassVar[tuple[str, ...]] = ()  # those that the model is shown and that do not tell the answer
    PAIRED: ClassVar[tuple[str, ...]] = ()  # two fields with texts that may be swapped
    ASKED: ClassVar[tuple[str, ...]] = ()  # where a text is the answer: the fields that ask for it
    ANSWER: ClassVar[str] = ""  # and the field that holds it
    NAMED: ClassVar[str] = ""  # the field that holds a label or tags
    # How it is read from a table
    PLURAL: ClassVar[str] = ""  # what many of them are called
    NEEDED: ClassVar[tuple[str, ...]] = ()  # roles of columns
    OPTIONAL: ClassVar[tuple[str, ...]] = ()
    INSTEAD: ClassVar[tuple[str, ...]] = ()  # roles that may stand in place of those needed
    LACKING: ClassVar[str] = "with an empty text"  # what rows are that are left out
    __slots__ = ()

    @classmethod
    def roles(cls) -> tuple[str, ...]:
        """Return all roles of columns."""
        return cls.NEEDED + cls.INSTEAD + cls.OPTIONAL

    @classmethod
    def ordered(cls, columns: Mapping[str, str]) -> dict[str, str]:
        """Return the columns of this class's roles, in the order of the roles."""
        return {role: columns[role] for role in cls.roles() if role in columns}

    @classmethod
    def complete(cls, roles: Iterable[str]) -> bool:
        """Return True if these roles are enough to read rows from."""
        known = set(roles)
        return known.issuperset(cls.NEEDED) or (bool(cls.INSTEAD) and known.issuperset(cls.INSTEAD))

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


@dataclass(frozen=True, slots=True)
class Chunk(Example):
    """A chunk of a document, at most a million characters, cut after a line or before a space if possible."""

    PLURAL, TEXTS, NEEDED = "text", ("text",), ("text",)
    text: str
    ends: bool  # whether this is the last chunk of its document


@dataclass(frozen=True, slots=True)
class Pair(Example):
    """A source text and its target text."""

    PLURAL, KEY, ASKED, ANSWER = "pairs", ("source",), ("source",), "target"
    NEEDED = TEXTS = PAIRED = ("source", "target")
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Labelled(Example):
    """A text, or two texts that are read together, and its class."""

    PLURAL, NEEDED, OPTIONAL, NAMED = "labels", ("text", "label"), ("pair",), "label"
    TEXTS = KEY = PAIRED = ("text", "pair")
    text: str
    label: str
    pair: str | None = None

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`. A label may be a number or a truth value; 1.0 becomes "1"."""
        text, pair = cls._texts(record, roles)
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

    @property
    def input(self) -> str | tuple[str, str]:
        """The text, or both texts, as a model takes them."""
        return self.text if self.pair is None else (self.text, self.pair)

    @staticmethod
    def _texts(record: Record, roles: Mapping[str, str]) -> tuple[str, str | None]:
        text, pair = record.text(roles["text"]), record.text(roles["pair"]) if "pair" in roles else None
        return text.strip(), pair and pair.strip()


@dataclass(frozen=True, slots=True)
class Tagged(Example):
    """The words of a sentence and one tag for each."""

    PLURAL, NEEDED, NAMED = "tags", ("words", "tags"), "tags"
    TEXTS = KEY = ("words",)
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

    PLURAL, NEEDED, OPTIONAL = "questions", ("question", "context", "answer"), ("start",)
    KEY, ANSWER = ("context",), "answer"
    TEXTS = ASKED = ("question", "context")
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
        first = context.find(answer)
        start = first if start is None else start
        if start < 0 or context[start : start + len(answer)] != answer:
            where = f"at character {start} of the context, but at {first}" if first >= 0 else "in the context"
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
            shown = shorten(f"{text}, {start}")
            raise InputError(f"{record.place}: an answer is text with an integer for its start, not {shown}")
        yield (text, start) if text else ("", 0)


@dataclass(frozen=True, eq=False)
class Picture(Example):
    """One picture of `Images`."""

    PLURAL = "images"
    number: int
    pixels: NDArray[np.uint8]  # H W C
    label: int


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


RowType: TypeAlias = type[Example]
Rows: TypeAlias = Iterable[Chunk] | Sequence[Example] | Images


@dataclass(frozen=True)
class Corpus:
    """The examples of a data set: those to train on and those to validate on.

    A split made here puts no example on both sides. A note says where validation data of the user's repeats
    training data.
    """

    shape: str  # what its rows are, see `Example.PLURAL`
    train: Rows  # text: chunks, read from the files at each iteration; images: `Images`; otherwise a list
    validation: Rows
    labels: tuple[str, ...]  # names of the classes or tags, sorted (tags: O first); () where there are none
    fingerprint: str  # hash of the content and of everything in the plan that changes the examples
    notes: tuple[str, ...]  # one sentence for each choice
    size: int  # bytes of the training text; 0 for images


# Conversations and preferences ------------------------------------------------------------------------------


Messages = tuple[dict[str, Any], ...]
# Names of roles in ShareGPT's form -> ours.
ROLES = {
    **{"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "chatgpt": ASSISTANT},
    **{"bot": ASSISTANT, "model": ASSISTANT, "system": "system", "tool": "tool", "function": "tool"},
    **{"observation": "tool", "developer": "developer"},
}
FIELDS = ("weight", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")


class ChatExample(Example):
    """A row of messages."""

    MESSAGES: ClassVar[tuple[str, ...]]  # fields that hold messages
    __slots__ = ()

    def texts(self) -> tuple[str, ...]:
        """See `Example.texts`."""
        return _texts([message for name in self.MESSAGES for message in getattr(self, name)])

    def asked(self) -> tuple[str, ...]:
        """Return the last message before the first answer."""
        return self.key()[-1:]

    def lowered(self, which: Lowercase) -> Self:
        """See `Example.lowered`."""
        fields: Any = {name: _lowered(getattr(self, name)) for name in self.MESSAGES}
        return replace(self, **fields)  # type: ignore[type-var]

    def size(self) -> int:
        """See `Example.size`."""
        return sum(len(text.encode()) for text in self.texts())


@dataclass(frozen=True, slots=True)
class Conversation(ChatExample):
    """Messages in turn, of which those of the assistant are to be learned."""

    PLURAL, NEEDED, INSTEAD = "chats", ("messages",), ("prompt", "completion")
    OPTIONAL, LACKING = ("input", "system", "tools"), "without an answer to learn from"
    MESSAGES = ("messages",)
    messages: Messages
    tools: Any = None
    place: str = field(default="", compare=False)  # for messages

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`; None where there is no answer to learn from."""
        messages = _asked(record, roles)
        if "messages" in roles:
            messages += _messages(record, roles["messages"])
        else:
            messages += _messages(record, roles["completion"], ASSISTANT)
        return cls(messages, _tools(record, roles), record.place) if answers(messages) else None

    def rendered(self, template: ChatTemplate) -> list[str]:
        """Return the texts that the conversation is learned from."""
        return [text for text, _ in template.learned(self.messages, self.tools)]

    def key(self) -> tuple[str, ...]:
        """Return what is said before the first answer, see `Example.key`."""
        return _texts(self.messages[: answers(self.messages)[0]])


@dataclass(frozen=True, slots=True)
class Preference(ChatExample):
    """A prompt, the answer that was chosen, and the one that was rejected."""

    PLURAL, NEEDED = "preferences", ("chosen", "rejected")
    OPTIONAL, LACKING = ("prompt", "input", "system", "tools"), "without two different answers"
    MESSAGES = ("prompt", "chosen", "rejected")
    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: Any = None
    place: str = field(default="", compare=False)

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`; None where an answer is empty, or both are the same."""
        prompt = _asked(record, roles)
        chosen, rejected = (_messages(record, roles[role], ASSISTANT) for role in ("chosen", "rejected"))
        if not prompt:  # both hold the whole conversation
            same = next((n for n, (a, b) in enumerate(zip(chosen, rejected)) if a != b), len(chosen))
            prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        refuse(not prompt, f"{record.place} has two answers and nothing that they answer: add a prompt")
        turns = [answers((*prompt, *reply)) for reply in (chosen, rejected)]
        both = all(numbers and numbers[-1] >= len(prompt) for numbers in turns)
        different = both and chosen != rejected
        return cls(prompt, chosen, rejected, _tools(record, roles), record.place) if different else None

    def rendered(self, template: ChatTemplate) -> list[str]:
        """Return the texts of both conversations."""
        whole = ((*self.prompt, *answer) for answer in (self.chosen, self.rejected))
        return [text for messages in whole for text, _ in template.learned(messages, self.tools)]

    def key(self) -> tuple[str, ...]:
        """Return the prompt, see `Example.key`."""
        return _texts(self.prompt)


@dataclass(frozen=True, slots=True)
class Prompt(ChatExample):
    """A prompt whose answers are rewarded, and its row, which rewards read."""

    PLURAL, NEEDED, OPTIONAL, LACKING = "prompts", ("prompt",), ("input", "system"), "without a prompt"
    MESSAGES = ("prompt",)
    prompt: Messages
    columns: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`."""
        refuse(
            record.cells.get("tools"),
            f"{record.place} names tools: leave them out, and set grpo.tools to a file of functions",
        )
        prompt, columns = _asked(record, roles), dict[str, Any]()
        for name, cell in record.cells.items():
            outer, dot, inner = name.partition(".")
            if dot and isinstance(columns.setdefault(outer, {}), dict):  # an object, whose fields are cells
                columns[outer][inner] = cell
            else:
                columns[name] = cell
        return cls(prompt, columns) if any(_texts(prompt)) else None

    def key(self) -> tuple[str, ...]:
        """Return the prompt, see `Example.key`."""
        return _texts(self.prompt)


def _tools(record: Record, roles: Mapping[str, str]) -> Any:
    """Return the tools that may be called, as far as there are any."""
    return _parsed(record.cells.get(roles["tools"])) or None if "tools" in roles else None


def _asked(record: Record, roles: Mapping[str, str]) -> Messages:
    """Return the system message and the prompt, with what belongs to it, as far as there are any."""
    system, prompt, extra = (
        record.cells.get(roles[role]) if role in roles else None for role in ("system", "prompt", "input")
    )
    lead: Messages = ({"role": "system", "content": system},) if isinstance(system, str) and system else ()
    if prompt is None:
        return lead
    messages = _messages(record, roles["prompt"], "user")
    if isinstance(extra, str) and extra.strip() and isinstance(messages[-1]["content"], str):
        joined = f"{messages[-1]['content']}\n\n{extra.strip()}"
        messages = (*messages[:-1], {**messages[-1], "content": joined})
    return (*lead, *messages)


def _messages(record: Record, column: str, role: str | None = None) -> Messages:
    """Return the messages of a cell: a list of them or, where a `role` is given, a text."""
    value = _parsed(record.value(column)) if role is None else record.value(column)
    if isinstance(value, str) and role is not None:
        return ({"role": role, "content": value.strip()},)
    if not isinstance(value, list) or not value:
        form = "a list of messages" if role is None else "text, or a list of messages"
        raise InputError(f"{record.place}: `{column}` must be {form}, not {shorten(str(value))}")
    return tuple(_message(message, f"{record.place}: `{column}`.{n}") for n, message in enumerate(value))


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{place} must be an object with role and content, not {shorten(str(message))}")
    role, content = message.get("role"), message.get("content")
    if role is None and "from" in message:
        role, content = ROLES.get(str(message["from"]).lower()), message.get("value")
        refuse(role is None, f"{place}.from {message['from']!r:.40} is not known: use {', '.join(ROLES)}")
    refuse(not isinstance(role, str) or not role, f"{place}.role must be a text, such as user")
    text = isinstance(content, str) or (isinstance(content, list) and content)
    refuse(
        not text and not message.get("tool_calls"),
        f"{place}.content must be a text, not {shorten(str(content))}",
    )
    more = {name: message[name] for name in FIELDS if message.get(name) is not None}
    return {"role": role, "content": content if text else "", **more}


def _parsed(value: Any) -> Any:
    """Return a cell of a table that holds JSON as what it holds."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _texts(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    contents = (message["content"] for message in messages)
    return tuple(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False) for text in contents)


def _lowered(messages: Messages) -> Messages:
    return tuple(
        {**message, "content": message["content"].lower()} if isinstance(message["content"], str) else message
        for message in messages
    )
