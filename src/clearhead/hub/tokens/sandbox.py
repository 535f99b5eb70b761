"""A Jinja environment for templates that came with a model: no access to Python, and bounded work.

Work is counted and not timed, so that a template that is refused is refused on every machine. Each run of a
loop's or macro's body costs as much as it has nodes; each call, filter and test costs one more, and the size
of what it is given. What grows a value (`+`, `*`, `~`, padding, joining) is looked at before it is made.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

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


def check_arguments(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse arguments with which a filter or a method of a text makes far more than it was given."""
    arguments = [*given[1:], *named.values()]
    if name in PADDING:
        numbers = [one for one in arguments if isinstance(one, int | float)]
        fields = re.findall(r"\d+", given[0]) if name == "format" and isinstance(given[0], str) else []
        if any(abs(one) > WIDEST for one in numbers) or any(len(one) > 4 for one in fields):
            raise too_large(name)
    if name in REPEATING:
        sizes = [sum(sizes_of(one)) for one in arguments if not isinstance(one, int | float)]
        if sum(sizes_of(given[0])) * max(sizes, default=1) > 10 * LARGEST:
            raise too_large(name)


class CountedCode(CodeGenerator):
    """Python of a template in which `~` is a call of the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Write the joining of texts."""
        self.write("environment.joined((")
        for one in node.nodes:
            self.visit(one, frame)
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
        def counted(*given: Any, **named: Any) -> Any:
            own = given[1:] if hasattr(function, "jinja_pass_arg") else given
            if name == "join" and own and not isinstance(own[0], str | list | tuple | dict):
                own = (list(own[0]), *own[1:])
                given = (*given[: len(given) - len(own)], *own)
            spend(CALL)
            if name not in CHEAP:
                for one in (*own, *named.values()):
                    checked(one)
            check_arguments(name, own, named)
            found = function(*given, **named)
            return found if name in CHEAP else checked(found)

        kind[name] = counted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template; count each run of the body of a loop or macro, and what is compared."""
        template = super()._parse(source, name, filename)

        def counted(steps: int) -> nodes.Filter:
            return nodes.Filter(nodes.Const(steps), COUNTED, [], [], None, None)

        for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock))):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.FilterBlock)
            steps = 1 + sum(1 for one in node.body for _ in one.find_all(nodes.Node))
            node.body.insert(0, nodes.ExprStmt(counted(steps)))
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(counted(1 + sum(1 for _ in node.test.find_all(nodes.Node))), node.test)
        for compared in list(template.find_all(nodes.Compare)):
            for one in compared.ops:
                if not isinstance(one.expr, nodes.Const):
                    one.expr = nodes.Filter(one.expr, COMPARED, [], [], None, None)
        template.set_lineno(1)
        template.set_environment(self)
        return template

    def call(self, context: Context, function: Any, /, *given: Any, **named: Any) -> Any:
        """Call what a template calls."""
        spend(CALL)
        own = getattr(function, "__self__", None)
        if isinstance(own, str):
            name = function.__name__
            if name == "join" and given and not isinstance(given[0], str | list | tuple | dict):
                given = (list(given[0]), *given[1:])
            check_arguments("format" if name == "format_map" else name, (own, *given), named)
            checked(own)
        for one in (*given, *named.values()):
            checked(one)
        found = super().call(context, function, *given, **named)
        return found if isinstance(function, Macro) else checked(found)

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
        return self.concat(str(checked(one)) for one in values)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the pieces of an output."""
        kept, size = [], 0
        for one in pieces:
            size += len(one)
            if size > LARGEST:
                raise SecurityError(f"it writes more than {LARGEST:,} characters")
            kept.append(one)
        spend(size // TO_STEP)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Calculate, unless the result would be too large."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        large = False
        if operator == "**":
            large = not numbers or abs(right) > 64 or abs(left) > 1e6
        elif operator == "*" and numbers:
            large = sum(one.bit_length() for one in (left, right) if isinstance(one, int)) > BITS
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
