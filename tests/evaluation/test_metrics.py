"""Measures against scikit-learn, sacreBLEU, brute force and counts made by hand."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import sys
from statistics import NormalDist

import numpy as np
import pytest
import sacrebleu
from benchmarks import intervals
from sklearn.metrics import accuracy_score, f1_score

from clearhead.errors import InputError, MissingExtraError
from clearhead.learn.data.tagging import Tagging
from clearhead.learn.evaluation import metrics
from clearhead.learn.evaluation.metrics import METRICS, Metric, answer_counts, edit_distance, interval_of

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


@pytest.mark.parametrize(
    ("said", "meant", "rate"),  # as jiwer 4 has them
    [
        (["a b"], [""], 2.0),
        ([""], [""], 0.0),
        (["a b", "x y"], ["", "x y"], 1.0),
        (["", ""], ["x", ""], 1.0),
    ],
)
def test_words_said_where_nothing_was_are_errors(said, meant, rate):
    assert METRICS["word_error"](said, meant) == rate


def test_an_item_ranked_twice_gains_once():
    draw = random.Random(4)
    for _ in range(200):
        relevant = {item: draw.choice((0, 1, 3)) for item in draw.sample(range(8), 4)}
        ranked = draw.choices(range(8), k=12)
        ndcg, mrr = (METRICS[name]([ranked], [relevant]) for name in ("ndcg", "mrr"))
        assert 0 <= ndcg <= 1 and 0 <= mrr <= 1
        once = [one if one not in ranked[:place] else f"again {place}" for place, one in enumerate(ranked)]
        assert (ndcg, mrr) == tuple(METRICS[name]([once], [relevant]) for name in ("ndcg", "mrr"))
    assert METRICS["ndcg"]([["a", "a", "a"]], [{"a": 1.0}]) == 1


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


@pytest.mark.parametrize("n", [10, 30, 100, 1000])
@pytest.mark.parametrize("right", [0.0, 0.4, 0.9, 1.0])
def test_the_interval_of_a_share_is_agresti_and_coulls(n, right):
    """Add z² / 2 right and as many wrong answers, then take the interval of a mean."""
    hits, z = round(right * n), NormalDist().inv_cdf(0.975)
    counts = metrics.accuracy_counts([1] * hits + [0] * (n - hits), [1] * n)
    share = (hits + z * z / 2) / (n + z * z)
    half = metrics.student(z, n + 2) * math.sqrt(share * (1 - share) / (n + z * z))
    low, high = interval_of(counts, metrics.ratio_of)
    assert (low, high) == pytest.approx((max(0, share - half), min(1, share + half)), abs=1e-3)
    assert low <= right <= high and high - low > 1 / n
    narrow = interval_of(counts, metrics.ratio_of, share=0.5)
    assert low <= narrow[0] <= right <= narrow[1] <= high


def test_students_quantile():
    for degrees, right in ((3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)):
        assert metrics.student(1.959964, degrees) == pytest.approx(right, rel=0.02)


def test_groups_of_examples_give_the_interval_of_single_ones():
    counts = metrics.accuracy_counts([1] * 4000 + [0] * 6000, [1] * 10_000)
    low, high = interval_of(counts, metrics.ratio_of)
    half = 1.96 * math.sqrt(0.4 * 0.6 / 10_000)
    assert (low, high) == pytest.approx((0.4 - half, 0.4 + half), abs=0.001)
    assert (
        interval_of(counts, metrics.ratio_of) == (low, high) != interval_of(counts, metrics.ratio_of, seed=1)
    )


@pytest.mark.parametrize("n", [10, 30, 100, 1000])
@pytest.mark.parametrize("rate", [0.5, 0.9, 0.99])
def test_intervals_of_shares_hold_the_truth_as_often_as_they_say(n, rate):
    """Exactly: the probability of each number of right answers, where its interval holds the rate."""
    deviation, held = math.sqrt(n * rate * (1 - rate)), 0.0
    for hits in range(max(0, round(n * rate - 5 * deviation)), min(n, round(n * rate + 5 * deviation)) + 1):
        low, high = interval_of(
            metrics.accuracy_counts([1] * hits + [0] * (n - hits), [1] * n), metrics.ratio_of
        )
        ways = math.lgamma(n + 1) - math.lgamma(hits + 1) - math.lgamma(n - hits + 1)
        probability = math.exp(ways + hits * math.log(rate) + (n - hits) * math.log(1 - rate))
        held += probability * (low <= rate <= high)
    assert held >= 0.93


@pytest.mark.parametrize("kind", ["span_f1", "word_error", "mrr", "pearson"])
@pytest.mark.parametrize("rate", [0.5, 0.99])
def test_intervals_of_other_metrics_hold_the_truth(kind, rate):
    """A fast version of the simulation in benchmarks/intervals.py, whose error is 2 %."""
    assert intervals.coverage(kind, 15, rate, 120)[0] >= 0.9


def test_a_perfect_score_has_an_interval_in_every_metric():
    """A bootstrap collapses there: every set that is drawn has the same value."""
    tags, texts = [["B-P", "O"]] * 20, ["the cat sat on the mat"] * 20
    numbers = [[float(one)] for one in range(20)]
    cases = {
        **dict.fromkeys(("word_accuracy", "span_f1", "span_precision", "span_recall"), (tags, tags)),
        **dict.fromkeys(("accuracy", "macro_f1", "exact", "word_error", "bleu", "chrf"), (texts, texts)),
        **dict.fromkeys(("answer_exact", "answer_f1"), (texts, texts)),
        **{name: ([["a"]] * 20, [{"a": 1.0}] * 20) for name in ("mrr", "ndcg")},
    }
    found = {name: METRICS[name].measure(*given) for name, given in cases.items()}
    found |= {name: METRICS[name].measure(numbers, numbers) for name in ("pearson", "spearman")}
    for name, one in found.items():
        low, high = one.interval
        assert low <= one.value <= high or one.value == pytest.approx(high), name
        assert 0.1 < (high - low) / max(one.value, 1) < 0.4, name


def test_nothing_to_measure_and_counts_that_differ():
    with pytest.raises(InputError, match="no examples"):
        METRICS["accuracy"]([], [])
    with pytest.raises(InputError, match="no examples"):
        interval_of([], metrics.ratio_of)
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
        bounds=(-1, 1),
    )
    random_ = np.random.default_rng(0)
    wanted = random_.normal(size=80)
    predicted = wanted + random_.normal(size=80)
    found = pearson.measure(predicted, wanted, seed=3)
    assert found.value == pytest.approx(np.corrcoef(predicted, wanted)[0, 1])
    # Fisher's interval, for two normal variables.
    centre, half = math.atanh(found.value), 1.96 / math.sqrt(80 - 3)
    assert found.interval == pytest.approx((math.tanh(centre - half), math.tanh(centre + half)), abs=0.04)
