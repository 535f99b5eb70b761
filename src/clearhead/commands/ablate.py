"""The command `ablate`: what a model does without some of its heads, layers or feed-forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

import clearhead as ch
from clearhead.commands.common import (
    DATA,
    Folder,
    Json,
    Plot,
    Settings,
    check_inputs,
    load_model,
    option,
    print_notes,
    progress,
    save_plot,
    show_result,
)
from clearhead.errors import refuse
from clearhead.report import table

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.parts.ablate import Ablation, Effect
    from clearhead.inside.parts.examples import Examples
    from clearhead.inside.parts.importance import HeadTable

NAMED = 4  # parts named in a title
HeadNames = Annotated[
    tuple[str, ...], option("heads, such as 3.2 (layer 3, head 2), encoder.0.5, cross.1.2", metavar="HEAD")
]
Most = Annotated[int, option("most rows of the data to read; 0: all")]


def ablate(
    folder: Folder,
    data: Annotated[Positional[tuple[str, ...]], option(DATA, metavar="DATA")] = (),
    text: Annotated[
        str | None, option("in place of data: one text, and what the model says of it with and without")
    ] = None,
    target: Annotated[
        str | None, option("with --text, of an encoder-decoder: what it has written so far")
    ] = None,
    heads: HeadNames = (),
    layers: Annotated[tuple[str, ...], option("whole layers, such as 3 or encoder.0", metavar="LAYER")] = (),
    feedforwards: Annotated[
        tuple[str, ...], option("the feed-forwards of these layers", metavar="LAYER")
    ] = (),
    how: Annotated[
        Literal["zero", "mean"],
        option("what takes their place: zeros, or their mean over the data or text"),
    ] = "zero",
    each: Annotated[bool, option("every head alone: a table of layer by head")] = False,
    examples: Most = 1000,
    set: Settings = (),
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Measure a model without some heads, layers or feed-forwards: its loss on data, or its next token.

    For example:
      clearhead ablate my-model/ test.txt --heads 0.1 3.2 --how mean
      clearhead ablate my-model/ test.txt --each --plot heads.png
      clearhead ablate my-model/ --text "The cat sat on the" --layers 2
    """
    check_inputs(folder, plot=plot)
    refuse(
        bool(data) == (text is not None),
        "give data or --text, one of the two: such as clearhead ablate my-model/ test.txt --heads 0.1",
    )
    refuse(target is not None and text is None, "--target goes with --text")
    refuse(
        each and bool(heads or layers or feedforwards),
        "--each ablates every head alone: leave --heads, --layers and --feedforwards out",
    )
    refuse(
        plot is not None and not each and text is None,
        "--plot draws --each or --text: add one of them, or leave --plot out",
    )
    from clearhead.inside.parts.ablate import ablate as run
    from clearhead.inside.parts.ablate import effect
    from clearhead.inside.parts.examples import examples_from
    from clearhead.inside.parts.importance import ablate_each
    from clearhead.plot import prune as pictures

    model = load_model(folder)
    if text is not None and not each:
        found = effect(model, text, heads, layers, feedforwards, how, target=target)
        drawn = save_plot(plot, lambda: pictures.draw_effect(found, f"without {_listed(found.ablated)}"))
        show_result(found.to_dict() | drawn, json, _effect_parts(found))
        return
    one: list[Any] = [text if target is None else (text, target)]
    read = read_examples(model, data, examples, set) if data else examples_from(model, one, texts=True)
    if not each:
        done = run(model, read, heads, layers, feedforwards, how)
        show_result(done.to_dict(), json, _ablation_parts(done, str(folder)))
        return
    with progress() as on_progress:
        grid = ablate_each(model, read, how, on_progress=on_progress)
    body = {"how": how, "rows": read.rows, "targets": read.targets, **grid.to_dict()}
    body |= save_plot(plot, lambda: pictures.draw_map(grid, f"{folder}: each head alone at {how}"))
    title = f"{folder}: loss increase without each head ({how})"
    show_result(body, json, [title, _map_table(grid)], width=25 + 11 * grid.values.shape[1])


def read_examples(model: ch.Model, data: tuple[str, ...], most: int, settings: tuple[str, ...]) -> Examples:
    """Read data as examples, and print what was guessed about it to stderr."""
    from clearhead.evaluation.evaluate import data_plan
    from clearhead.inside.parts.examples import examples_from

    plan = data_plan(model.folder, data, settings=settings)
    found = examples_from(model, data, plan, most=most or None)
    print_notes(found.notes)
    return found


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _ablation_parts(done: Ablation, name: str) -> list[Any]:
    gain = done.after.accuracy - done.before.accuracy
    rows = [
        (label, f"{quality.loss:.4f}", f"{quality.accuracy:.4f}")
        for label, quality in (("whole model", done.before), ("without", done.after))
    ]
    rows.append(("difference", f"{done.increase:+.4f}", f"{gain:+.4f}"))
    counts = f"{done.rows:,} rows, {done.targets:,} targets"
    title = f"{name} without {_listed(done.ablated)} ({done.how}): {counts}"
    return [title, table("", ("", ">loss", ">accuracy"), rows)]


def _effect_parts(found: Effect) -> list[Any]:
    at = found.position
    asked = "the whole text" if at is None else f"after token {at}, {found.tokens[at]!r}"
    rows = ((one.label, f"{one.before:.4f}", f"{one.after:.4f}") for one in found.top)
    title = f"without {_listed(found.ablated)} ({found.how}); {asked}; KL {found.kl:.4g} nats"
    return [title, table("", ("says", ">whole model", ">without"), rows)]


def _map_table(found: HeadTable) -> Table:
    rows = (
        (name, *("" if value != value else f"{value:+.4f}" for value in row))
        for name, row in zip(found.rows, found.values)
    )
    return table("", ("layer", *(f">head {number}" for number in range(found.values.shape[1]))), rows)
