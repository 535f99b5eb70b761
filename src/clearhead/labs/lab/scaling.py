"""Scaling laws: train a ladder of sizes and amounts of text, fit L(N, D), and predict beyond the ladder.

L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022), with N weights outside the token table and D
tokens, each read once. Training takes about 6 N D FLOPs.

Shapes: B batch, T length, P points of the ladder, G pairs of exponents tried together.
"""

import itertools
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, refuse
from clearhead.hub.files import read_json

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
    found = read_json(path)
    entry = found.get("law", next(iter(found.get("results", ({},)))).get("law"))
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
    wrong = next((one for one in points if not min(one.weights, one.tokens, one.loss) > 0), None)
    refuse(wrong is not None, f"{wrong} is not of numbers above 0")
    numbers, exponents = _least(
        np.array([[one.weights, one.tokens, one.loss] for one in points]), refinements
    )
    return Law(*map(float, numbers), *map(float, exponents))


def fit_sizes(points: Sequence[Point]) -> Law:
    """Fit a law of size alone to points of one amount of text, whose part is then in the floor."""
    refuse(
        len({one.tokens for one in points}) != 1 or len({one.weights for one in points}) < 3,
        "a law of size has three numbers: give three sizes or more, trained on one amount of text",
    )
    (floor, a), (alpha,) = _least(np.array([[one.weights, one.loss] for one in points]), REFINEMENTS)
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


def between(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of 95 % of values that were drawn."""
    low, high = np.quantile(np.array(values), (0.025, 0.975))
    return float(low), float(high)


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
        return sum(one.numel() for one in model.parameters()) - vocab_size * self.d_model


def train_rung(rung: Rung, text: Tensor, unseen: Tensor, vocab_size: int, seed: int, device: str) -> Point:
    """Train a model on the first windows of a text, each once, and measure it on unseen text.

    `text` and `unseen` are ids. On a GPU matrix products are in bfloat16.
    """
    steps = rung.tokens // (rung.rows * rung.length)
    windows = _windows(text, rung.length)
    refuse(
        steps < 2 or steps * rung.rows > len(windows),
        f"{rung.tokens:,} tokens are not to be had in batches of {rung.rows} x {rung.length} from a text of "
        f"{len(text):,}: each is read once",
    )
    torch.manual_seed(seed)
    model = Transformer(rung.config(vocab_size)).to(device).train()
    order = torch.randperm(steps * rung.rows, generator=torch.Generator().manual_seed(seed)).to(device)
    windows = windows[: len(order)].to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=rung.rate / math.sqrt(rung.d_model),
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / max(1, steps // 20), 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    for step in range(steps):
        rows = windows[order[step * rung.rows : (step + 1) * rung.rows]].long()  # B T+1
        optimizer.zero_grad(set_to_none=True)
        _loss(model, rows, device).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    seen = steps * rung.rows * rung.length
    return Point(rung.weights(vocab_size), seen, _measured(model, rung, unseen, device))


def _windows(text: Tensor, length: int) -> Tensor:
    """Return windows side by side, each with the token that follows: [B, T + 1]."""
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
    low: float  # 95 % by drawing the points again; by one amount of text, without each of its points in turn
    high: float
    by_size: Law | None = None  # of the amount of text that was asked for, which `loss` is by


def predict(points: Sequence[Point], weights: float, tokens: float, times: int = 100) -> Prediction:
    """Fit a law and predict the loss of a size beyond the ladder.

    Where the ladder has this very amount of text for four sizes or more, these alone predict: what the text
    does is then in their losses, and need not be of the form of the law.
    """
    law, same = fit(points), [one for one in points if one.tokens == tokens]
    if len({one.weights for one in same}) >= 4:
        by_size = fit_sizes(same)
        without = [fit_sizes([*same[:at], *same[at + 1 :]]).loss(weights, tokens) for at in range(len(same))]
        return Prediction(law, by_size.loss(weights, tokens), min(without), max(without), by_size)
    drawn = [one.loss(weights, tokens) for one in bootstrap(points, times)]
    return Prediction(law, law.loss(weights, tokens), *between(drawn or [math.nan]))


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
    given = [(rung, text, unseen, vocab_size, seed, device) for rung in rungs for seed in range(seeds)]
    with ExitStack() as stack:
        if workers > 1:
            spawn = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)))
            made: Iterator[Point] = pool.map(train_rung, *zip(*given))
        else:
            made = itertools.starmap(train_rung, given)
        for rung in rungs:
            mine = list(itertools.islice(made, seeds))
            yield rung, replace(mine[0], loss=sum(one.loss for one in mine) / seeds)
