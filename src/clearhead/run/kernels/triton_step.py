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

from clearhead.run.kernels.triton_launch import follow, launched, lets_next, processors, waits

ACTIVATION_NUMBERS = {"relu": 0, "gelu": 1, "gelu_tanh": 2, "silu": 3, "quick_gelu": 4, "relu2": 5}


class Tile(NamedTuple):
    """How a kernel cuts up its work."""

    n: int  # rows of the weight (or slots of the cache) at a time
    k: int  # columns of the weight at a time (or splits of the cache)
    warps: int
    programs: int = 0  # on each processor, which take one tile after another; 0: each tile has its own


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
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _asked(weight, n, N, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """All columns of rows `n` of a weight, asked for at once: blocks [N, BLOCK_K], as many as it takes."""
    blocks = ()
    for start in tl.static_range(0, D, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        places = weight + n.to(tl.int64)[:, None] * D + k[None, :]
        asked = (n < N)[:, None] & (k < D)[None, :]
        blocks += (tl.load(places, mask=asked, other=0.0, eviction_policy="evict_first"),)
    return blocks


@triton.jit
def _times(blocks, values, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Blocks of a weight times the input, not yet summed up: [N, BLOCK_K]."""
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for block in tl.static_range(len(values)):
        total += blocks[block].to(tl.float32) * values[block][None, :]
    return total


@triton.jit
def _scaled(
    x, factors, eps, D: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """One row in blocks [BLOCK_K], times the scale of its norm; and what the norm divides by, inverted."""
    values, square = (), tl.zeros([BLOCK_K], tl.float32)
    for block in tl.static_range((D + BLOCK_K - 1) // BLOCK_K):
        k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        value = tl.load(x + k, mask=k < D, other=0.0).to(tl.float32)
        if NORM:
            square += value * value
            value *= factors[block].to(tl.float32) + UNIT
        values += (value,)
    size = 1.0
    if NORM:
        size = tl.rsqrt(tl.sum(square, 0) / D + eps)
    return values, size


@triton.jit
def _linear_kernel(
    x, weight, bias, scale, add, out, N, eps, tiles, programs,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    UNIT: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, AGAIN: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Rows of the weight from end to end, asked for before the input is there; AGAIN: then others."""
    lets_next(AHEAD)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, up = _asked(weight, n, N, D, BLOCK_K), weight + tl.cast(N, tl.int64) * D
    second, factors, given = first, (), ()
    if GATE >= 0:
        second = _asked(up, n, N, D, BLOCK_K)
    if NORM:
        for start in tl.static_range(0, D, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            factors += (tl.load(scale + k, mask=k < D, other=0.0),)
    waits(AHEAD)
    for row in tl.static_range(ROWS):
        given += (_scaled(x + row * D, factors, eps, D, BLOCK_K, NORM, UNIT),)
    for tile in range(tl.program_id(0), tiles, programs):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        next_first, next_second = first, second
        if AGAIN:
            next_first = _asked(weight, n + programs * BLOCK_N, N, D, BLOCK_K)
            if GATE >= 0:
                next_second = _asked(up, n + programs * BLOCK_N, N, D, BLOCK_K)
        for row in tl.static_range(ROWS):
            values, size = given[row]
            added = tl.zeros([BLOCK_N], tl.float32)
            if ADD:
                added = tl.load(add + row * N + n, mask=n < N, other=0.0).to(tl.float32)
            total = _times(first, values, BLOCK_N, BLOCK_K)
            if GATE >= 0:
                y, z = tl.reduce((total, _times(second, values, BLOCK_N, BLOCK_K)), 1, _add_both)
                z *= size
            else:
                y = tl.sum(total, 1)
            y *= size
            if BIAS:
                y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
            if GATE >= 0:
                if BIAS:
                    z += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
                y = _activate(y, GATE) * z
            tl.store(out + row * N + n, y + added, mask=n < N)
        first, second = next_first, next_second


def tile_for(rows: int, columns: int, few: int, gated: bool, processors: int) -> Tile:
    """How a product of a weight with a `few` rows is cut up, as was measured."""
    wide = max(64, min(2048, triton.next_power_of_2(columns)))
    if columns > 2048:
        return Tile(4 if columns <= 8192 else 2, wide, 8, 2 if few == 1 else 0)
    if gated:
        return Tile(4 if few == 1 else 2, wide, 4)
    if rows <= 16 * processors:
        return Tile(2, wide, 4)
    return Tile(4 if rows < 8192 else 8, wide, 8)


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
    """Take a row or a few; see `kernels.step_linear`."""
    D, N, there = x.shape[-1], weight.shape[0] // (1 if gate is None else 2), processors(x.device)
    out, few = x.new_empty(*x.shape[:-1], N), x.numel() // D
    tile = tile or tile_for(N, D, few, gate is not None, there)
    tiles = triton.cdiv(N, tile.n)
    programs = min(tiles, tile.programs * there or tiles)
    given = (bias, scale, None if add is None else add.contiguous())
    _linear_kernel[(programs,)](
        x.contiguous(), weight,
        *(weight if tensor is None else tensor for tensor in given),  # what a flag switches off is not read
        out, N, eps, tiles, programs,
        ROWS=few, D=D, BLOCK_N=tile.n, BLOCK_K=tile.k, NORM=scale is not None,
        UNIT=float(unit_offset), BIAS=bias is not None, ADD=add is not None,
        GATE=-1 if gate is None else ACTIVATION_NUMBERS[gate], AGAIN=programs < tiles,
        num_warps=tile.warps, **launched(x, 2),
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
