"""Commands that take parts out of a model: ablate, prune."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

import clearhead as ch
from clearhead.app.commands.common import (
    DATA,
    Folder,
    Json,
    Plot,
    Settings,
    load_model,
    option,
    print_notes,
    progress,
    show_result,
)
from clearhead.app.report import table
from clearhead.errors import CheckpointError, refuse

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.ablation import Ablation, Effect, Examples
    from clearhead.inside.pruning import HeadTable

NAMED = 4  # parts named in a title
HeadNames = Annotated[
    tuple[str, ...], option("heads, such as 3.2 (layer 3, head 2), encoder.0.5, cross.1.2", metavar="HEAD")
]
Most = Annotated[int, option("most rows of the data to read; 0: all")]
By = Literal["importance", "ablation", "random"]
OWN_FORMAT = (
    "which heads each layer has left stands in clearhead's own section of config.json, "
    "which transformers does not read"
)


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
    model = load_model(folder, plot=plot)
    from clearhead.app.plot import parts as pictures
    from clearhead.inside import ablation
    from clearhead.inside.pruning import ablate_each

    if text is not None and not each:
        found = ablation.effect(model, text, heads, layers, feedforwards, how, target=target)
        show_result(
            found.to_dict(),
            json,
            _effect_parts(found),
            plot,
            lambda: pictures.draw_effect(found, f"without {_listed(found.ablated)}"),
        )
        return
    one: list[Any] = [text if target is None else (text, target)]
    read = (
        _read_examples(model, data, examples, set) if data else ablation.examples_from(model, one, texts=True)
    )
    if not each:
        done = ablation.ablate(model, read, heads, layers, feedforwards, how)
        show_result(done.to_dict(), json, _ablation_parts(done, folder))
        return
    with progress() as on_progress:
        grid = ablate_each(model, read, how, on_progress=on_progress)
    show_result(
        {"how": how, "rows": read.rows, "targets": read.targets, **grid.to_dict()},
        json,
        [f"{folder}: loss increase without each head ({how})", *_grid_tables(grid)],
        plot,
        lambda: pictures.draw_map(grid, f"{folder}: each head alone at {how}"),
    )


def _grid_tables(grid: HeadTable) -> Iterator[Table]:
    """Show a number for each head, in as many tables as the width of the terminal takes."""
    count, most = grid.values.shape[1], max((shutil.get_terminal_size().columns - 20) // 10, 1)
    for start in range(0, count, most):
        numbers = range(start, min(start + most, count))
        rows = (
            (name, *("" if row[number] != row[number] else f"{row[number]:+.4f}" for number in numbers))
            for name, row in zip(grid.rows, grid.values)
        )
        yield table("", ("layer", *(f">head {number}" for number in numbers)), rows)


def _read_examples(model: ch.Model, data: tuple[str, ...], most: int, settings: tuple[str, ...]) -> Examples:
    """Read data as examples, and print what was guessed about it to stderr."""
    from clearhead.inside.ablation import examples_from
    from clearhead.learn.evaluation.evaluate import data_plan

    plan = data_plan(model.folder, data, settings=settings)
    found = examples_from(model, data, plan, most=most or None)
    print_notes(found.notes)
    return found


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _ablation_parts(done: Ablation, folder: Path) -> list[Any]:
    gain = done.after.accuracy - done.before.accuracy
    rows = [
        ("whole model", f"{done.before.loss:.4f}", f"{done.before.accuracy:.4f}"),
        ("without", f"{done.after.loss:.4f}", f"{done.after.accuracy:.4f}"),
        ("difference", f"{done.increase:+.4f}", f"{gain:+.4f}"),
    ]
    counts = f"{done.rows:,} rows, {done.targets:,} targets"
    return [
        f"{folder} without {_listed(done.ablated)} ({done.how}): {counts}",
        table("", ("", ">loss", ">accuracy"), rows),
    ]


def _effect_parts(found: Effect) -> list[Any]:
    at = found.position
    asked = "the whole text" if at is None else f"after token {at}, {found.tokens[at]!r}"
    rows = ((one.label, f"{one.before:.4f}", f"{one.after:.4f}") for one in found.top)
    return [
        f"without {_listed(found.ablated)} ({found.how}); {asked}; KL {found.kl:.4g} bits",
        table("", ("says", ">whole model", ">without"), rows),
    ]


def prune(
    folder: Folder,
    out: Annotated[
        Positional[Path | None], option("the directory to write the smaller model to", metavar="OUT")
    ] = None,
    heads: HeadNames = (),
    keep: Annotated[
        float | None, option("in place of --heads: the share of heads that stays, those that count most")
    ] = None,
    data: Annotated[
        tuple[str, ...],
        option("files, or an embedded corpus, that heads and loss are judged on", metavar="DATA"),
    ] = (),
    by: Annotated[
        By, option("what a head counts by: its gradient, the loss without it, or chance")
    ] = "importance",
    whole_groups: Annotated[bool, option("take heads along that share weights with those named")] = False,
    curve: Annotated[bool, option("loss and accuracy while heads go one after another")] = False,
    steps: Annotated[int | None, option("points of the curve; default: one for each head")] = None,
    recompute: Annotated[
        bool, option("with --curve, rank the heads that are left anew at each point")
    ] = False,
    seed: Annotated[int, option("random seed, of --by random")] = 0,
    examples: Most = 1000,
    set: Settings = (),
    overwrite: Annotated[bool, option("write into OUT although there is something already")] = False,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Take heads out of a model: a smaller checkpoint that computes what the whole model does without them.

    For example:
      clearhead prune my-model/ smaller/ --heads 0.1 3.2
      clearhead prune my-model/ half/ --keep 0.5 --data valid.txt
      clearhead prune my-model/ --curve --data valid.txt --by ablation --plot c.png
    """
    refuse(
        out is None and not curve,
        "nothing is to be done: name OUT, the directory to write, or ask for --curve",
    )
    refuse(
        out is None and bool(heads or keep is not None),
        "--heads and --keep write a smaller model: name OUT, the directory for it",
    )
    refuse(
        out is not None and bool(heads) == (keep is not None),
        "say which heads go, by --heads 0.1 3.2 or by --keep 0.5, one of the two",
    )
    refuse(
        not data and (curve or (keep is not None and by != "random")),
        "heads are judged on data: add --data FILE",
    )
    refuse(plot is not None and not curve, "--plot draws the curve: add --curve, or leave --plot out")
    if out is not None:
        refuse(
            out.resolve() == folder.resolve(),
            f"{out} is the model itself: choose another directory",
            CheckpointError,
        )
        refuse(out.is_file(), f"{out} is there already: choose another directory", CheckpointError)
        refuse(
            out.is_dir() and any(out.iterdir()) and not overwrite,
            f"{out} is there already: choose another directory, or add --overwrite",
            CheckpointError,
        )
    model = load_model(folder, plot=plot)
    from clearhead.app.plot.parts import draw_curves
    from clearhead.inside.pruning import prune_curve

    judged = _read_examples(model, data, examples, set) if data else None
    body: dict[str, Any] = {}
    parts: list[Any] = []
    if curve and judged is not None:
        with progress() as on_progress:
            found = prune_curve(model, judged, steps, by, seed, recompute, on_progress=on_progress)
        body["curve"] = found.to_dict()
        points = zip(found.removed, found.loss, found.accuracy)
        rows = ((str(removed), f"{loss:.4f}", f"{accuracy:.4f}") for removed, loss, accuracy in points)
        parts += [
            f"{folder}: heads removed by {found.by}, of {found.heads}",
            table("", ("heads removed", ">loss", ">accuracy"), rows),
        ]
    if out is not None:
        smaller = _pruned(model, heads, keep, judged, by, seed, whole_groups)
        smaller.save(out)
        pruned = _comparison(model, smaller, judged, out)
        body |= pruned
        parts += _pruned_parts(pruned, folder)
    show_result(
        body,
        json,
        parts,
        plot,
        lambda: draw_curves({f"by {by}": [found]}, f"{folder}: quality against heads removed"),
    )


def _pruned(
    model: ch.Model,
    heads: tuple[str, ...],
    keep: float | None,
    judged: Examples | None,
    by: By,
    seed: int,
    whole_groups: bool,
) -> ch.Model:
    """Return the model without the heads that were named, or without those that count least."""
    from clearhead.inside import pruning
    from clearhead.inside.ablation import Examples

    if keep is None:
        return pruning.prune(model, heads, whole_groups)
    with progress() as on_progress:
        ranked = pruning.scores(model, judged or Examples("lm", ()), by, seed, on_progress)
    chosen = pruning.least(model.config, ranked.numbers(model.config), keep)
    refuse(not chosen, f"--keep {keep} removes no head, since each layer keeps one: choose a smaller share")
    return pruning.prune(model, chosen, whole_groups)


def _comparison(model: ch.Model, smaller: ch.Model, judged: Examples | None, out: Path) -> dict[str, Any]:
    """Return the size and quality of a model before and after pruning, and how it was saved."""
    from clearhead.hub.export import explain_export
    from clearhead.inside.ablation import judge
    from clearhead.inside.names import all_heads

    sides: dict[str, dict[str, Any]] = {
        name: {
            "heads": len(all_heads(one.config)),
            "parameters": sum(weight.numel() for weight in one.model.parameters()),
            **({} if judged is None else judge(one.model, judged).to_dict()),
        }
        for name, one in (("before", model), ("after", smaller))
    }
    saved_as, note = explain_export(smaller.config, smaller.description)
    return {
        "saved": str(out),
        "removed": sides["before"]["heads"] - sides["after"]["heads"],
        **sides,
        "architecture": saved_as,
        "note": OWN_FORMAT if smaller.config.pruned_heads else note,
    }


def _pruned_parts(pruned: dict[str, Any], folder: Path) -> list[Any]:
    sides = (pruned["before"], pruned["after"])
    rows = (
        (key, *(format(side[key], "," if isinstance(side[key], int) else ".4f") for side in sides))
        for key in pruned["before"]
    )
    note = f": {pruned['note']}" if pruned["note"] else ""
    return [
        f"{folder} -> {pruned['saved']}, saved as {pruned['architecture']}{note}",
        table("", ("", ">before", ">after"), rows),
    ]
