"""Structured outputs over the engine and HTTP: kept, in company too, and bombs are refused."""

from __future__ import annotations

import json
import re

import pytest

from clearhead.errors import BusyError, InputError
from clearhead.run.generate import grammar
from clearhead.run.generate.grammar import check_constraint
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.protocol import closed
from tests.serve.served import serving
from tests.serve.test_http import call

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
OPEN = {name: value for name, value in PERSON.items() if name != "additionalProperties"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "seed": 1}


@pytest.fixture(scope="module")
def address(writer):
    with serving({"writer": ServeEngine(writer, Limits(block=8))}) as at:
        yield at


def test_rows_with_and_without_a_constraint_equal_each_alone(writer):
    """Blocks are so few that requests are preempted, and read their tokens anew."""
    draws = {"temperature": 1.0, "max_new_tokens": 25, "num_beams": 1}
    constraints = [
        {"regex": "[a-z]{2,9}!"},
        {},
        {"grammar": 'root ::= "(" root ")" | [0-9]'},
        {"json_schema": "true"},
    ]
    engine = ServeEngine(writer, Limits(tokens=16, block=4, cache_tokens=72))
    asked = [draws | constraints[n % 4] | {"seed": n} for n in range(8)]
    seqs = [engine.submit("some text " * (n % 3 + 1), one) for n, one in enumerate(asked)]
    while engine.busy:
        engine.step()
    assert engine.stats.preempted > 0
    for number, (seq, one) in enumerate(zip(seqs, asked)):
        alone, found = writer.generate("some text " * (number % 3 + 1), **one), seq.wait(0)
        assert (found.ids, found.text, found.stop_reason) == (alone.ids, alone.text, alone.stop_reason)
    assert engine.pool.used == 0


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, None),
        ({"json_schema": PERSON}, None),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "p", "schema": OPEN, "strict": True},
                }
            },
            None,
        ),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, None),
        ({"structured_outputs": {"choice": ["red", "dark blue", "a|b (c)"]}}, r"red|dark blue|a\|b \(c\)"),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"regex": "(ab){3}"}, "(ab){3}"),
        ({"grammar": 'root ::= "x" [yz]'}, "x[yz]"),
        ({"response_format": {"type": "text"}}, "(?s:.*)"),
    ],
)
def test_a_constraint_in_the_words_of_openai_vllm_and_llama_cpp(address, body, wanted):
    status, _, found = call(address, "/v1/chat/completions", CHAT | body)
    assert status == 200, found
    (choice,) = found["choices"]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "length":
        assert found["usage"]["completion_tokens"] == 60
    elif wanted is None:
        person = json.loads(text)
        assert set(person) == {"name", "old"}
        assert type(person["old"]) is bool
    if wanted is not None:
        assert re.fullmatch(wanted, text)


def test_strict_closes_every_object_that_does_not_say_otherwise():
    inner = {"type": "object", "properties": {"b": {"type": "array", "items": OPEN}}}
    free = {"properties": {"c": {}}, "additionalProperties": {"type": "string"}}
    parts = {"properties": {"d": {}}, "allOf": [{"properties": {"e": {}}}]}
    schema = {
        "properties": {"properties": inner, "f": free, "g": parts, "h": {"anyOf": [OPEN, {"type": "null"}]}}
    }
    shut = {"additionalProperties": False}
    assert (
        closed(schema | {"$defs": {"x": OPEN}})
        == {
            "properties": {
                "properties": {"type": "object", "properties": {"b": {"type": "array", "items": PERSON}}}
                | shut,
                "f": free,
                "g": parts,
                "h": {"anyOf": [PERSON, {"type": "null"}]},
            },
            "$defs": {"x": PERSON},
        }
        | shut
    )
    assert "additionalProperties" not in schema


def test_json_mode_writes_an_object_without_white_space(address):
    body = {"prompt": "x", "max_tokens": 40, "response_format": {"type": "json_object"}, "temperature": 0}
    text = call(address, "/v1/completions", body)[2]["choices"][0]["text"]
    assert text.startswith("{")
    assert not re.search(r"^\{\s|[:,]\s", text.partition('"')[0])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"structured_outputs": {"structural_tag": "x"}},
            '"structured_outputs.structural_tag" is not a field',
        ),
        ({"regex": "a", "grammar": "b"}, "regex and grammar"),
        ({"regex": "("}, "unclosed group"),
        ({"json_schema": {"type": "string", "pattern": "(?!a)"}}, "look"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused(address, body, named):
    status, _, found = call(address, "/v1/chat/completions", CHAT | body)
    assert (status, named in found["error"]["message"]) == (400, True), found


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


@pytest.mark.parametrize(
    "wanted",
    [
        ("json_schema", nested(100)),
        ("json_schema", nested(3000)),
        ("regex", "(" * 10_000 + ")" * 10_000),
        ("regex", ".*" * 300 + "x"),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("regex", "x" * 70_000),
    ],
    ids=lambda wanted: wanted[1][:12],
)
def test_bombs_are_refused(wanted):
    with pytest.raises(InputError):
        check_constraint(wanted)


def test_what_takes_too_long_meets_the_system_s_limits(monkeypatch):
    """Patterns that must all match make the library search without an end."""
    patterns = [{"type": "string", "pattern": f"^.*{'ab' * n}.*$"} for n in range(1, 40)]
    with pytest.raises(InputError, match="takes more than 2 seconds or 1024 MiB"):
        check_constraint(("json_schema", json.dumps({"allOf": patterns})))


def test_a_text_that_is_prescribed_a_billion_times_is_written_token_by_token(writer):
    assert writer.generate("x", 5, regex="(((a{1000}){1000}){1000})").text == "aaaaa"


def test_no_more_than_a_few_are_tried_at_once(monkeypatch):
    monkeypatch.setattr(grammar, "WAITING", 0.01)
    for _ in range(grammar.AT_ONCE):
        grammar.TRIALS.acquire()
    try:
        with pytest.raises(BusyError, match="constraints are being tried"):
            check_constraint(("regex", "never-tried-before"))
    finally:
        for _ in range(grammar.AT_ONCE):
            grammar.TRIALS.release()
