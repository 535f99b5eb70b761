"""The command that shows what a model would say after each layer, and what each part adds to a logit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from clearhead.commands.common import Folder, Json, show_result

if TYPE_CHECKING:
    from clearhead.api import Model
    from clearhead.inside.contributions import Contributions
    from clearhead.inside.lens import Lens

SHOWN = 20  # terms in a table


def lens(
    folder: Folder,
    text: Annotated[
        Positional[str], arg(metavar="TEXT", help="the text; for a model of images, an image file")
    ],
    target: Annotated[
        str | None, arg(help="what the decoder of two stacks has written; default: what it writes by itself")
    ] = None,
    pair: Annotated[str | None, arg(help="the second text of a pair, for an encoder")] = None,
    top: Annotated[int, arg(help="how many of the likeliest tokens to keep")] = 5,
    position: Annotated[int, arg(help="which token's answer to print; -1 is the last")] = -1,
    contributions: Annotated[
        bool, arg(help="show what each head, feed-forward and embedding adds to a token's logit")
    ] = False,
    token: Annotated[
        str | None, arg(help="of contributions: whose logit (· is a space); default: what the model says")
    ] = None,
    against: Annotated[str | None, arg(help="of contributions: subtract this token's logit")] = None,
    plot: Annotated[Path | None, arg(help="draw a picture: FILE.png, .svg or .pdf")] = None,
    tokenizer: Annotated[
        Path | None, arg(help="a tokenizer that lies elsewhere: a directory or file")
    ] = None,
    json: Json = False,
) -> None:
    """What the model would say if it stopped after each layer; with --contributions, what each part adds to a logit.

    For example:
      clearhead lens my-model/ "The cat sat on the" --plot lens.png
      clearhead lens my-model/ "The cat sat on the" --contributions --token " mat" --against " floor"
      clearhead lens my-model/ "Ein Hund" --target "A dog" --position 0 --json
    """
    from clearhead.api import load
    from clearhead.errors import InputError

    if not contributions and (token is not None or against is not None):
        raise InputError("--token and --against choose a logit to take apart: add --contributions")
    if not text:
        raise InputError("the text is empty: give some text, or the name of an image file")
    loaded = load(folder, tokenizer=tokenizer)
    if contributions:
        _contributions(loaded, text, token, position, target, against, pair, plot, json)
        return
    from clearhead.inside.choices import find_column
    from clearhead.inside.lens import lens as read

    found = read(loaded, text, target, pair, top)
    column = find_column(position, found.columns)
    body = found.to_dict()
    if plot is not None:
        from clearhead.plot.canvas import save
        from clearhead.plot.lens import draw_lens

        body["plot"] = str(save(draw_lens(found), plot))
    show_result(body, json, lambda console: _show(console, _lens_table(found, column), plot))


def _contributions(
    loaded: Model,
    text: str,
    token: str | None,
    position: int,
    target: str | None,
    against: str | None,
    pair: str | None,
    plot: Path | None,
    json: bool,
) -> None:
    from clearhead.inside.contributions import contributions

    found = contributions(loaded, text, token, position, target, against, pair)
    body = found.to_dict()
    if plot is not None:
        from clearhead.plot.canvas import save
        from clearhead.plot.lens import draw_contributions

        body["plot"] = str(save(draw_contributions(found), plot))
    show_result(body, json, lambda console: _show(console, _contribution_table(found), plot))


def _show(console: Any, table: Any, plot: Path | None) -> None:
    console.print(table)
    if plot is not None:
        console.print(f"saved {plot}", highlight=False, markup=False)


def _lens_table(found: Lens, column: int) -> Any:
    """A row per layer, for one column."""
    from rich.table import Table
    from rich.text import Text

    true = found.true_names[column]
    table = Table(
        title=Text(f"after {found.columns[column]}: {found.chosen_names[column]}"), title_justify="left"
    )
    table.add_column("layer")
    table.add_column(f"likeliest {found.kind}, probability")
    for name in ("entropy", "KL", "rank", *(["true"] if true else [])):
        table.add_column(name, justify="right")
    for layer, name in enumerate(found.layers):
        best = zip(found.top_names[layer][column], found.top_probabilities[layer, column].tolist())
        numbers = [
            f"{float(found.entropy[layer, column]):.2f}",
            f"{float(found.divergence[layer, column]):.2f}",
        ]
        ranks = [
            str(int(found.chosen_ranks[layer, column])),
            *([str(int(found.true_ranks[layer, column]))] if true else []),
        ]
        table.add_row(
            name, Text("  ".join(f"{token} {share:.2f}" for token, share in best)), *numbers, *ranks
        )
    words = f"entropy and KL (of the last layer from this one) in bits; rank: of {found.chosen_names[column]}"
    table.caption, table.caption_justify = (
        Text(words + (f"; true: rank of {true}, which does come" if true else "")),
        "left",
    )
    return table


def _contribution_table(found: Contributions) -> Any:
    """The largest terms, the rest in one row, and the sum."""
    from rich.table import Table
    from rich.text import Text

    versus = f" less that of {found.against}" if found.against is not None else ""
    table = Table(
        title=Text(f"logit of {found.choice}{versus}, after {found.columns[found.column]}"),
        title_justify="left",
    )
    table.add_column("part")
    table.add_column("adds", justify="right")
    shown = found.largest(SHOWN)
    for term in shown:
        table.add_row(f"head {term.name}" if term.head is not None else term.name, f"{term.value:+.4f}")
    if len(shown) < len(found.terms):
        left = found.total - sum(term.value for term in shown)
        table.add_row(f"{len(found.terms) - len(shown)} others", f"{left:+.4f}")
    table.add_section()
    table.add_row("sum", f"{found.total:+.4f}")
    table.add_row(
        "the model's logit" + " before its soft cap" * (found.capped is not None), f"{found.logit:+.4f}"
    )
    if found.capped is not None:
        table.add_row("the model's logit", f"{found.capped:+.4f}")
    return table
