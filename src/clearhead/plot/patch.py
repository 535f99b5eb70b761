"""Pictures of activation patching: a heat map for each part of each stack, on one scale."""

from typing import Any

import numpy as np

from clearhead.inside.patch import Patching, PatchMap
from clearhead.plot import canvas
from clearhead.plot.canvas import Axes, Figure

PARTS = "residual", "attention", "cross", "feedforward", "heads", "cross heads"  # from the top
COLUMN, ROW = 0.3, 0.24  # inches
MOST_NUMBERS = 16  # columns up to which values are written into the cells
REACH = 1.0  # the scale reaches to the clean run at least; beyond twice that, colours stay as they are
WIDEST = 24.0


def draw_patching(found: Patching) -> Figure:
    """Draw every map of a patching: parts one below the other, two stacks side by side."""
    tables = {(table.part, table.stack): table for table in found.maps}
    rows, columns = dict.fromkeys(PARTS, 0), dict.fromkeys((table.stack for table in found.maps), 0)
    for table in found.maps:
        rows[table.part] = max(rows[table.part], len(table.rows))
        columns[table.stack] = max(columns[table.stack], len(table.columns))
    parts, stacks = [part for part in PARTS if rows[part]], list(columns)
    heights = [ROW * rows[part] + 1.5 for part in parts]
    widths = [max(COLUMN * count + 1.5, 4.5) for count in columns.values()]
    figure = canvas.new(min(sum(widths) + 1.5, WIDEST), sum(heights) + 0.9)
    grid = figure.subplots(len(parts), len(stacks), squeeze=False, height_ratios=heights, width_ratios=widths)
    largest = max(float(np.nanmax(np.abs(table.values.numpy()))) for table in found.maps)
    reach = min(max(largest, REACH), 2 * REACH)
    for (row, column), axes in np.ndenumerate(grid):
        if (parts[row], stacks[column]) in tables:
            image = _draw(axes, tables[parts[row], stacks[column]], reach)
        else:
            axes.set_axis_off()
    logits = f"logit of {found.answer} less that of {found.wrong} at {found.position}"
    values = f"clean {found.clean_difference:.2f}, corrupt {found.corrupt_difference:.2f}"
    figure.suptitle(canvas.plain(f"Clean activations in the corrupt run: {logits}\n{values}"), fontsize=11)
    ends = "both" if largest > reach else "neither"
    scale = "share of the answer brought back: 0 corrupt, 1 clean"
    figure.colorbar(image, ax=grid.ravel().tolist(), label=scale, fraction=0.04, aspect=40, extend=ends)
    return figure


def _draw(axes: Axes, table: PatchMap, reach: float) -> Any:
    values = table.values.numpy()
    by_head = table.part.endswith("heads")
    column_name = "head, at all tokens" if by_head else "token (clean/corrupt where they differ)"
    row_name = "before layer" if table.part == "residual" else "layer"
    canvas.label_axes(axes, table.rows, table.columns)
    canvas.name(axes, table.title, column_name, row_name, size=10)
    if len(table.columns) <= MOST_NUMBERS:
        canvas.write_numbers(axes, np.round(values, 2) + 0.0)  # no minus before a zero
    return canvas.draw(axes, values, -reach, reach, True)
