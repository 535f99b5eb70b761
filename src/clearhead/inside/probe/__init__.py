"""Probes: how well a linear classifier reads a property off the states of each layer, and what that is worth.

    found = probe(m, "en_ewt-ud-train.conllu.gz", "upos", test="en_ewt-ud-dev.conllu.gz")
    found.layers[3].accuracy, found.layers[3].selectivity

A probe that is accurate may have learned the words by heart. So beside each stands a probe of a control task
(Hewitt & Liang 2019): every type of word has one label, drawn at random from the labels of the training
words. That can only be learned by heart; `selectivity` is the accuracy less the control's. Two baselines need
no model: the label that is most frequent of all, and the one that is most frequent for the type of word.

A probe is scikit-learn's LogisticRegression on standardised vectors: L-BFGS, an L2 penalty on the weights, at
most `iterations` steps. One written in torch with its own L-BFGS was tried: it took half as long again for
the same steps, 20,000 words and 17 classes, and gave the same loss.

Shapes: L depths (the embedding and every block), N words, D model, C classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.api import Model
from clearhead.data.corpus import sort_names
from clearhead.data.tables import listed
from clearhead.errors import InputError, refuse
from clearhead.inside.inputs import AnyModel, as_model
from clearhead.inside.probe.data import Data, ProbeItem, apart, choose_items, read_items, split_items
from clearhead.inside.probe.fit import (
    baselines,
    check_library,
    control_labels,
    interval,
    numbered,
    predict,
    standardised,
)
from clearhead.inside.probe.states import POOLS, OnProgress, stack_of, vectors_of
from clearhead.inside.results import Result

WORDS = 20_000  # that a probe is trained on, and as many to test it, at most
TEST_SHARE = 0.2
MOST_CLASSES = 200
PENALTY = 0.005  # on half the square of the weights, beside the mean loss of a word
ITERATIONS = 100


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
    check_library()
    stack, prefix = stack_of(m, stack)
    _check(pool, penalty, iterations)
    train_items, test_items, column, said = _sides(data, test, column, words, test_share, seed)
    _check_labels(
        {label for item in train_items for label in item.labels if label is not None}, column, classes
    )
    unit = train_items[0].unit
    pool = pool or ("mean" if unit == "words" else _own_pooling(m))
    first, both = len(train_items), len(train_items) + len(test_items)
    where = (stack, prefix, pool)
    left = vectors_of(m, train_items, *where, lambda done: on_progress("reading", done, both))
    right = vectors_of(m, test_items, *where, lambda done: on_progress("reading", first + done, both))
    for side, vectors in (("train", left), ("test", right)):
        refuse(
            not vectors.labels,
            f"none of the {unit} to {side} on has a token: is this the right tokenizer for the data?",
        )
        if vectors.lost:
            said.append(f"to {side} on: {vectors.lost:,} {unit} without a token left out")
    _check_labels(set(left.labels), column, classes)
    names = sort_names(left.labels)
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
    counts = (*baselines(types, test_types, y, y_test), len(left.labels), len(right.labels))
    return Probes(tuple(layers), column, unit, stack, pool, names, *counts, seed, tuple(said))


def _check(pool: str | None, penalty: float, iterations: int) -> None:
    refuse(
        pool is not None and pool not in POOLS, f'pool "{pool}" is not known: choose from {", ".join(POOLS)}'
    )
    refuse(not penalty > 0, f"penalty {penalty} must be above 0")
    refuse(iterations < 1, f"iterations {iterations} must be 1 or more")


def _check_labels(labels: set[str], column: str, most: int) -> None:
    """Refuse what cannot be told apart, or is too much to tell apart."""
    if len(labels) < 2:
        raise InputError(
            f'every label of "{column}" to train on is {listed(labels)}: '
            "there is nothing to tell apart; choose another column"
        )
    if len(labels) > most:
        raise InputError(
            f'"{column}" has {len(labels):,} labels, and a probe takes {most:,}: '
            "choose another column, or allow more (classes)"
        )


def _sides(
    data: Data, test: Data | None, column: str | None, words: int, share: float, seed: int
) -> tuple[list[ProbeItem], list[ProbeItem], str, list[str]]:
    """Return items to train on and to test on, the column they are labelled by, and what was left out."""
    notes: list[str | None] = []
    items, name = read_items(data, column)
    if test is None:
        train, testing = split_items(items, share, seed)
    else:
        testing, _ = read_items(test, column)
        if testing[0].unit != items[0].unit:
            raise InputError(
                f"the data has labels for {items[0].unit} and the test data for {testing[0].unit}: "
                "both must be of one kind"
            )
        train, repeated = apart(items, testing)
        if repeated:
            notes.append(f"to train on: {repeated:,} that are among those to test on left out")
    train, left_out = choose_items(train, words, seed, "train")
    testing, left_out_too = choose_items(testing, words, seed, "test")
    return train, testing, name, [note for note in (*notes, left_out, left_out_too) if note]


def _own_pooling(m: Model) -> str:
    """Return how the model makes one vector of a text, in the words of `pool`."""
    pooled = m.config.head in ("classifier", "embedding")
    own = m.sentences.pooling if m.sentences is not None else (m.config.pooling if pooled else None)
    return {"cls": "first", "last": "last"}.get(own or "mean", "mean")


def _types(m: Model, forms: Sequence[str], unit: str) -> Sequence[str]:
    """Return words as the tokenizer normalises them: words that a model reads alike are one type."""
    normalizer = m.text_tokenizer.normalizer if unit == "words" else None
    if normalizer is None:
        return forms
    normal = {form: str(normalizer.normalize_str(form)) for form in set(forms)}
    return [normal[form] for form in forms]
