"""Every field that the clients' packages know: it works, changes nothing, or is refused by its name."""

from __future__ import annotations

import pytest
import torch
from fastapi.testclient import TestClient
from tools.api_fields import BODIES, REFUSED, UNUSED

from clearhead.run.serve import protocol
from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.later import later
from tests.serve.scripted import without_ids
from tools import api_fields

later("openai", reason="needs the openai client: pip install 'clearhead[dev]'")

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
# Of every option: a value that is taken.
GENERATION = {
    **{"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "typical_p": 0.9, "seed": 3, "n": 2},
    **{"max_tokens": 2, "min_tokens": 1, "stop": ["x", "y"], "stop_token_ids": [5], "seconds": 9.0},
    **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "no_repeat_ngram": 3},
    **{"logit_bias": {"5": -100, "66": 1.5}, "json_schema": SCHEMA, "regex": "[a-z]{2}"},
    **{"grammar": 'root ::= "x"', "response_format": {"type": "text"}, "cache_salt": "s", "inside": ["lens"]},
    **{"structured_outputs": {"choice": ["a", "b"]}, "stream": True, "stream_options": None},
    **{"skip_special_tokens": False, "suffix": None, "lookup": 0, "draft_tokens": 1},
    **{"denoising_steps": None, "unmasking": "confidence", "mask_schedule": "linear", "block_length": None},
}
MESSAGES = [{"role": "user", "content": "Hi", "name": "ann"}]
# Of each body: the least request, and a value of each field that works.
CASES = {
    "completions": (
        {"model": "writer", "prompt": "ab", "max_tokens": 1, "temperature": 0},
        {**GENERATION, "prompt": [[65, 66], [67]], "best_of": 2, "echo": True, "logprobs": 2},
    ),
    "chat": (
        {"model": "writer", "messages": MESSAGES, "max_tokens": 1, "temperature": 0},
        {
            **{**GENERATION, "messages": MESSAGES, "logprobs": True, "top_logprobs": 0},
            **{"max_completion_tokens": None, "chat_template_kwargs": {}, "reasoning_effort": "none"},
            **{"tools": [], "tool_choice": "none", "parallel_tool_calls": False},
        },
    ),
    "embeddings": (
        {"model": "reader", "input": "ab"},
        {
            **{"input": [[65, 66], [67]], "encoding_format": "base64", "dimensions": 3},
            **{"truncate": "END", "prompt_name": None},
        },
    ),
}
TOOL = {"name": "f", "description": "d"}
OPTIONS = {name: value for name, value in GENERATION.items() if name not in ("n", "max_tokens")}
STRAY = ("response_format", "structured_outputs", "inside")  # they are of OpenAI's first routes alone
WITHIN = {name: value for name, value in OPTIONS.items() if name not in STRAY}
WITHIN |= {"tools": [{"type": "function", **TOOL}], "tool_choice": "none", "chat_template_kwargs": {}}
COUNTED = {
    **{**WITHIN, "input": [{"role": "user", "content": "Hi"}], "instructions": "Be brief."},
    **{"parallel_tool_calls": False, "reasoning": {"effort": "none"}, "previous_response_id": None},
    **{"text": {"format": {"type": "json_schema", "schema": SCHEMA}}, "truncation": "auto"},
}
SAID = {
    **{**WITHIN, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    **{"system": "Be brief.", "tools": [{**TOOL, "input_schema": {"type": "object"}}], "max_tokens": 2},
    **{"tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}, "stop_sequences": ["x"]},
    **{"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}
ASKED = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
CASES |= {
    "responses": (
        {"model": "talker", "input": "Hi", "max_output_tokens": 1, "temperature": 0},
        {
            **{**COUNTED, "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}},
            **{"max_output_tokens": 2, "prompt_cache_options": {"mode": "implicit"}, "store": False},
            **{"stream_options": {"include_obfuscation": False}, "top_logprobs": 2},
        },
    ),
    "input_tokens": ({"model": "talker", "input": "Hi"}, COUNTED),
    "messages": ({**ASKED, "max_tokens": 1, "temperature": 0}, SAID),
    "count_tokens": (ASKED, SAID),
}
FORMS = ("transcriptions", "translations")  # no JSON: see test_audio
OTHERS = (7, "x", {"x": 1}, [{"x": 1}])  # what asks for something, of a field that is refused


@pytest.fixture(scope="module")
def client(writer, talker, reader):
    models = {"writer": writer, "talker": talker, "reader": reader}
    app = make_server({name: ServeEngine(m, Limits(block=8)) for name, m in models.items()})
    with TestClient(app, base_url="http://127.0.0.1") as found:
        yield found


def answer(client, name: str, **fields):
    """What is answered to the least request with these fields, but for what differs each time."""
    found = client.post(BODIES[name].route, json={**CASES[name][0], **fields})
    body = {} if "text/event-stream" in found.headers["content-type"] else found.json()
    drawn = ("created", "created_at", "usage")
    return found.status_code, {key: value for key, value in without_ids(body).items() if key not in drawn}


def names(told: dict, field: str) -> bool:
    """Whether an error names a field; Anthropic's does in its words alone."""
    error = told["error"]
    return error["param"] == field if "param" in error else field in error["message"]


def test_every_body_of_the_table_is_tried():
    assert {*CASES, *FORMS} == BODIES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_table_of_fields_is_what_the_server_does(client, name):
    """A field that works takes its value; one without effect, any; a refused one, what asks for nothing."""
    body, (least, examples), plain = api_fields.class_of(BODIES[name].ours), CASES[name], answer(client, name)
    assert plain[0] == 200
    table = api_fields.api_fields(BODIES[name])
    assert {field.name for field in table} >= {*api_fields.client_fields(BODIES[name]), *least}
    for field in table:
        assert field.name in least or answer(client, name, **{field.name: None}) == plain, field.name
        if field.status == UNUSED:
            for value in (*OTHERS, True, False, 0, "", []):
                assert answer(client, name, **{field.name: value}) == plain, (field.name, value)
        elif field.status == REFUSED:
            for value in body.no_ops.get(field.name, ()):
                assert answer(client, name, **{field.name: value}) == plain, (field.name, value)
            for value in OTHERS:
                status, told = answer(client, name, **{field.name: value})
                assert status == 400 and names(told, field.name), (field.name, told)
        elif field.name != "model":
            status, told = answer(client, name, **{field.name: examples[field.name]})
            assert status == 200, (field.name, told)


def test_a_stream_is_padded_for_nobody(client):
    """`include_obfuscation` false asks for what is anyway; true is refused."""
    for value, status in ((False, 200), (None, 200), (True, 400)):
        options = {"include_usage": True, "include_obfuscation": value}
        found = client.post(
            "/v1/completions", json={**CASES["completions"][0], "stream": True, "stream_options": options}
        )
        assert found.status_code == status
    assert found.json()["error"]["param"] == "stream_options.include_obfuscation"


# What the fields do -----------------------------------------------------------------------------------------


def choices(client, **body) -> list[dict]:
    found = client.post("/v1/completions", json={"model": "writer", **body})
    assert found.status_code == 200, found.json()
    return found.json()["choices"]


def test_biased_logits_give_what_generate_gives(client, writer):
    for drawn in ({"temperature": 0}, {"temperature": 1.2, "seed": 5}):
        a, b, c = (writer.tokenizer.token_to_id(letter) for letter in "ABC")
        biases = {a: 100.0, b: -100.0, c: 99.5}
        (choice,) = choices(
            client, prompt="ab", max_tokens=9, logit_bias={str(k): v for k, v in biases.items()}, **drawn
        )
        assert choice["text"] == writer.generate("ab", 9, num_beams=1, logit_bias=biases, **drawn).text
        assert {*choice["text"]} <= {*"AC"}
    for wrong in ({"x": 1}, {"5": 101}, {"5": True}, {"-1": 1}, {"999": 1}, [1], {"5": None}):
        found = client.post("/v1/completions", json={"prompt": "a", "logit_bias": wrong})
        assert found.status_code == 400
        assert "logit_bias" in found.json()["error"]["message"]
    many = {str(token): 0 for token in range(protocol.MOST_BIASES + 1)}
    found = client.post("/v1/completions", json={"prompt": "a", "logit_bias": many})
    assert "at most" in found.json()["error"]["message"]


@pytest.mark.parametrize("reported", [None, 2])
def test_the_best_of_several_are_the_most_probable_per_token(client, writer, reported):
    """Of two prompts: of five texts each, by the seeds that they have alone, two; all tokens are counted."""
    prompts, drawn = ["Hello", "some text"], {"temperature": 2.0, "stop": [*"aeiou12345"]}
    body = {"model": "writer", "prompt": prompts, "best_of": 5, "n": 2, "seed": 7, "max_tokens": 20, **drawn}
    body["logprobs"] = reported
    found = client.post("/v1/completions", json=body).json()
    wanted, tokens = [], 0
    for prompt in prompts:
        made = [writer.generate(prompt, 20, seed=7 + n, logprobs=True, **drawn) for n in range(5)]
        tokens += sum(len(one.ids) for one in made)
        assert len({len(one.ids) for one in made}) > 1  # a sum would rank them otherwise
        made.sort(key=lambda one: -sum(one.logprobs) / len(one.logprobs))
        wanted += [one.text for one in made[:2]]
    assert [choice["text"] for choice in found["choices"]] == wanted
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert all((choice["logprobs"] is None) == (reported is None) for choice in found["choices"])
    assert found["usage"]["completion_tokens"] == tokens
    for wrong, named in (
        ({"best_of": 1}, "best_of 1 is less than n 2"),
        ({"stream": True}, "best_of 5 with stream"),
        ({"best_of": 99}, "best_of"),
        ({"best_of": True}, "best_of"),
    ):
        found = client.post("/v1/completions", json={**body, **wrong})
        assert found.status_code == 400
        assert named in found.json()["error"]["message"]
    whole = client.post("/v1/completions", json={**body, "best_of": 2, "stream": True})
    assert whole.text.endswith("data: [DONE]\n\n")


def vectors(client, **body) -> torch.Tensor:
    found = client.post("/v1/embeddings", json={"model": "reader", **body})
    assert found.status_code == 200, found.json()
    return torch.tensor([one["embedding"] for one in found.json()["data"]])


def test_vectors_are_cut_and_have_length_one_again(client):
    whole = vectors(client, input=["one", "two words"])
    width = whole.shape[1]
    for count in (1, 3, width):
        found = vectors(client, input=["one", "two words"], dimensions=count)
        want = whole[:, :count] / whole[:, :count].norm(dim=-1, keepdim=True)
        assert found.shape == want.shape
        assert torch.allclose(found, want, atol=1e-6)
    for wrong in (0, -1, width + 1, True, 2.0):
        found = client.post("/v1/embeddings", json={"model": "reader", "input": "a", "dimensions": wrong})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "dimensions")
    assert (
        f"choose 1 to {width}"
        in client.post(
            "/v1/embeddings", json={"model": "reader", "input": "a", "dimensions": width + 1}
        ).json()["error"]["message"]
    )


def test_token_ids_are_embedded_as_they_are(client, reader):
    texts = ["one", "two words", "é"]
    ids = [reader.tokenizer.encode(text).ids for text in texts]
    want = vectors(client, input=texts)
    assert torch.equal(vectors(client, input=ids), want)
    assert torch.equal(vectors(client, input=ids[1]), want[1:2])
    long = [65] * (reader.max_length + 5)
    cut = vectors(client, input=[long, long[:-5]], truncate=True)
    assert torch.allclose(cut[0], cut[1], atol=1e-6)
    for wrong, named in (
        (long, "input 0 has 133"),
        ([], "input"),
        ([[]], "input"),
        ([5, 999], "999"),
        ([[5], "a"], "input"),
        ([5, True], "input"),
        ([-1], "input"),
    ):
        found = client.post("/v1/embeddings", json={"model": "reader", "input": wrong})
        assert found.status_code == 400
        assert named in found.json()["error"]["message"]
