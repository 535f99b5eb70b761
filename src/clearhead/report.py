"""Tables for the terminal, from data that other modules compute."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text
from torch import Tensor

from clearhead.costs import Cost
from clearhead.inside.checks.row import Check
from clearhead.tasks.results import Candidate, Classification, Score, Tags

SHADES = " .:-=+*#%@"


def count(number: float) -> str:
    """A large number as people write it: 124.4M, 8.03B."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= size:
            return f"{number / size:.2f}{unit}"
    return f"{number:,.0f}"


def size(number: float) -> str:
    """Bytes as people write them, in powers of ten: 498 MB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:.0f} B"


def cost_table(figures: Cost, name: str) -> Table:
    """Parameters and FLOPs by part, then memory."""
    title = f"{name}: {figures.length} tokens, batch {figures.batch}, {figures.dtype}"
    table = Table(title=title, title_justify="left")
    for heading in ("part", "parameters", "FLOPs forward", "FLOPs training", "activations"):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for part in ("embedding", "positions", "attention", "cross", "feedforward", "norms", "head", "total"):
        parameters, forward = getattr(figures.parameters, part), getattr(figures.flops.forward, part)
        backward, kept = getattr(figures.flops.backward, part), getattr(figures.memory.activations, part)
        if parameters or forward or kept:
            if part == "total":
                table.add_section()
            table.add_row(part, f"{parameters:,}", count(forward), count(forward + backward), size(kept))
    table.add_section()
    memory = figures.memory
    table.add_row(
        "per token", "", count(figures.flops.forward_per_token), count(figures.flops.training_per_token), ""
    )
    table.add_row("weights", size(memory.weights), "", "", "")
    if memory.kv_cache:
        table.add_row("KV cache", size(memory.kv_cache), "", "", "")
    if memory.cross_cache:
        table.add_row("cross cache", size(memory.cross_cache), "", "", "")
    table.add_row("to train", size(memory.training), "", "", "")
    return table


VERDICTS = {
    "equal": ("equal", "green"),
    "differs": ("DIFFERS", "bold red"),
    "error": ("ERROR", "bold red"),
    "skipped": ("skipped", "yellow"),
}


def check_table(rows: Sequence[Check]) -> Table:
    """One line per check: what was compared, the largest difference, the tolerance, the verdict; or why nothing was compared."""
    table = Table(title="equality checks", title_justify="left")
    for heading in ("check", "compared", "difference", "allowed", "verdict", "ms"):
        table.add_column(heading, justify="right" if heading in ("difference", "allowed", "ms") else "left")
    for row in rows:
        words, style = VERDICTS[row.verdict]
        said = Text(f"{row.compared}\n{row.note}" if row.note else row.compared)
        difference = "" if row.difference is None else f"{row.difference:.1e}"
        table.add_row(
            row.name,
            said,
            difference,
            f"{row.tolerance:.0e}",
            Text(words, style=style),
            f"{row.seconds * 1000:.0f}",
        )
    return table


def score_table(result: Score, words: Sequence[str]) -> Table:
    """One line per token with its log-probability, then the total and the perplexity."""
    table = Table(
        title=f"log-probability {result.total:.3f}, perplexity {result.perplexity:.3f}", title_justify="left"
    )
    table.add_column("token")
    table.add_column("id", justify="right")
    table.add_column("log-probability", justify="right")
    for word, token, value in zip(words, result.ids, result.logprobs):
        table.add_row(Text(word), str(token), "" if value is None else f"{value:.4f}")
    return table


def class_table(result: Classification) -> Table:
    """Every class with its probability, the best first."""
    table = Table(title=f"{result.label}: {result.probability:.4f}", title_justify="left")
    table.add_column("class")
    table.add_column("probability", justify="right")
    for label, value in sorted(result.scores.items(), key=lambda score: -score[1]):
        table.add_row(Text(label), f"{value:.4f}")
    return table


def tag_table(result: Tags) -> Table:
    """One line per word with its tag; then the spans."""
    table = Table(title=f"{len(result.words)} words, {len(result.spans)} spans", title_justify="left")
    for heading in ("text", "tag", "characters", "probability"):
        table.add_column(heading, justify="right" if heading in ("characters", "probability") else "left")
    for part in (result.words, result.spans):
        table.add_section()
        for one in part:
            table.add_row(Text(one.text), Text(one.label), f"{one.start}-{one.end}", f"{one.score:.4f}")
    return table


def fill_table(masks: Sequence[Sequence[Candidate]]) -> Table:
    """The candidates of each mask."""
    table = Table(title_justify="left")
    for heading in ("token", "probability", "text"):
        table.add_column(heading, justify="right" if heading == "probability" else "left")
    for mask in masks:
        table.add_section()
        for one in mask:
            table.add_row(Text(one.token), f"{one.probability:.4f}", Text(one.text))
    return table


def attention_map(pattern: Tensor, rows: Sequence[str], columns: Sequence[str]) -> str:
    """One head's pattern [T, S] as characters, darker for more: a row per query, a column per key."""
    lines = ["    " + " ".join(f"{label:>1}" for label in columns)]
    for label, weights in zip(rows, pattern.tolist()):
        lines.append(
            f"  {label:>1} " + " ".join(SHADES[min(int(w * len(SHADES)), len(SHADES) - 1)] for w in weights)
        )
    return "\n".join(lines)
