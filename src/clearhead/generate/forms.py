"""Forms: a text held to a JSON schema, a regular expression or a grammar, token by token.

llguidance says which tokens may come next. JSON is written without white space. A text may end where its form
is complete, and only there; cut off before, it has stopped by its length. This file needs no PyTorch.

Shapes: V vocabulary.
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from clearhead.errors import MissingExtraError, refuse, refusing

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

Form = tuple[str, str]  # json_schema, regex or grammar, and the text of it
LONGEST = 65_536  # characters of a form
KEPT = 16  # forms that are kept compiled
EXACT_DIGITS, EXACT_POWER = 15, 22  # of decimal numbers that every reader takes for the same float64
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "lenient": False}
# Nothing is written ahead of the model: a form may prescribe a million letters.
DIRECTIVE = "%llguidance"
STEPWISE = DIRECTIVE + ' {"no_forcing": true}\n'
# Where seconds stand: the library takes second 60 in any minute, and readers of JSON in a few of them alone.
NO_LEAP = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]"}
VALUES = ("const", "enum", "default", "examples")  # of a schema, which are no schemas
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}


def grammar_of(form: Form) -> str:
    """Return a form as a grammar in Lark's notation, as llguidance reads it; GBNF is translated."""
    library, (kind, text) = _library(), form
    refuse(len(text) > LONGEST, f"{kind} has {len(text):,} characters: a form has {LONGEST:,} at most")
    with refusing(f"{kind} cannot be read"):
        if kind == "json_schema":
            schema = json.loads(text, parse_float=_exact)
            schema = {} if schema is True else schema
            refuse(not isinstance(schema, dict), f"json_schema is {text[:60]!r}: give an object")
            return f"{STEPWISE}start: %json {json.dumps({**_without_leaps(schema), 'x-guidance': COMPACT})}\n"
        if kind == "regex":
            (made,) = json.loads(library.LLMatcher.grammar_from_regex(text))["grammars"]
            return f"{STEPWISE}{made['lark_grammar']}\n"
        refuse(DIRECTIVE in text, f"grammar has the directive {DIRECTIVE}: leave it out")
        from llguidance.gbnf_to_lark import any_to_lark

        return f"{STEPWISE}{any_to_lark(text)}\n"


def _without_leaps(schema: Any) -> Any:
    """Return a schema whose times have no second 60."""
    if isinstance(schema, list):
        return [_without_leaps(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: one if name in VALUES else _without_leaps(one) for name, one in schema.items()}
    named = found.get("format")
    if isinstance(named, str) and named in NO_LEAP and "pattern" not in found:
        found["pattern"] = NO_LEAP[named]
    return found


def _exact(literal: str) -> float:
    """Return a number of a schema; refuse one that the library reads with another last digit."""
    mantissa, _, power = literal.lower().partition("e")
    whole, _, decimals = mantissa.lstrip("-").partition(".")
    digits, shift = (whole + decimals).strip("0"), int(power or 0) - len(decimals)
    refuse(
        len(digits) > EXACT_DIGITS or abs(shift) > EXACT_POWER,
        f"the number {literal} of the schema cannot be kept to its last digit: give {EXACT_DIGITS} digits",
    )
    return float(literal)


def compiled(tokenizer: "LLTokenizer", form: Form) -> "LLMatcher":
    """Return what follows a text of this form from its beginning, or refuse the form."""
    library = _library()
    limits = library.LLParserLimits(**LIMITS)
    matcher: LLMatcher = library.LLMatcher(tokenizer, grammar_of(form), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    check_matcher(matcher, form)
    return matcher


def check_matcher(matcher: "LLMatcher", form: Form) -> None:
    """Raise `InputError` where the form is wrong, too large, or takes too long."""
    lines = matcher.get_error().splitlines() or [""]
    line = next((one for one in lines if one.startswith("error: ")), lines[0])[:200]
    if "NoExtension" in line:
        line = "no text has this form, or none that the model's tokens spell"
    refuse(matcher.is_error(), f"{form[0]} is not one that a text can be held to: {line}")


def vocabulary_of(tokens: Sequence[bytes]) -> "LLTokenizer":
    """Return tokens as llguidance takes them; one id more stands for the end of a text."""
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
        """Give no tokens: nothing is written ahead of the model."""
        return []


class Forms:
    """The forms of one tokenizer, the last few of them compiled."""

    def __init__(self, tokenizer: "Tokenizer", size: int) -> None:
        from clearhead.tokens.spelling import token_bytes

        self.tokenizer, self.size = tokenizer, size
        self.vocabulary = vocabulary_of(token_bytes(tokenizer, size))
        self.made: OrderedDict[Form, LLMatcher] = OrderedDict()

    def begin(self, form: Form, stops: Collection[int]) -> "FormRow":
        """Return the form of one text, at its beginning; `stops` are the ids that end it."""
        matcher = self.made.get(form) or compiled(self.vocabulary, form)
        self.made[form] = matcher
        while len(self.made) > KEPT:
            self.made.popitem(last=False)
        return FormRow(form, matcher.deep_copy(), self.size, stops)


class FormRow:
    """How far one text is in its form."""

    def __init__(self, form: Form, matcher: "LLMatcher", size: int, stops: Collection[int]) -> None:
        self.form, self.matcher, self.size, self.stops = form, matcher, size, list(stops)
        self.length = 0  # tokens that were followed

    def allowed(self, ids: Sequence[int]) -> "NDArray[np.bool_]":
        """Follow a text's tokens, as far as they are new; return which may come next [V]."""
        import numpy as np

        for token in ids[self.length :]:
            self.matcher.consume_token(token)
        self.length = len(ids)
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        check_matcher(self.matcher, self.form)
        found = np.unpackbits(bits, bitorder="little", count=self.size).astype(bool)
        found[self.stops] = self.matcher.is_accepting()
        return found


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError("forms need llguidance: pip install 'clearhead[serve]'") from None
    return llguidance
