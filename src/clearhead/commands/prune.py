"""The command `prune`: a smaller model without some heads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

import clearhead as ch
from clearhead.commands.ablate import HeadNames, Most, read_examples
from clearhead.commands.common import (
    Folder,
    Json,
    Plot,
    Settings,
    check_inputs,
    load_model,
    option,
    progress,
    save_plot,
    show_result,
)
from clearhead.errors import CheckpointError, refuse
from clearhead.report import table

if TYPE_CHECKING:
    from clearhead.inside.parts.examples import Examples
    from clearhead.inside.parts.prune import PruneCurve

By = Literal["importance", "ablation", "random"]
OWN_FORMAT = (
    "which heads each layer has left stands in clearhead's own section of config.json, "
    "which transformers does not read"
)


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
      clearhead prune my-model/ --curve --data valid.txt --by ablation --plot curve.png
    """
    check_inputs(folder, plot=plot)
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
        _check_out(out, folder, overwrite)
    from clearhead.inside.parts.prune import prune_curve
    from clearhead.plot.parts import draw_curves

    model = load_model(folder)
    judged = read_examples(model, data, examples, set) if data else None
    body: dict[str, Any] = {}
    parts: list[Any] = []
    if curve and judged is not None:
        with progress() as on_progress:
            found = prune_curve(model, judged, steps, by, seed, recompute, on_progress=on_progress)
        title = f"{folder}: quality against heads removed"
        body["curve"] = found.to_dict()
        body |= save_plot(plot, lambda: draw_curves({f"by {by}": [found]}, title))
        parts += _curve_parts(found, str(folder))
    if out is not None:
        smaller = _pruned(model, heads, keep, judged, by, seed, whole_groups)
        smaller.save(out)
        pruned = _comparison(model, smaller, judged, out)
        body |= pruned
        parts += _pruned_parts(pruned, str(folder))
    show_result(body, json, parts)


def _check_out(out: Path, folder: Path, overwrite: bool) -> None:
    """Refuse to write over the model, or over something else unless that is allowed."""
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
    from clearhead.inside.parts import examples
    from clearhead.inside.parts import prune as inside

    if keep is None:
        return inside.prune(model, heads, whole_groups)
    with progress() as on_progress:
        ranked = inside.scores(model, judged or examples.Examples("lm", ()), by, seed, on_progress)
    chosen = inside.least(model.config, ranked.numbers(model.config), keep)
    refuse(not chosen, f"--keep {keep} removes no head, since each layer keeps one: choose a smaller share")
    return inside.prune(model, chosen, whole_groups)


def _comparison(model: ch.Model, smaller: ch.Model, judged: Examples | None, out: Path) -> dict[str, Any]:
    """Return the size and quality of a model before and after pruning, and how it was saved."""
    from clearhead.hub.checkpoint import explain_export
    from clearhead.inside.names import all_heads
    from clearhead.inside.parts.examples import judge

    sides: dict[str, dict[str, Any]] = {}
    for name, one in (("before", model), ("after", smaller)):
        parameters = sum(weight.numel() for weight in one.model.parameters())
        sides[name] = {"heads": len(all_heads(one.config)), "parameters": parameters}
        sides[name] |= {} if judged is None else judge(one.model, judged).to_dict()
    saved_as, note = explain_export(smaller.config, smaller.description)
    return {
        "saved": str(out),
        "removed": sides["before"]["heads"] - sides["after"]["heads"],
        **sides,
        "architecture": saved_as,
        "note": OWN_FORMAT if smaller.config.pruned_heads else note,
    }


def _curve_parts(found: PruneCurve, name: str) -> list[Any]:
    points = zip(found.removed, found.loss, found.accuracy)
    rows = ((str(removed), f"{loss:.4f}", f"{accuracy:.4f}") for removed, loss, accuracy in points)
    title = f"{name}: heads removed by {found.by}, of {found.heads}"
    return [title, table("", ("heads removed", ">loss", ">accuracy"), rows)]


def _pruned_parts(pruned: dict[str, Any], name: str) -> list[Any]:
    rows = []
    for key, before in pruned["before"].items():
        form = "{:,}" if isinstance(before, int) else "{:.4f}"
        rows.append((key, form.format(before), form.format(pruned["after"][key])))
    note = f": {pruned['note']}" if pruned["note"] else ""
    title = f"{name} -> {pruned['saved']}, saved as {pruned['architecture']}{note}"
    return [title, table("", ("", ">before", ">after"), rows)]
