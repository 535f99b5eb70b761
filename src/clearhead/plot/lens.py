"""Pictures of the lens and of direct contributions."""

from typing import Any

import numpy as np

from clearhead.inside.lens import Contributions, Lens
from clearhead.plot import canvas
from clearhead.plot.canvas import Axes, Figure

PER_PANEL = 20  # columns side by side; more go into further panels below
MOST = 240  # columns of one picture: the last ones
LETTERS = 9  # of a token that fit into a cell
CELL = 0.62, 0.26  # inches
BARS = 16
MOST_NUMBERS = 24  # layers and heads up to which numbers are written into the cells


def draw_lens(lens: Lens, most: int = MOST) -> Figure:
    """Draw layers by columns: the likeliest choice in each cell, with its probability as the colour.

    The last layer is on top. The figure grows with the text: panels of 20 columns, one below the other, the
    last `most` columns in all.
    """
    columns = list(range(len(lens.columns)))[-most:]
    panels = [columns[start : start + PER_PANEL] for start in range(0, len(columns), PER_PANEL)]
    across, down = max(map(len, panels)), len(lens.layers)
    figure = canvas.new(max(CELL[0] * across + 2.6, 6.5), len(panels) * (CELL[1] * down + 1.1) + 0.7)
    grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(grid, panels):
        image = _lens_panel(axes, lens, panel, across)
    title = "What the model would say after each layer"
    if len(columns) < len(lens.columns):
        title += f", the last {len(columns)} of {len(lens.columns)} columns"
    figure.suptitle(title, fontsize=11)
    scale = f"probability of the {lens.kind} in the cell"
    figure.colorbar(image, ax=list(grid), label=scale, fraction=0.03, pad=0.01, aspect=30)
    return figure


def _lens_panel(axes: Axes, lens: Lens, panel: list[int], across: int) -> Any:
    """Draw one run of columns; a short last panel keeps the width of its cells."""
    layers = list(range(len(lens.layers)))[::-1]
    image = canvas.draw(axes, lens.top_probabilities[:, :, 0].numpy()[layers][:, panel], 0, 1)
    for row, layer in enumerate(layers):
        for place, column in enumerate(panel):
            likely = float(lens.top_probabilities[layer, column, 0]) >= 0.6
            shown = canvas.plain(canvas.shortened(lens.top_names[layer][column][0], LETTERS))
            canvas.write(axes, row, place, shown, color="black" if likely else "white")
    axes.set_xlim(-0.5, across - 0.5)
    canvas.label_axes(
        axes, [lens.layers[layer] for layer in layers], [lens.columns[column] for column in panel]
    )
    if across > 1:
        axes.set_xlabel("end of the span" if lens.kind == "place" else "token read")
    axes.set_frame_on(False)
    return image


def draw_contributions(found: Contributions) -> Figure:
    """Draw layers by heads, with the feed-forward beside them, and the largest terms as bars."""
    tables = {kind: found.heads(kind).numpy() for kind in ("self", "cross")}
    tables = {kind: table for kind, table in tables.items() if table.size}
    forward = [term.value for term in found.terms if term.kind == "feedforward"]
    tables["self"] = np.hstack([tables["self"], np.array(forward)[:, None]])
    layers, largest = max(len(table) for table in tables.values()), found.largest(BARS)
    widths = [max(0.36 * table.shape[1] + 1.0, 2.6) for table in tables.values()]
    figure = canvas.new(sum(widths) + 5.5, max(0.3 * layers + 1.8, 0.22 * len(largest) + 1.6, 3.4))
    *grid, last = figure.subplots(1, len(tables) + 1, squeeze=False, width_ratios=[*widths, 3.6])[0]
    reach = max(float(np.nanmax(np.abs(table))) for table in tables.values()) or 1.0
    for axes, (kind, table) in zip(grid, tables.items()):
        image = canvas.draw(axes, table, -reach, reach, True)
        if table.shape[1] <= MOST_NUMBERS and layers <= MOST_NUMBERS:
            canvas.write_numbers(axes, np.round(table, 1) + 0.0, "{:.1f}")  # no minus before a zero
        names = [str(head) for head in range(table.shape[1])]
        what = "head of the cross-attention"
        if kind == "self":
            names[-1], what = "ff", "head (ff: the feed-forward)"
        canvas.label_axes(axes, [str(layer) for layer in range(layers)], names)
        canvas.name(axes, "", what, "layer")
    figure.colorbar(image, ax=grid, label="added to the logit", fraction=0.046)
    names = [f"head {term.name}" if term.head is not None else term.name for term in largest]
    canvas.signed_bars(last, [term.value for term in largest], names, above=canvas.RED, below=canvas.BLUE)
    last.set_xlabel(f"added to the logit: the {len(largest)} largest of {len(found.terms)}")
    versus = f" less that of {found.against}" if found.against is not None else ""
    cap = " before the soft cap" if found.capped is not None else ""
    where = f"{found.columns[found.column]}: {found.logit:.3f}{cap}"
    title = f"Direct contributions to the logit of {found.choice}{versus} at {where}"
    figure.suptitle(canvas.plain(title), fontsize=11)
    return figure
