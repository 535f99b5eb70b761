"""Pictures of a prompt: attention of a head, a layer and a model, rollout, the lens, contributions, patching.

Attention weights are drawn on one scale everywhere, from 0 to 1 with the square root of the weight as colour:
most weights are small, and would otherwise all look like zero. Rollout alone goes up to its largest share.
"""

import math
from typing import Any, Literal

import numpy as np
import torch

from clearhead.app import plot as canvas
from clearhead.app.plot import Axes, Figure
from clearhead.inside.attention import AttentionMaps, Axis, HeadPattern, LayerMap, Rollout, in_cells
from clearhead.inside.lens import Contributions, Lens
from clearhead.inside.patch import Patching, PatchMap
from clearhead.inside.results import Array

WEIGHT = "attention weight (root scale)"
SHARE = "share of the token (root scale)"
KINDS = {"self": "self-attention", "encoder": "encoder self-attention", "cross": "cross-attention"}
THUMBNAIL = 48  # cells along a side
SMALL_LABELS = 40  # labels that are still legible next to a small picture
PER_PANEL = 20  # columns side by side; more go into further panels below
MOST = 240  # columns of one picture: the last ones
LETTERS = 9  # of a token that fit into a cell
CELL = 0.62, 0.26  # inches
BARS = 16
MOST_NUMBERS = 24  # layers and heads up to which numbers are written into the cells
PARTS = "residual", "attention", "cross", "feedforward", "heads", "cross heads"  # from the top
COLUMN, ROW = 0.3, 0.24  # inches, of a patched token and layer
MOST_PATCHED = 16  # columns up to which values are written into the cells
REACH = 1.0  # the scale reaches to the clean run at least; beyond twice that, colours stay as they are
WIDEST = 24.0


# Attention --------------------------------------------------------------------------------------------------


def draw_head(one: HeadPattern) -> Figure:
    """Draw a table of weights, queries down and keys across."""
    title = f"head {one.head}, {KINDS[one.head.kind]}, entropy {one.entropy:.2f} bits"
    title += _cells(max(one.queries.size, one.keys.size))
    return canvas.heatmap(
        one.pattern, one.queries.labels, one.keys.labels, title, WEIGHT, "query", "key", 0, 1, root=True
    )


def draw_rollout(rollout: Rollout) -> Figure:
    """Draw what each place is made of after the last layer. Shares of many tokens stay far below 1."""
    title = f"rollout over {len(rollout.flow)} layers, {KINDS[rollout.kind]}{_cells(rollout.tokens.size)}"
    labels, most = rollout.tokens.labels, float(rollout.last.max())
    return canvas.heatmap(rollout.last, labels, labels, title, SHARE, "place", "token", 0, most, root=True)


def draw_layer(layer: LayerMap) -> Figure:
    """Draw the heads of one layer side by side, with one scale."""
    count = max(len(layer.pattern), 1)
    columns = min(4, count)
    rows = math.ceil(count / columns)
    tokens = max(len(layer.queries.labels), len(layer.keys.labels))
    side = min(max(0.13 * tokens, 2.2), 4.6)
    title = f"{KINDS[layer.kind]}, layer {layer.layer}{_cells(layer.aggregated)}"
    figure, grid = canvas.panels(columns * side + 1.6, rows * side + 0.9, title, rows, columns)
    for axes in grid.flat[len(layer.pattern) :]:
        axes.set_axis_off()
    for number, (axes, pattern) in enumerate(zip(grid.flat, layer.pattern)):
        image = canvas.draw(axes, np.asarray(pattern, dtype=float), 0, 1, root=True)
        axes.set_title(f"head {layer.name}.{number}", fontsize=9)
        _label(axes, layer.queries if number % columns == 0 else None, "y", side)
        _label(axes, layer.keys if number + columns >= count else None, "x", side)
    figure.supylabel("query", fontsize=9)
    figure.supxlabel("key", fontsize=9)
    if len(layer.pattern):
        figure.colorbar(image, ax=grid, label=WEIGHT, fraction=0.03)
    return figure


def draw_model(maps: AttentionMaps, kind: str = "self") -> Figure:
    """Draw all heads of one kind: a row per layer, a thumbnail per head, with one scale."""
    layers = maps.of(kind)
    heads = max(len(each.pattern) for each in layers)
    side = min(1.1, 16 / max(heads, 1), 18 / len(layers))
    figure = canvas.new(max(heads * side + 2.2, 5.0), max(len(layers) * side + 1.6, 3.0))
    axes = figure.add_subplot()
    mosaic, height, width = _mosaic(layers, heads)
    image = canvas.draw(axes, mosaic.astype(float), 0, 1, root=True)
    axes.set_yticks(_centres(len(layers), height), [str(each.layer) for each in layers], fontsize=8)
    axes.set_xticks(_centres(heads, width), [str(head) for head in range(heads)], fontsize=8)
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    tokens = f"{_tokens(layers[0].queries)} queries down, {_tokens(layers[0].keys)} keys across"
    canvas.name(axes, f"{KINDS[kind]}, all heads\n{tokens}", "head", "layer", size=10)
    figure.colorbar(image, ax=axes, label=WEIGHT, fraction=0.03)
    return figure


def draw_entropy(maps: AttentionMaps, kind: str = "self") -> Figure:
    """Draw how spread each head's attention is: a row per layer, a column per head, with numbers."""
    table = maps.entropy(kind)
    rows, columns = [str(each.layer) for each in maps.of(kind)], [str(head) for head in range(table.shape[1])]
    title, scale = f"{KINDS[kind]}: entropy of each head", "entropy in bits, mean over queries"
    return canvas.heatmap(table, rows, columns, title, scale, "layer", "head", low=0, numbers=True)


def _cells(size: int) -> str:
    return f" ({size} tokens per cell)" if size > 1 else ""


def _tokens(axis: Axis) -> str:
    return f"{len(axis.labels)}" if axis.size == 1 else f"{len(axis.labels)} cells of {axis.size}"


def _label(axes: Axes, axis: Axis | None, side: Literal["x", "y"], inches: float) -> None:
    """Write labels next to a small picture, as large as there is room for; None: write nothing."""
    every = canvas.label_axis(axes, axis.labels if axis is not None else (), side, SMALL_LABELS)
    if axis is not None:
        shown = math.ceil(len(axis.labels) / every)
        axes.tick_params(axis=side, labelsize=min(8.0, 72 * inches / shown * 0.8))


def _centres(count: int, size: int) -> list[float]:
    """Return the middles of thumbnails of this size, a gap included."""
    return [number * size + (size - 1) / 2 - 0.5 for number in range(count)]


def _mosaic(layers: list[LayerMap], heads: int) -> tuple[Array, int, int]:
    """Return a table of every head's pattern, with gaps, and the height and width of one."""
    T, S = layers[0].pattern.shape[1:]
    down, across = math.ceil(T / THUMBNAIL), math.ceil(S / THUMBNAIL)
    height, width = math.ceil(T / down) + 1, math.ceil(S / across) + 1
    table = np.full((len(layers), height, heads, width), np.nan, dtype=np.float32)
    for row, each in enumerate(layers):
        small = in_cells(torch.from_numpy(np.array(each.pattern)), down, across)
        table[row, :-1, : len(small), :-1] = np.swapaxes(np.asarray(small), 0, 1)
    return table.reshape(len(layers) * height, heads * width)[:-1, :-1], height, width


# Lens and patching ------------------------------------------------------------------------------------------


def draw_lens(lens: Lens, most: int = MOST) -> Figure:
    """Draw layers by columns: the likeliest choice in each cell, with its probability as the colour.

    The last layer is on top. The figure grows with the text: panels of up to 20 columns, one below the other,
    the last `most` columns in all.
    """
    columns = list(range(len(lens.columns)))[-most:]
    size = math.ceil(len(columns) / math.ceil(len(columns) / PER_PANEL))  # panels of about equal length
    panels = [columns[start : start + size] for start in range(0, len(columns), size)]
    across, down = max(map(len, panels)), len(lens.layers)
    title = "What the model would say after each layer"
    if len(columns) < len(lens.columns):
        title += f", the last {len(columns)} of {len(lens.columns)} columns"
    width, height = max(CELL[0] * across + 2.6, 6.5), len(panels) * (CELL[1] * down + 1.1) + 0.7
    figure, grid = canvas.panels(width, height, title, len(panels))
    for axes, panel in zip(grid[:, 0], panels):
        image = _lens_panel(axes, lens, panel, across)
    label = f"probability of the {lens.kind} in the cell"
    figure.colorbar(image, ax=list(grid.flat), label=label, fraction=0.03, pad=0.01, aspect=30)
    return figure


def _lens_panel(axes: Axes, lens: Lens, panel: list[int], across: int) -> Any:
    """Draw one run of columns; a short last panel keeps the width of its cells."""
    layers = list(range(len(lens.layers)))[::-1]
    image = canvas.draw(
        axes,
        lens.top_probabilities[:, :, 0].numpy()[layers][:, panel],
        low=0,
        high=1,
        rows=[lens.layers[layer] for layer in layers],
        columns=[lens.columns[column] for column in panel],
    )
    for row, layer in enumerate(layers):
        for place, column in enumerate(panel):
            colour = image.cmap(image.norm(float(lens.top_probabilities[layer, column, 0])))
            shown = canvas.plain(canvas.shortened(lens.top_names[layer][column][0], LETTERS))
            canvas.write(axes, row, place, shown, color=canvas.ink(colour))
    axes.set_xlim(-0.5, across - 0.5)
    if across > 1:
        axes.set_xlabel("end of the span" if lens.kind == "place" else "token read")
    axes.set_frame_on(False)
    return image


def draw_contributions(terms: Contributions) -> Figure:
    """Draw layers by heads, with the feed-forward next to them, and the largest terms as bars."""
    tables = {kind: terms.heads(kind).numpy() for kind in ("self", "cross")}
    tables = {kind: table for kind, table in tables.items() if table.size}
    forward = [[term.value] for term in terms.terms if term.kind == "feedforward"]
    tables["self"] = np.hstack([tables["self"], forward])
    layers, largest = max(len(table) for table in tables.values()), terms.largest(BARS)
    widths = [max(0.36 * table.shape[1] + 1.0, 2.6) for table in tables.values()]
    figure = canvas.new(sum(widths) + 5.5, max(0.3 * layers + 1.8, 0.22 * len(largest) + 1.6, 3.4))
    *grid, last = figure.subplots(1, len(tables) + 1, squeeze=False, width_ratios=[*widths, 3.6])[0]
    reach = max(float(np.nanmax(np.abs(table))) for table in tables.values()) or 1.0
    for axes, (kind, table) in zip(grid, tables.items()):
        names = [str(head) for head in range(table.shape[1])]
        what = "head of the cross-attention"
        if kind == "self":
            names[-1], what = "ff", "head (ff: the feed-forward)"
        image = canvas.draw(
            axes,
            table,
            low=-reach,
            high=reach,
            diverging=True,
            rows=[str(layer) for layer in range(layers)],
            columns=names,
            numbers="{:z.1f}" if max(layers, table.shape[1]) <= MOST_NUMBERS else "",  # z: no minus before 0
        )
        canvas.name(axes, "", what, "layer")
    figure.colorbar(image, ax=grid, label="added to the logit", fraction=0.046)
    names = [f"head {term.name}" if term.head is not None else term.name for term in largest]
    canvas.signed_bars(last, [term.value for term in largest], names, above=canvas.RED, below=canvas.BLUE)
    last.set_xlabel(f"added to the logit: the {len(largest)} largest of {len(terms.terms)}")
    cap = " before the soft cap" if terms.capped is not None else ""
    where = f"{terms.columns[terms.column]}: {terms.logit:.3f}{cap}"
    title = f"Direct contributions to the {terms.logit_name} at {where}"
    figure.suptitle(canvas.plain(title), fontsize=11)
    return figure


def draw_patching(patching: Patching) -> Figure:
    """Draw every map of a patching: parts one below the other, two stacks side by side."""
    tables = {(table.part, table.stack): table for table in patching.maps}
    parts = [part for part in PARTS if any(table.part == part for table in patching.maps)]
    stacks = list(dict.fromkeys(table.stack for table in patching.maps))
    rows = [max(len(table.rows) for table in patching.maps if table.part == part) for part in parts]
    columns = [max(len(table.columns) for table in patching.maps if table.stack == stack) for stack in stacks]
    heights = [ROW * count + 1.5 for count in rows]
    widths = [max(COLUMN * count + 1.5, 4.5) for count in columns]
    figure = canvas.new(min(sum(widths) + 1.5, WIDEST), sum(heights) + 0.9)
    grid = figure.subplots(len(parts), len(stacks), squeeze=False, height_ratios=heights, width_ratios=widths)
    largest = max(float(np.nanmax(np.abs(table.values.numpy()))) for table in patching.maps)
    reach = min(max(largest, REACH), 2 * REACH)
    for (row, column), axes in np.ndenumerate(grid):
        if (parts[row], stacks[column]) in tables:
            image = _patch_map(axes, tables[parts[row], stacks[column]], reach)
        else:
            axes.set_axis_off()
    logits = f"logit of {patching.answer} less that of {patching.wrong} at {patching.position}"
    values = f"clean {patching.clean_difference:.2f}, corrupt {patching.corrupt_difference:.2f}"
    figure.suptitle(canvas.plain(f"Clean activations in the corrupt run: {logits}\n{values}"), fontsize=11)
    figure.colorbar(
        image,
        ax=grid.ravel().tolist(),
        label="share of the answer brought back: 0 corrupt, 1 clean",
        fraction=0.04,
        aspect=40,
        extend="both" if largest > reach else "neither",
    )
    return figure


def _patch_map(axes: Axes, table: PatchMap, reach: float) -> Any:
    by_head = table.part.endswith("heads")
    canvas.name(
        axes,
        table.title,
        x_name="head, at all tokens" if by_head else "token (clean/corrupt where they differ)",
        y_name="before layer" if table.part == "residual" else "layer",
        size=10,
    )
    return canvas.draw(
        axes,
        table.values.numpy(),
        low=-reach,
        high=reach,
        diverging=True,
        rows=table.rows,
        columns=table.columns,
        numbers="{:z.2f}" if len(table.columns) <= MOST_PATCHED else "",  # z: no minus before a zero
    )
