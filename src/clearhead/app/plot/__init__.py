"""What the pictures share: one look, heat maps, bars, legible labels, and writing to a file."""

import math
from collections.abc import Sequence
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
    size: float = 11,
) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, titled and named; `grid` draws lines along them."""
    figure = new(width, height)
    axes = figure.add_subplot()
    name(axes, title, x_name, y_name, size)
    if grid:
        axes.grid(alpha=0.3, axis=grid)
        axes.set_axisbelow(True)
    return figure, axes


def panels(
    width: float, height: float, title: str, rows: int = 1, columns: int = 1, size: float = 11, **ratios: Any
) -> tuple[Figure, Any]:
    """Return a titled figure with a grid of axes [rows, columns]; `ratios` are those of `subplots`."""
    figure = new(width, height)
    if title:
        figure.suptitle(plain(title), fontsize=size, wrap=True)
    return figure, figure.subplots(rows, columns, squeeze=False, **ratios)


def name(axes: Axes, title: str, x_name: str, y_name: str = "", size: float = 11) -> None:
    """Write a title, and what each axis shows."""
    axes.set_title(plain(title), fontsize=size, wrap=True)
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
    rows: Sequence[object],
    columns: Sequence[object],
    title: str,
    scale: str,
    row_name: str = "",
    column_name: str = "",
    low: float | None = None,
    high: float | None = None,
    diverging: bool = False,
    root: bool = False,
    numbers: bool = False,
) -> Figure:
    """Return one table of numbers [rows, columns] as colours; `scale` names what the colours stand for.

    `low`, `high`, `diverging` and `root` are as in `draw`. `numbers` writes each value into its cell.
    """
    table = np.asarray(values, dtype=float)
    width = min(max(0.28 * table.shape[1] + 2.8, 4.5), 13)  # wider, the words would be too small to read
    height = min(max(0.24 * table.shape[0] + 1.8, 3.0), 12)
    figure, axes = single(width, height, title, column_name, row_name)
    image = draw(axes, table, low, high, diverging, root, rows, columns, numbers="{:.2f}" if numbers else "")
    figure.colorbar(image, ax=axes, label=scale, fraction=0.046)
    return figure


def draw(
    axes: Axes,
    table: np.ndarray[Any, Any],
    low: float | None,
    high: float | None,
    diverging: bool = False,
    root: bool = False,
    rows: Sequence[object] = (),
    columns: Sequence[object] = (),
    numbers: str = "",
) -> Any:
    """Draw the colours of one table; several axes with the same `low` and `high` have one scale.

    `diverging` centres the colours on zero. `root` gives small values more of them: colours go by the root.
    `rows` and `columns` are the labels. `numbers` is how each value is written into its cell, as "{:.2f}".
    """
    from matplotlib.colors import Normalize, PowerNorm

    if diverging:
        reach = float(np.nanmax(np.abs(table))) if table.size and not np.all(np.isnan(table)) else 1.0
        low, high = (-reach if low is None else low), (reach if high is None else high)
    scale = PowerNorm(0.5, low, high) if root else Normalize(low, high)
    colours = DIVERGING if diverging else SEQUENTIAL
    image = axes.imshow(table, cmap=colours, norm=scale, aspect="auto", interpolation="nearest")
    if len(rows) or len(columns):
        label_axis(axes, rows, "y")
        label_axis(axes, columns, "x")
    if numbers:
        write_numbers(axes, table, numbers, image)
    return image


def label_axis(axes: Axes, names: Sequence[object], side: Literal["x", "y"], most: int = LEGIBLE) -> int:
    """Write a label for each row ("y") or column ("x"), of more than `most` every n-th; return n.

    Labels are text or numbers: nothing in them is read as mathematics.
    """
    every = max(1, math.ceil(len(names) / most))
    ticks = list(range(0, len(names), every))
    shown = [plain(shortened(str(names[tick]))) for tick in ticks]
    upright = side == "y" or all(len(label) <= 2 for label in shown)
    style: dict[str, Any] = {} if upright else {"rotation": 60, "ha": "right"}
    axis = axes.yaxis if side == "y" else axes.xaxis
    axis.set_ticks(ticks, shown, fontsize=8 if len(ticks) <= 40 else 7, **style)
    return every


def legend(axes: Axes, size: float = 7, columns: int = 2) -> None:
    """Write the legend below the axes, where it covers no line."""
    place: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 40 / size}  # points
    axes.legend(fontsize=size, ncols=columns, frameon=False, **place)


def number_ticks(axes: Axes, side: Literal["x", "y"], unit: str = "") -> None:
    """Write the ticks of a logarithmic axis as numbers, 400 or 2 ms, not as powers of ten."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axis = axes.yaxis if side == "y" else axes.xaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(EngFormatter(unit))
    low, high = axis.get_view_interval()
    if low > 0 and high / low < 5:  # too few ticks of 1, 2, 5
        axis.set_major_locator(LogLocator(subs=tuple(range(1, 10))))
    axis.set_minor_formatter(NullFormatter())


def bars(
    axes: Axes, values: Sequence[float], names: Sequence[str], colours: Any = BLUE, size: float = 8
) -> None:
    """Draw horizontal bars with their names, from the top."""
    ticks = range(len(values))
    axes.barh(ticks, values, color=colours)
    axes.set_yticks(ticks, [plain(label) for label in names], fontsize=size)
    axes.set_ylim(len(values) - 0.5, -0.5)


def signed_bars(axes: Axes, values: Sequence[float], names: Sequence[str], above: str, below: str) -> None:
    """Draw bars on both sides of zero, in the colours `above` and `below`."""
    bars(axes, values, names, [above if value > 0 else below for value in values])
    axes.axvline(0, color="black", linewidth=0.8)


def write(axes: Axes, row: float, column: float, text: str, size: float = 7, **style: Any) -> None:
    """Write text into the middle of a cell."""
    axes.text(column, row, text, ha="center", va="center", fontsize=size, **style)


def write_numbers(axes: Axes, table: np.ndarray[Any, Any], form: str, image: Any) -> None:
    """Write each value into its cell of `image`, in an ink that stands out."""
    for (row, column), value in np.ndenumerate(table):
        if not np.isnan(value):
            write(axes, row, column, form.format(value), color=ink(image.cmap(image.norm(value))))


def ink(colour: Sequence[float]) -> str:
    """Return "black" or "white", whichever has the larger contrast (WCAG 2) with a colour [RGB]."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if (light + 0.05) ** 2 > 1.05 * 0.05 else "white"


def shortened(text: str, most: int = LONGEST) -> str:
    """Return a label of at most `most` letters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def plain(text: str) -> str:
    """Return text in which matplotlib finds no mathematics."""
    return text.replace("$", r"\$")
