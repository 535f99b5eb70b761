"""Pictures of ablation and pruning: scores of heads, effects on one prediction, quality by heads removed."""

from collections.abc import Mapping, Sequence

import numpy as np

from clearhead.inside.parts.ablate import Effect
from clearhead.inside.parts.importance import HeadTable
from clearhead.inside.parts.prune import PruneCurve
from clearhead.plot.canvas import Figure, heatmap, label_axis, new, plain, single


def draw_map(found: HeadTable, title: str) -> Figure:
    """Draw layer x head as colours; values of either sign are centred on zero."""
    signed = bool(np.nanmin(found.values) < 0)
    columns = [str(number) for number in range(found.values.shape[1])]
    low = None if signed else 0.0
    scale = found.quantity
    return heatmap(
        found.values, found.rows, columns, title, scale, "layer", "head", low=low, diverging=signed
    )


def draw_effect(found: Effect, title: str) -> Figure:
    """Draw probabilities with and without, a pair of bars for each token or class."""
    height = max(2.2, 0.36 * len(found.top) + 1.4)
    figure, axes = single(6.5, height, f"{title} (KL {found.kl:.3g} nats)", "probability", grid="x")
    places = np.arange(len(found.top))
    axes.barh(places - 0.2, [one.before for one in found.top], 0.38, label="whole model")
    axes.barh(places + 0.2, [one.after for one in found.top], 0.38, label="without")
    label_axis(axes, [one.label for one in found.top], "y")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return figure


def draw_curves(curves: Mapping[str, Sequence[PruneCurve]], title: str) -> Figure:
    """Draw loss and accuracy against heads removed; several curves under one name are a mean and a band."""
    figure = new(10.0, 4.0)
    figure.suptitle(plain(title), fontsize=11)
    total = next(iter(curves.values()))[0].heads
    for axes, quantity in zip(figure.subplots(1, 2), ("loss", "accuracy")):
        for name, several in curves.items():
            values = np.array([getattr(curve, quantity) for curve in several])  # curves, points
            removed = several[0].removed
            label = plain(name if len(several) == 1 else f"{name}, {len(several)} orders")
            (line,) = axes.plot(removed, values.mean(0), marker="o", markersize=3, label=label)
            if len(several) > 1:
                axes.fill_between(removed, values.min(0), values.max(0), color=line.get_color(), alpha=0.15)
        axes.set_xlabel(f"heads removed, of {total}")
        axes.set_ylabel(quantity)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure
