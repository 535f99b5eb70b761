"""Linear layers: packed for a few rows, joined side by side, and for CPUs with narrow vectors.

Shapes: D width in, N width out.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clearhead.fast.parts import Direct

# One row reads each weight once, and packing gains nothing; for many rows the plain product packs by itself.
PACKED_ROWS = range(2, 65)
MANY = 512  # rows from which a product gains more than a transposed copy of its weight costs


def side_by_side(*layers: nn.Linear) -> nn.Linear:
    """Return one linear layer, for inference, whose output is the outputs of `layers` concatenated."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


class PackedLinear(Direct):
    """A linear layer that keeps its weight a second time, laid out for a few rows at once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.packed: Tensor | None = None  # made when first used
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        if x.numel() // self.in_features not in PACKED_ROWS:
            return nnf.linear(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS.start)
        rows = x.reshape(-1, self.in_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out.view(*x.shape[:-1], self.out_features)


@functools.cache
def can_pack() -> bool:
    """Return True if this build of PyTorch has the packed product and it agrees with the plain one."""
    try:
        weight, bias = torch.full((8, 16), 0.3), torch.full((8,), 0.1)
        x = torch.linspace(-1, 1, 48).view(3, 16)
        return torch.allclose(PackedLinear(weight, bias)(x), nnf.linear(x, weight, bias), atol=1e-5)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


class NarrowLinear(nn.Linear):
    """A linear layer for training on CPUs with narrow vectors; see `narrow_linear`."""

    replaces: ClassVar[type[nn.Module]] = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        return narrow_linear(x, self.weight, self.bias)


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `nnf.linear` of x [..., D], weight [N, D] and bias [N].

    With many rows and a gradient to come, it multiplies with a transposed copy of the weight.
    """
    plain = x.dtype.itemsize < 4 or torch.is_autocast_enabled("cpu") or not x.requires_grad
    if plain or x.numel() < MANY * x.shape[-1]:
        return nnf.linear(x, weight, bias)
    return cast(Tensor, _NarrowProduct.apply(x, weight, bias))  # type: ignore[no-untyped-call]


class _NarrowProduct(torch.autograd.Function):
    """Products in which neither matrix is transposed; the gradient of a bias is a product too, not a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `narrow_linear`."""
        ctx.save_for_backward(x, weight)
        rows, transposed = x.reshape(-1, x.shape[-1]), weight.t().contiguous()
        y = rows @ transposed if bias is None else torch.addmm(bias, rows, transposed)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, None for those that are frozen."""
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = upstream.reshape(-1, upstream.shape[-1])
        return (
            (rows @ weight).view_as(x) if for_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if for_weight else None,
            rows.new_ones(rows.shape[0]) @ rows if for_bias else None,
        )
