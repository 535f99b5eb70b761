"""Half blocks: what stands for the sublayer that a block lacks; and a feed-forward with factors.

A half block has attention or a feed-forward alone. The other adds zeros to the stream, without a norm or
weights, so that every part of the program that goes by sublayers meets two in each block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from clearhead.core.cache import LayerKV
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import Kind
from clearhead.core.feedforward import FeedForward
from clearhead.core.masks import View
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.steps import Pass, Step


class NoAttention(nn.Module):
    """No attention: its block has a feed-forward alone."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind) -> None:
        super().__init__()

    def forward(
        self,
        x: Tensor,
        view: View,
        memory: Tensor | None = None,
        layer_kv: LayerKV | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Return zeros: [B, T, D]."""
        return tap("out", torch.zeros_like(x))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield no step."""
        yield from ()


class NoFeedForward(nn.Module):
    """No feed-forward: its block has attention alone."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Return zeros: [B, T, D]."""
        return tap("out", torch.zeros_like(x))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, rows: int) -> Iterator[Step]:
        """Yield no step."""
        yield from ()


class ScaledFeedForward(FeedForward):
    """A gated feed-forward whose gate, and what it multiplies, are scaled."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__(spec)
        self.scales = (spec.gate_scale, spec.up_scale)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the activation, and its factor: [B, T, D] -> [B, T, F]."""
        pre, up = super().project(x)
        assert up is not None
        return pre * self.scales[0], up * self.scales[1]
