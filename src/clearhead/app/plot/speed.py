"""One picture of how fast a model is here: a panel for each job, a bar for each program, and the limit."""

from clearhead.app.plot import canvas
from clearhead.app.plot.canvas import BLUE, RED, Figure, new, plain
from clearhead.labs.speed.compare import ABOVE_LIMIT, SpeedReport

OTHERS = "#9aa5b1"  # bars of other programs


def draw_speed(found: SpeedReport, title: str) -> Figure:
    """Draw tokens or pictures a second of each program, clearhead's bar in colour."""
    heights = [len(job.timings) + 1.2 for job in found.jobs]
    figure = new(7.6, 0.34 * sum(heights) + 0.9)
    machine = found.machine
    figure.suptitle(plain(f"{title}: {machine.dtype} on {machine.name}"), fontsize=11)
    grid = figure.subplots(len(found.jobs), 1, squeeze=False, height_ratios=heights)
    for axes, job in zip(grid[:, 0], found.jobs):
        names = [one.program for one in job.timings]
        rates = [one.per_second or 0.0 for one in job.timings]
        bars = axes.barh(names, rates, color=[BLUE, *[OTHERS] * (len(names) - 1)])
        said = [f"{rate:,.{2 if rate < 10 else 0}f}" for rate in rates]
        for place, one in enumerate(job.timings):
            if one.fault:
                said[place] = ABOVE_LIMIT if one.above_limit else "failed"
            elif place and one.ours_over_this is not None:
                said[place] += f"  (clearhead: {one.ours_over_this:.2f} x)"
        axes.bar_label(bars, said, padding=4, fontsize=8)
        axes.axvline(job.limit, color=RED, linestyle="--", linewidth=1)
        axes.set_xlim(0, 1.3 * max(job.limit, *rates))
        canvas.name(axes, f"{job.name}; dashed: the limit, by {job.bound_by}", "", size=9)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
    grid[-1, 0].set_xlabel("tokens or pictures a second")
    return figure
