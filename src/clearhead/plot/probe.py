"""Probes by depth as a picture: accuracy with its interval, the control task and two baselines."""

from clearhead.inside.probe import Probes
from clearhead.plot.canvas import Figure, single

PROBE = "probe, with its 95 % interval"


def probe_figure(probes: Probes, model: str = "") -> Figure:
    """Draw accuracy by depth; `model` is named in the title."""
    layers, places = probes.layers, range(len(probes.layers))
    width = min(max(6.5, 0.35 * len(layers) + 2), 14)
    named = f"{model}: " if model else ""
    title = f"{named}linear probes of {probes.column}, {len(probes.labels)} labels"
    depth, measure = f"after block ({probes.stack})", f"accuracy on {probes.test:,} {probes.unit}"
    figure, axes = single(width, 4.2, title, depth, measure, grid="both")
    below = [max(0.0, layer.accuracy - layer.interval[0]) for layer in layers]
    above = [max(0.0, layer.interval[1] - layer.accuracy) for layer in layers]
    axes.errorbar(
        places,
        [layer.accuracy for layer in layers],
        [below, above],
        marker="o",
        markersize=4,
        capsize=3,
        label=PROBE,
    )
    control = "control task: random label of each type"
    axes.plot(places, [layer.control for layer in layers], marker="s", markersize=4, label=control)
    selectivity = "selectivity: probe less control"
    axes.plot(places, [layer.selectivity for layer in layers], marker="^", markersize=4, label=selectivity)
    kind = {"words": "word type", "texts": "text", "images": "image"}[probes.unit]
    by_type = f"most frequent label of each {kind}"
    axes.axhline(probes.by_type, color="black", linestyle="--", linewidth=1, label=by_type)
    axes.axhline(probes.majority, color="grey", linestyle=":", linewidth=1.2, label="most frequent label")
    axes.set_xticks(list(places), [layer.name for layer in layers], fontsize=8)
    lowest = min(0.0, *(layer.selectivity for layer in layers))
    axes.set_ylim(lowest - 0.02 if lowest < 0 else 0, 1.02)
    handles, names = axes.get_legend_handles_labels()
    first = names.index(PROBE)  # matplotlib lists the curve with bars last
    ordered = [handles.pop(first), *handles]
    figure.legend(handles=ordered, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    return figure
