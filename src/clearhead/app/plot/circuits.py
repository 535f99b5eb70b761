"""Pictures of circuits: the parts by layer with the edges between them, and what edges carry."""

import math
from itertools import groupby

from clearhead.app import plot as canvas
from clearhead.app.plot import BLUE, RED, Axes, Figure
from clearhead.inside.circuit import Circuit

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
    for height, (_, group) in enumerate(groupby(ordered, key=_row)):
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


def _row(part: str) -> str:
    """Return what parts of one row of the drawing have in common: the heads of a layer."""
    return part if ":" in part or part.endswith(("embedding", "logits")) else part.rpartition(".")[0]
