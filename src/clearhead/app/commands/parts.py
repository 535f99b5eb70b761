"""Analyses that change a model: ablate, prune, quantize."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import clearhead as ch
from clearhead.app.report import Column, listing, size, table
from clearhead.app.views import ModelArgument, OnProgress, Repeated, View, drawing
from clearhead.errors import CheckpointError, refuse

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.inside.ablation import Examples
    from clearhead.inside.pruning import HeadTable
    from clearhead.inside.quantize import QuantReport

NAMED = 4  # parts named in a title
LISTED = 12  # layers in the table of quantize, those of the largest errors, unless all are asked for
By = Literal["importance", "ablation", "random"]
OWN_FORMAT = (
    "which heads each layer has left stands in clearhead's own section of config.json, "
    "which transformers does not read"
)


def ablate(
    model: ModelArgument,
    data: tuple[str, ...] = (),
    *,
    text: str | None = None,
    target: str | None = None,
    heads: tuple[str, ...] = (),
    layers: tuple[str, ...] = (),
    feedforwards: tuple[str, ...] = (),
    how: Literal["zero", "mean"] = "zero",
    each: bool = False,
    examples: int = 1000,
    set: Repeated = (),
    plot: Path | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Measure a model without some heads, layers or feed-forwards: its loss on data, or its next token.

    Args:
        data (DATA): files, folders, globs, or an embedded corpus
        text: in place of data: one text, and what the model says of it with and without
        target: with --text, of an encoder-decoder: what it has written so far
        heads (HEAD): heads, such as 3.2 (layer 3, head 2), encoder.0.5, cross.1.2
        layers (LAYER): whole layers, such as 3 or encoder.0
        feedforwards (LAYER): the feed-forwards of these layers
        how: what takes their place: zeros, or their mean over the data or text
        each: every head alone: a table of layer by head

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
    m = model()
    from clearhead.inside import ablation as inside
    from clearhead.inside.ablation import examples_from
    from clearhead.inside.pruning import ablate_each

    if text is not None and not each:
        effect = inside.effect(m, text, heads, layers, feedforwards, how, target=target)
        title, at = f"without {_listed(effect.ablated)}", effect.position
        where = "the whole text" if at is None else f"after token {at}, {effect.tokens[at]!r}"
        columns = {"says": "{.label}", ">whole model": "{.before:.4f}", ">without": "{.after:.4f}"}
        line = f"{title} ({effect.how}); {where}; KL {effect.kl:.4g} bits"
        parts = [line, listing("", columns, effect.top)]
        return View(effect, parts, drawing("models:draw_effect", effect, title))
    one: list[Any] = [text if target is None else (text, target)]
    read = _read_examples(m, data, examples, set) if data else examples_from(m, one, texts=True)
    if not each:
        done = inside.ablate(m, read, heads, layers, feedforwards, how)
        counts = f"{done.rows:,} rows, {done.targets:,} targets"
        gain = done.after.accuracy - done.before.accuracy
        sides = [
            ("whole model", f"{done.before.loss:.4f}", f"{done.before.accuracy:.4f}"),
            ("without", f"{done.after.loss:.4f}", f"{done.after.accuracy:.4f}"),
            ("difference", f"{done.increase:+.4f}", f"{gain:+.4f}"),
        ]
        line = f"{model} without {_listed(done.ablated)} ({done.how}): {counts}"
        return View(done, [line, table("", ("", ">loss", ">accuracy"), sides)], notes=read.notes)
    grid = ablate_each(m, read, how, on_progress=on_progress)
    return View(
        {"how": how, "rows": read.rows, "targets": read.targets, **grid.to_dict()},
        [f"{model}: loss increase without each head ({how})", *_grid_tables(grid)],
        drawing("models:draw_map", grid, f"{model}: each head alone at {how}"),
        read.notes,
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
    """Read data as examples."""
    from clearhead.inside.ablation import examples_from
    from clearhead.learn.evaluation.evaluate import data_plan

    plan = data_plan(model.folder, data, settings=settings)
    return examples_from(model, data, plan, most=most or None)


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def prune(
    model: ModelArgument,
    out: Path | None = None,
    *,
    heads: tuple[str, ...] = (),
    keep: float | None = None,
    data: tuple[str, ...] = (),
    by: By = "importance",
    whole_groups: bool = False,
    curve: bool = False,
    steps: int | None = None,
    recompute: bool = False,
    seed: int = 0,
    examples: int = 1000,
    set: Repeated = (),
    overwrite: bool = False,
    plot: Path | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Take heads out of a model: a smaller checkpoint that computes what the whole model does without them.

    Args:
        out (OUT): the directory to write the smaller model to
        heads (HEAD): heads, such as 3.2 (layer 3, head 2), encoder.0.5, cross.1.2
        keep: in place of --heads: the share of heads that stays, those that count most
        data (DATA): files, or an embedded corpus, that heads and loss are judged on
        by: what a head counts by: its gradient, the loss without it, or chance
        whole_groups: take heads along that share weights with those named
        curve: loss and accuracy while heads go one after another
        steps: points of the curve; default: one for each head
        recompute: with --curve, rank the heads that are left anew at each point
        seed: random seed, of --by random

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
            out.resolve() == model.folder.resolve(),
            f"{out} is the model itself: choose another directory",
            CheckpointError,
        )
        refuse(out.is_file(), f"{out} is there already: choose another directory", CheckpointError)
        refuse(
            out.is_dir() and any(out.iterdir()) and not overwrite,
            f"{out} is there already: choose another directory, or add --overwrite",
            CheckpointError,
        )
    m = model()
    from clearhead.inside.pruning import prune_curve

    judged = _read_examples(m, data, examples, set) if data else None
    body: dict[str, Any] = {}
    parts: list[Any] = []
    if curve and judged is not None:
        removal = prune_curve(m, judged, steps, by, seed, recompute, on_progress=on_progress)
        body["curve"] = removal.to_dict()
        points = zip(removal.removed, removal.loss, removal.accuracy)
        rows = ((str(removed), f"{loss:.4f}", f"{accuracy:.4f}") for removed, loss, accuracy in points)
        parts += [
            f"{model}: heads removed by {removal.by}, of {removal.heads}",
            table("", ("heads removed", ">loss", ">accuracy"), rows),
        ]
    if out is not None:
        smaller = _pruned(m, heads, keep, judged, by, seed, whole_groups, on_progress)
        smaller.save(out)
        pruned = _comparison(m, smaller, judged, out)
        body |= pruned
        note = f": {pruned['note']}" if pruned["note"] else ""
        sides = (pruned["before"], pruned["after"])
        sizes = (
            (key, *(format(side[key], "," if isinstance(side[key], int) else ".4f") for side in sides))
            for key in pruned["before"]
        )
        parts += [
            f"{model} -> {out}, saved as {pruned['architecture']}{note}",
            table("", ("", ">before", ">after"), sizes),
        ]
    title = f"{model}: quality against heads removed"
    notes = judged.notes if judged is not None else ()
    draw = drawing("models:draw_curves", {f"by {by}": [removal]}, title) if curve else None
    return View(body, parts, draw, notes)


def _pruned(
    model: ch.Model,
    heads: tuple[str, ...],
    keep: float | None,
    judged: Examples | None,
    by: By,
    seed: int,
    whole_groups: bool,
    on_progress: OnProgress,
) -> ch.Model:
    """Return the model without the heads that were named, or without those that count least."""
    from clearhead.inside import pruning as inside
    from clearhead.inside.ablation import Examples

    if keep is None:
        return inside.prune(model, heads, whole_groups)
    ranked = inside.scores(model, judged or Examples("lm", ()), by, seed, on_progress)
    chosen = inside.least(model.config, ranked.numbers(model.config), keep)
    refuse(not chosen, f"--keep {keep} removes no head, since each layer keeps one: choose a smaller share")
    return inside.prune(model, chosen, whole_groups)


def _comparison(model: ch.Model, smaller: ch.Model, judged: Examples | None, out: Path) -> dict[str, Any]:
    """Return the size and quality of a model before and after pruning, and how it was saved."""
    from clearhead.hub.checkpoint import explain_export
    from clearhead.inside.ablation import judge
    from clearhead.inside.names import all_heads

    sides: dict[str, dict[str, Any]] = {
        name: {
            "heads": len(all_heads(side.config)),
            "parameters": sum(weight.numel() for weight in side.model.parameters()),
            **({} if judged is None else judge(side.model, judged).to_dict()),
        }
        for name, side in (("before", model), ("after", smaller))
    }
    saved_as, note = explain_export(smaller.config, smaller.description)
    return {
        "saved": str(out),
        "removed": sides["before"]["heads"] - sides["after"]["heads"],
        **sides,
        "architecture": saved_as,
        "note": OWN_FORMAT if smaller.config.pruned_heads else note,
    }


def quantize(
    model: ModelArgument,
    out: Path,
    *,
    bits: Literal["4", "8"] = "4",
    group: Literal["32", "64", "128", "256"] = "32",
    method: Literal["rtn", "hqq", "imatrix", "gptq", "awq"] | None = None,
    symmetric: bool = False,
    asymmetric: bool = False,
    data: tuple[str, ...] = (),
    wide: Repeated = (),
    sensitive: int = 0,
    calibration: int = 8192,
    evaluation: int = 4096,
    report: bool = False,
    overwrite: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Round the weights of a model to 8 or 4 bits, save it, and say what that cost.

    Args:
        out (OUT): the directory to write
        bits: bits of a weight
        group: weights that share a scale
        method: how weights are rounded; gptq and awq need --data; default: gptq with it, else imatrix
        symmetric: scales alone, without zero points: 4.5 bits a weight, not 5
        asymmetric: a zero point with each scale, which 4 bits have by default
        data (FILE): a text, half to calibrate on, half to measure on: files, folders, globs, or an embedded
            corpus
        wide (LAYER): layers that keep 8 bits, such as 'decoder.blocks.0.*'
        sensitive: attentions and feed-forwards to keep wide, by what rounding each costs on --data
        calibration: tokens of the text to calibrate on, at most
        evaluation: tokens of the text to measure on, at most
        report: list every layer, not only those of the largest errors

    For example:
      clearhead quantize my-gpt/ small/
      clearhead quantize my-gpt/ small/ --bits 8
      clearhead quantize my-gpt/ small/ --data book.txt --report --plot small.png
      clearhead quantize my-gpt/ small/ --data book.txt --method awq --sensitive 4
    """
    refuse(
        (out / "config.json").exists() and not overwrite,
        f"{out} holds a model already: choose another directory, or add --overwrite",
        CheckpointError,
    )
    refuse(bool(wide) and sensitive != 0, "--wide and --sensitive were both given: choose one")
    refuse(symmetric and asymmetric, "--symmetric and --asymmetric were both given: choose one")
    refuse(sensitive < 0, f"--sensitive {sensitive} is negative: it is a number of parts")
    m = model()
    from clearhead.inside.quantize import quantize as run

    done = run(
        m,
        int(bits),
        int(group),
        method=method,
        symmetric=symmetric if symmetric or asymmetric else None,
        text=data,
        wide=sensitive or wide,
        calibration=calibration,
        evaluation=evaluation,
        on_progress=on_progress,
    )
    done.model.save(out)
    body = {"saved": str(out), **done.to_dict()}
    return View(
        body, _quantization_parts(done, out, report), drawing("models:draw_quantization", done, model.name)
    )


def _quantization_parts(report: QuantReport, out: Path, every: bool) -> Iterator[Table | str]:
    """Give the tables and the last line."""
    layers = sorted(report.layers, key=lambda one: -(one.output_error or one.weight_error))
    listed = report.layers if every else layers[:LISTED]
    title = "error by layer" if every else f"the {len(listed)} layers of the largest errors, of {len(layers)}"
    columns: dict[str, Column] = {
        "layer": lambda layer: layer.name.removeprefix("decoder."),
        **{">bits": "{.bits}", ">weights": "{.weights:,}", ">weight error": "{.weight_error:.2%}"},
        ">output error": lambda layer: "-" if layer.output_error is None else f"{layer.output_error:.2%}",
    }
    yield listing(title, columns, listed)
    if report.sensitivity:
        title = "divergence when one part alone is rounded"
        rounded = {"part": "{.part}", ">KL, nats a token": "{.divergence:.5f}"}
        yield listing(title, rounded, report.sensitivity[:LISTED])
    if report.before is not None and report.after is not None:
        before, after = report.before, report.after
        change = after.perplexity / before.perplexity - 1
        yield table(
            f"{before.tokens:,} tokens that were not calibrated on",
            ("", ">perplexity", ">KL, nats a token", ">same best token"),
            [
                ("before", f"{before.perplexity:.3f}", "0", "100%"),
                (
                    f"after ({change:+.2%})",
                    f"{after.perplexity:.3f}",
                    f"{after.divergence:.5f}",
                    f"{after.agreement:.1%}",
                ),
            ],
        )
    sizes = f"{size(report.bytes_before)} -> {size(report.bytes_after)}"
    yield f"saved {out}: int{report.bits} by {report.method}, groups of {report.group}, {sizes}"
