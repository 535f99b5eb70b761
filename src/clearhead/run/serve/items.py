"""The items of OpenAI's Responses API: what goes in, and the messages of a chat that they come to."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from clearhead.errors import refuse
from clearhead.hub.tokens.chat import REASONING, ChatTemplate
from clearhead.run.serve.blocks import Caller, Name, call_of, content_of, new_id
from clearhead.run.serve.protocol import FewFields, Fields, Text

MOST_ITEMS = 10_000  # of one request
Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(FewFields):
    """A text in a message, in the result of a call, or in reasoning."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Fields | None = None


class RefusalPart(FewFields):
    """What a model has answered instead."""

    type: Literal["refusal"]
    refusal: Text


Parts = Annotated[list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]], Field(fail_fast=True)]


class MessageItem(FewFields):
    """A message, of either side."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
    id: Name | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(FewFields):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text
    id: Name | None = None
    status: Status | None = None
    caller: Caller | None = None
    namespace: None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class ResultItem(FewFields):
    """What a function has returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Text | Parts
    id: Name | None = None
    status: Status | None = None
    name: Name | None = None
    caller: Caller | None = None
    namespace: None = None


class ReasoningItem(FewFields):
    """What a model thought before it answered."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: None = None
    status: Status | None = None


class ReferenceItem(FewFields):
    """An item of a response that is kept."""

    type: Literal["item_reference"]
    id: Name


def _typed(given: Any) -> Any:
    """Name the type of an item that a client may send without."""
    if not isinstance(given, dict) or given.get("type") is not None:
        return given
    return {**given, "type": "message" if "role" in given else "item_reference"}


Item = Annotated[
    MessageItem | CallItem | ResultItem | ReasoningItem | ReferenceItem, Field(discriminator="type")
]
Items = Annotated[
    list[Annotated[Item, BeforeValidator(_typed)]], Field(max_length=MOST_ITEMS, fail_fast=True)
]
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def plain_items(given: "str | list[Item]") -> list[dict[str, Any]]:
    """Return the input as items that are whole: each with an id, the content of a message as parts."""
    stated = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    items = []
    for item in stated:
        plain = item.model_dump(by_alias=True, exclude_none=True)
        if isinstance(item, MessageItem) and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            plain["content"] = [{"type": kind, "text": item.content}]
        if not isinstance(item, ReferenceItem):
            plain = {"id": new_id(PREFIXES[item.type]), "status": "completed", **plain}
        items.append(plain)
    return items


def _texts_of(content: str | list[dict[str, Any]] | None) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part.get("text", part.get("refusal", "")) for part in content or []]


def messages_of(items: Sequence[dict[str, Any]], template: ChatTemplate) -> list[dict[str, Any]]:
    """Return items as messages of a chat.

    What the assistant thought, said and called in a row is one message. Reasoning is left out where the
    template does not read it.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of functions, by the call
    thinks = template.reads(*REASONING)
    for item in items:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        kind = item["type"]
        if kind == "function_call_output":
            refuse(
                item["call_id"] not in names,
                f'input has a result of the call "{item["call_id"]:.100}" and no such call: send it before',
            )
            result = {"tool_call_id": item["call_id"], "name": names[item["call_id"]]}
            messages.append({"role": "tool", **result, "content": content_of(_texts_of(item["output"]))})
        elif kind == "message":
            content = content_of(_texts_of(item["content"]))
            if item["role"] == "assistant" and last is not None and last["content"] is None:
                last["content"] = content
            else:
                messages.append({"role": item["role"], "content": content})
        elif kind == "reasoning":
            text = "".join(_texts_of(item.get("content") or item.get("summary")))
            if text and thinks:
                messages.append({"role": "assistant", "content": None, "reasoning_content": text})
        else:
            if last is None:
                messages.append(last := {"role": "assistant", "content": None})
            call = call_of(item["call_id"], item["name"], item["arguments"])
            last.setdefault("tool_calls", []).append(call)
            names[item["call_id"]] = item["name"]
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages
