"""Queries, keys and values from one product. All else is `Attention`, options included.

Shapes: B batch, T length, D model, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.fast.linears import NarrowLinear, narrow_linear, side_by_side
from clearhead.fast.parts import Direct, like
from clearhead.model.attention import Attention


class FusedAttention(Direct, Attention):
    """Self-attention for inference, with the three weights in one tensor."""

    qkv: nn.Module
    widths: list[int]

    @classmethod
    def of(cls, attention: Attention) -> FusedAttention:
        """Build it from an attention, which keeps its own weights."""
        fused, layers = like(attention, cls), (attention.q, attention.k, attention.v)
        fused.qkv, fused.widths = side_by_side(*layers), [layer.out_features for layer in layers]
        del fused.q, fused.k, fused.v
        return fused

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] -> [B, T, H·E], [B, T, K·E], [B, T, K·E]."""
        q, k, v = torch.split_with_sizes(self.qkv(x), self.widths, dim=-1)
        return q, k, v


class JoinedAttention(Attention):
    """Attention for training: three weights with a gradient each, concatenated in each forward pass."""

    replaces: ClassVar[type[nn.Module]] = Attention

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention.project`."""
        if source is not x:
            return super().project(x, source)
        layers = (self.q, self.k, self.v)
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if self.q.bias is None else torch.cat([layer.bias for layer in layers])
        linear = narrow_linear if isinstance(self.q, NarrowLinear) else nnf.linear
        q, k, v = torch.split(linear(x, weight, bias), [layer.out_features for layer in layers], dim=-1)
        return q, k, v
