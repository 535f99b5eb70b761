"""Pictures of attention: one head, the heads of a layer, all heads of a model, their entropies, rollout.

Weights are drawn on one scale everywhere, from 0 to 1 with the root of the weight as colour: most weights are small, and
would otherwise all look like nothing. Rollout alone goes up to its largest share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from clearhead.inside.attention import in_cells
from clearhead.inside.attention_maps import AttentionMaps, Axis, HeadPattern, LayerMap, Rollout
from clearhead.inside.results import Array
from clearhead.plot.canvas import draw, heatmap, label_axis, new

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WEIGHT = "attention weight (root scale)"
SHARE = "share of the token (root scale)"
KINDS = {"self": "self-attention", "encoder": "encoder self-attention", "cross": "cross-attention"}
THUMBNAIL = 48  # cells along a side
SMALL_LABELS = 40  # labels that are still legible beside a small picture


def draw_head(one: HeadPattern) -> Figure:
    """A table of weights, queries down and keys across."""
    title = f"head {one.head}, {KINDS[one.head.kind]}, entropy {one.entropy:.2f} bits"
    return _weights(one.pattern, one.queries, one.keys, title, WEIGHT)


def draw_rollout(rollout: Rollout) -> Figure:
    """What each place is made of after the last layer."""
    title = f"rollout over {len(rollout.flow)} layers, {KINDS[rollout.kind]}"
    figure = _weights(rollout.last, rollout.tokens, rollout.tokens, title, SHARE, "place", "token")
    figure.axes[0].images[0].set_norm(
        _scale(float(rollout.last.max()))
    )  # shares of many tokens: none comes near 1
    return figure


def draw_layer(layer: LayerMap) -> Figure:
    """The heads of one layer side by side, with one scale."""
    count = max(len(layer.pattern), 1)
    columns = min(4, count)
    rows = -(-count // columns)
    tokens = max(len(layer.queries.labels), len(layer.keys.labels))
    side = min(max(0.13 * tokens, 2.2), 4.6)
    figure = new(columns * side + 1.6, rows * side + 0.9)
    grid = figure.subplots(rows, columns, squeeze=False)
    image = None
    for number, axes in enumerate(grid.flat):
        if number >= len(layer.pattern):
            axes.set_axis_off()
            continue
        image = draw(axes, np.asarray(layer.pattern[number], dtype=float), 0, 1, diverging=False)
        image.set_norm(_scale())
        axes.set_title(f"head {layer.name}.{number}", fontsize=9)
        if number % columns == 0:
            _label(axes, layer.queries, "y", side)
        else:
            axes.set_yticks([])
        if number + columns >= count:
            _label(axes, layer.keys, "x", side)
        else:
            axes.set_xticks([])
    figure.suptitle(f"{KINDS[layer.kind]}, layer {layer.layer}{_cells(layer.aggregated)}", fontsize=11)
    figure.supylabel("query", fontsize=9)
    figure.supxlabel("key", fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=grid, label=WEIGHT, fraction=0.03)
    return figure


def draw_model(maps: AttentionMaps, kind: str = "self") -> Figure:
    """All heads of one kind: a row per layer, a thumbnail per head, with one scale."""
    layers = maps.of(kind)
    heads = max(len(each.pattern) for each in layers)
    side = min(1.1, 16 / max(heads, 1), 18 / len(layers))
    figure = new(max(heads * side + 2.2, 5.0), max(len(layers) * side + 1.6, 3.0))
    axes = figure.add_subplot()
    mosaic, height, width = _mosaic(layers, heads)
    image = draw(axes, mosaic, 0, 1, diverging=False)
    image.set_norm(_scale())
    axes.set_yticks(
        [row * height + (height - 1) / 2 - 0.5 for row in range(len(layers))],
        [str(each.layer) for each in layers],
        fontsize=8,
    )
    axes.set_xticks(
        [column * width + (width - 1) / 2 - 0.5 for column in range(heads)],
        [str(head) for head in range(heads)],
        fontsize=8,
    )
    axes.tick_params(length=0)
    for edge in axes.spines.values():
        edge.set_visible(False)
    axes.set_ylabel("layer")
    axes.set_xlabel("head")
    tokens = f"{_tokens(layers[0].queries)} queries down, {_tokens(layers[0].keys)} keys across"
    axes.set_title(f"{KINDS[kind]}, all heads\n{tokens}", fontsize=10)
    figure.colorbar(image, ax=axes, label=WEIGHT, fraction=0.03)
    return figure


def draw_entropy(maps: AttentionMaps, kind: str = "self") -> Figure:
    """How spread each head's attention is: a row per layer, a column per head, with numbers."""
    table = maps.entropy(kind)
    rows, columns = [str(each.layer) for each in maps.of(kind)], [str(head) for head in range(table.shape[1])]
    title = f"{KINDS[kind]}: entropy of each head"
    return heatmap(
        table,
        rows,
        columns,
        title,
        "entropy in bits, mean over queries",
        "layer",
        "head",
        low=0,
        numbers=True,
    )


def _weights(
    table: Array,
    rows: Axis,
    columns: Axis,
    title: str,
    scale: str,
    row_name: str = "query",
    column_name: str = "key",
) -> Figure:
    """One table of weights on the scale that all pictures share."""
    title += _cells(max(rows.size, columns.size))
    figure = heatmap(table, rows.labels, columns.labels, title, scale, row_name, column_name, low=0, high=1)
    figure.axes[0].images[0].set_norm(_scale())
    return figure


def _scale(high: float = 1.0) -> Any:
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=high)


def _cells(size: int) -> str:
    return f" ({size} tokens per cell)" if size > 1 else ""


def _tokens(axis: Axis) -> str:
    return f"{len(axis.labels)}" if axis.size == 1 else f"{len(axis.labels)} cells of {axis.size}"


def _label(axes: Any, axis: Axis, side: str, inches: float) -> None:
    """Labels beside a small picture, as large as there is room for; of many, every n-th."""
    every = -(-len(axis.labels) // SMALL_LABELS)
    label_axis(axes, axis.labels[::every], side)
    ticks = [place * every for place in range(len(axis.labels[::every]))]
    (axes.yaxis if side == "y" else axes.xaxis).set_ticks(ticks)
    axes.tick_params(axis=side, labelsize=min(8.0, 72 * inches / len(ticks) * 0.8))


def _mosaic(layers: list[LayerMap], heads: int) -> tuple[Array, int, int]:
    """Every head's pattern in one table with gaps between them, each in few enough cells; and the height and width of one."""
    T, S = layers[0].pattern.shape[1:]
    down, across = -(-T // THUMBNAIL), -(-S // THUMBNAIL)
    height, width = -(-T // down) + 1, -(-S // across) + 1
    table = np.full((len(layers) * height - 1, heads * width - 1), np.nan, dtype=np.float32)
    for row, each in enumerate(layers):
        small = in_cells(torch.from_numpy(np.array(each.pattern)), down, across)
        for column, pattern in enumerate(small):
            table[row * height : row * height + height - 1, column * width : column * width + width - 1] = (
                pattern
            )
    return table, height, width
