"""A picture of which head does what: layer by head, a colour for each role, with its score and the relations it follows best."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clearhead.inside.heads import MIXED, HeadRoles
from clearhead.inside.heads.roles import ROLES
from clearhead.inside.heads.syntax import Syntax
from clearhead.plot.canvas import new, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    MIXED: "#e6e6e6", "induction": "#f28e8e", "previous": "#7db8e0", "next": "#17becf", "itself": "#c3a6e0", "first": "#ffbb55",
    "separator": "#e377c2", "same": "#5fbf5f", "rare": "#bcbd22", "position": "#8c9bd0", "local": "#98df8a", "uniform": "#c7a58b",
}  # fmt: skip
KINDS = {"self": "self-attention", "encoder": "encoder", "cross": "cross-attention"}
GAIN = 0.1  # beyond the baseline: from here on a relation is written into the cell of its best head


def role_map(found: HeadRoles, title: str, syntax: Syntax | None = None) -> Figure:
    """Every head as a cell, a panel for each kind of attention."""
    kinds = list(dict.fromkeys(head.kind for head in found.heads))
    sizes = {kind: _size(found, kind) for kind in kinds}
    wide, high = max(size[1] for size in sizes.values()), sum(size[0] for size in sizes.values())
    relations = _relations(syntax)
    cell = 0.62 if relations else 0.42
    figure = new(min(max(0.92 * wide + 1.6, 5.0), 30), min(cell * high + 1.5 + 0.5 * len(kinds), 40))
    panels = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=[sizes[kind][0] for kind in kinds])[
        :, 0
    ]
    for kind, axes in zip(kinds, panels):
        _panel(axes, found, kind, sizes[kind], relations)
        if len(kinds) > 1:
            axes.set_title(KINDS[kind], fontsize=9, loc="left")
    note = "; below it, relations that it follows best, % of arcs found" if relations else ""
    figure.suptitle(plain(f"{title}: the role of each head and its score{note}"), fontsize=10, wrap=True)
    _legend(figure, found)
    return figure


def _size(found: HeadRoles, kind: str) -> tuple[int, int]:
    mine = [head for head in found.heads if head.kind == kind]
    return max(head.layer for head in mine) + 1, max(head.number for head in mine) + 1


def _relations(syntax: Syntax | None) -> dict[str, list[str]]:
    """By head: the relations that it follows best and clearly better than a fixed distance does."""
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
        if head.kind != kind:
            continue
        colours[head.layer, head.number] = to_rgb(COLOURS[role])
        axes.text(
            head.number,
            head.layer,
            _words(found, at, relations.get(str(head), [])),
            ha="center",
            va="center",
            fontsize=6.5,
        )
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(size[1]), [str(number) for number in range(size[1])], fontsize=8)
    axes.set_yticks(range(size[0]), [str(number) for number in range(size[0])], fontsize=8)
    axes.set_xticks(np.arange(-0.5, size[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, size[0]), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("head", fontsize=9)
    axes.set_ylabel("layer", fontsize=9)


def _words(found: HeadRoles, at: int, relations: list[str]) -> str:
    """What stands in a cell."""
    role = found.roles[at]
    distance = f" {found.distances[at]:+}" if role == "position" else ""
    lines = [] if role == MIXED else [f"{role}{distance} {found.scores[role][at]:.2f}"]
    shown = relations if len(relations) <= 4 else [*relations[:3], f"and {len(relations) - 3} more"]
    return "\n".join([*lines, *(plain(one) for one in shown)])


def _legend(figure: Figure, found: HeadRoles) -> None:
    from matplotlib.patches import Patch

    used = [role for role in (*ROLES, MIXED) if role in found.roles]
    counts = {role: found.roles.count(role) for role in used}
    patches = [Patch(facecolor=COLOURS[role], label=f"{role} ({counts[role]})") for role in used]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=min(len(used), 6), fontsize=7, frameon=False
    )
