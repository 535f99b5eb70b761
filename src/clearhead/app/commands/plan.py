"""The command `plan`: will a model fit on some devices, how fast would it train, and on which mesh."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional

import clearhead as ch
from clearhead.app.commands.common import (
    Json,
    Plot,
    check_picture,
    option,
    print_notes,
    read_config,
    show_result,
)
from clearhead.app.report import count, size, table
from clearhead.errors import InputError, refuse
from clearhead.learn.parallel.plan import AXES
from clearhead.learn.recipe import read_recipe, recipe_names

if TYPE_CHECKING:
    from rich.table import Table


def plan(
    model: Annotated[
        Positional[str | None],
        option("a preset, a config's JSON file, a model directory, or a recipe", metavar="CONFIG"),
    ] = None,
    devices: Annotated[int | None, option("how many devices there are")] = None,
    memory: Annotated[str | None, option("memory of each, such as 80GB; default: what --peak's has")] = None,
    link: Annotated[
        str, option("between nodes, for each device: bits per second, such as 400Gb, or bytes, such as 50GB")
    ] = "400Gb",
    peak: Annotated[
        str, option("the device: h100, h200, b200, a100, ... ; or its FLOP/s in half precision, such as 989T")
    ] = "h100",
    node: Annotated[
        str | None, option("devices of a node, and the link inside it: 8,450GB; default: --peak's")
    ] = None,
    length: Annotated[int | None, option("tokens of a row; default: the longest the model takes")] = None,
    batch: Annotated[
        int | None, option("tokens of a step on all devices; default: a row for each device")
    ] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16", "float8"] | None,
        option("of matrix products; default: bfloat16, or the recipe's"),
    ] = None,
    checkpointing: Annotated[
        Literal["none", "selective", "full"] | None,
        option("what the backward pass computes again; default: none, or the recipe's"),
    ] = None,
    optimizer: Annotated[
        str | None, option("adamw, adafactor, muon; default: adamw, or the recipe's")
    ] = None,
    mesh: Annotated[
        str | None, option("explain this mesh alone: shard=8,tensor=2", metavar="AXIS=SIZE,...")
    ] = None,
    axes: Annotated[
        tuple[str, ...],
        option("axes that a mesh may have", metavar="AXIS"),
    ] = AXES,
    top: Annotated[int, option("meshes to show, at most")] = 5,
    budget: Annotated[
        float | None, option("FLOPs of training: find the size and the amount of text to spend them on")
    ] = None,
    law: Annotated[
        Path | None,
        option("of --budget: results.json of a ladder; default: Chinchilla's law", metavar="FILE"),
    ] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Find the mesh of devices to train a model on: memory by kind, traffic, step time, MFU.

    For example:
      clearhead plan llama-3-8b --devices 64 --memory 80GB --link 400Gb
      clearhead plan llama-3-70b --devices 256 --checkpointing full --plot plan.png
      clearhead plan my-model/ --devices 8 --peak a100 --length 4096 --batch 524288
      clearhead plan llama-3-8b --devices 16 --mesh shard=8,tensor=2 --json
      clearhead plan my-recipe.toml --devices 4 --peak "rtx 4090"
      clearhead plan --budget 1e18
    """
    check_picture(plot)
    refuse(
        law is not None and budget is None,
        f"--law {law} says how to spend a --budget: give one, such as 1e18",
    )
    if budget is not None:
        refuse(model is not None, f"--budget finds the size itself: leave {model} out")
        _spend(budget, law, json)
        return
    if model is None or devices is None:
        raise InputError("plan needs a CONFIG and --devices, or a --budget: see clearhead plan --help")
    config, from_recipe = _given(model)
    asked: dict[str, Any] = {"length": length, "batch": batch, "precision": precision}
    asked |= {"checkpointing": checkpointing, "optimizer": optimizer}
    options: Any = from_recipe | {name: value for name, value in asked.items() if value is not None}
    found = ch.plan(
        config, devices, memory, link, peak=peak, node=node, mesh=mesh, axes=axes, top=top, **options
    )
    print_notes(f"note: {line}" for line in found.notes)
    show_result(found.to_dict(), json, _shown(found, model), plot, lambda: _draw(found, model))


def _spend(budget: float, path: Path | None, json: bool) -> None:
    """Print the size and the tokens that a law finds best for a budget."""
    from clearhead.labs.lab.scaling import CHINCHILLA, read_law

    best = (CHINCHILLA if path is None else read_law(path)).best(budget)
    line = (
        f"{budget:.3g} FLOPs: {count(best.weights)} weights and {count(best.tokens)} tokens, "
        f"{best.tokens / best.weights:.3g} for each; expected loss {best.loss:.3f} nats a token"
    )
    whose = "Chinchilla's data, fitted again by Besiroglu et al. (2024)" if path is None else str(path)
    show_result(
        {"flops": budget, **vars(best)}, json, [line, f"by the law of {whose}; 6 FLOPs a weight and token"]
    )


def _given(name: str) -> tuple[ch.ModelConfig, dict[str, Any]]:
    """Return the config that is named, and the options that a recipe gives."""
    if name not in recipe_names() and Path(name).suffix != ".toml":
        return read_config(name), {}
    from clearhead.learn.training.build import expected_config

    recipe = read_recipe(name)
    data, train, config = recipe.data, recipe.train, expected_config(recipe)
    length = data.max_length or ch.cost(config).length
    rows = (data.batch_tokens // length if data.batch_tokens else data.batch_size) * train.accumulate
    return config, {
        "length": length,
        "batch": max(1, rows) * config.main.n_tokens(length),
        "precision": "bfloat16" if train.precision == "auto" else train.precision,
        "checkpointing": "full" if train.checkpointing else "none",
        "optimizer": train.optimizer,
    }


def _draw(found: ch.MeshReport, name: str) -> Any:
    from clearhead.app.plot.plan import draw_plan

    return draw_plan(found, f"{name}: {found.cluster.devices} x {found.cluster.device.name}")


def _shown(found: ch.MeshReport, name: str) -> Iterator[Table | str]:
    """Give the tables: time, memory by kind, traffic by axis; then the lines of a recipe."""
    work, device = found.work, found.cluster.device
    yield (
        f"{name}: {count(found.parameters)} parameters on {found.cluster.devices} x {device.name} of "
        f"{size(found.cluster.memory)}"
    )
    yield (
        f"{work.tokens:,} tokens a step, rows of {work.length:,}, {work.precision}, "
        f"checkpointing {work.checkpointing}, {work.optimizer}"
    )
    yield f"{found.fitting} of {found.tried} sensible meshes fit; the fastest of each combination of axes:"
    numbered = list(enumerate(found.meshes, start=1))
    yield table(
        "step",
        (">#", "mesh", ">rows", ">seconds", ">tokens/s", ">MFU", ">bubble"),
        (
            (
                str(number),
                str(one.mesh),
                f"{one.micro_batches} x {one.micro_rows}",
                f"{one.time.total:.3f}",
                f"{one.tokens_per_second * one.mesh.devices:,.0f}",
                f"{one.mfu:.1%}",
                f"{one.bubble:.0%}",
            )
            for number, one in numbered
        ),
        "rows: micro-batches of a device x rows of each; tokens/s of all devices",
    )
    kinds = list(vars(found.best.memory))
    yield table(
        "memory of a device, GB",
        (">#", *(f">{kind}" for kind in kinds), ">total"),
        (
            (
                str(number),
                *(f"{getattr(one.memory, kind) / 1e9:,.1f}" for kind in kinds),
                f"{one.memory.total / 1e9:,.1f}",
            )
            for number, one in numbered
        ),
    )
    yield table(
        "sent by a device in a step, GB",
        (">#", *(f">{axis}" for axis in found.best.traffic), ">total"),
        (
            (
                str(number),
                *(f"{sent / 1e9:,.1f}" for sent in one.traffic.values()),
                f"{sum(one.traffic.values()) / 1e9:,.1f}",
            )
            for number, one in numbered
        ),
    )
    yield f"for a recipe:\n\n{found.best.recipe}"
