"""The picture of an attribution graph: layers from bottom to top, tokens from left to right."""

from __future__ import annotations

from collections import defaultdict

from clearhead.app import plot as canvas
from clearhead.app.plot import Figure
from clearhead.inside.direct_effects import Node
from clearhead.inside.graph import Graph

FEEDFORWARD = ("feedforward", "feature", "neuron", "error", "skip")
WIDTH = {"value": 2.6, "key": 1.8, "query": 1.8}
COLOURS = {
    "embedding": "#8c8c8c", "head": "#d08770", "feedforward": "#5e81ac", "feature": "#4c956c",
    "neuron": "#81a1c1", "error": "#bbbbbb", "skip": "#b48ead", "group": "#ebcb8b", "logit": "#2e3440",
}  # fmt: skip


def draw_graph(found: Graph) -> Figure:
    """Draw nodes as dots by influence, edges by value: blue adds, red takes; dashed: by keys and queries."""
    used, rows = _columns(found), list(dict.fromkeys(map(_row, found.nodes)))
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


def _row(node: Node) -> tuple[str, int | None, bool]:
    return node.stack, node.layer, node.kind in FEEDFORWARD


def _places(
    found: Graph, columns: list[tuple[str, int | None]], rows: list[tuple[str, int | None, bool]]
) -> tuple[dict[str, tuple[float, float]], list[float]]:
    """Return where each node is drawn, and the middle of each token's column, as wide as its fullest row."""
    together = defaultdict[tuple[int, int], list[Node]](list)
    for node in found.nodes:
        together[columns.index(_column(node)), rows.index(_row(node))].append(node)
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
