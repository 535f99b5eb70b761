"""Tool calls as text: what a model is shown of its tools, how it writes a call, and how that is read back.

A chat template says itself how a call is written: it is rendered with a call of known name and arguments,
and what stands around them is the format (`ToolFormat.probed`). So Hermes, Qwen, Llama 3, Mistral, DeepSeek
and our own templates need no table of models. gpt-oss writes channels instead (`HARMONY`). A template that
knows of no tools gets them as text, and calls are JSON between <tool_call> tags (`without_tools`).

`AnswerParser` (answers.py) reads what was written. This file needs no PyTorch.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import re
import secrets
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from clearhead.errors import InputError, MissingExtraError, first_line, refuse

Message = Mapping[str, Any]
MOST_TOOLS = 128  # of one request
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
AUTO, REQUIRED, NONE = "auto", "required", "none"  # choices of a tool; any other one is a tool's name

# Tools ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)  # the JSON schema of its arguments

    def __post_init__(self) -> None:
        refuse(
            not isinstance(self.name, str) or not NAME.fullmatch(self.name),
            f"the tool name {self.name!r:.80} is not one: use up to 64 letters, digits, _, - and dots",
        )
        refuse(
            not isinstance(self.parameters, Mapping) or self.parameters.get("type", "object") != "object",
            f"parameters of the tool {self.name} must be a JSON schema of type object",
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of arguments: no other fields than those that are named, unless it says so."""
        closed = {} if "additionalProperties" in self.parameters else {"additionalProperties": False}
        return {"type": "object", "properties": {}, **closed, **self.parameters}

    @property
    def entry(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's API have it."""
        parameters = {"type": "object", "properties": {}, **self.parameters}
        described = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": described}


def tools_of(functions: Sequence[Any]) -> list[Tool]:
    """Return tools from entries as OpenAI's API has them, or from typed Python functions with docstrings."""
    refuse(
        not isinstance(functions, list | tuple),
        "tools must be a list, each a function or an entry of OpenAI's API",
    )
    refuse(len(functions) > MOST_TOOLS, f"{len(functions)} tools: at most {MOST_TOOLS}")
    tools = [_tool(number, described) for number, described in enumerate(functions)]
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    refuse(twice, f'two tools are called "{twice}": give each another name')
    return tools


def _tool(number: int, given: Any) -> Tool:
    if isinstance(given, Tool):
        return given
    if callable(given):
        return Tool(given.__name__, inspect.getdoc(given) or "", parameters_of(given))
    refuse(not isinstance(given, Mapping), f"tools.{number} must be an object with a function")
    kind = given.get("type", "function")
    refuse(
        kind != "function", f'tools.{number} is of type "{kind!s:.40}": functions alone can be called here'
    )
    function = given.get("function", given)
    refuse(not isinstance(function, Mapping), f"tools.{number}.function must be an object with a name")
    known = (
        ("type", "function")
        if "function" in given
        else ("type", "name", "description", "parameters", "strict")
    )
    unknown = [name for name in given if name not in known]
    unknown += [
        name for name in function if name not in ("type", "name", "description", "parameters", "strict")
    ]
    refuse(
        unknown, f'"tools.{number}.{unknown[0] if unknown else ""}" is not a field of a tool: leave it out'
    )
    description = function.get("description") or ""
    refuse(not isinstance(description, str), f"tools.{number}: description must be a text")
    return Tool(function.get("name", ""), description, function.get("parameters") or {})


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a Python function's arguments, from its types and defaults."""
    try:
        from pydantic import PydanticUserError, TypeAdapter
        from pydantic.json_schema import GenerateJsonSchema
    except ImportError:
        raise MissingExtraError("functions as tools need pydantic: pip install 'clearhead[serve]'") from None

    class Untitled(GenerateJsonSchema):
        """Titles only repeat the names, and the model would have to read them."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for parameter in inspect.signature(function).parameters.values():
        refuse(
            parameter.annotation is inspect.Parameter.empty or parameter.kind not in named,
            f"the parameter {parameter.name} of the tool {function.__name__} needs a name and a type, "
            "such as city: str, and no / or * that keeps it from being given by name",
        )
    try:
        return TypeAdapter[Any](function).json_schema(schema_generator=Untitled)  # type: ignore[arg-type]
    except (PydanticUserError, NameError) as error:
        line = first_line(error).partition(". ")[0]
        raise InputError(f"the tool {function.__name__} has a type without a JSON schema: {line}") from None


def functions_of(path: Path, setting: str) -> dict[str, Callable[..., Any]]:
    """Run a Python file, and return its public functions by name; refuse those without types."""
    named = f"{setting} {path}"
    refuse(not path.is_file() or path.suffix != ".py", f"{named} is not a Python file")
    name = "clearhead_tools"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # it imports its neighbours, as when Python runs it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{named} cannot be run: {type(error).__name__}: {first_line(error)}") from None
    functions: dict[str, Callable[..., Any]] = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == name and not key.startswith("_")
    }
    refuse(not functions, f"{named} has no function: define some, such as def weather(city: str) -> str")
    tools_of([*functions.values()])
    return functions


def call_function(function: Callable[..., Any], arguments: str) -> str:
    """Call a Python function with arguments in JSON; return its result as text, or how it failed.

    Both are for the model: it may call again with other arguments, or say what went wrong.
    """
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import ArgsKwargs, to_json

    try:
        adapter = TypeAdapter[Any](function)  # type: ignore[arg-type]
        result = adapter.validate_python(ArgsKwargs((), json.loads(arguments)))
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
        return result if isinstance(result, str) else to_json(result, fallback=str).decode()
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        return f"error: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
    except (Exception, SystemExit) as error:  # of the user's own function, whatever it is
        line = first_line(error)
        return f"error: {type(error).__name__}" + (f": {line}" if line != type(error).__name__ else "")


@dataclass(frozen=True)
class ToolCall:
    """A call that a model has written."""

    id: str
    name: str
    arguments: str  # JSON, cut off where the answer was

    @property
    def entry(self) -> dict[str, Any]:
        """The call as messages and OpenAI's API have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


# Calls in messages ------------------------------------------------------------------------------------------


def call_objects(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return tool calls with arguments as objects, which templates expect: OpenAI's form has JSON text."""
    refuse(
        not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls),
        f"{place}.tool_calls must be a list of objects, each with a function, its name and its arguments",
    )
    return [
        {**call, "function": _parsed(call["function"])}
        if isinstance(call.get("function"), Mapping)
        else _parsed(call)
        for call in calls
    ]


def with_objects(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in which the arguments of calls are objects."""
    return [
        {**message, "tool_calls": call_objects(message["tool_calls"], f"messages.{number}")}
        if isinstance(message, Mapping) and message.get("tool_calls")
        else dict(message)
        for number, message in enumerate(messages)
    ]


def with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in which the arguments of calls are JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") or call
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        function = {**function, "arguments": text}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _parsed(function: Message) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
    return {**function, "arguments": arguments} if "arguments" in function else {**function}


# Templates without tools ------------------------------------------------------------------------------------

OPEN, CLOSE = "<tool_call>", "</tool_call>"
INSTRUCTIONS = (
    "You can call these functions, given as JSON schemas:\n{tools}\n\nTo call one, write:\n"
    + OPEN
    + '\n{{"name": "the function", "arguments": {{...}}}}\n'
    + CLOSE
)


def without_tools(
    messages: Sequence[Message], tools: Sequence[Any], system: bool = True
) -> list[dict[str, Any]]:
    """Return a conversation for a template that knows of no tools: they, calls and results become text.

    `system`: the template takes a system message; else the tools stand before what the user says first.
    """
    bare = [_without_tools(message) for message in messages]
    if tools:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = INSTRUCTIONS.format(tools=lines)
        place = next((n for n, message in enumerate(bare) if message.get("role") == "user"), 0)
        place = 0 if system else place
        if bare and bare[place].get("role") == ("system" if system else "user"):
            own = bare[place].get("content") or ""
            refuse(not isinstance(own, str), f"messages.{place}.content must be a text where there are tools")
            both = (own, text) if system else (text, own)
            bare[place] = {**bare[place], "content": "\n\n".join(filter(None, both))}
        else:
            bare.insert(0, {"role": "system", "content": text})
    return bare


def _without_tools(message: Message) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    if message.get("tool_calls"):
        functions = [call.get("function") or call for call in message["tool_calls"]]
        blocks = [
            json.dumps({"name": call.get("name"), "arguments": call.get("arguments")}, ensure_ascii=False)
            for call in functions
        ]
        calls = "\n".join(f"{OPEN}\n{block}\n{CLOSE}" for block in blocks)
        text = kept.get("content") or ""
        kept["content"] = f"{text}\n{calls}" if text else calls
    if message.get("role") == "tool":
        kept = {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    return kept


# Formats ----------------------------------------------------------------------------------------------------

PROBE_NAME = "zyzzyva"
PROBE_ARGUMENTS = {"qat": 1, "suq": "b"}
# The arguments of the probe as JSON, whatever white space it has.
WRITTEN = re.compile(r'\{\s*"qat"(\s*:\s*)1(\s*,\s*)"suq"\s*:\s*"b"\s*\}')
MARKER = re.compile(r"<[^<>\s]{1,60}>|\[[A-Z_]{3,30}\]")
THINKING = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
LONG_ID, SHORT_ID = 24, 9  # characters; templates of Mistral take those of 9 alone
LETTERS = string.ascii_letters + string.digits
HARMONY, RETURN, CALL = "<|channel|>", "<|return|>", "<|call|>"  # of gpt-oss

Render = Callable[[Sequence[Message], bool, Any], str]  # messages, whether an answer follows, tools


@dataclass(frozen=True)
class ToolFormat:
    """How one model writes tool calls and what it thinks.

    An answer with calls is begin, open NAME middle ARGUMENTS close, between two of them `between`, and end.
    """

    begin: str = ""
    open: str = f'{OPEN}\n{{"name": "'
    middle: str = '", "arguments": '
    close: str = "}\n" + CLOSE
    between: str = "\n"
    end: str = ""
    colon: str = ": "  # in the JSON of arguments
    comma: str = ", "
    several: bool = True  # calls in one answer
    short_ids: bool = False
    thinking: tuple[str, str] | None = None  # what stands around reasoning at the beginning of an answer
    harmony: bool = False

    @classmethod
    def of(cls, source: str) -> ToolFormat:
        """Return how a template without tools has answers written: what they think, and calls as text."""
        if HARMONY in source:
            return cls(harmony=True, several=False)
        return cls(thinking=next((pair for pair in THINKING if pair[1] in source), None))

    def probed(self, render: Render) -> ToolFormat:
        """Return the format of calls, found by what the template makes of one call and of two."""
        refused = InputError("the chat template writes tool calls in a way that cannot be read back")
        for short in (False, True):
            try:
                first = _tail(render, 1, short)
            except InputError as error:
                refused = error
                continue
            try:
                second: str | None = _tail(render, 2, short)
            except InputError:  # one call at a time
                second = None
            marks = _derived(self, first, second, short)
            if marks is not None:
                return marks
        raise InputError(f"tools are not taken: {first_line(refused)}")

    @property
    def head(self) -> str:
        """What stands before the name of the first call, without white space before it."""
        return (self.begin + self.open).lstrip()

    @property
    def marker(self) -> str:
        """What begins calls wherever it is written; empty where only the whole answer can be a call."""
        match = MARKER.match(self.head)
        return match[0] if match else ""

    def new_id(self) -> str:
        """Return an id for a call."""
        letters = "".join(secrets.choice(LETTERS) for _ in range(SHORT_ID if self.short_ids else LONG_ID))
        return letters if self.short_ids else f"call_{letters}"

    def constraint(
        self, tools: Sequence[Tool], choice: str, parallel: bool, prompt: str, content: str | None = None
    ) -> str:
        """Return what an answer is held to, as the option `tool_calls`: arguments are of their schemas.

        Args:
            tools: what may be called.
            choice: auto, required, or the name of the one tool to call.
            parallel: several calls may be in one answer, if the format has room for them.
            prompt: the text before the answer, whose end says whether reasoning has begun.
            content: the JSON schema of an answer without calls.
        """
        named = [tool for tool in tools if choice in (AUTO, REQUIRED, tool.name)]
        refuse(not named, f'tool_choice "{choice}" is none of the tools: {", ".join(t.name for t in tools)}')
        stated = {
            **asdict(self),
            "marker": self.marker,
            "head": self.head,
            "tools": [{"name": tool.name, "schema": tool.schema} for tool in named],
            "free": choice == AUTO,
            "several": self.several and parallel,
            "thinks": self.thinks(prompt),
            "content": content,
        }
        return json.dumps(stated)

    def needs(self, special: Sequence[str], calls: bool) -> bool:
        """Return whether an answer cannot be read without special tokens in its text."""
        own = [*(self.thinking or ())]
        own += [self.begin, self.open, self.middle, self.close, self.between, self.end] if calls else []
        return self.harmony or any(token in text for token in special for text in own)

    def thinks(self, prompt: str) -> bool:
        """Return whether a prompt ends within the reasoning of the answer."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking[0])


def _tail(render: Render, count: int, short: bool) -> str:
    """Return what a template writes of an answer with so many calls."""
    ids = [f"{'a' * 8}{n}" if short else f"call_{'a' * 23}{n}" for n in range(count)]
    calls = [ToolCall(name, PROBE_NAME, json.dumps(PROBE_ARGUMENTS)).entry for name in ids]
    question: list[Message] = [{"role": "user", "content": "hi"}]
    tools = [Tool(PROBE_NAME, "probe", {"type": "object", "properties": {}}).entry]
    prompt = render(question, True, tools)
    whole = render([*question, {"role": "assistant", "content": "", "tool_calls": calls}], False, tools)
    start = len(_common(prompt, whole))
    if start < len(prompt):  # the prompt says more than the answer repeats, as where it begins to think
        start = len(_common(render(question, False, tools), whole))
    return whole[start:]


def _derived(plain: ToolFormat, first: str, second: str | None, short: bool) -> ToolFormat | None:
    name, arguments = first.find(PROBE_NAME), WRITTEN.search(first)
    if arguments is None or not 0 <= name < arguments.start():
        return None
    before, after = first[:name], first[arguments.end() :]
    middle = first[name + len(PROBE_NAME) : arguments.start()]
    colon, comma = arguments[1], arguments[2]
    if "\n" in colon + comma or len(colon) > 2 or len(comma) > 2:
        colon, comma = ": ", ", "
    after = _without_id(after)
    place = None if second is None else WRITTEN.search(second)
    at = -1 if place is None or second is None else second.find(PROBE_NAME, place.end())
    if at < 0 or place is None or second is None:  # one call at a time
        found: dict[str, Any] = {"begin": "", "open": before, "close": _to_end(after)}
        found |= {"between": "", "end": "", "several": False}
    else:
        rest = _without_id(second[place.end() : at])
        last = WRITTEN.search(second, at)
        ending = after if last is None else _without_id(second[last.end() :])
        own = _common(before[::-1], rest[::-1])[::-1]
        close = _common(rest[: len(rest) - len(own)], ending)
        between = rest[len(close) : len(rest) - len(own)]
        found = {"begin": before[: len(before) - len(own)], "open": own, "close": close}
        found |= {"between": between, "end": _to_end(ending[len(close) :])}
    found |= {"middle": middle, "colon": colon, "comma": comma, "short_ids": short}
    return replace(plain, **found)


def _without_id(text: str) -> str:
    """Return the text after arguments without the id of a call, which no model needs to write."""
    return re.sub(r',\s*"id"\s*:\s*"[^"]*"', "", text, count=1)


def _to_end(text: str) -> str:
    """Return what belongs to the calls of the text after the last one: what ends the turn does not."""
    stops = [
        found.start()
        for found in re.finditer(r"<\|[^|<>]*(?:end|eot|eom|eos)[^|<>]*\|>|</s>|<\uff5cend", text)
    ]
    cut = text[: min(stops)] if stops else text
    return cut.rstrip()


def _common(one: str, other: str) -> str:
    """Return what two texts have in common at their beginning."""
    size = next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[:size]
