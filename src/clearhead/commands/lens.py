"""The command `lens`: what a model would say after each layer, and what each part adds to a logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from clearhead.commands.common import (
    Folder,
    Given,
    Json,
    Pair,
    Plot,
    Target,
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

    from clearhead.inside.lens import Contributions, Lens

SHOWN = 20  # terms in a table


def lens(
    folder: Folder,
    text: Given,
    target: Target = None,
    pair: Pair = None,
    top: Annotated[int, option("how many of the likeliest tokens to keep")] = 5,
    position: Annotated[int, option("which token's answer to print; -1 is the last")] = -1,
    contributions: Annotated[
        bool, option("show what each head, feed-forward and embedding adds to a token's logit")
    ] = False,
    token: Annotated[
        str | None, option("of contributions: whose logit (· is a space); default: what the model says")
    ] = None,
    against: Annotated[str | None, option("of contributions: subtract this token's logit")] = None,
    plot: Plot = None,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Show what the model would say if it stopped after each layer, or what each part adds to a logit.

    For example:
      clearhead lens my-model/ "The cat sat on the" --plot lens.png
      clearhead lens my-model/ "The cat sat on the" --contributions --token " mat" --against " floor"
      clearhead lens my-model/ "Ein Hund" --target "A dog" --position 0 --json
    """
    apart = token is not None or against is not None
    refuse(
        apart and not contributions, "--token and --against choose a logit to take apart: add --contributions"
    )
    check_inputs(folder, text, plot=plot)
    from clearhead.inside.choices import find_column
    from clearhead.inside.lens import contributions as take_apart
    from clearhead.inside.lens import lens as run
    from clearhead.plot.lens import draw_contributions, draw_lens

    model = load_model(folder, tokenizer)
    if contributions:
        parts = take_apart(model, text, token, position, target, against, pair)
        body = parts.to_dict() | save_plot(plot, lambda: draw_contributions(parts))
        show_result(body, json, [_contribution_table(parts)])
    else:
        found = run(model, text, target, pair, top)
        column = find_column(position, found.columns)
        body = found.to_dict() | save_plot(plot, lambda: draw_lens(found))
        show_result(body, json, [_lens_table(found, column)])


def _lens_table(found: Lens, column: int) -> Table:
    """Show a row for each layer, for one column."""
    chosen, true = found.chosen_names[column], found.true_names[column]
    ranks = [found.chosen_ranks, *([found.true_ranks] if true else [])]
    rows = []
    for layer, name in enumerate(found.layers):
        best = zip(found.top_names[layer][column], found.top_probabilities[layer, column].tolist())
        bits = [f"{float(each[layer, column]):.2f}" for each in (found.entropy, found.divergence)]
        places = [str(int(each[layer, column])) for each in ranks]
        rows.append((name, "  ".join(f"{token} {share:.2f}" for token, share in best), *bits, *places))
    headings = ("layer", f"likeliest {found.kind}, probability", ">entropy", ">KL", ">rank", ">true")
    caption = f"entropy and KL (of the last layer from this one) in bits; rank: of {chosen}"
    also = f"; true: rank of {true}, which does come" if true else ""
    title = f"after {found.columns[column]}: {chosen}"
    return table(title, headings if true else headings[:-1], rows, caption + also)


def _contribution_table(found: Contributions) -> Table:
    """Show the largest terms, the rest in one row, and the sum."""
    largest = found.largest(SHOWN)
    values = {f"head {term.name}" if term.head is not None else term.name: term.value for term in largest}
    if len(largest) < len(found.terms):
        values[f"{len(found.terms) - len(largest)} others"] = found.total - sum(values.values())
    sums = {"sum": found.total, "the model's logit": found.logit}
    if found.capped is not None:
        sums = {
            "sum": found.total,
            "the model's logit before its soft cap": found.logit,
            "the model's logit": found.capped,
        }
    terms, totals = ([(name, f"{value:+.4f}") for name, value in part.items()] for part in (values, sums))
    rows: list[Sequence[str]] = [*terms, (), *totals]
    versus = f" less that of {found.against}" if found.against is not None else ""
    title = f"logit of {found.choice}{versus}, after {found.columns[found.column]}"
    return table(title, ("part", ">adds"), rows)
