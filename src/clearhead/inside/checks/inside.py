"""Rows of the equality suite about pruning, the lens, devices and the compiler."""

import copy
from collections import Counter

import torch

from clearhead.inside.checks.inputs import Inputs
from clearhead.inside.checks.row import TOLERANCE, Comparison, gap
from clearhead.inside.lens import stopped_at
from clearhead.inside.names import AttentionHead, attentions, states
from clearhead.inside.parts.ablate import ablating
from clearhead.inside.parts.prune import prune, units
from clearhead.model.taps import record

DEVICE_TOLERANCE = 1e-4  # of float32: sums are taken in another order there


def inside_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about pruned heads, and the lens."""
    heads = _prunable(inputs)
    return [
        inputs.compare(
            "pruned = masked",
            f"a copy without heads {', '.join(map(str, heads))} with the model in which they give zeros",
            _pruned,
            heads,
            copies=True,
            fits=bool(heads),
        ),
        inputs.compare(
            "lens at the last layer = logits",
            "the logit lens after the last layer with what the model says",
            _lens,
            fits=inputs.model.config.head != "none",
        ),
    ]


def machine_rows(inputs: Inputs, compile: bool) -> list[Comparison]:
    """Return the rows about a device that is not the CPU, and about the compiler, where asked for."""
    return [
        inputs.compare(
            "device = CPU",
            f"logits on {inputs.device} with those on the CPU",
            lambda inputs: gap(inputs.run(), inputs.of(copy.deepcopy(inputs.model).to("cpu")).run()),
            tolerance=max(TOLERANCE[inputs.dtype], DEVICE_TOLERANCE),
            copies=True,
            fits=inputs.device.type != "cpu",
        ),
        inputs.compare(
            "compiled = not",
            "torch.compile's model with the model",
            _compiled,
            fits=compile,
        ),
    ]


def _prunable(inputs: Inputs) -> list[AttentionHead]:
    """Return some heads that can be pruned together while every layer keeps one."""
    config = inputs.model.config
    if config.qk_norm == "full":
        return []
    counts = {(kind, layer): count for kind, layer, count in attentions(config)}
    for unit in units(config):
        taken = Counter((head.kind, head.layer) for head in unit)
        if all(taken[place] < count for place, count in counts.items()):
            return list(unit)
    return []


def _pruned(inputs: Inputs, heads: list[AttentionHead]) -> float:
    smaller = inputs.of(prune(inputs.model, heads).model)
    with ablating(inputs.model, heads=heads):
        return gap(smaller.run(), inputs.run())


def _lens(inputs: Inputs) -> float:
    last = states(inputs.model.main.spec)[-1]
    with record(inputs.model, last) as seen:
        logits = inputs.run()
    return gap(stopped_at(inputs.model, seen[last]), logits)


def _compiled(inputs: Inputs) -> float:
    return gap(torch.compile(inputs.model)(**inputs.given()).logits, inputs.run())
