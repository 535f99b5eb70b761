"""Pictures of a model as a whole.

Heads, neurons, ablation, pruning, probes, words and positions, long contexts, quantization, speed, meshes,
and the confusion matrix of a classifier.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clearhead.app import plot as canvas
from clearhead.app.plot import Axes, Figure
from clearhead.hub.tokens.text import visible
from clearhead.inside.ablation import Effect
from clearhead.inside.alignments import Syntax
from clearhead.inside.geometry import Nearest, PositionMap, Projection, SameWord
from clearhead.inside.heads import MIXED, ROLES, HeadRoles
from clearhead.inside.long import LongReport, RetrievalGrid
from clearhead.inside.long_text import Growth, PositionBin
from clearhead.inside.memories import Memories, Neuron
from clearhead.inside.probe import Probes
from clearhead.inside.pruning import HeadTable, PruneCurve
from clearhead.inside.quantize import QuantReport
from clearhead.labs.speed.compare import ABOVE_LIMIT, SpeedReport
from clearhead.learn.evaluation.metrics import ClassCounts
from clearhead.learn.parallel.planner import MeshReport

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
PROBE = "probe, with its 95 % interval"
CLIP = 3  # times the size of most entries: from there on, colours are cut off
LONG_COLUMNS = 2
MOST_TICKS = 6  # lengths that are written below an axis
LINES = 8  # projections that have a line of their own
OTHERS = "#9aa5b1"  # bars of other programs
WRITTEN = 12  # classes up to which the shares are written into the cells


def role_map(roles: HeadRoles, title: str, syntax: Syntax | None = None) -> Figure:
    """Draw every head as a cell, a panel for each kind of attention."""
    kinds = dict.fromkeys(head.kind for head in roles.heads)
    sizes = {  # layers and heads
        kind: (
            1 + max(head.layer for head in roles.heads if head.kind == kind),
            1 + max(head.number for head in roles.heads if head.kind == kind),
        )
        for kind in kinds
    }
    high, wide = sum(layers for layers, _ in sizes.values()), max(heads for _, heads in sizes.values())
    relations = _relations(syntax)
    cell = 0.62 if relations else 0.42
    note = "; below it, relations that it follows best, % of arcs found" if relations else ""
    figure, grid = canvas.panels(
        width=min(max(0.92 * wide + 1.6, 5.0), 30),
        height=min(cell * high + 1.5 + 0.5 * len(sizes), 40),
        title=f"{title}: the role of each head and its score{note}",
        rows=len(sizes),
        size=10,
        height_ratios=[layers for layers, _ in sizes.values()],
    )
    for kind, axes in zip(sizes, grid[:, 0]):
        _role_panel(axes, roles, kind, sizes[kind], relations)
        if len(sizes) > 1:
            axes.set_title(KINDS[kind], fontsize=9, loc="left")
    from matplotlib.patches import Patch

    used = [role for role in (*ROLES, MIXED) if role in roles.roles]
    names = [Patch(facecolor=COLOURS[role], label=f"{role} ({roles.roles.count(role)})") for role in used]
    figure.legend(
        handles=names, fontsize=7, frameon=False, loc="outside lower center", ncols=min(len(used), 6)
    )
    return figure


def _relations(syntax: Syntax | None) -> dict[str, list[str]]:
    """Return, by head, the relations that it follows best and clearly better than a fixed distance does."""
    relations: dict[str, list[str]] = {}
    for row in syntax.table(least=50) if syntax is not None else ():
        if row.gain >= GAIN:
            relations.setdefault(row.head, []).append(f"{row.name} {100 * row.accuracy:.0f}")
    return relations


def _role_panel(
    axes: Axes, roles: HeadRoles, kind: str, size: tuple[int, int], relations: dict[str, list[str]]
) -> None:
    from matplotlib.colors import to_rgb

    colours = np.ones((*size, 3))
    for at, (head, role) in enumerate(zip(roles.heads, roles.roles)):
        if head.kind == kind:
            colours[head.layer, head.number] = to_rgb(COLOURS[role])
            words, tint = _words(roles, at, relations.get(str(head), [])), colours[head.layer, head.number]
            canvas.write(axes, head.layer, head.number, words, size=6.5, color=canvas.ink(tint))
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    for axis, count, what in ((axes.yaxis, size[0], "layer"), (axes.xaxis, size[1], "head")):
        axis.set_ticks(range(count), [str(number) for number in range(count)], fontsize=8)
        axis.set_ticks(np.arange(-0.5, count), minor=True)
        axis.set_label_text(what, fontsize=9)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)


def _words(roles: HeadRoles, at: int, relations: list[str]) -> str:
    """Return what stands in a cell."""
    role = roles.roles[at]
    distance = f" {roles.distances[at]:+}" if role == "position" else ""
    lines = [] if role == MIXED else [f"{role}{distance} {roles.scores[role][at]:.2f}"]
    shown = relations if len(relations) <= 4 else [*relations[:3], f"and {len(relations) - 3} more"]
    return "\n".join([*lines, *(canvas.plain(relation) for relation in shown)])


# Neurons ----------------------------------------------------------------------------------------------------


def draw_neuron(memory: Neuron) -> Figure:
    """Draw the places that fired it, the token in red, and the tokens that it promotes and suppresses."""
    rows = max(len(memory.contexts[:SHOWN]), 2 * min(len(memory.promoted), SHOWN // 2), 4)
    widths = [3, 2] if memory.promoted else [1]
    title = f"{memory.kind.capitalize()} {memory.name}"
    if memory.agreement is not None:
        title += f": agreement {memory.agreement:.0%}, by chance {memory.chance:.0%}"
    width = 12 if memory.promoted else 8
    figure, grid = canvas.panels(
        width, 0.3 * rows + 1.6, title, columns=len(widths), size=12, width_ratios=widths
    )
    left, *right = grid[0]
    _contexts(left, memory)
    tokens = [*memory.promoted[: SHOWN // 2], *reversed(memory.suppressed[: SHOWN // 2])]
    for axes in right:
        names, scores = zip(*tokens)
        canvas.signed_bars(axes, scores, names, above=canvas.BLUE, below=canvas.RED)
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
    axes.barh(
        range(len(contexts)), [context.activation for context in contexts], color=canvas.BLUE, alpha=0.25
    )
    axes.set_ylim(max(len(contexts), 1) - 0.5, -0.5)
    axes.set_yticks([])
    transform = axes.get_yaxis_transform()
    style: dict[str, Any] = {"va": "center", "transform": transform, "fontsize": 8, "family": "monospace"}
    for row, context in enumerate(contexts):
        before, token, after = (visible(part) for part in (context.before, context.token, context.after))
        shifted = " " * (len(token) + 2) + after[:SIDE]  # after the token in its brackets
        axes.text(0.5, row, canvas.plain(before[-SIDE:]), ha="right", color="black", **style)
        axes.text(0.5, row, canvas.plain(f"[{token}]"), ha="left", color=canvas.RED, **style)
        axes.text(0.5, row, canvas.plain(shifted), ha="left", **style)


def draw_agreement(memories: Memories) -> Figure:
    """Draw a dot per neuron: chance across, upwards how often its contexts go on as it says."""
    figure, axes = canvas.single(
        width=7.5,
        height=5.0,
        title=f"Neurons: do the {memories.top} contexts that fire one "
        f"go on with a token of its first {memories.depth}?",
        x_name="share of all places whose next token it promotes (chance)",
        y_name="share of its contexts (agreement)",
        grid="both",
        size=10,
    )
    from matplotlib import colormaps

    rates: dict[int, list[tuple[float, float]]] = {}  # by layer: chance and agreement of each neuron
    for group in memories.groups:
        if group.agreement is not None and group.chance is not None:
            rates.setdefault(group.layer, []).extend(zip(group.chance.tolist(), group.agreement.tolist()))
    noise = np.random.default_rng(0)  # many neurons have the same share: dots move a little apart
    for number, layer in enumerate(sorted(rates)):
        across, up = np.array(rates[layer]).T
        shade = colormaps[canvas.SEQUENTIAL](number / max(len(rates) - 1, 1) * 0.85)
        moved = up + noise.uniform(-0.02, 0.02, len(up))
        axes.scatter(across, moved, s=14, alpha=0.6, color=shade, label=f"layer {layer}")
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--", label="chance")
    most = max((x for pairs in rates.values() for x, _ in pairs), default=1.0)
    axes.set_xlim(-0.02 * most, min(1.02, 1.1 * most + 0.01))
    axes.set_ylim(-0.03, 1.03)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


# Ablation and pruning ---------------------------------------------------------------------------------------


def draw_map(grid: HeadTable, title: str) -> Figure:
    """Draw layer x head as colours; values of either sign are centred on zero."""
    signed = bool(np.nanmin(grid.values) < 0)
    return canvas.heatmap(
        grid.values,
        rows=grid.rows,
        columns=[str(number) for number in range(grid.values.shape[1])],
        title=title,
        scale=grid.quantity,
        row_name="layer",
        column_name="head",
        low=None if signed else 0.0,
        diverging=signed,
    )


def draw_effect(effect: Effect, title: str) -> Figure:
    """Draw probabilities with and without, a pair of bars for each token or class."""
    figure, axes = canvas.single(
        width=6.5,
        height=max(2.2, 0.36 * len(effect.top) + 1.4),
        title=f"{title} (KL {effect.kl:.3g} bits)",
        x_name="probability",
        grid="x",
    )
    ticks = np.arange(len(effect.top))
    axes.barh(ticks - 0.2, [choice.before for choice in effect.top], 0.38, label="whole model")
    axes.barh(ticks + 0.2, [choice.after for choice in effect.top], 0.38, label="without")
    canvas.label_axis(axes, [choice.label for choice in effect.top], "y")
    axes.invert_yaxis()
    canvas.legend(axes, 8)
    return figure


def draw_curves(curves: Mapping[str, Sequence[PruneCurve]], title: str) -> Figure:
    """Draw loss and accuracy against heads removed; several curves under one name are a mean and a band."""
    figure, grid = canvas.panels(10.0, 4.0, title, columns=2)
    total = next(iter(curves.values()))[0].heads
    for axes, quantity in zip(grid[0], ("loss", "accuracy")):
        for name, several in curves.items():
            values = np.array([getattr(curve, quantity) for curve in several])  # curves, points
            removed = several[0].removed
            label = canvas.plain(name if len(several) == 1 else f"{name}, {len(several)} orders")
            (line,) = axes.plot(removed, values.mean(0), marker="o", markersize=3, label=label)
            if len(several) > 1:
                axes.fill_between(removed, values.min(0), values.max(0), color=line.get_color(), alpha=0.15)
        canvas.name(axes, "", f"heads removed, of {total}", quantity)
        axes.grid(alpha=0.3)
        canvas.legend(axes, 8)
    return figure


# Probes, words and positions --------------------------------------------------------------------------------


def probe_figure(probes: Probes, model: str = "") -> Figure:
    """Draw accuracy by depth; `model` is named in the title."""
    layers, ticks = probes.layers, range(len(probes.layers))
    figure, axes = canvas.single(
        width=min(max(6.5, 0.35 * len(layers) + 2), 14),
        height=4.2,
        title=f"{model + ': ' if model else ''}linear probes of {probes.column}, {len(probes.labels)} labels",
        x_name=f"after block ({probes.stack})",
        y_name=f"accuracy on {probes.test:,} {probes.unit}",
        grid="both",
    )
    below = [max(0.0, layer.accuracy - layer.interval[0]) for layer in layers]
    above = [max(0.0, layer.interval[1] - layer.accuracy) for layer in layers]
    accuracies = [layer.accuracy for layer in layers]
    axes.errorbar(ticks, accuracies, [below, above], marker="o", markersize=4, capsize=3, label=PROBE)
    curves = {
        "control task: random label of each type": ("s", [layer.control for layer in layers]),
        "selectivity: probe less control": ("^", [layer.selectivity for layer in layers]),
    }
    for label, (marker, values) in curves.items():
        axes.plot(ticks, values, marker=marker, markersize=4, label=label)
    kind = {"words": "word type", "texts": "text", "images": "image"}[probes.unit]
    label = f"most frequent label of each {kind}"
    axes.axhline(probes.by_type, color="black", linestyle="--", linewidth=1, label=label)
    axes.axhline(probes.majority, color="grey", linestyle=":", linewidth=1.2, label="most frequent label")
    canvas.label_axis(axes, [layer.name for layer in layers], "x")
    lowest = min(0.0, *(layer.selectivity for layer in layers))
    axes.set_ylim(lowest - 0.02 if lowest < 0 else 0, 1.02)
    handles, names = axes.get_legend_handles_labels()
    ordered = [handles.pop(names.index(PROBE)), *handles]  # matplotlib lists the curve with bars last
    figure.legend(handles=ordered, fontsize=8, loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_nearest(nearest: Nearest) -> Figure:
    """Draw a bar for each token near a word or a sum of words."""
    figure, axes = canvas.single(
        width=6.5,
        height=0.28 * len(nearest.labels) + 1.5,
        title=f"Nearest to {nearest.query}, {nearest.table} table",
        x_name="cosine" if len(nearest.words) == 1 else "cosine with each word, added and subtracted",
        grid="x",
    )
    canvas.bars(axes, nearest.scores, [canvas.shortened(label, 24) for label in nearest.labels], size=9)
    return figure


def draw_projection(projection: Projection) -> Figure:
    """Draw words at their places on the plane."""
    words = f"{len(projection.labels)} words of the {projection.table} table"
    title = f"{words} on their first two principal components"
    across, up = (f"component {n} ({projection.explained[n - 1]:.1%} of the variance)" for n in (1, 2))
    figure, axes = canvas.single(8.0, 6.5, title, across, up, grid="both")
    axes.scatter(projection.points[:, 0], projection.points[:, 1], s=10, color=canvas.BLUE)
    for label, (x, y) in zip(projection.labels, projection.points.tolist()):
        axes.annotate(canvas.plain(label), (x, y), xytext=(3, 2), textcoords="offset points", fontsize=8)
    axes.margins(x=0.12)
    return figure


def draw_positions(positions: PositionMap) -> Figure:
    """Draw vectors, angles or biases of positions, or how alike positions are, as colours."""
    what = "Likeness of positions" if positions.rows == positions.columns else "Positions"
    sizes = np.abs(positions.values)
    most, usual = float(sizes.max()), float(np.quantile(sizes, 0.995))
    # A few large entries would pale all others.
    clipped = positions.row_name != positions.column_name and most > CLIP * usual > 0
    return canvas.heatmap(
        positions.values,
        positions.rows,
        positions.columns,
        f"{what} ({positions.scheme})",
        f"{positions.measure}, the largest cut off" if clipped else positions.measure,
        positions.row_name,
        positions.column_name,
        low=-usual if clipped else None,
        high=usual if clipped else None,
        diverging=bool(positions.values.min() < 0),
    )


def draw_same_word(word: SameWord) -> Figure:
    """Draw the likeness of the word's two states by layer, next to that of other tokens."""
    title = f'"{word.word}" in two sentences'
    figure, axes = canvas.single(6.5, 4.0, title, "after layer", "cosine", grid="both")
    for label, values in ((f'"{word.word}"', word.similarity), ("other tokens", word.baseline)):
        axes.plot(values.tolist(), marker="o", markersize=4, label=canvas.plain(label))
    canvas.label_axis(axes, word.layers, "x")
    canvas.legend(axes, 8)
    return figure


# Long contexts ----------------------------------------------------------------------------------------------


def draw_long(report: LongReport, title: str) -> Figure:
    """Draw perplexity by position, with each scaling, needles by length and depth, and the cost."""
    panels: list[Callable[[Axes], None]] = []
    if report.perplexity is not None:
        bins, rows = report.perplexity.bins, report.perplexity.rows
        panels.append(
            lambda axes: _perplexities(axes, {"": bins}, report.trained, f"perplexity, {rows} rows")
        )
    if report.scalings:
        curves = {scaling.name: scaling.bins for scaling in report.scalings}
        panels.append(
            lambda axes: _perplexities(axes, curves, report.trained, "scalings of rotary positions")
        )
    panels += [functools.partial(_needles, grid=grid) for grid in report.retrieval]
    growth = report.cost
    if growth is not None:
        panels += [
            lambda axes: _growth(axes, growth, "seconds", "flops", "time and FLOPs"),
            lambda axes: _growth(axes, growth, "peak", "activations", "peak memory and activations"),
        ]
    across = min(LONG_COLUMNS, len(panels))
    down = math.ceil(len(panels) / LONG_COLUMNS)
    figure, grid = canvas.panels(5.2 * across, 3.3 * down + 0.4, title, down, across)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, panel in zip(grid.flat, panels):
        panel(axes)
    return figure


def _perplexities(axes: Axes, curves: Mapping[str, Sequence[PositionBin]], trained: int, title: str) -> None:
    """Draw perplexity against position, one line for each name, and where the trained length ends."""
    for name, bins in curves.items():
        middle = [(bin.start + bin.stop) / 2 for bin in bins]
        axes.plot(middle, [bin.perplexity for bin in bins], marker="o", markersize=3, label=name)
    axes.axvline(trained, color="grey", linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    canvas.name(axes, f"{title} (dashed: trained length)", "position", "perplexity", size=9)
    canvas.number_ticks(axes, "y")
    axes.grid(alpha=0.3, which="both")
    if len(curves) > 1:
        canvas.legend(axes)


def _needles(axes: Axes, grid: RetrievalGrid) -> None:
    """Draw the share of right answers, length across and depth downwards."""
    canvas.draw(
        axes,
        grid.right.T,
        0.0,
        1.0,
        rows=[f"{depth:.0%}" for depth in grid.depths],
        columns=[f"{length:,}" for length in grid.lengths],
        numbers="{:.2f}",
    )
    title = f"{grid.probe}: right answers, by chance {grid.chance:.3g}"
    canvas.name(axes, title, "tokens of the context", "depth", size=9)


def _growth(axes: Axes, growth: Growth, measured: str, computed: str, title: str) -> None:
    """Draw a measured quantity, and a computed one that is scaled to meet it at the longest row."""
    lengths, slopes = [point.length for point in growth.points], growth.slopes
    ours, theirs = ([getattr(point, name) for point in growth.points] for name in (measured, computed))
    scale = ours[-1] / theirs[-1]
    axes.plot(lengths, ours, marker="o", color=canvas.BLUE, label=f"{measured}, slope {slopes[measured]:.2f}")
    label = f"{computed} (scaled), slope {slopes[computed]:.2f}"
    axes.plot(lengths, [value * scale for value in theirs], linestyle="--", color=canvas.RED, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    canvas.name(axes, f"forward pass: {title}", "tokens", "memory" if measured == "peak" else "time", size=9)
    shown = lengths[:: max(1, math.ceil(len(lengths) / MOST_TICKS))]
    axes.set_xticks(shown, [f"{length:,}" for length in shown])
    axes.minorticks_off()
    canvas.number_ticks(axes, "y", "B" if measured == "peak" else "s")
    axes.grid(alpha=0.3, which="both")
    canvas.legend(axes)


# Quantization, speed, meshes --------------------------------------------------------------------------------


def draw_quantization(report: QuantReport, title: str) -> Figure:
    """Draw the error of each projection against its layer, and perplexity before and after."""
    measured = report.before is not None and report.after is not None
    title = f"{title}: int{report.bits} by {report.method}, groups of {report.group}"
    ratios = [3, 1] if measured else [1]
    figure, grid = canvas.panels(
        9.6 if measured else 6.4, 4.2, title, columns=len(ratios), width_ratios=ratios
    )
    axes, outputs = grid[0][0], all(layer.output_error is not None for layer in report.layers)
    lines: dict[str, list[tuple[int, float]]] = {}
    for part in report.layers:
        before, _, rest = part.name.partition("blocks.")
        number, _, kind = rest.partition(".")
        error = part.output_error if part.output_error is not None and outputs else part.weight_error
        name = f"{before.removeprefix('decoder.')}{kind}" if rest else part.name
        lines.setdefault(name, []).append((int(number) if rest else 0, 100 * error))
    for name, points in list(lines.items())[: 2 * LINES]:
        alone = len(points) == 1
        axes.plot(*zip(*points), marker="o" if alone else ".", label=name, linestyle="" if alone else "-")
    what = "outputs" if outputs else "weights"
    canvas.name(axes, f"error of {what}", "layer", "length of the error, % of the length", size=9)
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({layer for points in lines.values() for layer, _ in points}))
    axes.grid(alpha=0.3)
    canvas.legend(axes, columns=3)
    if report.before is not None and report.after is not None:
        values = [report.before.perplexity, report.after.perplexity]
        bars = grid[0][1].bar(["before", "after"], values, color=[canvas.BLUE, canvas.RED])
        grid[0][1].bar_label(bars, [f"{value:.2f}" for value in values], fontsize=8)
        grid[0][1].margins(y=0.1)
        kl = f"KL {report.after.divergence:.2g} nats a token"
        canvas.name(grid[0][1], f"perplexity\n{kl}", f"{report.before.tokens:,} tokens", size=9)
    return figure


def draw_speed(report: SpeedReport, title: str) -> Figure:
    """Draw tokens or pictures a second of each program, clearhead's bar in colour."""
    heights = [len(job.timings) + 1.2 for job in report.jobs]
    title = f"{title}: {report.machine.dtype} on {report.machine.name}"
    height = 0.34 * sum(heights) + 0.9
    figure, grid = canvas.panels(7.6, height, title, len(report.jobs), height_ratios=heights)
    for axes, job in zip(grid[:, 0], report.jobs):
        names = [timing.program for timing in job.timings]
        rates = [timing.per_second or 0.0 for timing in job.timings]
        bars = axes.barh(names, rates, color=[canvas.BLUE, *[OTHERS] * (len(names) - 1)])
        labels = [f"{rate:,.{2 if rate < 10 else 0}f}" for rate in rates]
        for place, timing in enumerate(job.timings):
            if timing.fault:
                labels[place] = ABOVE_LIMIT if timing.above_limit else "failed"
            elif place and timing.ours_over_this is not None:
                labels[place] += f"  (clearhead: {timing.ours_over_this:.2f} x)"
        axes.bar_label(bars, labels, padding=4, fontsize=8)
        axes.axvline(job.limit, color=canvas.RED, linestyle="--", linewidth=1)
        axes.set_xlim(0, 1.3 * max(job.limit, *rates))
        canvas.name(axes, f"{job.name}; dashed: the limit, by {job.bound_by}", "", size=9)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
    grid[-1, 0].set_xlabel("tokens or pictures a second")
    return figure


def draw_plan(report: MeshReport, title: str) -> Figure:
    """Draw two panels of bars, one bar for each mesh: bytes of a device, and seconds of a step."""
    figure, ((left, right),) = canvas.panels(
        11, 0.5 * len(report.meshes) + 2.4, title, columns=2, sharey=True
    )
    names = [str(plan.mesh) for plan in report.meshes]
    panels = (
        (left, [vars(plan.memory) for plan in report.meshes], 1e9, "memory of a device", "GB"),
        (right, [vars(plan.time) for plan in report.meshes], 1.0, "a step", "seconds"),
    )
    for axes, bars, unit, what, unit_name in panels:
        ticks = range(len(bars))
        before = [0.0] * len(bars)
        for part in bars[0]:
            widths = [bar[part] / unit for bar in bars]
            if any(width > 0.002 * sum(bar.values()) / unit for width, bar in zip(widths, bars)):
                axes.barh(ticks, widths, left=before, label=part)
            before = [start + width for start, width in zip(before, widths)]
        canvas.name(axes, what, unit_name, size=9)
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    for place, plan in enumerate(report.meshes):
        right.text(plan.time.total, place, f" MFU {plan.mfu:.0%}", va="center", fontsize=8)
    left.axvline(report.cluster.memory / 1e9, color="grey", linewidth=0.8, linestyle="--")
    right.set_xlim(0, 1.18 * max(plan.time.total for plan in report.meshes))
    left.set_yticks(range(len(names)), names, fontsize=8)
    left.invert_yaxis()
    for axes in (left, right):
        axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


# Classes ----------------------------------------------------------------------------------------------------


def draw_confusion(counts: ClassCounts, title: str) -> Figure:
    """Draw the confusion matrix: of the examples of each class (a row), the share taken for each."""
    matrix = np.array(counts.confusion, dtype=float)
    totals = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.full_like(matrix, np.nan), where=totals > 0)
    names = [f"{label} ({int(total):,})" for label, total in zip(counts.labels, totals[:, 0])]
    words = ("share of the examples of a class", "class, number of examples", "taken for")
    few = len(counts.labels) <= WRITTEN
    return canvas.heatmap(shares, names, counts.labels, title, *words, low=0, high=1, numbers=few)
