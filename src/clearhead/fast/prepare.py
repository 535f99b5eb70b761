"""The copy of a model that generates: projections fused and, on a CPU, weights packed. It computes the same.

The copy shares the model's weights and adds what it fuses or packs. The model stays as it was.
"""

from typing import Any, cast

import torch
from torch import nn

from clearhead.fast.fused import FusedAttention, FusedFeedForward, PackedLinear, can_pack, side_by_side
from clearhead.fast.kernels import available
from clearhead.fast.parts import Direct, direct, like
from clearhead.fast.step import ACTIVATION_NAMES, StepBlock, StepStack, suits_kernels
from clearhead.fast.training import original
from clearhead.model.block import Block
from clearhead.model.feedforward import FeedForward
from clearhead.model.stack import Stack
from clearhead.model.transformer import Transformer


def prepared(model: Transformer, kernels: bool | None = None) -> Transformer:
    """Return the copy, in eval mode and without the model's hooks. It is valid until the weights change.

    `kernels`: let blocks that suit them take each token through the kernels of a step; None: where those run.
    """
    weight = next(model.parameters())
    kernels = available(weight) if kernels is None else kernels
    packs = not kernels and weight.device.type == "cpu" and weight.dtype == torch.float32 and can_pack()
    made: dict[nn.Module, nn.Module] = {}  # a part that occurs twice is built once

    def built(part: nn.Module) -> nn.Module:
        if part not in made:
            fast = made[part] = part if isinstance(part, Direct) else _replacement(part, kernels, packs)
            for name, child in list(fast.named_children()):
                setattr(fast, name, built(child))
            if isinstance(fast, Direct):
                fast.settle()
        return made[part]

    return cast(Transformer, built(model).eval())


def _replacement(part: nn.Module, kernels: bool, packs: bool) -> nn.Module:
    """Build what stands for a part; the parts within it are still those of the model, or fused from them."""
    kind: Any = original(part)
    if packs and isinstance(part, nn.Linear):
        return PackedLinear(part.weight, part.bias)
    if kernels and isinstance(part, Stack):
        return like(part, StepStack)
    if isinstance(part, Block):
        return _fused(part, StepBlock if kernels and suits_kernels(part) else direct(kind))
    return cast(nn.Module, like(part, kind if kind is nn.ModuleList else direct(kind)))


def _fused(block: Block, kind: type[Block]) -> Block:
    """Build a block of class `kind` in which self-attention and a gated feed-forward are fused."""
    attention, feedforward = block.attention, block.feedforward
    layers = (attention.q, attention.k, attention.v)
    qkv, widths = side_by_side(*layers), [layer.out_features for layer in layers]
    new = like(block, kind)
    new.attention = like(attention, FusedAttention, q=None, k=None, v=None, qkv=qkv, widths=widths)
    if isinstance(feedforward, FeedForward) and feedforward.gate is not None:
        both = side_by_side(feedforward.gate, feedforward.up)
        name = ACTIVATION_NAMES.get(feedforward.activation)
        new.feedforward = like(
            feedforward, FusedFeedForward, gate=None, up=None, both=both, activation_name=name
        )
    return new
