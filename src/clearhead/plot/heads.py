"""A picture of which head does what: layer by head, a colour for each role, with its score."""

import numpy as np

from clearhead.inside.heads import MIXED, HeadRoles
from clearhead.inside.heads.roles import ROLES
from clearhead.inside.heads.syntax import Syntax
from clearhead.plot.canvas import Axes, Figure, new, plain, write

COLOURS = {
    MIXED: "#e6e6e6", "induction": "#f28e8e", "previous": "#7db8e0", "next": "#17becf",
    "itself": "#c3a6e0", "first": "#ffbb55", "separator": "#e377c2", "same": "#5fbf5f",
    "rare": "#bcbd22", "position": "#8c9bd0", "local": "#98df8a", "uniform": "#c7a58b",
}  # fmt: skip
KINDS = {"self": "self-attention", "encoder": "encoder", "cross": "cross-attention"}
GAIN = 0.1  # beyond the baseline: from here on a relation is written into the cell of its best head


def role_map(found: HeadRoles, title: str, syntax: Syntax | None = None) -> Figure:
    """Draw every head as a cell, a panel for each kind of attention."""
    sizes: dict[str, tuple[int, int]] = {}  # layers and heads
    for head in found.heads:
        layers, heads = sizes.get(head.kind, (0, 0))
        sizes[head.kind] = max(layers, head.layer + 1), max(heads, head.number + 1)
    high, wide = sum(layers for layers, _ in sizes.values()), max(heads for _, heads in sizes.values())
    relations = _relations(syntax)
    cell = 0.62 if relations else 0.42
    figure = new(min(max(0.92 * wide + 1.6, 5.0), 30), min(cell * high + 1.5 + 0.5 * len(sizes), 40))
    ratios = [layers for layers, _ in sizes.values()]
    panels = figure.subplots(len(sizes), 1, squeeze=False, height_ratios=ratios)[:, 0]
    for kind, axes in zip(sizes, panels):
        _panel(axes, found, kind, sizes[kind], relations)
        if len(sizes) > 1:
            axes.set_title(KINDS[kind], fontsize=9, loc="left")
    note = "; below it, relations that it follows best, % of arcs found" if relations else ""
    figure.suptitle(plain(f"{title}: the role of each head and its score{note}"), fontsize=10, wrap=True)
    from matplotlib.patches import Patch

    used = [role for role in (*ROLES, MIXED) if role in found.roles]
    names = [Patch(facecolor=COLOURS[role], label=f"{role} ({found.roles.count(role)})") for role in used]
    where = {"loc": "outside lower center", "ncols": min(len(used), 6)}
    figure.legend(handles=names, fontsize=7, frameon=False, **where)
    return figure


def _relations(syntax: Syntax | None) -> dict[str, list[str]]:
    """Return, by head, the relations that it follows best and clearly better than a fixed distance does."""
    found: dict[str, list[str]] = {}
    for row in syntax.table(least=50) if syntax is not None else ():
        if row.gain >= GAIN:
            found.setdefault(row.head, []).append(f"{row.name} {100 * row.accuracy:.0f}")
    return found


def _panel(
    axes: Axes, found: HeadRoles, kind: str, size: tuple[int, int], relations: dict[str, list[str]]
) -> None:
    from matplotlib.colors import to_rgb

    colours = np.ones((*size, 3))
    for at, (head, role) in enumerate(zip(found.heads, found.roles)):
        if head.kind == kind:
            colours[head.layer, head.number] = to_rgb(COLOURS[role])
            write(axes, head.layer, head.number, _words(found, at, relations.get(str(head), [])), size=6.5)
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    for axis, count, what in ((axes.yaxis, size[0], "layer"), (axes.xaxis, size[1], "head")):
        axis.set_ticks(range(count), [str(number) for number in range(count)], fontsize=8)
        axis.set_ticks(np.arange(-0.5, count), minor=True)
        axis.set_label_text(what, fontsize=9)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)


def _words(found: HeadRoles, at: int, relations: list[str]) -> str:
    """Return what stands in a cell."""
    role = found.roles[at]
    distance = f" {found.distances[at]:+}" if role == "position" else ""
    lines = [] if role == MIXED else [f"{role}{distance} {found.scores[role][at]:.2f}"]
    shown = relations if len(relations) <= 4 else [*relations[:3], f"and {len(relations) - 3} more"]
    return "\n".join([*lines, *(plain(one) for one in shown)])
