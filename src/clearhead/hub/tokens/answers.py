"""Reading answers: a text, as it is generated, divided into reasoning, content and tool calls.

`ToolFormat` says how one model writes them. This file needs no PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from clearhead.hub.tokens.tools import CALL, HARMONY, RETURN, ToolCall, ToolFormat


class Part(NamedTuple):
    """What is new of an answer, in the order of its text."""

    kind: Literal[
        "content", "reasoning", "call", "arguments"
    ]  # "call": a new call begins, `text` is its name
    text: str
    call: int = 0  # the number of the call


@dataclass
class ReadAnswer:
    """An answer put together from its parts."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Sequence[Part], ids: Callable[[int], str]) -> ReadAnswer:
        """Put parts together; `ids` gives the id of each call."""
        texts = {kind: "".join(p.text for p in parts if p.kind == kind) for kind in ("content", "reasoning")}
        calls = [
            ToolCall(
                ids(part.call),
                part.text,
                "".join(p.text for p in parts if p.kind == "arguments" and p.call == part.call),
            )
            for part in parts
            if part.kind == "call"
        ]
        return cls(texts["content"], texts["reasoning"], calls)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, as OpenAI's API has it."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content or (None if self.calls else ""),
        }
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.entry for call in self.calls]
        return message


class AnswerParser:
    """Divides an answer into reasoning, content and calls, as its text grows.

    `calls`: the answer may have calls; else text that looks like one is content. `thinks`: the prompt ends
    within the reasoning. `special`: texts of special tokens that are no part of content.
    """

    def __init__(
        self, form: ToolFormat, calls: bool, thinks: bool = False, special: Sequence[str] = ()
    ) -> None:
        self.form, self.calls = form, calls
        own = {form.marker, *(form.thinking or ())}
        self._special = [text for text in special if text and text not in own]
        self._text, self._count = "", 0  # not read yet; calls so far
        self._said, self._fresh = False, True  # content was there; nothing was thought
        self._state = self._reasoning if thinks else self._start
        if form.harmony:
            self._state = self._header
        self._channel = ""
        self._json = JsonEnd()
        self._parts: list[Part] = []
        self._final = False

    def push(self, text: str) -> list[Part]:
        """Read more of an answer; return what is certain of it."""
        self._text += text
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[Part]:
        """Read what was held back, at the end of the answer."""
        self._final = True
        return self.push("")

    # Each state reads what it can of the text, and returns whether another look may find more.

    def _start(self) -> bool:
        """Reasoning, or what the answer says."""
        text = self._text.lstrip()
        if self.form.thinking is not None:
            opening = self.form.thinking[0]
            if text.startswith(opening):
                self._text, self._state = text[len(opening) :], self._reasoning
                return True
            if opening.startswith(text) and not self._final:
                return False
        self._state = self._content
        return True

    def _reasoning(self) -> bool:
        assert self.form.thinking is not None
        if self._fresh:
            self._text = self._text.lstrip()
        before, closing, after = self._text.partition(self.form.thinking[1])
        if closing:
            self._add("reasoning", before.rstrip())
            self._text, self._state = after, self._spaces
            return True
        sure = self._sure(self._text, [self.form.thinking[1]])
        self._fresh = self._fresh and not sure
        self._add("reasoning", sure)
        self._text = self._text[len(sure) :]
        return False

    def _spaces(self) -> bool:
        """White space between what is thought and what is said."""
        self._text = self._text.lstrip()
        self._state = self._content if self._text else self._spaces
        return bool(self._text)

    def _content(self) -> bool:
        marker = self.form.marker
        if self.calls and marker:
            before, found, _ = self._text.partition(marker)
            if found:
                self._say(before.rstrip())
                self._text, self._state = self._text[self._text.index(marker) :], self._head
                return True
        elif self.calls and not self._said:
            head, text = self.form.head, self._text.lstrip()
            if text.startswith(head):
                self._text, self._state = text, self._head
                return True
            if head.startswith(text) and not self._final:
                return False
        sure = self._sure(self._text, [marker] if self.calls and marker else [])
        self._say(sure)
        self._text = self._text[len(sure) :]
        return False

    def _head(self) -> bool:
        head = self.form.head
        if self._text.startswith(head):
            self._text, self._state = self._text[len(head) :], self._name
            return True
        if head.startswith(self._text) and not self._final:
            return False
        return self._rest()

    def _name(self) -> bool:
        name, middle, after = self._text.partition(self.form.middle)
        if not middle:
            if self._final:  # cut off within the name: no call
                self._text = ""
            return False
        self._add("call", name)
        self._text, self._state, self._json = after, self._arguments, JsonEnd()
        return True

    def _arguments(self) -> bool:
        size, ended = self._json.push(self._text)
        self._add("arguments", self._text[:size])
        self._text = self._text[size:]
        if not ended:
            return False
        self._count += 1
        self._state = self._header if self.form.harmony else self._after
        return True

    def _after(self) -> bool:
        """Another call, or the end of the calls."""
        more = self.form.close + self.form.between + self.form.open
        if self.form.several and self._text.startswith(more):
            self._text, self._state = self._text[len(more) :], self._name
            return True
        ending = self.form.close + self.form.end
        cut = self.form.several and more.startswith(self._text)  # within what begins another call
        if self._final or not (cut or ending.startswith(self._text)):
            whole = self._text.startswith(ending) and not cut
            self._text = self._text[len(ending) :] if whole else ""
            self._state = self._rest
            return bool(self._text)
        return False

    def _rest(self) -> bool:
        """Text that is no call after all, or comes after the calls."""
        self._state = self._rest
        sure = self._sure(self._text, [])
        self._say(sure)
        self._text = self._text[len(sure) :]
        return False

    # Harmony: messages of several channels, each with a header.

    def _header(self) -> bool:
        header, found, after = self._text.partition("<|message|>")
        if not found:
            if self._final:
                self._text = ""
            return False
        channel = header.partition(HARMONY)[2] or header
        recipient = re.search(r"to=functions\.([A-Za-z0-9_.-]+)", header)
        self._text = after
        if recipient and self.calls:
            self._add("call", recipient[1])
            self._state, self._json = self._arguments, JsonEnd()
        else:
            self._channel = "reasoning" if channel.strip().startswith("analysis") else "content"
            self._state = self._message
        return True

    def _message(self) -> bool:
        match = re.search(r"<\|(?:end|start|channel|return|call)\|>", self._text)
        kind: Literal["reasoning", "content"] = "reasoning" if self._channel == "reasoning" else "content"
        if match:
            self._add(kind, self._text[: match.start()])
            self._text, self._state = self._text[match.end() :], self._header
            return True
        sure = self._sure(self._text, ["<|end|>", "<|start|>", HARMONY, RETURN, CALL])
        self._add(kind, sure)
        self._text = self._text[len(sure) :]
        return False

    def _sure(self, text: str, markers: Sequence[str]) -> str:
        """Return the beginning of a text that no later one changes: a marker may begin at its end."""
        if self._final:
            return text
        size = len(text.rstrip()) if markers else len(text)
        for marker in (*markers, *self._special):
            held = next(
                (n for n in range(min(len(marker), len(text)), 0, -1) if text.endswith(marker[:n])), 0
            )
            size = min(size, len(text) - held)
        return text[: len(text[:size].rstrip())] if markers else text[:size]

    def _say(self, text: str) -> None:
        self._add("content", text)
        self._said = self._said or bool(text)

    def _add(self, kind: Literal["content", "reasoning", "call", "arguments"], text: str) -> None:
        for special in self._special if kind in ("content", "reasoning") else ():
            text = text.replace(special, "")
        if text or kind == "call":
            self._parts.append(Part(kind, text, self._count))


class JsonEnd:
    """Finds where an object of JSON ends, as its text grows."""

    def __init__(self) -> None:
        self.depth, self.quoted, self.escaped = 0, False, False

    def push(self, text: str) -> tuple[int, bool]:
        """Return how many characters belong to the object, and whether it has ended."""
        for place, letter in enumerate(text):
            if self.quoted:
                if self.escaped:
                    self.escaped = False
                elif letter == "\\":
                    self.escaped = True
                elif letter == '"':
                    self.quoted = False
            elif letter == '"':
                self.quoted = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return place + 1, True
        return len(text), False
