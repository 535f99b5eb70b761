"""Scaling as an experiment: a ladder of sizes and texts must foretell a model four times as large."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.app.plot import Figure
from clearhead.labs.lab.curves import draw_budgets, draw_law
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
from clearhead.labs.lab.scaling import Foretold, Point, Rung, ladder, predict, train_rung

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


def climb_one(rung: dict[str, Any], setting: Conditions) -> Numbers:
    """Train one model of the ladder, each byte read once."""
    asked = Rung(**rung)
    asked = replace(asked, tokens=setting.steps(asked.tokens))
    return asdict(train_rung(asked, *embedded(), 256, setting.seed, setting.device))


def foretold(trials: Mapping[str, Sequence[Numbers]], seed: int) -> tuple[list[Point], Foretold, Point]:
    """Return the ladder of one seed, what it says of the larger model, and what that came to."""
    points = {arm: Point(*(found[seed][name] for name in FIGURES)) for arm, found in trials.items()}
    trained = points.pop(BEYOND)
    return list(points.values()), predict([*points.values()], trained.weights, trained.tokens), trained


@dataclass(frozen=True)
class Foretells(Claim):
    """That the loss of the larger model is what the ladder says, up to a share of `by`."""

    def judge(self, trials: Mapping[str, Sequence[Numbers]]) -> Judged:
        """Judge by the relative errors of the predictions, seed by seed, on either side."""
        seeds = range(len(trials[BEYOND]))
        made = [foretold(trials, seed) for seed in seeds]
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
        found = f"loss: trained beside predicted is {judged.difference:+.2%}"
        if judged.seeds < FEWEST:
            return (
                f"{found} with {judged.seeds} {'seed' if judged.seeds == 1 else 'seeds'}: too few to decide"
            )
        return f"{found} ({judged.low:+.2%} to {judged.high:+.2%}, 95 % by Student's t, {judged.seeds} seeds)"


def law_of(findings: Findings) -> Figure:
    """Draw the ladder of the first seed, its law, and the larger model."""
    return draw_law(*foretold(findings.trials, 0))


def budgets_of(findings: Findings) -> Figure:
    """Draw the loss by size at equal FLOPs, by the law of the first seed."""
    points, before, _ = foretold(findings.trials, 0)
    return draw_budgets(points, before.law)


FIGURES = {
    "weights": "outside the token table",
    "tokens": "bytes read, each once",
    "loss": "nats a byte on unseen text",
}
EXPERIMENT = Experiment(
    title="Scaling laws",
    question="Does a ladder of small models foretell the loss of one four times as large?",
    arms={**ARMS, BEYOND: asdict(LARGER)},
    run=climb_one,
    claims=(
        Foretells(
            "The ladder foretells the larger model within 2 %.", "loss", next(iter(ARMS)), BEYOND, by=0.02
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
