"""Pictures of neurons: what fires one and what it promotes; how far all of them agree with the corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clearhead.inside.memories import Memories, Neuron
from clearhead.plot.canvas import SEQUENTIAL, new, plain
from clearhead.tokens.labels import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RISING, FALLING = "#2166ac", "#b2182b"
SHOWN = 12  # contexts, and tokens on each side
SIDE = 22  # letters on each side of the token


def draw_neuron(memory: Neuron) -> Figure:
    """Left the places that fired it, the token in red and bars for how much; right the tokens it promotes and suppresses."""
    contexts = memory.contexts[:SHOWN]
    rows = max(len(contexts), 2 * min(len(memory.promoted), SHOWN // 2), 4)
    figure = new(12 if memory.promoted else 8, 0.3 * rows + 1.6)
    left, *right = figure.subplots(
        1, 2 if memory.promoted else 1, width_ratios=[3, 2] if memory.promoted else None, squeeze=False
    )[0]
    agreed = (
        ""
        if memory.agreement is None
        else f": agreement {memory.agreement:.0%}, by chance {memory.chance:.0%}"
    )
    figure.suptitle(plain(f"Neuron {memory.name}{agreed}"), fontsize=12)
    _contexts(left, memory)
    if right:
        _scores(right[0], memory)
    return figure


def _contexts(axes: Axes, memory: Neuron) -> None:
    contexts = memory.contexts[:SHOWN]
    axes.set_title(
        "The places that fire it most" if contexts else "Nothing in the corpus fires it", fontsize=10
    )
    axes.barh(range(len(contexts)), [context.activation for context in contexts], color=RISING, alpha=0.25)
    axes.set_ylim(max(len(contexts), 1) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xlabel("activation")
    for row, context in enumerate(contexts):
        before, token, after = (visible(part) for part in (context.before, context.token, context.after))
        parts = ((0.5, plain(before[-SIDE:]), "right", "black"), (0.5, plain(f"[{token}]"), "left", FALLING))
        for x, text, side, colour in parts:
            axes.text(
                x,
                row,
                text,
                ha=side,
                va="center",
                color=colour,
                transform=axes.get_yaxis_transform(),
                fontsize=8,
                family="monospace",
            )
        shift = " " * (len(token) + 2)
        said = plain(shift + after[:SIDE])
        axes.text(
            0.5,
            row,
            said,
            ha="left",
            va="center",
            transform=axes.get_yaxis_transform(),
            fontsize=8,
            family="monospace",
        )


def _scores(axes: Axes, memory: Neuron) -> None:
    count = SHOWN // 2
    shown = [*memory.promoted[:count], *reversed(memory.suppressed[:count])]
    colours = [RISING if score > 0 else FALLING for _, score in shown]
    axes.barh(range(len(shown)), [score for _, score in shown], color=colours)
    axes.set_yticks(range(len(shown)), [plain(name) for name, _ in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_title("What it promotes most (top) and suppresses most", fontsize=10)
    axes.set_xlabel("score for each unit of activation")


def draw_agreement(found: Memories) -> Figure:
    """One dot per neuron: across what chance would give, upwards how often its contexts go on as it says; a colour per layer."""
    figure = new(7.5, 5.0)
    from matplotlib import colormaps

    axes = figure.add_subplot()
    shelves = [shelf for shelf in found.shelves if shelf.agreement is not None and shelf.chance is not None]
    apart = np.random.default_rng(
        0
    )  # few different shares are possible: dots move a little, so that each is seen
    depth = sorted({shelf.layer for shelf in shelves})
    for layer in depth:
        mine = [shelf for shelf in shelves if shelf.layer == layer]
        across = [value for shelf in mine if shelf.chance is not None for value in shelf.chance.tolist()]
        up = [value for shelf in mine if shelf.agreement is not None for value in shelf.agreement.tolist()]
        shade = colormaps[SEQUENTIAL](depth.index(layer) / max(len(depth) - 1, 1) * 0.85)
        up = [value + shift for value, shift in zip(up, apart.uniform(-0.02, 0.02, len(up)).tolist())]
        axes.scatter(across, up, s=14, alpha=0.6, color=shade, label=f"layer {layer}")
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--", label="chance")
    most = max((float(shelf.chance.max()) for shelf in shelves if shelf.chance is not None), default=1.0)
    axes.set_xlim(-0.02 * most, min(1.02, 1.1 * most + 0.01))
    axes.set_ylim(-0.03, 1.03)
    axes.set_title(
        f"Neurons: do the {found.top} contexts that fire one go on with a token of its first {found.depth}?",
        fontsize=10,
    )
    axes.set_xlabel("share of all places whose next token it promotes (chance)")
    axes.set_ylabel("share of its contexts (agreement)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
