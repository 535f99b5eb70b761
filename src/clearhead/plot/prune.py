"""Pictures of ablation and pruning: a number for each head, what the model says with and without, quality against heads removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clearhead.inside.parts.ablate import HeadTable
from clearhead.inside.parts.effect import Effect
from clearhead.inside.parts.prune import PruneCurve
from clearhead.plot.canvas import heatmap, label_axis, new, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_map(found: HeadTable, title: str) -> Figure:
    """Layer x head as colours; what can be of either sign is centred on zero."""
    signed = bool(np.nanmin(found.values) < 0)
    columns = [str(number) for number in range(found.values.shape[1])]
    return heatmap(
        found.values,
        found.rows,
        columns,
        title,
        found.quantity,
        row_name="layer",
        column_name="head",
        low=None if signed else 0.0,
        diverging=signed,
    )


def draw_effect(found: Effect, title: str) -> Figure:
    """Probabilities with and without, a pair of bars for each token or class."""
    figure = new(6.5, max(2.2, 0.36 * len(found.top) + 1.4))
    axes = figure.add_subplot()
    places = np.arange(len(found.top))
    axes.barh(places - 0.2, [one.before for one in found.top], 0.38, label="whole model")
    axes.barh(places + 0.2, [one.after for one in found.top], 0.38, label="without")
    label_axis(axes, [one.label for one in found.top], "y")
    axes.invert_yaxis()
    axes.set_xlabel("probability")
    axes.set_title(plain(f"{title} (KL {found.kl:.3g} nats)"), fontsize=11)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize=8)
    return figure


def draw_curves(curves: Mapping[str, Sequence[PruneCurve]], title: str) -> Figure:
    """Loss and accuracy against heads removed; of several curves under one name their mean, and the span between them as a band."""
    figure = new(10.0, 4.0)
    figure.suptitle(plain(title), fontsize=11)
    panels = figure.subplots(1, 2)
    for axes, quantity in zip(panels, ("loss", "accuracy")):
        for name, several in curves.items():
            values = np.array([getattr(curve, quantity) for curve in several])  # curves, points
            label = plain(name if len(several) == 1 else f"{name}, {len(several)} orders")
            (line,) = axes.plot(several[0].removed, values.mean(0), marker="o", markersize=3, label=label)
            if len(several) > 1:
                axes.fill_between(
                    several[0].removed, values.min(0), values.max(0), color=line.get_color(), alpha=0.15
                )
        total = next(iter(curves.values()))[0].heads
        axes.set_xlabel(f"heads removed, of {total}")
        axes.set_ylabel(quantity)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure
