"""Measures against scikit-learn, sacreBLEU, brute force and counts made by hand."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import sys

import numpy as np
import pytest
import sacrebleu
from sklearn.metrics import accuracy_score, f1_score

from clearhead.data.tagging import Tagging
from clearhead.errors import InputError, MissingExtraError
from clearhead.evaluation import metrics
from clearhead.evaluation.metrics import METRICS, Metric, answer_counts, bootstrap, edit_distance

IOB2 = Tagging("IOB2", "BI")
HYPOTHESES = ["the cat sat on the mat", "a dog", "there is nothing here at all to see", "", "the cat"]
REFERENCES = [
    "the cat sat on a mat",
    "a small dog ran",
    "there is nothing here to see at all",
    "empty",
    "the cat",
]


def drawn(n: int, classes: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [f"class {generator.randrange(classes)}" for _ in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_accuracy_and_macro_f1_are_scikit_learns(seed):
    predicted, wanted = drawn(40, 3 + seed % 2, seed), drawn(40, 5, seed + 100)
    assert METRICS["accuracy"](predicted, wanted) == pytest.approx(
        accuracy_score(wanted, predicted), abs=1e-12
    )
    assert METRICS["macro_f1"](predicted, wanted) == pytest.approx(
        f1_score(wanted, predicted, average="macro", zero_division=0), abs=1e-12
    )


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("O O", set()),
        ("B-P", {("P", 0, 0)}),
        ("B-P I-P O B-P", {("P", 0, 1), ("P", 3, 3)}),
        ("B-P B-P", {("P", 0, 0), ("P", 1, 1)}),
        ("B-P I-L I-L", {("P", 0, 0)}),  # another type ends a span and begins none
        ("B-P I-L I-P", {("P", 0, 0)}),
        ("I-P I-P O", set()),  # nothing begins with I-
        ("O I-P B-P I-P", {("P", 2, 3)}),
        ("B-P O I-P", {("P", 0, 0)}),
        ("B-work-of-art I-work-of-art", {("work-of-art", 0, 1)}),
        ("NOUN O VERB", {("NOUN", 0, 0), ("VERB", 2, 2)}),
    ],
)
def test_spans_by_hand(tags, wanted):
    assert IOB2.spans(tags.split()) == wanted


def brute_spans(tags: tuple[str, ...]) -> set[tuple[str, int, int]]:
    """Every stretch that is B- then only I- of one type, and that cannot be made longer."""
    found = set()
    for first, last in itertools.combinations_with_replacement(range(len(tags)), 2):
        kind = tags[first][2:]
        inner = all(tag == f"I-{kind}" for tag in tags[first + 1 : last + 1])
        longer = last + 1 < len(tags) and tags[last + 1] == f"I-{kind}"
        if tags[first].startswith("B-") and inner and not longer:
            found.add((kind, first, last))
    return found


def test_spans_and_their_f1_by_brute_force():
    every = list(itertools.product(("O", "B-P", "I-P", "B-L", "I-L"), repeat=4))
    assert all(IOB2.spans(tags) == brute_spans(tags) for tags in every)
    generator = random.Random(0)
    starts = re.compile(r"(?:^|O |-L )I-P|(?:^|O |-P )I-L")
    valid = [tags for tags in every if not starts.search(" ".join(tags))]  # others are no IOB2
    for _ in range(30):
        predicted, wanted = generator.choices(every, k=5), generator.choices(valid, k=5)
        pairs = [(brute_spans(said), brute_spans(meant)) for said, meant in zip(predicted, wanted)]
        hits, n_said, n_meant = (
            sum(counts) for counts in zip(*((len(a & b), len(a), len(b)) for a, b in pairs))
        )
        precision, recall, f1 = (
            METRICS[name](predicted, wanted) for name in ("span_precision", "span_recall", "span_f1")
        )
        assert precision == pytest.approx(hits / n_said if n_said else 0)
        assert recall == pytest.approx(hits / n_meant if n_meant else 0)
        total = precision + recall
        assert f1 == pytest.approx(2 * precision * recall / total if total else 0)
    assert METRICS["span_f1"]([["O"]], [["O"]]) == 0


def test_exact_match_with_several_references():
    assert METRICS["exact"](["a b", "c", "d "], ["a b", ["x", "c"], ["e", "f"]]) == pytest.approx(2 / 3)


@functools.cache
def slow_distance(a: tuple, b: tuple) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(
        slow_distance(a[1:], b) + 1, slow_distance(a, b[1:]) + 1, slow_distance(a[1:], b[1:]) + (a[0] != b[0])
    )


def test_edit_distance_is_the_recursive_definition():
    assert edit_distance("kitten", "sitting") == 3
    for a, b in itertools.product(
        [word for size in range(5) for word in itertools.product("ab", repeat=size)], repeat=2
    ):
        assert edit_distance(a, b) == slow_distance(a, b)
    generator = random.Random(1)
    for _ in range(30):
        a, b = (tuple(generator.choices("abcd", k=generator.randrange(9))) for _ in range(2))
        assert edit_distance(a, b) == slow_distance(a, b)


def test_error_rates():
    assert METRICS["word_error"](["the cat sat"], ["the cat sat down"]) == pytest.approx(1 / 4)
    # The better reference counts.
    assert METRICS["word_error"](["a b c", "x"], [["a", "a b d"], "x y"]) == pytest.approx((1 + 1) / (3 + 2))
    assert METRICS["token_error"]([[1, 2, 3]], [[[1, 3], [9]]]) == pytest.approx(1 / 2)


@pytest.mark.parametrize("several", [False, True])
def test_bleu_and_chrf_are_sacrebleus(several):
    references = (
        [[one, "the dog"] if place % 2 else [one] for place, one in enumerate(REFERENCES)]
        if several
        else REFERENCES
    )
    streams = (
        [REFERENCES, ["the dog" if place % 2 else None for place in range(5)]] if several else [REFERENCES]
    )
    bleu, chrf = (METRICS[name].measure(HYPOTHESES, references) for name in ("bleu", "chrf"))
    assert (
        bleu.value == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, streams).score) and 5 < bleu.value < 95
    )
    assert chrf.value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, streams).score)
    assert (
        "tok:13a" in bleu.signature
        and f"version:{sacrebleu.__version__}" in bleu.signature
        and "nc:6" in chrf.signature
    )
    assert METRICS["bleu"](HYPOTHESES, references) == bleu.value
    assert bleu.interval[0] < bleu.value < bleu.interval[1]


def test_without_sacrebleu_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'clearhead\[train\]'"):
        METRICS["bleu"](["a"], ["a"])


def test_perplexity():
    assert metrics.perplexity(10 * math.log(7), 10) == pytest.approx(7)
    assert metrics.perplexity(1e9, 1) == math.inf
    assert metrics.perplexity(3 * math.log(2), 3) == pytest.approx(2)


def test_bootstrap_of_a_share_is_the_binomial_interval():
    """400 of 1,000 right: the share's deviation is sqrt(0.4 · 0.6 / 1000)."""
    counts = metrics.accuracy_counts([1] * 400 + [0] * 600, [1] * 1000)
    low, high = bootstrap(counts, metrics.ratio_of)
    deviation = math.sqrt(0.4 * 0.6 / 1000)
    assert low == pytest.approx(0.4 - 1.96 * deviation, abs=0.004) and high == pytest.approx(
        0.4 + 1.96 * deviation, abs=0.004
    )
    assert bootstrap(counts, metrics.ratio_of) == (low, high) != bootstrap(counts, metrics.ratio_of, seed=1)
    narrow = bootstrap(counts, metrics.ratio_of, share=0.5)
    assert low < narrow[0] < 0.4 < narrow[1] < high


def test_bootstrap_of_f1_is_that_of_sets_drawn_anew():
    predicted, wanted = drawn(60, 3, 1), drawn(60, 3, 2)
    counts, macro = metrics.class_numbers(predicted, wanted), METRICS["macro_f1"]
    found = bootstrap(counts, macro.of, seed=3, resamples=200, total=macro.total)
    generator, figures = np.random.default_rng(3), []
    for _ in range(200):
        rows = generator.integers(60, size=60)
        figures.append(
            f1_score(
                [wanted[row] for row in rows],
                [predicted[row] for row in rows],
                average="macro",
                zero_division=0,
            )
        )
    assert found == pytest.approx(tuple(np.quantile(figures, [0.025, 0.975])))


def test_nothing_to_measure_and_counts_that_differ():
    with pytest.raises(InputError, match="no examples"):
        METRICS["accuracy"]([], [])
    with pytest.raises(InputError, match="no examples"):
        bootstrap([], metrics.ratio_of)
    with pytest.raises(InputError, match="2 predictions and 1"):
        METRICS["macro_f1"]([1, 2], [1])
    with pytest.raises(InputError, match="2 tags and 1"):
        METRICS["span_f1"]([["O", "O"]], [["O"]])


@pytest.mark.parametrize(
    ("said", "meant", "f1"),
    [
        ("The cat", "cat", 1.0),
        ("\u201cthe wire\u201d", "\u201c wire\u201d", 1.0),
        ("x\u201ca\u201d y", "x y", 0.4),
        ("then", "n", 0.0),
    ],
)
def test_articles_are_left_aside_as_squads_own_script_does(said, meant, f1):
    """Its rule is a boundary of words, which a typographic quotation mark is too."""
    assert answer_counts([said], [meant])[0].tolist() == [float(f1 == 1), pytest.approx(f1), 1]


def correlation(sums: np.ndarray) -> float:
    """Pearson's r from n and the sums of x, y, x², y² and x·y."""
    n, x, y, xx, yy, xy = sums
    return float((n * xy - x * y) / math.sqrt((n * xx - x * x) * (n * yy - y * y)))


def test_a_new_metric_is_two_small_functions():
    """Add Pearson's correlation, which is like no built-in metric, and get value and interval."""
    pearson = Metric(
        lambda said, meant: np.array([(1, a, b, a * a, b * b, a * b) for a, b in zip(said, meant)]),
        correlation,
    )
    random_ = np.random.default_rng(0)
    wanted = random_.normal(size=80)
    predicted = wanted + random_.normal(size=80)
    found = pearson.measure(predicted, wanted, seed=3)
    assert found.value == pytest.approx(np.corrcoef(predicted, wanted)[0, 1])
    draws, values = np.random.default_rng(3), []
    for _ in range(1000):
        rows = draws.integers(80, size=80)
        values.append(np.corrcoef(predicted[rows], wanted[rows])[0, 1])
    assert found.interval == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
