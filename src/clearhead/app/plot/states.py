"""Pictures of what states hold: probes by depth, neighbours, words on a plane, positions."""

import numpy as np

from clearhead.app.plot import canvas
from clearhead.app.plot.canvas import BLUE, Figure, bars, heatmap, plain, single
from clearhead.inside.geometry import Nearest, PositionMap, Projection, SameWord
from clearhead.inside.probe import Probes

PROBE = "probe, with its 95 % interval"
CLIP = 3  # times the size of most entries: from there on, colours are cut off


def probe_figure(probes: Probes, model: str = "") -> Figure:
    """Draw accuracy by depth; `model` is named in the title."""
    layers, places = probes.layers, range(len(probes.layers))
    figure, axes = single(
        width=min(max(6.5, 0.35 * len(layers) + 2), 14),
        height=4.2,
        title=f"{model + ': ' if model else ''}linear probes of {probes.column}, {len(probes.labels)} labels",
        x_name=f"after block ({probes.stack})",
        y_name=f"accuracy on {probes.test:,} {probes.unit}",
        grid="both",
    )
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
    axes.plot(
        places,
        [layer.control for layer in layers],
        marker="s",
        markersize=4,
        label="control task: random label of each type",
    )
    axes.plot(
        places,
        [layer.selectivity for layer in layers],
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
    axes.set_xticks(list(places), [layer.name for layer in layers], fontsize=8)
    lowest = min(0.0, *(layer.selectivity for layer in layers))
    axes.set_ylim(lowest - 0.02 if lowest < 0 else 0, 1.02)
    handles, names = axes.get_legend_handles_labels()
    ordered = [handles.pop(names.index(PROBE)), *handles]  # matplotlib lists the curve with bars last
    figure.legend(handles=ordered, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_nearest(found: Nearest) -> Figure:
    """Draw a bar for each token near a word or a sum of words."""
    figure, axes = single(
        width=6.0,
        height=0.28 * len(found.labels) + 1.5,
        title=f"Nearest to {found.query}, {found.table} table",
        x_name="cosine" if len(found.words) == 1 else "cosine with each word, added and subtracted",
        grid="x",
    )
    bars(axes, found.scores, found.labels, size=9)
    return figure


def draw_projection(found: Projection) -> Figure:
    """Draw words at their places on the plane."""
    title = f"{len(found.labels)} words of the {found.table} table on their first two principal components"
    across, up = (f"component {n} ({found.explained[n - 1]:.1%} of the variance)" for n in (1, 2))
    figure, axes = single(8.0, 6.5, title, across, up, grid="both")
    axes.scatter(found.points[:, 0], found.points[:, 1], s=10, color=BLUE)
    for label, (x, y) in zip(found.labels, found.points.tolist()):
        axes.annotate(plain(label), (x, y), xytext=(3, 2), textcoords="offset points", fontsize=8)
    axes.margins(x=0.12)
    return figure


def draw_positions(found: PositionMap) -> Figure:
    """Draw vectors, angles or biases of positions, or how alike positions are, as colours."""
    what = "Likeness of positions" if found.rows == found.columns else "Positions"
    sizes = np.abs(found.values)
    most, usual = float(sizes.max()), float(np.quantile(sizes, 0.995))
    # A few large entries would pale all others.
    clipped = found.row_name != found.column_name and most > CLIP * usual > 0
    return heatmap(
        found.values,
        found.rows,
        found.columns,
        f"{what} ({found.scheme})",
        f"{found.measure}, the largest cut off" if clipped else found.measure,
        found.row_name,
        found.column_name,
        low=-usual if clipped else None,
        high=usual if clipped else None,
        diverging=bool(found.values.min() < 0),
    )


def draw_same_word(found: SameWord) -> Figure:
    """Draw the likeness of the word's two states by layer, beside that of other tokens."""
    title = f'"{found.word}" in two sentences'
    figure, axes = single(6.5, 4.0, title, "after layer", "cosine", grid="both")
    for label, values in ((f'"{found.word}"', found.similarity), ("other tokens", found.baseline)):
        axes.plot(values.tolist(), marker="o", markersize=4, label=plain(label))
    axes.set_xticks(range(len(found.layers)), [plain(layer) for layer in found.layers], fontsize=8)
    canvas.legend(axes, 8)
    return figure
