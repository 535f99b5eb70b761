"""Indexes of sparse vectors (SPLADE) and of tokens' vectors (ColBERT): rankings equal plain loops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.hub.retrievers import Expansion, LateInteraction, Splade
from clearhead.hub.sentences import Sentences, VectorLayer
from clearhead.labs.retrieval import index as indexing
from clearhead.labs.retrieval import stores
from clearhead.labs.retrieval.index import Index, build_index
from clearhead.labs.retrieval.passages import read_passages
from clearhead.labs.retrieval.stores import TokenStore
from tests.retrieval.test_index import WORDS, loop_bm25, reader

pytestmark = [pytest.mark.ledger("J4"), pytest.mark.ledger("W9")]
QUERY = "a bell in the market tower, and a BOAT"
LATE = LateInteraction({}, {"document": 60}, Expansion(12, cuts=False), (".", "e"))


def late(**changes) -> Sentences:
    torch.manual_seed(3)
    stated = {"in_features": 16, "out_features": 6, "bias": False, "activation_function": "torch.nn.Identity"}
    layer = VectorLayer("Dense", stated, {"linear.weight": torch.randn(6, 16)})
    return Sentences(normalise=True, layers=(layer,), late=replace(LATE, **changes))


HOW = {
    "sparse": ("mlm", lambda: Sentences(splade=Splade(most=40))),
    "sparse, cosine": ("mlm", lambda: Sentences(splade=Splade("sum", cosine=True), prompts={"query": "? "})),
    "tokens": ("none", late),
    "tokens, mean": ("none", lambda: late(mean=True, skips=("query", "document"))),
}


def embedder(folder: Path, case: str) -> ch.Model:
    head, sentences = HOW[case]
    m = reader(head)
    names = ("pad", "cls", "sep", "mask")
    m.special = {role: m.tokenizer.token_to_id(f"[{role.upper()}]") for role in names}
    m.sentences = sentences()
    m.save(folder)
    return ch.load(folder)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [" ".join(rng.choice(WORDS, rng.integers(4, 9))) + "." for _ in range(50)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*rows[:40], "e. e.", *rows[40:]]))
    return path


def loop_scores(m: ch.Model, query: str, rows: list[str], half: bool) -> list[float]:
    """How alike a query and each text are, one pair and one token at a time; `half`: as stored."""
    prompts = ("query", "document") if m.sentences.late else ("query" if m.sentences.prompts else None, None)
    (asked,), read = m.embed([query], prompt=prompts[0]), m.embed(rows, prompt=prompts[1])
    if m.sentences.splade is not None:
        unit = torch.nn.functional.normalize
        (first, *others) = (vector.dense().double() for vector in (asked, *read))
        both = m.sentences.splade.cosine
        return [
            float((unit(first, dim=0) @ unit(other, dim=0)) if both else first @ other) for other in others
        ]
    scores = []
    for document in (vectors.half().float() if half else vectors for vectors in read):
        nearest = [max((float(a @ b) for b in document), default=0.0) for a in asked]
        scores.append(sum(nearest) / (len(nearest) if m.sentences.late.mean else 1))
    return scores


@pytest.mark.parametrize("case", HOW)
def test_rankings_equal_plain_loops(case, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "BLOCK", 7)  # many parts
    monkeypatch.setattr(stores, "SCORES", 3000)  # and many blocks of a search
    m = embedder(tmp_path / "encoder", case)
    build_index(tmp_path / "index", m, [texts])
    index = Index(tmp_path / "index")  # loads the embedder that it names
    rows = [passage.text for passage in read_passages(texts)[1]]
    assert index.kind == m.sentences.kind and len(index) == len(rows) == 51
    wanted = {"meaning": loop_scores(m, QUERY, rows, half=True), "words": loop_bm25(QUERY, rows)}
    hits = index.search(QUERY, 60, "meaning")
    order = sorted(range(len(rows)), key=lambda n: (-wanted["meaning"][n], n))
    order = [n for n in order if wanted["meaning"][n] or index.kind == "tokens"]
    assert [hit.score for hit in hits] == pytest.approx([wanted["meaning"][n] for n in order], abs=2e-5)
    assert [hit.text for hit in hits] == [rows[n] for n in order]
    assert np.abs(np.array(wanted["meaning"]) - loop_scores(m, QUERY, rows, half=False)).max() < 0.01
    words = sorted((n for n, score in enumerate(wanted["words"]) if score), key=lambda n: -wanted["words"][n])
    ranks = [{n: rank for rank, n in enumerate(one, 1)} for one in (order, words)]
    fused = {n: sum(1 / (60 + rank[n]) for rank in ranks if n in rank) for n in range(len(rows))}
    best = sorted(fused, key=lambda n: (-fused[n], n))[:10]
    assert [hit.text for hit in index.search(QUERY, 10)] == [rows[n] for n in best]
    several = [QUERY, "song", "a winter lamp of stone in the harvest"] * 12  # more than are compared at once
    alone = [index.search(query, 5, "meaning") for query in several[:3]] * 12
    for mine, its in zip(index.search_all(several, 5, "meaning"), alone):
        assert [hit.passage for hit in mine] == [hit.passage for hit in its]


def test_passages_without_tokens_score_nothing():
    """Wherever they stand, also alone in a block."""
    rng = np.random.default_rng(0)
    for lengths in ([0, 3, 0, 0, 2], [0, 0], [4, 0], [1]):
        vectors = [rng.normal(size=(length, 4)).astype(np.float32) for length in lengths]
        store, asked = TokenStore(sum(lengths), 4), rng.normal(size=(3, 4)).astype(np.float32)
        for some in (vectors[:2], vectors[2:]):
            if some:
                store.add(TokenStore.arrays(some))
        found = store.nearest([asked], 9)[0]
        halves = [vector.astype(np.float16).astype(np.float32) for vector in vectors]
        scores = [float((asked @ halve.T).max(1).sum()) if len(halve) else 0.0 for halve in halves]
        assert found == pytest.approx(dict(enumerate(scores)), abs=1e-5)


@pytest.mark.parametrize("case", ["sparse", "tokens"])
def test_only_changes_are_embedded_and_another_embedder_is_refused(case, texts, tmp_path, monkeypatch):
    m, folder, seen = embedder(tmp_path / "encoder", case), tmp_path / "index", list[str]()
    built, embedded = build_index(folder, m, [texts]), indexing.embedded
    monkeypatch.setattr(
        indexing, "embedded", lambda m, rows, side: seen.extend(rows) or embedded(m, rows, side)
    )
    build_index(folder)
    assert {*seen} == {*indexing.PROBES}  # which tell that the embedder is the same
    with pytest.raises(ch.InputError, match="has no one vector of each passage"):
        _ = built.vectors
    with pytest.raises(ch.InputError, match=r"a graph \(hnsw\) is for one vector of each passage"):
        build_index(folder, nearest="hnsw")
    for other in ("sparse", "sparse, cosine", "tokens"):
        if other != case:
            again = embedder(tmp_path / f"other {other}", other)
            with pytest.raises(ch.InputError, match="embeds otherwise than the model that made"):
                Index(folder, again)


def test_passages_are_as_long_as_documents_are_read(tmp_path):
    words = [f"{WORDS[n % len(WORDS)]}{n}" for n in range(200)]
    (tmp_path / "a.txt").write_text(" ".join(words))
    m = embedder(tmp_path / "encoder", "tokens")
    made = build_index(tmp_path / "index", m, [tmp_path / "a.txt"])
    rows = [made.passage(number).text for number in range(len(made))]
    assert " ".join(rows).split() == words
    assert max(len(ids) for ids in m.encode(rows)) <= 60 < m.max_length
    with pytest.warns(UserWarning, match=r"passages have more than the 60 tokens that the embedder reads"):
        build_index(tmp_path / "long", m, [tmp_path / "a.txt"], words=150)


def test_commands_index_and_search(texts, tmp_path, clearhead):
    m = embedder(tmp_path / "encoder", "tokens")
    made = clearhead("index", texts, "--model", m.folder, f"--out {tmp_path}/index --json").json
    assert (made["vectors"], made["passages"]) == ("tokens", 51)
    found = clearhead("search", f"{tmp_path}/index", "song", "--by meaning --k 3 --json").json["passages"]
    wanted = Index(tmp_path / "index").search("song", 3, "meaning")
    assert [(one["text"], one["score"]) for one in found] == [(hit.text, hit.score) for hit in wanted]
