"""Texts held to a form: a schema, an expression, a grammar; whatever the tokenizer, alone and together."""

from __future__ import annotations

import json
import re

import pytest

import clearhead as ch
from clearhead.errors import InputError
from clearhead.generate.forms import KEPT
from clearhead.tokens.plan import TokensPlan
from clearhead.tokens.spelling import token_bytes
from clearhead.tokens.training import GENERATOR, train_tokenizer
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

    from clearhead.generate.forms import grammar_of, vocabulary_of

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
    assert len(m.engine.forms.made) == KEPT


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
        ({"json_schema": {"$ref": "#"}}, "no text has this form"),
        ({"json_schema": {"const": -6.715996064569913e-75}}, "to its last digit"),
        ({"grammar": "start: nothing"}, "grammar is not one"),
        ({"grammar": '%llguidance {}\nstart: "a"'}, "directive"),
        ({"regex": "a" * 100_000}, "100,000 characters"),
        ({"regex": "a", "grammar": 'start: "a"'}, "regex and grammar were given"),
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
