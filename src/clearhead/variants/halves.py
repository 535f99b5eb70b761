"""Half blocks: what stands for the sublayer that a block lacks, of attention or of a feed-forward alone.

Each adds zeros to the stream, without a norm or weights, so that every part of the program that goes by
sublayers meets two in each block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from clearhead.core.cache import LayerKV
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import Kind
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
