"""What the pictures share: one look, heat maps and curves with legible labels, and writing them to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from clearhead.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
SEQUENTIAL, DIVERGING = (
    "viridis",
    "RdBu_r",
)  # one colour scale for amounts, one for what can be of either sign
LEGIBLE = 60  # labels that fit on an axis; of more, every n-th is written
LONGEST = 14  # letters of a label


def new(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("drawing needs matplotlib: pip install 'clearhead[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as the file's ending says; folders on the way are made."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise InputError(
            f'a picture "{path}" cannot be written as {path.suffix or "a file without an ending"}: use {", ".join(FORMATS)}'
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def heatmap(
    values: ArrayLike,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    scale: str,
    row_name: str = "",
    column_name: str = "",
    low: float | None = None,
    high: float | None = None,
    diverging: bool = False,
    numbers: bool = False,
) -> Figure:
    """One table of numbers [rows, columns] as colours; `scale` names what the colours stand for.

    `diverging` centres the colours on zero. `numbers` writes each value into its cell.
    """
    table = np.asarray(values, dtype=float)
    width = min(max(0.28 * table.shape[1] + 2.8, 4.5), 20)
    height = min(max(0.24 * table.shape[0] + 1.8, 3.0), 20)
    figure = new(width, height)
    axes = figure.add_subplot()
    image = draw(axes, table, low, high, diverging)
    label_axis(axes, rows, "y")
    label_axis(axes, columns, "x")
    axes.set_title(plain(title), fontsize=11)
    axes.set_ylabel(row_name)
    axes.set_xlabel(column_name)
    if numbers:
        write_numbers(axes, table)
    figure.colorbar(image, ax=axes, label=scale, fraction=0.046)
    return figure


def draw(
    axes: Axes, table: np.ndarray[Any, Any], low: float | None, high: float | None, diverging: bool
) -> Any:
    """The colours alone; one scale for several axes where `low` and `high` are given."""
    reach = float(np.nanmax(np.abs(table))) if table.size and not np.all(np.isnan(table)) else 1.0
    if diverging:
        low, high = (-reach if low is None else low), (reach if high is None else high)
    return axes.imshow(
        table,
        cmap=DIVERGING if diverging else SEQUENTIAL,
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="nearest",
    )


def label_axis(axes: Axes, names: Sequence[str], side: str) -> None:
    """A label per row or column; of many, every n-th. Labels are text: nothing in them is read as mathematics."""
    every = max(1, -(-len(names) // LEGIBLE))
    places = list(range(0, len(names), every))
    shown = [plain(shortened(names[place])) for place in places]
    size = 8 if len(places) <= 40 else 7
    if side == "y":
        axes.set_yticks(places, shown, fontsize=size)
    else:
        upright = all(len(name) <= 2 for name in shown)
        axes.set_xticks(
            places, shown, fontsize=size, rotation=0 if upright else 60, ha="center" if upright else "right"
        )


def curves(
    lines: Mapping[str, Sequence[float]],
    places: Sequence[float],
    title: str,
    x_name: str,
    y_name: str,
    ticks: Sequence[str] | None = None,
) -> Figure:
    """Curves over the same places, each with its name; `ticks` are written in place of numbers."""
    figure = new(6.5, 4.0)
    axes = figure.add_subplot()
    for name, values in lines.items():
        axes.plot(places, values, marker="o", markersize=4, label=plain(name))
    if ticks is not None:
        axes.set_xticks(list(places), [plain(tick) for tick in ticks], fontsize=8)
    axes.set_title(plain(title), fontsize=11)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(fontsize=8)
    return figure


def write_numbers(axes: Axes, table: np.ndarray[Any, Any], form: str = "{:.2f}") -> None:
    """Each value in its cell."""
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            axes.text(
                column,
                row,
                form.format(value),
                ha="center",
                va="center",
                fontsize=7,
                color="white",
                path_effects=_outline(),
            )


def _outline() -> list[Any]:
    """Dark edges that keep white letters legible on any colour."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=1.5, foreground="black")]


def shortened(name: str) -> str:
    """A label that fits on an axis."""
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def plain(text: str) -> str:
    """Text in which matplotlib finds no mathematics."""
    return text.replace("$", r"\$")
