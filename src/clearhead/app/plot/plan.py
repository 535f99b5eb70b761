"""One picture of the meshes a model can be trained on: memory by kind, and where the time of a step goes."""

from clearhead.app.plot import canvas
from clearhead.app.plot.canvas import Figure, new, plain
from clearhead.learn.parallel.planner import MeshReport


def draw_plan(found: MeshReport, title: str) -> Figure:
    """Draw two panels of bars, one bar for each mesh: bytes of a device, and seconds of a step."""
    figure = new(11, 0.5 * len(found.meshes) + 2.4)
    figure.suptitle(plain(title), fontsize=11)
    left, right = figure.subplots(1, 2, sharey=True)
    names = [str(one.mesh) for one in found.meshes]
    panels = (
        (left, [vars(one.memory) for one in found.meshes], 1e9, "memory of a device", "GB"),
        (right, [vars(one.time) for one in found.meshes], 1.0, "a step", "seconds"),
    )
    for axes, bars, unit, what, unit_name in panels:
        places = range(len(bars))
        before = [0.0] * len(bars)
        for part in bars[0]:
            widths = [bar[part] / unit for bar in bars]
            if any(width > 0.002 * sum(bar.values()) / unit for width, bar in zip(widths, bars)):
                axes.barh(places, widths, left=before, label=part)
            before = [start + width for start, width in zip(before, widths)]
        canvas.name(axes, what, unit_name, size=9)
        axes.grid(alpha=0.3, axis="x")
        axes.set_axisbelow(True)
    for place, one in enumerate(found.meshes):
        right.text(one.time.total, place, f" MFU {one.mfu:.0%}", va="center", fontsize=8)
    left.axvline(found.cluster.memory / 1e9, color="grey", linewidth=0.8, linestyle="--")
    right.set_xlim(0, 1.18 * max(one.time.total for one in found.meshes))
    left.set_yticks(range(len(names)), names, fontsize=8)
    left.invert_yaxis()
    for axes in (left, right):
        axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure
