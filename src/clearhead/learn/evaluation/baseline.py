"""Baselines: a simple model, fitted on the run's training data, judged on the same examples as the model.

For texts with a class, several classes or a number it is a linear model on TF-IDF of words and word pairs;
for tagged words one on the word, its affixes and its neighbours; for pictures one on pixels; for text an
n-gram model over the same tokens, in no more memory than the model's weights.

Shapes: N tokens, V vocabulary, C contexts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.learn.data.examples import Images, Labelled, Tagged
from clearhead.learn.tasks.entries.multilabel import Several

LINEAR_ROWS = 100_000  # training examples of a linear model, at most
NGRAM_TOKENS = 5_000_000  # training tokens of an n-gram model, at most
ORDER = 8  # tokens of the longest n-gram
Answers = list[list[Any]]  # as `Task.answers` has them
ENTRY = 12  # bytes of an n-gram or a context in a table: a hash of 8, a number of 4
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of hashes; odd, so that no token is lost


@dataclass(frozen=True)
class Baseline:
    """The figures of a simple model, next to those of the model that is judged."""

    name: str
    fitted_on: int  # training examples, of text tokens
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]

    def ahead(self, model: Mapping[str, float]) -> str:
        """Say where the simple model is better than this one by its first figure; "": it is not."""
        metric = next(iter(self.metrics))
        own, theirs = model[metric], self.metrics[metric]
        if (theirs >= own) if metric == "loss" else (theirs <= own):
            return ""
        return (
            f"the simple model is better: {metric} {theirs:.4f}, and {own:.4f} of this model; "
            "it takes more data, other settings or a trained model to start from (model.base)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON has them."""
        return asdict(self)


def linear_answers(train: Any, rows: Any, labels: Sequence[str]) -> tuple[str, int, Answers] | None:
    """Fit a linear model on training examples -> its name, their number, and its answer to each of `rows`.

    None: there is no linear model for such examples.
    """
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a limit of steps, not an error
        if isinstance(train, Images):
            several_sizes = isinstance(train.pixels, list) or isinstance(rows.pixels, list)
            return None if several_sizes else _of_pixels(train, rows)
        if not len(train) or not isinstance(train[0], Labelled | Tagged):
            return None
        if len(train) > LINEAR_ROWS:
            chosen = np.random.default_rng(0).permutation(len(train))[:LINEAR_ROWS]
            train = [train[number] for number in chosen]
        return (_of_words if isinstance(train[0], Tagged) else _of_texts)(train, rows, labels)


def right_answers(rows: Any, labels: Sequence[str]) -> Answers:
    """Return the right answer to each example, as `Task.answers` has it: numbers of labels, or a number."""
    order = {label: number for number, label in enumerate(labels)}
    if isinstance(rows, Images):
        return [[number] for number in rows.labels.tolist()]
    if isinstance(rows[0], Several):
        return [[int(label in row.classes) for label in labels] for row in rows]
    if not rows[0].NAMED:
        return [[float(row.label)] for row in rows]
    return [[order[name] for name in row.names()] for row in rows]


def _classifier(features: Any, classes: NDArray[Any]) -> Any:
    """Return logistic regression fitted on features, or the only class that there is."""
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression

    several = len(set(classes.tolist())) > 1
    model = LogisticRegression(C=4.0, max_iter=200) if several else DummyClassifier()
    return model.fit(features, classes)


def _of_texts(train: Any, rows: Any, labels: Sequence[str]) -> tuple[str, int, Answers]:
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import Ridge

    def words(texts: list[str]) -> Any:
        return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\S+").fit(texts)

    counted = [words([row.text for row in train])]
    counted += [words([row.pair or "." for row in train])] if any(row.pair for row in train) else []
    known, held_out = (
        hstack(
            [
                words.transform([text or "" for text in texts])
                for words, texts in zip(counted, ([row.text for row in part], [row.pair for row in part]))
            ]
        ).tocsr()
        for part in (train, rows)
    )
    targets: NDArray[Any] = np.array(right_answers(train, labels))
    numeric = not train[0].NAMED
    columns = [
        (Ridge().fit if numeric else _classifier)(known, column).predict(held_out) for column in targets.T
    ]
    name = "ridge" if numeric else "logistic"
    return f"{name} regression on TF-IDF of words and word pairs", len(train), np.stack(columns, 1).tolist()


def _of_words(train: Any, rows: Any, labels: Sequence[str]) -> tuple[str, int, Answers]:
    from sklearn.feature_extraction import FeatureHasher

    def features(sentences: Any) -> Any:
        words = (
            [
                f"word={word}",
                f"lower={word.lower()}",
                f"start={word[:3]}",
                f"end={word[-3:]}",
                "shape=" + "".join("X" if c.isupper() else "9" if c.isdigit() else "x" for c in word[:8]),
                f"before={row.words[at - 1].lower() if at else ''}",
                f"after={row.words[at + 1].lower() if at + 1 < len(row.words) else ''}",
            ]
            for row in sentences
            for at, word in enumerate(row.words)
        )
        return FeatureHasher(2**18, input_type="string").transform(words)

    tags = np.concatenate([np.array(row) for row in right_answers(train, labels)])
    flat = _classifier(features(train), tags).predict(features(rows))
    ends = np.cumsum([len(row.words) for row in rows])[:-1]
    name = "logistic regression on each word, its affixes and neighbours"
    return name, len(tags), [row.tolist() for row in np.split(flat, ends)]


def _of_pixels(train: Images, rows: Images) -> tuple[str, int, Answers]:
    def features(images: Images, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        return (np.asarray(images.pixels)[numbers].reshape(len(numbers), -1) / 255).astype(np.float32)

    chosen = np.sort(np.random.default_rng(0).permutation(len(train))[: LINEAR_ROWS // 10])
    model = _classifier(features(train, chosen), np.asarray(train.labels)[chosen])
    predicted = model.predict(features(rows, np.arange(len(rows))))
    return "logistic regression on pixels", len(chosen), predicted[:, None].tolist()


class NGram:
    """An interpolated Kneser-Ney model of tokens, whose tables have at most `memory` bytes.

    An n-gram is a hash of 64 bits. The longest are counted as they occur, shorter ones by how many different
    tokens come before them. N-grams that are too rare to fit are left out, from the rarest on; the
    probability that they had goes to shorter ones, so that each distribution still adds up to 1.
    """

    def __init__(self, ids: NDArray[Any], vocab_size: int, memory: int, order: int = ORDER) -> None:
        self.vocab_size = vocab_size
        counted = _counts(np.asarray(ids, dtype=np.uint64), order)
        rarest = 1
        while sum(_size(counts, contexts, rarest) for _, contexts, counts in counted[1:]) > memory:
            rarest *= 2
        # Of each order: sorted n-grams with their discounted shares, sorted contexts with what is left.
        self.tables = [_table(*columns, rarest if length else 1) for length, columns in enumerate(counted)]

    def losses(self, ids: NDArray[Any]) -> NDArray[np.float64]:
        """Return -log p of each token given those before it, but the first: [N] -> [N-1]."""
        ids = np.asarray(ids, dtype=np.uint64)
        likelihood = np.full(len(ids), 1 / self.vocab_size)
        for length, (grams, shares, contexts, left) in enumerate(self.tables):
            keys, before = _hashes(ids, length)
            if not len(keys) or not len(contexts):
                break
            context, known = _find(contexts, before)
            gram, seen = _find(grams, keys)
            longer = np.where(seen, shares[gram], 0.0) + left[context] * likelihood[length:]
            likelihood[length:] = np.where(known, longer, likelihood[length:])
        return np.asarray(-np.log(likelihood[1:]))


def _hashes(ids: NDArray[np.uint64], length: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the hash of each n-gram that has `length` tokens before its last, and of these tokens alone."""
    size = max(len(ids) - length, 0)
    before = np.full(size, length + 1, dtype=np.uint64)
    for offset in range(length):
        before = before * MULTIPLIER + ids[offset : offset + size] + np.uint64(1)
    return before * MULTIPLIER + ids[length:] + np.uint64(1), before


Columns = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.float64]]


def _counts(ids: NDArray[np.uint64], order: int) -> list[Columns]:
    """Return the n-grams of each length from one token on, their contexts, and their counts."""
    columns: list[Columns] = []
    last: NDArray[np.intp] | None = None  # where each n-gram that is one token longer ends
    for length in reversed(range(min(order, len(ids)))):
        keys, before = _hashes(ids, length)
        ends = np.arange(len(keys)) if last is None else last - length
        grams, first, counts = np.unique(keys[ends], return_index=True, return_counts=True)
        columns.append((grams, before[ends[first]], counts.astype(np.float64)))
        last = ends[first] + length
    return columns[::-1]


def _size(counts: NDArray[np.float64], contexts: NDArray[np.uint64], rarest: int) -> int:
    kept = counts >= rarest
    return ENTRY * int(kept.sum() + len(np.unique(contexts[kept])))


def _table(
    grams: NDArray[np.uint64], contexts: NDArray[np.uint64], counts: NDArray[np.float64], rarest: int
) -> tuple[NDArray[Any], ...]:
    once, twice = (counts == 1).sum(), (counts == 2).sum()
    discount = once / (once + 2 * twice) if once and twice else 0.5
    names, number = np.unique(contexts, return_inverse=True)
    shares = (counts - discount) / np.bincount(number, counts)[number]
    kept = counts >= rarest
    left = 1 - np.bincount(number[kept], shares[kept], len(names))
    used = np.unique(number[kept])
    return grams[kept], shares[kept], names[used], left[used]


def _find(table: NDArray[np.uint64], keys: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return where each key stands in a sorted table, and whether it does."""
    if not len(table):
        return np.zeros(len(keys), dtype=np.intp), np.zeros(len(keys), dtype=np.bool_)
    place = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return place, np.asarray(table[place] == keys)


def ngram_baseline(
    train: NDArray[Any], ids: NDArray[Any], vocab_size: int, memory: int, metrics: Mapping[str, float]
) -> Baseline:
    """Return the figures of an n-gram model of training tokens that takes no more memory than a model.

    `metrics` are those of the model: bits per byte follow from the loss in the same ratio.
    """
    known = train[:NGRAM_TOKENS]
    loss = float(NGram(known, vocab_size, memory).losses(ids).mean())
    figures = {"loss": loss, "perplexity": math.exp(min(loss, 700))}
    scaled = [name for name in ("bits_per_byte", "bits_per_character") if name in metrics]
    figures |= {name: metrics[name] * loss / metrics["loss"] for name in scaled}
    return Baseline(f"n-gram model, up to {ORDER} tokens, {memory / 1e6:,.1f} MB", len(known), figures, {})
