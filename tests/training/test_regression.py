"""Regression: a number for a text, from rows to a directory that transformers opens."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import clearhead as ch
from clearhead.app.cli import main
from clearhead.errors import InputError
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.metrics import ranks
from clearhead.learn.tasks.entries.regress import predict
from clearhead.learn.tasks.table import open_examples

WORDS = tuple("abcdefghijklmnop")
SMALL = (
    *(
        "data.task=regress",
        "model.d_model=32",
        "model.n_layers=1",
        "model.n_heads=2",
        "model.max_positions=32",
    ),
    *(
        "data.batch_size=32",
        "train.lr=3e-3",
        "train.validate_every=100",
        "train.log_every=100",
        "train.samples=2",
    ),
)


def table(path, count: int, seed: int, header: bool = True):
    """Write texts and half the number of their words, which is what is to be learned."""
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 16))) for _ in range(count)]
    lines = [f"{text}\t{len(text.split()) / 2}" for text in texts]
    path.write_text("\n".join([*(["text\tlabel"] if header else []), *lines, ""]))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model that learned to count words, and a table that it has not seen."""
    folder = tmp_path_factory.mktemp("regress")
    events = []
    data = table(folder / "train.tsv", 1500, 0)
    done = ch.train(data, out=folder / "run", settings=[*SMALL, "train.steps=400"], on_event=events.append)
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
    assert [float(one) for one in found.outputs] == pytest.approx(said, rel=1e-4)
    assert found.metrics["mse"] == found.metrics["loss"]
    assert found.metrics["mse"] == pytest.approx(np.mean(np.square(np.subtract(said, wanted))), rel=1e-4)
    assert found.metrics["pearson"] == pytest.approx(stats.pearsonr(said, wanted)[0], rel=1e-6)
    assert found.metrics["spearman"] == pytest.approx(stats.spearmanr(said, wanted)[0], rel=1e-6)
    for name in ("mse", "pearson", "spearman"):
        low, high = found.intervals[name]
        assert low < found.metrics[name] < high


def test_ranks_share_ties():
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [1.0, -1.5, 1.0, -0.5]


def test_transformers_opens_it_as_a_regression(run):
    done, test, _ = run
    theirs = AutoModelForSequenceClassification.from_pretrained(done.folder).eval()
    assert theirs.config.problem_type == "regression" and theirs.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(done.folder)
    texts = [line.split("\t")[0] for line in test.read_text().splitlines()[1:9]]
    loaded = ch.load(done.folder)
    for text, ours in zip(texts, predict(loaded, texts)):
        with torch.no_grad():
            logits = theirs(**tokenizer(text, return_tensors="pt")).logits
        assert float(logits) == pytest.approx(ours, abs=1e-5)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    data = table(tmp_path / "train.tsv", 200, 0, header=False)  # the column of numbers is found by content
    whole, halved = (tmp_path / name for name in ("whole", "halved"))
    settings = [*SMALL, "train.steps=20", "train.validate_every=10"]
    ended = ch.train(data, out=whole, settings=settings)
    steps = iter(range(100))
    stopped = ch.train(data, out=halved, settings=settings, stop=lambda: next(steps) == 9)
    assert stopped.reason == "stopped" and ch.train(resume=halved).metrics == ended.metrics


def test_the_command_prints_the_number(run, capsys):
    done, _, _ = run
    main(["predict", str(done.folder), "a b c d e f"])
    assert float(capsys.readouterr().out) == pytest.approx(3, abs=1)
    main(["predict", str(done.folder), "a b c d e f", "--json"])
    assert json.loads(capsys.readouterr().out)["number"] == pytest.approx(3, abs=0.7)


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
