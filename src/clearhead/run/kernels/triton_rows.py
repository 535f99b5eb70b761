"""A few rows times a weight, quantized or not, with norm, gate and residual, in Triton.

The rows of the weight are the rows of the result, and those of the input its columns: a matrix unit takes 64
of the first, and as few as 8 of the second. Where the weight has few rows, its columns are split among
programs, and the last of them adds up. Imported only where Triton is.

Shapes: B rows, D width in, N width out.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.run.kernels.fixed_cache import MatmulConfig
from clearhead.run.kernels.triton_codes import columns_of, numbers
from clearhead.run.kernels.triton_step import (
    ACTIVATION_NUMBERS,
    _activate,
    counters,
    follow,
    launched,
    lets_next,
    processors,
    waits,
)
from clearhead.run.quant.grid import Codes


class Cut(NamedTuple):
    """How a matmul is cut up."""

    n: int  # rows of the weight at a time
    splits: int  # programs among which the columns of a row are split
    warps: int = 4
    stages: int = 4  # blocks of columns loaded early


@triton.jit
def _inputs(x, norm, b, B, k, inside, D: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr):
    """Inputs at columns `k` [K] of rows `b`: [K, ROWS], times the norm's scale, and their squares' sums."""
    value = tl.load(x + b[None, :] * D + k[:, None], mask=(b < B)[None, :] & inside[:, None], other=0.0)
    square = tl.zeros([b.shape[0]], tl.float32)
    if NORM:
        wide = value.to(tl.float32)
        square = tl.sum(wide * wide, 0)
        scale = tl.load(norm + k, mask=inside, other=0.0).to(tl.float32) + UNIT
        value = (wide * scale[:, None]).to(value.dtype)
    return value, square


@triton.jit
def _loaded(
    weight, scales, offsets, rows, within, start, WIDTH: tl.constexpr, BITS: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """32 words from `start` on of some rows [N, 32], with the scales and offsets of their runs [N, R].

    A run has as many words as a code has bits.
    """
    j, r = start + tl.arange(0, 32), start // BITS + tl.arange(0, 32 // BITS)
    pointers, inside = weight + rows[:, None] * WIDTH + j[None, :], within[:, None] & (j < WIDTH)[None, :]
    w = tl.load(pointers, mask=inside, other=0)
    at = rows[:, None] * (WIDTH // BITS) + r[None, :]
    inside = within[:, None] & (r * BITS < WIDTH)[None, :]
    scale = tl.load(scales + at, mask=inside, other=0.0)
    offset = scale
    if OFFSET:
        offset = tl.load(offsets + at, mask=inside, other=0.0)
    return w, scale, offset


@triton.jit
def _made(loaded, half: tl.constexpr, kind: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """The numbers of one half of the codes: [N, 128]."""
    w, scale, offset = loaded
    return tl.reshape(numbers(w, scale, offset, half, BITS, OFFSET), [w.shape[0], 128]).to(kind)


@triton.jit
def _put(
    total, total_up, square, bias, add, out, partial, counts, tile, split, B, N, eps,
    D: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store the sums of one part of the columns; the last part adds up all, and stores the result."""
    ROWS: tl.constexpr = total.shape[1]
    n, b = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    last = True
    if SPLITS > 1:
        PARTS: tl.constexpr = 1 if GATE < 0 else 2
        room: tl.constexpr = BLOCK_N * ROWS * PARTS + ROWS
        cells = tl.arange(0, BLOCK_N)[:, None] * ROWS + b[None, :]
        mine = partial + (tile * SPLITS + split) * room
        tl.store(mine + cells, total)
        if GATE >= 0:
            tl.store(mine + BLOCK_N * ROWS + cells, total_up)
        tl.store(mine + BLOCK_N * ROWS * PARTS + b, square)
        tl.debug_barrier()
        last = tl.atomic_add(counts + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            total = tl.zeros([BLOCK_N, ROWS], tl.float32)
            total_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
            square = tl.zeros([ROWS], tl.float32)
            for part in tl.static_range(SPLITS):
                theirs = partial + (tile * SPLITS + part) * room
                total += tl.load(theirs + cells, cache_modifier=".cg")
                if GATE >= 0:
                    total_up += tl.load(theirs + BLOCK_N * ROWS + cells, cache_modifier=".cg")
                square += tl.load(theirs + BLOCK_N * ROWS * PARTS + b, cache_modifier=".cg")
            tl.store(counts + tile, 0)
    if last:
        if NORM:
            size = tl.rsqrt(square / D + eps)
            total *= size[None, :]
            total_up *= size[None, :]
        if BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATE >= 0:
            if BIAS:
                total_up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
            total = _activate(total, GATE) * total_up
        here = b[None, :] * tl.cast(N, tl.int64) + n[:, None]
        within = (b < B)[None, :] & (n < N)[:, None]
        if ADD:
            total += tl.load(add + here, mask=within, other=0.0).to(tl.float32)
        tl.store(out + here, total, mask=within)


@triton.jit
def _rows_kernel(
    x, weight, scales, offsets, norm, bias, add, out, partial, counts, B, N, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    ADD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of rows of the weight, and one part of its columns."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n, b = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    blocks: tl.constexpr = (WIDTH + 31) // 32
    share: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
    begin = split * share  # the last part may be shorter: blocks beyond the end are not read
    far, rows, within = tl.cast(N, tl.int64), n.to(tl.int64), n < N  # `far`: from the gate to what it gates
    follow(PDL)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    total_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    kind: tl.constexpr = x.dtype.element_ty
    for step in tl.range(share, num_stages=STAGES):
        start = (begin + step) * 32
        loaded = _loaded(weight, scales, offsets, rows, within, start, WIDTH, BITS, OFFSET)
        up = loaded
        if GATE >= 0:
            up = _loaded(weight, scales, offsets, rows + far, within, start, WIDTH, BITS, OFFSET)
        for half in tl.static_range(8 // BITS):
            k = start * (32 // BITS) + columns_of(half, BITS, 32)
            value, more = _inputs(x, norm, b, B, k, k < D, D, NORM, UNIT)
            square += more
            total = tl.dot(_made(loaded, half, kind, BITS, OFFSET), value, total, input_precision="ieee")
            if GATE >= 0:
                total_up = tl.dot(
                    _made(up, half, kind, BITS, OFFSET), value, total_up, input_precision="ieee"
                )
    _put(
        total, total_up, square, bias, add, out, partial, counts, tile, split, B, N, eps,
        D, BLOCK_N, SPLITS, NORM, BIAS, GATE, ADD,
    )  # fmt: skip


@triton.jit
def _wide_kernel(
    x, weight, bias, add, out, partial, counts, B, N,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for a weight that is not quantized, without a norm.

    With a gate, half of the rows are those of the gate, and half those that it gates.
    """
    lets_next(PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    OUT: tl.constexpr = BLOCK_N if GATE < 0 else BLOCK_N // 2
    BLOCKS: tl.constexpr = (D + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K)
    i, b = tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    n = tile * OUT + i % OUT
    rows, within = n.to(tl.int64) + (i // OUT).to(tl.int64) * N, n < N
    waits(PDL)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for block in tl.range(BLOCKS, num_stages=STAGES):
        k = (split * BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
        pointers = weight + rows[:, None] * D + k[None, :]
        w = tl.load(pointers, mask=within[:, None] & (k < D)[None, :], other=0.0)
        value = tl.load(x + b[None, :] * D + k[:, None], mask=(b < B)[None, :] & (k < D)[:, None], other=0.0)
        total = tl.dot(w, value, total, input_precision="ieee")
    total_up = total
    if GATE >= 0:
        total, total_up = tl.split(tl.permute(tl.reshape(total, [2, OUT, ROWS]), (1, 2, 0)))
    _put(
        total, total_up, tl.zeros([ROWS], tl.float32), bias, add, out, partial, counts, tile, split, B, N,
        0.0, D, OUT, SPLITS, False, BIAS, GATE, ADD,
    )  # fmt: skip


def cut_for(rows: int, blocks: int) -> Cut:
    """Cut a weight of so many rows and blocks of words so that all processors have work, as was measured."""
    programs = round(264 / triton.cdiv(rows, 64))
    return Cut(64, max(1, min(8, blocks // 2, programs)))


def linear(x: Tensor, weight: Codes, form: MatmulConfig, cut: Cut | None = None) -> Tensor:
    """Take up to 64 rows; see `kernels.step_linear`."""
    bias, scale, eps, unit_offset, gate, add = form
    parts, width = 1 if gate is None else 2, weight.words.shape[1]
    D, N, B = x.shape[-1], len(weight.words) // parts, x.numel() // x.shape[-1]
    cut = cut or cut_for(N, triton.cdiv(width, 32))
    rows, tiles = max(16, triton.next_power_of_2(B)), triton.cdiv(N, cut.n)
    out = x.new_empty(*x.shape[:-1], N)
    room = tiles * cut.splits * (cut.n * rows * parts + rows) if cut.splits > 1 else 1
    partial = torch.empty(room, dtype=torch.float32, device=x.device)
    given = (weight.offsets, scale, bias, None if add is None else add.contiguous())
    _rows_kernel[(tiles, cut.splits)](
        x.contiguous(), weight.words, weight.scales,
        *(weight.scales if x is None else x for x in given),  # what a flag switches off is not read
        out, partial, counters(x.device), B, N, eps,
        D=D, WIDTH=width, BITS=weight.bits, ROWS=rows, BLOCK_N=cut.n, SPLITS=cut.splits,
        NORM=scale is not None, UNIT=float(unit_offset), OFFSET=weight.offsets is not None,
        BIAS=bias is not None, GATE=-1 if gate is None else ACTIVATION_NUMBERS[gate], ADD=add is not None,
        STAGES=cut.stages, num_warps=cut.warps, **launched(x),
    )  # fmt: skip
    return out


def wide_cut(tiles: int, blocks: int, processors: int) -> Cut:
    """Cut a weight of so many tiles of rows and blocks of columns, as was measured."""
    return Cut(64, max(1, min(round(1.4 * processors / tiles), blocks // 5)))


def wide(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: str | None,
    add: Tensor | None,
    cut: Cut | None = None,
) -> Tensor:
    """Take up to 32 rows of bfloat16 and a weight as it is; see `kernels.step_linear`."""
    parts, block = 1 if gate is None else 2, 128
    D, N, B = x.shape[-1], len(weight) // parts, x.numel() // x.shape[-1]
    cut = cut or wide_cut(triton.cdiv(parts * N, 64), triton.cdiv(D, block), processors(x.device))
    rows, tiles = max(16, triton.next_power_of_2(B)), triton.cdiv(N, cut.n // parts)
    out = x.new_empty(*x.shape[:-1], N)
    room = tiles * cut.splits * (cut.n * rows + rows) if cut.splits > 1 else 1
    partial = torch.empty(room, dtype=torch.float32, device=x.device)
    given = (bias, None if add is None else add.contiguous())
    _wide_kernel[(tiles, cut.splits)](
        x.contiguous(), weight,
        *(weight if tensor is None else tensor for tensor in given),  # what a flag switches off is not read
        out, partial, counters(x.device), B, N,
        D=D, ROWS=rows, BLOCK_N=cut.n, BLOCK_K=block, SPLITS=cut.splits, BIAS=bias is not None,
        GATE=-1 if gate is None else ACTIVATION_NUMBERS[gate], ADD=add is not None,
        STAGES=cut.stages, num_warps=cut.warps, **launched(x, 2),
    )  # fmt: skip
    return out
