"""The command that puts activations of one prompt into the run of another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder, Json, show_result

if TYPE_CHECKING:
    from clearhead.inside.patch import Patching

SHOWN = 6  # patches per map in the table
Part = Literal["residual", "attention", "feedforward", "heads"]


def patch(
    folder: Folder,
    clean: Annotated[
        Positional[str], arg(metavar="CLEAN", help="the prompt whose activations are put into the other run")
    ],
    corrupt: Annotated[
        Positional[str],
        arg(metavar="CORRUPT", help="the prompt that is run; as many tokens as the clean one"),
    ],
    answer: Annotated[
        str | None, arg(help="what the clean run should say (· is a space); default: what it says")
    ] = None,
    wrong: Annotated[
        str | None, arg(help="what the corrupt run says; default: that, or the runner-up")
    ] = None,
    part: Annotated[tuple[Part, ...], arg(help="what is patched; heads at all tokens at once")] = (
        "residual",
        "attention",
        "feedforward",
    ),
    position: Annotated[int, arg(help="where the answer is read; -1 is the last token")] = -1,
    target: Annotated[
        str | None,
        arg(help="what the decoder of two stacks has written; default: what it writes for both alike"),
    ] = None,
    plot: Annotated[Path | None, arg(help="draw heat maps: FILE.png, .svg or .pdf")] = None,
    tokenizer: Annotated[
        Path | None, arg(help="a tokenizer that lies elsewhere: a directory or file")
    ] = None,
    json: Json = False,
) -> None:
    """Which layer, token and head carries the answer: put clean activations into a corrupt run, one at a time.

    The logit of the answer less that of the wrong one is 0 in the corrupt run and 1 in the clean run.

    For example:
      clearhead patch my-model/ "Anna gave Tom a book. Anna" "Anna gave Tom a book. Tom" --plot patch.png
      clearhead patch my-model/ "Paris is in" "Rome is in" --answer " France" --wrong " Italy" --part residual heads
      clearhead patch my-model/ "Paris is in" "Rome is in" --json
    """
    from clearhead.api import load
    from clearhead.errors import InputError
    from clearhead.inside.patch import patch as run

    if not clean or not corrupt:
        raise InputError("a prompt is empty: give two texts, or the names of two image files")
    found = run(load(folder, tokenizer=tokenizer), clean, corrupt, answer, wrong, part, position, target)
    body = found.to_dict()
    if plot is not None:
        from clearhead.plot.canvas import save
        from clearhead.plot.patch import draw_patching

        body["plot"] = str(save(draw_patching(found), plot))
    show_result(body, json, lambda console: _show(console, found, plot))


def _show(console: Any, found: Patching, plot: Path | None) -> None:
    """The patches that bring back most, map by map."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(f"logit of {found.answer} less that of {found.wrong}, after {found.position}"),
        title_justify="left",
    )
    for name in ("part", "layer", "token or head", "brought back"):
        table.add_column(name, justify="right" if name == "brought back" else "left")
    for one in found.maps:
        cells = [
            (abs(value), value, row, column)
            for row, values in enumerate(one.values.tolist())
            for column, value in enumerate(values)
        ]
        cells = [cell for cell in cells if cell[0] == cell[0]]  # not a number: no such head
        for _, value, row, column in sorted(cells, reverse=True)[:SHOWN]:
            table.add_row(one.title, one.rows[row], Text(one.columns[column]), f"{value:+.3f}")
        table.add_section()
    console.print(table)
    console.print(
        f"clean run {found.clean_difference:+.4f} = 1, corrupt run {found.corrupt_difference:+.4f} = 0",
        highlight=False,
    )
    if found.note:
        console.print(found.note, highlight=False, markup=False)
    if plot is not None:
        console.print(f"saved {plot}", highlight=False, markup=False)
