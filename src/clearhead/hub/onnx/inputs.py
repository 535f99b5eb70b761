"""Inputs of several sizes, with padding on both sides, and what the model itself says of them.

Shapes: B batch, T length, S source length, P earlier tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import ModelConfig
from clearhead.hub.onnx.function import INPUTS, MASK, Function, Port, past_names, present


@dataclass(frozen=True)
class InputSizes:
    """How many rows and tokens the inputs have."""

    batch: int
    length: int
    source: int
    past: int

    def __str__(self) -> str:
        """Return the sizes in words."""
        return f"batch {self.batch}, length {self.length}, source {self.source}, past {self.past}"

    def of(self, axis: str | int) -> int:
        """Return the size of an axis, which is known or has a name."""
        if isinstance(axis, int):
            return axis
        return sum(int(getattr(self, name)) for name in axis.split(" + "))


def sizes_of(config: ModelConfig) -> tuple[InputSizes, list[InputSizes]]:
    """Return the sizes that a graph is traced with, and others that it must work with too."""
    own, other = config.stacks[-1], config.stacks[0]
    step = other.conv_stride if other.input == "frames" else 1  # frames of a position
    asked = ((2, 5, 7, 3), (3, 11, 4, 6), (1, 1, 9, 0), (4, 2, 15, 1))
    first, *others = (
        InputSizes(
            batch,
            min(length, own.max_positions) * (step if own is other else 1),
            min(source, other.max_positions) * step,
            max(0, min(past, own.max_positions - length)),
        )
        for batch, length, source, past in asked
    )
    return first, others


def example(function: Function, sizes: InputSizes, seed: int) -> dict[str, Tensor]:
    """Draw inputs of a graph: the first row of a mask has padding at the left, the second at the right."""
    draw = torch.Generator().manual_seed(seed)
    return {port.name: _drawn(port, [sizes.of(axis) for axis in port.axes], draw) for port in function.ports}


def _drawn(port: Port, shape: list[int], draw: torch.Generator) -> Tensor:
    if port.dtype.is_floating_point:
        return torch.randn(shape, generator=draw)
    if not port.name.endswith(MASK):
        return torch.randint(port.below, shape, generator=draw)
    mask, padding = torch.ones(shape, dtype=torch.int64), shape[1] // 3
    mask[0, :padding] = 0
    mask[1:2, shape[1] - padding :] = 0
    return mask


def expected(function: Function, given: dict[str, Tensor], sizes: InputSizes) -> dict[str, Tensor]:
    """Return what the model says, and complete the inputs: the keys of earlier tokens are the model's own."""
    if not function.cache:
        return dict(function(given))
    model, cache, P = function.model, Cache(), sizes.past
    mask, name = given[MASK].bool(), INPUTS[model.main.spec.input]
    if P:
        earlier = given[name].new_zeros(sizes.batch, P) + torch.arange(P) % model.config.vocab_size
        model(earlier, mask[:, :P], cache=cache)
        for (k, v), keys in zip(past_names("past_key_values", len(cache.layers)), cache.layers.values()):
            given[k], given[v] = (part[:, :, :P].clone() for part in keys.read())
    found = function.named(model(given[name], mask[:, P:], cache=cache), None)
    return found | {name: keys[:, :, : cache.length] for name, keys in present(cache).items()}


def real_part(name: str, value: Tensor, function: Function, given: dict[str, Tensor]) -> Tensor:
    """Return what an output says of real tokens, one after another: at padding anything may stand.

    Keys and values [B, K, P + T, E] have the tokens of the whole mask, states and logits [B, T, ...] the last
    ones of it; pooled outputs [B, ...] have none.
    """
    mask = given.get(("decoder_" if len(function.model.config.stacks) == 2 else "") + MASK)
    if name.startswith("present."):
        value = value.transpose(1, 2)
    if mask is None or value.ndim < 3:
        return value
    spec = function.model.main.spec
    if spec.input == "frames":
        mask = mask[:, :: spec.conv_stride]
    return value[mask[:, -value.shape[1] :].bool()] if value.shape[1] else value
