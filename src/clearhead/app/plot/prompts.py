"""Pictures of a prompt: attention, rollout, the lens, contributions, patching, circuits, graphs, features.

Attention weights are drawn on one scale, from 0 to 1 with the square root of the weight as colour:
most weights are small, and would otherwise all look like zero. Rollout alone goes up to its largest share.

A circuit is drawn as parts by layer, with the edges between them; a graph in layers from bottom to top and
tokens from left to right; features as their training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch

from clearhead.app import plot as canvas
from clearhead.app.plot import BLUE, RED, Axes, Figure
from clearhead.inside.attention import AttentionMaps, Axis, HeadPattern, LayerMap, Rollout, in_cells
from clearhead.inside.circuit import Circuit
from clearhead.inside.direct_effects import Node
from clearhead.inside.features.training import TrainedFeatures
from clearhead.inside.graph import Graph
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


FEEDFORWARD = ("feedforward", "feature", "neuron", "error", "skip")
WIDTH = {"value": 2.6, "key": 1.8, "query": 1.8}
COLOURS = {
    "embedding": "#8c8c8c", "head": "#d08770", "feedforward": "#5e81ac", "feature": "#4c956c",
    "neuron": "#81a1c1", "error": "#bbbbbb", "skip": "#b48ead", "group": "#ebcb8b", "logit": "#2e3440",
}  # fmt: skip


def draw_graph(graph: Graph) -> Figure:
    """Draw nodes as dots by influence, edges by value: blue adds, red takes; dashed: by keys and queries."""
    used, rows = _columns(graph), list(dict.fromkeys(map(_graph_row, graph.nodes)))
    xy, middles = _points(graph, used, rows)
    figure = canvas.new(max(6.0, 0.75 * middles[-1] + 3.0), max(4.0, 0.75 * len(rows) + 1.5))
    axes = figure.subplots()
    most = max((edge.influence for edge in graph.edges), default=1.0) or 1.0
    for edge in reversed(graph.edges):
        (x0, y0), (x1, y1) = xy[edge.source], xy[edge.target]
        share = edge.influence / most
        axes.annotate(
            "", (x1, y1), (x0, y0), arrowprops={
                "arrowstyle": "-", "color": canvas.BLUE if edge.value > 0 else canvas.RED,
                "linewidth": 0.3 + WIDTH[edge.kind] * share**0.5, "alpha": 0.25 + 0.65 * share**0.5,
                "linestyle": "solid" if edge.kind == "value" else "dashed",
                "connectionstyle": f"arc3,rad={0.25 if x0 == x1 else 0.0}",
            },
        )  # fmt: skip
    for node in graph.nodes:
        x, y = xy[node.id]
        size = 20 + 120 * min(node.influence, 1.0) ** 0.5
        axes.scatter([x], [y], s=size, color=COLOURS[node.kind], zorder=3)
        name = node.label if node.kind == "logit" else node.id.partition("@")[0]
        words = canvas.plain(canvas.shortened(name, 22))
        axes.annotate(words, (x, y), (4, 4), textcoords="offset points", fontsize=6.5, zorder=4)
    lists = {"encoder.": graph.source_tokens, "": graph.tokens}
    names = ["" if at is None else lists[stack][at] for stack, at in used]
    labels = [canvas.plain(canvas.shortened(name)) for name in names]
    axes.set_xticks(middles, labels, rotation=40, ha="right", fontsize=8)
    axes.set_yticks([])
    axes.set_ylabel("earlier to later parts")
    axes.margins(x=0.06)
    axes.set_frame_on(False)
    title = f"The {graph.logit_name}: {graph.logit:.2f}; {graph.kept_nodes:.0%} of the influence"
    axes.set_title(canvas.plain(f"{title}; blue adds, red takes"), fontsize=10)
    return figure


def _column(node: Node) -> tuple[str, int | None]:
    return node.stack, node.position


def _columns(graph: Graph) -> list[tuple[str, int | None]]:
    """Return the tokens that have nodes, those of the encoder first, as stack and position."""
    columns = {_column(node) for node in graph.nodes}
    return sorted(columns, key=lambda column: (column[0] == "", -1 if column[1] is None else column[1]))


def _graph_row(node: Node) -> tuple[str, int | None, bool]:
    return node.stack, node.layer, node.kind in FEEDFORWARD


def _points(
    graph: Graph, columns: list[tuple[str, int | None]], rows: list[tuple[str, int | None, bool]]
) -> tuple[dict[str, tuple[float, float]], list[float]]:
    """Return where each node is drawn, and the middle of each token's column, as wide as its fullest row."""
    together = defaultdict[tuple[int, int], list[Node]](list)
    for node in graph.nodes:
        together[columns.index(_column(node)), rows.index(_graph_row(node))].append(node)
    wide = [
        max(len(nodes) for (at, _), nodes in together.items() if at == column)
        for column in range(len(columns))
    ]
    middles = [sum(wide[:column]) + size / 2 + 0.5 * column for column, size in enumerate(wide)]
    xy = {
        node.id: (middles[column] + number - (len(nodes) - 1) / 2, row + 0.15 * (number % 3))
        for (column, row), nodes in together.items()
        for number, node in enumerate(nodes)
    }
    return xy, middles


RAREST = 1e-6  # of held-out tokens: features that are never active stand there


def draw_training(trained: TrainedFeatures) -> Figure:
    """Draw the error over the blocks of training, and how often features are active on held-out text."""
    report = trained.report
    recovered = (
        "" if report.loss_recovered is None else f", {report.loss_recovered:.1%} of the loss recovered"
    )
    title = f"{trained.n_features:,} features: {report.variance_explained:.1%} of the variance{recovered}"
    figure, grid = canvas.panels(10, 3.6, title, columns=2, size=12)
    left, right = grid[0]
    left.plot(range(1, len(trained.losses) + 1), trained.losses, color=canvas.BLUE)
    canvas.name(left, "Error by block of tokens", "block", "error, share of the variance", size=10)
    right.hist(np.log10(np.maximum(report.density, RAREST)), bins=40, color=canvas.BLUE)
    canvas.name(
        right, f"Density: {report.dead:.1%} never active", "log10 of the share of tokens", "features", size=10
    )
    return figure


MOST_EDGES = 60  # edges of a drawing: the strongest
ROLES = {"q": "queries", "k": "keys", "v": "values"}


def draw_circuit(circuit: Circuit) -> Figure:
    """Draw the strongest edges from the embedding (below) to the output, and the curve of faithfulness."""
    figure, grid = canvas.panels(
        12, 6.5, f"A circuit of {len(circuit.edges)} edges of {circuit.n_edges:,}", 1, 2
    )
    _draw_edges(grid[0, 0], circuit)
    axes = grid[0, 1]
    points = [point for point in circuit.curve if point.edges]
    sizes = [point.edges for point in points]
    for name, colour, style in (
        ("faithfulness", BLUE, "-"),
        ("completeness", RED, "-"),
        ("random", "grey", "--"),
    ):
        label = "as many edges at random" if name == "random" else name
        axes.plot(sizes, [getattr(point, name) for point in points], style, color=colour, label=label)
    axes.axvline(max(len(circuit.edges), 1), color="black", linewidth=0.7, linestyle=":")
    axes.set_xscale("log")
    axes.set_xticks(sizes, list(map(str, sizes)), fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(-0.3, 1.5)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    canvas.name(axes, "What edges carry: 0 as with none, 1 as the model", "edges", "share of the metric", 9)
    return figure


def _draw_edges(axes: Axes, circuit: Circuit) -> None:
    """Draw each part at the height of its place in the forward pass, and a line for every edge."""
    edges = circuit.edges[:MOST_EDGES]
    order = [] if circuit.graph is None else [*circuit.graph.writers, "logits"]
    parts = {part for edge in edges for part in (edge.writer, *_parts(edge.reader, order))}
    ordered = sorted(parts, key=lambda part: order.index(part) if part in order else len(order))
    place: dict[str, tuple[float, float]] = {}
    for height, (_, group) in enumerate(groupby(ordered, key=_circuit_row)):
        row = list(group)
        place |= {part: (number - (len(row) - 1) / 2, height) for number, part in enumerate(row)}
    most = max((abs(edge.score) for edge in edges), default=1.0) or 1.0
    for edge in reversed(edges):
        for part in _parts(edge.reader, order):
            strength = abs(edge.score) / most
            axes.annotate(
                "",
                place[part],
                place[edge.writer],
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": BLUE if edge.score > 0 else RED,
                    "alpha": 0.25 + 0.75 * math.sqrt(strength),
                    "linewidth": 0.5 + 3 * strength,
                    "connectionstyle": "arc3,rad=0.12",
                    "shrinkA": 9,
                    "shrinkB": 9,
                },
            )
            role = ROLES.get(edge.reader.rpartition(".")[2])
            if role and strength > 0.1:
                (x, y), (a, b) = place[part], place[edge.writer]
                at = x + 0.3 * (a - x), y + 0.3 * (b - y)
                box = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8}
                axes.text(*at, role, fontsize=7, color="#444444", ha="center", va="center", bbox=box)
    for part, (x, y) in place.items():
        axes.text(x, y, part, ha="center", va="center", fontsize=8, bbox={"boxstyle": "round", "fc": "white"})
    width = max((abs(x) for x, _ in place.values()), default=0) + 1
    axes.set_xlim(-width, width)
    axes.set_ylim(-0.7, max((y for _, y in place.values()), default=0) + 0.7)
    axes.set_axis_off()
    axes.set_title("blue: the answer needs the edge; red: it speaks against the answer", fontsize=9)


def _parts(reader: str, order: list[str]) -> list[str]:
    """Return the parts that a reader belongs to: the heads that share keys, or itself."""
    head, _, role = reader.rpartition(".")
    if role not in ROLES:
        return [reader]
    layer, _, heads = head.rpartition(".")
    first, _, last = heads.partition("-")
    return [f"{layer}.{number}" for number in range(int(first), int(last or first) + 1)]


def _circuit_row(part: str) -> str:
    """Return what parts of one row of the drawing have in common: the heads of a layer."""
    return part if ":" in part or part.endswith(("embedding", "logits")) else part.rpartition(".")[0]
