"""`/v1/messages`, Anthropic's Messages API: its bodies, and a chat that is answered as blocks and events."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field

from clearhead.errors import RequestError, refuse
from clearhead.hub.tokens.chat import REASONING, ChatTemplate
from clearhead.hub.tokens.tools import MOST_TOOLS
from clearhead.run.serve.answers import ChatChoices
from clearhead.run.serve.blocks import (
    Block,
    Blocks,
    Caller,
    Chat,
    Name,
    Step,
    call_of,
    chat_body,
    content_of,
    event,
    function_of,
    new_id,
    whole_of,
)
from clearhead.run.serve.protocol import (
    MESSAGES,
    Body,
    ChatBody,
    Count,
    FewFields,
    Fields,
    FittedChatBody,
    Schema,
    Stops,
    Text,
    error_body,
    with_options,
)

# Messages ---------------------------------------------------------------------------------------------------


class TextBlock(FewFields):
    """A text."""

    type: Literal["text"]
    text: Text
    cache_control: Fields | None = None  # prompts are cached as long as there is room
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(FewFields):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: Text
    signature: str | None = None


class ToolUseBlock(FewFields):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Fields
    cache_control: Fields | None = None
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(FewFields):
    """What a tool has returned."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    cache_control: Fields | None = None
    toolset_name: None = None


Texts = Text | Annotated[list[TextBlock], Field(fail_fast=True)]


class SystemMessage(FewFields):
    """Instructions."""

    role: Literal["system"]
    content: Texts


class UserMessage(FewFields):
    """What the user says, and what tools have returned."""

    role: Literal["user"]
    content: (
        Text
        | Annotated[
            list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]], Field(fail_fast=True)
        ]
    )


class AssistantMessage(FewFields):
    """What the model has answered."""

    role: Literal["assistant"]
    content: (
        Text
        | Annotated[
            list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]],
            Field(fail_fast=True),
        ]
    )


Message = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Return a text, or text blocks, as the content of a chat's message."""
    if content is None or isinstance(content, str):
        return content or ""
    return content_of([block.text for block in content if isinstance(block, TextBlock)])


def messages_of(given: Sequence[Message], template: ChatTemplate) -> list[dict[str, Any]]:
    """Return messages as those of a chat: the result of a tool is a message of its own.

    Thinking is left out where the template does not read it.
    """
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of tools, by the call
    thinks = template.reads(*REASONING)
    for message in given:
        blocks: list[Any] = [] if isinstance(message.content, str) else list(message.content)
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        messages += [_result(block, names) for block in results]
        if results and len(results) == len(blocks):
            continue
        plain: dict[str, Any] = {"role": message.role, "content": _content(message.content)}
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        if thought and thinks:
            plain["reasoning_content"] = thought
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        names |= {block.id: block.name for block in calls}
        if calls:
            plain["content"] = plain["content"] or None
            plain["tool_calls"] = [call_of(call.id, call.name, json.dumps(call.input)) for call in calls]
        messages.append(plain)
    return messages


def _result(block: ToolResultBlock, names: dict[str, str]) -> dict[str, Any]:
    """Return what a tool has returned as a message; its text alone tells of an error."""
    refuse(
        block.tool_use_id not in names,
        f'messages has a tool_result of "{block.tool_use_id:.100}" and no such tool_use: send it before',
    )
    content = _content(block.content)
    if block.is_error and isinstance(content, str) and not content.lower().startswith("error"):
        content = f"Error: {content}"
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "name": names[block.tool_use_id],
        "content": content,
    }


# Requests ---------------------------------------------------------------------------------------------------


class ClientTool(FewFields):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: Fields
    strict: bool | None = None
    cache_control: Fields | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolChoice(FewFields):
    """Which tool is used."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(FewFields):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None  # a target: the template of a model has no place for it
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(FewFields):
    """A schema that the text is held to."""

    type: Literal["json_schema"]
    given: Annotated[Schema, Field(alias="schema")]


class OutputConfig(FewFields):
    """How the answer is written."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(with_options(Body, but=("max_tokens", "stop"))):  # type: ignore[misc]
    """`/v1/messages/count_tokens`."""

    unused: ClassVar = ("metadata", "service_tier", "cache_control", "user_profile_id", "workspace_id")
    # The second row is of the client's beta routes.
    no_ops: ClassVar[dict[str, tuple[Any, ...]]] = (
        {"container": (), "diagnostics": (), "inference_geo": (), "speed": ("standard",)}
        | dict.fromkeys(("context_management", "compaction", "billing_policy"), ())
        | {"mcp_servers": ([],), "fallbacks": ([],), "fallback_credit_token": ()}
    )

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[ClientTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Fields | None = None
    # Of the beta routes; their clients go on without where it is refused so.
    thread: Annotated[Fields | None, Field(json_schema_extra={"refused": True})] = None

    def chat(self, template: ChatTemplate, **more: Any) -> ChatBody:
        """Return the chat that this request comes down to."""
        if self.thread is not None:
            line = "thread: conversations are not kept here: leave it out, and send all messages"
            raise RequestError(line, "thread_unsupported_request", param="thread")
        refuse(
            self.messages[-1].role == "assistant",
            "the last of messages is the assistant's, which is not continued: end with one of the user's",
        )
        system = [] if not self.system else [{"role": "system", "content": _content(self.system)}]
        tools, choice = self.tools or [], self.tool_choice
        one_call = choice is not None and choice.disable_parallel_tool_use
        schema = None if self.output_config is None else self.output_config.format
        return chat_body(
            self,
            system + messages_of(self.messages, template),
            FittedChatBody,
            tools=[function_of(tool.name, tool.description, tool.input_schema) for tool in tools] or None,
            tool_choice=None if choice is None else _choice(choice),
            parallel_tool_calls=False if one_call else None,
            response_format=None if schema is None else _format(schema),
            **self._thinking(template),
            **more,
        )

    def _thinking(self, template: ChatTemplate) -> dict[str, Any]:
        """Return how much to think, as a chat says it."""
        effort = None if self.output_config is None else self.output_config.effort
        if effort == "high" and not template.reads("reasoning_effort"):
            effort = None  # it is what Anthropic's models do by default
        kwargs = self.chat_template_kwargs or {}
        switch = template.reads("enable_thinking")
        if self.thinking is not None:
            refuse(
                self.thinking.type == "enabled" and not (switch or template.reads("think", *REASONING)),
                "thinking: this model does not think before it answers: leave it out",
            )
            wanted = self.thinking.type != "disabled"
            kwargs = ({"enable_thinking": wanted} if switch else {}) | kwargs
        return {"reasoning_effort": effort, "chat_template_kwargs": kwargs or None}


class MessagesBody(CountBody):
    """`/v1/messages`."""

    max_tokens: Annotated[Count, Field(ge=1)]
    stop_sequences: Stops | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1000)] | None = None


def _choice(choice: ToolChoice) -> Any:
    """Return which tool is used, as a chat says it."""
    refuse(
        (choice.type == "tool") == (choice.name is None),
        "tool_choice.name belongs to the type tool, and that type to it",
    )
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _format(stated: OutputFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": stated.given}}


# Answers ----------------------------------------------------------------------------------------------------

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {  # by the kind of a block: the type of what is new of it, and its field
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class Answer:
    """A message as it grows: its content blocks, and the events that tell of them."""

    def __init__(self, body: MessagesBody, choices: ChatChoices) -> None:
        self.body, self.choices = body, choices
        self.id, self.blocks = new_id("msg"), Blocks(choices)
        self.omits = body.thinking is not None and body.thinking.display == "omitted"

    async def whole(self, request: Request) -> dict[str, Any]:
        """Wait for the answer, as long as the client does; return the message."""
        await self.choices.finish(request)
        for _ in self.blocks.add(whole_of(self.choices)):
            pass
        content = [self._block(block, block.text) for block in self.blocks.blocks]
        return self._message(content) | self._ended() | {"usage": self._usage()}

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events, as they come."""
        try:
            yield event("message_start", message=self._message([]) | {"usage": self._usage()})
            yield event("ping")
            async for update in self.choices.follow():
                for step in self.blocks.add(update):
                    for told in self._told(step):
                        yield told
            yield event("message_delta", delta=self._ended(), usage=self._usage())
            yield event("message_stop")
        except Exception as error:
            yield event("error", error=error_body(error, path=MESSAGES)["error"])
        finally:
            self.choices.cancel()

    def _told(self, step: Step) -> Iterator[str]:
        """Yield the event of what happens to a block."""
        number = step.block.number
        if step.what == "start":
            yield event("content_block_start", index=number, content_block=self._block(step.block, ""))
        elif step.what == "stop":
            yield event("content_block_stop", index=number)
        elif not (self.omits and step.block.kind == "reasoning"):
            kind, name = DELTAS[step.block.kind]
            yield event("content_block_delta", index=number, delta={"type": kind, name: step.text})

    def _block(self, block: Block, text: str) -> dict[str, Any]:
        """Return a content block with so much of its text."""
        if block.kind == "call":
            arguments = block.arguments() if text else {}
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": "" if self.omits else text, "signature": ""}
        return {"type": "text", "text": text}

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.choices.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            **self.choices.cited,
        }

    def _ended(self) -> dict[str, Any]:
        """Return why the answer has ended."""
        stream, sequence = self.choices.seqs[0].stream, None
        reason = REASONS[self.choices.finish_reason(0)]
        if reason == "max_tokens" and self.choices.options["max_new_tokens"] < self.body.max_tokens:
            reason = "model_context_window_exceeded"
        stopped = None if stream is None else stream.stopped_by
        if reason == "end_turn" and stopped in (self.body.stop_sequences or ()):
            reason, sequence = "stop_sequence", stopped
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """Return the tokens: those of the prompt that were cached are counted apart."""
        usage = self.choices.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thought = usage.get("completion_tokens_details", {}).get("reasoning_tokens")
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            **({"output_tokens_details": {"thinking_tokens": thought}} if thought else {}),
        }


# Routes -----------------------------------------------------------------------------------------------------


def model_card(name: str, created: int, length: int) -> dict[str, Any]:
    """Return a model as Anthropic's clients read it."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


def add_messages(app: FastAPI, chat: Chat) -> None:
    """Add the routes below /v1/messages."""

    @app.post("/v1/messages")
    async def create(body: MessagesBody, request: Request) -> Response:
        stop = body.stop_sequences or None
        choices = await chat.begin(body.chat(chat.template(body.model), stop=stop), request)
        answer = Answer(body, choices)
        if body.stream:
            return StreamingResponse(answer.stream(), media_type="text/event-stream")
        return JSONResponse(await answer.whole(request))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> Any:
        tokens, _ = await chat.count(body.chat(chat.template(body.model)))
        return {"input_tokens": tokens}
