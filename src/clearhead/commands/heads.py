"""The command `heads`: what each attention head does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional

from clearhead.commands.common import (
    Device,
    Folder,
    Json,
    Plot,
    Tokenizer,
    check_inputs,
    load_model,
    option,
    save_plot,
    show_result,
)
from clearhead.errors import refuse
from clearhead.report import table

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.heads import HeadRoles
    from clearhead.inside.heads.alignments import Agreement
    from clearhead.inside.heads.syntax import Syntax

ROLE_TEXTS = 50  # of a treebank that roles are measured on, where no text is given
LEAST = 50  # arcs of a relation that is shown in the table
RANKED = 10  # heads of an alignment that are shown in the table
LIFT = 0.1  # above an indifferent head, for a second role to be shown


def heads(
    folder: Folder,
    texts: Annotated[
        Positional[tuple[str, ...]],
        option(
            "texts, or images for a model of patches; default: sentences from Python's standard library",
            metavar="TEXT",
        ),
    ] = (),
    file: Annotated[Path | None, option("a file of texts, one on each line")] = None,
    treebank: Annotated[
        Path | None, option("sentences with their trees: FILE.conllu or FILE.conllu.gz")
    ] = None,
    alignment: Annotated[
        Path | None,
        option('pairs of spans, a JSON object on each line: {"text", "pairs": [[[0, 3], [4, 7]]]}'),
    ] = None,
    limit: Annotated[int | None, option("most texts, sentences and alignments to read")] = None,
    seed: Annotated[int, option("random seed of the sequences that show induction")] = 0,
    device: Device = "auto",
    tokenizer: Tokenizer = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Show what each attention head does: its role, and what it follows in a treebank or an alignment.

    Roles: previous, next, itself, first (a sink), separator (a sink), same (token), rare (token), position (a
    fixed distance), local, uniform, induction. Each score stands beside that of an indifferent head.

    For example:
      clearhead heads my-model/ --plot heads.png
      clearhead heads my-model/ "The cat sat on the mat." "The dog saw the cat."
      clearhead heads my-model/ --treebank dev.conllu.gz --limit 500 --json
    """
    check_inputs(folder, plot=plot)
    nothing = limit is not None and limit < 1
    refuse(nothing, f"limit {limit} leaves nothing to read: ask for 1 or more")
    from clearhead.data.treebank import read_treebank
    from clearhead.inside.heads import head_roles
    from clearhead.inside.heads.alignments import agreement, read_alignments
    from clearhead.inside.heads.syntax import syntax
    from clearhead.plot.parts import role_map

    given = [*texts, *_lines(file)][:limit]
    trees = None if treebank is None else read_treebank(treebank, limit)
    pairs = None if alignment is None else read_alignments(alignment)[:limit]
    model = load_model(folder, tokenizer, device)
    if not given and trees is not None:
        given = [sentence.text for sentence in trees[:ROLE_TEXTS]]
    roles = head_roles(model, given or None, seed)
    followed = None if trees is None else syntax(model, trees)
    agreed = None if pairs is None else agreement(model, pairs)
    found = {"roles": roles, "syntax": followed, "agreement": agreed}
    body: dict[str, Any] = {name: part.to_dict() for name, part in found.items() if part is not None}
    body |= save_plot(plot, lambda: role_map(roles, folder.absolute().name, followed))

    def parts() -> Iterator[Any]:
        yield _roles_table(roles, str(folder))
        if followed is not None:
            yield _syntax_table(followed)
        if agreed is not None:
            yield _agreement_table(agreed)

    show_result(body, json, parts())


def _lines(file: Path | None) -> list[str]:
    """Return the texts of a file, one from each line that is not empty."""
    from clearhead.data.files import missing, read_lines

    if file is None:
        return []
    if not file.exists():
        raise missing(file)
    lines = [line for _, line in read_lines(file) if line.strip()]
    refuse(not lines, f"{file} is empty: there is no text in it")
    return lines


def _roles_table(found: HeadRoles, name: str) -> Table:
    from clearhead.data.tables import counted
    from clearhead.inside.heads import MIXED

    rows = []
    for at, (head, role) in enumerate(zip(found.heads, found.roles)):
        lifts = {one: float(found.lift(one)[at]) for one in found.scores if one not in (role, "uniform")}
        clear = [one for one, lift in lifts.items() if not math.isnan(lift) and lift >= LIFT]
        next_best = sorted(clear, key=lambda one: -lifts[one])[:2]
        own = [
            f"{values[role][at]:.2f}" if role != MIXED else "" for values in (found.scores, found.baselines)
        ]
        where = f" {found.distances[at]:+}" if role == "position" else ""
        others = ", ".join(f"{one} {found.scores[one][at]:.2f}" for one in next_best)
        rows.append((str(head), role + where, *own, f"{found.entropy[at]:.2f}", others))
    numbers = {"head": len(found.heads), "text": found.texts, "token": found.tokens}
    heads, texts, tokens = (counted(number, word) for word, number in numbers.items())
    headings = ("head", "role", ">score", ">uniform head", ">entropy, bits", "next best")
    return table(f"{name}: {heads} over {texts}, {tokens}", headings, rows)


def _syntax_table(found: Syntax) -> Table:
    rows = []
    for row in found.table(LEAST) or found.table():
        right, held_out, baseline = (
            f"{100 * share:.1f}" for share in (row.accuracy, row.held_out, row.baseline)
        )
        looks_at = row.direction.removeprefix("to ")
        shares = (right, held_out, f"{baseline} at {row.distance:+}", f"{100 * row.gain:+.1f}")
        rows.append((row.name, f"{row.arcs:,}", row.head, looks_at, *shares))
    title = f"{found.sentences:,} sentences: the head that follows each relation best, % of arcs"
    headings = ("relation", ">arcs", "head", "looks at", ">right", ">held out", ">baseline", ">gain")
    return table(f"{title}; baseline: a fixed distance", headings, rows)


def _agreement_table(found: Agreement) -> Table:
    from clearhead.data.tables import counted

    rows = []
    for row in found.ranking()[:RANKED]:
        shares = (f"{100 * row[name]:.1f}" for name in ("accuracy", "chance"))
        rows.append((row["head"], row["direction"], *shares, f"{row['attention']:.2f}"))
    left = f"; {found.skipped} without tokens left out" if found.skipped else ""
    title = f"agreement with {counted(found.pairs, 'pair')}{left}"
    return table(title, ("head", "direction", ">right, %", ">chance, %", ">attention"), rows)
