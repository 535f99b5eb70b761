"""Probes: how well a linear classifier reads a property off the states of each layer, and what that is worth.

    result = probe(m, "en_ewt-ud-train.conllu.gz", "upos", test="en_ewt-ud-dev.conllu.gz")
    result.layers[3].accuracy, result.layers[3].selectivity

A probe that is accurate may have learned the words by heart. So each has a second probe, of a control task
(Hewitt & Liang 2019): every type of word has one label, drawn at random from the labels of the training
words. That can only be learned by heart; `selectivity` is the accuracy less the control's. Two baselines need
no model: the label that is most frequent of all, and the one that is most frequent for the type of word.

A probe is scikit-learn's LogisticRegression on standardised vectors: L-BFGS, an L2 penalty on the weights, at
most `iterations` steps. One written in torch with its own L-BFGS was tried: it took half as long again for
the same steps, 20,000 words and 17 classes, and gave the same loss.

Shapes: L depths (the embedding and every block), N words to train on, M to test on, D model, C classes.
"""

import importlib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import MissingExtraError, refuse, refuse_unknown
from clearhead.inside.inputs import AnyModel, as_model
from clearhead.inside.probe_data import (
    POOLS,
    Data,
    ProbeItem,
    apart,
    choose_items,
    read_items,
    split_items,
    stack_of,
    vectors_of,
)
from clearhead.inside.results import Floats, Result
from clearhead.learn.data import corpus, tables
from clearhead.learn.evaluation.metrics import OnProgress, interval_of, ratio_of
from clearhead.run.api import Model

WORDS = 20_000  # that a probe is trained on, and as many to test it, at most
TEST_SHARE = 0.2
MOST_CLASSES = 200
PENALTY = 0.005  # on half the square of the weights, added to the mean loss of a word
ITERATIONS = 100
SMALLEST = 1e-6  # spread of a dimension, below which it is left as it is
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class LayerProbe(Result):
    """What can be read off one depth."""

    json_names = ("name as layer", "accuracy", "interval", "control", "selectivity")

    name: str  # "embedding", or the block's number
    accuracy: float
    interval: tuple[float, float]  # of 95 %, by drawing sentences, not words
    control: float  # accuracy on the control task

    @property
    def selectivity(self) -> float:
        """Accuracy beyond what learning words by heart gives."""
        return self.accuracy - self.control


@dataclass(frozen=True)
class Probes(Result):
    """A property by depth."""

    json_names = (
        "column", "unit", "stack", "pool", "train", "test", "seed", "majority", "by_type", "seen",
        "labels", "layers", "said",
    )  # fmt: skip

    layers: tuple[LayerProbe, ...]  # L of them, from the embedding up
    column: str
    unit: str  # what has a label: words, texts or images
    stack: str
    pool: str
    labels: tuple[str, ...]  # C of them
    majority: float  # accuracy of always saying the most frequent label
    by_type: float  # accuracy of saying each type's most frequent label; for an unseen type, that of all
    seen: float  # share of the test words whose type is in the training words
    train: int  # words
    test: int
    seed: int
    said: tuple[str, ...]  # what was left out, a short sentence each

    @property
    def best(self) -> LayerProbe:
        """The depth with the highest accuracy."""
        return max(self.layers, key=lambda layer: layer.accuracy)


def probe(
    m: AnyModel,
    data: Data,
    column: str | None = None,
    test: Data | None = None,
    *,
    stack: str | None = None,
    pool: str | None = None,
    words: int = WORDS,
    test_share: float = TEST_SHARE,
    classes: int = MOST_CLASSES,
    penalty: float = PENALTY,
    iterations: int = ITERATIONS,
    seed: int = 0,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Probes:
    """Train a probe, and one of a control task, on the states of every depth of a model.

    Args:
        m: the model.
        data: a treebank, tagged words, or texts or images with labels: a file, a folder or examples in memory
            (see `read_items`).
        column: of a treebank: upos (if None), xpos, deprel, relation, arc, lemma or feats.NAME.
        test: data of the same kind to test on; None: a share of the sentences is set apart.
        stack: "encoder" or "decoder", of a model that has both; None: the encoder.
        pool: vector of a word with several tokens: their "mean" (if None), the "first" or the "last". Of a
            text, None: as the model pools texts by itself, else the mean.
        words: how many to train on, and how many to test on, at most; whole sentences are drawn.
        test_share: of the sentences, where there is no `test`.
        classes: a column with more labels is refused.
        penalty: on half the square of the weights.
        iterations: of L-BFGS, at most.
        seed: of the split, the choice of sentences, the control task and the intervals.
        on_progress: told what is being done, and how much of how much is.
    """
    m = as_model(m)
    _regression()  # before the model is run
    stack, prefix = stack_of(m, stack)
    refuse_unknown("pool", pool or POOLS[0], POOLS)
    refuse(not penalty > 0, f"penalty {penalty} must be above 0")
    refuse(iterations < 1, f"iterations {iterations} must be 1 or more")
    train_items, test_items, column, notes = _sides(data, test, column, words, test_share, seed)
    _check_labels(
        {label for item in train_items for label in item.labels if label is not None}, column, classes
    )
    unit = train_items[0].unit
    pool = pool or ("mean" if unit == "words" else _own_pooling(m))
    first, both = len(train_items), len(train_items) + len(test_items)
    left = vectors_of(m, train_items, stack, prefix, pool, lambda done: on_progress("reading", done, both))
    right = vectors_of(
        m, test_items, stack, prefix, pool, lambda done: on_progress("reading", first + done, both)
    )
    for side, vectors in (("train", left), ("test", right)):
        refuse(
            not vectors.labels,
            f"none of the {unit} to {side} on has a token: is this the right tokenizer for the data?",
        )
        if vectors.lost:
            notes.append(f"to {side} on: {vectors.lost:,} {unit} without a token left out")
    _check_labels(set(left.labels), column, classes)
    names = corpus.sort_names(left.labels)
    y, y_test = (numbered(vectors.labels, names) for vectors in (left, right))
    types, test_types = (_types(m, vectors.forms, unit) for vectors in (left, right))
    control, control_test = control_labels(types, test_types, y, seed)
    layers = []
    for depth, name in enumerate(("embedding", *map(str, range(len(left.layers) - 1)))):
        x, x_test = standardised(left.layers[depth], right.layers[depth])
        hits = predict(x, y, x_test, penalty, iterations) == y_test
        by_heart = predict(x, control, x_test, penalty, iterations) == control_test
        layers.append(
            LayerProbe(name, float(hits.mean()), interval(hits, right.items, seed), float(by_heart.mean()))
        )
        on_progress("fitting", depth + 1, len(left.layers))
    majority, by_type, seen = baselines(types, test_types, y, y_test)
    return Probes(
        layers=tuple(layers),
        column=column,
        unit=unit,
        stack=stack,
        pool=pool,
        labels=names,
        majority=majority,
        by_type=by_type,
        seen=seen,
        train=len(left.labels),
        test=len(right.labels),
        seed=seed,
        said=tuple(notes),
    )


def _regression() -> Any:
    """Return scikit-learn's LogisticRegression; refuse to go on without it."""
    try:
        return importlib.import_module("sklearn.linear_model").LogisticRegression
    except ImportError:
        raise MissingExtraError("probes need scikit-learn: pip install 'clearhead[train]'") from None


def _check_labels(labels: set[str], column: str, most: int) -> None:
    """Refuse what cannot be told apart, or is too much to tell apart."""
    refuse(
        len(labels) < 2,
        f'every label of "{column}" to train on is {tables.listed(labels)}: '
        "there is nothing to tell apart; choose another column",
    )
    refuse(
        len(labels) > most,
        f'"{column}" has {len(labels):,} labels, and a probe takes {most:,}: '
        "choose another column, or allow more (classes)",
    )


def _sides(
    data: Data, test: Data | None, column: str | None, words: int, share: float, seed: int
) -> tuple[list[ProbeItem], list[ProbeItem], str, list[str]]:
    """Return items to train on and to test on, the column they are labelled by, and what was left out."""
    items, name = read_items(data, column)
    repeated = 0
    if test is None:
        train, testing = split_items(items, share, seed)
    else:
        testing, _ = read_items(test, column)
        refuse(
            testing[0].unit != items[0].unit,
            f"the data has labels for {items[0].unit} and the test data for {testing[0].unit}: "
            "both must be of one kind",
        )
        train, repeated = apart(items, testing)
    again = f"to train on: {repeated:,} that are among those to test on left out" if repeated else None
    train, left_out = choose_items(train, words, seed, "train")
    testing, left_out_too = choose_items(testing, words, seed, "test")
    return train, testing, name, [note for note in (again, left_out, left_out_too) if note]


def _own_pooling(m: Model) -> str:
    """Return how the model makes one vector of a text, in the words of `pool`."""
    pooled = m.config.head in ("classifier", "embedding")
    own = m.sentences.pooling if m.sentences is not None else (m.config.pooling if pooled else None)
    return {"cls": "first", "last": "last"}.get(own or "mean", "mean")


def _types(m: Model, forms: Sequence[str], unit: str) -> Sequence[str]:
    """Return words as the tokenizer normalises them: words that a model reads alike are one type."""
    normalizer = m.text_tokenizer.normalizer if unit == "words" else None
    return forms if normalizer is None else [str(normalizer.normalize_str(form)) for form in forms]


# What knows no model: the classifier, the control task, the baselines and the interval ----------------------


def predict(x: Floats, y: Numbers, x_test: Floats, penalty: float, iterations: int) -> Numbers:
    """Fit softmax regression to [N, D] with classes [N], and return the classes it gives to [M, D].

    The loss is the mean cross-entropy plus half `penalty` times the square of the weights, without the
    intercepts; of two classes there is one row of weights, so that the penalty counts once.
    """
    classes = np.unique(y)
    if len(classes) == 1:
        return np.full(len(x_test), classes[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few steps: a probe may stop early, as `iterations` says
        fitted = _regression()(C=1 / (penalty * len(x)), max_iter=iterations).fit(x, y)
        predicted: Numbers = fitted.predict(x_test)
        return predicted


def standardised(x: Floats, x_test: Floats) -> tuple[Floats, Floats]:
    """Return both sides with each dimension of the first at mean 0 and standard deviation 1."""
    spread = x.std(0, dtype=np.float64)
    scale = np.where(spread > SMALLEST, spread, 1.0).astype(np.float32)
    mean = x.mean(0, dtype=np.float64).astype(np.float32)
    return (x - mean) / scale, (x_test - mean) / scale


def numbered(labels: Sequence[str], names: Sequence[str]) -> Numbers:
    """Return the number of each label among the names; -1 for one that is not there."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers.get(label, -1) for label in labels], dtype=np.int64)


def control_labels(
    types: Sequence[str], test_types: Sequence[str], y: Numbers, seed: int
) -> tuple[Numbers, Numbers]:
    """Return labels of the control task: one for every type, drawn as often as the labels `y` occur."""
    known = sorted({*types, *test_types})
    counts = np.bincount(y)
    drawn = np.random.default_rng(seed).choice(len(counts), size=len(known), p=counts / counts.sum())
    label = dict(zip(known, drawn.tolist()))
    return np.array([label[kind] for kind in types]), np.array([label[kind] for kind in test_types])


def baselines(
    types: Sequence[str], test_types: Sequence[str], y: Numbers, y_test: Numbers
) -> tuple[float, float, float]:
    """Return accuracies of the most frequent label and of each type's, and the share of test types seen."""
    majority = int(np.bincount(y).argmax())
    rising = sorted(Counter(zip(types, y.tolist())).items(), key=lambda counted: (counted[1], -counted[0][1]))
    usual = {kind: label for (kind, label), _ in rising}  # the last of a type stays: its most frequent label
    predicted = np.array([usual.get(kind, majority) for kind in test_types])
    seen = sum(kind in usual for kind in test_types) / len(test_types)
    return float((y_test == majority).mean()), float((predicted == y_test).mean()), seen


def interval(hits: NDArray[np.bool_], items: Numbers, seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the share of hits, over items; where there is one item, over words."""
    groups = items if len(np.unique(items)) > 1 else np.arange(len(hits))
    _, place = np.unique(groups, return_inverse=True)
    counts = np.stack([np.bincount(place, weights=hits), np.bincount(place)], 1).astype(np.float64)
    return interval_of(counts, ratio_of, seed)
