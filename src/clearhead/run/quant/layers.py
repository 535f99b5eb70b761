"""Layers whose weights are quantized. In a forward pass they are ordinary linear layers, in the dtype of x.

`weight` dequantizes, so code that reads weights goes on working. Generation has faster matmuls with the same
codes (`run/kernels`). The memory layout of codes is described in grid.py. Nothing here can be trained, but
gradients pass through to what is: low-rank updates.

Shapes: N width out, D width in, G groups of a row, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.run.quant.grid import BLOCK, TILE, Grid, Quantized

PARTS = ("codes", "scales", "offsets", "smooth")  # the tensors of a weight, by their names on disk


class QuantizedWeight(nn.Module):
    """What a linear layer and a quantized table share: codes, scales, and the weight they stand for.

    `smooth` [D], where there is one, multiplies the inputs: the weight was divided by it.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    smooth: Tensor | None
    place: Tensor

    def __init__(self, made: Quantized, smooth: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.grid, self.in_features, self.out_features = made.grid, made.columns, made.rows
        for name in PARTS[:3]:
            self.register_buffer(name, getattr(made, name))
        self.register_buffer("smooth", smooth)
        # Empty: it follows the model from device to device, and from dtype to dtype.
        self.register_buffer("place", torch.empty(0, dtype=dtype, device=made.codes.device), persistent=False)

    @property
    def made(self) -> Quantized:
        """The codes with their grid, apart from `smooth`."""
        return Quantized(
            self.grid, self.out_features, self.in_features, self.codes, self.scales, self.offsets
        )

    @property
    def weight(self) -> Tensor:
        """The weight in the model's dtype, dequantized at each call: [N, D]."""
        weight = self.made.weight(torch.promote_types(self.place.dtype, torch.float32))
        return (weight if self.smooth is None else weight * self.smooth).to(self.place.dtype)

    @property
    def size(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device; scales keep their dtype, since codes were chosen for them."""
        kept = {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in kept.items():
            setattr(self, name, before.to(self.place.device))
        return self

    def extra_repr(self) -> str:
        """Return the line that `print(model)` shows."""
        kind = "symmetric" if self.grid.symmetric else "with offsets"
        return (
            f"{self.in_features}, {self.out_features}, int{self.grid.bits}, {self.grid.group} a scale, {kind}"
        )


class _Through(torch.autograd.Function):
    """A matmul with a quantized weight, which is dequantized again for the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "QuantizedLinear") -> Tensor:
        """[..., D] -> [..., N]."""
        ctx.layer, ctx.dtype = layer, x.dtype
        return nnf.linear(x, layer.weight.to(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """[..., N] -> [..., D]."""
        return (gradient @ ctx.layer.weight.to(gradient.dtype)).to(ctx.dtype), None


class QuantizedLinear(QuantizedWeight):
    """A linear layer whose weight is quantized."""

    def __init__(
        self,
        made: Quantized,
        bias: Tensor | None = None,
        smooth: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(made, smooth, dtype)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        if x.requires_grad and torch.is_grad_enabled():
            through: Any = _Through.apply
            return cast(Tensor, through(x, self))
        return nnf.linear(x, self.weight.to(x.dtype), self.bias)


class QuantizedTable(QuantizedWeight):
    """A token table whose rows are quantized, by themselves or as those of a `QuantizedLinear`."""

    def __init__(self, layer: QuantizedWeight) -> None:
        super().__init__(layer.made, layer.smooth, layer.place.dtype)
        self.num_embeddings, self.embedding_dim = self.out_features, self.in_features

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        weight = self.made.of_rows(ids.flatten(), torch.float32)
        weight = weight if self.smooth is None else weight * self.smooth
        return weight.to(self.place.dtype).view(*ids.shape, self.in_features)


def empty_layer(
    grid: Grid, out: int, columns: int, smooth: bool, bias: bool, **where: Any
) -> QuantizedLinear:
    """Return a layer of this form for tensors that are at hand: on the meta device it costs no memory."""
    size = math.ceil(columns / BLOCK) * BLOCK * TILE // (8 // grid.bits)
    tiles, dtype = math.ceil(out / TILE), torch.uint8 if grid.bits == 4 else torch.int8
    scales = torch.empty(tiles, grid.groups(columns), TILE, dtype=torch.bfloat16, **where)
    codes, offsets = (
        torch.empty(tiles, size, dtype=dtype, **where),
        None if grid.symmetric else scales.clone(),
    )
    return QuantizedLinear(
        Quantized(grid, out, columns, codes, scales, offsets),
        torch.empty(out, **where) if bias else None,
        torch.empty(columns, **where) if smooth else None,
    )


def rounding_bound(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """Return the most that rounding inputs to 8 bits, by runs of 32, adds to outputs: [..., D] -> [..., N].

    This is the stated error of `run/kernels`, next to that of float32 sums: half of each run's scale
    times the sum of the sizes of its weights.
    """
    x = x.float() if layer.smooth is None else x.float() * layer.smooth
    room = -x.shape[-1] % BLOCK
    scales = nnf.pad(x, (0, room)).view(*x.shape[:-1], -1, BLOCK).abs().amax(-1) / 127
    sizes = nnf.pad(layer.made.weight(), (0, room)).abs().view(layer.out_features, -1, BLOCK).sum(-1)
    return nnf.linear(scales, sizes) / 2


def weight_of(part: nn.Module, name: str) -> Tensor:
    """Return the weight of the layer called `name` within a part, quantized or not: [N, D]."""
    weight = part.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight


def quantized_parts(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the quantized layers and tables of a model, by name."""
    return {name: part for name, part in model.named_modules() if isinstance(part, QuantizedWeight)}


def distinct(model: nn.Module) -> list[QuantizedWeight]:
    """Return the quantized weights of a model, those that a layer and a table share once."""
    return list({part.codes.data_ptr(): part for part in quantized_parts(model).values()}.values())


def few_bits(model: nn.Module) -> str:
    """Say how many weights are quantized, and how many bytes they take."""
    parts = distinct(model)
    if not parts:
        return ""
    kinds = " and ".join(f"int{bits}" for bits in sorted({part.grid.bits for part in parts}))
    weights = sum(part.in_features * part.out_features for part in parts)
    size = sum(part.size for part in parts)
    return f"; {weights:,} in {kinds}, {size / 1e6:,.1f} MB"
