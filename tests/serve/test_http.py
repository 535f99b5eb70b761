"""The routes, over HTTP: equal to the library, and refusals by name."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import struct
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qs

import pytest
import torch.nn.functional as nnf
from tokenizers import Tokenizer

from clearhead.run.generate.stream import TextStream
from clearhead.run.serve import answers
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.serve import mixes
from tests.serve.served import serving


@pytest.fixture(scope="module")
def address(writer, reader, judge) -> str:
    models = {"writer": writer, "reader": reader, "judge": judge}
    with serving({name: ServeEngine(m, Limits(block=8)) for name, m in models.items()}) as at:
        yield at


def call(address: str, path: str, body: dict | None = None, **headers: str):
    """Return status, headers and what was answered."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            status, given = answer.status, answer.headers
    except urllib.error.HTTPError as error:
        text, status, given = error.read().decode(), error.code, error.headers
    return status, given, json.loads(text) if text[:1] == "{" else text


def test_a_completion_equals_generate(address, writer):
    body = dict(model="writer", prompt="Hello", max_tokens=9, temperature=0.8, top_p=0.9, seed=5)
    found = call(address, "/v1/completions", {**body, "n": 2})[2]
    for number, choice in enumerate(found["choices"]):
        alone = writer.generate("Hello", 9, temperature=0.8, top_p=0.9, seed=5 + number, num_beams=1)
        assert (choice["text"], choice["index"]) == (alone.text, number)
        assert choice["finish_reason"] == ("length" if alone.stop_reason == "length" else "stop")
    read, made = len("Hello"), found["usage"]["completion_tokens"]
    assert (found["usage"]["prompt_tokens"], found["usage"]["total_tokens"]) == (read, read + made)


def test_echoed_log_probabilities_equal_scores(address, writer):
    text = "To be or not"
    body = {"model": "writer", "prompt": [text, "x y"], "max_tokens": 0, "echo": True, "logprobs": 2}
    first, second = call(address, "/v1/completions", body)[2]["choices"]
    assert (first["text"], second["text"]) == (text, "x y")
    given, wanted = first["logprobs"], writer.score(text).logprobs
    assert given["token_logprobs"][0] is None
    pairs = zip(given["token_logprobs"][1:], wanted[1:], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-4
    assert given["text_offset"] == list(range(len(text)))
    assert "".join(given["tokens"]) == text
    for token, value, best in list(zip(given["tokens"], given["token_logprobs"], given["top_logprobs"]))[1:]:
        assert best[token] == value


@pytest.mark.parametrize("most", [0, 4])
def test_a_stream_with_echo_tells_every_token_once(address, most):
    """Prompts of several bytes a character, two choices each: texts, offsets and numbers are the whole's."""
    body = {"model": "writer", "prompt": ["Grüße 😀", "ab"], "max_tokens": most, "seed": 3, "n": 2}
    body |= {"echo": True, "logprobs": 2}
    whole = call(address, "/v1/completions", body)[2]["choices"]
    text = call(address, "/v1/completions", {**body, "stream": True})[2]
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    for choice in whole:
        own = [one["choices"][0] for one in events if one["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        for name, wanted in choice["logprobs"].items():
            found = [value for one in own if one["logprobs"] for value in one["logprobs"][name]]
            assert len(found) == len(wanted)
            assert name == "top_logprobs" or found == pytest.approx(wanted, abs=1e-5)


def test_a_stream_is_the_same_text_in_pieces(address, writer):
    body = {"model": "writer", "prompt": "Hello", "max_tokens": 9, "temperature": 0, "stream": True}
    text = call(address, "/v1/completions", {**body, "stream_options": {"include_usage": True}})[2]
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    *chunks, usage = [json.loads(event) for event in events[:-1]]
    assert (
        "".join(one["choices"][0]["text"] for one in chunks) == writer.generate("Hello", 9, num_beams=1).text
    )
    reasons = [one["choices"][0]["finish_reason"] for one in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] in ("stop", "length")
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 5


def test_a_long_stream_reads_each_token_once(address, monkeypatch):
    """Where tokens begin in the text is followed, and not read anew from the beginning for each event."""
    pushed = []
    push = TextStream.push
    monkeypatch.setattr(TextStream, "push", lambda self, token: pushed.append(token) or push(self, token))
    body = {"model": "writer", "prompt": "ab", "max_tokens": 60, "temperature": 0, "stream": True}
    events = call(address, "/v1/completions", {**body, "logprobs": 1})[2].split("\n\n")
    told = [
        json.loads(event[6:])["choices"][0]["logprobs"] for event in events if event.startswith("data: {")
    ]
    count = sum(len(one["tokens"]) for one in told if one)
    assert count > 20
    assert len(pushed) == 2 * count  # each by the engine for the text, and once for its place


def test_who_reads_slowly_gets_longer_pieces():
    async def read():
        box = answers.EventQueue()
        for number, text, count in [(0, "a", 1), (1, "x", 1), (0, "b", 2), (0, "c", 3)]:
            box.put(number, text, count, count == 3)
        first = [await box.get(), await box.get()]
        late = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        assert not late.done()
        box.put(1, "y", 2, True)
        return [*first, await late]

    with ThreadPoolExecutor() as threads:  # another test may have a loop that runs in this one
        found = threads.submit(lambda: asyncio.run(read())).result()
    wanted = [(0, "abc", 3, True), (1, "x", 1, False), (1, "y", 2, True)]
    assert found == [answers.Update(*one) for one in wanted]


@pytest.mark.parametrize("marked", [False, True], ids=["template", "marked template"])
def test_a_chat_ends_where_the_turn_does(byte_tokenizer, marked):
    """`m.chat` and the server stop at the token that the template writes after an answer."""
    tokenizer = Tokenizer.from_str(byte_tokenizer.to_str())
    m = mixes.model("rope-gqa", tokenizer)
    drawn = {"temperature": 1.0, "seed": 3}
    written = m.generate(tokenizer.encode("<user>Hi<a>").ids, 12, **drawn).ids
    end = tokenizer.id_to_token(written[4])
    assert written[4] not in written[:4]
    tokenizer.add_special_tokens([end])
    said = "{{ m.content }}{{ eos_token }}"
    said = "{% generation %}" + said + "{% endgeneration %}" if marked else said
    m.settings = {
        "eos_token": end,
        "chat_template": "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}<a>"
        + said
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
    }
    messages = [{"role": "user", "content": "Hi"}]
    answer = m.chat(messages, 12, **drawn)
    assert answer.ids[:4] == written[:4] and len(answer.ids) <= 5
    with serving({"m": ServeEngine(m, Limits(block=8))}) as address:
        body = {"model": "m", "messages": messages, "max_tokens": 12, **drawn}
        choice = call(address, "/v1/chat/completions", body)[2]["choices"][0]
    assert choice["message"]["content"] == answer.text
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_equal_embed(address, reader, form):
    texts = ["one", "two words"]
    found = call(address, "/v1/embeddings", {"model": "reader", "input": texts, "encoding_format": form})[2]
    rows = [one["embedding"] for one in found["data"]]
    if form == "base64":
        rows = [struct.unpack(f"<{len(base64.b64decode(row)) // 4}f", base64.b64decode(row)) for row in rows]
    wanted = nnf.normalize(reader.embed(texts)).tolist()
    assert max(abs(a - b) for row, mine in zip(rows, wanted) for a, b in zip(row, mine, strict=True)) < 1e-5


def test_reranking_orders_documents_by_the_model_of_pairs(address, judge):
    texts = ["first", "second one", "third"]
    body = {"model": "judge", "query": "which", "documents": texts}
    scores = [one["score"] for one in call(address, "/v1/score", body)[2]["data"]]
    wanted = [judge.classify(("which", text)).probability for text in texts]
    assert max(abs(a - b) for a, b in zip(scores, wanted, strict=True)) < 1e-5
    found = call(address, "/v1/rerank", {**body, "top_n": 2})[2]["results"]
    assert [one["index"] for one in found] == sorted(range(3), key=lambda n: -scores[n])[:2]


def test_tokens_there_and_back(address):
    found = call(address, "/tokenize", {"model": "writer", "prompt": "Grüße"})[2]
    assert found["count"] == 7
    assert (
        call(address, "/detokenize", {"model": "writer", "tokens": found["tokens"]})[2]["prompt"] == "Grüße"
    )


@pytest.mark.parametrize(
    ("path", "change", "status", "named"),
    [
        ("/v1/completions", {"store": True}, 400, '"store" is not served'),
        ("/v1/completions", {"n": 99}, 400, "n: "),
        ("/v1/completions", {"prompt": ""}, 400, "prompt is empty"),
        ("/v1/completions", {"prompt": [999]}, 400, "999"),
        ("/v1/completions", {"max_tokens": 10**6}, 400, "context length"),
        ("/v1/completions", {"model": "wirter"}, 404, 'did you mean "writer"'),
        ("/v1/completions", {"model": "reader"}, 400, "it generates no text"),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("/v1/chat/completions", {"messages": [], "prompt": None}, 400, "messages"),
        ("/v1/nowhere", {}, 404, "Not Found"),
    ],
)
def test_what_is_wrong_is_named(address, path, change, status, named):
    found = call(address, path, {"model": "writer", "prompt": "x", **change})
    assert found[0] == status
    assert named in found[2]["error"]["message"]


def test_keys_and_the_end_of_the_line(byte_tokenizer):
    m = mixes.model("learned", byte_tokenizer)
    engine = ServeEngine(m, Limits(waiting=1, running=1))
    engine.start = lambda: None  # nothing moves
    with serving({"m": engine}, keys=["secret"], drain=0) as at:
        body = {"prompt": "x", "max_tokens": 5}
        assert call(at, "/v1/completions", body)[0] == 401
        assert call(at, "/v1/completions", body, Authorization="Bearer wrong")[0] == 401
        assert call(at, "/health")[0] == 200
        engine.submit("x")
        engine.submit("x")
        engine.moved -= 100
        status, headers, answer = call(at, "/v1/completions", body, Authorization="Bearer secret")
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "2 requests" in answer["error"]["message"]
        assert call(at, "/health")[0] == 503  # work waits and nothing moves
        engine.waiting.clear()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_blocks(stream, byte_tokenizer):
    m = mixes.model("rope-gqa", byte_tokenizer)
    m.special.clear()
    engine = ServeEngine(m, Limits(block=8))
    original, slowly = engine.step, lambda: (time.sleep(0.05), original())
    engine.step = slowly
    with serving({"m": engine}) as at:
        host = at.removeprefix("http://")
        connection = http.client.HTTPConnection(host)
        body = {"prompt": "x", "max_tokens": 120, "stream": stream, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        until = time.monotonic() + 60
        while not engine.running and time.monotonic() < until:
            time.sleep(0.005)
        connection.close()
        while engine.busy and time.monotonic() < until:
            time.sleep(0.005)
        assert engine.pool.used == 0
        reasons = dict(engine.stats.ended)
        assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.0' in call(at, "/metrics")[2]
    assert reasons == {"cancelled": 1}


def test_metrics_have_the_names_that_boards_know(address):
    assert call(address, "/v1/completions", {"prompt": "a", "max_tokens": 1, "temperature": 0})[0] == 200
    text = call(address, "/metrics")[2]
    for name in ("num_requests_running", "prompt_tokens_total", "request_success_total"):
        assert f"vllm:{name}{{model_name=" in text
    assert 'vllm:time_to_first_token_seconds_bucket{le="+Inf"}' in text


# The page of a server --------------------------------------------------------------------------------------


def redirect(at: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(at.removeprefix("http://"))
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.headers["Location"] or ""


def test_the_page_shows_figures_and_opens_finished_requests(byte_tokenizer):
    models = {"writer": "rope-gqa", "of/two": "translator"}
    engines = {
        name: ServeEngine(mixes.model(shape, byte_tokenizer), Limits(block=8))
        for name, shape in models.items()
    }
    with serving(engines, page=True) as at:
        status, headers, text = call(at, "/")
        assert (status, "script-src 'self'" in headers["Content-Security-Policy"]) == (200, True)
        for file in ("serving.js", "serving.css", "style.css", "dom.js"):
            assert file in text or file == "dom.js"
            assert call(at, f"/page/{file}")[0] == 200
        assert call(at, "/page/../app.py")[0] == call(at, "/open/0/1")[0] == call(at, "/open/7/1")[0] == 404
        bodies = [
            {"model": name, "prompt": "A secret", "max_tokens": 5, "temperature": 0} for name in engines
        ]
        answers = [call(at, "/v1/completions", body)[2] for body in bodies]
        written = [answer["choices"][0]["text"] for answer in answers]
        status, _, state = call(at, "/page/state")
        assert "secret" not in json.dumps(state)
        for place, (name, engine) in enumerate(engines.items()):
            (seq,) = engine.finished
            assert (
                state[name]["finished"][0]["written"] == len(seq.ids) == state[name]["totals"]["new_tokens"]
            )
            read = len("A secret") + place  # the second writes after a token of its own
            assert answers[place]["usage"]["prompt_tokens"] == state[name]["totals"]["prompt_tokens"] == read
            status, where = redirect(at, f"/open/{place}/{seq.number}")
            path, _, asked = where.partition("#")
            read = parse_qs(asked)
            ids = [int(one) for one in read["ids"][0].split()]
            source = seq.prompts.source
            assert (status, ids) == (303, seq.tokens if source is None else source[0].tolist())
            assert read.get("written", [""]) == ["" if source is None else written[place]]
            assert call(at, f"{path}inside/model")[2]["name"] == name
            given = {"ids": ids, **({} if source is None else {"target": written[place]})}
            run = call(at, f"{path}inside/run", given)[2]
            assert run["tokens" if source is None else "source"]["ids"] == ids


def test_the_page_asks_for_a_key_as_browsers_know_it(byte_tokenizer):
    engines = {"m": ServeEngine(mixes.model("learned", byte_tokenizer))}
    with serving(engines, keys=["k"], page=True) as at:
        status, headers, _ = call(at, "/")
        assert (status, headers["WWW-Authenticate"]) == (401, "Basic")
        basic = [f"Basic {base64.b64encode(raw).decode()}" for raw in (b"me:k", b"me:no")]
        assert [call(at, "/page/state", Authorization=one)[0] for one in (*basic, "Basic ?")] == [
            200,
            401,
            401,
        ]
        assert call(at, "/explore/0/inside/model")[0] == 401
    with serving(engines) as at:
        assert call(at, "/")[0] == 404
