"""Pictures of neurons: what fires one and what it promotes; how far all of them agree with the corpus."""

from typing import Any

import numpy as np

from clearhead.inside.memories import Memories, Neuron
from clearhead.plot.canvas import BLUE, RED, SEQUENTIAL, Axes, Figure, name, new, plain, signed_bars, single
from clearhead.tokens.labels import visible

SHOWN = 12  # contexts, and tokens on each side
SIDE = 22  # letters on each side of the token


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
    for axes in right:
        _scores(axes, memory)
    return figure


def _contexts(axes: Axes, memory: Neuron) -> None:
    contexts = memory.contexts[:SHOWN]
    title = "The places that fire it most" if contexts else "Nothing in the corpus fires it"
    name(axes, title, "activation", size=10)
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


def _scores(axes: Axes, memory: Neuron) -> None:
    count = SHOWN // 2
    shown = [*memory.promoted[:count], *reversed(memory.suppressed[:count])]
    signed_bars(axes, [score for _, score in shown], [token for token, _ in shown], above=BLUE, below=RED)
    title = "What it promotes most (top) and suppresses most"
    name(axes, title, "score for each unit of activation", size=10)


def draw_agreement(found: Memories) -> Figure:
    """Draw a dot per neuron: chance across, upwards how often its contexts go on as it says."""
    title = (
        f"Neurons: do the {found.top} contexts that fire one go on with a token of its first {found.depth}?"
    )
    chance, agreement = (
        "share of all places whose next token it promotes (chance)",
        "share of its contexts (agreement)",
    )
    figure, axes = single(7.5, 5.0, "", chance, agreement, grid="both")
    axes.set_title(title, fontsize=10)
    from matplotlib import colormaps

    rates: dict[int, list[tuple[float, float]]] = {}  # by layer: chance and agreement of each neuron
    for shelf in found.shelves:
        if shelf.agreement is not None and shelf.chance is not None:
            rates.setdefault(shelf.layer, []).extend(zip(shelf.chance.tolist(), shelf.agreement.tolist()))
    noise = np.random.default_rng(0)  # many neurons have the same share: dots move a little apart
    for number, layer in enumerate(sorted(rates)):
        across, up = np.array(rates[layer]).T
        shade = colormaps[SEQUENTIAL](number / max(len(rates) - 1, 1) * 0.85)
        up = up + noise.uniform(-0.02, 0.02, len(up))
        axes.scatter(across, up, s=14, alpha=0.6, color=shade, label=f"layer {layer}")
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--", label="chance")
    most = max((x for pairs in rates.values() for x, _ in pairs), default=1.0)
    axes.set_xlim(-0.02 * most, min(1.02, 1.1 * most + 0.01))
    axes.set_ylim(-0.03, 1.03)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
