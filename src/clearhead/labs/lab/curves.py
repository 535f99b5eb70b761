"""Pictures of scaling laws: loss by size, and iso-FLOP curves."""

from collections.abc import Sequence

import numpy as np

from clearhead.app.plot import Figure, single
from clearhead.labs.lab.scaling import FLOPS, Foretold, Law, Point


def draw_law(points: Sequence[Point], found: Foretold, trained: Point | None = None) -> Figure:
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
