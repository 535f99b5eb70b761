"""The command `heads`: what each attention head does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder, Json, show_result

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.inside.heads import HeadRoles
    from clearhead.inside.heads.alignments import Agreement
    from clearhead.inside.heads.syntax import Syntax

ROLE_TEXTS = 50  # of a treebank that roles are measured on, where no text is given
LEAST = 50  # arcs of a relation that is shown in the table
RANKED = 10  # heads of an alignment that are shown in the table


def heads(
    folder: Folder,
    texts: Annotated[
        Positional[tuple[str, ...]],
        arg(
            metavar="TEXT",
            help="texts, or images for a model of patches; default: sentences from Python's standard library",
        ),
    ] = (),
    file: Annotated[Path | None, arg(help="a file of texts, one on each line")] = None,
    treebank: Annotated[
        Path | None, arg(help="sentences with their trees: FILE.conllu or FILE.conllu.gz")
    ] = None,
    alignment: Annotated[
        Path | None,
        arg(help='pairs of spans, a JSON object on each line: {"text", "pairs": [[[0, 3], [4, 7]]]}'),
    ] = None,
    limit: Annotated[int | None, arg(help="texts, sentences and alignments to read at most")] = None,
    seed: Annotated[int, arg(help="of the random sequences that show induction")] = 0,
    device: Annotated[str, arg(help="cpu, cuda, cuda:1, mps; auto: the best there is")] = "auto",
    tokenizer: Annotated[
        Path | None, arg(help="a tokenizer that lies elsewhere: a directory or file")
    ] = None,
    plot: Annotated[Path | None, arg(help="draw the role of each head: FILE.png, .svg or .pdf")] = None,
    json: Json = False,
) -> None:
    """What each attention head does: its role, and with a treebank or an alignment what it follows.

    Roles: previous, next, itself, first (a sink), separator (a sink), same (token), rare (token), position (a fixed
    distance), local, uniform, induction. Each score stands beside what an indifferent head would have.

    For example:
      clearhead heads my-model/ --plot heads.png
      clearhead heads my-model/ "The cat sat on the mat." "The dog saw the cat."
      clearhead heads my-model/ --treebank dev.conllu.gz --limit 500 --json
    """
    from clearhead.bundle import load
    from clearhead.errors import InputError
    from clearhead.inside.heads import head_roles
    from clearhead.inside.heads.alignments import agreement, read_alignments
    from clearhead.inside.heads.syntax import syntax
    from clearhead.plot import FORMATS
    from clearhead.training.precision import best_device

    if plot is not None and plot.suffix.lower() not in FORMATS:
        raise InputError(
            f'a picture "{plot}" cannot be written: its ending must be one of {", ".join(FORMATS)}'
        )
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit} leaves nothing to read: ask for 1 or more")
    given = _texts(texts, file, limit)
    trees = _trees(treebank, limit)
    pairs = None if alignment is None else read_alignments(alignment)[:limit]
    m = load(folder, device=str(best_device(device)), tokenizer=tokenizer)
    if given is None and trees is not None:
        given = [sentence.text for sentence in trees[:ROLE_TEXTS]]
    roles = head_roles(m, given, seed)
    followed = None if trees is None else syntax(m, trees)
    agreed = None if pairs is None else agreement(m, pairs)
    if plot is not None:
        from clearhead.plot.canvas import save
        from clearhead.plot.heads import role_map

        save(role_map(roles, folder.name or folder.resolve().name, followed), plot)
        print(f"drawn: {plot}", file=sys.stderr)
    body: dict[str, Any] = {"roles": roles.to_dict()}
    body |= {} if followed is None else {"syntax": followed.to_dict()}
    body |= {} if agreed is None else {"agreement": agreed.to_dict()}
    show_result(body, json, lambda console: _show(console, str(folder), roles, followed, agreed))


def _texts(texts: tuple[str, ...], file: Path | None, limit: int | None) -> list[str] | None:
    """The texts of the arguments and of a file; None where there are none."""
    from clearhead.data.files import missing, read_lines
    from clearhead.errors import InputError

    found = list(texts)
    if file is not None:
        if not file.exists():
            raise missing(file)
        found += [line for _, line in read_lines(file) if line.strip()]
        if not found:
            raise InputError(f"{file} is empty: there is no text in it")
    return found[:limit] or None


def _trees(treebank: Path | None, limit: int | None) -> Any:
    from clearhead.data.treebank import read_treebank

    return None if treebank is None else read_treebank(treebank, limit)


def _show(
    console: Console, name: str, roles: HeadRoles, followed: Syntax | None, agreed: Agreement | None
) -> None:
    _show_roles(console, name, roles)
    if followed is not None:
        _show_syntax(console, followed)
    if agreed is not None:
        _show_agreement(console, agreed)


def _show_roles(console: Console, name: str, found: HeadRoles) -> None:
    from rich.table import Table
    from rich.text import Text

    from clearhead.data.tables import counted
    from clearhead.inside.heads import MIXED

    size = f"{counted(len(found.heads), 'head')} over {counted(found.texts, 'text')}, {counted(found.tokens, 'token')}"
    table = Table(title=Text(f"{name}: {size}"), title_justify="left")
    for heading in ("head", "role", "score", "uniform head", "entropy, bits", "next best"):
        table.add_column(heading, justify="left" if heading in ("head", "role", "next best") else "right")
    for at, (head, role) in enumerate(zip(found.heads, found.roles)):
        ranked = sorted(found.scores, key=lambda one: -_lift(found, one, at))
        others = [one for one in ranked if one != role and one != "uniform" and _lift(found, one, at) >= 0.1][
            :2
        ]
        own = (
            (f"{found.scores[role][at]:.2f}", f"{found.baselines[role][at]:.2f}")
            if role != MIXED
            else ("", "")
        )
        where = f" {found.distances[at]:+}" if role == "position" else ""
        more = ", ".join(f"{one} {found.scores[one][at]:.2f}" for one in others)
        table.add_row(str(head), Text(role + where), *own, f"{found.entropy[at]:.2f}", Text(more))
    console.print(table)


def _lift(found: HeadRoles, role: str, at: int) -> float:
    value = float(found.lift(role)[at])
    return value if value == value else -1.0


def _show_syntax(console: Console, found: Syntax) -> None:
    from rich.table import Table
    from rich.text import Text

    title = f"{found.sentences:,} sentences: the head that follows each relation best, % of arcs; baseline: a fixed distance"
    table = Table(title=Text(title), title_justify="left")
    for heading in ("relation", "arcs", "head", "looks at", "right", "held out", "baseline", "gain"):
        table.add_column(heading, justify="left" if heading in ("relation", "head", "looks at") else "right")
    for row in found.table(LEAST) or found.table():
        shares = (
            f"{100 * row.accuracy:.1f}",
            f"{100 * row.held_out:.1f}",
            f"{100 * row.baseline:.1f} at {row.distance:+}",
        )
        table.add_row(
            Text(row.name),
            f"{row.arcs:,}",
            row.head,
            row.direction.removeprefix("to "),
            *shares,
            f"{100 * row.gain:+.1f}",
        )
    console.print(table)


def _show_agreement(console: Console, found: Agreement) -> None:
    from rich.table import Table
    from rich.text import Text

    from clearhead.data.tables import counted

    left = f"; {found.skipped} without tokens left out" if found.skipped else ""
    table = Table(title=Text(f"agreement with {counted(found.pairs, 'pair')}{left}"), title_justify="left")
    for heading in ("head", "direction", "right, %", "chance, %", "attention"):
        table.add_column(heading, justify="left" if heading in ("head", "direction") else "right")
    for row in found.ranking()[:RANKED]:
        table.add_row(
            row["head"],
            row["direction"],
            f"{100 * row['accuracy']:.1f}",
            f"{100 * row['chance']:.1f}",
            f"{row['attention']:.2f}",
        )
    console.print(table)
