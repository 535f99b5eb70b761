"""Names of neurons, as people type them: "2.117" is layer 2, neuron 117; "2.0.117" with experts; "encoder.0.5"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.model.feedforward import FeedForward
from clearhead.model.stack import Stack

_NAME = re.compile(r"(?:(self|encoder)\.)?(\d+)\.(?:(\d+)\.)?(\d+)")


def feedforward(stack: Stack, layer: int, expert: int | None) -> FeedForward:
    """The feed-forward of a layer, or one of its experts."""
    found = stack.layers()[layer].feedforward
    if isinstance(found, FeedForward):
        return found
    assert expert is not None
    one = found.experts[expert]
    assert isinstance(one, FeedForward)
    return one


def stack_of(m: Model, kind: str) -> Stack:
    """The stack of a kind of neuron."""
    stack = m.model.encoder if kind == "encoder" else m.model.main
    assert stack is not None
    return stack


def chosen(
    m: Model, layer: int | str | None, neurons: Sequence[str] | None
) -> Iterator[tuple[str, int, int | None, Tensor]]:
    """Every feed-forward that is to be looked at, and which of its neurons."""
    wanted = None if layer is None else parse_layer(m, layer)
    asked = None if neurons is None else [parse_neuron(m, name) for name in neurons]
    if asked is not None and not asked:
        raise InputError("no neurons are named: name some, such as 0.5, or leave neurons out")
    for kind, number, expert in feedforwards(m):
        width = feedforward(stack_of(m, kind), number, expert).down.in_features
        units = (
            list(range(width))
            if asked is None
            else sorted({entry[3] for entry in asked if entry[:3] == (kind, number, expert)})
        )
        if units and wanted in (None, (kind, number)):
            yield kind, number, expert, torch.tensor(units)


def feedforwards(m: Model) -> Iterator[tuple[str, int, int | None]]:
    """Every feed-forward of a model: kind, layer, expert."""
    both = m.model.encoder is not None and m.model.decoder is not None
    for kind in ("encoder", "self") if both else ("self",):
        for number in range(stack_of(m, kind).spec.n_layers):
            for expert in range(m.config.n_experts) if m.config.n_experts else (None,):
                yield kind, number, expert


def parse_layer(m: Model, layer: int | str) -> tuple[str, int]:
    """Kind and number of a layer's name."""
    kind, _, number = str(layer).rpartition(".")
    known = {(kind, number): None for kind, number, _ in feedforwards(m)}
    found = (kind or "self", int(number)) if number.isdecimal() else None
    if found not in known:
        names = [str(number) if kind == "self" else f"{kind}.{number}" for kind, number in known]
        raise InputError(f'there is no layer "{layer}": layers are {", ".join(names)}')
    assert found is not None
    return found


def parse_neuron(m: Model, name: str) -> tuple[str, int, int | None, int]:
    """Kind, layer, expert and unit of a neuron's name."""
    matched = _NAME.fullmatch(name.strip())
    found = matched and (matched[1] or "self", int(matched[2]), int(matched[3]) if matched[3] else None)
    if found and matched and found in set(feedforwards(m)):
        width = feedforward(stack_of(m, found[0]), found[1], found[2]).down.in_features
        if int(matched[4]) < width:
            return (*found, int(matched[4]))
        raise InputError(f'there is no neuron "{name}": this layer has neurons 0 to {width - 1}')
    form = "layer.expert.neuron, such as 0.0.5" if m.config.n_experts else "layer.neuron, such as 0.5"
    more = ", encoder.0.5 in the encoder" if m.config.family == "encoder-decoder" else ""
    raise InputError(f'there is no neuron "{name}": neurons are called {form}{more}')
