"""What `/v1/responses` takes: items and bodies of OpenAI's Responses API, and the chat that they come to."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from clearhead.errors import refuse
from clearhead.hub.tokens.chat import REASONING, ChatTemplate
from clearhead.hub.tokens.tools import MOST_TOOLS
from clearhead.run.serve.blocks import Caller, Name, call_of, chat_body, content_of, function_of, new_id
from clearhead.run.serve.protocol import (
    MOST_BEST,
    UNUSED,
    Body,
    ChatBody,
    Count,
    FewFields,
    Fields,
    Schema,
    Text,
    with_options,
)

# Items ------------------------------------------------------------------------------------------------------

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


def _typed(item: Any) -> Any:
    """Name the type of an item that a client may send without."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    return {**item, "type": "message" if "role" in item else "item_reference"}


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


# Requests ---------------------------------------------------------------------------------------------------


class FunctionTool(FewFields):
    """A function that may be called."""

    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: Fields | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class FunctionChoice(FewFields):
    """A function by its name."""

    type: Literal["function"]
    name: Name

    @property
    def named(self) -> dict[str, Any]:
        """The function as a chat names it."""
        return {"type": "function", "function": {"name": self.name}}


class AllowedTools(FewFields):
    """Those of the tools that may be called now."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=MOST_TOOLS)]


class TextFormat(FewFields):
    """How the text is written."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    given: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(FewFields):
    """What is said of the text of an answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(FewFields):
    """Whether, and how much, the model thinks before it answers."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None  # the reasoning itself is in the answer
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class CacheOptions(FewFields):
    """How long prompts are cached elsewhere; here it is as long as there is room."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    prewarm: Literal[False] | None = None


class EventOptions(FewFields):
    """What a stream holds besides the answer."""

    include_obfuscation: Literal[False] | None = None


LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # here reasoning is plain text, and is sent back as it is
    "file_search_call.results",  # the rest is about tools that are not served
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class InputBody(with_options(Body, but=("max_tokens",))):  # type: ignore[misc]
    """What a response begins with: `/v1/responses/input_tokens`."""

    unused: ClassVar = (*UNUSED, "prompt_cache_retention", "max_tool_calls")
    no_ops: ClassVar = {
        "access_programs": ({"cyber": "standard"},),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": ({"context_compression": "auto"}, {"context_compression": "disabled"}),
        "moderation": (),
        "personality": (),
        "prompt": (),
    }

    input: Text | Items | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FunctionChoice | AllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: Fields | None = None

    def chat(self, items: Sequence[dict[str, Any]], template: ChatTemplate) -> ChatBody:
        """Return the chat that this request comes down to, with the items of the whole conversation."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = first + messages_of(items, template)
        refuse(not messages, "input is empty: give it a text, or a message")
        tools = [function_of(tool.name, tool.description, tool.parameters) for tool in self.tools or ()]
        return chat_body(
            self,
            messages,
            chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            tools=tools or None,
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._format(),
            **self._stated(),
        )

    def _stated(self) -> dict[str, Any]:
        """Return further fields of the chat."""
        return {}

    def _choice(self) -> Any:
        """Return which tools may be called, as a chat says it."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            tools = [tool.named for tool in choice.tools]
            return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}
        return choice.named if isinstance(choice, FunctionChoice) else choice

    def _format(self) -> dict[str, Any] | None:
        """Return how the text is written, as a chat says it."""
        stated = None if self.text is None else self.text.format
        if stated is None:
            return None
        refuse(
            (stated.given is None) == (stated.type == "json_schema"),
            "text.format.schema belongs to the type json_schema, and that type to it",
        )
        if stated.type != "json_schema":
            return {"type": stated.type}
        return {
            "type": stated.type,
            "json_schema": {"name": stated.name or "answer", "schema": stated.given, "strict": stated.strict},
        }


class ResponsesBody(InputBody):
    """`/v1/responses`."""

    input: Text | Items
    include: Annotated[list[Include], Field(max_length=100)] | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    prompt_cache_options: CacheOptions | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_BEST)] | None = None
    cache_salt: Annotated[str, Field(max_length=1000)] | None = None

    @property
    def best(self) -> int | None:
        """How many of the best tokens to report; None: report nothing."""
        return self.top_logprobs or (0 if LOGPROBS in (self.include or ()) else None)

    def _stated(self) -> dict[str, Any]:
        report = {} if self.best is None else {"logprobs": True, "top_logprobs": self.best}
        return {"max_completion_tokens": self.max_output_tokens, **report}
