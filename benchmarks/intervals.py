"""How often a 95 % interval of `evaluate` holds the true value: simulated, for every kind of metric.

Examples are drawn from a known distribution, the interval is computed as `evaluate` does, and the share of
intervals that hold the value of the distribution is counted.

    python benchmarks/run.py intervals            # 2,000 sets each
    python benchmarks/run.py intervals --sets 200
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from clearhead.learn.evaluation.metrics import METRICS, Metric, interval_of

SIZES, RATES = (10, 30, 100, 1000), (0.5, 0.9, 0.99)
Draw = Callable[[np.random.Generator, int, float], Any]  # generator, examples, rate -> counts


def shares(random: np.random.Generator, n: int, rate: float) -> Any:
    """Right with this probability, or wrong."""
    return np.stack([random.random(n) < rate, np.ones(n)], 1)


def words(random: np.random.Generator, n: int, rate: float) -> Any:
    """Right words of sentences, some of which are harder than others."""
    lengths = random.integers(5, 30, n)
    return np.stack([random.binomial(lengths, random.beta(8 * rate, 8 * (1 - rate), n)), lengths], 1)


def spans(random: np.random.Generator, n: int, rate: float) -> Any:
    """Hits, predicted and wanted spans of sentences."""
    wanted = random.poisson(1.5, n)
    hits = random.binomial(wanted, rate)
    return np.stack([hits, hits + random.poisson(1.5 * (1 - rate), n), wanted], 1)


def edits(random: np.random.Generator, n: int, rate: float) -> Any:
    """Edits and words of texts."""
    lengths = random.integers(5, 30, n)
    return np.stack([random.binomial(lengths, 1 - rate), lengths], 1)


def ranks(random: np.random.Generator, n: int, rate: float) -> Any:
    """1 / the rank of the right text, which is the first with this probability."""
    return np.stack([np.where(random.random(n) < rate, 1, 1 / random.integers(2, 11, n)), np.ones(n)], 1)


def classes(random: np.random.Generator, n: int, rate: float) -> Any:
    """Predicted and wanted classes, of which there are three."""
    wanted = random.integers(3, size=n)
    return np.stack([np.where(random.random(n) < rate, wanted, (wanted + 1) % 3), wanted], 1)


def texts(random: np.random.Generator, n: int, rate: float) -> Any:
    """sacreBLEU's counts of texts of which each word is right with this probability."""
    length = random.integers(6, 20, n)
    right = [random.random(one) < rate for one in length]
    found = [
        [sum(row[at : at + size].all() for at in range(len(row) - size + 1)) for size in (1, 2, 3, 4)]
        for row in right
    ]
    totals = [[len(row) - size + 1 for size in (1, 2, 3, 4)] for row in right]
    return np.concatenate([np.stack([length, length], 1), found, totals], 1).astype(float)


def pairs(random: np.random.Generator, n: int, rate: float) -> Any:
    """The moments of two numbers with this correlation."""
    x = random.normal(size=n)
    y = rate * x + math.sqrt(1 - rate**2) * random.normal(size=n)
    return METRICS["pearson"].counts(x[:, None].tolist(), y[:, None].tolist())


def losses(random: np.random.Generator, n: int, rate: float) -> Any:
    """Losses of texts, whose spread grows with the rate."""
    lengths = random.integers(20, 60, n)
    return np.stack([lengths * random.gamma(1 / (1 - rate) ** 0.5, 1.0, n), lengths], 1)


KINDS: dict[str, tuple[Metric, Draw]] = {
    "accuracy": (METRICS["accuracy"], shares),
    "word_accuracy": (METRICS["word_accuracy"], words),
    "span_f1": (METRICS["span_f1"], spans),
    "word_error": (METRICS["word_error"], edits),
    "mrr": (METRICS["mrr"], ranks),
    "macro_f1": (METRICS["macro_f1"], classes),
    "bleu": (METRICS["bleu"], texts),
    "pearson": (METRICS["pearson"], pairs),
    "loss": (METRICS["loss"], losses),
}


def coverage(kind: str, n: int, rate: float, sets: int, seed: int = 0) -> tuple[float, float]:
    """Return the share of intervals that hold the true value, and their mean width."""
    metric, draw = KINDS[kind]
    random = np.random.default_rng(seed)
    many = np.asarray(draw(random, 20_000 if kind == "bleu" else 300_000, rate), dtype=np.float64)
    true = rate if kind == "accuracy" else metric.of(metric.total(many, np.ones(len(many))))
    rows = (np.asarray(draw(random, n, rate), dtype=np.float64) for _ in range(sets))
    found = [interval_of(row, metric.of, total=metric.total, bounds=metric.bounds) for row in rows]
    held = [low <= true <= high for low, high in found]
    return float(np.mean(held)), float(np.mean([high - low for low, high in found]))


def main() -> None:
    """Print the share of intervals that hold the true value, by metric, rate and number of examples."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--sets", type=int, default=2000, help="drawn for each cell")
    options.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    options.add_argument("--sizes", nargs="*", type=int, default=list(SIZES), help="examples of a set")
    given = options.parse_args()
    print(f"{'metric':14}{'rate':>6}" + "".join(f"{f'n = {n:,}':>16}" for n in given.sizes))
    for kind in given.kinds:
        for rate in RATES:
            cells = [
                coverage(kind, n, rate, given.sets if n < 1000 else given.sets // 4) for n in given.sizes
            ]
            shown = "".join(f"{share:9.1%} ±{width / 2:6.3f}" for share, width in cells)
            print(f"{kind:14}{rate:6}{shown}", flush=True)
