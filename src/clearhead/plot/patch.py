"""Pictures of activation patching: a heat map for each part of each stack, on one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.inside.patch import Patching, PatchMap
from clearhead.plot import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = "residual", "attention", "cross", "feedforward", "heads", "cross heads"  # from the top
COLUMN, ROW = 0.3, 0.24  # inches
MOST_NUMBERS = 16  # columns up to which values are written into the cells
REACH = 1.0  # the scale reaches to the clean run at least; beyond twice that, colours stay as they are
WIDEST = 24.0
ROW_NAMES = {"residual": "before layer"}


def draw_patching(found: Patching) -> Figure:
    """Every map of a patching: parts one below the other, two stacks side by side; layers by tokens, or layers by heads."""
    tables = {(table.part, table.stack): table for table in found.maps}
    parts = [part for part in PARTS if any(table.part == part for table in found.maps)]
    stacks = list(dict.fromkeys(table.stack for table in found.maps))
    heights = [
        ROW * max(len(table.rows) for table in found.maps if table.part == part) + 1.5 for part in parts
    ]
    widths = [
        max(COLUMN * max(len(table.columns) for table in found.maps if table.stack == stack) + 1.5, 4.5)
        for stack in stacks
    ]
    figure = canvas.new(min(sum(widths) + 1.5, WIDEST), sum(heights) + 0.9)
    grid = figure.subplots(len(parts), len(stacks), squeeze=False, height_ratios=heights, width_ratios=widths)
    largest = max(float(np.nanmax(np.abs(table.values.numpy()))) for table in found.maps)
    reach = min(max(largest, REACH), 2 * REACH)
    for (row, column), axes in np.ndenumerate(grid):
        table = tables.get((parts[row], stacks[column]))
        if table is None:
            axes.set_axis_off()
        else:
            image = _draw(axes, table, reach)
    figure.suptitle(canvas.plain(_title(found)), fontsize=11)
    ends = "both" if largest > reach else "neither"
    scale = "share of the answer brought back: 0 corrupt, 1 clean"
    figure.colorbar(image, ax=grid.ravel().tolist(), label=scale, fraction=0.04, aspect=40, extend=ends)
    return figure


def _draw(axes: Axes, table: PatchMap, reach: float) -> Any:
    """One map."""
    values = table.values.numpy()
    canvas.label_axis(axes, table.rows, "y")
    canvas.label_axis(axes, table.columns, "x")
    axes.set_title(table.title, fontsize=10)
    axes.set_ylabel(ROW_NAMES.get(table.part, "layer"))
    axes.set_xlabel(_column_name(table))
    image = canvas.draw(axes, values, -reach, reach, True)
    if len(table.columns) <= MOST_NUMBERS:
        canvas.write_numbers(axes, np.round(values, 2) + 0.0)  # no minus before a zero
    return image


def _column_name(table: PatchMap) -> str:
    return (
        "head, at all tokens" if table.part.endswith("heads") else "token (clean/corrupt where they differ)"
    )


def _title(found: Patching) -> str:
    return (
        f"Clean activations in the corrupt run: logit of {found.answer} less that of {found.wrong} at {found.position}\n"
        f"clean {found.clean_difference:.2f}, corrupt {found.corrupt_difference:.2f}"
    )
