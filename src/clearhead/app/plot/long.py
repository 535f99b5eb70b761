"""One picture of how a model does on long contexts: a panel for each part of the report."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

from clearhead.app.plot import canvas
from clearhead.app.plot.canvas import BLUE, RED, Axes, Figure, new, plain
from clearhead.inside.long import LongReport, RetrievalGrid
from clearhead.inside.long_text import Growth, PositionBin

COLUMNS = 2
MOST_TICKS = 6  # lengths that are written below an axis


def draw_long(found: LongReport, title: str) -> Figure:
    """Draw perplexity by position, with each scaling, needles by length and depth, and the cost."""
    panels: list[Callable[[Axes], None]] = []
    if found.perplexity is not None:
        bins, rows = found.perplexity.bins, found.perplexity.rows
        panels.append(lambda axes: _curves(axes, {"": bins}, found.trained, f"perplexity, {rows} rows"))
    if found.scalings:
        curves = {one.name: one.bins for one in found.scalings}
        panels.append(lambda axes: _curves(axes, curves, found.trained, "scalings of rotary positions"))
    panels += [functools.partial(_grid, found=grid) for grid in found.retrieval]
    growth = found.cost
    if growth is not None:
        panels += [
            lambda axes: _growth(axes, growth, "seconds", "flops", "time and FLOPs"),
            lambda axes: _growth(axes, growth, "peak", "activations", "peak memory and activations"),
        ]
    lines = math.ceil(len(panels) / COLUMNS)
    figure = new(5.2 * min(COLUMNS, len(panels)), 3.3 * lines + 0.4)
    figure.suptitle(plain(title), fontsize=11)
    grid = list(figure.subplots(lines, min(COLUMNS, len(panels)), squeeze=False).flat)
    for axes in grid:
        axes.set_axis_off()
    for axes, panel in zip(grid, panels):
        axes.set_axis_on()
        panel(axes)
    return figure


def _curves(axes: Axes, curves: Mapping[str, Sequence[PositionBin]], trained: int, title: str) -> None:
    """Draw perplexity against position, one line for each name, and where the trained length ends."""
    for name, bins in curves.items():
        middle = [(one.start + one.stop) / 2 for one in bins]
        axes.plot(middle, [one.perplexity for one in bins], marker="o", markersize=3, label=name)
    axes.axvline(trained, color="grey", linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    canvas.name(axes, f"{title} (dashed: trained length)", "position", "perplexity", size=9)
    canvas.number_ticks(axes, "y")
    axes.grid(alpha=0.3, which="both")
    if len(curves) > 1:
        canvas.legend(axes)


def _grid(axes: Axes, found: RetrievalGrid) -> None:
    """Draw the share of right answers, length across and depth downwards."""
    canvas.draw(
        axes,
        found.right.T,
        0.0,
        1.0,
        rows=[f"{depth:.0%}" for depth in found.depths],
        columns=[f"{length:,}" for length in found.lengths],
        numbers="{:.2f}",
    )
    title = f"{found.probe}: right answers, by chance {found.chance:.3g}"
    canvas.name(axes, title, "tokens of the context", "depth", size=9)


def _growth(axes: Axes, found: Growth, measured: str, computed: str, title: str) -> None:
    """Draw a measured quantity, and a computed one that is scaled to meet it at the longest row."""
    lengths, slopes = [point.length for point in found.points], found.slopes
    ours, theirs = ([getattr(point, name) for point in found.points] for name in (measured, computed))
    scale = ours[-1] / theirs[-1]
    axes.plot(lengths, ours, marker="o", color=BLUE, label=f"{measured}, slope {slopes[measured]:.2f}")
    label = f"{computed} (scaled), slope {slopes[computed]:.2f}"
    axes.plot(lengths, [value * scale for value in theirs], linestyle="--", color=RED, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    canvas.name(axes, f"forward pass: {title}", "tokens", "memory" if measured == "peak" else "time", size=9)
    shown = lengths[:: max(1, math.ceil(len(lengths) / MOST_TICKS))]
    axes.set_xticks(shown, [f"{length:,}" for length in shown])
    axes.minorticks_off()
    canvas.number_ticks(axes, "y", "B" if measured == "peak" else "s")
    axes.grid(alpha=0.3, which="both")
    canvas.legend(axes)
