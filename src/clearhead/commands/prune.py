"""The commands `ablate` and `prune`: what heads, layers and feed-forwards are worth, and a smaller model without some heads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from clearhead.commands.common import Folder, Json, show_result
from clearhead.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from clearhead.bundle import Model
    from clearhead.inside.parts.ablate import Ablation, HeadMap
    from clearhead.inside.parts.curve import PruneCurve
    from clearhead.inside.parts.effect import Effect
    from clearhead.inside.parts.examples import Examples

By = Literal["importance", "ablation", "random"]
Names = Annotated[
    tuple[str, ...], arg(metavar="HEAD", help="such as 3.2 (layer 3, head 2), encoder.0.5, cross.1.2")
]
Plot = Annotated[Path | None, arg(help="draw what is shown, as .png, .svg or .pdf")]
Most = Annotated[int | None, arg(help="rows of the data that are read at most; None: all")]
Settings = Annotated[
    UseAppendAction[tuple[str, ...]],
    arg(metavar="KEY=VALUE", help="how to read the data, such as data.header=true"),
]


def ablate(
    folder: Folder,
    data: Annotated[
        Positional[tuple[str, ...]], arg(metavar="DATA", help="files, folders, globs, or an embedded corpus")
    ] = (),
    text: Annotated[
        str | None, arg(help="in place of data: one text, and what the model says of it with and without")
    ] = None,
    target: Annotated[
        str | None, arg(help="with --text, of an encoder-decoder: what it has written so far")
    ] = None,
    heads: Names = (),
    layers: Annotated[
        tuple[str, ...], arg(metavar="LAYER", help="whole layers, such as 3 or encoder.0")
    ] = (),
    feedforwards: Annotated[
        tuple[str, ...], arg(metavar="LAYER", help="the feed-forwards of these layers")
    ] = (),
    how: Annotated[
        Literal["zero", "mean"],
        arg(help="what takes their place: zeros, or their mean over the data or text"),
    ] = "zero",
    each: Annotated[bool, arg(help="every head alone: a table of layer by head")] = False,
    examples: Most = 1000,
    set: Settings = (),
    plot: Plot = None,
    json: Json = False,
) -> None:
    """What a model does without some of its heads, layers or feed-forwards: on the loss over data, or on its next token.

    For example:
      clearhead ablate my-model/ test.txt --heads 0.1 3.2 --how mean
      clearhead ablate my-model/ test.txt --each --plot heads.png
      clearhead ablate my-model/ --text "The cat sat on the" --layers 2
    """
    from clearhead.bundle import load
    from clearhead.inside.parts.examples import examples_from

    _drawable(plot)
    if bool(data) == (text is not None):
        raise InputError(
            "give data or --text, one of the two: such as clearhead ablate my-model/ test.txt --heads 0.1"
        )
    if target is not None and text is None:
        raise InputError("--target goes with --text")
    if each and (heads or layers or feedforwards):
        raise InputError("--each ablates every head alone: leave --heads, --layers and --feedforwards out")
    m = load(folder)
    if each:
        one: list[Any] = [text if target is None else (text, target)]
        _each(
            m,
            _opened(m, data, examples, set) if data else examples_from(m, one, texts=True),
            how,
            str(folder),
            plot,
            json,
        )
    elif text is not None:
        from clearhead.inside.parts.effect import effect

        found = effect(m, text, heads, layers, feedforwards, how, target=target)
        _drawn(plot, lambda draw: draw.draw_effect(found, f"without {_listed(found.ablated)}"))
        show_result(found.to_dict(), json, lambda console: _print(console, _effect_table(found)))
    else:
        from clearhead.inside.parts.ablate import ablate as run

        if plot is not None:
            raise InputError("--plot draws --each or --text: add one of them, or leave --plot out")
        done = run(m, _opened(m, data, examples, set), heads, layers, feedforwards, how)
        show_result(done.to_dict(), json, lambda console: _print(console, _ablation_table(done, str(folder))))


def prune(
    folder: Folder,
    out: Annotated[
        Positional[Path | None], arg(metavar="OUT", help="the directory to write the smaller model to")
    ] = None,
    heads: Names = (),
    keep: Annotated[
        float | None, arg(help="in place of --heads: the share of heads that stays, those that count most")
    ] = None,
    data: Annotated[
        tuple[str, ...],
        arg(metavar="DATA", help="files, or an embedded corpus, that heads and loss are judged on"),
    ] = (),
    by: Annotated[
        By, arg(help="what a head counts by: its gradient, the loss without it, or chance")
    ] = "importance",
    whole_groups: Annotated[bool, arg(help="take heads along that share weights with those named")] = False,
    curve: Annotated[bool, arg(help="loss and accuracy while heads go one after another")] = False,
    steps: Annotated[int | None, arg(help="points of the curve; default: one for each head")] = None,
    recompute: Annotated[
        bool, arg(help="with --curve, rank the heads that are left anew at each point")
    ] = False,
    seed: Annotated[int, arg(help="of --by random")] = 0,
    examples: Most = 1000,
    set: Settings = (),
    overwrite: Annotated[bool, arg(help="write into OUT although there is something already")] = False,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Take heads out of a model: a smaller checkpoint that computes what the whole model does without them.

    For example:
      clearhead prune my-model/ smaller/ --heads 0.1 3.2
      clearhead prune my-model/ half/ --keep 0.5 --data valid.txt
      clearhead prune my-model/ --curve --data valid.txt --by ablation --plot curve.png
    """
    from clearhead.bundle import load
    from clearhead.commands.common import progress
    from clearhead.inside.parts.curve import prune_curve

    _drawable(plot)
    _check_prune(folder, out, heads, keep, data, by, curve, overwrite)
    if plot is not None and not curve:
        raise InputError("--plot draws the curve: add --curve, or leave --plot out")
    m = load(folder)
    judged = _opened(m, data, examples, set) if data else None
    body: dict[str, Any] = {}
    tables: list[Table] = []
    if curve and judged is not None:
        with progress() as on_progress:
            found = prune_curve(m, judged, steps, by, seed, recompute, on_progress=on_progress)
        _drawn(
            plot,
            lambda draw: draw.draw_curves({f"by {by}": [found]}, f"{folder}: quality against heads removed"),
        )
        body["curve"] = found.to_dict()
        tables.append(_curve_table(found, str(folder)))
    if out is not None:
        body |= _pruned(m, out, heads, keep, judged, by, seed, whole_groups)
        tables.append(_pruned_table(body, str(folder)))

    def show(console: Any) -> None:
        for table in tables:
            _print(console, table)

    show_result(body, json, show)


def _check_prune(
    folder: Path,
    out: Path | None,
    heads: tuple[str, ...],
    keep: float | None,
    data: tuple[str, ...],
    by: str,
    curve: bool,
    over: bool,
) -> None:
    """Everything that can be said before the model is read."""
    if out is None and not curve:
        raise InputError("nothing is to be done: name OUT, the directory to write, or ask for --curve")
    if out is None and (heads or keep is not None):
        raise InputError("--heads and --keep write a smaller model: name OUT, the directory for it")
    if out is not None and bool(heads) == (keep is not None):
        raise InputError("say which heads go, by --heads 0.1 3.2 or by --keep 0.5, one of the two")
    if not data and (curve or (keep is not None and by != "random")):
        raise InputError("heads are judged on data: add --data FILE")
    if out is None:
        return
    if out.resolve() == folder.resolve():
        raise CheckpointError(f"{out} is the model itself: choose another directory")
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not over):
        raise CheckpointError(
            f"{out} is there already: choose another directory"
            + ("" if out.is_file() else ", or add --overwrite")
        )


def _pruned(
    m: Model,
    out: Path,
    heads: tuple[str, ...],
    keep: float | None,
    judged: Examples | None,
    by: By,
    seed: int,
    whole: bool,
) -> dict[str, Any]:
    """Prune, judge, write; what came of it."""
    from clearhead.commands.common import progress
    from clearhead.hub.checkpoint import explain_export
    from clearhead.inside.names import all_heads
    from clearhead.inside.parts.curve import scores
    from clearhead.inside.parts.examples import Examples, judge
    from clearhead.inside.parts.prune import least
    from clearhead.inside.parts.prune import prune as run

    chosen: Any = heads
    if keep is not None:
        with progress() as on_progress:
            ranked = scores(m, judged or Examples("lm", ()), by, seed, on_progress)
        chosen = least(m.config, ranked.numbers(m.config), keep)
        if not chosen:
            raise InputError(
                f"--keep {keep} removes no head, since each layer keeps one: choose a smaller share"
            )
    smaller = run(m, chosen, whole)
    smaller.save(out)
    sides: dict[str, dict[str, Any]] = {}
    for name, one in (("before", m), ("after", smaller)):
        size = sum(weight.numel() for weight in one.model.parameters())
        sides[name] = {"heads": len(all_heads(one.config)), "parameters": size}
        if judged is not None:
            sides[name] |= judge(one.model, judged).to_dict()
    saved_as, note = explain_export(smaller.config, smaller.description)
    if smaller.config.pruned_heads:
        note = "which heads each layer has left stands in clearhead's own section of config.json, which transformers does not read"
    removed = sides["before"]["heads"] - sides["after"]["heads"]
    return {"saved": str(out), "removed": removed, **sides, "architecture": saved_as, "note": note}


def _each(
    m: Model, examples: Examples, how: Literal["zero", "mean"], name: str, plot: Path | None, json: bool
) -> None:
    from clearhead.commands.common import progress
    from clearhead.inside.parts.ablate import ablate_each

    with progress() as on_progress:
        found = ablate_each(m, examples, how, on_progress=on_progress)
    _drawn(plot, lambda draw: draw.draw_map(found, f"{name}: each head alone at {how}"))
    body = {"how": how, "rows": examples.rows, "targets": examples.targets, **found.to_dict()}
    show_result(
        body,
        json,
        lambda console: _print(
            console, _map_table(found, f"{name}: loss increase without each head ({how})")
        ),
    )


# Data -----------------------------------------------------------------------------------------------------------------


def _opened(m: Model, data: tuple[str, ...], most: int | None, settings: tuple[str, ...]) -> Examples:
    """The data as examples; what was guessed about it goes to stderr."""
    from clearhead.evaluation.evaluate import data_plan
    from clearhead.inside.parts.examples import examples_from

    found = examples_from(m, data, data_plan(m.folder, data, settings=settings), most=most)
    for line in found.said:
        print(line, file=sys.stderr)
    return found


# Showing --------------------------------------------------------------------------------------------------------------


def _drawable(plot: Path | None) -> None:
    """Refuse a picture that cannot be written before any work is done."""
    from clearhead.plot import FORMATS

    if plot is not None and plot.suffix.lower() not in FORMATS:
        raise InputError(f"--plot {plot} cannot be written: its name must end in {', '.join(FORMATS)}")


def _drawn(plot: Path | None, make: Any) -> None:
    if plot is not None:
        from clearhead.plot import prune as draw
        from clearhead.plot.canvas import save

        save(make(draw), plot)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _table(title: str, *headings: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left")
    return table


def _print(console: Console, table: Table) -> None:
    """The title on a line of its own, and every column in full: a terminal that is too narrow breaks lines, not numbers."""
    title, table.title = table.title, None
    console.print(title, soft_wrap=True)
    console.width = max(console.width, 14 + 11 * len(table.columns))
    console.print(table)


def _ablation_table(done: Ablation, name: str) -> Table:
    title = (
        f"{name} without {_listed(done.ablated)} ({done.how}): {done.rows:,} rows, {done.targets:,} targets"
    )
    table = _table(title, "", "loss", "accuracy")
    for label, quality in (("whole model", done.before), ("without", done.after)):
        table.add_row(label, f"{quality.loss:.4f}", f"{quality.accuracy:.4f}")
    table.add_row("difference", f"{done.increase:+.4f}", f"{done.after.accuracy - done.before.accuracy:+.4f}")
    return table


def _effect_table(found: Effect) -> Table:
    from rich.text import Text

    asked = (
        "the whole text"
        if found.position is None
        else f"after token {found.position}, {found.tokens[found.position]!r}"
    )
    table = _table(
        f"without {_listed(found.ablated)} ({found.how}); {asked}; KL {found.kl:.4g} nats",
        "says",
        "whole model",
        "without",
    )
    for one in found.top:
        table.add_row(Text(one.label), f"{one.before:.4f}", f"{one.after:.4f}")
    return table


def _map_table(found: HeadMap, title: str) -> Table:
    table = _table(title, "layer", *(f"head {number}" for number in range(found.values.shape[1])))
    for name, row in zip(found.rows, found.values):
        table.add_row(name, *("" if value != value else f"{value:+.4f}" for value in row))
    return table


def _curve_table(found: PruneCurve, name: str) -> Table:
    table = _table(
        f"{name}: heads removed by {found.by}, of {found.heads}", "heads removed", "loss", "accuracy"
    )
    for removed, loss, accuracy in zip(found.removed, found.loss, found.accuracy):
        table.add_row(str(removed), f"{loss:.4f}", f"{accuracy:.4f}")
    return table


def _pruned_table(body: dict[str, Any], name: str) -> Table:
    title = f"{name} -> {body['saved']}, saved as {body['architecture']}{': ' + body['note'] if body['note'] else ''}"
    table = _table(title, "", "before", "after")
    before, after = body["before"], body["after"]
    for key in before:
        form = "{:,}" if isinstance(before[key], int) else "{:.4f}"
        table.add_row(key, form.format(before[key]), form.format(after[key]))
    return table
