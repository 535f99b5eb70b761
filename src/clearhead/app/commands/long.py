"""The command `long`: what a model does with long contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import clearhead as ch
from clearhead.app.commands.common import (
    DATA,
    Device,
    Dtype,
    Folder,
    Json,
    Plot,
    Tokenizer,
    load_model,
    option,
    print_notes,
    progress,
    show_result,
)
from clearhead.app.report import count, size, table

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.long import RetrievalGrid
    from clearhead.inside.long_text import Growth, PositionLoss, ScalingTry

Part = Literal["perplexity", "retrieval", "cost"]


def long(
    folder: Folder,
    text: Annotated[
        tuple[str, ...],
        option(f"a long text: {DATA}; default: what the run held out", metavar="FILE", aliases=("--data",)),
    ] = (),
    length: Annotated[
        int | None, option("tokens of a row; default: twice the trained length, or all learned positions")
    ] = None,
    parts: Annotated[
        tuple[Part, ...],
        option("loss by position; needles by length and depth; time and memory by length"),
    ] = ("perplexity", "retrieval", "cost"),
    scalings: Annotated[
        tuple[str, ...],
        option(
            "scalings of rotary positions to try at 1, 2 and 4 times the trained length: "
            "none, own, linear, ntk, yarn, llama3; yarn:8 has factor 8",
            metavar="NAME",
        ),
    ] = (),
    rows: Annotated[int, option("rows of text that losses are a mean over, at most")] = 8,
    bins: Annotated[int, option("bins of positions")] = 16,
    trials: Annotated[int, option("contexts of each probe, length and depth")] = 10,
    seed: Annotated[int, option("random seed of needles and tokens")] = 0,
    plot: Plot = None,
    tokenizer: Tokenizer = None,
    device: Device = "auto",
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Measure a language model on long contexts: loss by position, retrieval, cost, scalings of RoPE.

    For example:
      clearhead long my-gpt/ --text book.txt
      clearhead long my-gpt/ --text book.txt --length 4096 --plot long.png
      clearhead long my-gpt/ --text book.txt --parts perplexity --scalings ntk yarn
      clearhead long my-gpt/ --parts cost --length 8192 --json
    """
    model = load_model(folder, tokenizer, device, dtype, plot)
    with progress() as on_progress:
        found = ch.long(
            model,
            text,
            length=length,
            parts=parts,
            scalings=scalings,
            rows=rows,
            bins=bins,
            trials=trials,
            seed=seed,
            on_progress=on_progress,
        )
    print_notes(found.notes)
    show_result(found.to_dict(), json, _shown(found), plot, lambda: _draw(found, folder.resolve().name))


def _draw(found: ch.LongReport, name: str) -> Any:
    from clearhead.app.plot.long import draw_long

    return draw_long(found, f"{name}: trained length {found.trained:,}, rows of {found.length:,} tokens")


def _shown(found: ch.LongReport) -> Iterator[Table]:
    """Give the tables of the parts that were asked for."""
    if found.perplexity is not None:
        yield _position_table(found.perplexity)
    if found.scalings:
        yield _scaling_table(found.scalings, found.trained)
    for grid in found.retrieval:
        yield _grid_table(grid)
    if found.cost is not None:
        yield _cost_table(found.cost)


def _position_table(found: PositionLoss) -> Table:
    sides = [("trained length", found.within), ("past it", found.beyond)]
    named = [(f"{one.start:,} to {one.stop - 1:,}", one) for one in found.bins]
    named += [(name, one) for name, one in sides if one is not None]
    lines: list[tuple[str, ...]] = [
        (name, f"{one.targets:,}", f"{one.loss:.4f}", f"{one.perplexity:,.2f}") for name, one in named
    ]
    lines.insert(len(found.bins), ())
    title = f"loss by position: {found.rows} rows, trained length {found.trained:,}"
    return table(title, ("positions", ">targets", ">loss", ">perplexity"), lines)


def _scaling_table(tries: tuple[ScalingTry, ...], trained: int) -> Table:
    lengths = [f">{length:,} ({length // trained} x)" for length in tries[0].lengths]
    lines = ((one.name, *(f"{value:,.2f}" for value in one.perplexities)) for one in tries)
    title = f"perplexity of the same {tries[0].targets:,} tokens, by tokens read"
    return table(title, ("scaling", *lengths), lines)


def _grid_table(grid: RetrievalGrid) -> Table:
    lines = (
        (f"{length:,}", *("" if share != share else f"{share:.2f}" for share in row), _mean(exact))
        for length, row, exact in zip(grid.lengths, grid.right.tolist(), grid.exact)
    )
    title = f"{grid.probe}: right of {grid.trials} trials, by depth; chance {grid.chance:.3f}"
    headings = (">tokens", *(f">{depth:.0%}" for depth in grid.depths), ">exact, all depths")
    return table(title, headings, lines)


def _mean(values: Any) -> str:
    mean = float(values.mean())
    return "do not fit" if mean != mean else f"{mean:.2f}"


def _cost_table(found: Growth) -> Table:
    lines: list[tuple[str, ...]] = [
        (
            f"{one.length:,}",
            f"{1000 * one.seconds:,.2f}",
            size(one.peak),
            count(one.flops),
            size(one.activations),
        )
        for one in found.points
    ]
    lines += [
        (),
        ("slope", *(f"{found.slopes[name]:.2f}" for name in ("seconds", "peak", "flops", "activations"))),
    ]
    return table(
        "a forward pass by length, without the head",
        (">tokens", ">ms", ">peak memory", ">FLOPs", ">activations"),
        lines,
        "measured: ms, peak memory; from ch.cost: FLOPs, activations that training keeps",
    )
