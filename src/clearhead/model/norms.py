"""Norms: what keeps the residual stream at a steady size. Statistics are taken in float32 whatever the dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clearhead.config import NormSpec
from clearhead.model.dtypes import wide


class LayerNorm(nn.Module):
    """Subtract the mean, divide by the standard deviation, scale, shift: [..., width] -> [..., width]."""

    def __init__(self, width: int, eps: float, bias: bool, unit_offset: bool) -> None:
        super().__init__()
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.full((width,), 0.0 if unit_offset else 1.0))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        scale = 1 + self.weight if self.unit_offset else self.weight
        return torch.layer_norm(
            x, scale.shape, scale, self.bias, self.eps
        )  # its statistics are float32 inside


class RMSNorm(nn.Module):
    """Divide by the root mean square and scale; no mean, no shift: [..., width] -> [..., width]."""

    def __init__(self, width: int, eps: float, bias: bool, unit_offset: bool) -> None:
        super().__init__()
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.full((width,), 0.0 if unit_offset else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        scale = 1 + wide(self.weight) if self.unit_offset else self.weight
        y = wide(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * scale).to(x.dtype)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(norm: NormSpec, width: int) -> nn.Module:
    """Build the norm that the config names."""
    return NORMS[norm.kind](width, norm.eps, norm.bias, norm.unit_offset)
