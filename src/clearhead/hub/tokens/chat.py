"""Chat templates: a conversation to the text that a model reads, by a Jinja template in a sandbox.

A template is code that came with a model: it is rendered without access to Python, its work is bounded
(`Sandbox`), and what it raises is one line. `ChatTemplate.learned` also finds the characters that the
assistant wrote, which are what is trained on.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from clearhead.errors import InputError, refuse, refusing
from clearhead.hub.tokens.tools import ToolFormat, call_objects, with_objects, with_text, without_tools

# The sandbox ------------------------------------------------------------------------------------------------


WORK = 4_000_000  # steps of one rendering: at most about a second
CALL, LOOKUP, ITEM = 60, 20, 2  # steps that a call, a filter or a test takes; an attribute; an item of a list
LARGEST, MOST = 10**7, 10**6  # characters of a value, and items
WIDEST = 10**4  # characters that a field is padded to, and the like
BITS = 4096  # of a whole number
TO_STEP = 256  # characters that are read in the time of one step
COUNTED, COMPARED = "counted steps", "compared value"  # filters that are put into every template
CHEAP = ("count", "d", "default", "first", "last", "length")  # filters that do not read all they are given
# Filters and methods that write as many characters or items as a number says.
PADDING = {"batch", "center", "expandtabs", "format", "indent", "ljust", "rjust", "round", "slice"}
PADDING |= {"tojson", "zfill"}
REPEATING = ("indent", "join", "replace", "translate", "wordwrap", "xmlattr")  # those that repeat an argument

_left: ContextVar[list[int]] = ContextVar("steps left")


@contextmanager
def bounded() -> Iterator[None]:
    """Count the work of one rendering."""
    token = _left.set([WORK])
    try:
        yield
    finally:
        _left.reset(token)


def spend(steps: int) -> bool:
    """Count steps, and raise where there have been too many; return True, for a condition."""
    left = _left.get()
    left[0] -= max(1, steps)
    if left[0] < 0:
        raise SecurityError(f"it takes more than {WORK:,} steps")
    return True


def sizes_of(value: Any) -> tuple[int, int]:
    """Return the items and the characters of a value, with those of lists in lists, if they are few."""
    items, characters, waiting = 0, 0, [value]
    while waiting and items <= MOST and characters <= LARGEST:
        one = waiting.pop()
        items += 1
        if isinstance(one, str):
            characters += len(one)
        elif isinstance(one, range):
            items += len(one)
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
    return items, characters


def checked(value: Any) -> Any:
    """Count the time that a value takes to read; refuse one that is too large."""
    if isinstance(value, str | list | tuple | dict | set | frozenset | range):
        items, characters = sizes_of(value)
        if items > MOST or characters > LARGEST:
            raise SecurityError(f"it makes a value of more than {LARGEST:,} characters or {MOST:,} items")
        spend(ITEM * items + characters // TO_STEP)
    return value


def too_large(operation: str) -> SecurityError:
    """Return the error of an operation that would make a large value."""
    return SecurityError(f"{operation} would make a value that is too large")


def check_arguments(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse arguments with which a filter or a method of a text makes far more than it was given."""
    arguments = [*args[1:], *named.values()]
    if name in PADDING:
        numbers = [argument for argument in arguments if isinstance(argument, int | float)]
        fields = re.findall(r"\d+", args[0]) if name == "format" and isinstance(args[0], str) else []
        if any(abs(number) > WIDEST for number in numbers) or any(len(digits) > 4 for digits in fields):
            raise too_large(name)
    if name in REPEATING:
        sizes = [sum(sizes_of(argument)) for argument in arguments if not isinstance(argument, int | float)]
        if sum(sizes_of(args[0])) * max(sizes, default=1) > 10 * LARGEST:
            raise too_large(name)


class CountedCode(CodeGenerator):
    """Python of a template in which `~` is a call of the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Write the joining of texts."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, whose templates end soon and make no large value."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = CountedCode

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=checked, **options)  # nothing is run before it is counted
        del self.globals["lipsum"]
        for kind in (self.filters, self.tests):
            for name, function in list(kind.items()):
                self.add_counted(kind, name, function)
        self.filters |= {COUNTED: spend, COMPARED: checked}

    def add_counted(self, kind: dict[str, Any], name: str, function: Callable[..., Any]) -> None:
        """Add a filter or a test whose work is counted."""

        @functools.wraps(function)  # with the mark that asks for the context or the environment
        def counted(*args: Any, **named: Any) -> Any:
            own = args[1:] if hasattr(function, "jinja_pass_arg") else args
            if name == "join" and own and not isinstance(own[0], str | list | tuple | dict):
                own = (list(own[0]), *own[1:])
                args = (*args[: len(args) - len(own)], *own)
            spend(CALL)
            if name not in CHEAP:
                for argument in (*own, *named.values()):
                    checked(argument)
            check_arguments(name, own, named)
            result = function(*args, **named)
            return result if name in CHEAP else checked(result)

        kind[name] = counted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template; count each run of the body of a loop or macro, and what is compared."""
        template = super()._parse(source, name, filename)

        def counted(steps: int) -> nodes.Filter:
            return nodes.Filter(nodes.Const(steps), COUNTED, [], [], None, None)

        for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock))):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.FilterBlock)
            steps = 1 + sum(1 for child in node.body for _ in child.find_all(nodes.Node))
            node.body.insert(0, nodes.ExprStmt(counted(steps)))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(counted(1 + sum(1 for _ in node.test.find_all(nodes.Node))), node.test)
        for compared in list(template.find_all(nodes.Compare)):
            for operand in compared.ops:
                if not isinstance(operand.expr, nodes.Const):
                    operand.expr = nodes.Filter(operand.expr, COMPARED, [], [], None, None)
        template.set_lineno(1)
        template.set_environment(self)
        return template

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        """Call what a template calls."""
        spend(CALL)
        own = getattr(function, "__self__", None)
        if isinstance(own, str):
            name = function.__name__
            if name == "join" and args and not isinstance(args[0], str | list | tuple | dict):
                args = (list(args[0]), *args[1:])
            check_arguments("format" if name == "format_map" else name, (own, *args), named)
            checked(own)
        for argument in (*args, *named.values()):
            checked(argument)
        result = super().call(context, function, *args, **named)
        return result if isinstance(function, Macro) else checked(result)

    def getitem(self, value: Any, name: Any) -> Any:
        """Return an item or a slice."""
        spend(LOOKUP)
        return super().getitem(checked(value) if isinstance(name, slice) else value, name)

    def getattr(self, value: Any, name: str) -> Any:
        """Return an attribute."""
        spend(LOOKUP)
        return super().getattr(value, name)

    def joined(self, values: Iterable[Any]) -> str:
        """Return values as one text."""
        return self.concat(str(checked(value)) for value in values)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the pieces of an output."""
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > LARGEST:
                raise SecurityError(f"it writes more than {LARGEST:,} characters")
            kept.append(piece)
        spend(size // TO_STEP)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Calculate, unless the result would be too large."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        large = False
        if operator == "**":
            large = not numbers or abs(right) > 64 or abs(left) > 1e6
        elif operator == "*" and numbers:
            large = sum(factor.bit_length() for factor in (left, right) if isinstance(factor, int)) > BITS
        elif operator == "*":
            repeated, times = (right, left) if isinstance(left, int) else (left, right)
            large = isinstance(times, int) and sum(sizes_of(repeated)) * times > LARGEST
        elif operator == "+" and not numbers:
            large = sum(sizes_of(left)) + sum(sizes_of(right)) > LARGEST
        elif operator == "%" and isinstance(left, str):
            check_arguments("format", (left, *(right if isinstance(right, tuple) else (right,))), {})
        if large:
            raise too_large(operator)
        return checked(super().call_binop(context, operator, left, right))


class SafeNamespace(Namespace):
    """A namespace whose attributes cannot begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a template cannot set the attribute {name!r}")
        super().__setitem__(name, checked(value))


# Templates --------------------------------------------------------------------------------------------------


Message = Mapping[str, Any]
ASSISTANT = "assistant"
LEADING = ("system", "developer")  # roles that may stand before anything is asked
UNWRITTEN = ("role", "content", "weight", "tool_call_id", "name")  # fields that a template need not read
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that one field goes by
MARKS = "clearhead_marks"  # in the context of a template: what is put around the blocks of the assistant
# What the assistant calls, after what it says: one block of JSON for each call.
_CALLS = (
    "{% for call in message['tool_calls'] or [] %}{% set called = call['function'] or call %}"
    "{{ '\n<tool_call>\n' + ({'name': called['name'], 'arguments': called['arguments']} | tojson) + "
    "'\n</tool_call>' }}{% endfor %}"
)
# Templates by name, for models that have none. They need no token that a vocabulary may lack.
KNOWN = {
    "plain": (
        "{% if tools %}{{ 'Tools: ' + (tools | tojson) + '\n\n' }}{% endif %}"
        "{% for message in messages %}{% if message['role'] == 'assistant' %}"
        "{{ 'Assistant: ' + (message['content'] or '') }}"
        + _CALLS
        + "{{ (eos_token | default('')) + '\n\n' }}"
        "{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
        "{% else %}{{ (message['role'] | capitalize) + ': ' + message['content'] + '\n\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "chatml": (
        "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
        "{{ message['content'] or '' }}" + _CALLS + "{{ '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
MARKER = re.compile(r"<\|\w+\|>")  # how templates write the special tokens around a turn


class Turn(NamedTuple):
    """What the assistant wrote in one turn, by the characters of a text."""

    first: int
    last: int  # the one after the last
    content_end: int  # where the content ends, and what ends the turn begins


Spans = list[Turn]


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens it may name: bos_token, eos_token, ..."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None  # what is taken in its place where there are tools

    def render(
        self, messages: Sequence[Message], generation: bool = True, /, tools: Any = None, **more: Any
    ) -> str:
        """Return the text of a conversation; with `generation`, up to where the next answer begins.

        `tools` and further keywords are the template's own. What it would not read is refused by name.
        """
        messages, tools = self._fitted(messages, tools)
        source = self._source(tools)
        for name in more:
            refuse(
                name in ("messages", "add_generation_prompt", MARKS, *self.tokens)
                or not _reads(source, name),
                f'chat_template_kwargs has "{name}", which the chat template does not take: leave it out',
            )
        return self._rendered(self._checked(messages, source), generation, tools, **more)

    def learned(self, messages: Sequence[Message], tools: Any = None) -> list[tuple[str, Spans]]:
        """Return the texts that a conversation is learned from, with the spans that the assistant wrote.

        There is one text, unless the template writes earlier turns differently once others follow, as those
        do that leave out what was thought: then each answer has a text of its own, as it is generated. A
        span begins where the generation prompt ends and goes to the end of the turn. Templates may mark
        spans themselves by `{% generation %}`. An answer with nothing before it, or of weight 0, has none.
        """
        messages, tools = self._fitted(messages, tools)
        checked = self._checked(messages, self._source(tools))
        wanted = [place for place in answers(checked) if checked[place].get("weight") != 0]
        if self.marks:
            return [self._marked(checked, tools)] if wanted else []
        texts = {}
        for place in wanted:
            prompt = self._rendered(checked[:place], True, tools)
            text = self._rendered(checked[: place + 1], False, tools)
            start = _shared(prompt, text)
            earlier = self._rendered(checked[:place], False, tools) if start < len(prompt) else ""
            refuse(
                start < _shared(earlier, prompt),
                "the chat template does not write an answer where the generation prompt asks for it: "
                "mark what the assistant writes by {% generation %} and {% endgeneration %}",
            )
            content = _text(checked[place]).strip()
            at = text.find(content or text[start:], start)
            content_end = at + len(content) if at >= 0 else start
            if checked[place].get("tool_calls"):  # special tokens may stand before and between the calls
                content_end = len(text)
            texts[place] = text, Turn(start, len(text), content_end)
        whole = self._rendered(checked, False, tools)
        if all(whole.startswith(text) for text, _ in texts.values()):
            return [(whole, [span for _, span in texts.values()])] if texts else []
        return [(text, [span]) for text, span in texts.values()]

    @functools.cached_property
    def answer_format(self) -> ToolFormat:
        """How answers without tools are written: what the model thinks, and what it says."""
        return ToolFormat.of(self.source)

    @functools.cached_property
    def tool_format(self) -> ToolFormat:
        """How answers with tool calls are written."""
        plain = ToolFormat.of(self._source(True))
        refuse(plain.harmony and not self._reads_tools, "the chat template of this model takes no tools")
        return plain if plain.harmony or not self._reads_tools else plain.probed(self.render)

    def reads(self, *names: str) -> bool:
        """Return whether the template takes a variable, or reads a field, of one of these names."""
        return any(_reads(self.source, name) for name in names)

    @property
    def _reads_tools(self) -> bool:
        source = self._source(True)
        return _reads(source, "tools") and _reads(source, "tool_calls")

    def _fitted(self, messages: Sequence[Message], tools: Any) -> tuple[Sequence[Message], Any]:
        """Return messages and tools for the template; as text alone, if it does not know of tools."""
        called = any(
            isinstance(message, Mapping) and (message.get("tool_calls") or message.get("role") == "tool")
            for message in messages
        )
        if self._reads_tools or not (tools or called) or (called and _reads(self.source, "tool_calls")):
            return messages, tools
        return without_tools(with_objects(messages), tools or (), self._takes_system), None

    @functools.cached_property
    def _takes_system(self) -> bool:
        """Whether the template writes a system message."""
        probe = [{"role": "system", "content": "xyzzy"}, {"role": "user", "content": "hi"}]
        with suppress(InputError):
            return "xyzzy" in self._rendered(probe, True, None)
        return False

    @functools.cached_property
    def _reads_parts_alone(self) -> bool:
        """Whether the template passes over content that is a text, as those for images do."""
        if not _reads(self.source, "image"):
            return False
        for content in ("xyzzy", [{"type": "text", "text": "xyzzy"}]):
            with suppress(InputError):
                if "xyzzy" in self._rendered([{"role": "user", "content": content}], True, None):
                    return not isinstance(content, str)
        return False

    @functools.cached_property
    def _arguments_as_text(self) -> bool:
        """Whether the template takes the arguments of a call as JSON text, as DeepSeek's do."""
        question = [{"role": "user", "content": "hi"}]
        for as_text in (False, True):
            arguments = '{"a": 1}' if as_text else {"a": 1}
            function = {"name": "f", "arguments": arguments}
            call = {"id": "abcdefgh1", "type": "function", "function": function}
            with suppress(InputError):
                self._rendered(
                    [*question, {"role": ASSISTANT, "content": "", "tool_calls": [call]}], False, None
                )
                return as_text
        return False

    def _checked(self, messages: Sequence[Message], source: str) -> list[dict[str, Any]]:
        """Return messages of text alone; refuse what the template would pass over."""
        checked = [_plain(number, message, source) for number, message in enumerate(messages)]
        if self._reads_parts_alone:
            checked = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if isinstance(message.get("content"), str)
                else message
                for message in checked
            ]
        if any(message.get("tool_calls") for message in checked) and self._arguments_as_text:
            return [with_text(message) for message in checked]
        return checked

    @property
    def markers(self) -> tuple[str, ...]:
        """The special tokens that the template writes by their names, such as <|im_end|>."""
        return tuple(dict.fromkeys(MARKER.findall(self.source)))

    @property
    def marks(self) -> bool:
        """True if the template marks what the assistant writes."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None

    def _marked(self, messages: Sequence[Message], tools: Any) -> tuple[str, Spans]:
        """Render with marks around the blocks of the assistant, and take them out again."""
        marks = [f"\x02{secrets.token_hex(8)}\x03" for _ in range(2)]
        text, spans, begun = "", Spans(), 0
        for piece in re.split(f"({'|'.join(marks)})", self._rendered(messages, False, tools, marks=marks)):
            if piece == marks[0]:
                begun = len(text)
            elif piece == marks[1]:
                spans.append(Turn(begun, len(text), len(text)))
            else:
                text += piece
        return text, [span for span in spans if span.last > span.first]

    def _source(self, tools: Any) -> str:
        return self.source if self.tool_source is None or not tools else self.tool_source

    def _rendered(
        self, messages: Sequence[Message], generation: bool, tools: Any, marks: Any = None, **more: Any
    ) -> str:
        variables = {**self.tokens, "messages": messages, "add_generation_prompt": generation, "tools": tools}
        with refusing("the chat template refuses these messages"), bounded():
            template = _compiled(self._source(tools))
            return template.render(**{**variables, "documents": None, MARKS: marks, **more})


def answers(messages: Sequence[Message]) -> list[int]:
    """Return the numbers of the assistant's messages that answer something and are not empty."""
    first = next(
        (n for n, message in enumerate(messages) if message.get("role") not in LEADING), len(messages)
    )
    return [
        place
        for place, message in enumerate(messages)
        if place > first
        and message.get("role") == ASSISTANT
        and (_text(message).strip() or message.get("tool_calls"))
    ]


def _text(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    return "".join(str(part.get("text") or "") for part in parts)


def _shared(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _reads(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def _plain(number: int, message: Message, source: str) -> dict[str, Any]:
    place = f"messages.{number}"
    if not isinstance(message, Mapping):
        raise InputError(f"{place} must be an object with role and content")
    reasons = next((message[name] for name in REASONING if message.get(name) is not None), None)
    content = message.get("content")
    unread = [
        name
        for name, value in message.items()
        if name not in (*UNWRITTEN, *REASONING) and value not in (None, [], "") and not _reads(source, name)
    ]
    drops = ToolFormat.of(source).thinking is not None  # such templates leave out what was thought before
    if reasons is not None and not drops and not any(_reads(source, name) for name in REASONING):
        unread.append(next(name for name in REASONING if message.get(name) is not None))
    refuse(unread, f'"{place}.{"".join(unread[:1])}" is not read by the chat template: leave it out')
    refuse(not isinstance(message.get("role"), str), f"{place}.role must be a text, such as user")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if part == {"type": "image"} and _reads(source, "image"):
            continue
        wrong = f"a part of the type {kind!r:.40}" if kind != "text" else "a part without its text"
        refuse(
            kind != "text" or not isinstance(part.get("text"), str),
            f"{place}.content has {wrong}: text alone is read here",
        )
        unknown = next((name for name in part if name not in ("type", "text")), None)
        refuse(unknown, f'"{place}.content" has a part with "{unknown}", which is not read: leave it out')
    if isinstance(content, list) and not _reads(source, "text"):  # it does not know of parts
        content = "".join(part["text"] for part in content)
    refuse(
        not isinstance(content, str | list) and not message.get("tool_calls"),
        f"{place}.content must be a text, or a list of parts of type text",
    )
    named = {} if reasons is None else {"thinking": reasons, **message, "reasoning_content": reasons}
    plain = {**(named or message)}
    if message.get("tool_calls"):
        plain["tool_calls"] = call_objects(message["tool_calls"], place)
    same = "content" not in message or content is message["content"]
    return plain if same else {**plain, "content": content}


# The sandbox ------------------------------------------------------------------------------------------------


class WrittenBlocks(Extension):
    """Blocks that mark what the assistant has written, for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Return what is inside the block, as a call of `written`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    @pass_context
    def written(self, context: Context, caller: Macro) -> str:
        """Return the block, between marks where they are asked for."""
        marks = context.get(MARKS)
        return str(caller()) if not marks else f"{marks[0]}{caller()}{marks[1]}"


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    sandbox = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[WrittenBlocks, loopcontrols])

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, **named: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **named})

    sandbox.add_counted(sandbox.filters, "tojson", tojson)
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["namespace"] = SafeNamespace
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandbox.from_string(source)
