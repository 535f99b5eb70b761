"""Training with matmuls in float8, on devices that multiply it at twice the rate of bfloat16.

Eight bits hold four leading bits of a number, and magnitudes from 2^-9 to 448. So each row of a matrix has a
scale of its own, found anew for each matmul: its largest value becomes 448. That value is known where the
row is made, and compiled code writes the row in float8 from there, without another pass over the matrix.

The forward pass and the gradient of the input are matmuls in float8. The gradient of a weight sums over
rows, whose scales differ, and stays in bfloat16; so do attention itself, embeddings and heads. The residual
stream is bfloat16 too, not float32 as under autocast alone: there is less to move.

Shapes: M rows, D width in, N width out.
"""

from typing import Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.core.embedding import Embedding
from clearhead.core.transformer import Transformer
from clearhead.run.kernels.parts import like
from clearhead.run.kernels.training import TrainedLinear, block_linears

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max  # 448
LEAST = 1e-30  # taken for the largest value of a row of zeros
UNIT = 16  # both widths of a weight must be multiples of it, for the device


def suit(model: Transformer) -> tuple[int, int]:
    """Let the linear layers of blocks multiply in float8, in place, and keep the stream narrow.

    Returns how many layers do so, and how many there are: some have widths that a device cannot multiply.
    """
    layers = block_linears(model)
    fitting = {
        name: layer
        for name, layer in layers.items()
        if all(width % UNIT == 0 for width in layer.weight.shape)
    }
    for name, layer in fitting.items():
        model.set_submodule(name, like(layer, TrainedLinear, matmul=float8_linear))
    for name, part in list(model.named_modules()):
        if type(part) is Embedding:
            model.set_submodule(name, like(part, NarrowEmbedding))
    return len(fitting), len(layers)


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [M, D] in float8, row after row, and what to multiply each row by [M, 1]."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    return (x * (LARGEST / largest)).to(FLOAT8).contiguous(), largest / LARGEST


def scaled_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x [M, D] in float8 by y [N, D] transposed: -> [M, N] in bfloat16."""
    (x, by_row), (y, by_column) = scaled(x), scaled(y)
    with torch.autocast(x.device.type, enabled=False):  # which would round what a CPU multiplies
        return torch._scaled_mm(
            x, y.t(), by_row, by_column.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `nnf.linear` of x [..., D], weight [N, D] and bias [N]: -> [..., N].

    Under autocast the matmul is in float8, and what it returns in bfloat16. Without, nothing is rounded.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return nnf.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    y = cast(Tensor, _Float8Product.apply(rows, weight))  # type: ignore[no-untyped-call]
    y = y.view(*x.shape[:-1], -1)
    return y if bias is None else y + bias.to(y.dtype)


class _Float8Product(torch.autograd.Function):
    """x [M, D] by weight [N, D] transposed: -> [M, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.bfloat16), weight)
        ctx.dtype = x.dtype
        return scaled_matmul(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and weight, None for those that are frozen."""
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        return (
            scaled_matmul(upstream, weight.t()).to(ctx.dtype) if for_x else None,
            (upstream.t() @ x).to(weight.dtype) if for_weight else None,
        )


class NarrowEmbedding(Embedding):
    """An embedding that begins the residual stream in the dtype of autocast, where that is on."""

    stands_for = Embedding

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """See `Embedding.forward`."""
        x = super().forward(*inputs, **named)
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
