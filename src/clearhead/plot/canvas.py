"""What the pictures share: one look, heat maps, curves, bars, legible labels, and writing to a file."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from clearhead.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any  # an optional dependency: it is imported when something is drawn

FORMATS = (".png", ".svg", ".pdf")
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"  # colours for amounts, and for values of either sign
BLUE, RED = "#2166ac", "#b2182b"  # the ends of the diverging scale
LEGIBLE = 60  # labels that fit on an axis; of more, every n-th is written
LONGEST = 14  # letters of a label


def new(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("drawing needs matplotlib: pip install 'clearhead[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def single(
    width: float,
    height: float,
    title: str,
    x_name: str,
    y_name: str = "",
    grid: Literal["x", "both"] | None = None,
) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, titled and named; `grid` draws lines along them."""
    figure = new(width, height)
    axes = figure.add_subplot()
    name(axes, title, x_name, y_name)
    if grid:
        axes.grid(alpha=0.3, axis=grid)
    return figure, axes


def name(axes: Axes, title: str, x_name: str, y_name: str = "", size: float = 11) -> None:
    """Write a title, and what each axis shows."""
    axes.set_title(plain(title), fontsize=size)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure in the format that the file's ending names; make its folder where there is none."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        ending = path.suffix or "a file without an ending"
        raise InputError(f'a picture "{path}" cannot be written as {ending}: use {", ".join(FORMATS)}')
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
    """Return one table of numbers [rows, columns] as colours; `scale` names what the colours stand for.

    `diverging` centres the colours on zero. `numbers` writes each value into its cell.
    """
    table = np.asarray(values, dtype=float)
    width = min(max(0.28 * table.shape[1] + 2.8, 4.5), 20)
    height = min(max(0.24 * table.shape[0] + 1.8, 3.0), 20)
    figure, axes = single(width, height, title, column_name, row_name)
    image = draw(axes, table, low, high, diverging)
    label_axes(axes, rows, columns)
    if numbers:
        write_numbers(axes, table)
    figure.colorbar(image, ax=axes, label=scale, fraction=0.046)
    return figure


def draw(
    axes: Axes, table: np.ndarray[Any, Any], low: float | None, high: float | None, diverging: bool = False
) -> Any:
    """Draw the colours alone; several axes with the same `low` and `high` have one scale."""
    reach = float(np.nanmax(np.abs(table))) if table.size and not np.all(np.isnan(table)) else 1.0
    if diverging:
        low, high = (-reach if low is None else low), (reach if high is None else high)
    colours = DIVERGING if diverging else SEQUENTIAL
    return axes.imshow(table, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")


def label_axes(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Write the names of rows and columns."""
    label_axis(axes, rows, "y")
    label_axis(axes, columns, "x")


def label_axis(axes: Axes, names: Sequence[str], side: Literal["x", "y"], most: int = LEGIBLE) -> int:
    """Write a label for each row ("y") or column ("x"), of more than `most` every n-th; return n.

    Labels are text: nothing in them is read as mathematics.
    """
    every = max(1, math.ceil(len(names) / most))
    places = list(range(0, len(names), every))
    shown = [plain(shortened(names[place])) for place in places]
    size = 8 if len(places) <= 40 else 7
    upright = all(len(label) <= 2 for label in shown)
    if side == "y":
        axes.set_yticks(places, shown, fontsize=size)
    elif upright:
        axes.set_xticks(places, shown, fontsize=size)
    else:
        axes.set_xticks(places, shown, fontsize=size, rotation=60, ha="right")
    return every


def curves(
    lines: Mapping[str, Sequence[float]],
    places: Sequence[float],
    title: str,
    x_name: str,
    y_name: str,
    ticks: Sequence[str],
) -> Figure:
    """Return curves over the same places, each with its name; `ticks` are written below the places."""
    figure, axes = single(6.5, 4.0, title, x_name, y_name, grid="both")
    for label, values in lines.items():
        axes.plot(places, values, marker="o", markersize=4, label=plain(label))
    axes.set_xticks(list(places), [plain(tick) for tick in ticks], fontsize=8)
    if len(lines) > 1:
        axes.legend(fontsize=8)
    return figure


def bars(
    axes: Axes, values: Sequence[float], names: Sequence[str], colours: Any = BLUE, size: float = 8
) -> None:
    """Draw horizontal bars with their names, from the top."""
    places = range(len(values))
    axes.barh(places, values, color=colours)
    axes.set_yticks(places, [plain(label) for label in names], fontsize=size)
    axes.set_ylim(len(values) - 0.5, -0.5)


def signed_bars(axes: Axes, values: Sequence[float], names: Sequence[str], above: str, below: str) -> None:
    """Draw bars on both sides of zero, in the colours `above` and `below`."""
    bars(axes, values, names, [above if value > 0 else below for value in values])
    axes.axvline(0, color="black", linewidth=0.8)


def write(axes: Axes, row: float, column: float, text: str, size: float = 7, **style: Any) -> None:
    """Write text into the middle of a cell."""
    axes.text(column, row, text, ha="center", va="center", fontsize=size, **style)


def write_numbers(axes: Axes, table: np.ndarray[Any, Any], form: str = "{:.2f}") -> None:
    """Write each value into its cell, with dark edges that keep it legible on any colour."""
    from matplotlib.patheffects import withStroke

    edges = [withStroke(linewidth=1.5, foreground="black")]
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            write(axes, row, column, form.format(value), color="white", path_effects=edges)


def shortened(text: str, most: int = LONGEST) -> str:
    """Return a label of at most `most` letters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def plain(text: str) -> str:
    """Return text in which matplotlib finds no mathematics."""
    return text.replace("$", r"\$")
