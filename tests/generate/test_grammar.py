"""Texts held to a schema, an expression, a grammar; whatever the tokenizer, alone and together."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from operator import ge, gt, le, lt

import pytest

import clearhead as ch
from clearhead.errors import InputError
from clearhead.hub.tokens import TokensPlan
from clearhead.hub.tokens.text import token_bytes
from clearhead.hub.tokens.training import GENERATOR, train_tokenizer
from clearhead.run.generate.grammar import KEPT
from tests.serve import mixes

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEXT = 'the cat saw 12 dogs, and {"a":[1,2]} is not a dog: yes or no? Grüße\n'


@pytest.fixture(scope="module")
def m(byte_tokenizer) -> ch.Model:
    return mixes.model("rope-gqa", byte_tokenizer)


@pytest.mark.parametrize("seed", range(4))
def test_json_is_of_its_schema_and_has_no_white_space(m, seed):
    made = m.generate("x", 100, json_schema=PERSON, temperature=1.0, seed=seed)
    if made.stop_reason == "length":
        assert len(made.ids) == 100
    else:
        found = json.loads(made.text)
        assert set(found) == {"name", "age"}
        assert len(found["name"]) <= 4
        assert type(found["age"]) is int
        assert made.text == json.dumps(found, separators=(",", ":"), ensure_ascii=False) or "\\" in made.text


@pytest.mark.parametrize(("kind", "day"), [("time", ""), ("date-time", "2020-02-29T")])
def test_a_time_has_no_second_60(kind, day):
    """22:28:60Z is no time to readers of JSON; a value that looks like a schema stays as it is."""
    import llguidance

    from clearhead.run.generate.grammar import grammar_of, vocabulary_of

    vocabulary = vocabulary_of([bytes([one]) for one in range(256)])

    def takes(schema, value) -> bool:
        matcher = llguidance.LLMatcher(vocabulary, grammar_of(("json_schema", json.dumps(schema))))
        ids = list(json.dumps(value, separators=(",", ":")).encode())
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    schema = {"type": "string", "format": kind}
    assert takes(schema, f"{day}22:28:59.5Z")
    assert not takes(schema, f"{day}22:28:60Z")
    assert not takes({"type": "array", "items": schema}, [f"{day}22:28:60Z"])
    assert takes({"const": schema}, schema)


def one_of(*values):
    return lambda found: found in values


SCHEMAS = [
    ({"enum": ["a", 1, None, [2], 'q"\\']}, one_of("a", 1, None, [2], 'q"\\')),
    ({"const": {"x": [1.5, True]}}, one_of({"x": [1.5, True]})),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 12}, one_of(*range(-3, 12))),
    ({"type": "integer", "multipleOf": 25, "minimum": 0, "maximum": 100}, one_of(0, 25, 50, 75, 100)),
    ({"type": "string", "pattern": "^(a|b)*c$", "maxLength": 6}, lambda s: re.fullmatch("[ab]{0,5}c", s)),
    ({"type": "string", "format": "date"}, lambda s: re.fullmatch(r"\d{4}-\d\d-\d\d", s)),
    ({"type": "string", "minLength": 2, "maxLength": 5}, lambda s: 2 <= len(s) <= 5),
    ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}, lambda a: 1 < len(a) < 5),
    ({"type": "array", "prefixItems": [{"const": 1}, {"const": "b"}], "items": False, "minItems": 2},
     one_of([1, "b"])),
    ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, one_of(None, True, False)),
    ({"$defs": {"t": {"enum": [1, 2]}}, "type": "object", "properties": {"l": {"$ref": "#/$defs/t"}},
      "required": ["l"], "additionalProperties": False}, one_of({"l": 1}, {"l": 2})),
    ({"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 6}]}, one_of(5, 6)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_a_dozen_schemas_are_kept(m, number):
    schema, is_valid = SCHEMAS[number]
    made = m.generate("x", 60, json_schema=schema, temperature=1.0, seed=number)
    assert made.stop_reason == "length" or is_valid(json.loads(made.text)), made.text
    assert not re.search(r"[:,{\[]\s", re.sub(r'"(\\.|[^"\\])*"', '""', made.text))


def number(draw: random.Random) -> int | float:
    """A whole number of any size, or one with a few decimals; rather often near 0, 1 and powers of 2."""
    if draw.random() < 0.3:
        return round(draw.choice([0, 0, 1, -1, 7]) + draw.randint(-30, 30) / 10 ** draw.randint(0, 7), 9)
    near = draw.choice([0, 1, 2**53, 2**62, 2**63, 2**64, 10**17, 10**18, 10**19, 10**30])
    return draw.choice([1, -1]) * (near + draw.choice([-1, 0, 1, draw.randint(-40, 40)]))


def numeric(draw: random.Random) -> tuple[dict, list]:
    """A schema of numbers, and the schemas that must all hold of an answer."""
    if draw.random() < 0.4:
        values = [number(draw) for _ in range(draw.randint(1, 4))]
        schema = {"const": values[0]} if len(values) == 1 else {"enum": values}
        return schema, [schema]
    low, high = sorted([number(draw), number(draw)])
    bounds = {
        draw.choice(["minimum", "exclusiveMinimum"]): low,
        draw.choice(["maximum", "exclusiveMaximum"]): high,
    }
    if draw.random() < 0.4:
        del bounds[draw.choice(list(bounds))]
    kind = {"type": draw.choice(["integer", "number"])}
    split = [kind, *({name: bound} for name, bound in bounds.items())]
    if draw.random() < 0.2:  # the same, from several places
        return {"$defs": {"x": kind | split[-1]}, "allOf": [{"$ref": "#/$defs/x"}, *split[:-1]]}, split
    return kind | bounds, split


def holds(text: str, schema: dict) -> bool:
    """Whether a number is of a schema, by its digits and not as a float."""
    exact = {name: [Decimal(str(one)) for one in (value if name == "enum" else [value])]
             for name, value in schema.items() if name != "type"}  # fmt: skip
    value = json.loads(text, parse_float=Decimal, parse_int=Decimal)
    rules = {"minimum": ge, "maximum": le, "exclusiveMinimum": gt, "exclusiveMaximum": lt}
    whole = schema.get("type") != "integer" or value == value.to_integral_value()
    return whole and all(
        rules[name](value, given[0]) if name in rules else value in given for name, given in exact.items()
    )


@pytest.mark.parametrize("place", ["alone", "inside"])
@pytest.mark.slow
def test_numbers_of_a_schema_are_kept_to_the_last_digit_or_refused(m, place):
    """Of random schemas, with numbers beyond 2^53 and bounds close to each other, none is kept roughly."""
    kept, lines = 0, []
    for seed in range(120):
        schema, rules = numeric(random.Random(seed))
        defs = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        wrapped = dict(type="object", properties={"a": schema}, required=["a"], additionalProperties=False)
        given = (schema if place == "alone" else wrapped) | defs
        try:
            made = m.generate("x", 50, json_schema=given, temperature=1.0, seed=seed)
        except InputError as error:
            lines.append(str(error))
            continue
        kept += made.stop_reason == "eos"
        if made.stop_reason == "eos":
            text = made.text if place == "alone" else made.text.removeprefix('{"a":').removesuffix("}")
            assert all(holds(text, rule) for rule in rules), (given, made.text)
    assert kept > 30
    assert len(lines) > 10
    assert all(re.search("cannot be kept|Unsatisfiable|no text has", line) for line in lines), lines


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"const": 2**53 + 1}, "9007199254740993"),
        ({"enum": [1, 12345678901234567]}, "12345678901234567"),
        ({"const": {"a": [1234567890123456789]}}, "1234567890123456789"),
        ({"properties": {"default": {"const": 2**60 + 1}}}, "1152921504606846977"),
        ({"type": "integer", "minimum": 10**30}, "minimum 10"),
        ({"type": "integer", "maximum": 10**30}, "maximum 10"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum 9007199254740993"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1e-5}, "exclusiveMinimum 0"),
        ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, "exclusiveMaximum 0"),
        ({"exclusiveMinimum": 7, "anyOf": [{"type": "number", "maximum": 7.5}]}, "exclusiveMinimum 7"),
    ],
)
def test_a_number_that_cannot_be_kept_is_refused_by_name(m, schema, named):
    with pytest.raises(InputError, match=f"{named}.*cannot be kept"):
        m.generate("x", 8, json_schema=schema)


def test_integers_of_64_bits_are_taken(m):
    """The bounds of every generator of schemas; a remark may hold any number."""
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (-(2**53), 2**53)):
        schema = dict(type="integer", minimum=low, maximum=high, default=10**40, examples=[2**60 + 1])
        made = m.generate("x", 40, json_schema=schema, temperature=1.0, seed=3)
        assert made.stop_reason == "length" or low <= int(made.text) <= high
    for value in (2**53, -(2**53), 10**15 + 1, 123_000_000_000_000_000_000):
        assert m.generate("x", 40, json_schema={"const": value}).text == str(value)


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "unigram", "word"])
def test_every_kind_of_tokenizer_spells_a_form(kind, tmp_path):
    tokenizer = train_tokenizer([TEXT] * 3, TokensPlan(kind=kind), GENERATOR, 3 * len(TEXT))
    m = ch.Model(mixes.harness.build(vocab_size=tokenizer.get_vocab_size() + 3, max_positions=64), tokenizer)
    m.special["eos"] = tokenizer.get_vocab_size() + 2
    spelled = token_bytes(tokenizer, m.config.vocab_size)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert TEXT.strip().endswith(b"".join(spelled[id] for id in ids).decode().strip()) or kind == "word"
    for seed in range(3):
        form = r"( ?(yes|no|dog)){2,5}"
        made = m.generate("the cat", 30, regex=form, temperature=1.0, seed=seed)
        assert made.stop_reason == "eos"
        assert re.fullmatch(form, made.text)


def test_a_grammar_in_either_notation(m):
    for grammar in ('root ::= "[" ("a" | root) "]"', 'start: "[" ("a" | start) "]"'):
        made = m.generate("x", 30, grammar=grammar)
        assert made.stop_reason == "length" or re.fullmatch(r"\[+a\]+", made.text)


def test_rows_of_a_batch_speculation_and_serving_equal_each_alone(m):
    options = {"regex": r"[a-z]{3}(-[0-9]{2,4}){1,3}", "temperature": 1.0, "seed": 3}
    prompts = ["x", "some more", "and yet more"]
    alone = [m.generate(prompt, 25, **options) for prompt in prompts]
    assert m.generate(prompts, 25, **options) == alone
    guessed = m.generate("x-12-12-12", 25, **options | {"temperature": 0.0})
    assert m.generate("x-12-12-12", 25, lookup=3, **options | {"temperature": 0.0}).ids == guessed.ids


def test_a_request_with_a_form_changes_no_other(m):
    before = m.generate("Hello", 12, temperature=1.0, seed=1)
    m.generate("Hello", 12, regex="a+")
    assert m.generate("Hello", 12, temperature=1.0, seed=1) == before


def test_compiled_forms_are_few(m):
    for number in range(KEPT + 3):
        m.generate("x", 1, regex=f"a{{{number + 1}}}")
    assert len(m.engine.grammars.compiled) == KEPT


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"regex": "("}, "regex is not one that a text can be held to"),
        ({"regex": r"(?=a)b"}, "look-ahead"),
        ({"json_schema": "{"}, "json_schema cannot be read"),
        ({"json_schema": "3"}, "json_schema is '3': give an object"),
        ({"json_schema": {"not": {}}}, "not"),
        ({"json_schema": {"type": "string", "format": "colour"}}, "colour"),
        ({"json_schema": {"$ref": "http://elsewhere/x"}}, "elsewhere"),
        ({"json_schema": {"$ref": "#"}}, "no text fits"),
        ({"json_schema": {"const": -6.715996064569913e-75}}, "to its last digit"),
        ({"grammar": "start: nothing"}, "grammar is not one"),
        ({"grammar": '%llguidance {}\nstart: "a"'}, "directive"),
        ({"regex": "a" * 100_000}, "100,000 characters"),
        ({"regex": "a", "grammar": 'start: "a"'}, "grammar with regex"),
        ({"regex": "a", "num_beams": 2}, "regex with num_beams 2"),
        ({"regex": "a", "forced_last": [3]}, "forced_last with regex"),
        ({"regex": "a", "min_new_tokens": 5}, "no token is left"),
        ({"regex": 3}, "regex 3 is not allowed"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(m, options, named):
    with pytest.raises(InputError, match=re.escape(named)):
        m.generate("x", 8, **options)


def test_a_model_that_cannot_end_a_text_is_told(byte_tokenizer):
    m = mixes.model("learned", byte_tokenizer)
    m.special.clear()
    with pytest.raises(InputError, match="stop_tokens"):
        m.generate("x", 8, regex="a")


def test_the_model_s_own_rules_about_length_give_way(byte_tokenizer):
    m = mixes.model("translator", byte_tokenizer)
    m.generation |= {"min_length": 20, "forced_eos_token_id": 10, "no_repeat_ngram_size": 1, "num_beams": 3}
    assert m.generate("x", 8, regex="abab").text == "abab"
    assert m.generate("x", 3, regex="abab").stop_reason == "length"
