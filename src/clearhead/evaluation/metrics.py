"""Measures of what a model says, as pure functions.

A measure of a whole set is a function of counts that are summed over its examples: `..._counts` gives a row of them for
each example, `..._of` turns their sum into the figure. So `bootstrap` finds the interval of any of them.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from clearhead.errors import InputError, MissingExtraError

Counts: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"  # a row per example, or their sum
References: TypeAlias = Sequence[
    str | Sequence[str]
]  # of each example one, or several of which the best counts


@dataclass(frozen=True)
class F1:
    """Precision, recall and their harmonic mean."""

    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Score:
    """A figure of sacreBLEU, 0 to 100, and the signature that makes it comparable."""

    score: float
    signature: str


# Classes --------------------------------------------------------------------------------------------------------------


def accuracy(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """The share that is right."""
    return ratio_of(accuracy_counts(predicted, wanted).sum(0))


def accuracy_counts(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> Counts:
    """Of each example whether it is right, and 1; for `ratio_of`."""
    _check(predicted, wanted)
    return np.array([(said == meant, 1) for said, meant in zip(predicted, wanted)], dtype=np.float64)


def ratio_of(sums: Counts) -> float:
    """The first of two sums, divided by the second."""
    return float(sums[0] / sums[1]) if sums[1] else 0.0


def macro_f1(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> float:
    """The mean over classes of F1; classes that are neither predicted nor wanted do not count."""
    return macro_f1_of(class_counts(predicted, wanted).sum(0))


def class_counts(predicted: Sequence[Hashable], wanted: Sequence[Hashable]) -> Counts:
    """Of each example and class: hit, predicted, wanted; for `macro_f1_of`."""
    _check(predicted, wanted)
    place = {name: number for number, name in enumerate(dict.fromkeys([*predicted, *wanted]))}
    counts = np.zeros((len(wanted), len(place), 3))
    for row, said, meant in zip(counts, predicted, wanted):
        row[place[said], 1] = row[place[meant], 2] = 1
        row[place[meant], 0] = said == meant
    return counts.reshape(len(wanted), -1)


def macro_f1_of(sums: Counts) -> float:
    """The mean of 2 · hits / (predicted + wanted) over classes."""
    hits, predicted, wanted = sums.reshape(-1, 3).T
    seen = predicted + wanted > 0
    return float((2 * hits[seen] / (predicted + wanted)[seen]).mean())


# Spans ----------------------------------------------------------------------------------------------------------------


def spans(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Type, first and last place of each span of one sentence tagged with B-, I- and O.

    Strictly: a span begins with B- and goes on with I- of its own type; an I- that follows neither belongs to none. A
    tag without prefix is a span of one word.
    """
    found: list[tuple[str, int, int]] = []
    inside = ""
    for place, tag in enumerate(tags):
        prefix, _, kind = tag.partition("-")
        if prefix == "I" and kind:
            if kind == inside:
                found[-1] = (kind, found[-1][1], place)
            else:
                inside = ""
            continue
        inside = kind if prefix == "B" else ""
        if tag != "O":
            found.append((inside or tag, place, place))
    return set(found)


def span_f1(predicted: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> F1:
    """Over all sentences: a span counts if its type and both ends are right."""
    hits, said, meant = span_counts(predicted, wanted).sum(0)
    return F1(
        float(hits / said) if said else 0.0,
        float(hits / meant) if meant else 0.0,
        f1_of(np.array([hits, said, meant])),
    )


def span_counts(predicted: Sequence[Sequence[str]], wanted: Sequence[Sequence[str]]) -> Counts:
    """Of each sentence: spans hit, predicted, wanted; for `f1_of`."""
    _check(predicted, wanted)
    rows = []
    for said, meant in zip(predicted, wanted):
        if len(said) != len(meant):
            raise InputError(
                f"a sentence has {len(said)} tags and {len(meant)} are wanted: give one per word on both sides"
            )
        a, b = spans(said), spans(meant)
        rows.append((len(a & b), len(a), len(b)))
    return np.array(rows, dtype=np.float64)


def f1_of(sums: Counts) -> float:
    """2 · hits / (predicted + wanted)."""
    return float(2 * sums[0] / (sums[1] + sums[2])) if sums[1] + sums[2] else 0.0


# Texts ----------------------------------------------------------------------------------------------------------------


def exact_match(predicted: Sequence[str], references: References) -> float:
    """The share of texts that are one of their references, spaces at the ends aside."""
    return ratio_of(exact_counts(predicted, references).sum(0))


def exact_counts(predicted: Sequence[str], references: References) -> Counts:
    """Of each text whether it is right, and 1; for `ratio_of`."""
    _check(predicted, references)
    right = [
        text.strip() in [one.strip() for one in _several(given)] for text, given in zip(predicted, references)
    ]
    return np.array([(hit, 1) for hit in right], dtype=np.float64)


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """The least number of insertions, deletions and replacements that turn `a` into `b`."""
    number = {item: place for place, item in enumerate(dict.fromkeys([*a, *b]))}
    target = np.array([number[item] for item in b], dtype=np.int64)
    steps = np.arange(len(b) + 1)
    row = steps  # of the table: from the part of `a` read so far to each beginning of `b`
    for count, item in enumerate(a, start=1):
        above = np.minimum(row[1:] + 1, row[:-1] + (target != number[item]))
        # A row is read from left to right, each place at most one more than the last: a running minimum of place minus column.
        row = np.minimum.accumulate(np.concatenate([[count], above]) - steps) + steps
    return int(row[-1])


def token_error_rate(
    predicted: Sequence[Sequence[Hashable]], references: Sequence[Sequence[Sequence[Hashable]]]
) -> float:
    """Edits per token of the reference, over all examples; each example has one reference or several."""
    return ratio_of(error_counts(predicted, references).sum(0))


def word_error_rate(predicted: Sequence[str], references: References) -> float:
    """Edits per word of the reference, over all examples; words are what stands between spaces."""
    _check(predicted, references)
    words = [[one.split() for one in _several(given)] for given in references]
    return token_error_rate([text.split() for text in predicted], words)


def error_counts(
    predicted: Sequence[Sequence[Hashable]], references: Sequence[Sequence[Sequence[Hashable]]]
) -> Counts:
    """Of each example: edits and the length of the reference that it is nearest to; for `ratio_of`."""
    _check(predicted, references)
    tried = [
        [(edit_distance(said, one), len(one)) for one in given] for said, given in zip(predicted, references)
    ]
    best = [min(pairs, key=lambda pair: pair[0] / max(pair[1], 1)) for pairs in tried]
    return np.array(best, dtype=np.float64)


def bleu(
    predicted: Sequence[str], references: References, tokenize: str | None = None, lowercase: bool = False
) -> Score:
    """BLEU of all texts by sacreBLEU; `tokenize` None: its 13a."""
    metric = _sacrebleu().BLEU(tokenize=tokenize, lowercase=lowercase)
    return Score(
        metric.corpus_score(list(predicted), _streams(predicted, references)).score,
        str(metric.get_signature()),
    )


def chrf(predicted: Sequence[str], references: References) -> Score:
    """chrF2 of all texts by sacreBLEU."""
    metric = _sacrebleu().CHRF()
    return Score(
        metric.corpus_score(list(predicted), _streams(predicted, references)).score,
        str(metric.get_signature()),
    )


def bleu_counts(
    predicted: Sequence[str], references: References, tokenize: str | None = None, lowercase: bool = False
) -> Counts:
    """Of each text: n-grams hit, n-grams, its length and the nearest reference's; for `bleu_of`."""
    _check(predicted, references)
    metric = _sacrebleu().BLEU(tokenize=tokenize, lowercase=lowercase, effective_order=True)
    scores = [metric.sentence_score(text, _several(given)) for text, given in zip(predicted, references)]
    return np.array(
        [(*one.counts, *one.totals, one.sys_len, one.ref_len) for one in scores], dtype=np.float64
    )


def bleu_of(sums: Counts) -> float:
    """What `bleu` gives for texts whose counts sum to this."""
    whole = [int(count) for count in sums]
    return float(
        _sacrebleu().BLEU.compute_bleu(whole[:4], whole[4:8], whole[8], whole[9], smooth_method="exp").score
    )


def chrf_counts(predicted: Sequence[str], references: References) -> Counts:
    """Of each text: the n-grams of characters in it, in its reference and in both; for `chrf_of`."""
    streams = _streams(predicted, references)
    return np.array(
        _sacrebleu().CHRF()._extract_corpus_statistics(list(predicted), streams), dtype=np.float64
    )


def chrf_of(sums: Counts) -> float:
    """What `chrf` gives for texts whose counts sum to this."""
    return float(_sacrebleu().CHRF()._compute_score_from_stats([int(count) for count in sums]).score)


def answer_counts(predicted: Sequence[str], references: References) -> Counts:
    """Of each answer, as SQuAD judges it: is it right, F1 over its words, and 1; the best of its references counts.

    Case, punctuation and English articles are left aside.
    """
    _check(predicted, references)
    words = [
        (_answer_words(text), [_answer_words(one) for one in _several(given)])
        for text, given in zip(predicted, references)
    ]
    return np.array(
        [(said in given, max(_overlap(said, one) for one in given), 1) for said, given in words],
        dtype=np.float64,
    )


def _answer_words(text: str) -> list[str]:
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _overlap(said: Sequence[str], meant: Sequence[str]) -> float:
    """F1 over words; of two texts of which one is empty, whether both are."""
    common = sum((Counter(said) & Counter(meant)).values())
    return 2 * common / (len(said) + len(meant)) if said and meant else float(said == meant)


def _sacrebleu() -> Any:
    try:
        from sacrebleu import metrics
    except ImportError:
        raise MissingExtraError("BLEU and chrF need sacrebleu: pip install 'clearhead[train]'") from None
    return metrics


def _streams(predicted: Sequence[str], references: References) -> list[list[str | None]]:
    """References as sacreBLEU takes them: the first of every text, the second of every text, and so on."""
    _check(predicted, references)
    several = [_several(given) for given in references]
    return [
        [given[place] if place < len(given) else None for given in several]
        for place in range(max(map(len, several)))
    ]


def _several(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


# Any ------------------------------------------------------------------------------------------------------------------


def perplexity(loss: float, count: int) -> float:
    """exp of the mean loss, from its sum over `count` tokens."""
    mean = loss / max(count, 1)
    return math.exp(mean) if mean < 700 else math.inf


def perplexity_of(sums: Counts) -> float:
    """Perplexity from counts that are loss and tokens of each example."""
    return perplexity(float(sums[0]), int(sums[1]))


def bootstrap(
    counts: Counts | Sequence[Sequence[float]],
    of: Callable[[Counts], float],
    seed: int = 0,
    resamples: int = 1000,
    share: float = 0.95,
) -> tuple[float, float]:
    """The interval that holds `share` of the figures of sets drawn, with replacement, from the examples at hand."""
    rows = np.asarray(counts, dtype=np.float64)
    if not len(rows):
        raise InputError("there are no examples to measure: give one at least")
    random = np.random.default_rng(seed)
    drawn = (
        np.bincount(random.integers(len(rows), size=len(rows)), minlength=len(rows)) for _ in range(resamples)
    )
    figures = [of(times @ rows) for times in drawn]
    low, high = np.quantile(figures, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def _check(predicted: Sequence[object], wanted: Sequence[object]) -> None:
    if len(predicted) != len(wanted):
        raise InputError(f"{len(predicted)} predictions and {len(wanted)} that are wanted: give one for each")
    if not predicted:
        raise InputError("there are no examples to measure: give one at least")
