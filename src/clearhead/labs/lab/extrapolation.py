"""Scaling as an experiment: a ladder of sizes and texts must predict a model four times as large."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.app.plot import Figure, single
from clearhead.labs.lab.experiment import (
    FEWEST,
    Claim,
    Conditions,
    Experiment,
    Findings,
    Judged,
    Numbers,
    Picture,
    Verdict,
    interval,
)
from clearhead.labs.lab.learning import prose
from clearhead.labs.lab.scaling import FLOPS, Law, Point, Prediction, Rung, ladder, predict, train_rung


def draw_law(points: Sequence[Point], found: Prediction, trained: Point | None = None) -> Figure:
    """Draw the loss by size for each amount of text, the fitted law, and a size beyond the ladder."""
    figure, axes = single(
        7, 4.4, "Loss by size and text", "weights outside the token table", "nats a token", grid="both"
    )
    largest = max(one.weights for one in [*points, *([trained] if trained else [])])
    places = np.geomspace(min(one.weights for one in points), largest, 60)
    for tokens in sorted({one.tokens for one in points}):
        mine = [one for one in points if one.tokens == tokens]
        line = axes.plot(places, [found.law.loss(size, tokens) for size in places], linewidth=1)[0]
        axes.scatter(
            [one.weights for one in mine],
            [one.loss for one in mine],
            color=line.get_color(),
            s=18,
            label=f"{tokens / 1e6:.3g} M tokens",
        )
    if trained is not None:
        reach = [[found.loss - found.low], [found.high - found.loss]]
        axes.errorbar(
            [trained.weights],
            [found.loss],
            np.maximum(reach, 0),
            color="black",
            fmt="_",
            capsize=4,
            label="predicted",
        )
        if found.by_size is not None:
            alone = [found.by_size.loss(size, trained.tokens) for size in places]
            axes.plot(places, alone, color="black", linewidth=1, linestyle="--", label="by size alone")
        axes.scatter([trained.weights], [trained.loss], marker="*", color="black", s=60, label="trained")
    axes.set_xscale("log")
    axes.legend(fontsize=8)
    return figure


def draw_budgets(points: Sequence[Point], law: Law, count: int = 5) -> Figure:
    """Draw the loss by size at equal FLOPs of training, with the best size of each budget."""
    figure, axes = single(
        7, 4.4, "Loss at equal FLOPs", "weights outside the token table", "nats a token", grid="both"
    )
    costs = [FLOPS * one.weights * one.tokens for one in points]
    for budget in np.geomspace(min(costs), max(costs), count):
        best = law.best(float(budget))
        places = best.weights * np.geomspace(1 / 8, 8, 60)
        losses = [law.loss(size, budget / FLOPS / size) for size in places]
        line = axes.plot(places, losses, label=f"{budget:.1e} FLOPs")[0]
        axes.scatter([best.weights], [best.loss], color=line.get_color(), s=24)
    axes.set_xscale("log")
    axes.legend(fontsize=8)
    return figure


# The experiment -------------------------------------------------------------------------------------------


BYTES = 1_100_000  # of the text, the last tenth apart
# One depth, since in so few steps a second layer costs more than it gives, and the losses would not fall with
# size. No run is shorter than 900 steps: before that a loss falls in another way than the law says. Every
# width reads all of the text, from which the larger model is predicted, and every other one also less of it.
SHAPE: dict[str, Any] = {"d_head": 8, "rows": 4, "length": 64}
MOST, LARGER = ladder([(1, 16), (1, 24), (1, 32), (1, 48), (1, 64)], [850_000], (1, 128), **SHAPE)
RUNGS = [*ladder([(1, 16), (1, 32), (1, 64)], [240_000, 450_000], (1, 128), **SHAPE)[0], *MOST]
HELD_OUT = 40_000  # bytes that every model is measured on
BEYOND = "four times as large"
ARMS = {f"width {one.d_model}, {one.tokens // 1000}k tokens": asdict(one) for one in RUNGS}


@functools.cache
def embedded() -> tuple[Tensor, Tensor]:
    """Return the bytes of an embedded text to learn from, and those held out."""
    ids = torch.from_numpy(np.frombuffer(prose(characters=BYTES).encode()[:BYTES], np.uint8).copy())
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut : cut + HELD_OUT]


def run_scaling(rung: dict[str, Any], setting: Conditions) -> Numbers:
    """Train one model of the ladder, each byte read once."""
    asked = Rung(**rung)
    asked = replace(asked, tokens=setting.steps(asked.tokens))
    return asdict(train_rung(asked, *embedded(), 256, setting.seed, setting.device))


def predicted(trials: Mapping[str, Sequence[Numbers]], seed: int) -> tuple[list[Point], Prediction, Point]:
    """Return the ladder of one seed, what it says of the larger model, and what that came to."""
    points = {arm: Point(*(found[seed][name] for name in FIGURES)) for arm, found in trials.items()}
    trained = points.pop(BEYOND)
    return list(points.values()), predict([*points.values()], trained.weights, trained.tokens), trained


@dataclass(frozen=True)
class Predicts(Claim):
    """That the loss of the larger model is what the ladder says, up to a share of `by`."""

    def judge(self, trials: Mapping[str, Sequence[Numbers]]) -> Judged:
        """Judge by the relative errors of the predictions, seed by seed, on either side."""
        seeds = range(len(trials[BEYOND]))
        made = [predicted(trials, seed) for seed in seeds]
        errors = [trained.loss / before.loss - 1 for _, before, trained in made]
        low, high = interval(errors)
        verdict: Verdict = "undecided"
        if len(errors) >= FEWEST and -self.by < low and high < self.by:
            verdict = "supported"
        elif len(errors) >= FEWEST and (low > self.by or high < -self.by):
            verdict = "not supported"
        return Judged(self, verdict, sum(errors) / len(errors), low, high, len(errors))

    def said(self, judged: Judged) -> str:
        """Say how far the prediction was off."""
        found = f"loss: trained versus predicted is {judged.difference:+.2%}"
        if judged.seeds < FEWEST:
            return (
                f"{found} with {judged.seeds} {'seed' if judged.seeds == 1 else 'seeds'}: too few to decide"
            )
        return f"{found} ({judged.low:+.2%} to {judged.high:+.2%}, 95 % by Student's t, {judged.seeds} seeds)"


def law_of(findings: Findings) -> Figure:
    """Draw the ladder of the first seed, its law, and the larger model."""
    return draw_law(*predicted(findings.trials, 0))


def budgets_of(findings: Findings) -> Figure:
    """Draw the loss by size at equal FLOPs, by the law of the first seed."""
    points, before, _ = predicted(findings.trials, 0)
    return draw_budgets(points, before.law)


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
    claims=(
        Predicts(
            "The ladder predicts the larger model within 2 %.", "loss", next(iter(ARMS)), BEYOND, by=0.02
        ),
        Claim(
            "More text helps the largest of the ladder.",
            "loss",
            "width 64, 850k tokens",
            "width 64, 240k tokens",
        ),
    ),
    figures=FIGURES,
    pictures=(
        Picture("law", "Loss by size and text", "", "", figure="loss", made=law_of),
        Picture("budgets", "Loss at equal FLOPs", "", "", figure="loss", made=budgets_of),
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
