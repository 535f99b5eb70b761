"""Analyses of what a model takes and gives as a whole: long, check, cost, bench, plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import clearhead as ch
from clearhead.app.commands.common import check_picture, read_config
from clearhead.app.report import Column, check_details, check_table, cost_table, count, listing, size, table
from clearhead.app.views import ModelArgument, OnProgress, View, drawing
from clearhead.errors import InputError, refuse
from clearhead.learn.parallel import AXES
from clearhead.learn.recipe import read_recipe, recipe_names

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.labs.speed.compare import SpeedReport

SLOW = 2.0  # seconds after which a row of the equality suite is worth a line
LongPart = Literal["perplexity", "retrieval", "cost"]
BenchPart = Literal["first", "decode", "read", "train"]


def check(
    model: ModelArgument,
    *,
    reference: bool = False,
    compile: bool = False,
    large: bool = False,
    details: bool = False,
) -> View:
    """Run the equality suite on a model, on this machine. The exit code is 1 if a row fails.

    On another device than the CPU, the two are compared.

    Args:
        reference: compare with transformers too: logits and 50 greedy tokens
        compile: compare with the compiled model too: 15 seconds and more
        large: above 500 million parameters, run the rows that copy the model too
        details: say what each row compares; rows that fail say so in any case

    For example:
      clearhead check my-model/
      clearhead check my-model/ --reference
      clearhead check my-model/ --device cuda --compile
      clearhead check my-model/ --details
      clearhead check my-model/ --json
    """
    m = model()
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    with console.status("checking") as status:

        def show(row: Any) -> None:
            status.update(Text(f"checking: {row.name}"))
            if not console.is_terminal and isinstance(row, ch.Check) and row.seconds > SLOW:
                console.print(Text(f"{row.name}: {row.seconds:.1f} s"))

        rows = ch.check(m, reference, compile=compile, large=large, on_row=show)
    failed = sum(not row.passed for row in rows)
    skipped = sum(row.verdict == "skipped" for row in rows)
    counts = f"{len(rows) - failed - skipped} of {len(rows)} equal, {failed} failed, {skipped} skipped"
    left_out = {"--reference": reference, "--compile": compile, "--details": details or not skipped}
    hints = ", ".join(option for option, stated in left_out.items() if not stated)
    last = f"{counts}, in {sum(row.seconds for row in rows):.0f} s"
    body = {"checks": [row.to_dict() for row in rows], "passed": not failed}
    parts = [
        check_table(rows),
        *check_details(rows, details),
        last + (f"; see also {hints}" if hints else ""),
    ]
    return View(body, parts, exit_code=1 if failed else 0)


def cost(
    model: str,
    *,
    length: int | None = None,
    batch: int = 1,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> View:
    """Count what a model will take: parameters, FLOPs, memory and cache, from its config alone.

    Args:
        model (CONFIG|DIR|PRESET): a config's JSON file, a model directory, or a preset
        length: tokens per row; default: the longest the model takes
        batch: rows in a batch
        dtype: dtype of weights, activations and cache

    For example:
      clearhead cost gpt2
      clearhead cost llama-3-8b --length 8192 --dtype bfloat16
      clearhead cost my-model/ --json
    """
    figures = ch.cost(read_config(model), length=length, batch=batch, dtype=dtype)
    return View(figures, [cost_table(figures, model)])


# Long contexts ----------------------------------------------------------------------------------------------


def long(
    model: ModelArgument,
    *,
    text: tuple[str, ...] = (),
    length: int | None = None,
    parts: tuple[LongPart, ...] = ("perplexity", "retrieval", "cost"),
    scalings: tuple[str, ...] = (),
    rows: int = 8,
    bins: int = 16,
    trials: int = 10,
    seed: int = 0,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Measure a language model on long contexts: loss by position, retrieval, cost, scalings of RoPE.

    Args:
        text (FILE --data): a long text: files, folders, globs, or an embedded corpus; default: what the run
            held out
        length: tokens of a row; default: twice the trained length, or all learned positions
        parts: loss by position; needles by length and depth; time and memory by length
        scalings (NAME): scalings of rotary positions to try at 1, 2 and 4 times the trained length: none,
            own, linear, ntk, yarn, llama3; yarn:8 has factor 8
        rows: rows of text that losses are a mean over, at most
        bins: bins of positions
        trials: contexts of each probe, length and depth
        seed: random seed of needles and tokens

    For example:
      clearhead long my-gpt/ --text book.txt
      clearhead long my-gpt/ --text book.txt --length 4096 --plot long.png
      clearhead long my-gpt/ --text book.txt --parts perplexity --scalings ntk yarn
      clearhead long my-gpt/ --parts cost --length 8192 --json
    """
    m = model()
    done = ch.long(
        m, text, length=length, parts=parts, scalings=scalings, rows=rows, bins=bins, trials=trials,
        seed=seed, on_progress=on_progress,
    )  # fmt: skip
    title = f"{model.name}: trained length {done.trained:,}, rows of {done.length:,} tokens"
    return View(done, _long_tables(done), drawing("models:draw_long", done, title), done.notes)


def _long_tables(report: ch.LongReport) -> Iterator[Table]:
    """Give the tables of the parts that were asked for."""
    if (losses := report.perplexity) is not None:
        sides = [("trained length", losses.within), ("past it", losses.beyond)]
        named = [(f"{bin.start:,} to {bin.stop - 1:,}", bin) for bin in losses.bins]
        named += [(name, bin) for name, bin in sides if bin is not None]
        lines: list[tuple[str, ...]] = [
            (name, f"{bin.targets:,}", f"{bin.loss:.4f}", f"{bin.perplexity:,.2f}") for name, bin in named
        ]
        lines.insert(len(losses.bins), ())
        title = f"loss by position: {losses.rows} rows, trained length {losses.trained:,}"
        yield table(title, ("positions", ">targets", ">loss", ">perplexity"), lines)
    if tries := report.scalings:
        lengths = [f">{length:,} ({length // report.trained} x)" for length in tries[0].lengths]
        lines = [(scaling.name, *(f"{value:,.2f}" for value in scaling.perplexities)) for scaling in tries]
        title = f"perplexity of the same {tries[0].targets:,} tokens, by tokens read"
        yield table(title, ("scaling", *lengths), lines)
    for grid in report.retrieval:
        lines = []
        for length, row, exact in zip(grid.lengths, grid.right.tolist(), grid.exact):
            shares = ("" if share != share else f"{share:.2f}" for share in row)
            mean = float(exact.mean())
            lines.append((f"{length:,}", *shares, "do not fit" if mean != mean else f"{mean:.2f}"))
        title = f"{grid.probe}: right of {grid.trials} trials, by depth; chance {grid.chance:.3f}"
        headings = (">tokens", *(f">{depth:.0%}" for depth in grid.depths), ">exact, all depths")
        yield table(title, headings, lines)
    if report.cost is not None:
        slopes = (f"{report.cost.slopes[name]:.2f}" for name in ("seconds", "peak", "flops", "activations"))
        lines = [
            (
                f"{at.length:,}",
                f"{1000 * at.seconds:,.2f}",
                size(at.peak),
                count(at.flops),
                size(at.activations),
            )
            for at in report.cost.points
        ]
        yield table(
            "a forward pass by length, without the head",
            (">tokens", ">ms", ">peak memory", ">FLOPs", ">activations"),
            [*lines, (), ("slope", *slopes)],
            "measured: ms, peak memory; from ch.cost: FLOPs, activations that training keeps",
        )


# Speed ------------------------------------------------------------------------------------------------------


def bench(
    model: ModelArgument,
    *,
    parts: tuple[BenchPart, ...] = ("first", "decode", "read", "train"),
    batches: tuple[int, ...] = (1, 8),
    prompt: int = 512,
    new: int = 32,
    against: tuple[str, ...] | None = None,
    rounds: int = 3,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> View:
    """Benchmark a model versus other installed programs and the limit of the machine.

    Args:
        parts: the first token of a prompt; decoding; encoding texts or pictures; a training step
        batches: rows that are decoded at once
        prompt: tokens before the first token
        new: tokens that each row generates
        against (NAME): programs to compare with: transformers, sentence-transformers, ctranslate2, llama.cpp;
            none: clearhead alone; default: all that are installed
        rounds: runs of each program, in turn; the median counts

    For example:
      clearhead bench my-gpt/
      clearhead bench my-gpt/ --device cuda --dtype bfloat16 --batches 1 32
      clearhead bench my-gpt/ --parts decode --against transformers llama.cpp
      clearhead bench my-gpt/ --parts decode --quantize int4
      clearhead bench my-encoder/ --plot speed.png --json
    """
    m = model()
    from clearhead.labs.speed.compare import compare
    from clearhead.labs.speed.jobs import SpeedSizes

    peers = () if against == ("none",) else against
    report = compare(m, parts, SpeedSizes(prompt, new, batches), peers, rounds, on_progress)
    name = model.name
    return View(report, _speed_parts(report, name), drawing("models:draw_speed", report, name), report.notes)


def _speed_parts(report: SpeedReport, name: str) -> Iterator[Table | str]:
    """Give the table, where the limits come from, and which tokens differ."""
    machine = report.machine
    rows: list[tuple[str, ...]] = []
    for job in report.jobs:
        rows += [()] if rows else []
        for place, timing in enumerate(job.timings):
            rate, ratio = "none", "above the limit" if timing.above_limit else "failed"
            if timing.per_second is not None:
                ours = timing.program == "clearhead" or timing.ours_over_this is None
                rate, ratio = _rate(timing.per_second), "" if ours else f"{timing.ours_over_this:.2f} x"
            rows.append((job.name if not place else "", timing.program, rate, ratio))
        share = "" if job.share_of_limit is None else f"{job.share_of_limit:.0%} of it"
        rows.append(("", f"limit, by {job.bound_by}", _rate(job.limit), share))
    threads = f", {machine.threads} threads" if machine.threads else ""
    yield table(
        f"{name}: tokens or pictures a second, {machine.dtype} on {machine.name}{threads}",
        ("", "program", ">a second", ">clearhead is"),
        rows,
    )
    read, computed = size(machine.bandwidth), count(machine.arithmetic)
    yield (
        f"The limit follows from what was measured here: {read} read and {computed} operations computed in a "
        "second."
    )
    timings = [(job.name, timing) for job in report.jobs for timing in job.timings]
    for name, timing in timings:
        if timing.fault:
            yield f"{timing.program} has no speed of {name}: {timing.fault}"
    for name, timing in timings:
        if timing.same_tokens is not None and timing.same_tokens < 1:
            yield f"{timing.program}: {timing.same_tokens:.0%} of its tokens are clearhead's ({name})"


def _rate(per_second: float) -> str:
    digits = 2 if per_second < 10 else 1 if per_second < 1000 else 0
    return f"{per_second:,.{digits}f}"


# Meshes -----------------------------------------------------------------------------------------------------


def plan(
    model: str | None = None,
    *,
    devices: int | None = None,
    memory: str | None = None,
    link: str = "400Gb",
    peak: str = "h100",
    node: str | None = None,
    length: int | None = None,
    batch: int | None = None,
    precision: Literal["float32", "bfloat16", "float16", "float8"] | None = None,
    checkpointing: Literal["none", "selective", "full"] | None = None,
    optimizer: str | None = None,
    mesh: str | None = None,
    axes: tuple[str, ...] = AXES,
    top: int = 5,
    lora: int | None = None,
    lora_targets: tuple[str, ...] | None = None,
    quantize: Literal["int8", "int4"] | None = None,
    budget: float | None = None,
    law: Path | None = None,
    plot: Path | None = None,
) -> View:
    """Plan distributed training, the fastest mesh of devices: memory by kind, traffic, step time, MFU.

    Args:
        model (CONFIG): a preset, a config's JSON file, a model directory, or a recipe
        devices: how many devices there are
        memory: memory of each, such as 80GB; default: what --peak's has
        link: between nodes, for each device: bits per second, such as 400Gb, or bytes, such as 50GB
        peak: the device: h100, h200, b200, a100, ... ; or its FLOP/s in half precision, such as 989T
        node: devices of a node, and the link inside it: 8,450GB; default: --peak's
        length: tokens of a row; default: the longest the model takes
        batch: tokens of a step on all devices; default: a row for each device
        precision: of matmuls; default: bfloat16, or the recipe's
        checkpointing: what the backward pass computes again; default: none, or the recipe's
        optimizer: adamw, adafactor, muon; default: adamw, or the recipe's
        mesh (AXIS=SIZE,...): explain this mesh alone: shard=8,tensor=2
        axes (AXIS): axes that a mesh may have
        top: meshes to show, at most
        lora: rank of low-rank updates, which one device trains in place of the weights; default: the recipe's
        lora_targets (LAYER): last names of the layers that have them, or all-linear; default: q v
        quantize: what the frozen weights under them are kept in; default: as they are, or the recipe's
        budget: FLOPs of training: find the size and the amount of text to spend them on
        law (FILE): of --budget: results.json of a ladder; default: Chinchilla's law

    For example:
      clearhead plan llama-3-8b --devices 64 --memory 80GB --link 400Gb
      clearhead plan llama-3-70b --devices 256 --checkpointing full --plot plan.png
      clearhead plan my-model/ --devices 8 --peak a100 --length 4096 --batch 524288
      clearhead plan llama-3-8b --devices 16 --mesh shard=8,tensor=2 --json
      clearhead plan my-recipe.toml --devices 4 --peak "rtx 4090"
      clearhead plan llama-3-8b --devices 1 --peak a10 --lora 16 --quantize int4
      clearhead plan --budget 1e18
    """
    check_picture(plot)
    refuse(
        law is not None and budget is None,
        f"--law {law} says how to spend a --budget: give one, such as 1e18",
    )
    if budget is not None:
        refuse(model is not None, f"--budget finds the size itself: leave {model} out")
        return _spend(budget, law)
    if model is None or devices is None:
        raise InputError("plan needs a CONFIG and --devices, or a --budget: see clearhead plan --help")
    config, from_recipe = _config_of(model)
    if lora == 0 and quantize is None:
        from_recipe.pop("quantize", None)  # the recipe's is of the weights under its updates
    stated: dict[str, Any] = {"length": length, "batch": batch, "precision": precision}
    stated |= {"checkpointing": checkpointing, "optimizer": optimizer}
    stated |= {"lora": lora, "lora_targets": lora_targets, "quantize": quantize}
    options: Any = from_recipe | {name: value for name, value in stated.items() if value is not None}
    report = ch.plan(
        config, devices, memory, link, peak=peak, node=node, mesh=mesh, axes=axes, top=top, **options
    )
    title = f"{model}: {report.cluster.devices} x {report.cluster.device.name}"
    notes = [f"note: {line}" for line in report.notes]
    return View(report, _mesh_parts(report, model), drawing("models:draw_plan", report, title), notes)


def _spend(budget: float, path: Path | None) -> View:
    """Return the size and the tokens that a law finds best for a budget."""
    from clearhead.labs.lab.scaling import CHINCHILLA, read_law

    best = (CHINCHILLA if path is None else read_law(path)).best(budget)
    line = (
        f"{budget:.3g} FLOPs: {count(best.weights)} weights and {count(best.tokens)} tokens, "
        f"{best.tokens / best.weights:.3g} for each; expected loss {best.loss:.3f} nats a token"
    )
    whose = "Chinchilla's data, fitted again by Besiroglu et al. (2024)" if path is None else str(path)
    return View({"flops": budget, **vars(best)}, [line, f"by the law of {whose}; 6 FLOPs a weight and token"])


def _config_of(name: str) -> tuple[ch.ModelConfig, dict[str, Any]]:
    """Return the config that is named, and the options that a recipe gives."""
    if name not in recipe_names() and Path(name).suffix != ".toml":
        return read_config(name), {}
    from clearhead.learn.training.build import expected_config

    recipe = read_recipe(name)
    data, train, config = recipe.data, recipe.train, expected_config(recipe)
    length = data.max_length or ch.cost(config).length
    rows = (data.batch_tokens // length if data.batch_tokens else data.batch_size) * max(train.accumulates)
    return config, {
        "length": length,
        "batch": max(1, rows) * config.main.n_tokens(length),
        "precision": "bfloat16" if train.precision == "auto" else train.precision,
        "checkpointing": "full" if train.checkpointing else "none",
        "optimizer": train.optimizer,
        **{"lora": train.lora, "lora_targets": train.lora_targets, "quantize": train.quantize},
        **{"passes": train.passes, "mtp": train.mtp_weight > 0},
    }


def _mesh_parts(report: ch.MeshReport, name: str) -> Iterator[Table | str]:
    """Give the tables: time, memory by kind, traffic by axis; then the lines of a recipe."""
    work, device = report.work, report.cluster.device
    yield (
        f"{name}: {count(report.parameters)} parameters on {report.cluster.devices} x {device.name} of "
        f"{size(report.cluster.memory)}"
    )
    yield (
        f"{work.tokens:,} tokens a step, rows of {work.length:,}, {work.precision}, "
        f"checkpointing {work.checkpointing}, {work.optimizer}"
    )
    yield f"{report.fitting} of {report.tried} sensible meshes fit; the fastest of each combination of axes:"
    steps: dict[str, Column] = {
        **{">#": "{[0]}", "mesh": "{[1].mesh}", ">rows": "{0[1].micro_batches} x {0[1].micro_rows}"},
        ">seconds": "{[1].time.total:.3f}",
        ">tokens/s": lambda row: f"{row[1].tokens_per_second * row[1].mesh.devices:,.0f}",
        **{">MFU": "{[1].mfu:.1%}", ">bubble": "{[1].bubble:.0%}"},
    }
    caption = "rows: micro-batches of a device x rows of each; tokens/s of all devices"
    yield listing("step", steps, enumerate(report.meshes, start=1), caption)
    parts = {
        "memory of a device, GB": [vars(plan.memory) for plan in report.meshes],
        "sent by a device in a step, GB": [plan.traffic for plan in report.meshes],
    }
    for title, meshes in parts.items():
        rows = [
            [str(number), *(f"{bytes / 1e9:,.1f}" for bytes in (*mesh.values(), sum(mesh.values())))]
            for number, mesh in enumerate(meshes, start=1)
        ]
        yield table(title, (">#", *(f">{part}" for part in meshes[0]), ">total"), rows)
    yield f"for a recipe:\n\n{report.best.recipe}"
