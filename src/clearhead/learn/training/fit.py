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
from clearhead.learn.tasks.task import DECODER

CHECKS, PATIENCE = 20, 10  # validations in a run; without progress, the last
FAR = 8.0  # times the amount of a point, or a share of it, up to which the point says something
HIDDEN = "data.token_dropout"


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
    behind: bool = False  # whether a linear or n-gram model of the same rows was better
    checks: int = CHECKS  # validations; 1: rows to validate on are too few to choose weights by

    def settings(self) -> dict[str, Any]:
        """Return the keys of a recipe, but for the length of the run."""
        size = {"model.d_model": self.width, "model.n_layers": self.layers, "model.n_heads": 4}
        kind = {"model.dropout": self.dropout, "model.init": "xavier"}
        return {**size, **kind, "train.lr": self.rate, "data.batch_size": self.batch, **self.more}


# With NorMuon they reach GPT-2's loss with a third of its tokens (`benchmarks/results/ladder_h200.json`).
QWEN3 = {
    **{"model.positions": "rope", "model.norm": "rmsnorm", "model.bias": False, "model.qk_norm": "head"},
    **{"model.activation": "silu", "model.gated": True},
}
NORMUON = {"train.optimizer": "normuon", "train.muon_coefficients": "polar-express"}


def gated_width(width: int) -> int:
    """Return the width of a gated feed-forward, of three matrices, as large as a plain one of two."""
    return width * 8 // 3 // 16 * 16


def modern(large: bool, given: Set[str]) -> dict[str, Any]:
    """Return the keys of a decoder for much text, at the task's usual size; `given`: see `fitted`."""
    size = DECODER.middle if large else DECODER.small
    shape = {f"model.{name}": value for name, value in size.items()}
    own = {"model.base": "gpt2", "model.d_ff": gated_width(size["d_model"]), "train.floor": 0.02}
    muon = {} if "train.optimizer" in given else {**NORMUON, "train.cautious_decay": True}
    return {**own, **shape, **QWEN3, **muon}


def decoder(width: int, length: int) -> dict[str, Any]:
    """Return the keys of Llama's architecture: rotary positions need fewer tokens than learned ones."""
    shape = {"model.base": "llama-1b-like", "model.n_kv_heads": 4, "model.max_positions": length}
    return {**shape, "model.d_ff": gated_width(width), "model.tie_embeddings": True}


def encoder(**more: Any) -> dict[str, Any]:
    """Return the keys of an encoder that takes the mean of a text's vectors."""
    return {"model.pooling": "mean", **more}


AVERAGED = {"train.ema": 0.98}
# Rotary positions, and layers that add nothing at first: training begins at a sum over tokens.
FLAT = {"model.positions": "rope", "model.zero_init": True, "model.init": "bert", **AVERAGED}
# Frequent words are tokens, the others are unknown; of scripts without spaces each letter is a token.
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
PATTERN = rf"[{UNSPACED}]|[\w&&[^{UNSPACED}]]+|[^\w\s]"
WORDS = {"tokens.kind": "word", "tokens.pattern": PATTERN, "tokens.lowercase": True}
SUBWORDS = {"tokens.vocab_size": 16_384, "tokens.lowercase": True}  # most words are one token
PAIRS = {"model.bigrams": 65_536}  # vectors of pairs of tokens: "not good" is no sum of its words
DIVIDING = ("shard", "tensor", "pipeline", "context", "expert")  # sizes of a mesh that divide a model
BAG = {**encoder(**FLAT), **WORDS}
SMOOTH = {"train.label_smoothing": 0.1}  # without it, few rows make a model that is too sure
# So little text shows what follows four characters; longer runs of them are nearly all new.
TINY = {
    **{"model.max_positions": 32, "model.init": "gpt2", "model.positions": "rope", "model.window": 4},
    **{"train.ema": 0.95, HIDDEN: 0.2, **SMOOTH},
}
TAGS = {**FLAT, HIDDEN: 0.2, "tokens.vocab_size": 4096}
POINTS: Mapping[str, Sequence[Point]] = {
    "lm": (
        Point(900, 64, 1, 0.2, 200, 3e-3, 8, 3.8, TINY, behind=True),
        Point(
            18_000,
            96,
            2,
            0.1,
            1000,
            4e-3,
            12,
            2.4,
            {**decoder(96, 64), **AVERAGED, HIDDEN: 0.05},
            behind=True,
        ),
        Point(180_000, 96, 3, 0.0, 800, 3e-3, 16, 2.3, decoder(96, 128), behind=True),
    ),
    "classify": (
        Point(90, 64, 1, 0.3, 100, 2e-3, 32, more={**BAG, HIDDEN: 0.3, **SMOOTH}, checks=1),
        Point(1_800, 64, 1, 0.3, 500, 5e-4, 64, more={**BAG, HIDDEN: 0.5}),
        Point(18_000, 64, 1, 0.3, 2000, 2e-3, 64, more={**encoder(**FLAT), **SUBWORDS, **PAIRS}),
    ),
    "regress": (Point(1_350, 64, 2, 0.0, 400, 2e-3, 32, more=encoder(**{"train.standardise": True})),),
    "tag": (Point(720, 128, 2, 0.3, 500, 2e-3, 32, more=TAGS, behind=True),),
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
    measured in a CPU's minutes, in which a GPU does more: there, and for much text, the architecture alone is
    chosen. Pairs of texts were not measured.
    """
    points, rows = POINTS.get(task), cast(Any, corpus.train)
    if given is None or points is None or recipe.model:
        return recipe, ""
    if task in ("classify", "regress") and any(row.pair is not None for row in rows):
        return recipe, ""
    if recipe.data.packing != "stream":
        return recipe, ""
    amount, unit = (corpus.size, "bytes of text") if task == "lm" else (len(rows), "rows")
    apart = [abs(math.log(max(amount, 1) / point.amount)) for point in points]
    if task == "lm" and (on_gpu or amount > FAR * points[-1].amount):
        muon = "" if "train.optimizer" in given else ", trained by NorMuon"
        line = f"by the data, {amount:,} {unit}: a decoder with Qwen3's parts{muon}"
        return chosen(recipe, modern(on_gpu, given), given), line
    if min(apart) > math.log(FAR):
        return recipe, ""
    point, steps = points[apart.index(min(apart))], round(between(amount, points, [p.steps for p in points]))
    settings = point.settings()
    if not given & {"train.steps", "train.epochs"}:
        every = max(1, steps // point.checks)
        settings |= {"train.steps": steps, "train.validate_every": every, "train.patience": PATIENCE}
    if any(name.startswith("tokens.") for name in given):  # tokens, and which are hidden, go together
        settings = {name: settings[name] for name in settings if not name.startswith(("tokens.", HIDDEN))}
    if any((getattr(recipe.parallel, size) or 1) > 1 for size in DIVIDING):  # none divides vectors of pairs
        settings = {name: settings[name] for name in settings if name not in PAIRS}
    recipe = chosen(recipe, settings, given)
    many = f"{point.layers} layer{'s' * (point.layers > 1)} of width {point.width}, dropout {point.dropout}"
    line = f"by the data, {amount:,} {unit}: {many}, rate {recipe.train.lr:g}"
    line += f", {steps:,} steps at most" if "train.steps" in settings else ""
    known = [point.bits for point in points if point.bits is not None]
    if len(known) == len(points):
        line += f"; expect about {between(amount, points, known):.1f} bits a byte"
    if point.behind:
        simple = "an n-gram model" if task == "lm" else "a linear model"
        line += f"; {simple} was better on our file of this size: compare by clearhead eval"
    return recipe, line


def chosen(recipe: Recipe, settings: Mapping[str, Any], given: Set[str]) -> Recipe:
    """Return the recipe with settings by their names, but for those that the user has set."""
    for name, value in settings.items():
        section, key = name.split(".")
        if name not in given:
            recipe = recipe.replace(section, **{key: value})
    return recipe


def between(amount: int, points: Sequence[Point], values: Sequence[float]) -> float:
    """Return a value for an amount by those of the points: on straight lines, over the log of the amount."""
    return float(np.interp(math.log(max(amount, 1)), [math.log(point.amount) for point in points], values))
