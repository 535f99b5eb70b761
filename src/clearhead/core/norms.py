"""Norms keep the residual stream at a steady scale. Their statistics are float32 at least."""

import torch
from torch import Tensor, nn

from clearhead.core.config import NormSpec
from clearhead.core.dtypes import wide


class Norm(nn.Module):
    """The base of every norm: a scale, or what is added to a scale of one, and perhaps a shift."""

    def __init__(self, width: int, eps: float, bias: bool, unit_offset: bool) -> None:
        super().__init__()
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.full((width,), 0.0 if unit_offset else 1.0))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None


class LayerNorm(Norm):
    """Subtract the mean, divide by the standard deviation, scale, shift."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] -> [..., width]."""
        scale = 1 + self.weight if self.unit_offset else self.weight
        return torch.layer_norm(x, scale.shape, scale, self.bias, self.eps)  # computes statistics in float32


class RMSNorm(Norm):
    """Divide by the root mean square and scale, without mean or shift."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] -> [..., width]."""
        return rms_norm(x, self.weight, self.eps, self.unit_offset)


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """Compute what `RMSNorm` does: [..., width] -> [..., width]."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * (1 + wide(weight) if unit_offset else weight)).to(x.dtype)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(norm: NormSpec, width: int) -> nn.Module:
    """Build the norm that `norm` describes."""
    return NORMS[norm.kind](width, norm.eps, norm.bias, norm.unit_offset)
