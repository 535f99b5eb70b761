"""Tasks that learn vectors, several classes, numbers and preferences: losses against loops and formulas.

Runs of each learn, and transformers opens what they leave.
"""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
import transformers

import clearhead as ch
from clearhead.errors import ConfigError, InputError
from clearhead.learn.batches.batch import Batch
from clearhead.learn.data.corpus import open_corpus
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.metrics import METRICS
from clearhead.learn.tasks.entries.chats import PREFERENCE, preference_losses
from clearhead.learn.tasks.entries.classify import predict
from clearhead.learn.tasks.entries.embed import order_loss, ranking_losses, text_vectors
from clearhead.learn.tasks.entries.multilabel import MULTILABEL
from clearhead.learn.tasks.table import TASKS, open_examples
from tests import harness
from tests.harness import split
from tests.later import later

sklearn_metrics = later("sklearn.metrics")

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
        assert math.isclose(found, sklearn_metrics.ndcg_score([gains], [scores], k=10), rel_tol=1e-9)
        first = next((n for n, one in enumerate(ranked[:10], 1) if gains[one]), math.inf)
        assert METRICS["mrr"]([ranked], [relevant]) == 1 / first
        guess, truth = (random.random((9, 4)) < 0.5 for _ in range(2))
        for average in ("micro", "macro"):
            wanted = sklearn_metrics.f1_score(truth, guess, average=average, zero_division=0)
            made = MULTILABEL[f"{average}_f1"](guess.astype(int).tolist(), truth.astype(int).tolist())
            assert math.isclose(made, wanted, rel_tol=1e-9, abs_tol=1e-9)


def test_an_anchor_with_two_positives_is_one_query_with_two_right_answers():
    """Whichever of them is ranked first, the other is no wrong answer; nDCG counts both."""
    vectors = np.eye(4)
    anchors = [vectors[0], vectors[0], vectors[1], vectors[2]]
    texts = [[0.9, 0.1, 0, 0], [0.8, 0, 0.2, 0], [0, 0.1, 0, 0.9], [0, 0, 0.9, 0]]
    said = [[1.0, *anchor] for anchor in anchors]
    meant = [[math.nan, *text] for text in texts]
    _, ranked, relevant = TASKS["embed"].score(said, meant, ())["mrr"]
    assert len(ranked) == len(relevant) == 3 and relevant[0] == {0: 1.0, 1: 1.0}
    found = {name: METRICS[name](ranked, relevant) for name in ("mrr", "ndcg")}
    # Text 0 has 0.1 of anchor 1, as its own has, and stands before it.
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1) / 3)
    gains = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    scores = np.array(anchors)[[0, 2, 3]] @ np.array(texts).T - 1e-9 * np.arange(4)
    assert found["ndcg"] == pytest.approx(sklearn_metrics.ndcg_score(gains, scores, k=10))


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
    corpus = open_corpus(DataPlan(paths=(str(path),)), task.row, split=False)
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
    # Whole vectors and their first 5 and 9 numbers, as vectors of their own (Matryoshka).
    whole = torch.stack([m.embed([text.strip() for text in texts[n]]) for n in batch.numbers.tolist()])
    wanted = 0.0
    for width in (whole.shape[-1], 5, 9):
        cut = torch.nn.functional.normalize(whole[..., :width].double(), dim=-1)
        logits = 20 * cut[:, 0] @ torch.cat([cut[:, 1], cut[:, 2]]).T
        wanted += float(torch.nn.functional.cross_entropy(logits, torch.arange(3), reduction="sum"))
    assert float(task.with_values(widths=(5, 9)).loss(hidden, batch)) == pytest.approx(wanted, rel=1e-5)
    found = ch.evaluate(m, path, DataPlan(task="embed"))
    assert set(found.metrics) == {"loss", "mrr", "ndcg"}


def test_widths_that_no_vector_has_are_refused(tmp_path):
    rows = [{"anchor": f"a {word}", "positive": f"b {word}"} for word in THINGS]
    text = [f"some {word} to learn" for word in THINGS]
    cases = {
        "widths 999 is no part of a vector": (rows, "embed"),
        "is for embed": (text, "char-gpt-cpu"),
    }
    for number, (says, (data, recipe)) in enumerate(cases.items()):
        settings = {**SMALL, "train.widths": (999,)}
        with pytest.raises(ConfigError, match=says):
            ch.train(data, recipe=recipe, out=tmp_path / str(number), settings=settings)


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
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run").eval()
    assert theirs.config.problem_type == "multi_label_classification"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
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


WORDS = tuple("abcdefghijklmnop")
COUNTED = split(
    "data.task=regress model.d_model=32 model.n_layers=1 model.n_heads=2 model.max_positions=32",
    "data.batch_size=32 train.lr=3e-3 train.validate_every=150 train.log_every=100 train.samples=2",
)


def table(path, count: int, seed: int):
    """Write texts and half the number of their words, which is what is to be learned."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 16))) for _ in range(count)]
    lines = [f"{text}\t{len(text.split()) / 2}" for text in texts]
    path.write_text("\n".join(["text\tlabel", *lines, ""]))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model that learned to count words, and a table that it has not seen."""
    folder = tmp_path_factory.mktemp("regress")
    events = []
    data = table(folder / "train.tsv", 1500, 0)
    done = ch.train(data, out=folder / "run", settings=[*COUNTED, "train.steps=500"], on_event=events.append)
    return done, table(folder / "test.tsv", 200, 1), events


@pytest.mark.slow
def test_it_learns_a_number(run):
    done, _, events = run
    assert done.metrics["loss"] < 0.4  # the numbers have a variance of 5.3
    assert done.metrics["pearson"] > 0.97 and done.metrics["spearman"] > 0.97
    samples = [line for event in events for line in getattr(event, "samples", ())]
    assert samples and all(" -> " in line for line in samples)


def test_evaluation_agrees_with_scipy(run):
    stats = pytest.importorskip("scipy.stats")
    done, test, _ = run
    found = ch.evaluate(done.model, test)
    rows = [line.split("\t") for line in test.read_text().splitlines()[1:]]
    wanted = [float(label) for _, label in rows]
    said = predict(done.model, [text for text, _ in rows])
    assert found.task == "regress" and found.examples == found.targets == 200
    assert [float(output) for output in found.outputs] == pytest.approx(said, rel=1e-4)
    assert found.metrics["mse"] == found.metrics["loss"]
    assert found.metrics["mse"] == pytest.approx(np.mean(np.square(np.subtract(said, wanted))), rel=1e-4)
    assert found.metrics["pearson"] == pytest.approx(stats.pearsonr(said, wanted)[0], rel=1e-6)
    assert found.metrics["spearman"] == pytest.approx(stats.spearmanr(said, wanted)[0], rel=1e-6)
    for name in ("mse", "pearson", "spearman"):
        low, high = found.intervals[name]
        assert low < found.metrics[name] < high


def test_transformers_opens_it_as_a_regression(run):
    done, test, _ = run
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(done.folder).eval()
    assert theirs.config.problem_type == "regression" and theirs.config.num_labels == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.folder)
    texts = [line.split("\t")[0] for line in test.read_text().splitlines()[1:9]]
    loaded = ch.load(done.folder)
    for text, ours in zip(texts, predict(loaded, texts)):
        with torch.no_grad():
            logits = theirs(**tokenizer(text, return_tensors="pt")).logits
        assert float(logits) == pytest.approx(ours, abs=1e-5)


def test_the_command_prints_the_number(run, clearhead):
    done, _, _ = run
    assert float(clearhead("predict", done.folder, "a b c d e f").out) == pytest.approx(3, abs=1)
    assert clearhead("predict", done.folder, "a b c d e f", "--json").json["number"] == pytest.approx(
        3, abs=0.7
    )


def test_numbers_of_any_scale_are_learned_in_units_of_their_deviation(tmp_path):
    path = tmp_path / "prices.tsv"
    rows = [f"{'a ' * (row % 5 + 1)}{row}\t{1000 + 100 * (row % 5)}" for row in range(300)]
    path.write_text("\n".join(["text\tlabel", *rows, ""]))
    losses = {}
    for standardise in (False, True):
        settings = [*COUNTED, "train.steps=30", f"train.standardise={str(standardise).lower()}"]
        done = ch.train(path, out=tmp_path / f"run-{standardise}", settings=settings)
        losses[standardise] = done.metrics["loss"]  # the mean squared error itself, either way
    assert losses[True] < 25_000 < 1e6 < losses[False]  # the variance is 20,000, the mean squared 1.4 million
    with pytest.raises(ConfigError, match=r"train.standardise is for numbers"):
        ch.train(path, settings=[*COUNTED[1:], "train.standardise=true"], out=tmp_path / "classes")


def test_what_is_no_number_is_refused(run, tmp_path):
    path = tmp_path / "bad.tsv"
    path.write_text("text\tlabel\na b\t1.5\nc\tmany\n")
    with pytest.raises(InputError, match=r"bad.tsv, line 3: the label in `label` must be a number, not many"):
        open_examples(DataPlan(paths=(str(path),), task="regress"))
    sizes = {"vocab_size": 10, "d_model": 8, "n_layers": 1, "n_heads": 1}
    other = ch.Model(ch.Transformer(ch.ModelConfig(family="encoder", n_classes=1, **sizes)))
    with pytest.raises(InputError, match="predict needs a model that gives a number"):
        predict(other, "a")


def test_it_is_never_guessed(run):
    _, test, _ = run
    assert open_examples(DataPlan(paths=(str(test),)))[1] == "classify"


PREFERRED = {
    "tokens.kind": "char", "train.lr": 3e-3, "data.batch_size": 4, "train.epochs": None, "train.steps": 30,
    "model.d_model": 32, "model.n_layers": 2, "model.n_heads": 4, "model.max_positions": 64,
    "model.dropout": 0.1, "train.device": "cpu", "train.samples": 1, "train.validate_every": 15,
}  # fmt: skip


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def formula(kind: str, chosen: float, rejected: float, beta: float, wrong: float) -> float:
    """The losses of the papers, for one pair, in Python's own floats."""
    margin = beta * (chosen - rejected)
    log = math.log
    if kind == "exo_pair":  # the divergence of the model's choice from the label's
        wrong, win = wrong or 1e-3, sigmoid(margin)
        return win * log(win / (1 - wrong)) + (1 - win) * log((1 - win) / wrong)
    conservative = -(1 - wrong) * log(sigmoid(margin)) - wrong * log(sigmoid(-margin))
    robust = (1 - wrong) * -log(sigmoid(margin)) - wrong * -log(sigmoid(-margin))
    mix = sigmoid(margin / 0.05)
    return {
        "sigmoid": conservative,
        "sigmoid_norm": conservative,
        "hinge": max(0.0, 1 - margin),
        "ipo": (chosen - rejected - 1 / (2 * beta)) ** 2,
        "robust": robust / (1 - 2 * wrong),
        "nca_pair": -log(sigmoid(beta * chosen))
        - 0.5 * (log(sigmoid(-beta * chosen)) + log(sigmoid(-beta * rejected))),
        "bco_pair": -log(sigmoid(beta * chosen)) - log(sigmoid(-beta * rejected)),
        "sppo_hard": (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2,
        "apo_zero": 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected),
        "apo_down": sigmoid(beta * chosen) + 1 - sigmoid(margin),
        "discopop": -log(sigmoid(margin)) * (1 - mix) + math.exp(-margin) * mix,
    }[kind]


@pytest.mark.parametrize("kind", PREFERENCE)
def test_losses_equal_the_formulas(kind):
    """And trl's own: benchmarks/run.py dpo_trl holds them against its trainer on the same batch."""
    random = np.random.default_rng(0)
    pairs = random.normal(0, 3, (20, 2))
    for beta, wrong in ((0.1, 0.0), (0.5, 0.2)):
        chosen, rejected = torch.tensor(pairs, dtype=torch.float64).T
        found = preference_losses(kind, chosen, rejected, beta, wrong)
        wanted = [formula(kind, *pair, beta, wrong) for pair in pairs]
        assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), atol=1e-9)


def rows(count: int = 12) -> list[dict]:
    words = ("red", "blue", "green", "black")
    return [
        {"prompt": f"say {words[n % 4]} {n}", "chosen": f"{words[n % 4]}!", "rejected": f"not {words[n % 3]}"}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run of 30 steps, its notes and its events."""
    folder, events = tmp_path_factory.mktemp("dpo") / "run", []
    given = {"train": [*rows(), {"prompt": "x", "chosen": "a", "rejected": ""}], "validation": rows(4)}
    ch.train(given, recipe="dpo", out=folder, settings=PREFERRED, on_event=events.append)
    return folder, events


def test_a_run_begins_at_its_reference_and_learns_the_pairs(tuned):
    folder, events = tuned
    notes = [event.line for event in events if hasattr(event, "line")]
    assert "1 row without two different answers left out" in notes
    assert any(note.startswith("reference: the model itself before its first step; off by") for note in notes)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    first = next(line for line in log if line["event"] == "stepped")
    validated = [line["metrics"] for line in log if line["event"] == "validated"]
    assert abs(first["loss"] - math.log(2)) < 0.05  # dropout is all that is apart
    assert validated[-1]["loss"] < 0.3 and validated[-1]["accuracy"] == 1.0 and validated[-1]["margin"] > 0.5


def test_the_loss_is_that_of_each_conversation_alone(tuned, tmp_path):
    """The two answers of a row do not see each other: their log-probabilities are those of `score`."""
    m = ch.load(tuned[0])
    from clearhead.learn.data.corpus import open_corpus
    from clearhead.learn.data.plan import DataPlan
    from clearhead.learn.tasks.generation import chat_ids, chat_template

    path, task = tmp_path / "rows.jsonl", TASKS["prefer"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(5)))
    corpus = open_corpus(DataPlan(paths=(str(path),)), split=False)
    assert corpus.shape == "preferences"
    encoded = task.encode_corpus(
        corpus, "validation", m.tokenizer, (), tmp_path, special=m.special, template=chat_template(m)
    )
    batches = task.make_batches(
        encoded, DataPlan(batch_size=5), special=m.special, length=64, seed=0, training=False
    )
    (batch,) = batches.all()
    with torch.no_grad():
        found = task.outputs_of(m.model, batch)
        chunked = task.outputs_of(m.model, batch, 7)
    for number, pair in zip(batch.numbers.tolist(), found.tolist()):
        for side, made in zip(("chosen", "rejected"), pair):
            row = rows(5)[number]
            prompt = chat_ids(m, [{"role": "user", "content": row["prompt"]}], {})
            answer = m.tokenizer.encode(f" {row[side]}", add_special_tokens=False).ids
            scored = m.score([*prompt, *answer, m.special["eos"]])
            alone = sum(scored.logprobs[-len(answer) - 1 :])
            assert abs(alone - made) < 1e-4
    assert harness.worst(found, chunked) < 1e-5
    judged = ch.evaluate(m, path)
    assert judged.task == "prefer" and 0 <= judged.metrics["accuracy_per_token"] <= 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train.preference": "dpo"}, "no loss of pairs.*choose from sigmoid"),
        ({"train.preference": "hinge", "train.label_smoothing": 0.1}, "not taken by hinge"),
        ({"train.preference": "robust", "train.label_smoothing": 0.6}, "below 0.5"),
        ({"train.beta": 0.0}, "beta.* must be above 0"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(settings, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        ch.train(rows(), recipe="dpo", out=tmp_path / "run", settings={**PREFERRED, **settings})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("beta", [0.05, 0.1, 2.0])
def test_the_margin_has_beta_as_trls_rewards_have(beta):
    """trl: rewards are beta · (log-probability - that of the reference), margins chosen - rejected."""
    random = torch.Generator().manual_seed(0)
    logprobs, reference = (torch.randn(5, 2, generator=random) for _ in range(2))
    ids = torch.zeros(5, 4, dtype=torch.long)
    batch = Batch(ids, ids, documents=torch.tensor([[0, 0, 1, 1]] * 5), reference=reference)
    task = TASKS["prefer"].with_values(beta=beta)
    said, meant = task.answers(logprobs, batch)
    rewards = beta * (logprobs - reference)
    found = {name: metric(*sides) for name, (metric, *sides) in task.score(said, meant, ()).items()}
    assert found["margin"] == pytest.approx(float((rewards[:, 0] - rewards[:, 1]).mean()), abs=1e-6)
    assert found["accuracy"] == pytest.approx(float((rewards[:, 0] > rewards[:, 1]).float().mean()))
