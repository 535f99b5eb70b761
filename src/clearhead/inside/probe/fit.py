"""The parts of a probe that know no model: the classifier, the control task, the baselines and the interval.

Shapes: N things to train on, M to test on, D model, C classes.
"""

import importlib
import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from clearhead.errors import MissingExtraError
from clearhead.evaluation.metrics import bootstrap, ratio_of
from clearhead.inside.results import Floats

Numbers = NDArray[np.int64]
UNKNOWN = -1  # the number of a label that training does not have
SMALLEST = 1e-6  # spread of a dimension, below which it is left as it is


def check_library() -> None:
    """Refuse to go on without scikit-learn, before the model is run."""
    try:
        importlib.import_module("sklearn.linear_model")
    except ImportError:
        raise MissingExtraError("probes need scikit-learn: pip install 'clearhead[train]'") from None


def predict(x: Floats, y: Numbers, x_test: Floats, penalty: float, iterations: int) -> Numbers:
    """Fit softmax regression to [N, D] with classes [N], and return the classes it gives to [M, D].

    The loss is the mean cross-entropy plus half `penalty` times the square of the weights, without the
    intercepts; of two classes there is one row of weights, so that the penalty counts once.
    """
    classes = np.unique(y)
    if len(classes) == 1:
        return np.full(len(x_test), classes[0])
    regression = importlib.import_module("sklearn.linear_model").LogisticRegression
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few steps: a probe may stop early, as `iterations` says
        fitted = regression(C=1 / (penalty * len(x)), max_iter=iterations).fit(x, y)
    found: Numbers = fitted.predict(x_test)
    return found


def standardised(x: Floats, x_test: Floats) -> tuple[Floats, Floats]:
    """Return both sides with each dimension of the first at mean 0 and standard deviation 1."""
    mean, spread = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
    scale = np.where(spread > SMALLEST, spread, 1.0)
    left, right = ((side - mean.astype(np.float32)) / scale.astype(np.float32) for side in (x, x_test))
    return left, right


def numbered(labels: Sequence[str], names: Sequence[str]) -> Numbers:
    """Return the number of each label among the names; -1 for one that is not there."""
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers.get(label, UNKNOWN) for label in labels], dtype=np.int64)


def control_labels(
    types: Sequence[str], test_types: Sequence[str], y: Numbers, seed: int
) -> tuple[Numbers, Numbers]:
    """Return labels of the control task: one for every type, drawn as often as the labels `y` occur."""
    known = sorted({*types, *test_types})
    counts = np.bincount(y)
    drawn = np.random.default_rng(seed).choice(len(counts), size=len(known), p=counts / counts.sum())
    label = dict(zip(known, drawn.tolist()))
    left, right = (np.array([label[one] for one in side], dtype=np.int64) for side in (types, test_types))
    return left, right


def baselines(
    types: Sequence[str], test_types: Sequence[str], y: Numbers, y_test: Numbers
) -> tuple[float, float, float]:
    """Return accuracies of the most frequent label and of each type's, and the share of test types seen."""
    majority = int(np.bincount(y).argmax())
    counts: dict[str, Counter[int]] = {}
    for one, label in zip(types, y.tolist()):
        counts.setdefault(one, Counter())[label] += 1
    usual = {one: min(labels, key=lambda label: (-labels[label], label)) for one, labels in counts.items()}
    said = np.array([usual.get(one, majority) for one in test_types])
    seen = np.array([one in usual for one in test_types])
    return float((y_test == majority).mean()), float((said == y_test).mean()), float(seen.mean())


def interval(hits: NDArray[np.bool_], items: Numbers, seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the share of hits, by drawing items; where there is one item, words."""
    groups = items if len(np.unique(items)) > 1 else np.arange(len(hits))
    _, place = np.unique(groups, return_inverse=True)
    counts = np.stack([np.bincount(place, weights=hits), np.bincount(place)], 1).astype(np.float64)
    return bootstrap(counts, ratio_of, seed)
