"""Scaling laws: train a ladder of sizes and amounts of text, fit L(N, D), and predict beyond the ladder.

L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022), with N weights outside the token table and D
tokens, each read once. Training takes about 6 N D FLOPs. As an experiment, a ladder must predict a model four
times as large.

Shapes: B batch, T length, P points of the ladder, G pairs of exponents tried together.
"""

import functools
import itertools
import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.app.plot import Figure, legend, single
from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, refuse
from clearhead.hub.files import read_json
from clearhead.labs.lab.experiment import (
    Claim,
    Conditions,
    Experiment,
    Findings,
    Judged,
    Numbers,
    Picture,
    Verdict,
)
from clearhead.labs.lab.learning import descend, prose

FLOPS = 6  # of training, for each weight and token
DELTA = 1e-3  # relative errors above this count by their size, not its square
REWEIGHTINGS, REFINEMENTS, ACROSS = 30, 6, 13  # of a fit
LEAST, MOST = 0.02, 1.5  # exponents
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """What a model of some size, trained on some text, came to."""

    weights: float  # outside the token table
    tokens: float
    loss: float  # nats a token, on text that it has not seen


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta."""

    floor: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, weights: float, tokens: float) -> float:
        """Return the loss of a model with so many weights after so many tokens."""
        return float(self.floor + self.a / weights**self.alpha + self.b / tokens**self.beta)

    def best(self, flops: float) -> Point:
        """Return the size and the amount of text that give the lowest loss for so many FLOPs of training."""
        refuse(not 0 < flops < math.inf, f"a budget of {flops} FLOPs must be a number above 0")
        both = self.alpha + self.beta
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        weights = ratio * (flops / FLOPS) ** (self.beta / both)
        tokens = flops / FLOPS / weights
        return Point(weights, tokens, self.loss(weights, tokens))


# The data of Hoffmann et al. fitted again by Besiroglu et al. (2024), who found the first fit wanting.
CHINCHILLA = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)


def read_law(path: Path) -> Law:
    """Read the law of a JSON file that has one under "law", as a trained ladder leaves it."""
    results = read_json(path)
    entry = results.get("law", next(iter(results.get("results", ({},)))).get("law"))
    try:
        return Law(**{name: float(entry[name]) for name in ("floor", "a", "b", "alpha", "beta")})
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f'{path} has no "law" of floor, a, b, alpha and beta: train a ladder first'
        ) from None


def fit(points: Sequence[Point], refinements: int = REFINEMENTS) -> Law:
    """Fit a law to points: the least sum of Huber's function of relative errors.

    For given exponents the other three numbers are a weighted least-squares problem, solved for a grid of
    exponents at once and weighted again until errors count as Huber's function says. The grid narrows around
    the best. So there is no start to choose, and the same points give the same law.
    """
    sizes = {(point.weights, point.tokens) for point in points}
    refuse(
        len({size for size, _ in sizes}) < 2 or len({tokens for _, tokens in sizes}) < 2 or len(sizes) < 5,
        f"a law has five numbers: give five points or more, of two sizes and two amounts of text; "
        f"these are {len(sizes)}",
    )
    wrong = next((point for point in points if not min(point.weights, point.tokens, point.loss) > 0), None)
    refuse(wrong is not None, f"{wrong} is not of numbers above 0")
    columns = np.array([[point.weights, point.tokens, point.loss] for point in points])
    numbers, exponents = _least(columns, refinements)
    return Law(*map(float, numbers), *map(float, exponents))


def fit_sizes(points: Sequence[Point]) -> Law:
    """Fit a law of size alone to points of one amount of text, whose part is then in the floor."""
    refuse(
        len({point.tokens for point in points}) != 1 or len({point.weights for point in points}) < 3,
        "a law of size has three numbers: give three sizes or more, trained on one amount of text",
    )
    (floor, a), (alpha,) = _least(np.array([[point.weights, point.loss] for point in points]), REFINEMENTS)
    return Law(float(floor), float(a), 0.0, float(alpha), 1.0)


def _least(columns: Floats, refinements: int) -> tuple[Floats, Floats]:
    """Return the floor and the factors [1 + I], and the exponents [I], of the least cost.

    `columns` [P, I + 1] are what the loss falls with, and the loss.
    """
    inputs = columns.shape[1] - 1
    low, high = np.full(inputs, math.log(LEAST)), np.full(inputs, math.log(MOST))
    best: tuple[float, Floats, Floats] = (math.inf, np.zeros(inputs + 1), np.zeros(inputs))
    for _ in range(refinements):
        sides = [np.linspace(low[axis], high[axis], ACROSS) for axis in range(inputs)]
        grid = np.exp(np.stack(np.meshgrid(*sides, indexing="ij"), -1).reshape(-1, inputs))  # G I
        costs, numbers = _solved(columns, grid)
        at = int(costs.argmin())
        if costs[at] < best[0]:
            best = float(costs[at]), numbers[at], grid[at]
        if not math.isfinite(best[0]):
            raise InputError("the losses do not fall with size and text, so no law fits them: train longer")
        step = (high - low) / (ACROSS - 1)
        low, high = np.log(best[2]) - 2 * step, np.log(best[2]) + 2 * step
    return best[1], best[2]


def _solved(columns: Floats, grid: Floats) -> tuple[Floats, Floats]:
    """Return the cost of each set of exponents [G], infinite with a negative term, and their numbers."""
    inputs, losses = columns[:, :-1], columns[:, -1]  # P I, P
    middle = np.exp(np.log(inputs).mean(0))  # I, so that all terms are of one size
    terms = (inputs / middle)[None] ** -grid[:, None]  # G P I
    design = np.concatenate([np.ones_like(terms[..., :1]), terms], -1) / losses[None, :, None]  # relative
    trust = np.ones(design.shape[:2])  # G P
    for _ in range(REWEIGHTINGS):
        trusted = (design * trust[..., None]).swapaxes(1, 2)  # G 1+I P
        left = trusted @ design + 1e-12 * np.eye(design.shape[-1])
        numbers = np.linalg.solve(left, trusted.sum(-1, keepdims=True))[..., 0]
        errors = np.abs((design @ numbers[..., None])[..., 0] - 1)
        trust = np.minimum(1, DELTA / np.maximum(errors, 1e-15))
    costs = np.where(errors < DELTA, errors**2 / 2, DELTA * (errors - DELTA / 2)).sum(1)
    costs = np.where((numbers < 0).any(1), np.inf, costs)
    return costs, numbers * np.concatenate([np.ones((len(grid), 1)), middle**grid], -1)


def bootstrap(points: Sequence[Point], times: int = 100, seed: int = 0) -> list[Law]:
    """Return the laws of points drawn again, with replacement; draws that no law fits are left out."""
    random, laws = np.random.default_rng(seed), list[Law]()
    for _ in range(times):
        drawn = [points[number] for number in random.integers(len(points), size=len(points))]
        try:
            laws.append(fit(drawn, refinements=3))
        except InputError:
            continue
    return laws


# The ladder -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rung:
    """A size of model and an amount of text."""

    n_layers: int
    d_model: int
    tokens: int
    d_head: int = 16
    rows: int = 16  # of a batch
    length: int = 256
    rate: float = 0.02  # times 1 / sqrt(d_model)

    def config(self, vocab_size: int) -> ModelConfig:
        """Return the config: Llama's parts, 12 L D^2 weights outside the token table."""
        return ModelConfig(
            vocab_size=vocab_size,
            d_model=self.d_model,
            n_layers=self.n_layers,
            n_heads=self.d_model // self.d_head,
            d_ff=8 * self.d_model // 3,
            max_positions=self.length,
            positions="rope",
            norm="rmsnorm",
            activation="silu",
            gated=True,
            bias=False,
        )

    def weights(self, vocab_size: int) -> int:
        """Return how many weights there are outside the token table."""
        with torch.device("meta"):
            model = Transformer(self.config(vocab_size))
        return sum(weight.numel() for weight in model.parameters()) - vocab_size * self.d_model


def train_rung(rung: Rung, text: Tensor, unseen: Tensor, vocab_size: int, seed: int, device: str) -> Point:
    """Train a model on the first windows of a text, each once, and measure it on unseen text.

    `text` and `unseen` are ids. On a GPU matmuls are in bfloat16.
    """
    steps = rung.tokens // (rung.rows * rung.length)
    windows = _windows(text, rung.length)
    refuse(
        steps < 2 or steps * rung.rows > len(windows),
        f"{rung.tokens:,} tokens are not to be had in batches of {rung.rows} x {rung.length} from a text of "
        f"{len(text):,}: each is read once",
    )
    torch.manual_seed(seed)
    model = Transformer(rung.config(vocab_size)).to(device)
    order = torch.randperm(steps * rung.rows, generator=torch.Generator().manual_seed(seed)).to(device)
    windows = windows[: len(order)].to(device)

    def loss_at(step: int) -> Tensor:
        return _loss(model, windows[order[(step - 1) * rung.rows : step * rung.rows]].long(), device)

    rate = rung.rate / math.sqrt(rung.d_model)
    for _ in descend(model, loss_at, steps, rate, steps // 20, weight_decay=0.1, beta2=0.95):
        pass
    seen = steps * rung.rows * rung.length
    return Point(rung.weights(vocab_size), seen, _measured(model, rung, unseen, device))


def _windows(text: Tensor, length: int) -> Tensor:
    """Return consecutive windows, each with the token that follows: [B, T + 1]."""
    return text.unfold(0, length + 1, length)


def _loss(model: Transformer, rows: Tensor, device: str) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda")):
        logits = model(rows[:, :-1]).required_logits
    return nnf.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def _measured(model: Transformer, rung: Rung, unseen: Tensor, device: str) -> float:
    """Return the mean loss over all windows of a text."""
    model.eval()
    windows = _windows(unseen, rung.length).to(device)
    parts = torch.split(windows, 4 * rung.rows)
    total = sum(_loss(model, part.long(), device).double() * len(part) for part in parts)
    return float(total / len(windows))


def ladder(
    sizes: Sequence[tuple[int, int]], tokens: Sequence[int], beyond: tuple[int, int], **more: Any
) -> tuple[list[Rung], Rung]:
    """Return a rung for each size (layers, width) and amount of text, and the one to predict."""
    rungs = [Rung(*size, amount, **more) for size in sizes for amount in tokens]
    return rungs, Rung(*beyond, max(tokens), **more)


@dataclass(frozen=True)
class Prediction:
    """What a ladder says of a larger model before that is trained."""

    law: Law
    loss: float
    low: float  # 95 % by drawing the points again; by one amount of text, by leaving out each of its points
    high: float
    by_size: Law | None = None  # of the amount of text of the prediction, which `loss` is by


def predict(points: Sequence[Point], weights: float, tokens: float, times: int = 100) -> Prediction:
    """Fit a law and predict the loss of a size beyond the ladder.

    Where the ladder has this very amount of text for four sizes or more, these alone predict: what the text
    does is then in their losses, and need not be of the form of the law.
    """
    law, same = fit(points), [point for point in points if point.tokens == tokens]
    if len({point.weights for point in same}) >= 4:
        by_size = fit_sizes(same)
        without = [fit_sizes([*same[:at], *same[at + 1 :]]).loss(weights, tokens) for at in range(len(same))]
        return Prediction(law, by_size.loss(weights, tokens), min(without), max(without), by_size)
    drawn = [other.loss(weights, tokens) for other in bootstrap(points, times)]
    low, high = np.quantile(drawn or [math.nan], (0.025, 0.975)).tolist()
    return Prediction(law, law.loss(weights, tokens), low, high)


def train_ladder(
    rungs: Sequence[Rung],
    text: Tensor,
    unseen: Tensor,
    vocab_size: int,
    seeds: int = 1,
    device: str = "cpu",
    workers: int = 1,
) -> Iterator[tuple[Rung, Point]]:
    """Train every rung, and yield it with the mean of its losses over the seeds, in their order.

    Small models leave a device idle: `workers` processes train as many at a time.
    """
    arguments = [(rung, text, unseen, vocab_size, seed, device) for rung in rungs for seed in range(seeds)]
    with ExitStack() as stack:
        trained: Iterator[Point] = itertools.starmap(train_rung, arguments)
        if workers > 1:
            spawn = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)))
            trained = pool.map(train_rung, *zip(*arguments))
        for rung in rungs:
            points = list(itertools.islice(trained, seeds))
            yield rung, replace(points[0], loss=sum(point.loss for point in points) / seeds)


# The experiment -------------------------------------------------------------------------------------------


def draw_law(points: Sequence[Point], prediction: Prediction, trained: Point | None = None) -> Figure:
    """Draw the loss by size for each amount of text, the fitted law, and a size beyond the ladder."""
    figure, axes = single(
        7, 4.8, "Loss by size and text", "weights outside the token table", "nats a token", grid="both"
    )
    largest = max(point.weights for point in [*points, *([trained] if trained else [])])
    sizes = np.geomspace(min(point.weights for point in points), largest, 60)
    for tokens in sorted({point.tokens for point in points}):
        rungs = [point for point in points if point.tokens == tokens]
        line = axes.plot(sizes, [prediction.law.loss(size, tokens) for size in sizes], linewidth=1)[0]
        axes.scatter(
            [point.weights for point in rungs],
            [point.loss for point in rungs],
            color=line.get_color(),
            s=18,
            label=f"{tokens / 1e6:.3g} M tokens",
        )
    if trained is not None:
        reach = [[prediction.loss - prediction.low], [prediction.high - prediction.loss]]
        axes.errorbar(
            [trained.weights],
            [prediction.loss],
            np.maximum(reach, 0),
            color="black",
            fmt="_",
            capsize=4,
            label="predicted",
        )
        if prediction.by_size is not None:
            alone = [prediction.by_size.loss(size, trained.tokens) for size in sizes]
            axes.plot(sizes, alone, color="black", linewidth=1, linestyle="--", label="by size alone")
        axes.scatter([trained.weights], [trained.loss], marker="*", color="black", s=60, label="trained")
    axes.set_xscale("log")
    legend(axes, 8)
    return figure


def draw_budgets(points: Sequence[Point], law: Law, count: int = 5) -> Figure:
    """Draw the loss by size at equal FLOPs of training, with the best size of each budget."""
    figure, axes = single(
        7, 4.8, "Loss at equal FLOPs", "weights outside the token table", "nats a token", grid="both"
    )
    costs = [FLOPS * point.weights * point.tokens for point in points]
    for budget in np.geomspace(min(costs), max(costs), count):
        best = law.best(float(budget))
        sizes = best.weights * np.geomspace(1 / 8, 8, 60)
        losses = [law.loss(size, budget / FLOPS / size) for size in sizes]
        line = axes.plot(sizes, losses, label=f"{budget:.1e} FLOPs")[0]
        axes.scatter([best.weights], [best.loss], color=line.get_color(), s=24)
    axes.set_xscale("log")
    legend(axes, 8)
    return figure


BYTES = 1_100_000  # of the text, the last tenth apart
# One depth, since in so few steps a second layer costs more than it gives, and the losses would not fall with
# size. No run is shorter than 900 steps: before that a loss falls in another way than the law says. Every
# width reads all of the text, from which the larger model is predicted, and every other one also less of it.
SHAPE: dict[str, Any] = {"d_head": 8, "rows": 4, "length": 64}
WHOLE, LARGER = ladder([(1, 16), (1, 24), (1, 32), (1, 48), (1, 64)], [850_000], (1, 128), **SHAPE)
RUNGS = [*ladder([(1, 16), (1, 32), (1, 64)], [240_000, 450_000], (1, 128), **SHAPE)[0], *WHOLE]
HELD_OUT = 40_000  # bytes that every model is measured on
BEYOND = "four times as large"
ARMS = {f"width {rung.d_model}, {rung.tokens // 1000}k tokens": asdict(rung) for rung in RUNGS}


@functools.cache
def embedded() -> tuple[Tensor, Tensor]:
    """Return the bytes of an embedded text to learn from, and those held out."""
    ids = torch.from_numpy(np.frombuffer(prose(characters=BYTES).encode()[:BYTES], np.uint8).copy())
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut : cut + HELD_OUT]


def run_scaling(rung: dict[str, Any], setting: Conditions) -> Numbers:
    """Train one model of the ladder, each byte read once."""
    shorter = Rung(**{**rung, "tokens": setting.steps(rung["tokens"])})
    return asdict(train_rung(shorter, *embedded(), 256, setting.seed, setting.device))


def predicted(trials: Mapping[str, Sequence[Numbers]], seed: int) -> tuple[list[Point], Prediction, Point]:
    """Return the ladder of one seed, what it says of the larger model, and what that came to."""
    points = {arm: Point(*(numbers[seed][name] for name in FIGURES)) for arm, numbers in trials.items()}
    trained = points.pop(BEYOND)
    return list(points.values()), predict([*points.values()], trained.weights, trained.tokens), trained


@dataclass(frozen=True)
class Predicts(Claim):
    """That the loss of the larger model is what the ladder says, up to a share of `by`."""

    def differences(self, trials: Mapping[str, Sequence[Numbers]]) -> list[float]:
        """Return the relative errors of the predictions."""
        seeds = (predicted(trials, seed) for seed in range(len(trials[BEYOND])))
        return [trained.loss / prediction.loss - 1 for _, prediction, trained in seeds]

    def verdict(self, low: float, high: float) -> Verdict:
        """Return the verdict that an interval of the mean error allows, on either side."""
        if -self.by < low and high < self.by:
            return "supported"
        return "not supported" if low > self.by or high < -self.by else "undecided"

    def explain(self, judged: Judged) -> str:
        """Return how far the prediction was off, in one sentence."""
        return judged.numbers("loss: trained versus predicted is", "+.2%")


def law_of(findings: Findings) -> Figure:
    """Draw the ladder of the first seed, its law, and the larger model."""
    return draw_law(*predicted(findings.trials, 0))


def budgets_of(findings: Findings) -> Figure:
    """Draw the loss by size at equal FLOPs, by the law of the first seed."""
    points, prediction, _ = predicted(findings.trials, 0)
    return draw_budgets(points, prediction.law)


FIGURES = {
    "weights": "outside the token table",
    "tokens": "bytes read, each once",
    "loss": "nats a byte on unseen text",
}
SCALING = Experiment(
    title="Scaling laws",
    question="Does a ladder of small models predict the loss of one four times as large?",
    arms={**ARMS, BEYOND: asdict(LARGER)},
    run=run_scaling,
    claims={
        "The ladder predicts the larger model within 2 %.": Predicts(
            "loss", next(iter(ARMS)), BEYOND, by=0.02
        ),
        "More text helps the largest of the ladder.": Claim(
            "loss", "width 64, 850k tokens", "width 64, 240k tokens"
        ),
    },
    figures=FIGURES,
    pictures=(
        Picture("law", "Loss by size and text", "", "", figure="loss", drawn_by=law_of),
        Picture("budgets", "Loss at equal FLOPs", "", "", figure="loss", drawn_by=budgets_of),
    ),
    seconds=13.0,
    setup={
        "rate": "0.02 / sqrt(width)",
        "layers": 1,
        "batch": SHAPE["rows"],
        "length": SHAPE["length"],
        "text": f"{BYTES:,} bytes of prose",
    },
)
