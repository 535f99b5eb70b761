"""Pictures of the lens and of direct contributions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.inside.contributions import Contributions
from clearhead.inside.lens import Lens
from clearhead.plot import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_PANEL = 20  # columns side by side; more go into further panels below
MOST = 240  # columns of one picture: the last ones
LETTERS = 9  # of a token that fit into a cell
CELL = 0.62, 0.26  # inches
BARS = 16
MOST_NUMBERS = 24  # layers and heads up to which numbers are written into the cells


def draw_lens(lens: Lens, most: int = MOST) -> Figure:
    """Layers by columns: the likeliest choice in each cell, its probability as the colour; the last layer on top.

    The figure grows with the text: panels of 20 columns, one below the other, the last `most` columns in all.
    """
    columns = list(range(len(lens.columns)))[-most:]
    panels = [columns[start : start + PER_PANEL] for start in range(0, len(columns), PER_PANEL)]
    across, down = max(map(len, panels)), len(lens.layers)
    figure = canvas.new(max(CELL[0] * across + 2.6, 6.5), len(panels) * (CELL[1] * down + 1.1) + 0.7)
    grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(grid, panels):
        image = _lens_panel(axes, lens, panel, across)
    cut = (
        f", the last {len(columns)} of {len(lens.columns)} columns"
        if len(columns) < len(lens.columns)
        else ""
    )
    figure.suptitle(f"What the model would say after each layer{cut}", fontsize=11)
    figure.colorbar(
        image,
        ax=list(grid),
        label=f"probability of the {lens.kind} in the cell",
        fraction=0.03,
        pad=0.01,
        aspect=30,
    )
    return figure


def _lens_panel(axes: Axes, lens: Lens, panel: list[int], across: int) -> Any:
    """One run of columns; a short last panel keeps the width of its cells."""
    layers = list(range(len(lens.layers)))[::-1]
    image = canvas.draw(axes, lens.top_probabilities[:, :, 0].numpy()[layers][:, panel], 0, 1, False)
    for row, layer in enumerate(layers):
        for place, column in enumerate(panel):
            name = lens.top_names[layer][column][0]
            dark = float(lens.top_probabilities[layer, column, 0]) < 0.6
            shown = name if len(name) <= LETTERS else name[: LETTERS - 1] + "…"
            axes.text(
                place,
                row,
                canvas.plain(shown),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )
    axes.set_xlim(-0.5, across - 0.5)
    canvas.label_axis(axes, [lens.layers[layer] for layer in layers], "y")
    canvas.label_axis(axes, [lens.columns[column] for column in panel], "x")
    axes.set_xlabel(
        {"token": "token read", "class": "token read", "place": "end of the span"}[lens.kind]
        if across > 1
        else ""
    )
    axes.set_frame_on(False)
    return image


def draw_contributions(found: Contributions) -> Figure:
    """Layers by heads, with the feed-forward beside them, and the largest terms as bars."""
    tables = {kind: found.heads(kind).numpy() for kind in ("self", "cross")}
    tables = {kind: table for kind, table in tables.items() if table.size}
    layers, bars = max(len(table) for table in tables.values()), found.largest(BARS)
    widths = [max(0.36 * (table.shape[1] + (kind == "self")) + 1.0, 2.6) for kind, table in tables.items()]
    figure = canvas.new(sum(widths) + 5.5, max(0.3 * layers + 1.8, 0.22 * len(bars) + 1.6, 3.4))
    grid = figure.subplots(1, len(tables) + 1, squeeze=False, width_ratios=[*widths, 3.6])[0]
    forward = [term.value for term in found.terms if term.kind == "feedforward"]
    tables["self"] = np.hstack([tables["self"], np.array(forward)[:, None]])
    reach = max(float(np.nanmax(np.abs(table))) for table in tables.values()) or 1.0
    for axes, (kind, table) in zip(grid, tables.items()):
        image = canvas.draw(axes, table, -reach, reach, True)
        if table.shape[1] <= MOST_NUMBERS and layers <= MOST_NUMBERS:
            canvas.write_numbers(axes, np.round(table, 1) + 0.0, "{:.1f}")  # no minus before a zero
        heads = [str(head) for head in range(table.shape[1])]
        names = [*heads[:-1], "ff"] if kind == "self" else heads
        canvas.label_axis(axes, names, "x")
        canvas.label_axis(axes, [str(layer) for layer in range(layers)], "y")
        axes.set_xlabel("head (ff: the feed-forward)" if kind == "self" else "head of the cross-attention")
        axes.set_ylabel("layer")
    figure.colorbar(image, ax=list(grid[:-1]), label="added to the logit", fraction=0.046)
    values = [term.value for term in bars]
    colours = ["#b2182b" if value > 0 else "#2166ac" for value in values]  # as on the diverging scale
    grid[-1].barh(range(len(bars)), values, color=colours)
    grid[-1].set_yticks(
        range(len(bars)),
        [f"head {term.name}" if term.head is not None else term.name for term in bars],
        fontsize=8,
    )
    grid[-1].invert_yaxis()
    grid[-1].axvline(0, color="black", linewidth=0.8)
    grid[-1].set_xlabel(f"added to the logit: the {len(bars)} largest of {len(found.terms)}")
    versus = f" less that of {found.against}" if found.against is not None else ""
    cap = " before the soft cap" if found.capped is not None else ""
    title = f"Direct contributions to the logit of {found.choice}{versus} at {found.columns[found.column]}: {found.logit:.3f}{cap}"
    figure.suptitle(canvas.plain(title), fontsize=11)
    return figure
