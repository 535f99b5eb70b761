"""Conversations and preferences, in the forms in which files hold them.

`messages` (role, content), ShareGPT's `conversations` (from, value), prompt and completion, instruction with
input and output: all become a `Conversation`. A `Preference` has two answers to one prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.chat import ASSISTANT, ChatTemplate, answers
from clearhead.learn.data.examples import Example, Lowercase, Shape
from clearhead.learn.data.tables import Record, shorten

Messages = tuple[dict[str, Any], ...]
# Names of roles in ShareGPT's form -> ours.
ROLES = {
    **{"human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "chatgpt": ASSISTANT},
    **{"bot": ASSISTANT, "model": ASSISTANT, "system": "system", "tool": "tool", "function": "tool"},
    **{"observation": "tool", "developer": "developer"},
}
FIELDS = ("weight", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Conversation(Example):
    """Messages in turn, of which those of the assistant are to be learned."""

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

    def texts(self) -> tuple[str, ...]:
        """See `Example.texts`."""
        return _texts(self.messages)

    def rendered(self, template: ChatTemplate) -> list[str]:
        """Return the texts that the conversation is learned from."""
        return [text for text, _ in template.learned(self.messages, self.tools)]

    def key(self) -> tuple[str, ...]:
        """Return what is said before the first answer, see `Example.key`."""
        return _texts(self.messages[: answers(self.messages)[0]])

    def asked(self) -> tuple[str, ...]:
        """Return the last message before the first answer."""
        return self.key()[-1:]

    def lowered(self, which: Lowercase) -> Self:
        """See `Example.lowered`."""
        return type(self)(_lowered(self.messages), self.tools, self.place)

    def size(self) -> int:
        """See `Example.size`."""
        return sum(len(text.encode()) for text in self.texts())


@dataclass(frozen=True, slots=True)
class Preference(Example):
    """A prompt, the answer that was chosen, and the one that was rejected."""

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
        whole = [answers((*prompt, *given)) for given in (chosen, rejected)]
        both = all(found and found[-1] >= len(prompt) for found in whole)
        different = both and chosen != rejected
        return cls(prompt, chosen, rejected, _tools(record, roles), record.place) if different else None

    def texts(self) -> tuple[str, ...]:
        """See `Example.texts`."""
        return _texts((*self.prompt, *self.chosen, *self.rejected))

    def rendered(self, template: ChatTemplate) -> list[str]:
        """Return the texts of both conversations."""
        whole = ((*self.prompt, *answer) for answer in (self.chosen, self.rejected))
        return [text for messages in whole for text, _ in template.learned(messages, self.tools)]

    def key(self) -> tuple[str, ...]:
        """Return the prompt, see `Example.key`."""
        return _texts(self.prompt)

    def asked(self) -> tuple[str, ...]:
        """Return the last message of the prompt."""
        return self.key()[-1:]

    def lowered(self, which: Lowercase) -> Self:
        """See `Example.lowered`."""
        prompt, chosen, rejected = map(_lowered, (self.prompt, self.chosen, self.rejected))
        return type(self)(prompt, chosen, rejected, self.tools, self.place)

    def size(self) -> int:
        """See `Example.size`."""
        return sum(len(text.encode()) for text in self.texts())


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
    asked = _messages(record, roles["prompt"], "user")
    if isinstance(extra, str) and extra.strip() and isinstance(asked[-1]["content"], str):
        joined = f"{asked[-1]['content']}\n\n{extra.strip()}"
        asked = (*asked[:-1], {**asked[-1], "content": joined})
    return (*lead, *asked)


def _messages(record: Record, column: str, role: str | None = None) -> Messages:
    """Return the messages of a cell: a list of them or, where a `role` is given, a text."""
    value = _parsed(record.value(column)) if role is None else record.value(column)
    if isinstance(value, str) and role is not None:
        return ({"role": role, "content": value.strip()},)
    if not isinstance(value, list) or not value:
        form = "a list of messages" if role is None else "text, or a list of messages"
        raise InputError(f"{record.place}: `{column}` must be {form}, not {shorten(str(value))}")
    return tuple(_message(one, f"{record.place}: `{column}`.{n}") for n, one in enumerate(value))


def _message(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InputError(f"{place} must be an object with role and content, not {shorten(str(given))}")
    role, content = given.get("role"), given.get("content")
    if role is None and "from" in given:
        role, content = ROLES.get(str(given["from"]).lower()), given.get("value")
        refuse(role is None, f"{place}.from {given['from']!r:.40} is not known: use {', '.join(ROLES)}")
    refuse(not isinstance(role, str) or not role, f"{place}.role must be a text, such as user")
    text = isinstance(content, str) or (isinstance(content, list) and content)
    refuse(
        not text and not given.get("tool_calls"),
        f"{place}.content must be a text, not {shorten(str(content))}",
    )
    more = {name: given[name] for name in FIELDS if given.get(name) is not None}
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
    found = (message["content"] for message in messages)
    return tuple(one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in found)


def _lowered(messages: Messages) -> Messages:
    return tuple(
        {**one, "content": one["content"].lower()} if isinstance(one["content"], str) else one
        for one in messages
    )


CHATS = Shape(
    "chats",
    Conversation,
    ("messages",),
    ("input", "system", "tools"),
    instead=("prompt", "completion"),
    lacking="without an answer to learn from",
)
PREFERENCES = Shape(
    "preferences",
    Preference,
    ("chosen", "rejected"),
    ("prompt", "input", "system", "tools"),
    lacking="without two different answers",
)
