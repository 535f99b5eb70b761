"""SPLADE and ColBERT over HTTP: /pooling gives what `embed` gives, ranking compares as `rerank` does."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch.nn.functional as nnf
from fastapi.testclient import TestClient

from clearhead.run.serve.app import make_server
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.limits import Limits
from tests.retrieval.test_stores import embedder

pytestmark = pytest.mark.ledger("W9")
TEXTS = ["a bell in the tower", "song.", "a boat on the river, and a mill"]


@pytest.fixture(scope="module")
def models(tmp_path_factory, reader):
    folder = tmp_path_factory.mktemp("models")
    named = {"splade": "sparse, cosine", "colbert": "tokens", "mean": "tokens, mean"}
    return {name: embedder(folder / name, case) for name, case in named.items()} | {"reader": reader}


@pytest.fixture(scope="module")
def client(models):
    app = make_server({name: ServeEngine(m, Limits(block=8)) for name, m in models.items()})
    with TestClient(app, base_url="http://127.0.0.1") as found:
        yield found


def test_pooling_gives_what_embed_gives(client, models):
    for prompt in ("query", None):
        body = {"input": TEXTS, "prompt_name": prompt}
        found = client.post("/pooling", json={"model": "colbert", **body}).json()
        wanted = models["colbert"].embed(TEXTS, prompt=prompt)
        assert [(row["index"], row["object"]) for row in found["data"]] == [(n, "pooling") for n in range(3)]
        for row, vectors in zip(found["data"], wanted, strict=True):
            np.testing.assert_allclose(row["data"], vectors.numpy(), atol=2e-6)
        coded = {"model": "colbert", **body, "encoding_format": "base64"}
        for row, vectors in zip(client.post("/pooling", json=coded).json()["data"], wanted, strict=True):
            numbers = np.frombuffer(base64.b64decode(row["data"]), "<f4").reshape(row["shape"])
            np.testing.assert_allclose(numbers, vectors.numpy(), atol=2e-6)
        sparse = client.post("/pooling", json={"model": "splade", **body}).json()["data"]
        for row, vector in zip(sparse, models["splade"].embed(TEXTS, prompt=prompt), strict=True):
            numbers = np.zeros(vector.width, np.float32)
            numbers[row["data"]["indices"]] = row["data"]["values"]
            np.testing.assert_allclose(numbers, vector.dense().numpy(), atol=2e-5)
    read = sum(map(len, models["colbert"].encode(TEXTS)))  # copies that make a query longer do not count
    assert found["usage"] == {"prompt_tokens": read, "total_tokens": read}
    (row,) = client.post("/pooling", json={"model": "reader", "input": TEXTS[0]}).json()["data"]
    wanted = nnf.normalize(models["reader"].embed(TEXTS[:1]), dim=-1)[0]
    np.testing.assert_allclose(row["data"], wanted.numpy(), atol=2e-6)


@pytest.mark.parametrize("name", ["splade", "colbert", "mean"])
def test_ranking_compares_as_rerank_does(name, client, models):
    body = {"model": name, "query": "the bell", "documents": TEXTS}
    wanted = models[name].rerank("the bell", TEXTS)
    found = client.post("/v1/rerank", json=body).json()
    assert [result["index"] for result in found["results"]] == [one.index for one in wanted]
    scores = [result["relevance_score"] for result in found["results"]]
    assert scores == pytest.approx([one.score for one in wanted], abs=1e-5)
    given = client.post("/v1/score", json=body).json()
    by_place = {one.index: one.score for one in wanted}
    assert [one["score"] for one in given["data"]] == pytest.approx([by_place[n] for n in range(3)], abs=1e-5)
    assert found["usage"] == given["usage"] and found["usage"]["total_tokens"] > sum(map(len, TEXTS))


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("/v1/embeddings", {"model": "colbert"}, "an embedding is one vector: ask POST /pooling"),
        ("/v1/embeddings", {"model": "splade"}, "a sparse vector (SPLADE) of a text"),
        ("/pooling", {"model": "splade", "encoding_format": "base64"}, "base64 is for dense vectors"),
        (
            "/pooling",
            {"model": "colbert", "input": "long " * 20},
            "maximum context length is 60 tokens, and input 0 has 102",
        ),
        ("/pooling", {"model": "colbert", "prompt_name": "title"}, "'title' is not one of this model's"),
        ("/pooling", {"model": "reader", "prompt_name": "query"}, "this model has no prompts"),
        ("/pooling", {"model": "colbert", "task": "token_embed"}, '"task" is not a field'),
    ],
)
def test_what_is_not_served_is_named(path, body, line, client):
    answer = client.post(path, json={"input": "a", **body})
    assert answer.status_code == 400
    assert line in answer.json()["error"]["message"]


def test_what_is_too_long_is_cut_where_that_is_asked_for(client, models):
    body = {"model": "colbert", "input": "long " * 20, "truncate": True}
    (row,) = client.post("/pooling", json=body).json()["data"]
    np.testing.assert_allclose(row["data"], models["colbert"].embed(["long " * 20])[0].numpy(), atol=2e-6)
