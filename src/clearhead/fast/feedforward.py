"""Feed-forwards whose gate and up come from one product, and GELU for CPUs with narrow vectors.

Shapes: B batch, T length, D model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clearhead.fast.linears import side_by_side
from clearhead.fast.parts import Direct, like
from clearhead.model.feedforward import FeedForward, gelu_tanh
from clearhead.model.taps import SILENT, Tap


class FusedFeedForward(Direct, FeedForward):
    """A gated feed-forward for inference, with the weights of gate and up in one tensor."""

    both: nn.Module

    @classmethod
    def of(cls, feedforward: FeedForward, gate: nn.Linear) -> FusedFeedForward:
        """Build it from a feed-forward and its gate, which keep their own weights."""
        fused = like(feedforward, cls)
        fused.both = side_by_side(gate, feedforward.up)
        del fused.gate, fused.up
        return fused

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        pre, up = self.both(x).chunk(2, dim=-1)
        post = tap("post", self.activation(tap("pre", pre)) * up)
        return tap("out", self.down(post))


def narrow_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute GELU of x [...], exact or by the "tanh" formula."""
    if x.dtype.itemsize < 4 or not x.requires_grad:
        return nnf.gelu(x, approximate=approximate)
    return cast(Tensor, _NarrowGelu.apply(x, approximate))  # type: ignore[no-untyped-call]


class _NarrowGelu(torch.autograd.Function):
    """GELU whose slope is computed from its value y: y / x already holds the erf or tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        """See `narrow_gelu`."""
        y = nnf.gelu(x, approximate=approximate)
        ctx.save_for_backward(x, y)
        ctx.approximate = approximate
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """With s = y / x: s + x · density(x), or by the tanh formula s + 2a · y · (1 - s) · (1 + 3b · x²)."""
        x, y = ctx.saved_tensors
        s = (y / x).nan_to_num_(0.5)
        if ctx.approximate == "tanh":
            a, b = math.sqrt(2 / math.pi), 0.044715
            steepness = torch.addcmul(x.new_tensor(2 * a), x, x, value=6 * a * b)
            slope = torch.addcmul(s, torch.addcmul(y, y, s, value=-1), steepness)
        else:
            slope = torch.addcmul(s, x, x.square().mul_(-0.5).exp_(), value=1 / math.sqrt(2 * math.pi))
        return slope.mul_(upstream), None


NARROW_ACTIVATIONS: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    nnf.gelu: narrow_gelu,
    gelu_tanh: functools.partial(narrow_gelu, approximate="tanh"),
}
