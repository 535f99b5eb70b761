"""Replacements within a model that is to be trained. Parameters, their names and results stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.fast.attention import JoinedAttention
from clearhead.fast.feedforward import NARROW_ACTIVATIONS
from clearhead.fast.linears import NarrowLinear
from clearhead.fast.parts import like
from clearhead.model.attention import Attention
from clearhead.model.block import Block
from clearhead.model.feedforward import FeedForward
from clearhead.model.transformer import Transformer


def join_projections(model: Transformer) -> None:
    """Compute the three projections of each attention as one product, where all are plain linear layers."""
    for name, part in list(model.named_modules()):
        if type(part) is Attention and all(type(layer) is nn.Linear for layer in (part.q, part.k, part.v)):
            model.set_submodule(name, like(part, JoinedAttention))


@contextmanager
def unjoined(model: nn.Module) -> Iterator[None]:
    """Compute the projections one by one for the length of a `with` block, so that hooks on each run."""
    joined = {name: part for name, part in model.named_modules() if isinstance(part, JoinedAttention)}
    try:
        for name, part in joined.items():
            model.set_submodule(name, like(part, Attention))
        yield
    finally:
        for name, part in joined.items():
            model.set_submodule(name, part)


def suit_narrow(model: Transformer) -> None:
    """Let linear layers and GELUs compute in the ways that are fast on CPUs with narrow vectors."""
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear:
            model.set_submodule(name, like(part, NarrowLinear))
        elif isinstance(part, FeedForward):
            part.activation = NARROW_ACTIVATIONS.get(part.activation, part.activation)


def recompute(model: Transformer) -> None:
    """Keep only the input of each block, and run the block again in the backward pass."""
    for name, part in list(model.named_modules()):
        if type(part) is Block:
            model.set_submodule(name, like(part, RecomputedBlock))


class RecomputedBlock(Block):
    """A block whose activations are computed again in the backward pass."""

    replaces: ClassVar[type[nn.Module]] = Block

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """See `Block.forward`."""
        out: Tensor = checkpoint(super().forward, *inputs, use_reentrant=False, **named)
        return out
