"""Pictures of the geometry: neighbours, a map of words, positions, one word in two sentences."""

import numpy as np

from clearhead.inside.geometry import Nearest, PositionMap, Projection, SameWord
from clearhead.plot.canvas import BLUE, Figure, bars, curves, heatmap, plain, single

CLIP = 3  # times the size of most entries: from there on, colours are cut off


def draw_nearest(found: Nearest) -> Figure:
    """Draw a bar for each token near a word or a sum of words."""
    title = f"Nearest to {found.query}, {found.table} table"
    measure = "cosine" if len(found.words) == 1 else "cosine with each word, added and subtracted"
    figure, axes = single(6.0, 0.28 * len(found.labels) + 1.5, title, measure, grid="x")
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
    lines = {f'"{found.word}"': found.similarity.tolist(), "other tokens": found.baseline.tolist()}
    title = f'"{found.word}" in two sentences'
    return curves(lines, range(len(found.layers)), title, "after layer", "cosine", found.layers)
