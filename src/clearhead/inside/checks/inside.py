"""Rows of the equality suite about looking inside, and about the machine: pruning, the lens, devices, the compiler."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch

from clearhead.inside.checks.inputs import Inputs
from clearhead.inside.checks.row import Row, gap
from clearhead.inside.lens import lens_taps, stopped_at
from clearhead.inside.names import AttentionHead, attentions
from clearhead.inside.parts.ablate import ablating
from clearhead.inside.parts.prune import prune, units
from clearhead.model.taps import record

DEVICE_TOLERANCE = 1e-4  # of float32: sums are taken in another order there


def inside_rows(inputs: Inputs, tolerance: float) -> Iterator[Row]:
    """Pruned heads, and the lens."""
    heads = _prunable(inputs)
    if heads:
        what = f"a copy without heads {', '.join(map(str, heads))} with the model in which they give zeros"
        yield Row("pruned = masked", what, partial(_pruned, inputs, heads), tolerance, copies=True)
    if inputs.model.config.head != "none":
        what = "the logit lens after the last layer with what the model says"
        yield Row("lens at the last layer = logits", what, partial(_lens, inputs), tolerance)


def machine_rows(inputs: Inputs, tolerance: float, compile: bool) -> Iterator[Row]:
    """The device against the CPU where the model is not on it, and the compiler where that is asked for."""
    if inputs.device.type != "cpu":
        allowed = max(tolerance, DEVICE_TOLERANCE)
        yield Row(
            "device = CPU",
            f"logits on {inputs.device} with those on the CPU",
            partial(_on_cpu, inputs),
            allowed,
            copies=True,
        )
    if compile:
        yield Row(
            "compiled = not", "torch.compile's model with the model", partial(_compiled, inputs), tolerance
        )


def _prunable(inputs: Inputs) -> list[AttentionHead]:
    """Some heads that can be taken out together while every layer keeps one."""
    config = inputs.model.config
    if config.qk_norm == "full":
        return []
    counts = {(kind, layer): count for kind, layer, count in attentions(config)}
    for unit in units(config):
        if all(
            sum((head.kind, head.layer) == place for head in unit) < count for place, count in counts.items()
        ):
            return list(unit)
    return []


def _pruned(inputs: Inputs, heads: list[AttentionHead]) -> float:
    smaller = Inputs(prune(inputs.model, heads).model, inputs.rows, inputs.length)
    with ablating(inputs.model, heads=heads):
        return gap(smaller.run(), inputs.run())


def _lens(inputs: Inputs) -> float:
    last = lens_taps(inputs.model)[-1]
    with record(inputs.model, last) as seen:
        logits = inputs.run()
    return gap(stopped_at(inputs.model, seen[last]), logits)


def _on_cpu(inputs: Inputs) -> float:
    there = copy.deepcopy(inputs.model).to("cpu")
    return gap(inputs.run(), Inputs(there, inputs.rows, inputs.length).run())


def _compiled(inputs: Inputs) -> float:
    compiled = torch.compile(inputs.model)
    return gap(compiled(**inputs.given()).logits, inputs.run())
