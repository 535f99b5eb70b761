"""What the routes take, in the words of OpenAI's API; an unknown field is refused by name.

The options of a generation come from their declaration, `run/generate/request.py`.
"""

import json
import math
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from clearhead.errors import ClearheadError, InputError, RequestError, hints_of, refuse, refusing
from clearhead.hub.tokens.tools import AUTO, MOST_TOOLS, NONE, tools_of
from clearhead.learn.tasks.generation import ToolChoice
from clearhead.run.generate.grammar import COMBINED
from clearhead.run.generate.request import BIAS, CONSTRAINTS, DEFAULTS, OPTIONS, Request

MOST_CHOICES = 16  # of one prompt
MOST_INPUTS = 2048  # prompts or texts of one request
MOST_BEST = 20  # tokens reported at each step
MOST_FIELDS = 100  # of an object; each that is unknown would be a line of the refusal
Id = Annotated[int, Field(ge=0, lt=2**31)]
# The first wrong one refuses all: millions of refusals take minutes.
Ids = Annotated[list[Id], Field(fail_fast=True)]
Names = Annotated[list[Annotated[str, Field(max_length=200)]], Field(fail_fast=True)]
Text = Annotated[str, Field(max_length=1_000_000)]
Fields = Annotated[dict[str, Any], Field(max_length=MOST_FIELDS)]
Schema = dict[str, Any] | bool | str
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Stop], Field(max_length=16)]
Count = Annotated[int, Field(ge=0, lt=2**31)]  # of tokens, and the like


class FewFields(BaseModel):
    """An object whose fields are all known, and few; "5", true and 5.0 are no integers, as with OpenAI."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"{len(value)} fields: at most {MOST_FIELDS}")
        return value


# Fields of OpenAI's API that change nothing in an answer: any value is taken.
UNUSED: tuple[str, ...] = (
    *("user", "metadata", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),  # all prefixes are cached
)
# Fields that are not served, with the values (and null) that ask for nothing: these are taken.
NO_OPS: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "lora_int_id": (),
    "max_completion_tokens": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Options of `generate` that HTTP does not have, at their defaults.
    **{name: (DEFAULTS[name],) for name, stated in OPTIONS.items() if not stated.http},
}


class Body(FewFields):
    """The base of every body; what a client sends and asks for nothing is left out."""

    unused: ClassVar[tuple[str, ...]] = UNUSED
    no_ops: ClassVar[Mapping[str, tuple[Any, ...]]] = NO_OPS

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        unused = [name for name in body if name in cls.unused and name not in cls.model_fields]
        no_ops = cls.no_ops.keys() - cls.model_fields.keys()
        unused += [name for name in no_ops if name in body and body[name] in (None, *cls.no_ops[name])]
        kept = {name: value for name, value in body.items() if name not in unused}
        if kept.get("top_k") == -1:  # all tokens, in vLLM's words
            kept["top_k"] = 0
        return kept


def no_op_values(name: str) -> tuple[Any, ...] | None:
    """Return the values of a field that ask for nothing; None for one that no body knows."""
    bodies: list[type[Body]] = [Body]
    for body in bodies:
        if name in body.no_ops and name not in body.model_fields:
            return body.no_ops[name]
        bodies += body.__subclasses__()
    return None


class StreamOptions(FewFields):
    """What a stream holds besides the text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None  # events are not padded


def closed(schema: Any) -> Any:
    """Return a JSON schema whose objects take no other properties than they name, unless they say so.

    Objects described in several parts (`allOf`, `anyOf` or `oneOf` next to `properties`) stay as they are.
    """
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in result.keys() & {"properties", "$defs", "definitions"}:
        if isinstance(result[name], dict):
            result[name] = {key: closed(each) for key, each in result[name].items()}
    if "properties" in result:
        return result if result.keys() & set(COMBINED) else {"additionalProperties": False, **result}
    return result | {
        name: closed(result[name]) for name in result.keys() & {"items", "prefixItems", "anyOf", "oneOf"}
    }


class NamedSchema(FewFields):
    """A JSON schema in a response format; with `strict`, objects have the properties it names alone."""

    name: str
    description: str | None = None
    given: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(FewFields):
    """How the answer is written, in OpenAI's words."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(FewFields):
    """How the answer is written, in vLLM's words."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    grammar: str | None = None


MOST_BIASES = 10_000  # of one request


def _biases(value: Any) -> Any:
    """Return biases by number; a key of JSON is text."""
    if not isinstance(value, dict):
        return value
    wrong = next((key for key in value if not re.fullmatch(r"[0-9]{1,9}", str(key))), None)
    if wrong is not None:
        raise ValueError(f'"{wrong!s:.20}" is no id of a token, such as "50256"')
    if len(value) > MOST_BIASES:
        raise ValueError(f"{len(value)} tokens: at most {MOST_BIASES}")
    return {int(key): bias for key, bias in value.items()}


Bias = Annotated[float, Field(ge=BIAS.least, le=BIAS.most)]
JSON_TYPES: dict[str, Any] = {  # options whose JSON is not that of their Python type
    "stop": Stop | Stops,
    "stop_tokens": Annotated[list[Id], Field(max_length=64)],
    "json_schema": Schema,
    "suffix": Text,
    "logit_bias": Annotated[dict[int, Bias], BeforeValidator(_biases)],
}
OPENAI_DEFAULTS = {"temperature": 1.0}  # texts are drawn, as OpenAI's are


def with_options(base: type[BaseModel], but: Collection[str] = ()) -> Any:
    """Return a body with the options of a request that HTTP has, under their names in OpenAI's API.

    `but`: those that an API has in other words.
    """
    entries: dict[str, Any] = {}
    for name, stated in OPTIONS.items():
        hint, bounds = JSON_TYPES.get(name, hints_of(Request)[name]), stated.bounds
        if bounds is not None:
            limits: dict[str, Any] = {"gt" if bounds.above else "ge": bounds.least}
            limits |= {"le": bounds.most} if math.isfinite(bounds.most) else {}
            number = next((kind for kind in get_args(hint) if kind is not NoneType), hint)
            hint = Annotated[number, Field(**limits)]
        if stated.http and stated.http not in but:
            entries[stated.http] = (hint | None, Field(None, description=stated.help))
    return create_model("OptionsBody", __base__=base, __doc__="The options of a request.", **entries)


class GenerationBody(with_options(Body)):  # type: ignore[misc]
    """What every request for a text may say."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=1000)] | None = None
    inside: Names | None = None  # activations to see
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def constraint(self) -> dict[str, str]:
        """Return what the answer is held to, as an option of `generate`."""
        stated: list[tuple[str, Any]] = [
            (name, getattr(self, name)) for name in CONSTRAINTS if OPTIONS[name].http
        ]
        openai, vllm = self.response_format, self.structured_outputs
        if openai is not None:
            schema = None if openai.json_schema is None else openai.json_schema.given
            refuse(
                (schema is None) == (openai.type == "json_schema"),
                "response_format.json_schema belongs to the type json_schema, and that type to it",
            )
            stated.append(("json_schema", {"type": "object"} if openai.type == "json_object" else schema))
        if vllm is not None:
            choices = None if vllm.choice is None else "|".join(map(re.escape, vllm.choice))
            stated += [("json_schema", vllm.json_), ("regex", vllm.regex), ("regex", choices)]
            stated += [("grammar", vllm.grammar)]
            stated += [("json_schema", {"type": "object"})] if vllm.json_object else []
        given = [(name, value) for name, value in stated if value is not None]
        names = " and ".join(name for name, _ in given)
        refuse(len(given) > 1, f"{names} were given: an answer is held to one of them")
        with refusing("the schema cannot be read"):
            if openai is not None and openai.json_schema is not None and openai.json_schema.strict:
                given = [(name, closed(json.loads(v) if isinstance(v, str) else v)) for name, v in given]
            return {name: value if isinstance(value, str) else json.dumps(value) for name, value in given}

    def options(self) -> dict[str, Any]:
        """Return the options of `generate`, but for the seed, which every choice has its own of."""
        refuse(
            self.stream_options is not None and not self.stream,
            "stream_options without stream: true: leave them out",
        )
        named = {name: getattr(self, stated.http) for name, stated in OPTIONS.items() if stated.http}
        left_out = ("seed", *CONSTRAINTS)
        chosen = {name: value for name, value in named.items() if value is not None and name not in left_out}
        return OPENAI_DEFAULTS | chosen | self.constraint()

    def seeds(self, count: int) -> list[int]:
        """Return the seed of each choice."""
        first = secrets.randbits(62) if self.seed is None else self.seed
        return [(first + number) % 2**64 for number in range(count)]


class CompletionBody(GenerationBody):
    """`/v1/completions`."""

    prompt: (
        Text
        | Ids
        | Annotated[list[Text], Field(fail_fast=True)]
        | Annotated[list[Ids], Field(fail_fast=True)]
    )
    max_tokens: Count | None = None  # 0 with echo
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_BEST)] | None = None

    @property
    def best(self) -> int | None:
        """How many of the best tokens to report; None: report nothing."""
        return self.logprobs

    @property
    def candidates(self) -> int:
        """How many texts to generate for each prompt, of which the `n` most probable are given."""
        wanted, drawn = self.n or 1, self.best_of or self.n or 1
        refuse(drawn < wanted, f"best_of {drawn} is less than n {wanted}: raise best_of, or lower n")
        refuse(
            drawn > wanted and self.stream,
            f"best_of {drawn} with stream: which of them are the best is known at the end: leave stream out",
        )
        return drawn

    def prompts(self) -> list[str | list[int]]:
        """Return every prompt."""
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        prompts = [prompt] if single else list(prompt)
        empty = not prompts or not (all(prompts) or self.suffix)
        refuse(empty, "prompt is empty: give one token at least")
        refuse(len(prompts) > MOST_INPUTS, f"{len(prompts)} prompts: at most {MOST_INPUTS} in one request")
        return prompts


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class NamedFunction(FewFields):
    """The name of a function to call."""

    name: str


class NamedTool(FewFields):
    """A choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(FewFields):
    """Those of the tools that may be called now."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedChoice(FewFields):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Name a field of the request in what is refused."""
    try:
        yield
    except InputError as error:
        raise RequestError(str(error), param=field) from None


class ChatBody(GenerationBody):
    """`/v1/chat/completions`."""

    fits: ClassVar[bool] = False

    messages: Annotated[list[Fields], Field(min_length=1, max_length=10_000, fail_fast=True)]
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_BEST)] | None = None
    chat_template_kwargs: Fields | None = None
    tools: Annotated[list[Fields], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Field(max_length=40)] | None = None  # where the chat template takes it

    def choice_of_tools(self) -> ToolChoice:
        """Return the tools that may be called, and whether one must be."""
        with naming("tools"):
            return self._choice_of_tools()

    def _choice_of_tools(self) -> ToolChoice:
        choice, tools = self.tool_choice or AUTO, tools_of(self.tools or [])
        if isinstance(choice, AllowedChoice):
            allowed, known = {tool.function.name for tool in choice.allowed_tools.tools}, [*tools]
            tools, choice = [tool for tool in known if tool.name in allowed], choice.allowed_tools.mode
            unknown = ", ".join(sorted(allowed - {tool.name for tool in tools}))
            names = ", ".join(tool.name for tool in known) or "none"
            refuse(unknown, f"tool_choice allows {unknown}, and tools has {names}")
        name = choice if isinstance(choice, str) else choice.function.name
        refuse(name not in (AUTO, NONE) and not tools, f'tool_choice "{name}" without tools: give some')
        return ToolChoice(tools, name, self.parallel_tool_calls is not False)

    def checked_messages(self) -> list[dict[str, Any]]:
        """Return the messages; refuse a role that no chat has."""
        with naming("messages"):
            for number, message in enumerate(self.messages):
                role, roles = message.get("role"), ", ".join(ROLES)
                refuse(role not in ROLES, f"messages.{number}.role is {role!r:.60}: choose {roles}")
        return self.messages

    @property
    def best(self) -> int | None:
        """How many of the best tokens to report; None: report nothing."""
        refuse(self.top_logprobs and not self.logprobs, "top_logprobs without logprobs: true: leave it out")
        return (self.top_logprobs or 0) if self.logprobs else None


class FittedChatBody(ChatBody):
    """A chat whose answer may be shorter than `max_completion_tokens` where the context has no more room."""

    fits: ClassVar[bool] = True


class TextsBody(Body):
    """Texts to read: `input` is one or a list."""

    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS)]

    def texts(self) -> list[str]:
        """Return every text."""
        return [self.input] if isinstance(self.input, str) else self.input


TokenIds = Annotated[list[Id], Field(min_length=1, fail_fast=True)]


class EmbeddingsBody(Body):
    """`/v1/embeddings`; token ids are what the model reads, its special tokens included."""

    input: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
    )
    dimensions: Annotated[Count, Field(ge=1)] | None = None  # of a vector, its first; then of length 1 again
    encoding_format: Literal["float", "base64"] | None = None
    truncate: bool | Literal["NONE", "END"] | None = None  # cut a text that is too long; else it is refused
    prompt_name: Annotated[str, Field(max_length=1000)] | None = None

    def texts(self) -> list[str | list[int]]:
        """Return every text."""
        inputs: Any = self.input
        return [inputs] if isinstance(inputs, str) or isinstance(inputs[0], int) else inputs


class PairsBody(Body):
    """`/v1/rerank` and `/v1/score`: one text, and others to compare with it."""

    query: Text
    documents: Annotated[list[Text], Field(min_length=1, max_length=MOST_INPUTS)]
    top_n: Annotated[Count, Field(ge=1)] | None = None


Name = Annotated[str, Field(min_length=1, max_length=200)]


class LoadAdapterBody(Body):
    """`/v1/load_lora_adapter`, in vLLM's words; `model` is the one that the adapter belongs to."""

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool | None = None  # replace the adapter of this name


class UnloadAdapterBody(Body):
    """`/v1/unload_lora_adapter`."""

    lora_name: Name


class TokenizeBody(Body):
    """`/tokenize`."""

    prompt: Text
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """`/detokenize`."""

    tokens: Annotated[Ids, Field(max_length=1_000_000)]


def finish_reason(stop_reason: str) -> str:
    """Return OpenAI's word for why a text has ended."""
    return "stop" if stop_reason in ("eos", "stop") else "length"


# Errors -----------------------------------------------------------------------------------------------------


CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # by status, as OpenAI has them
KINDS = {  # by status, as Anthropic has them
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
MESSAGES = "/v1/messages"  # below it errors are told as Anthropic tells them


def error_body(error: BaseException, status: int = 400, path: str = "") -> dict[str, Any]:
    """Return an error as the clients of a path read it: OpenAI's, or Anthropic's."""
    mine = isinstance(error, ClearheadError)
    line = str(error) if mine else f"something went wrong: {type(error).__name__}"
    if path.startswith(MESSAGES):
        kind = KINDS.get(status, "invalid_request_error") if mine and status < 500 else "api_error"
        told = {"type": kind, "message": line}
        code = getattr(error, "code", None)
        return {"type": "error", "error": told | ({"details": {"error_code": code}} if code else {})}
    kind = "invalid_request_error" if mine else "server_error"
    param, code = getattr(error, "param", None), getattr(error, "code", CODES.get(status))
    return {"error": {"message": line, "type": kind, "param": param, "code": code}}
