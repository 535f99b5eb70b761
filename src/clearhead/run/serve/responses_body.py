"""What `/v1/responses` takes: a body of OpenAI's Responses API, and the chat that it comes to."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from clearhead.errors import refuse
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.hub.tokens.tools import MOST_TOOLS
from clearhead.run.serve.blocks import Name, chat_body, function_of
from clearhead.run.serve.items import Items, messages_of
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
    """What a stream holds beside the answer."""

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
        tools = [function_of(one.name, one.description, one.parameters) for one in self.tools or ()]
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
            tools = [one.named for one in choice.tools]
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
            "json_schema": {"name": stated.name or "answer", "schema": stated.given},
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
