"""Embedding and multi-label training: losses against loops, vectors as `embed` has them, runs that learn."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, ndcg_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import clearhead as ch
from clearhead.errors import InputError
from clearhead.learn.data.corpus import open_corpus
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.metrics import METRICS
from clearhead.learn.tasks.entries.embed import order_loss, ranking_losses, text_vectors
from clearhead.learn.tasks.entries.multilabel import MULTILABEL
from clearhead.learn.tasks.table import TASKS
from tests import harness

SMALL = {
    "model.d_model": 32, "model.n_layers": 1, "model.n_heads": 4, "model.max_positions": 24,
    "train.lr": 5e-3, "train.device": "cpu", "train.samples": 1, "tokens.kind": "word", "model.dropout": 0.0,
    "train.validate_every": 40, "train.epochs": None, "train.steps": 40, "data.batch_size": 8,
}  # fmt: skip
THINGS = {"dog": "hund", "cat": "katze", "cow": "kuh", "horse": "pferd", "bird": "vogel", "fish": "fisch",
          "bear": "baer", "wolf": "wolf_"}  # fmt: skip


def unit(*shape: int) -> torch.Tensor:
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(made, dim=-1)


@pytest.mark.parametrize("texts", [2, 3])
def test_a_positive_is_told_from_the_rest_of_the_batch(texts):
    """By a loop over rows and candidates; a candidate with the text of the row's own positive is left out."""
    vectors = unit(5, texts, 7)
    keys = torch.tensor([[1, 9], [2, 1], [1, 8], [3, 7], [4, 6]])  # rows 0 and 2 share a positive
    wanted = []
    for row in range(5):
        sums, own = 0.0, math.exp(20 * float(vectors[row, 0] @ vectors[row, 1]))
        for kind in range(1, texts):
            for other in range(5):
                same = int(keys[other, kind - 1]) == int(keys[row, 0]) and (kind, other) != (1, row)
                sums += 0.0 if same else math.exp(20 * float(vectors[row, 0] @ vectors[other, kind]))
        wanted.append(-math.log(own / sums))
    assert torch.allclose(ranking_losses(vectors, keys, 20.0), torch.tensor(wanted, dtype=torch.float64))


def test_the_order_of_scores_is_learned():
    vectors, scores = unit(6, 2, 7), torch.tensor([0.0, 5.0, 2.5, 2.5, 1.0, 4.0])
    cosines = [float(a @ b) for a, b in vectors]
    total = 1.0
    for less in range(6):
        for more in range(6):
            if scores[less] < scores[more]:
                total += math.exp(20 * (cosines[less] - cosines[more]))
    assert math.isclose(float(order_loss(vectors, scores, 20.0)), math.log(total), rel_tol=1e-9)


def test_rankings_are_judged_as_sklearn_judges_them():
    random = np.random.default_rng(1)
    for _ in range(20):
        gains, scores = random.integers(0, 3, 15), random.random(15)
        ranked = np.argsort(-scores).tolist()
        relevant = {n: float(gain) for n, gain in enumerate(gains) if gain}
        found = METRICS["ndcg"]([ranked], [relevant])
        assert math.isclose(found, ndcg_score([gains], [scores], k=10), rel_tol=1e-9)
        first = next((n for n, one in enumerate(ranked[:10], 1) if gains[one]), math.inf)
        assert METRICS["mrr"]([ranked], [relevant]) == 1 / first
        guess, truth = (random.random((9, 4)) < 0.5 for _ in range(2))
        for average in ("micro", "macro"):
            wanted = f1_score(truth, guess, average=average, zero_division=0)
            made = MULTILABEL[f"{average}_f1"](guess.astype(int).tolist(), truth.astype(int).tolist())
            assert math.isclose(made, wanted, rel_tol=1e-9, abs_tol=1e-9)


def test_an_anchor_with_two_positives_is_one_query_with_two_right_answers():
    """Whichever of them is ranked first, the other is no wrong answer; nDCG counts both."""
    vectors = np.eye(4)
    anchors = [vectors[0], vectors[0], vectors[1], vectors[2]]
    texts = [[0.9, 0.1, 0, 0], [0.8, 0, 0.2, 0], [0, 0.1, 0, 0.9], [0, 0, 0.9, 0]]
    said = [[1.0, *one] for one in anchors]
    meant = [[math.nan, *one] for one in texts]
    _, ranked, relevant = TASKS["embed"].score(said, meant, ())["mrr"]
    assert len(ranked) == len(relevant) == 3 and relevant[0] == {0: 1.0, 1: 1.0}
    found = {name: METRICS[name](ranked, relevant) for name in ("mrr", "ndcg")}
    # Text 0 has 0.1 of anchor 1, as its own has, and stands before it.
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    gains = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    scores = np.array(anchors)[[0, 2, 3]] @ np.array(texts).T - 1e-9 * np.arange(4)
    assert found["ndcg"] == pytest.approx(ndcg_score(gains, scores, k=10))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> ch.Model:
    rows = [
        {"anchor": f"the {one}", "positive": f"der {other} hier", "negative": "kein tier"}
        for one, other in THINGS.items()
    ]
    folder = tmp_path_factory.mktemp("embed") / "run"
    done = ch.train({"train": rows, "validation": rows}, recipe="embed", out=folder, settings=SMALL)
    assert done.metrics["mrr"] > 0.9 and done.metrics["ndcg"] > 0.9
    return ch.load(folder)


def test_texts_of_a_row_have_the_vectors_they_have_alone(embedder, tmp_path):
    """Rows longer than the model's positions too: each text begins anew."""
    m, task = embedder, TASKS["embed"]
    texts = [
        ("dog " * 20, "katze der hier", "kein"),
        ("cat", "hund " * 15, "the"),
        ("cow", "kuh", "tier " * 18),
    ]
    rows = [dict(zip(("anchor", "positive", "negative"), one)) for one in texts]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = open_corpus(DataPlan(paths=(str(path),)), task.shape, split=False)
    encoded = task.encode_corpus(corpus, "validation", m.tokenizer, (), tmp_path, special=m.special)
    batches = task.make_batches(
        encoded, DataPlan(batch_size=3), special=m.special, length=24, seed=0, training=False
    )
    (batch,) = batches.all()
    assert batch.ids.shape[1] > m.config.max_positions and batch.n_targets == 3
    with torch.no_grad():
        hidden = task.outputs_of(m.model, batch)
    vectors = text_vectors(hidden, batch, "mean")
    for number, found in zip(batch.numbers.tolist(), vectors):
        assert harness.worst(found, m.embed([text.strip() for text in texts[number]])) < 1e-5
    found = ch.evaluate(m, path, DataPlan(task="embed"))
    assert set(found.metrics) == {"loss", "mrr", "ndcg"}


def test_scored_pairs_are_ordered_and_judged_by_correlation(tmp_path):
    path = tmp_path / "pairs.tsv"
    names = list(THINGS)
    lines = ["sentence1\tsentence2\tscore"]
    lines += [
        f"a {a}\tthe {b}\t{5 - abs(n - k):.1f}" for n, a in enumerate(names) for k, b in enumerate(names)
    ]
    path.write_text("\n".join(lines) + "\n")
    settings = {**SMALL, "data.validation": str(path), "train.steps": 60, "train.metric": "spearman"}
    copy = tmp_path / "train.tsv"
    copy.write_text(path.read_text())
    done = ch.train(copy, recipe="embed", out=tmp_path / "run", settings=settings)
    assert done.metrics["spearman"] > 0.6
    path.write_text("sentence1\tsentence2\tscore\na\tb\thigh\n")
    with pytest.raises(InputError, match=r"line 2: the score in `score` must be a number, not high"):
        ch.evaluate(ch.load(tmp_path / "run"), path)


def test_several_classes_of_a_text_as_transformers_gives_them(tmp_path):
    texts = ["red", "blue", "red blue", "green", "green red", "blue green red", "none"]
    rows = [{"text": text, "labels": [] if text == "none" else text.split()} for text in texts]
    rows[1]["labels"] = "blue"
    settings = {**SMALL, "data.task": "multilabel", "train.steps": 60}
    done = ch.train({"train": rows * 2, "validation": rows}, out=tmp_path / "run", settings=settings)
    assert done.metrics["micro_f1"] > 0.7
    m = ch.load(tmp_path / "run")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").eval()
    assert theirs.config.problem_type == "multi_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    for text in texts:
        with torch.no_grad():
            wanted = theirs(**tokenizer(text, return_tensors="pt")).logits.sigmoid()[0]
        assert np.allclose(list(m.classify(text).scores.values()), wanted, atol=1e-5)


@pytest.mark.parametrize("scored", [False, True])
def test_what_is_judged_does_not_grow_with_the_pairs_of_a_batch(scored):
    """Vectors at random: the loss of training grows with the batch, the loss of validation does not."""
    random = torch.Generator().manual_seed(0)
    found = {}
    for rows in (4, 16, 128):
        both = []
        for _ in range(2048 // rows):
            vectors = torch.nn.functional.normalize(
                torch.randn(rows, 2, 8, generator=random).double(), dim=-1
            )
            scores, keys = torch.rand(rows, generator=random), torch.arange(rows)[:, None].expand(-1, 2)
            given = (order_loss, vectors, scores) if scored else (ranking_losses, vectors, keys)
            both.append([float(given[0](*given[1:], 2.0, judged).mean()) for judged in (False, True)])
        found[rows] = np.mean(both, 0)
    assert found[128][0] > found[4][0] + 2  # log of the number of pairs
    assert abs(found[128][1] - found[4][1]) < 0.15 and abs(found[128][1] - math.log(2)) < 0.3
    alone = torch.nn.functional.normalize(torch.randn(1, 2, 8, generator=random), dim=-1)
    one = (
        order_loss(alone, torch.ones(1), 20.0, True)
        if scored
        else ranking_losses(alone, torch.zeros(1, 2), 20.0, True)
    )
    assert float(one.sum()) == 0  # nothing to be told from
