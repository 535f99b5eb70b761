"""Defaults by the data: what a run without a recipe chooses by the amount of what there is to learn from.

Each point of `POINTS` was measured on a file of its size, against what was chosen before and a simple
model, on rows held out (`benchmarks/results/defaults_cpu.json`, by `python benchmarks/run.py defaults`).
Amounts near a point take its settings, with steps in between two. What the user sets stays; with any key of
`[model]`, or far from every point, nothing is chosen here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from clearhead.learn.data.examples import Corpus
from clearhead.learn.recipe import Recipe, Settings

CHECKS, PATIENCE = 20, 10  # validations in a run; without progress, the last
FAR = 8.0  # times the amount of a point, or a share of it, up to which the point says something
LENGTH = ("train.steps", "train.validate_every", "train.patience")


@dataclass(frozen=True)
class Point:
    """What was best for an amount of data."""

    amount: int  # bytes of text, or rows
    width: int
    layers: int
    dropout: float
    steps: int
    rate: float
    batch: int
    bits: float | None = None  # lm: a byte of unseen text
    more: Mapping[str, Any] = field(default_factory=dict)  # further keys

    def settings(self) -> dict[str, Any]:
        """Return the keys of a recipe, but for the length of the run."""
        size = {"model.d_model": self.width, "model.n_layers": self.layers, "model.n_heads": 4}
        kind = {"model.dropout": self.dropout, "model.init": "xavier"}
        return {**size, **kind, "train.lr": self.rate, "data.batch_size": self.batch, **self.more}


def decoder(width: int, length: int) -> dict[str, Any]:
    """Return the keys of Llama's architecture: rotary positions need fewer tokens than learned ones."""
    shape = {"model.base": "llama-1b-like", "model.n_kv_heads": 4, "model.max_positions": length}
    return {**shape, "model.d_ff": width * 8 // 3 // 16 * 16, "model.tie_embeddings": True}


def encoder(**more: Any) -> dict[str, Any]:
    """Return the keys of an encoder that takes the mean of a text's vectors."""
    return {"model.pooling": "mean", **more}


AVERAGED = {"train.ema": 0.98, "train.label_smoothing": 0.1}
WORDS = {"tokens.vocab_size": 8192}  # most words are one token
POINTS: Mapping[str, Sequence[Point]] = {
    "lm": (
        Point(900, 64, 1, 0.2, 200, 3e-3, 8, 4.0, {"model.max_positions": 32, "model.init": "gpt2"}),
        Point(18_000, 64, 2, 0.1, 600, 4e-3, 16, 2.4, decoder(64, 64)),
        Point(180_000, 96, 3, 0.0, 800, 3e-3, 16, 2.3, decoder(96, 128)),
    ),
    "classify": (
        Point(90, 64, 1, 0.3, 100, 2e-3, 16, more={**encoder(), **WORDS, **AVERAGED}),
        Point(1_800, 128, 1, 0.5, 600, 1e-3, 32, more={**encoder(), **WORDS}),
        Point(18_000, 64, 1, 0.3, 2000, 2e-3, 64, more={**encoder(), **WORDS}),
    ),
    "regress": (Point(1_350, 64, 2, 0.0, 400, 2e-3, 32, more=encoder(**{"train.standardise": True})),),
    "tag": (Point(720, 128, 1, 0.3, 600, 2e-3, 32, more=WORDS),),
}


def names_of(settings: Settings) -> frozenset[str]:
    """Return the keys that settings name, such as train.steps."""
    names: Iterable[str] = settings if isinstance(settings, Mapping) else map(str, settings)
    return frozenset(name.partition("=")[0].strip() for name in names)


def fitted(
    recipe: Recipe, given: Set[str] | None, task: str, corpus: Corpus, on_gpu: bool = False
) -> tuple[Recipe, str]:
    """Fill in what the amount of data decides -> the recipe, and a sentence on it ("": nothing was decided).

    `given`: the keys that the user has set; None: a recipe was named, which decides all. Language models were
    measured in a CPU's minutes, in which a GPU does more. Pairs of texts were not measured.
    """
    points, rows = POINTS.get(task), cast(Any, corpus.train)
    if given is None or points is None or recipe.model or (task == "lm" and on_gpu):
        return recipe, ""
    if task in ("classify", "regress") and any(row.pair is not None for row in rows):
        return recipe, ""
    amount, unit = (corpus.size, "bytes of text") if task == "lm" else (len(rows), "rows")
    apart = [abs(math.log(max(amount, 1) / point.amount)) for point in points]
    if min(apart) > math.log(FAR):
        return recipe, ""
    point, steps = points[apart.index(min(apart))], round(between(amount, points, [p.steps for p in points]))
    settings = point.settings()
    if not given & {"train.steps", "train.epochs"}:
        every = max(1, steps // CHECKS)
        settings |= {"train.steps": steps, "train.validate_every": every, "train.patience": PATIENCE}
    tokens = any(name.startswith("tokens.") for name in given)  # its kind and size belong together
    for name, value in settings.items():
        section, key = name.split(".")
        if name not in given and not (tokens and section == "tokens"):
            recipe = recipe.replace(section, **{key: value})
    many = f"{point.layers} layer{'s' * (point.layers > 1)} of width {point.width}, dropout {point.dropout}"
    line = f"by the data, {amount:,} {unit}: {many}, rate {recipe.train.lr:g}"
    line += f", {steps:,} steps at most" if "train.steps" in settings else ""
    known = [point.bits for point in points if point.bits is not None]
    if len(known) == len(points):
        line += f"; expect about {between(amount, points, known):.1f} bits a byte"
    return recipe, line


def between(amount: int, points: Sequence[Point], values: Sequence[float]) -> float:
    """Return a value for an amount by those of the points: on straight lines, over the log of the amount."""
    return float(np.interp(math.log(max(amount, 1)), [math.log(point.amount) for point in points], values))
