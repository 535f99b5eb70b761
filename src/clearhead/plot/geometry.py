"""Pictures of the geometry: neighbours, a map of words, positions, one word in two sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clearhead.inside.geometry import Nearest, Projection, SameWord
from clearhead.inside.position_maps import PositionMap
from clearhead.plot.canvas import curves, heatmap, new, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CLIP = 3  # times the size of most entries: from there on, colours are cut off


def draw_nearest(found: Nearest) -> Figure:
    """A bar for each token near a word or a sum of words."""
    figure = new(6.0, 0.28 * len(found.labels) + 1.5)
    axes = figure.add_subplot()
    places = range(len(found.labels))
    axes.barh(places, found.scores, color="#2166ac")
    axes.set_yticks(places, [plain(name) for name in found.labels], fontsize=9)
    axes.set_ylim(len(found.labels) - 0.5, -0.5)
    axes.set_title(plain(f"Nearest to {found.query}, {found.table} table"), fontsize=11)
    axes.set_xlabel("cosine" if len(found.words) == 1 else "cosine with each word, added and subtracted")
    axes.grid(axis="x", alpha=0.3)
    return figure


def draw_projection(found: Projection) -> Figure:
    """Words at their places on the plane."""
    figure = new(8.0, 6.5)
    axes = figure.add_subplot()
    axes.scatter(found.points[:, 0], found.points[:, 1], s=10, color="#2166ac")
    for name, (x, y) in zip(found.labels, found.points.tolist()):
        axes.annotate(plain(name), (x, y), xytext=(3, 2), textcoords="offset points", fontsize=8)
    axes.margins(x=0.12)
    axes.set_title(
        f"{len(found.labels)} words of the {found.table} table on their first two principal components",
        fontsize=11,
    )
    axes.set_xlabel(f"component 1 ({found.explained[0]:.1%} of the variance)")
    axes.set_ylabel(f"component 2 ({found.explained[1]:.1%} of the variance)")
    axes.grid(alpha=0.3)
    return figure


def draw_positions(found: PositionMap) -> Figure:
    """Vectors, angles or biases of positions, or how alike positions are, as colours."""
    what = "Likeness of positions" if found.rows == found.columns else "Positions"
    sizes = np.abs(found.values)
    most, usual = float(sizes.max()), float(np.quantile(sizes, 0.995))
    clipped = (
        found.row_name != found.column_name and most > CLIP * usual > 0
    )  # a few large entries would pale all others
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
    """Likeness of the word's two states by layer, beside that of other tokens."""
    lines = {f'"{found.word}"': found.similarity.tolist(), "other tokens": found.baseline.tolist()}
    title = f'"{found.word}" in two sentences'
    return curves(lines, range(len(found.layers)), title, "after layer", "cosine", found.layers)
