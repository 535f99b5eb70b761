"""Tables for the terminal, from data that other modules compute. rich is imported when a table is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import clearhead as ch

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.learn.evaluation.metrics import ClassCounts

Cell = str | Sequence[str | tuple[str, str]]  # text, or parts of it, each plain or with its style
Column = str | Callable[[Any], Cell]  # how an item is written in a column, such as "{.loss:.4f}"
SHADES = " .:-=+*#%@"
PARTS = ("embedding", "positions", "attention", "cross", "feedforward", "norms", "head", "total")
MATRIX, MISTAKES = 8, 10  # classes of a matrix in the terminal; mistakes listed where there are more
VERDICTS = {
    "equal": ("equal", "green"),
    "differs": ("DIFFERS", "bold red"),
    "error": ("ERROR", "bold red"),
    "skipped": ("skipped", "yellow"),
}


def table(
    title: str,
    headings: Iterable[str],
    rows: Iterable[Iterable[Cell]],
    caption: str | None = None,
    **style: Any,
) -> Table:
    """Return a table of rows.

    Args:
        title: printed above the table.
        headings: one for each column; ">" in front of a heading aligns its column at the right.
        rows: cells, printed as they are, without markup; an empty row draws a line across.
        caption: printed below the table.
        style: further options of rich's `Table`.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        caption=None if caption is None else Text(caption),
        caption_justify="left",
        **style,
    )
    for heading in headings:
        right = heading.startswith(">")
        table.add_column(heading.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for cells in (list(row) for row in rows):
        if cells:
            table.add_row(*(Text(cell) if isinstance(cell, str) else Text.assemble(*cell) for cell in cells))
        else:
            table.add_section()
    return table


def listing(
    title: str, columns: Mapping[str, Column], items: Iterable[Any], caption: str | None = None, **style: Any
) -> Table:
    """Return a table with a row for each item, from its columns by their headings; else as `table`."""
    rows = (
        [form.format(item) if isinstance(form, str) else form(item) for form in columns.values()]
        for item in items
    )
    return table(title, columns, rows, caption, **style)


def count(number: float) -> str:
    """Return a large number as people write it: 124.4M, 8.03B."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= unit:
            return f"{number / unit:.2f}{name}"
    return f"{number:,.0f}"


def size(number: float) -> str:
    """Return a number of bytes as people write it, in powers of ten: 498 MB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:.0f} B"


def cost_table(figures: ch.Cost, name: str) -> Table:
    """Show parameters, FLOPs and activations by part, then memory."""
    flops, memory = figures.flops, figures.memory
    rows: list[Sequence[str]] = []
    for part in PARTS:
        counted = (figures.parameters, flops.forward, flops.backward, memory.activations)
        parameters, forward, backward, kept = (getattr(figure, part) for figure in counted)
        if part == "total":
            rows.append(())
        if parameters or forward or kept:
            rows.append((part, f"{parameters:,}", count(forward), count(forward + backward), size(kept)))
    caches = {"KV cache": memory.kv_cache, "cross cache": memory.cross_cache}
    rows += [
        (),
        ("per token", "", count(flops.forward_per_token), count(flops.training_per_token)),
        ("weights", size(memory.weights)),
        *((label, size(cache)) for label, cache in caches.items() if cache),
        ("to train", size(memory.training)),
    ]
    title = f"{name}: {figures.length} tokens, batch {figures.batch}, {figures.dtype}"
    learning = "to train: AdamW, with weights, gradients and moments in float32"
    half = figures.dtype in ("bfloat16", "float16")
    caption = f"{learning}, matmuls in {figures.dtype} (train.precision)" if half else learning
    headings = ("part", ">parameters", ">FLOPs forward", ">FLOPs training", ">activations")
    return table(title, headings, rows, caption)


def check_table(checks: Sequence[ch.Check]) -> Table:
    """Show one line for each check: the largest difference, the tolerance, the verdict, the time."""
    columns: dict[str, Column] = {
        "check": "{.name}",
        ">difference": lambda check: "" if check.difference is None else f"{check.difference:.1e}",
        ">allowed": "{.tolerance:.0e}",
        "verdict": lambda check: [VERDICTS[check.verdict]],
        ">ms": lambda check: f"{check.seconds * 1000:.0f}",
    }
    return listing("equality checks", columns, checks, box=None, padding=(0, 1, 0, 0))


def check_details(checks: Sequence[ch.Check], every: bool) -> list[str]:
    """Return a line on what each row compared, and why it was left out or went wrong; or failures alone."""
    return [
        f"{check.name}: {check.compared}" + (f". {check.note}" if check.note else "")
        for check in checks
        if every or not check.passed
    ]


def score_table(result: ch.Score, words: Sequence[str]) -> Table:
    """Show each token with its log-probability, under the total and the perplexity."""
    logprobs = ("" if value is None else f"{value:.4f}" for value in result.logprobs)
    title = f"log-probability {result.total:.3f}, perplexity {result.perplexity:.3f}"
    return table(title, ("token", ">id", ">log-probability"), zip(words, map(str, result.ids), logprobs))


def class_table(result: ch.Classification) -> Table:
    """Show every class with its probability, the best first."""
    ranked = sorted(result.scores.items(), key=lambda score: -score[1])
    title = f"{result.label}: {result.probability:.4f}"
    return listing(title, {"class": "{[0]}", ">probability": "{[1]:.4f}"}, ranked)


def confusion_tables(counts: ClassCounts) -> list[Table]:
    """Show the figures of each class, then the confusion matrix, or of many classes the main mistakes."""
    labels = counts.labels
    few = len(labels) <= MATRIX
    figures = (
        (
            f"{number} {figure.label}" if few else figure.label,
            *(f"{value:.4f}" for value in (figure.precision, figure.recall, figure.f1)),
            f"{figure.examples:,}",
        )
        for number, figure in enumerate(counts, start=1)
    )
    classes = table("classes", ("class", ">precision", ">recall", ">F1", ">examples"), figures)
    if few:  # by their numbers: names would leave no room for the counts
        rows = ((str(number), *map(str, row)) for number, row in enumerate(counts.confusion, start=1))
        headings = ("class", *(f">{number}" for number in range(1, len(labels) + 1)))
        return [classes, table("rows taken for columns", headings, rows)]
    mistakes = sorted(
        (-count, wanted, predicted)
        for wanted, row in zip(labels, counts.confusion)
        for predicted, count in zip(labels, row)
        if count and wanted != predicted
    )
    rows = ((wanted, predicted, str(-count)) for count, wanted, predicted in mistakes[:MISTAKES])
    return [classes, table("the most frequent mistakes", ("class", "taken for", ">examples"), rows)]


def tag_table(result: ch.Tags) -> Table:
    """Show each word with its tag, then the spans."""
    words, spans = (
        [(span.text, span.label, f"{span.start}-{span.end}", f"{span.score:.4f}") for span in part]
        for part in (result.words, result.spans)
    )
    title = f"{len(words)} words, {len(spans)} spans"
    return table(title, ("text", "tag", ">characters", ">probability"), [*words, (), *spans])


def fill_table(masks: Sequence[Sequence[ch.Candidate]]) -> Table:
    """Show the candidates of each mask."""
    rows: list[Sequence[str]] = []
    for mask in masks:
        rows += [
            (),
            *((candidate.token, f"{candidate.probability:.4f}", candidate.text) for candidate in mask),
        ]
    return table("", ("token", ">probability", "text"), rows)


def attention_map(pattern: Any, rows: Sequence[str], columns: Sequence[str]) -> str:
    """Draw one head's pattern [T, S] in characters, darker for more: a row per query, a column per key."""
    darkest = len(SHADES) - 1
    drawn = (
        " ".join(SHADES[min(int(weight * len(SHADES)), darkest)] for weight in weights)
        for weights in pattern.tolist()
    )
    heading = "    " + " ".join(f"{label:>1}" for label in columns)
    return "\n".join([heading, *(f"  {label:>1} {shades}" for label, shades in zip(rows, drawn))])
