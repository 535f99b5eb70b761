"""Pictures of the parts of a model: the roles of heads, neurons, ablation and pruning."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clearhead.app.plot import canvas
from clearhead.app.plot.canvas import BLUE, RED, SEQUENTIAL, Axes, Figure, new, plain, single
from clearhead.hub.tokens.text import visible
from clearhead.inside.ablation import Effect
from clearhead.inside.alignments import Syntax
from clearhead.inside.heads import MIXED, ROLES, HeadRoles
from clearhead.inside.memories import Memories, Neuron
from clearhead.inside.pruning import HeadTable, PruneCurve

COLOURS = {
    MIXED: "#e6e6e6", "induction": "#f28e8e", "previous": "#7db8e0", "next": "#17becf",
    "itself": "#c3a6e0", "first": "#ffbb55", "separator": "#e377c2", "same": "#5fbf5f",
    "rare": "#bcbd22", "position": "#8c9bd0", "local": "#98df8a", "uniform": "#c7a58b",
}  # fmt: skip
KINDS = {"self": "self-attention", "encoder": "encoder", "cross": "cross-attention"}
GAIN = 0.1  # beyond the baseline: from here on a relation is written into the cell of its best head
SHOWN = 12  # contexts, and tokens on each side
SIDE = 22  # letters on each side of the token


# Heads ------------------------------------------------------------------------------------------------------


def role_map(found: HeadRoles, title: str, syntax: Syntax | None = None) -> Figure:
    """Draw every head as a cell, a panel for each kind of attention."""
    kinds = dict.fromkeys(head.kind for head in found.heads)
    sizes = {  # layers and heads
        kind: (
            1 + max(head.layer for head in found.heads if head.kind == kind),
            1 + max(head.number for head in found.heads if head.kind == kind),
        )
        for kind in kinds
    }
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
    figure.legend(
        handles=names, fontsize=7, frameon=False, loc="outside lower center", ncols=min(len(used), 6)
    )
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
            words, tint = _words(found, at, relations.get(str(head), [])), colours[head.layer, head.number]
            canvas.write(axes, head.layer, head.number, words, size=6.5, color=canvas.ink(tint))
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


# Neurons ----------------------------------------------------------------------------------------------------


def draw_neuron(memory: Neuron) -> Figure:
    """Draw the places that fired it, the token in red, and the tokens that it promotes and suppresses."""
    rows = max(len(memory.contexts[:SHOWN]), 2 * min(len(memory.promoted), SHOWN // 2), 4)
    widths = [3, 2] if memory.promoted else [1]
    figure = new(12 if memory.promoted else 8, 0.3 * rows + 1.6)
    left, *right = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    title = f"Neuron {memory.name}"
    if memory.agreement is not None:
        title += f": agreement {memory.agreement:.0%}, by chance {memory.chance:.0%}"
    figure.suptitle(plain(title), fontsize=12)
    _contexts(left, memory)
    tokens = [*memory.promoted[: SHOWN // 2], *reversed(memory.suppressed[: SHOWN // 2])]
    for axes in right:
        names, scores = zip(*tokens)
        canvas.signed_bars(axes, scores, names, above=BLUE, below=RED)
        canvas.name(
            axes,
            title="What it promotes most (top) and suppresses most",
            x_name="score for each unit of activation",
            size=10,
        )
    return figure


def _contexts(axes: Axes, memory: Neuron) -> None:
    contexts = memory.contexts[:SHOWN]
    title = "The places that fire it most" if contexts else "Nothing in the corpus fires it"
    canvas.name(axes, title, "activation", size=10)
    axes.barh(range(len(contexts)), [context.activation for context in contexts], color=BLUE, alpha=0.25)
    axes.set_ylim(max(len(contexts), 1) - 0.5, -0.5)
    axes.set_yticks([])
    style: dict[str, Any] = {
        "va": "center",
        "transform": axes.get_yaxis_transform(),
        "fontsize": 8,
        "family": "monospace",
    }
    for row, context in enumerate(contexts):
        before, token, after = (visible(part) for part in (context.before, context.token, context.after))
        shifted = " " * (len(token) + 2) + after[:SIDE]  # after the token in its brackets
        axes.text(0.5, row, plain(before[-SIDE:]), ha="right", color="black", **style)
        axes.text(0.5, row, plain(f"[{token}]"), ha="left", color=RED, **style)
        axes.text(0.5, row, plain(shifted), ha="left", **style)


def draw_agreement(found: Memories) -> Figure:
    """Draw a dot per neuron: chance across, upwards how often its contexts go on as it says."""
    figure, axes = single(
        width=7.5,
        height=5.0,
        title=f"Neurons: do the {found.top} contexts that fire one "
        f"go on with a token of its first {found.depth}?",
        x_name="share of all places whose next token it promotes (chance)",
        y_name="share of its contexts (agreement)",
        grid="both",
        size=10,
    )
    from matplotlib import colormaps

    rates: dict[int, list[tuple[float, float]]] = {}  # by layer: chance and agreement of each neuron
    for shelf in found.shelves:
        if shelf.agreement is not None and shelf.chance is not None:
            rates.setdefault(shelf.layer, []).extend(zip(shelf.chance.tolist(), shelf.agreement.tolist()))
    noise = np.random.default_rng(0)  # many neurons have the same share: dots move a little apart
    for number, layer in enumerate(sorted(rates)):
        across, up = np.array(rates[layer]).T
        shade = colormaps[SEQUENTIAL](number / max(len(rates) - 1, 1) * 0.85)
        moved = up + noise.uniform(-0.02, 0.02, len(up))
        axes.scatter(across, moved, s=14, alpha=0.6, color=shade, label=f"layer {layer}")
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--", label="chance")
    most = max((x for pairs in rates.values() for x, _ in pairs), default=1.0)
    axes.set_xlim(-0.02 * most, min(1.02, 1.1 * most + 0.01))
    axes.set_ylim(-0.03, 1.03)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


# Ablation and pruning ---------------------------------------------------------------------------------------


def draw_map(found: HeadTable, title: str) -> Figure:
    """Draw layer x head as colours; values of either sign are centred on zero."""
    signed = bool(np.nanmin(found.values) < 0)
    return canvas.heatmap(
        found.values,
        rows=found.rows,
        columns=[str(number) for number in range(found.values.shape[1])],
        title=title,
        scale=found.quantity,
        row_name="layer",
        column_name="head",
        low=None if signed else 0.0,
        diverging=signed,
    )


def draw_effect(found: Effect, title: str) -> Figure:
    """Draw probabilities with and without, a pair of bars for each token or class."""
    figure, axes = single(
        width=6.5,
        height=max(2.2, 0.36 * len(found.top) + 1.4),
        title=f"{title} (KL {found.kl:.3g} bits)",
        x_name="probability",
        grid="x",
    )
    places = np.arange(len(found.top))
    axes.barh(places - 0.2, [one.before for one in found.top], 0.38, label="whole model")
    axes.barh(places + 0.2, [one.after for one in found.top], 0.38, label="without")
    canvas.label_axis(axes, [one.label for one in found.top], "y")
    axes.invert_yaxis()
    canvas.legend(axes, 8)
    return figure


def draw_curves(curves: Mapping[str, Sequence[PruneCurve]], title: str) -> Figure:
    """Draw loss and accuracy against heads removed; several curves under one name are a mean and a band."""
    figure = new(10.0, 4.0)
    figure.suptitle(plain(title), fontsize=11)
    total = next(iter(curves.values()))[0].heads
    for axes, quantity in zip(figure.subplots(1, 2), ("loss", "accuracy")):
        for name, several in curves.items():
            values = np.array([getattr(curve, quantity) for curve in several])  # curves, points
            removed = several[0].removed
            label = plain(name if len(several) == 1 else f"{name}, {len(several)} orders")
            (line,) = axes.plot(removed, values.mean(0), marker="o", markersize=3, label=label)
            if len(several) > 1:
                axes.fill_between(removed, values.min(0), values.max(0), color=line.get_color(), alpha=0.15)
        canvas.name(axes, "", f"heads removed, of {total}", quantity)
        axes.grid(alpha=0.3)
        canvas.legend(axes, 8)
    return figure
