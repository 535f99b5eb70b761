"""Baselines of `evaluate`: an n-gram model by its formula in plain Python, linear models of every task."""

from collections import Counter

import numpy as np
import pytest

import clearhead as ch
from clearhead.app.cli import main
from clearhead.learn.evaluation.baseline import Baseline, NGram

TEXTS = [
    ("good", "a fine and moving film"),
    ("bad", "a dull film"),
    ("bad", "slow and dull"),
    ("good", "very fine"),
]


def kneser_ney(ids, vocab_size, order):
    """Interpolated Kneser-Ney by its formula: a function from a context and a token to the probability."""
    counts = [Counter(tuple(ids[at : at + order]) for at in range(len(ids) - order + 1))]
    for _ in range(order - 1):
        counts.insert(0, Counter(gram[1:] for gram in counts[0]))  # how many different tokens come before

    def probability(context, token):
        value = 1 / vocab_size
        for length, known in enumerate(counts):
            if length > len(context):
                break
            before = tuple(context[len(context) - length :])
            followers = {gram[-1]: count for gram, count in known.items() if gram[:-1] == before}
            if not followers:
                break
            times = Counter(known.values())
            discount = times[1] / (times[1] + 2 * times[2]) if times[1] and times[2] else 0.5
            total = sum(followers.values())
            left = discount * len(followers) / total
            value = max(followers.get(token, discount) - discount, 0) / total + left * value
        return value

    return probability


@pytest.mark.parametrize("order", [1, 2, 4])
def test_an_n_gram_model_is_interpolated_kneser_ney(order):
    rng = np.random.default_rng(order)
    ids, asked = rng.choice(5, 300, p=[0.5, 0.2, 0.15, 0.1, 0.05]), rng.integers(0, 6, 40)
    reference = kneser_ney(ids.tolist(), 6, order)
    wanted = [
        reference(asked[max(0, at - order + 1) : at].tolist(), asked[at]) for at in range(1, len(asked))
    ]
    got = np.exp(-NGram(ids, 6, 10**9, order).losses(asked))
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


@pytest.mark.parametrize("memory", [10**9, 2000, 0])
def test_probabilities_add_up_to_one_in_any_memory(memory):
    ids = np.random.default_rng(0).geometric(0.4, 2000).clip(max=8) - 1
    model = NGram(ids, 9, memory)
    kept = sum(12 * (len(grams) + len(contexts)) for grams, _, contexts, _ in model.tables[1:])
    assert kept <= memory and model.tables[0][0].size == 8
    for context in (ids[:7], ids[50:53], np.array([8, 8])):
        rows = [np.exp(-model.losses(np.append(context, token))[-1]) for token in range(9)]
        assert abs(sum(rows) - 1) < 1e-12


def test_a_linear_model_is_judged_next_to_a_classifier(tmp_path, capsys):
    lines = [f"{label}\t{text} {number}" for number in range(30) for label, text in TEXTS]
    (tmp_path / "reviews.tsv").write_text("label\ttext\n" + "\n".join(lines) + "\n")
    (tmp_path / "test.tsv").write_text("label\ttext\ngood\tfine\nbad\tdull\ngood\tdull dull dull\n")
    settings = {"train.steps": 2, "model.d_model": 16, "model.n_heads": 2, "train.validate_every": 2}
    folder = ch.train([tmp_path / "reviews.tsv"], out=tmp_path / "run", settings=settings).folder
    result = ch.evaluate(ch.load(folder), [tmp_path / "test.tsv"], baseline=True)
    assert result.baseline.metrics["accuracy"] == pytest.approx(2 / 3)
    assert 0.8 * len(lines) < result.baseline.fitted_on < len(lines)  # the training part of the split
    assert "logistic regression" in result.baseline.name
    main(["eval", str(folder), str(tmp_path / "test.tsv")])
    shown = capsys.readouterr().out
    assert "0.6667" in shown and "baseline: logistic regression" in shown
    behind = result.metrics["accuracy"] < result.baseline.metrics["accuracy"]
    assert any(line.startswith("the simple model is better") for line in result.notes) is behind
    (tmp_path / "reviews.tsv").unlink()
    moved = ch.evaluate(ch.load(folder), [tmp_path / "test.tsv"], baseline=True)
    assert moved.baseline is None and any("no baseline" in note for note in moved.notes)


def test_the_simple_model_is_called_better_only_where_it_is():
    found = Baseline("", 1, {"loss": 1.5, "perplexity": 4.5}, {})
    assert "loss 1.5000, and 1.6000 of this model" in found.ahead({"loss": 1.6})
    assert found.ahead({"loss": 1.5}) == found.ahead({"loss": 1.4}) == ""
    found = Baseline("", 1, {"accuracy": 0.7}, {})
    assert found.ahead({"loss": 1.0, "accuracy": 0.6}) and not found.ahead({"loss": 1.0, "accuracy": 0.8})


NUMBERS = range(40)
KINDS = {  # of each task: data that a linear model learns without error, and the metric that says so
    "tag": ("x.conll", "\n\n".join(f"Anna B-PER\nsees O\nParis B-LOC\n{n} O" for n in NUMBERS), "span_f1"),
    "regress": ("n.tsv", [f"{'up ' * (n % 2)}word {n}\t{n % 2}" for n in NUMBERS], "spearman"),
    "multilabel": ("m.tsv", [f"{'a ' * (n % 2)}b {n}\t{'x|' * (n % 2)}y" for n in NUMBERS], "exact"),
    "lm": ("t.txt", "the cat sat on the mat. " * 60, "loss"),
}


@pytest.mark.parametrize("task", KINDS)
def test_tags_numbers_several_classes_and_text_have_baselines(task, tmp_path):
    name, text, metric = KINDS[task]
    data = tmp_path / name
    data.write_text(text if isinstance(text, str) else "\n".join(["text\tlabel", *text]))
    settings = {"data.task": task, "train.steps": 1, "model.d_model": 16, "model.n_heads": 2}
    settings |= {"tokens.kind": "char", "data.max_length": 16} if task == "lm" else {"tokens.vocab_size": 300}
    folder = ch.train([data], out=tmp_path / "run", settings=settings).folder
    result = ch.evaluate(ch.load(folder), [data], baseline=True)
    figures, model = result.baseline.metrics, result.metrics
    if task == "lm":
        assert figures["loss"] < 0.5 < model["loss"]
        ratio = model["bits_per_byte"] / model["loss"]
        assert figures["bits_per_byte"] == pytest.approx(ratio * figures["loss"])
    elif task == "regress":
        assert figures[metric] > 0.8  # ridge regression shrinks: ranks within a group follow the other words
    else:
        assert figures[metric] == 1.0
