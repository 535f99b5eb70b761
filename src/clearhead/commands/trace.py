"""The command that shows a forward pass, step by step."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder, Json, show_result

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from clearhead.config import ModelConfig
    from clearhead.inside.trace import Prediction, Trace, TraceRow, TraceStep

WIDTH = 190  # columns, where the output is no terminal
DETAILS = {
    "formula": 165,
    "shape": 80,
    "is": 100,
    "first values": 125,
    "mean ± std": 145,
    "range": 185,
}  # and the width that each needs


def trace(
    folder: Folder,
    given: Annotated[
        Positional[str],
        arg(metavar="TEXT|IMAGE", help="what the model reads: a text, or the path of an image"),
    ],
    target: Annotated[
        str | None, arg(help="encoder-decoder: what has been written so far; default: what it writes itself")
    ] = None,
    pair: Annotated[str | None, arg(help="the second text of a pair, for an encoder")] = None,
    depth: Annotated[
        int | None, arg(help="1: stacks, 2: blocks, 3: sublayers, 4: all steps (default; with --layer: 2)")
    ] = None,
    layer: Annotated[int | None, arg(help="open this block in full")] = None,
    top: Annotated[int, arg(help="candidates to show")] = 5,
    why: Annotated[bool, arg(help="say beside each step why it is there")] = False,
    tokenizer: Annotated[
        Path | None, arg(help="a tokenizer that lies elsewhere: a directory or file")
    ] = None,
    json: Json = False,
) -> None:
    """The forward pass, step by step: shapes, values, parameters, FLOPs, bytes and time, from the text to what comes next.

    For example:
      clearhead trace my-model/ "The cat sat on the"
      clearhead trace my-model/ "The cat sat on the" --layer 3 --why
      clearhead trace my-translator/ "Ein Hund schläft" --target "A dog" --depth 3
      clearhead trace my-vit/ photo.png --json
    """
    from clearhead.bundle import load
    from clearhead.errors import InputError
    from clearhead.inside.trace import trace as run

    if depth is not None and not 1 <= depth <= 4:
        raise InputError(f"depth {depth} is not known: 1 shows stacks, 2 blocks, 3 sublayers, 4 all steps")
    loaded = load(folder, tokenizer=tokenizer)
    seen = run(loaded, given, target, pair, top, keep_values=False)
    rows = seen.rows(depth or (4 if layer is None else 2), layer)

    def show(console: Console) -> None:
        if not console.is_terminal:
            console.width = max(console.width, WIDTH)
        console.print(steps_table(seen, rows, console.width, why))
        console.print(
            "; ".join(f"{letter} {meaning}" for letter, meaning in seen.legend.items()),
            style="dim",
            highlight=False,
        )
        shown = _shown(seen, loaded.config, loaded.special.get("mask"))
        if shown:
            console.print(_predictions_table(shown, loaded.config))
        line = f"walked step by step and run as one, the results differ by {seen.difference:.1e} at most"
        console.print(line, style="dim", highlight=False)

    show_result(seen.to_dict(), json, show)


def steps_table(seen: Trace, rows: tuple[TraceRow, ...], width: int, why: bool = False) -> Table:
    """One line per row of the tree, groups with their sums; a narrow terminal gets fewer columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from clearhead.report import count, size

    details = [heading for heading, needed in DETAILS.items() if width >= needed]
    table = Table(
        title="the forward pass, step by step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    table.add_column("step", no_wrap=True)
    for heading in details:
        table.add_column(heading, no_wrap=heading != "formula")
    for heading in ("parameters", "FLOPs", "bytes", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    if why:
        table.add_column("why")
    for row in rows:
        step = row.step
        name = Text("  " * (row.level - 1) + row.title, style="" if step else "bold")
        cells = [Text("" if step is None else _detail(step, heading)) for heading in details]
        figures = [
            *(count(x) if x else "" for x in (row.parameters, row.flops)),
            size(row.bytes),
            f"{row.seconds * 1000:.3f}",
        ]
        table.add_row(name, *cells, *figures, *([Text(step.why if step else "", style="dim")] if why else []))
    table.add_section()
    figures = [f"{seen.parameters:,}", count(seen.flops), size(seen.bytes), f"{seen.seconds * 1000:.3f}"]
    table.add_row(Text("total", style="bold"), *[""] * len(details), *figures)
    return table


def _detail(step: TraceStep, heading: str) -> str:
    """What stands in one of the columns of DETAILS."""
    peek = step.peek
    if heading == "formula":
        return step.formula
    if heading == "shape":
        return step.symbols
    if heading == "is":
        return " ".join(map(str, step.shape))
    if heading == "mean ± std":
        return "" if peek.mean is None or peek.std is None else f"{peek.mean:.3g} ± {peek.std:.3g}"
    if heading == "range":
        return "" if peek.min is None or peek.max is None else f"{peek.min:.3g} … {peek.max:.3g}"
    if step.sample:
        return " ".join(step.sample[:6]) + (" …" if len(step.sample) > 6 else "")
    words = ["hidden" if value < -1e38 else f"{value:.4g}" for value in peek.first[:3]]
    return " ".join(words) + (" …" if prod(step.shape) > 3 else "")


def _shown(seen: Trace, config: ModelConfig, mask: int | None) -> list[Prediction]:
    """The predictions worth a line: what comes next, what stands behind a mask, or all there are."""
    if config.head == "lm" and config.family == "decoder":
        return list(seen.predictions[-1:])
    if config.head == "mlm" and mask is not None:
        masked = [prediction for prediction in seen.predictions if prediction.id == mask]
        return masked or list(seen.predictions)
    return list(seen.predictions)


def _predictions_table(predictions: list[Prediction], config: ModelConfig) -> Table:
    """What the head finds likely; for an encoder-decoder one line for each token it writes."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    writes = config.head == "lm"
    title = (
        "token by token"
        if config.family == "encoder-decoder"
        else "what comes next"
        if writes
        else "what the head says"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("after" if writes else "at")
    table.add_column("writes" if writes else "says")
    table.add_column("probability", justify="right")
    table.add_column("candidates")
    for one in predictions:
        place = one.at if one.position is None else f"{one.position} {one.at}"
        candidates = "  ".join(f"{choice.label} {choice.probability:.4f}" for choice in one.candidates)
        table.add_row(Text(place), Text(one.chosen.label), f"{one.chosen.probability:.4f}", Text(candidates))
    return table
