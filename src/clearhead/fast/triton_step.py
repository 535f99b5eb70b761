"""The kernels of `kernels` around attention, in Triton: products, norm, gate. Imported only where Triton is.

Shapes: B rows, D width in, N width out.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.fast.triton_launch import follow, launched

ACTIVATION_NUMBERS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "quick_gelu": 4, "relu2": 5}


class Tile(NamedTuple):
    """How a kernel cuts up its work."""

    n: int  # rows of the weight (or slots of the cache) at a time
    k: int  # columns of the weight at a time (or splits of the cache)
    warps: int
    stages: int = 3  # blocks of the cache asked for ahead


@triton.jit
def _activate(x, kind: tl.constexpr):
    if kind == 0:
        y = tl.maximum(x, 0.0)
    elif kind == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif kind == 2:
        # 0.5 · (1 + tanh z) is the sigmoid of 2z.
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif kind == 3:
        y = x * tl.sigmoid(x)
    elif kind == 4:
        y = x * tl.sigmoid(1.702 * x)
    else:
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return y


@triton.jit
def _linear_kernel(
    x, weight, bias, scale, add, out, N, eps,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program reads a few rows of the weight from end to end, all of it asked for at once."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = n.to(tl.int64)[:, None] * D
    within = (n < N)[:, None]
    follow(AHEAD)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    square = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.static_range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(
            weight + rows + k[None, :],
            mask=within & (k < D)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        value = tl.load(x + k, mask=k < D, other=0.0).to(tl.float32)
        if NORM:
            square += value * value
            value *= tl.load(scale + k, mask=k < D, other=0.0).to(tl.float32) + UNIT
        total += w * value[None, :]
        if GATE >= 0:
            up = weight + tl.cast(N, tl.int64) * D + rows + k[None, :]
            total_up += (
                tl.load(up, mask=within & (k < D)[None, :], other=0.0, eviction_policy="evict_first").to(
                    tl.float32
                )
                * value[None, :]
            )
    y = tl.sum(total, 1)
    z = tl.sum(total_up, 1)
    if NORM:
        size = tl.rsqrt(tl.sum(square, 0) / D + eps)
        y *= size
        z *= size
    if BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if GATE >= 0:
        if BIAS:
            z += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        y = _activate(y, GATE) * z
    if ADD:
        y += tl.load(add + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + n, y, mask=n < N)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    unit_offset: bool,
    gate: str | None,
    add: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """Take one row; see `kernels.step_linear`."""
    D, N = x.shape[-1], weight.shape[0] // (1 if gate is None else 2)
    out = x.new_empty(*x.shape[:-1], N)
    tile = tile or Tile(4 if N < 8192 else 8, max(64, min(2048, triton.next_power_of_2(D))), 8)
    given = (bias, scale, None if add is None else add.contiguous())
    _linear_kernel[(triton.cdiv(N, tile.n),)](
        x.contiguous(), weight,
        *(weight if tensor is None else tensor for tensor in given),  # what a flag switches off is not read
        out, N, eps,
        D=D, BLOCK_N=tile.n, BLOCK_K=tile.k, NORM=scale is not None, UNIT=float(unit_offset),
        BIAS=bias is not None, GATE=-1 if gate is None else ACTIVATION_NUMBERS[gate], ADD=add is not None,
        num_warps=tile.warps, **launched(x),
    )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(
    x, scale, out, eps, D: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """One row: the RMS norm."""
    follow(AHEAD)
    row, d = tl.program_id(0).to(tl.int64) * D, tl.arange(0, WIDE)
    value = tl.load(x + row + d, mask=d < D, other=0.0).to(tl.float32)
    size = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    factor = tl.load(scale + d, mask=d < D, other=0.0).to(tl.float32) + UNIT
    tl.store(out + row + d, value * size * factor, mask=d < D)


def norm(x: Tensor, scale: Tensor, eps: float, unit_offset: bool) -> Tensor:
    """Apply RMS norm to each row: [B, 1, D] -> [B, 1, D]."""
    x, D = x.contiguous(), x.shape[-1]
    out, wide = torch.empty_like(x), triton.next_power_of_2(D)
    _norm_kernel[(x.numel() // D,)](
        x, scale, out, eps, D=D, WIDE=wide, UNIT=float(unit_offset), num_warps=8 if wide > 2048 else 4,
        **launched(x),
    )  # fmt: skip
    return out


@triton.jit
def _gate_kernel(y, out, N, KIND: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """A part of one row: the activated first half times the second."""
    follow(AHEAD)
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pre = tl.load(y + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(y + row * 2 * N + N + n, mask=n < N, other=0.0)
    post = _activate(pre, KIND).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * N + n, post * up.to(tl.float32), mask=n < N)


def gated(y: Tensor, gate: str) -> Tensor:
    """Activate the first half of each row and multiply it with the second: [B, 1, 2N] -> [B, 1, N]."""
    y, N = y.contiguous(), y.shape[-1] // 2
    out = y.new_empty(*y.shape[:-1], N)
    grid = (out.numel() // N, triton.cdiv(N, 1024))
    _gate_kernel[grid](y, out, N, KIND=ACTIVATION_NUMBERS[gate], BLOCK=1024, **launched(y))
    return out
