"""Metrics over a set of examples, each with a confidence interval, and the figures of an evaluation.

A `Metric` is made of pure functions: `counts` gives a row of numbers for each example, `total` adds up the
rows of a set, and `of` turns the sum into the value. So every metric has its interval by the same rule: how
the value changes where some examples are left out.

A new metric is one function of a prediction and what was wanted, made into `counts` by `each`, and one entry
in `METRICS`, by whose name a task can ask for it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np

from clearhead.errors import MissingExtraError, refuse
from clearhead.learn.batches.ragged import by_length
from clearhead.learn.data.conll import Tagging, recognise
from clearhead.learn.data.plan import DataPlan
from clearhead.run.api import Model

Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"  # a row for each example, or their sum
Values: TypeAlias = "Sequence[Any] | Counts"
SHARE = 0.95  # of confidence
ROUNDING = 1e-6  # by which a value may pass its bounds
GROUPS = 1000  # of examples, at most, that are left out in turn
BEST = 10  # of a ranking, those that count
SOURCES = 32  # to be translated at a time, where no number of rows is asked for
OnProgress: TypeAlias = Callable[[str, int, int], None]  # what is done, how much of it is, how much there is


def ratio_of(sums: Counts) -> float:
    """Return the first of two sums divided by the second."""
    return float(sums[0] / sums[1]) if sums[1] else 0.0


def weighted_sum(counts: Counts, times: Counts) -> Counts:
    """Add up rows [N, K], each as often as `times` [N] says -> [K]."""
    return times @ counts


@dataclass(frozen=True)
class Measured:
    """The value of a metric on a set of examples."""

    value: float
    interval: tuple[float, float] | None  # None: a single example, or a value that is not finite, has none
    signature: str = ""  # of sacreBLEU: what makes the value comparable


@dataclass(frozen=True)
class Metric:
    """A metric over a set of examples: called with predictions and what was wanted, it returns its value."""

    counts: Callable[[Any, Any], Counts]  # predictions and wanted -> a row of numbers for each example
    of: Callable[[Counts], float] = ratio_of  # the sum of the rows -> the value
    total: Callable[[Counts, Counts], Counts] = weighted_sum  # how rows are added up, each some times
    bounds: tuple[float, float] | None = (0.0, 1.0)  # the worst and the best value, or the other way round
    signature: Callable[[Any, Any], str] = lambda predicted, wanted: ""

    def __call__(self, predicted: Values, wanted: Values) -> float:
        """Return the value on all examples."""
        return self._value(self._checked(predicted, wanted))

    def measure(self, predicted: Values, wanted: Values, seed: int = 0) -> Measured:
        """Return the value on all examples with its interval and signature."""
        counts = self._checked(predicted, wanted)
        interval = None
        if len(counts) > 1 and np.isfinite(counts).all():
            interval = interval_of(counts, self.of, seed, total=self.total, bounds=self.bounds)
        return Measured(self._value(counts), interval, self.signature(predicted, wanted))

    def _value(self, counts: Counts) -> float:
        return self.of(self.total(counts, np.ones(len(counts))))

    def _checked(self, predicted: Values, wanted: Values) -> Counts:
        refuse(
            len(predicted) != len(wanted),
            f"{len(predicted)} predictions and {len(wanted)} that are wanted: give one for each",
        )
        refuse(not len(predicted), "there are no examples to measure: give one at least")
        return np.asarray(self.counts(predicted, wanted), dtype=np.float64)


def each(row: Callable[[Any, Any], Sequence[float]]) -> Callable[[Values, Values], Counts]:
    """Return the `counts` of a metric whose numbers are found for each example by itself."""
    return lambda predicted, wanted: np.array(
        [row(prediction, truth) for prediction, truth in zip(predicted, wanted)]
    )


def interval_of(
    counts: Counts | Sequence[Sequence[float]],
    of: Callable[[Counts], float],
    seed: int = 0,
    share: float = SHARE,
    total: Callable[[Counts, Counts], Counts] = weighted_sum,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> tuple[float, float]:
    """Return the confidence interval of a value, by a jackknife over the examples.

    Where the value has bounds, z² / 2 examples at each of them are added, z being the quantile of the normal
    distribution. Of a share of right answers this is Agresti and Coull's interval, with Student's quantile.
    So it never collapses: a bootstrap of 30 right answers in 30 gives [1, 1], which seldom holds the truth.
    Without bounds, the interval is Student's, of the logarithm where the value is large enough.
    More than a thousand examples are left out in groups, which `seed` draws.
    """
    rows = np.asarray(counts, dtype=np.float64)
    refuse(not len(rows), "there are no examples to measure: give one at least")
    n, groups = len(rows), min(len(rows), GROUPS)
    value, z = of(total(rows, np.ones(n))), NormalDist().inv_cdf((1 + share) / 2)
    group = np.random.default_rng(seed).permutation(np.arange(n) % groups)
    left = np.array([of(total(rows, (group != number).astype(np.float64))) for number in range(groups)])
    squares = (groups - 1) ** 2 * np.square(left - left.mean()).sum() * (n / groups) ** 2  # of pseudo-values
    if bounds is None or not min(bounds) - ROUNDING <= value <= max(bounds) + ROUNDING:
        half = student(z, groups - 1) * math.sqrt(squares / (n * max(n - 1, 1)))
        if value > half:  # a loss is skewed: it errs by a factor rather than by a difference
            return value * math.exp(-half / value), value * math.exp(half / value)
        return value - half, value + half
    added, all_ = z * z / 2, n + z * z
    centre = (n * value + added * sum(bounds)) / all_
    squares += n * (value - centre) ** 2 + added * sum((bound - centre) ** 2 for bound in bounds)
    half = student(z, n + 2) * math.sqrt(squares) / all_
    low, high = min(value, centre - half), max(value, centre + half)
    return max(min(bounds), low), min(max(bounds), high)


def student(z: float, degrees: int) -> float:
    """Return the quantile of Student's distribution that has the probability of `z` in the normal one.

    By the first terms of its expansion: from 3 degrees of freedom on, 2 % off at most.
    """
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / max(degrees, 1) ** power for power, term in enumerate(terms, start=1))


# Losses --------------------------------------------------------------------------------------------------


def perplexity(loss: float, count: int = 1) -> float:
    """Return exp of the mean loss, from its sum over `count` tokens."""
    mean = loss / max(count, 1)
    return math.exp(mean) if mean < 700 else math.inf


# Classes ----------------------------------------------------------------------------------------------------


accuracy_counts = each(lambda prediction, truth: (prediction == truth, 1))  # whether it is right, and 1


def class_numbers(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> Counts:
    """Return of each example the number of the predicted and of the wanted class."""
    number = {name: place for place, name in enumerate(dict.fromkeys([*predicted, *wanted]))}
    return np.array([(number[prediction], number[truth]) for prediction, truth in zip(predicted, wanted)])


def class_totals(numbers: Counts, times: Counts) -> Counts:
    """Count hits, predictions and wanted examples of each class -> [3, C]."""
    predicted, wanted = numbers.astype(np.int64).T
    counted = ((wanted, times * (predicted == wanted)), (predicted, times), (wanted, times))
    return np.stack([np.bincount(which, weight, int(numbers.max()) + 1) for which, weight in counted])


def macro_f1_of(totals: Counts) -> float:
    """Return the mean F1 over the classes that are predicted or wanted at all."""
    hits, predicted, wanted = totals
    seen = predicted + wanted > 0
    return float((2 * hits[seen] / (predicted + wanted)[seen]).mean())


# Tags and spans ---------------------------------------------------------------------------------------------


def span_counts(predicted: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> Counts:
    """Return of each sentence how many spans are hit (type and both ends), predicted and wanted.

    The scheme is that of the wanted tags. Spans count strictly by it, as in seqeval's strict mode.
    """
    tagging = recognise(wanted)
    return each(functools.partial(hit_spans, tagging))(predicted, wanted)


def hit_spans(tagging: Tagging, prediction: Sequence[str], truth: Sequence[str]) -> tuple[int, int, int]:
    """Return of a sentence how many spans are hit, predicted and wanted."""
    refuse(
        len(prediction) != len(truth),
        f"a sentence has {len(prediction)} tags and {len(truth)} are wanted: give one per word on both sides",
    )
    predicted, wanted = tagging.spans(prediction), tagging.spans(truth)
    return len(predicted & wanted), len(predicted), len(wanted)


# Texts ------------------------------------------------------------------------------------------------------


def exact_match(prediction: str, references: str | Sequence[str]) -> tuple[bool, int]:
    """Return whether a text is one of its references, spaces at the ends aside, and 1."""
    return prediction.strip() in [reference.strip() for reference in _several(references)], 1


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """Return the least number of insertions, deletions and replacements that turn `a` into `b`."""
    number = {item: place for place, item in enumerate(dict.fromkeys([*a, *b]))}
    target = np.array([number[item] for item in b], dtype=np.int64)
    steps = np.arange(len(b) + 1)
    row = steps  # of the table: from the part of `a` read so far to each beginning of `b`
    for count, item in enumerate(a, start=1):
        above = np.minimum(row[1:] + 1, row[:-1] + (target != number[item]))
        # Each cell is at most one more than its left neighbour: a running minimum of cell minus column.
        row = np.minimum.accumulate(np.concatenate([[count], above]) - steps) + steps
    return int(row[-1])


def error_rate_of(sums: Counts) -> float:
    """Return edits per token of the references; where these are empty, the number of edits, as jiwer does."""
    return float(sums[0] / max(sums[1], 1))


def errors(prediction: Sequence[Hashable], references: Sequence[Sequence[Hashable]]) -> tuple[int, int]:
    """Return the edits to the nearest of an example's references, and the length of that reference."""
    tried = [(edit_distance(prediction, reference), len(reference)) for reference in references]
    return min(tried, key=lambda pair: pair[0] / max(pair[1], 1))


def word_errors(prediction: str, references: str | Sequence[str]) -> tuple[int, int]:
    """Return `errors` of a text; words are what stands between spaces."""
    return errors(prediction.split(), [reference.split() for reference in _several(references)])


def answer_match(prediction: str, references: str | Sequence[str]) -> tuple[bool, float, int]:
    """Return of an answer, as SQuAD scores it: whether it is right, F1 over its words, and 1.

    The best reference counts. Case, punctuation and English articles are ignored.
    """
    words, truths = (
        _answer_words(prediction),
        [_answer_words(reference) for reference in _several(references)],
    )
    return words in truths, max(_overlap(words, truth) for truth in truths), 1


def _answer_words(text: str) -> list[str]:
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _overlap(prediction: Sequence[str], truth: Sequence[str]) -> float:
    """Return F1 over words; where one text is empty, whether both are."""
    common = sum((Counter(prediction) & Counter(truth)).values())
    return 2 * common / (len(prediction) + len(truth)) if prediction and truth else float(prediction == truth)


def _several(references: str | Sequence[str]) -> list[str]:
    return [references] if isinstance(references, str) else list(references)


def sacrebleu_metric(name: str, **options: Any) -> Metric:
    """Return sacreBLEU's "BLEU" or "CHRF", 0 to 100, with its options, such as `tokenize`."""

    def made(**options: Any) -> Any:
        try:
            from sacrebleu import metrics
        except ImportError:
            raise MissingExtraError("BLEU and chrF need sacrebleu: pip install 'clearhead[train]'") from None
        return getattr(metrics, name)(**options)

    def extract(predicted: Sequence[str], references: Sequence[str | Sequence[str]]) -> tuple[Any, Any]:
        """Return the metric, which then knows the number of references, and the counts of each text."""
        metric = made(**options)
        # The first reference of every text, the second, ...
        streams = list(itertools.zip_longest(*map(_several, references)))
        return metric, metric._extract_corpus_statistics(list(predicted), streams)

    return Metric(
        counts=lambda predicted, references: extract(predicted, references)[1],
        # The options matter only to the counts.
        of=lambda sums: float(made()._compute_score_from_stats([int(count) for count in sums]).score),
        bounds=(0.0, 100.0),
        signature=lambda predicted, references: str(extract(predicted, references)[0].get_signature()),
    )


# Rankings ---------------------------------------------------------------------------------------------------


def gains(ranked: Sequence[Hashable], relevant: Mapping[Hashable, float]) -> list[float]:
    """Return what each of the ten best gains; one that is there again gains nothing."""
    best = ranked[:BEST]
    return [relevant.get(item, 0) if item not in best[:rank] else 0 for rank, item in enumerate(best)]


def reciprocal_rank(ranked: Sequence[Hashable], relevant: Mapping[Hashable, float]) -> tuple[float, int]:
    """Return 1 / the rank of the first relevant of the ten best, 0 where none is, and 1."""
    ranks = (rank for rank, gain in enumerate(gains(ranked, relevant), 1) if gain > 0)
    return 1 / next(ranks, math.inf), 1


def discounted_gain(ranked: Sequence[Hashable], relevant: Mapping[Hashable, float]) -> tuple[float, int]:
    """Return the discounted gain of the ten best as a share of the largest possible (nDCG@10), and 1."""
    ideal = sorted(relevant.values(), reverse=True)[:BEST]
    gain_of, most = (
        sum(gain / math.log2(n) for n, gain in enumerate(some, 2))
        for some in (gains(ranked, relevant), ideal)
    )
    return gain_of / most if most else 0.0, 1


# Numbers ----------------------------------------------------------------------------------------------------


def moments(predicted: Values, wanted: Values, ranked: bool = False) -> Counts:
    """Return of each example what a correlation is made of: 1, x, y, x², y², x · y, of numbers or ranks."""
    pairs = np.array([predicted, wanted], dtype=np.float64)[..., 0]  # 2 N
    x, y = (ranks(side) if ranked else side for side in pairs)
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], 1)


def ranks(values: Counts) -> Counts:
    """Return the rank of each value, centred; equal values share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[which] - (len(values) - 1) / 2


def correlation_of(sums: Counts) -> float:
    """Return Pearson's correlation from summed moments; 0 where a side does not vary."""
    n, x, y, xx, yy, xy = sums
    spread = max(n * xx - x * x, 0.0) * max(n * yy - y * y, 0.0)
    return float((n * xy - x * y) / math.sqrt(spread)) if spread > 0 else 0.0


# By name ----------------------------------------------------------------------------------------------------

answer_counts = each(answer_match)
METRICS: dict[str, Metric] = {
    # Of sums and numbers of targets.
    "loss": Metric(lambda losses, targets: np.stack([losses, targets], axis=1), bounds=None),
    "accuracy": Metric(accuracy_counts),
    "macro_f1": Metric(class_numbers, macro_f1_of, class_totals),
    # Of tags, with the words of a sentence: sentences are drawn, not words.
    "word_accuracy": Metric(
        each(lambda prediction, truth: (sum(map(operator.eq, prediction, truth)), len(truth)))
    ),
    "span_f1": Metric(span_counts, lambda sums: ratio_of(np.array([2 * sums[0], sums[1] + sums[2]]))),
    "span_precision": Metric(span_counts, lambda sums: ratio_of(sums[[0, 1]])),
    "span_recall": Metric(span_counts, lambda sums: ratio_of(sums[[0, 2]])),
    "exact": Metric(each(exact_match)),
    "token_error": Metric(each(errors), error_rate_of),
    "word_error": Metric(each(word_errors), error_rate_of),
    "answer_exact": Metric(answer_counts, lambda sums: ratio_of(sums[[0, 2]])),
    "answer_f1": Metric(answer_counts, lambda sums: ratio_of(sums[[1, 2]])),
    "mrr": Metric(each(reciprocal_rank)),  # of what was found, best first, and gains by what is relevant
    "ndcg": Metric(each(discounted_gain)),
    "pearson": Metric(moments, correlation_of, bounds=(-1.0, 1.0)),
    "spearman": Metric(functools.partial(moments, ranked=True), correlation_of, bounds=(-1.0, 1.0)),
    "bleu": sacrebleu_metric("BLEU"),
    "chrf": sacrebleu_metric("CHRF"),
}


# Figures of an evaluation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassFigures:
    """How well one class is found."""

    label: str
    precision: float  # of those taken for it, the share that is right
    recall: float  # of its examples, the share that is found
    f1: float
    examples: int
    predicted: int


@dataclass(frozen=True)
class ClassCounts:
    """How often each class was taken for each: `confusion[wanted][predicted]`, in the order of `labels`."""

    labels: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]  # [C, C]

    def __iter__(self) -> Iterator[ClassFigures]:
        """Yield the figures of each class; 0 where nothing can be divided."""
        for number, (label, row) in enumerate(zip(self.labels, self.confusion)):
            right, examples, predicted = row[number], sum(row), sum(other[number] for other in self.confusion)
            sums = ((right, predicted), (right, examples), (2 * right, examples + predicted))
            precision, recall, f1 = (ratio_of(np.array(pair, np.float64)) for pair in sums)
            yield ClassFigures(label, precision, recall, f1, examples, predicted)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {"labels": self.labels, "confusion": self.confusion, "figures": [asdict(row) for row in self]}


def count_classes(predicted: Sequence[int], expected: Sequence[int], labels: Sequence[str]) -> ClassCounts:
    """Count how often each class was taken for each."""
    counts = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(counts, (np.array(expected, np.int64), np.array(predicted, np.int64)), 1)
    return ClassCounts(tuple(labels), tuple(map(tuple, counts.tolist())))


@dataclass
class Figures:
    """Figures by name, added one after the other; intervals are of 95 %."""

    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    signatures: dict[str, str] = field(default_factory=dict)  # sacreBLEU's: they make a figure comparable
    notes: list[str] = field(default_factory=list)
    classes: ClassCounts | None = None  # of tasks that choose one of several classes

    def add(self, name: str, predicted: Values, wanted: Values, metric: Metric | str = "") -> None:
        """Add a metric of all examples; `metric` is one, or its name in `METRICS` where that differs."""
        metric = METRICS[metric or name] if isinstance(metric, str) else metric
        measured = metric.measure(predicted, wanted, self.seed)
        self.metrics[name] = measured.value
        self.intervals |= {} if measured.interval is None else {name: measured.interval}
        self.signatures |= {name: measured.signature} if measured.signature else {}

    def derive(self, name: str, base: str, of: Callable[[float], float]) -> None:
        """Add a figure that grows with another one; so does its interval."""
        self.metrics[name] = of(self.metrics[base])
        if base in self.intervals:
            low, high = self.intervals[base]
            self.intervals[name] = (of(low), of(high))

    def texts(
        self,
        predicted: Sequence[str],
        references: Sequence[Sequence[str]],
        tokenize: str | None,
        lowercase: bool,
    ) -> None:
        """Add the share of exact matches, edits per token of the reference, BLEU and chrF."""
        self.add("exact", predicted, references)
        spaced = any(" " in text.strip() for texts in references for text in texts)
        if not spaced:
            self.notes.append("no target has a space: token_error counts characters")
        self.add("token_error", predicted, references, "word_error" if spaced else "token_error")
        try:
            for name in ("bleu", "bleu_lowercase") if lowercase else ("bleu",):
                bleu = sacrebleu_metric("BLEU", tokenize=tokenize, lowercase=name == "bleu_lowercase")
                self.add(name, predicted, references, bleu)
            self.add("chrf", predicted, references)
        except MissingExtraError as error:
            self.notes.append(str(error))


@dataclass
class Judged(Figures):
    """One evaluation: what a task adds its figures to, and what they are computed from."""

    loaded: Model = field(kw_only=True)
    plan: DataPlan = field(kw_only=True)
    rows: Any = field(kw_only=True)  # the examples
    # What the caller of `evaluate` chooses
    tokenize: str | None = None  # sacreBLEU's tokenizer
    lowercase: bool = False
    generation: Mapping[str, Any] = field(default_factory=dict)  # options of `translate`
    on_progress: OnProgress = lambda stage, done, total: None
    # What is found
    asked: Sequence[tuple[str, ...]] = ()  # where answers are texts: the distinct questions or sources
    references: Sequence[list[str]] = ()  # and all right answers to each
    predicted: list[list[Any]] = field(default_factory=list)  # of each row, as `Task.answers` has it
    expected: list[list[Any]] = field(default_factory=list)
    tokens: int = 0  # of the text
    unknown: int = 0  # of these, unknown to the tokenizer

    def write(self) -> list[str]:
        """Generate an output for each source; those of similar length share a batch."""
        loaded, written = self.loaded, [""] * len(self.asked)
        ids = loaded.encode([source for (source,) in self.asked], loaded.max_length)
        size = self.plan.batch_size if self.plan.batch_tokens is None else SOURCES
        groups = by_length(list(map(len, ids)), lambda rows, longest: rows <= size)
        for done, numbers in enumerate(groups, start=1):
            sources: Any = [ids[number] for number in numbers]
            for number, output in zip(numbers, loaded.translate(sources, **self.generation)):
                written[number] = output.text or ""
            self.on_progress("writing", min(done * size, len(ids)), len(ids))
        return written
