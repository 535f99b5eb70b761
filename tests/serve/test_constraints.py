"""Structured outputs over the engine and HTTP: kept, in company too, and bombs are refused."""

from __future__ import annotations

import json
import re

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import BusyError, InputError
from clearhead.run.generate import grammar
from clearhead.run.generate.grammar import check_constraint
from clearhead.run.generate.stream import TextStream, TokenTexts, token_texts
from clearhead.run.serve.answers import _named
from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.generate.test_streaming import KINDS
from tests.harness import word_tokenizer
from tests.serve import mixes
from tests.serve.served import serving
from tests.serve.test_http import call

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
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


# Tokens in answers -----------------------------------------------------------------------------------------


TOKENIZERS = {**KINDS, "words": word_tokenizer(["a", "b", "c", "<e>"], "a")}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_put_together_are_the_text(name, data):
    tokenizer = TOKENIZERS[name]
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12)
    prompt, new = data.draw(ids), data.draw(ids)
    stream, texts = TextStream(tokenizer, prompt), TokenTexts(TextStream(tokenizer, prompt))
    whole = "".join(map(stream.push, new)) + stream.finish()
    for token in new:
        texts.push(token, dict.fromkeys(range(5), -1.0))
    texts.finish()
    assert [one.id for one in texts.tokens] == new
    assert "".join(one.text for one in texts.tokens) == whole
    assert all(len(others) == 5 for others in texts.alternatives)
    raw = b"".join(one.bytes for one in texts.tokens)
    # A prompt that ends within a character is completed by the first of the new tokens.
    if "\ufffd" not in whole + tokenizer.decode(prompt) or (name == "byte level" and not prompt):
        assert raw.decode("utf-8", "replace") == whole


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_two_alternatives_have_one_name(name, data):
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    others = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    texts = TokenTexts(TextStream(tokenizer, data.draw(st.lists(st.integers(0, size - 1), max_size=4))))
    chosen = data.draw(st.integers(0, size - 1))
    texts.push(chosen, {token: -float(place) for place, token in enumerate(others)})
    texts.finish()
    names = dict(_named(texts.tokens[0], -0.5, texts.alternatives[0]))
    assert len(names) == len({*others, chosen})
    assert texts.tokens[0].text in names


def test_tokenize_shows_spaces_and_special_tokens():
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.token_to_id(token) for token in ("<s>", "▁the", "▁a", "en", "<0xC3>", "<0xA9>")]
    assert token_texts(tokenizer, ids) == ["<s>", "the", " a", "en", "", "é"]


@pytest.fixture(scope="module")
def client(byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.settings["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    with TestClient(
        make_server({"m": ServeEngine(m, Limits(block=8))}), base_url="http://127.0.0.1"
    ) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_reported_tokens_are_the_answer_also_with_a_stop(client, seed, stream):
    """A stop string cuts text off, and what it cuts is not reported."""
    body = {"prompt": "Hello", "max_tokens": 24, "seed": seed, "logprobs": 20, "temperature": 3.0}
    free = client.post("/v1/completions", json=body).json()["choices"][0]
    assert "".join(free["logprobs"]["tokens"]) == free["text"]
    assert all(len(best) in (20, 21) for best in free["logprobs"]["top_logprobs"])
    stop = next(free["text"][n : n + 2] for n in range(8, 24) if "\ufffd" not in free["text"][n : n + 2])
    text, tokens, offsets = "", [], []
    if stream:
        with client.stream("POST", "/v1/completions", json={**body, "stop": stop, "stream": True}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice["text"]
                    tokens += (choice["logprobs"] or {}).get("tokens", [])
                    offsets += (choice["logprobs"] or {}).get("text_offset", [])
    else:
        choice = client.post("/v1/completions", json={**body, "stop": stop}).json()["choices"][0]
        text, tokens = choice["text"], choice["logprobs"]["tokens"]
        offsets = choice["logprobs"]["text_offset"]
    assert text == free["text"][: free["text"].index(stop)]
    assert "".join(tokens) == text
    assert offsets == [len("".join(tokens[:n])) for n in range(len(tokens))]


def test_bytes_of_an_answer_are_its_text(client):
    body = {"messages": [{"role": "user", "content": "é"}], "max_tokens": 30, "temperature": 3.0, "seed": 1}
    choice = client.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2}).json()
    content = choice["choices"][0]["logprobs"]["content"]
    raw = bytes(value for token in content for value in token["bytes"])
    assert raw.decode("utf-8", "replace") == choice["choices"][0]["message"]["content"]
