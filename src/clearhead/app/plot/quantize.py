"""One picture of what rounding weights to few bits cost: errors by layer, and figures on a text."""

from clearhead.app.plot import canvas
from clearhead.app.plot.canvas import BLUE, RED, Figure, new, plain
from clearhead.inside.quantize import QuantReport

KINDS = 8  # projections that have a line of their own


def draw_quantization(found: QuantReport, title: str) -> Figure:
    """Draw the error of each projection against its layer, and perplexity before and after."""
    measured = found.before is not None and found.after is not None
    figure = new(9.6 if measured else 6.4, 4.2)
    figure.suptitle(
        plain(f"{title}: int{found.bits} by {found.method}, groups of {found.group}"), fontsize=11
    )
    grid = figure.subplots(1, 2 if measured else 1, squeeze=False, width_ratios=[3, 1] if measured else [1])
    axes, outputs = grid[0][0], all(one.output_error is not None for one in found.layers)
    lines: dict[str, list[tuple[int, float]]] = {}
    for one in found.layers:
        before, _, rest = one.name.partition("blocks.")
        number, _, kind = rest.partition(".")
        error = one.output_error if one.output_error is not None and outputs else one.weight_error
        name = f"{before.removeprefix('decoder.')}{kind}" if rest else one.name
        lines.setdefault(name, []).append((int(number) if rest else 0, 100 * error))
    for name, points in list(lines.items())[: 2 * KINDS]:
        alone = len(points) == 1
        axes.plot(*zip(*points), marker="o" if alone else ".", label=name, linestyle="" if alone else "-")
    what = "outputs" if outputs else "weights"
    canvas.name(axes, f"error of {what}", "layer", "length of the error, % of the length", size=9)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    canvas.legend(axes)
    if found.before is not None and found.after is not None:
        values = [found.before.perplexity, found.after.perplexity]
        bars = grid[0][1].bar(["before", "after"], values, color=[BLUE, RED])
        grid[0][1].bar_label(bars, [f"{value:.2f}" for value in values], fontsize=8)
        kl = f"KL {found.after.divergence:.4f} nats a token"
        canvas.name(grid[0][1], f"perplexity; {kl}", f"{found.before.tokens:,} tokens", size=9)
    return figure
