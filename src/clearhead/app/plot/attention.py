"""Pictures of attention: one head, the heads of a layer, all heads of a model, their entropies, rollout.

Weights are drawn on one scale everywhere, from 0 to 1 with the square root of the weight as colour: most
weights are small, and would otherwise all look like zero. Rollout alone goes up to its largest share.
"""

import math
from typing import Literal

import numpy as np
import torch

from clearhead.app.plot.canvas import Axes, Figure, draw, heatmap, label_axis, name, new
from clearhead.inside.attention import AttentionMaps, Axis, HeadPattern, LayerMap, Rollout, in_cells
from clearhead.inside.results import Array

WEIGHT = "attention weight (root scale)"
SHARE = "share of the token (root scale)"
KINDS = {"self": "self-attention", "encoder": "encoder self-attention", "cross": "cross-attention"}
THUMBNAIL = 48  # cells along a side
SMALL_LABELS = 40  # labels that are still legible beside a small picture


def draw_head(one: HeadPattern) -> Figure:
    """Draw a table of weights, queries down and keys across."""
    title = f"head {one.head}, {KINDS[one.head.kind]}, entropy {one.entropy:.2f} bits"
    title += _cells(max(one.queries.size, one.keys.size))
    return heatmap(
        one.pattern, one.queries.labels, one.keys.labels, title, WEIGHT, "query", "key", 0, 1, root=True
    )


def draw_rollout(rollout: Rollout) -> Figure:
    """Draw what each place is made of after the last layer. Shares of many tokens stay far below 1."""
    title = f"rollout over {len(rollout.flow)} layers, {KINDS[rollout.kind]}{_cells(rollout.tokens.size)}"
    labels, most = rollout.tokens.labels, float(rollout.last.max())
    return heatmap(rollout.last, labels, labels, title, SHARE, "place", "token", 0, most, root=True)


def draw_layer(layer: LayerMap) -> Figure:
    """Draw the heads of one layer side by side, with one scale."""
    count = max(len(layer.pattern), 1)
    columns = min(4, count)
    rows = math.ceil(count / columns)
    tokens = max(len(layer.queries.labels), len(layer.keys.labels))
    side = min(max(0.13 * tokens, 2.2), 4.6)
    figure = new(columns * side + 1.6, rows * side + 0.9)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(layer.pattern) :]:
        axes.set_axis_off()
    for number, (axes, pattern) in enumerate(zip(grid.flat, layer.pattern)):
        image = draw(axes, np.asarray(pattern, dtype=float), 0, 1, root=True)
        axes.set_title(f"head {layer.name}.{number}", fontsize=9)
        _label(axes, layer.queries if number % columns == 0 else None, "y", side)
        _label(axes, layer.keys if number + columns >= count else None, "x", side)
    figure.suptitle(f"{KINDS[layer.kind]}, layer {layer.layer}{_cells(layer.aggregated)}", fontsize=11)
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
    figure = new(max(heads * side + 2.2, 5.0), max(len(layers) * side + 1.6, 3.0))
    axes = figure.add_subplot()
    mosaic, height, width = _mosaic(layers, heads)
    image = draw(axes, mosaic.astype(float), 0, 1, root=True)
    axes.set_yticks(_centres(len(layers), height), [str(each.layer) for each in layers], fontsize=8)
    axes.set_xticks(_centres(heads, width), [str(head) for head in range(heads)], fontsize=8)
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    tokens = f"{_tokens(layers[0].queries)} queries down, {_tokens(layers[0].keys)} keys across"
    name(axes, f"{KINDS[kind]}, all heads\n{tokens}", "head", "layer", size=10)
    figure.colorbar(image, ax=axes, label=WEIGHT, fraction=0.03)
    return figure


def draw_entropy(maps: AttentionMaps, kind: str = "self") -> Figure:
    """Draw how spread each head's attention is: a row per layer, a column per head, with numbers."""
    table = maps.entropy(kind)
    rows, columns = [str(each.layer) for each in maps.of(kind)], [str(head) for head in range(table.shape[1])]
    title, scale = f"{KINDS[kind]}: entropy of each head", "entropy in bits, mean over queries"
    return heatmap(table, rows, columns, title, scale, "layer", "head", low=0, numbers=True)


def _cells(size: int) -> str:
    return f" ({size} tokens per cell)" if size > 1 else ""


def _tokens(axis: Axis) -> str:
    return f"{len(axis.labels)}" if axis.size == 1 else f"{len(axis.labels)} cells of {axis.size}"


def _label(axes: Axes, axis: Axis | None, side: Literal["x", "y"], inches: float) -> None:
    """Write labels beside a small picture, as large as there is room for; None: write nothing."""
    every = label_axis(axes, axis.labels if axis is not None else (), side, SMALL_LABELS)
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
