"""Structured output: a text held to a JSON schema, a regular expression or a grammar, token by token.

llguidance says which tokens may come next. JSON is generated without white space. A text may end where it is
complete, and only there; cut off before, it has stopped by its length. This file needs no PyTorch.

A constraint that others send (`check_constraint`) is first tried in a process of its own: a schema or an
expression of a few letters can ask for minutes and gigabytes before its first token. The library's own limits
catch most of them; what they miss meets the system's limits on time and memory there, and ends nothing else.

Shapes: V vocabulary.
"""

import functools
import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clearhead.errors import (
    BusyError,
    ClearheadError,
    InputError,
    MissingExtraError,
    first_line,
    refuse,
    refusing,
)

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

Constraint = tuple[str, str]  # json_schema, regex, grammar or tool_calls, and the text of it
LONGEST = 65_536  # characters of a constraint
KEPT = 16  # grammars that are kept compiled
SECONDS, BYTES = 2, 1 << 30  # of the processor and of memory, for the trial of one constraint
PATIENCE = 30.0  # seconds by the clock, on a machine that is busy
STEPS = 32  # tokens that are generated on trial
AT_ONCE, WAITING = 4, 2.0  # constraints tried at the same time, and seconds that another one waits
TRIALS = threading.BoundedSemaphore(AT_ONCE)
EXACT_DIGITS, EXACT_POWER = 15, 22  # of decimal numbers that every reader takes for the same float64
EXACT = 2**53  # integers up to here are float64 numbers, which is how the library keeps all of them
WIDEST = 2**64  # of bounds that are taken
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "lenient": False}
# No token is chosen ahead of the model: a grammar may prescribe a million letters.
DIRECTIVE = "%llguidance"
STEPWISE = DIRECTIVE + ' {"no_forcing": true}\n'
# Where seconds stand: the library takes second 60 in any minute, and readers of JSON in a few of them alone.
NO_LEAP = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}
MESSAGES = 4  # of gpt-oss before the last one of an answer, at most
VALUES = ("const", "enum")  # of a schema, which are no schemas
REMARKS = ("default", "examples", "title", "description", "$comment")  # that no answer is held to
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by name
COMBINED = ("allOf", "anyOf", "oneOf")  # schemas of the same value
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}


def grammar_of(constraint: Constraint, special: Mapping[str, int] | None = None) -> str:
    """Return a constraint as a grammar in Lark's notation, as llguidance reads it; GBNF is translated.

    `special`: ids of special tokens, which calls of tools may need.
    """
    library, (kind, text) = _library(), constraint
    if kind == "tool_calls":
        return CallGrammar(json.loads(text), special or {}).text()
    refuse(len(text) > LONGEST, f"{kind} has {len(text):,} characters: at most {LONGEST:,} are read")
    with refusing(f"{kind} cannot be read"):
        if kind == "json_schema":
            schema = json.loads(text, parse_float=_exact)
            schema = {} if schema is True else schema
            refuse(not isinstance(schema, dict), f"json_schema is {text[:60]!r}: give an object")
            return f"{STEPWISE}start: {_json_rule(schema, COMPACT)}\n"
        if kind == "regex":
            (made,) = json.loads(library.LLMatcher.grammar_from_regex(text))["grammars"]
            return f"{STEPWISE}{made['lark_grammar']}\n"
        refuse(DIRECTIVE in text, f"grammar has the directive {DIRECTIVE}: leave it out")
        from llguidance.gbnf_to_lark import any_to_lark

        return f"{STEPWISE}{any_to_lark(text)}\n"


def _json_rule(schema: dict[str, Any], spaces: Mapping[str, Any]) -> str:
    """Return the part of a grammar that is JSON of a schema, with separators as `spaces` says."""
    return f"%json {json.dumps({**_as_followed(schema, schema), 'x-guidance': spaces})}"


class CallGrammar:
    """The grammar of an answer with tool calls, by what `ToolFormat.constraint` states."""

    def __init__(self, stated: Mapping[str, Any], special: Mapping[str, int]) -> None:
        self.stated, self.special = stated, special
        names = sorted(special, key=len, reverse=True)
        self.split = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.spaces = {**COMPACT, "item_separator": stated["comma"], "key_separator": stated["colon"]}

    def text(self) -> str:
        """Return the whole grammar."""
        harmony = self.stated["harmony"]
        rules = self._channels() if harmony else [*self._start(), *self._answer(), *self._calls()]
        return STEPWISE + "\n".join([*rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]{1,4}/"]) + "\n"

    def literal(self, text: str) -> str:
        """Return a text as symbols of the grammar, its special tokens as tokens."""
        parts, at = [], 0
        for found in self.split.finditer(text):
            parts += [json.dumps(text[at : found.start()], ensure_ascii=False)] if found.start() > at else []
            parts.append(self.token(found[0]))
            at = found.end()
        return " ".join([*parts, *([json.dumps(text[at:], ensure_ascii=False)] if at < len(text) else [])])

    def token(self, name: str) -> str:
        """Return a special token as a symbol of the grammar."""
        refuse(name not in self.special, f"tool calls need the token {name}, which the tokenizer lacks")
        return f"<[{self.special[name]}]>"

    def until(self, name: str, marker: str) -> str:
        """Return the rule of text up to a marker, which belongs to it."""
        if self.split.fullmatch(marker):
            return f"{name}: TEXT {self.token(marker)}"
        return f"{name}[lazy]: TEXT {json.dumps(marker, ensure_ascii=False)}"

    def _start(self) -> list[str]:
        """What the answer thinks, and what it says."""
        if self.stated["thinking"] is None:
            return ["start: answer"]
        opening, closing = self.stated["thinking"]
        thought = self.until("thought", closing)
        if self.stated["thinks"]:
            return [f"start: thought SPACE? answer{' | TEXT' if self.stated['free'] else ''}", thought]
        return [f"start: (SPACE? {self.literal(opening)} thought SPACE?)? answer", thought]

    def _answer(self) -> list[str]:
        head, marker, content = (self.stated[name] for name in ("head", "marker", "content"))
        whole = f"SPACE? {self.literal(head)} calls"
        if not self.stated["free"]:
            return [f"answer: {whole}"]
        if content is not None:
            return [f"answer: {whole} | {_json_rule(json.loads(content), COMPACT)}"]
        if marker:
            return [
                f"answer: marked {self.literal(head[len(marker) :])} calls | TEXT",
                self.until("marked", marker),
            ]
        refuse(not head, "the chat template writes nothing before a tool call that tells it from text")
        begun = re.sub(r"([^A-Za-z0-9_ ])", r"\\\1", head).replace("\n", "n")
        return [f"answer: {whole} | OTHER", rf"OTHER: /(.|\n)*/ & ~/[ \n]*{begun}(.|\n)*/"]

    def _calls(self) -> list[str]:
        """The calls, after what stands before the first name."""
        close, between, opening, end = (self.stated[name] for name in ("close", "between", "open", "end"))
        more = f" ({self.literal(close + between + opening)} call)*" if self.stated["several"] else ""
        last = self.literal(close + end)
        return [
            f"calls: call{more} {last}",
            *self._call(lambda name: self.literal(name + self.stated["middle"])),
        ]

    def _call(self, before: Callable[[str], str]) -> list[str]:
        """One rule for each tool: what stands before its arguments, and these."""
        tools = self.stated["tools"]
        rules = [
            f"call_{number}: {before(tool['name'])} {_json_rule(tool['schema'], self.spaces)}"
            for number, tool in enumerate(tools)
        ]
        return [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}", *rules]

    def _channels(self) -> list[str]:
        """The channels of gpt-oss: messages that think or say something, then a call or the final one."""
        channel, message, end, start, json_ = (
            self.token(f"<|{name}|>") for name in ("channel", "message", "end", "start", "constrain")
        )
        content, free = self.stated["content"], self.stated["free"]
        final = "TEXT" if content is None else _json_rule(json.loads(content), COMPACT)

        def before(name: str) -> str:
            places = (
                f'{channel} "commentary to=functions.{name}" | " to=functions.{name}" {channel} "commentary"'
            )
            return f'({places}) (" "? {json_} "json" | " json")? {message}'

        return [
            f"start: other{{0,{MESSAGES}}} ({'final | ' if free else ''}call)",
            f'other: {channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"',
            f'final: {channel} "final" (" "? {json_} "json")? {message} {final}',
            *self._call(before),
        ]


def _as_followed(schema: Any, root: Any) -> Any:
    """Return a schema that the library follows to the letter: times have no second 60, numbers are exact."""
    if isinstance(schema, list):
        return [_as_followed(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    _check_exclusive(list(_bounds(schema, root, set())))
    found = {}
    for name, value in schema.items():
        if name in NAMED and isinstance(value, dict):
            found[name] = {key: _as_followed(rule, root) for key, rule in value.items()}
        elif name in (*LOWER, *UPPER):
            found[name] = _bound(name, value)
        else:
            found[name] = value if name in (*VALUES, *REMARKS) else _as_followed(value, root)
        if name in VALUES:
            _check_value(value)
    named = found.get("format")
    if isinstance(named, str) and named in NO_LEAP and "pattern" not in found:
        found["pattern"] = NO_LEAP[named]
    return found


def _check_value(value: Any) -> None:
    """Refuse a value with an integer that the library would write with other last digits."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_value(inner)
    if type(value) is int and abs(value) > EXACT:
        _exact(str(value))


def _bound(name: str, bound: Any) -> Any:
    """Return a bound that the library keeps; one of 64 bits on the far side of 0 is drawn in by some digits.

    What is then never written lies at the far end of a range, such as that of 64-bit integers. A bound on the
    near side is refused: the library would let in what it excludes.
    """
    if type(bound) not in (int, float) or abs(bound) <= EXACT:
        return bound
    refuse(
        name not in (UPPER if bound > 0 else LOWER) or abs(bound) > WIDEST,
        f"{name} {bound} of the schema cannot be kept to its last digit: give a bound up to {EXACT}",
    )
    size = min(abs(int(bound)), 2**63 - 1)
    unit: int = 10 ** (len(str(size)) - EXACT_DIGITS)
    inside = (size // unit - 1) * unit
    return inside if bound > 0 else -inside


def _check_exclusive(bounds: list[tuple[str, float]]) -> None:
    """Refuse an exclusive whole bound with another one less than 1 away: the library would write it."""
    for name, bound in bounds:
        inwards = 1 if name == "exclusiveMinimum" else -1
        if name.startswith("exclusive") and bound == int(bound) and bound * inwards >= 0:
            near = next((other for _, other in bounds if 0 < (other - bound) * inwards < 1), None)
            refuse(
                near is not None,
                f"{name} {bound} of the schema cannot be kept with the bound {near}: "
                "give one that is not exclusive",
            )


def _bounds(schema: Any, root: Any, seen: set[int]) -> Iterator[tuple[str, float]]:
    """Yield the bounds that may meet in one value: of a schema, those next to it, and those it refers to."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return
    seen.add(id(schema))
    for name, value in schema.items():
        if name in (*LOWER, *UPPER) and type(value) in (int, float):
            yield name, value
        for inner in value if name in COMBINED and isinstance(value, list) else ():
            yield from _bounds(inner, root, seen)
    place, reference = root, schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        for part in reference.split("/")[1:]:
            place = place.get(part) if isinstance(place, dict) else None
        yield from _bounds(place, root, seen)


def _exact(literal: str) -> float:
    """Return a number of a schema; refuse one that the library reads with another last digit."""
    mantissa, _, power = literal.lower().partition("e")
    whole, _, decimals = mantissa.lstrip("-").partition(".")
    digits, shift = (whole + decimals).strip("0"), int(power or 0) - len(decimals)
    refuse(
        len(digits) > EXACT_DIGITS or abs(shift) > EXACT_POWER,
        f"the number {literal} of the schema cannot be kept to its last digit: "
        f"give {EXACT_DIGITS} digits, or a text",
    )
    return float(literal)


def compiled(
    tokenizer: "LLTokenizer", constraint: Constraint, special: Mapping[str, int] | None = None
) -> "LLMatcher":
    """Return the matcher of a constraint, at the beginning of a text, or refuse the constraint."""
    library = _library()
    limits = library.LLParserLimits(**LIMITS)
    matcher: LLMatcher = library.LLMatcher(
        tokenizer, grammar_of(constraint, special), log_level=0, limits=limits
    )
    if not matcher.is_error():
        matcher.compute_bitmask()
    check_matcher(matcher, constraint)
    return matcher


def check_matcher(matcher: "LLMatcher", constraint: Constraint) -> None:
    """Raise `InputError` where the constraint is wrong, too large, or takes too long."""
    lines = matcher.get_error().splitlines() or [""]
    line = next((line for line in lines if line.startswith("error: ")), lines[0])[:200]
    if "NoExtension" in line:
        line = "no text fits, or none that the model's tokens spell"
    refuse(matcher.is_error(), f"{constraint[0]} is not one that a text can be held to: {line}")


def vocabulary_of(tokens: Sequence[bytes]) -> "LLTokenizer":
    """Return the vocabulary for llguidance, with one more id for the end of a text."""
    library = _library()
    wrapped = library.TokenizerWrapper(_Spelled([*tokens, b"<end>"]))
    made: LLTokenizer = library.LLTokenizer(wrapped, slices=[])
    return made


class _Spelled:
    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.eos_token_id = tokens, len(tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes) -> list[int]:
        """Give no tokens: none is chosen ahead of the model."""
        return []


class Grammars:
    """The grammars of one tokenizer, the last few of them compiled."""

    def __init__(self, tokenizer: "Tokenizer", size: int) -> None:
        from clearhead.hub.tokens.text import token_bytes

        self.tokenizer, self.size = tokenizer, size
        self.vocabulary = vocabulary_of(token_bytes(tokenizer, size))
        added = tokenizer.get_added_tokens_decoder().items()
        self.special = {token.content: number for number, token in added if token.special and number < size}
        self.compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()

    def begin(self, constraint: Constraint, stops: Collection[int]) -> "GrammarState":
        """Return the grammar of one text, at its beginning; `stops` are the ids that end it."""
        matcher = self.compiled.get(constraint) or compiled(self.vocabulary, constraint, self.special)
        self.compiled[constraint] = matcher
        while len(self.compiled) > KEPT:
            self.compiled.popitem(last=False)
        return GrammarState(constraint, matcher.deep_copy(), self.size, stops)


class GrammarState:
    """How far one text is in its grammar."""

    def __init__(
        self, constraint: Constraint, matcher: "LLMatcher", size: int, stops: Collection[int]
    ) -> None:
        self.constraint, self.matcher, self.size, self.stops = constraint, matcher, size, list(stops)
        self.length = 0  # tokens that were followed

    def allowed(self, ids: Sequence[int]) -> "NDArray[np.bool_]":
        """Follow a text's tokens, as far as they are new; return which may come next [V]."""
        import numpy as np

        for token in ids[self.length :]:
            self.matcher.consume_token(token)
        self.length = len(ids)
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        check_matcher(self.matcher, self.constraint)
        found = np.unpackbits(bits, bitorder="little", count=self.size).astype(bool)
        found[self.stops] = self.matcher.is_accepting()
        return found


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError(
            "structured output needs llguidance: pip install 'clearhead[serve]'"
        ) from None
    return llguidance


def check_constraint(constraint: Constraint) -> None:
    """Refuse a constraint that is wrong, or that takes too much; one that was tried already costs nothing."""
    if constraint[0] == "tool_calls":
        for tool in json.loads(constraint[1])["tools"]:
            try:
                check_constraint(("json_schema", json.dumps(tool["schema"])))
            except InputError as error:
                raise InputError(f"parameters of the tool {tool['name']}: {error}") from None
        return
    refuse(
        len(constraint[1]) > LONGEST,
        f"{constraint[0]} has more than {LONGEST:,} characters: give a smaller one",
    )
    line = _tried(constraint)
    refuse(line, line)


@functools.lru_cache(maxsize=1024)
def _tried(constraint: Constraint) -> str:
    """Return what is wrong with a constraint, in one line; nothing if it can be followed."""
    if not TRIALS.acquire(timeout=WAITING):
        raise BusyError(f"{AT_ONCE} constraints are being tried now: try again later")
    limits = f"{SECONDS} seconds or {BYTES >> 20} MiB"
    large = f"{constraint[0]} takes more than {limits} to follow: give a simpler one"
    try:
        command = [sys.executable, "-P", "-m", __name__]
        made = subprocess.run(
            command, input=json.dumps(constraint).encode(), capture_output=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return large
    finally:
        TRIALS.release()
    return made.stdout.decode() if made.returncode == 0 else large


def _limit() -> None:
    try:
        import resource
    except ImportError:  # on Windows the clock alone ends a trial
        return
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def main() -> None:
    """Read a constraint, follow it for some tokens, and print what is wrong with it."""
    _limit()
    kind, text = json.load(sys.stdin)
    tokens = [bytes([value]) for value in range(256)]
    try:
        matcher = compiled(vocabulary_of(tokens), (kind, text))
        for _ in range(STEPS):
            allowed = int.from_bytes(matcher.compute_bitmask(), "little")
            check_matcher(matcher, (kind, text))
            matcher.consume_token((allowed & -allowed).bit_length() - 1)  # the first one
    except (ClearheadError, RecursionError) as error:
        print(first_line(error), end="")


if __name__ == "__main__":
    main()
