"""Probes by depth as a picture: accuracy with its interval, the control task, and the two baselines as lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clearhead.inside.probe import Probes
from clearhead.plot.canvas import new, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def probe_figure(probes: Probes, model: str = "") -> Figure:
    """Accuracy by depth; `model` is named in the title."""
    figure = new(min(max(6.5, 0.35 * len(probes.layers) + 2), 14), 4.2)
    axes = figure.add_subplot()
    places = range(len(probes.layers))
    accuracy = [layer.accuracy for layer in probes.layers]
    edges = [
        [layer.accuracy - layer.interval[0] for layer in probes.layers],
        [layer.interval[1] - layer.accuracy for layer in probes.layers],
    ]
    axes.errorbar(
        places,
        accuracy,
        [[max(0.0, edge) for edge in side] for side in edges],
        marker="o",
        markersize=4,
        capsize=3,
        label="probe, with its 95 % interval",
    )
    axes.plot(
        places,
        [layer.control for layer in probes.layers],
        marker="s",
        markersize=4,
        label="control task: random label of each type",
    )
    axes.plot(
        places,
        [layer.selectivity for layer in probes.layers],
        marker="^",
        markersize=4,
        label="selectivity: probe less control",
    )
    kind = {"words": "word type", "texts": "text", "images": "image"}[probes.unit]
    axes.axhline(
        probes.by_type,
        color="black",
        linestyle="--",
        linewidth=1,
        label=f"most frequent label of each {kind}",
    )
    axes.axhline(probes.majority, color="grey", linestyle=":", linewidth=1.2, label="most frequent label")
    axes.set_xticks(list(places), [layer.name for layer in probes.layers], fontsize=8)
    lowest = min(0.0, *(layer.selectivity for layer in probes.layers))
    axes.set_ylim(lowest - 0.02 if lowest < 0 else 0, 1.02)
    axes.set_xlabel(f"after block ({probes.stack})")
    axes.set_ylabel(f"accuracy on {probes.test:,} {probes.unit}")
    named = f"{model}: " if model else ""
    axes.set_title(
        plain(f"{named}linear probes of {probes.column}, {len(probes.labels)} labels"), fontsize=11
    )
    axes.grid(alpha=0.3)
    handles, names = axes.get_legend_handles_labels()
    order = sorted(
        range(len(names)), key=lambda place: not names[place].startswith("probe")
    )  # curves with bars come last otherwise
    shown = {"fontsize": 8, "loc": "outside lower center", "ncols": 2, "frameon": False}
    figure.legend([handles[place] for place in order], [names[place] for place in order], **shown)
    return figure
