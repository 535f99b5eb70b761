"""Every field of every route: a value is what the OpenAPI file says, or a 400 that names the field."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.serve import mixes

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
PAIRS = {"model": "judge", "query": "which", "documents": ["one", "two"]}
BODIES = {
    "/v1/completions": {"model": "writer", "prompt": "ab", "max_tokens": 1},
    "/v1/chat/completions": {
        "model": "writer",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
    },
    "/v1/embeddings": {"model": "reader", "input": "ab"},
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
def client(byte_tokenizer):
    """A client of a writer, an encoder and a model of pairs."""
    writer = mixes.model("rope-gqa", byte_tokenizer)
    writer.settings["chat_template"] = TEMPLATE
    models = {
        "writer": writer,
        "reader": mixes.model("learned", byte_tokenizer, family="encoder", head="none"),
        "judge": mixes.model("learned", byte_tokenizer, family="encoder", head="classifier", n_classes=1),
    }
    app = make_server({name: ServeEngine(m, Limits(block=8)) for name, m in models.items()})
    with TestClient(app, base_url="http://127.0.0.1") as found:
        yield found


def post(client, path: str, body) -> tuple[int, str, str | None]:
    """Return the status, and of an error its message and the field that it names."""
    raw = json.dumps(body).encode()
    answer = client.post(path, content=raw, headers={"Content-Type": "application/json"})
    error = answer.json().get("error", {}) if answer.status_code != 200 else {}
    return answer.status_code, error.get("message", ""), error.get("param")


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
    if "anyOf" in schema:
        return any(takes(parts, one, value) for one in schema["anyOf"])
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
