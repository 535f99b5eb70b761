"""An answer as blocks: text, reasoning and calls of tools.

`/v1/responses` and `/v1/messages` tell where each block begins and ends, and both ask for the chat that a
request comes down to: what they share is here.
"""

import json
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.run.generate.request import OPTIONS
from clearhead.run.serve.answers import ChatChoices, LogprobReport, Update
from clearhead.run.serve.protocol import Body, ChatBody, FewFields

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Kind = Literal["content", "reasoning", "call"]


class Caller(FewFields):
    """Who has called a function: the model itself."""

    type: Literal["direct"]


@dataclass
class Block:
    """A part of an answer that is of one kind."""

    kind: Kind
    number: int  # its place in the answer
    id: str  # of a call the one that its result names, of another block its random part
    name: str = ""  # of the function that is called
    text: str = ""  # so far; of a call its arguments
    whole: bool = True  # False: it was cut where the answer was

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a call; those that were cut are none."""
        try:
            value = json.loads(self.text or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class Step(NamedTuple):
    """What happens to a block: it starts, grows by a text, or stops."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of the one choice of an answer, as they come."""

    def __init__(self, choices: ChatChoices) -> None:
        self.choices = choices
        self.blocks: list[Block] = []

    def add(self, update: Update) -> Iterator[Step]:
        """Add what is new of the answer; yield what happens. An answer has one block at least."""
        for part in self.choices.parts(0, update.text, update.ended):
            if part.kind == "arguments":
                yield from self._grow("call", part.text)
            elif part.kind == "call":
                yield from self._start("call", self.choices.call_id(0, part.call), part.text)
            elif part.text:
                yield from self._grow(part.kind, part.text)
        if update.ended:
            if not self.blocks:
                yield from self._start("content")
            self.blocks[-1].whole = self.choices.finish_reason(0) != "length"
            yield Step("stop", self.blocks[-1])

    def _grow(self, kind: Kind, text: str) -> Iterator[Step]:
        if not self.blocks or self.blocks[-1].kind != kind:
            yield from self._start(kind)
        self.blocks[-1].text += text
        yield Step("delta", self.blocks[-1], text)

    def _start(self, kind: Kind, id: str = "", name: str = "") -> Iterator[Step]:
        if self.blocks:
            yield Step("stop", self.blocks[-1])
        self.blocks.append(Block(kind, len(self.blocks), id or uuid.uuid4().hex, name))
        yield Step("start", self.blocks[-1])


def whole_of(choices: ChatChoices) -> Update:
    """Return all of an answer that has ended, as one update."""
    result = choices.seqs[0].wait(0)
    return Update(0, result.text or "", len(result.ids), True)


class TextLogprobs:
    """The log-probabilities of an answer's tokens, as those of the texts that it is divided into.

    What stands between these texts, as markers of calls do, belongs to none of them.
    """

    def __init__(self, choices: ChatChoices) -> None:
        self.report = LogprobReport(choices.engine.m, choices.seqs[0], True, None)
        self.text, self.at = "", 0  # the answer so far, and how much of it was told
        self.waiting: list[tuple[int, dict[str, Any]]] = []  # tokens that were not told, by where they begin
        self.next = 0  # where the next token begins

    def read(self, update: Update) -> None:
        """Read what is new of the answer."""
        self.text += update.text
        found = self.report.next(update.count, len(self.text), update.ended)
        for entry in [] if found is None else found["content"]:
            self.waiting.append((self.next, entry))
            self.next += len(entry["token"])

    def of(self, text: str) -> list[dict[str, Any]]:
        """Return the tokens of the next text."""
        begin = self.text.find(text, self.at)
        if begin < 0:  # it was not written so
            return []
        self.at = begin + len(text)
        before = [entry for entry in self.waiting if entry[0] < self.at]
        self.waiting = self.waiting[len(before) :]
        return [entry for start, entry in before if start >= begin or start + len(entry["token"]) > begin]


@dataclass(frozen=True)
class Chat:
    """What a server does for the routes that come down to a chat."""

    begin: Callable[[ChatBody, Request], Awaitable[ChatChoices]]  # admit, encode and submit
    count: Callable[[ChatBody], Awaitable[tuple[int, int]]]  # the tokens of its prompt, and how many fit
    template: Callable[[str | None], ChatTemplate]  # of a model by its name


def chat_body(
    body: Body, messages: list[dict[str, Any]], kind: type[ChatBody] = ChatBody, /, **fields: Any
) -> ChatBody:
    """Return the chat that a request of another API comes down to: with its options, and these fields."""
    names = {"model", "stream", "cache_salt", *(stated.http for stated in OPTIONS.values() if stated.http)}
    given = {name: getattr(body, name, None) for name in names} | fields
    try:
        return kind(messages=messages, **{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        wrong = [{**mistake, "loc": ("body", *mistake["loc"])} for mistake in error.errors()]
        raise RequestValidationError(wrong) from None


def function_of(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a tool as `/v1/chat/completions` takes it."""
    stated = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": {name: value for name, value in stated.items() if value is not None},
    }


def content_of(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return texts as the content of a chat's message: one text, or several parts."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def call_of(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call as `/v1/chat/completions` takes it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def new_id(kind: str) -> str:
    """Return a new id."""
    return f"{kind}_{uuid.uuid4().hex}"


def event(kind: str, **fields: Any) -> str:
    """Return a server-sent event that has its kind as its name, too."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
