"""Every field of every route: a value is what the OpenAPI file says, or a 400 that names the field."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.errors import InputError
from clearhead.learn.tasks.generation import chat_ids
from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.serve import mixes

PAIRS = {"model": "judge", "query": "which", "documents": ["one", "two"]}
BODIES = {
    "/v1/completions": {"model": "writer", "prompt": "ab", "max_tokens": 1},
    "/v1/chat/completions": dict(model="writer", messages=[{"role": "user", "content": "Hi"}], max_tokens=1),
    "/v1/responses": {"model": "writer", "input": "Hi", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"model": "writer", "input": "Hi"},
    "/v1/messages": dict(model="writer", messages=[{"role": "user", "content": "Hi"}], max_tokens=1),
    "/v1/messages/count_tokens": {"model": "writer", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/embeddings": {"model": "reader", "input": "ab"},
    "/pooling": {"model": "reader", "input": "ab"},
    "/v1/classify": {"model": "judge", "input": "ab"},
    "/v1/rerank": PAIRS,
    "/v1/score": PAIRS,
    "/tokenize": {"model": "writer", "prompt": "ab"},
    "/detokenize": {"model": "writer", "tokens": [1]},
}
# As Python's client sends them, and as one that is careless with types does.
SINGLE = [True, False, None, 0, 1, -1, 5, 1.0, -0.0, 2.5, 1e30, 10**30, float("nan"), float("inf")]
TEXTS = ["", "5", "1.0", "true", "null", "\ud800"]
VALUES = [*SINGLE, *TEXTS, {"a": 1}, *([one] for one in [True, None, 1, 1.0, "5", [1.0]])]


@pytest.fixture(scope="module")
def client(writer, reader, judge):
    """A client of a writer, an encoder and a model of pairs."""
    models = {"writer": writer, "reader": reader, "judge": judge}
    app = make_server({name: ServeEngine(m, Limits(block=8)) for name, m in models.items()})
    with TestClient(app, base_url="http://127.0.0.1") as found:
        yield found


def post(client, path: str, body) -> tuple[int, str, str | None]:
    """Return the status, and of an error its message and the field that it names."""
    raw = json.dumps(body).encode()
    answer = client.post(path, content=raw, headers={"Content-Type": "application/json"})
    error = answer.json().get("error", {}) if answer.status_code != 200 else {}
    message = error.get("message", "")
    # Anthropic's errors name the field in the message alone.
    param = message.partition(":")[0] if path.startswith("/v1/messages") else error.get("param")
    return answer.status_code, message, param


def described(client) -> tuple[dict, dict[str, dict]]:
    """Return the parts of the OpenAPI file, and the fields of each route."""
    found = client.get("/openapi.json").json()
    parts, fields = found["components"]["schemas"], {}
    for path in BODIES:
        (content,) = found["paths"][path]["post"]["requestBody"]["content"].values()
        fields[path] = parts[content["schema"]["$ref"].rpartition("/")[2]]["properties"]
    return parts, fields


def takes(parts: dict, schema: dict, value) -> bool:
    """Return whether a value is of the types that a schema names, read as JSON schema says: true is no 1."""
    if "$ref" in schema:
        return takes(parts, parts[schema["$ref"].rpartition("/")[2]], value)
    if "anyOf" in schema or "oneOf" in schema:
        return any(takes(parts, one, value) for one in schema.get("anyOf") or schema["oneOf"])
    if "enum" in schema:
        return value in schema["enum"]
    is_of = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e308,
        "string": isinstance(value, str),
        "array": isinstance(value, list) and all(takes(parts, schema["items"], one) for one in value or ())
        if schema.get("type") == "array"
        else False,
        "object": isinstance(value, dict),
    }
    return is_of[schema["type"]]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.slow
def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(client, path):
    """`"n": true`, `"max_tokens": "5"` and the like are no numbers, nor are the words of Python's JSON."""
    parts, fields = described(client)
    taken = 0
    shared = [] if path == "/v1/completions" else fields["/v1/completions"]  # they are of one class
    for field, schema in fields[path].items():
        if field in shared and field not in BODIES[path]:
            continue
        # Those that fit take the time of an answer: a few of them.
        fit = [value for value in SINGLE if takes(parts, schema, value)]
        for value in [*fit, *(one for one in VALUES if not takes(parts, schema, one))]:
            status, message, param = post(client, path, {**BODIES[path], field: value})
            assert status in (200, 400, 404), (field, value, message)
            assert status == 200 or field in message, (field, value, message)
            assert status != 404 or field == "model"
            if not takes(parts, schema, value):
                assert (status, (param or "").partition(".")[0]) == (400, field), (value, message)
            taken += status == 200
    assert taken or path in ("/v1/classify", "/detokenize")  # null is, elsewhere


def test_what_is_no_json_is_said_so(client):
    for raw, kind, said in (
        (b'{"prompt": ', "application/json", "body: no JSON: Expecting value at character 11"),
        (b'{"prompt": "x"}', "text/plain", "send it as Content-Type: application/json"),
        (b"[]", "application/json", "body: Input should be a valid dictionary"),
    ):
        answer = client.post("/v1/completions", content=raw, headers={"Content-Type": kind})
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]


JSON = st.recursive(
    st.sampled_from([*SINGLE, *TEXTS, "text", "json_object", "json_schema", "float", "a" * 2000]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "json", "regex", "name", "schema", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.data())
def test_no_body_breaks_a_route(client, data):
    """Several fields at once, of any JSON: an answer, or an error that names one of them."""
    _, fields = described(client)
    path = data.draw(st.sampled_from(sorted(BODIES)))
    change = data.draw(st.dictionaries(st.sampled_from(sorted(fields[path])), JSON, min_size=1, max_size=3))
    status, message, _ = post(client, path, {**BODIES[path], **change})
    assert status in (200, 400, 404), message
    named = [*change, "schema", "regex", "grammar", "tokens", "stream: true", "form", "prompt"]
    assert status == 200 or any(name in message for name in named), (change, message)


# What asks for nothing is taken; what would change the answer is refused by name.
NOTHING = [
    *({"tools": value} for value in (None, [])),
    *({name: None} for name in ("suffix", "logit_bias", "audio", "prediction", "best_of")),
    *({"tool_choice": value} for value in ("none", "auto", None)),
    {"logit_bias": {}},
    {"store": False},
    {"best_of": 1},
    {"top_logprobs": 0},
    {"top_k": -1},
    {"parallel_tool_calls": True},
    {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x"},
    {"prompt_cache_key": "k", "modalities": ["text"]},
    {
        "use_beam_search": False,
        "num_beams": 1,
        "length_penalty": 1.0,
        "early_stopping": False,
        "reuse": False,
    },
    {"lookup": 0},
    {"draft_tokens": 2},
]
SOMETHING = [
    *({"tools": [{}]}, {"store": True}, {"suffix": "x"}),
    *({"use_beam_search": True}, {"num_beams": 2}, {"early_exit": 0.5}, {"cache": "int8"}),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_field_that_asks_for_nothing_is_taken(client, path):
    body = {**BODIES[path], "temperature": 0}
    plain = client.post(path, json=body).json()["choices"]
    for fields in NOTHING:
        assert client.post(path, json={**body, **fields}).json().get("choices") == plain, fields
    for fields in SOMETHING:
        status, message, param = post(client, path, {**body, **fields})
        (name,) = fields
        assert (status, param) == (400, name), message
        if name == "store":
            assert message == '"store" is not served: null or false is taken'


def test_errors_have_the_codes_of_openai(client):
    chat = BODIES["/v1/chat/completions"]
    wrong = [
        ("/v1/completions", {"model": "nobody", "prompt": "a"}, 404, "model_not_found"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 100_000}, 400, "context_length_exceeded"),
        ("/v1/chat/completions", {**chat, "max_tokens": 100_000}, 400, "context_length_exceeded"),
        ("/v1/embeddings", {"model": "reader", "input": ["a", "b" * 5000]}, 400, "context_length_exceeded"),
    ]
    for path, body, status, code in wrong:
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.json()
        # litellm and others know OpenAI's words.
        known = "this model's maximum context length is" in answer.json()["error"]["message"]
        assert known == (code == "context_length_exceeded")
    cut = client.post("/v1/embeddings", json={"model": "reader", "input": "b" * 5000, "truncate": True})
    assert cut.status_code == 200
    status, message, _ = post(
        client, "/v1/chat/completions", {**chat, "messages": [{"role": "king", "content": ""}]}
    )
    assert status == 400
    assert "king" in message
    picture = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    status, message, _ = post(
        client, "/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": picture}]}
    )
    assert (status, "a part of the type 'image_url'" in message) == (400, True)


@pytest.mark.parametrize("shape", ["learned", "rope-gqa", "translator"])
def test_a_text_longer_than_the_context_has_the_code_of_openai(shape, byte_tokenizer):
    """Whatever limits it: a table of positions, what the model says, or the cache of the server."""
    m = mixes.model(shape, byte_tokenizer)
    for limits, longest in ((Limits(block=8), 128), (Limits(block=8, cache_tokens=64), 64)):
        with TestClient(make_server({"m": ServeEngine(m, limits)}), base_url="http://127.0.0.1") as client:
            room = longest - (1 if shape == "translator" else 30)  # its decoder begins with one token
            prompt = "a" * 30
            for asked, status in ((room, 200), (room + 1, 400)):
                answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": asked})
                assert answer.status_code == status, answer.json()
            for body in ({"max_tokens": room + 1}, {"prompt": [5] * 900}, {"prompt": "a" * 40_000}):
                answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **body})
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
                assert "overflow" not in error["message"]  # which is no field over HTTP
    if shape == "learned":
        with pytest.raises(InputError, match="--max-model-len 400 is more than the 128 positions"):
            ServeEngine(m, Limits(max_length=400))


def test_a_message_may_say_who_speaks(client, writer):
    """`name` is read where the template reads it, and changes nothing elsewhere; so does what is empty."""
    path, body = "/v1/chat/completions", {**BODIES["/v1/chat/completions"], "temperature": 0}
    (message,) = body["messages"]
    plain = client.post(path, json=body).json()["choices"]
    for more in ({"name": "ann"}, {"refusal": None, "annotations": [], "tool_calls": []}):
        found = client.post(path, json={**body, "messages": [{**message, **more}]}).json()
        assert found.get("choices") == plain, found
    m = ch.Model(writer.model, writer.tokenizer)
    m.settings = {"chat_template": "{% for m in messages %}<{{ m.name }}>{{ m.content }}{% endfor %}"}
    named = [{**message, "name": "ann"}]
    assert m.decode(chat_ids(m, named, {})) == "<ann>Hi"


def test_vectors_have_length_one_and_ranking_counts_tokens(client):
    (vector,) = client.post("/v1/embeddings", json=BODIES["/v1/embeddings"]).json()["data"]
    assert sum(value**2 for value in vector["embedding"]) == pytest.approx(1, abs=1e-5)
    assert client.post("/v1/rerank", json=PAIRS).json()["usage"]["total_tokens"] > 0
    assert client.get("/v1/models/reader").json()["id"] == "reader"
    assert client.get("/v1/models/nobody").status_code == 404


def test_pages_of_another_origin_read_answers_where_they_may(writer):
    engine = ServeEngine(writer, Limits(block=8))
    app = make_server({"m": engine}, keys=["k"], cors=["http://localhost:3000"])
    with TestClient(app, base_url="http://127.0.0.1") as client:
        mine, other = {"Origin": "http://localhost:3000"}, {"Origin": "http://evil.example"}
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert client.options("/v1/completions", headers={**mine, **asks}).status_code == 200
        assert client.options("/v1/completions", headers={**other, **asks}).status_code == 400
        key = {"Authorization": "Bearer k"}
        answer = client.get("/v1/models", headers={**mine, **key})
        assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert client.get("/v1/models", headers={**other, **key}).status_code == 403
        assert client.get("/v1/models", headers=mine).json()["error"]["code"] == "invalid_api_key"
