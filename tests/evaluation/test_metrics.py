"""Measures against scikit-learn, sacreBLEU, brute force and counts made by hand.

Spans in every tagging scheme: encoded and found again, by their definition, and as seqeval counts them.
"""

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

import clearhead as ch
from clearhead.errors import InputError, MissingExtraError
from clearhead.learn.data.conll import PREFIXES, Tagging, by_labels, recognise
from clearhead.learn.evaluation import metrics
from clearhead.learn.evaluation.metrics import METRICS, Metric, answer_counts, edit_distance, interval_of
from clearhead.learn.tasks.reading import spans_of
from clearhead.learn.tasks.results import Word
from clearhead.learn.tasks.table import TASKS
from tests.later import later

sklearn_metrics = later("sklearn.metrics")

IOB2 = Tagging("IOB2", "BI")
HYPOTHESES = ["the cat sat on the mat", "a dog", "there is nothing here at all to see", "", "the cat"]
REFERENCES = [
    "the cat sat on a mat",
    "a small dog ran",
    "there is nothing here to see at all",
    "empty",
    "the cat",
]


def drawn_classes(n: int, classes: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [f"class {generator.randrange(classes)}" for _ in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_accuracy_and_macro_f1_are_scikit_learns(seed):
    predicted, wanted = drawn_classes(40, 3 + seed % 2, seed), drawn_classes(40, 5, seed + 100)
    macro = sklearn_metrics.f1_score(wanted, predicted, average="macro", zero_division=0)
    accuracy = sklearn_metrics.accuracy_score(wanted, predicted)
    assert METRICS["accuracy"](predicted, wanted) == pytest.approx(accuracy, abs=1e-12)
    assert METRICS["macro_f1"](predicted, wanted) == pytest.approx(macro, abs=1e-12)


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
    assert IOB2.spans(["NOUN", "O", "VERB"]) == {("NOUN", 0, 0), ("VERB", 2, 2)}  # no scheme: each a span
    generator = random.Random(0)
    starts = re.compile(r"(?:^|O |-L )I-P|(?:^|O |-P )I-L")
    valid = [tags for tags in every if not starts.search(" ".join(tags))]  # others are no IOB2
    for _ in range(30):
        predicted, wanted = generator.choices(every, k=5), generator.choices(valid, k=5)
        pairs = [(brute_spans(said), brute_spans(meant)) for said, meant in zip(predicted, wanted)]
        hits, n_said, n_meant = np.sum([(len(a & b), len(a), len(b)) for a, b in pairs], 0)
        names = ("span_precision", "span_recall", "span_f1")
        precision, recall, f1 = (METRICS[name](predicted, wanted) for name in names)
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
    every = [word for size in range(5) for word in itertools.product("ab", repeat=size)]
    for a, b in itertools.product(every, repeat=2):
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
    [(["a b"], [""], 2.0), ([""], [""], 0.0), (["a b", "x y"], ["", "x y"], 1.0), (["", ""], ["x", ""], 1.0)],
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
    references, streams = REFERENCES, [REFERENCES]
    if several:
        streams = [REFERENCES, ["the dog" if place % 2 else None for place in range(5)]]
        references = [[text for text in row if text] for row in zip(*streams)]
    bleu, chrf = (METRICS[name].measure(HYPOTHESES, references) for name in ("bleu", "chrf"))
    assert bleu.value == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, streams).score)
    assert 5 < bleu.value < 95
    assert chrf.value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, streams).score)
    assert "tok:13a" in bleu.signature
    assert f"version:{sacrebleu.__version__}" in bleu.signature
    assert "nc:6" in chrf.signature
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
    assert interval_of(counts, metrics.ratio_of) == (low, high)
    assert interval_of(counts, metrics.ratio_of, seed=1) != (low, high)


@pytest.mark.parametrize("n", [10, 30, 100, 1000])
@pytest.mark.parametrize("rate", [0.5, 0.9, 0.99])
def test_intervals_of_shares_hold_the_truth_as_often_as_they_say(n, rate):
    """Exactly: the probability of each number of right answers, where its interval holds the rate."""
    deviation, held = math.sqrt(n * rate * (1 - rate)), 0.0
    # Those further off would only add to what is held.
    for hits in range(max(0, round(n * rate - 3 * deviation)), min(n, round(n * rate + 3 * deviation)) + 1):
        counts = metrics.accuracy_counts([1] * hits + [0] * (n - hits), [1] * n)
        low, high = interval_of(counts, metrics.ratio_of)
        ways = math.lgamma(n + 1) - math.lgamma(hits + 1) - math.lgamma(n - hits + 1)
        probability = math.exp(ways + hits * math.log(rate) + (n - hits) * math.log(1 - rate))
        held += probability * (low <= rate <= high)
    assert held >= 0.93


@pytest.mark.parametrize("kind", ["span_f1", "word_error", "mrr", "pearson"])
@pytest.mark.parametrize("rate", [0.5, 0.99])
def test_intervals_of_other_metrics_hold_the_truth(kind, rate):
    """A fast version of the simulation in benchmarks/run.py intervals, whose error is 2 %."""
    assert intervals.coverage(kind, 15, rate, 120)[0] >= 0.9


def test_a_perfect_score_has_an_interval_in_every_metric():
    """A bootstrap collapses there: every set that is drawn has the same value."""
    tags, texts = [["B-P", "O"]] * 20, ["the cat sat on the mat"] * 20
    numbers = [[float(number)] for number in range(20)]
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


SCHEMES = ("IO", "IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU")
TYPES = ("P", "work-of-art")
Found = set[tuple[str, int, int]]


def letters(scheme: str) -> str:
    return PREFIXES[{"IOB1": "IOB2", "IOE1": "IOE2"}.get(scheme, scheme)]


def encode(spans: list[tuple[str, int, int]], length: int, scheme: str) -> list[str]:
    """Tag the words of a sentence by its spans, which are in order and do not overlap."""
    tags = ["O"] * length
    for (kind, first, last), after, before in zip(spans, [*spans[1:], None], [None, *spans[:-1]]):
        prefixes = ["I"] * (last + 1 - first)
        follows = before is not None and before[0] == kind and before[2] == first - 1
        precedes = after is not None and after[0] == kind and after[1] == last + 1
        if scheme in ("IOB2", "IOBES", "BILOU") or (scheme == "IOB1" and follows):
            prefixes[0] = "B"
        if scheme in ("IOE2", "IOBES") or (scheme == "IOE1" and precedes):
            prefixes[-1] = "E"
        if scheme == "BILOU":
            prefixes[-1] = "L"
        if first == last and scheme in ("IOBES", "BILOU"):
            prefixes = ["S" if scheme == "IOBES" else "U"]
        tags[first : last + 1] = [f"{prefix}-{kind}" for prefix in prefixes]
    return tags


def drawn(draw: random.Random, scheme: str) -> tuple[list[tuple[str, int, int]], int]:
    """Some spans and the length of their sentence; spans of one type touch where the scheme allows it."""
    spans: list[tuple[str, int, int]] = []
    place = 0
    while place < 12:
        place += draw.choice((0, 0, 1, 3))
        kind, last = draw.choice(TYPES), place + draw.choice((0, 0, 1, 2))
        touches = bool(spans) and spans[-1][0] == kind and spans[-1][2] == place - 1
        # IO cannot tell two such spans apart, and seqeval's IOE1 does not see the first if it is one word.
        if touches and (scheme == "IO" or (scheme == "IOE1" and spans[-1][1] == spans[-1][2])):
            place += 1
            continue
        spans.append((kind, place, last))
        place = last + 1
    return spans, place + 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_encoded_is_recognised_and_found_again(scheme):
    draw = random.Random(SCHEMES.index(scheme))
    for _ in range(50):
        sentences = [drawn(draw, scheme) for _ in range(4)]
        tags = [encode(*sentence, scheme) for sentence in sentences]
        prefixes = {tag[0] for row in tags for tag in row} - {"O"}
        tagging = recognise(tags)
        if prefixes != {"I"}:  # without two neighbours of one type, IOB1 and IOE1 are IO
            assert tagging.scheme == scheme
        assert [tagging.spans(row) for row in tags] == [{*spans} for spans, _ in sentences]
        assert [{*tagging.joined(row)} for row in tags] == [{*spans} for spans, _ in sentences]
        for name in ("span_f1", "span_precision", "span_recall"):
            assert METRICS[name](tags, tags) == 1
        labels = sorted({"O"} | {tag for row in tags for tag in row})
        numbers = [[labels.index(tag) for tag in row] for row in tags]
        assert TASKS["tag"].default_metric(labels) == "span_f1"
        scores = TASKS["tag"].score(numbers, numbers, labels)
        assert {name: metric(*sides) for name, (metric, *sides) in scores.items()} == {
            "accuracy": 1,
            "span_f1": 1,
        }
        bare = [[tag[0] for tag in row] for row in tags if len({tag[1:] for tag in row} - {""}) == 1]
        for row in bare:  # without types: BioBERT's sets have B, I and O
            assert {kind for kind, _, _ in recognise([row]).spans(row)} <= {"_"}


def brute(tags: tuple[str, ...], scheme: str) -> Found:
    """Every stretch of one type that the scheme's own grammar spells as a span where it stands."""
    found = set()
    words = [("O", ""), *((tag[0], tag[2:]) for tag in tags), ("O", "")]
    for first, last in itertools.combinations_with_replacement(range(1, len(words) - 1), 2):
        inner, kind = "".join(prefix for prefix, _ in words[first : last + 1]), words[first][1]
        (before, left), (after, right) = words[first - 1], words[last + 1]
        if "O" in inner or any(other != kind for _, other in words[first : last + 1]):
            continue
        continued = right == kind and after == "I"
        middle = inner[1:-1].strip("I") == ""
        match scheme:
            case "IOB2":
                spelt = inner[0] == "B" and inner[1:].strip("I") == "" and not continued
            case "IOE2":
                spelt = (
                    inner[-1] == "E" and inner[:-1].strip("I") == "" and not (before == "I" and left == kind)
                )
            case "IOBES" | "BILOU":
                one, end = ("S", "E") if scheme == "IOBES" else ("U", "L")
                spelt = inner == one or (len(inner) > 1 and inner[0] == "B" and inner[-1] == end and middle)
        if spelt:
            found.add((kind, first - 1, last - 1))
    return found


@pytest.mark.parametrize("scheme", ["IOB2", "IOE2", "IOBES", "BILOU"])
def test_spans_of_every_sequence_valid_or_not_by_brute_force(scheme):
    tags = ["O", *(f"{letter}-{kind}" for letter in letters(scheme) for kind in TYPES)]
    tagging = Tagging(scheme, letters(scheme))
    for row in itertools.chain(*(itertools.product(tags, repeat=length) for length in (1, 2, 3, 4))):
        assert tagging.spans(row) == brute(row, scheme), row


@pytest.mark.parametrize("scheme", SCHEMES[1:])
def test_spans_of_every_sequence_are_seqevals(scheme):
    theirs = pytest.importorskip("seqeval.scheme", reason="see requirements-references.txt")
    tags = ["O", *(f"{letter}-{kind}" for letter in letters(scheme) for kind in TYPES)]
    tagging = Tagging(scheme, letters(scheme))
    for row in itertools.chain(*(itertools.product(tags, repeat=length) for length in (1, 2, 3, 4))):
        found = theirs.Tokens(list(row), getattr(theirs, scheme)).entities
        assert tagging.spans(row) == {(one.tag, one.start, one.end - 1) for one in found}, row


@pytest.mark.parametrize(
    ("tags", "scheme", "wanted"),
    [
        # CoNLL-2003's own: B only between neighbours of one type; elsewhere it begins nothing.
        ("I-P I-P B-P O", "IOB1", {("P", 0, 1), ("P", 2, 2)}),
        ("I-P I-L O B-P", "IOB1", {("P", 0, 0), ("L", 1, 1)}),
        ("I-P E-P I-P O", "IOE1", {("P", 0, 1), ("P", 2, 2)}),
        ("I-P I-P E-L", "IOE1", {("P", 0, 1)}),
    ],
)
def test_the_schemes_that_mark_only_neighbours(tags, scheme, wanted):
    assert Tagging(scheme, letters(scheme)).spans(tags.split()) == wanted


def test_one_odd_tag_does_not_change_the_scheme():
    rows = [["B-P", "I-P", "O"], ["O", "I-P", "O"], ["B-P", "O", "B-P"]]
    assert recognise(rows).scheme == "IOB2"
    rows = [["I-P", "I-P", "O"], ["O", "B-P", "O"], ["I-P", "B-P", "I-L"]]
    assert recognise(rows).scheme == "IOB1"


@pytest.mark.parametrize(
    ("labels", "scheme", "metric"),
    [
        (["O"], "", "span_f1"),
        (["NOUN", "VERB", "-LRB-"], "", "accuracy"),
        (["O", "E-mail", "Phone"], "", "accuracy"),
        (["O", "B-P", "I-P", "X"], "IOB2", "accuracy"),
        (["O", "B-P", "E-P", "L-P", "U-P"], "IOB2", "accuracy"),
        (["O", "I-P"], "IO", "span_f1"),
        (["O", "S-P"], "IOBES", "span_f1"),
        (["O", "U-P"], "BILOU", "span_f1"),
        (["O", "B", "I"], "IOB2", "span_f1"),
    ],
)
def test_a_scheme_is_told_from_labels(labels, scheme, metric):
    assert by_labels(labels).scheme == scheme and TASKS["tag"].default_metric(labels) == metric


def test_a_type_or_prefix_that_is_not_wanted_is_only_a_wrong_span():
    wanted = [["S-P", "O", "O"]]
    assert METRICS["span_recall"]([["S-P", "S-new", "U-P"]], wanted) == 1
    assert METRICS["span_precision"]([["S-P", "S-new", "U-P"]], wanted) == pytest.approx(1 / 3)
    assert METRICS["span_f1"]([["B-P", "O", "O"]], [["O", "O", "O"]]) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_spans_of_a_tagger_have_clean_labels(scheme):
    text = "a b c d e f g"
    spans = [("P", 0, 2), ("work-of-art", 3, 3), ("P", 5, 5), ("P", 6, 6)]
    spans = spans[:3] if scheme == "IO" else spans
    tags = encode(spans, 7, scheme)
    words = [Word(text[2 * place], tag, 2 * place, 2 * place + 1, 0.5) for place, tag in enumerate(tags)]
    labels = ["O", *(f"{letter}-{kind}" for letter in letters(scheme) for kind in TYPES)]
    found = spans_of(words, text, by_labels(labels))
    assert [(one.label, one.text) for one in found] == [
        (kind, text[2 * first : 2 * last + 1]) for kind, first, last in spans
    ]


def test_evaluate_names_the_scheme_and_tag_gives_types(tmp_path):
    """A tagger of IOBES tags, trained for an instant: `eval` says the scheme, and no span has a prefix."""
    rows = [
        {"words": [*"abcd"], "tags": ["S-P", "B-L", "I-L", "E-L"]},
        {"words": [*"abca"], "tags": ["S-P", "B-L", "E-L", "S-P"]},
    ] * 10
    notes: list[str] = []
    settings = {"data.task": "tag", "train.steps": 2, "model.d_model": 16, "model.n_heads": 2}
    made = ch.train(
        rows, out=tmp_path / "run", settings=settings, on_event=lambda event: notes.append(str(event))
    )
    assert any("the tags follow IOBES" in line for line in notes)
    assert {span.label for span in made.model.tag([*"abcdabcd"]).spans} <= {"P", "L"}
    data = tmp_path / "data.conll"
    data.write_text("a\tS-P\nb\tB-L\nc\tE-L\n\n")
    assert any("the tags follow IOBES" in line for line in ch.evaluate(made.model, data).notes)
