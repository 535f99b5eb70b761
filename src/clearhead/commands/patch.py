"""The command `patch`: put activations of one prompt into the run of another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

from clearhead.commands.common import (
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
from clearhead.report import table

if TYPE_CHECKING:
    from clearhead.inside.patch import Patching

SHOWN = 6  # patches per map in the table
Part = Literal["residual", "attention", "feedforward", "heads"]


def patch(
    folder: Folder,
    clean: Annotated[
        Positional[str], option("the prompt whose activations are put into the other run", metavar="CLEAN")
    ],
    corrupt: Annotated[
        Positional[str],
        option("the prompt that is run; as many tokens as the clean one", metavar="CORRUPT"),
    ],
    answer: Annotated[
        str | None, option("what the clean run should say (· is a space); default: what it says")
    ] = None,
    wrong: Annotated[str | None, option("what the corrupt run says; default: that, or the runner-up")] = None,
    part: Annotated[tuple[Part, ...], option("what is patched; heads at all tokens at once")] = (
        "residual",
        "attention",
        "feedforward",
    ),
    position: Annotated[int, option("where the answer is read; -1 is the last token")] = -1,
    target: Annotated[
        str | None,
        option("what the decoder of an encoder-decoder has written; default: what it writes for both alike"),
    ] = None,
    plot: Plot = None,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Find which layer, token and head carries the answer: put clean activations into a corrupt run.

    Activations are put in one at a time. The logit of the answer less that of the wrong one is 0 in the
    corrupt run and 1 in the clean run.

    For example:
      clearhead patch my-model/ "Anna gave Tom a book. Anna" "Anna gave Tom a book. Tom" --plot patch.png
      clearhead patch my-model/ "Paris is in" "Rome is in" --answer " France" --part residual heads
      clearhead patch my-model/ "Paris is in" "Rome is in" --json
    """
    check_inputs(folder, clean, corrupt, plot=plot)
    from clearhead.inside.patch import patch as run
    from clearhead.plot.lens import draw_patching

    found = run(load_model(folder, tokenizer), clean, corrupt, answer, wrong, part, position, target)
    body = found.to_dict() | save_plot(plot, lambda: draw_patching(found))
    show_result(body, json, _parts(found))


def _parts(found: Patching) -> Iterator[Any]:
    """Show the patches that bring back most, map by map."""
    rows: list[Sequence[str]] = []
    for one in found.maps:
        cells = [
            (value, row, column)
            for row, values in enumerate(one.values.tolist())
            for column, value in enumerate(values)
            if not math.isnan(value)  # not a number: no such head
        ]
        most = sorted(cells, key=lambda cell: abs(cell[0]), reverse=True)[:SHOWN]
        rows += [
            (one.title, one.rows[row], one.columns[column], f"{value:+.3f}") for value, row, column in most
        ]
        rows.append(())
    title = f"logit of {found.answer} less that of {found.wrong}, after {found.position}"
    yield table(title, ("part", "layer", "token or head", ">brought back"), rows)
    yield f"clean run {found.clean_difference:+.4f} = 1, corrupt run {found.corrupt_difference:+.4f} = 0"
    if found.note:
        yield found.note
