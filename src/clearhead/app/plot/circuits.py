"""Pictures of circuits, attribution graphs and sparse features.

A circuit is drawn as parts by layer, with the edges between them; a graph in layers from bottom to top and
tokens from left to right; features as their training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import groupby

import numpy as np

from clearhead.app import plot as canvas
from clearhead.app.plot import BLUE, RED, Axes, Figure
from clearhead.inside.circuit import Circuit
from clearhead.inside.direct_effects import Node
from clearhead.inside.features.training import TrainedFeatures
from clearhead.inside.graph import Graph

FEEDFORWARD = ("feedforward", "feature", "neuron", "error", "skip")
WIDTH = {"value": 2.6, "key": 1.8, "query": 1.8}
COLOURS = {
    "embedding": "#8c8c8c", "head": "#d08770", "feedforward": "#5e81ac", "feature": "#4c956c",
    "neuron": "#81a1c1", "error": "#bbbbbb", "skip": "#b48ead", "group": "#ebcb8b", "logit": "#2e3440",
}  # fmt: skip


def draw_graph(found: Graph) -> Figure:
    """Draw nodes as dots by influence, edges by value: blue adds, red takes; dashed: by keys and queries."""
    used, rows = _columns(found), list(dict.fromkeys(map(_graph_row, found.nodes)))
    places, middles = _places(found, used, rows)
    figure = canvas.new(max(6.0, 0.75 * middles[-1] + 3.0), max(4.0, 0.75 * len(rows) + 1.5))
    axes = figure.subplots()
    most = max((edge.influence for edge in found.edges), default=1.0) or 1.0
    for edge in reversed(found.edges):
        (x0, y0), (x1, y1) = places[edge.source], places[edge.target]
        share = edge.influence / most
        axes.annotate(
            "", (x1, y1), (x0, y0), arrowprops={
                "arrowstyle": "-", "color": canvas.BLUE if edge.value > 0 else canvas.RED,
                "linewidth": 0.3 + WIDTH[edge.kind] * share**0.5, "alpha": 0.25 + 0.65 * share**0.5,
                "linestyle": "solid" if edge.kind == "value" else "dashed",
                "connectionstyle": f"arc3,rad={0.25 if x0 == x1 else 0.0}",
            },
        )  # fmt: skip
    for node in found.nodes:
        x, y = places[node.id]
        size = 20 + 120 * min(node.influence, 1.0) ** 0.5
        axes.scatter([x], [y], s=size, color=COLOURS[node.kind], zorder=3)
        name = node.label if node.kind == "logit" else node.id.partition("@")[0]
        words = canvas.plain(canvas.shortened(name, 22))
        axes.annotate(words, (x, y), (4, 4), textcoords="offset points", fontsize=6.5, zorder=4)
    lists = {"encoder.": found.source_tokens, "": found.tokens}
    names = ["" if at is None else lists[stack][at] for stack, at in used]
    labels = [canvas.plain(canvas.shortened(name)) for name in names]
    axes.set_xticks(middles, labels, rotation=40, ha="right", fontsize=8)
    axes.set_yticks([])
    axes.set_ylabel("earlier to later parts")
    axes.margins(x=0.06)
    axes.set_frame_on(False)
    title = f"The {found.logit_name}: {found.logit:.2f}; {found.kept_nodes:.0%} of the influence"
    axes.set_title(canvas.plain(f"{title}; blue adds, red takes"), fontsize=10)
    return figure


def _column(node: Node) -> tuple[str, int | None]:
    return node.stack, node.position


def _columns(found: Graph) -> list[tuple[str, int | None]]:
    """Return the tokens that have nodes, those of the encoder first, as stack and position."""
    columns = {_column(node) for node in found.nodes}
    return sorted(columns, key=lambda column: (column[0] == "", -1 if column[1] is None else column[1]))


def _graph_row(node: Node) -> tuple[str, int | None, bool]:
    return node.stack, node.layer, node.kind in FEEDFORWARD


def _places(
    found: Graph, columns: list[tuple[str, int | None]], rows: list[tuple[str, int | None, bool]]
) -> tuple[dict[str, tuple[float, float]], list[float]]:
    """Return where each node is drawn, and the middle of each token's column, as wide as its fullest row."""
    together = defaultdict[tuple[int, int], list[Node]](list)
    for node in found.nodes:
        together[columns.index(_column(node)), rows.index(_graph_row(node))].append(node)
    wide = [
        max(len(nodes) for (at, _), nodes in together.items() if at == column)
        for column in range(len(columns))
    ]
    middles = [sum(wide[:column]) + size / 2 + 0.5 * column for column, size in enumerate(wide)]
    places = {
        node.id: (middles[column] + number - (len(nodes) - 1) / 2, row + 0.15 * (number % 3))
        for (column, row), nodes in together.items()
        for number, node in enumerate(nodes)
    }
    return places, middles


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


MOST = 60  # edges of a drawing: the strongest
ROLES = {"q": "queries", "k": "keys", "v": "values"}


def draw_circuit(found: Circuit) -> Figure:
    """Draw the strongest edges from the embedding (below) to the output, and the curve of faithfulness."""
    figure, grid = canvas.panels(12, 6.5, f"A circuit of {len(found.edges)} edges of {found.n_edges:,}", 1, 2)
    _draw_edges(grid[0, 0], found)
    axes = grid[0, 1]
    points = [point for point in found.curve if point.edges]
    sizes = [point.edges for point in points]
    for name, colour, style in (
        ("faithfulness", BLUE, "-"),
        ("completeness", RED, "-"),
        ("random", "grey", "--"),
    ):
        label = "as many edges at random" if name == "random" else name
        axes.plot(sizes, [getattr(point, name) for point in points], style, color=colour, label=label)
    axes.axvline(max(len(found.edges), 1), color="black", linewidth=0.7, linestyle=":")
    axes.set_xscale("log")
    axes.set_xticks(sizes, list(map(str, sizes)), fontsize=8)
    axes.minorticks_off()
    axes.set_ylim(-0.3, 1.5)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    canvas.name(axes, "What edges carry: 0 as with none, 1 as the model", "edges", "share of the metric", 9)
    return figure


def _draw_edges(axes: Axes, found: Circuit) -> None:
    """Draw each part at the height of its place in the forward pass, and a line for every edge."""
    edges = found.edges[:MOST]
    order = [] if found.graph is None else [*found.graph.writers, "logits"]
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
