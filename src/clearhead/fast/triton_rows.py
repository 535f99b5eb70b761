"""A few rows times a weight of few bits, with norm, gate and residual, in Triton.

The rows of the weight are the rows of the product, and those of the input its columns: a matrix unit takes 64
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

from clearhead.fast.codes import Codes
from clearhead.fast.triton_codes import EXPONENT, number_at
from clearhead.fast.triton_launch import counters, follow, launched
from clearhead.fast.triton_step import ACTIVATION_NUMBERS, _activate


class Cut(NamedTuple):
    """How a product is cut up."""

    n: int  # rows of the weight at a time
    splits: int  # programs among which the columns of a row are split
    warps: int = 4
    stages: int = 4  # blocks of columns asked for ahead


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
def _numbers(
    words, scales, offsets, at, within, exponent, kind: tl.constexpr, run: tl.constexpr, BITS: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """The numbers of one run of columns in words [N, 32]; their scales are at `at` [N]."""
    made = (
        number_at(words, run, exponent, BITS)
        * tl.load(scales + at, mask=within, other=0.0).to(tl.float32)[:, None]
    )
    if OFFSET:
        made += tl.load(offsets + at, mask=within, other=0.0).to(tl.float32)[:, None]
    return made.to(kind)


@triton.jit
def _rows_kernel(
    x, weight, scales, offsets, norm, bias, add, out, partial, counts, B, N, eps, exponent,
    D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr,
    ADD: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """A block of rows of the weight, and one part of its columns."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n, b = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    RUNS: tl.constexpr = 32 // BITS  # runs of 32 columns in a block of 32 words
    blocks: tl.constexpr = WIDTH // 32
    OF_ROW: tl.constexpr = blocks * RUNS
    share: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
    begin = split * share  # the last part may be shorter: blocks beyond the end are not read
    far = tl.cast(N, tl.int64)  # rows from the gate to what it gates
    follow(AHEAD)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    total_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    kind: tl.constexpr = x.dtype.element_ty
    for step in tl.range(share, num_stages=STAGES):
        start = (begin + step) * 32
        j = start + tl.arange(0, 32)
        inside = (n < N)[:, None] & (j < WIDTH)[None, :]
        places = weight + n.to(tl.int64)[:, None] * WIDTH + j[None, :]
        w = tl.load(places, mask=inside, other=0)
        if GATE >= 0:
            up = tl.load(places + far * WIDTH, mask=inside, other=0)
        for run in tl.static_range(RUNS):
            k = start * RUNS + run * 32 + tl.arange(0, 32)
            value, more = _inputs(x, norm, b, B, k, k < D, D, NORM, UNIT)
            square += more
            at, within = n.to(tl.int64) * OF_ROW + (begin + step) * RUNS + run, (n < N) & (start < WIDTH)
            made = _numbers(w, scales, offsets, at, within, exponent, kind, run, BITS, OFFSET)
            total = tl.dot(made, value, total, input_precision="ieee")
            if GATE >= 0:
                made = _numbers(
                    up, scales, offsets, at + far * OF_ROW, within, exponent, kind, run, BITS, OFFSET
                )
                total_up = tl.dot(made, value, total_up, input_precision="ieee")
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
        here = b[None, :] * far + n[:, None]
        within = (b < B)[None, :] & (n < N)[:, None]
        if ADD:
            total += tl.load(add + here, mask=within, other=0.0).to(tl.float32)
        tl.store(out + here, total, mask=within)


def cut_for(rows: int, blocks: int) -> Cut:
    """Cut a weight of so many rows and blocks of words so that all processors have work, as was measured."""
    programs = round(264 / triton.cdiv(rows, 64))
    return Cut(64, max(1, min(8, blocks // 2, programs)))


def linear(
    x: Tensor,
    weight: Codes,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    unit_offset: bool,
    gate: str | None,
    add: Tensor | None,
    cut: Cut | None = None,
) -> Tensor:
    """Take up to 64 rows; see `kernels.step_linear`."""
    parts, width = 1 if gate is None else 2, weight.words.shape[1]
    D, N, B = x.shape[-1], len(weight.words) // parts, x.numel() // x.shape[-1]
    cut = cut or cut_for(N, width // 32)
    rows, tiles = max(16, triton.next_power_of_2(B)), triton.cdiv(N, cut.n)
    out = x.new_empty(*x.shape[:-1], N)
    room = tiles * cut.splits * (cut.n * rows * parts + rows) if cut.splits > 1 else 1
    partial = torch.empty(room, dtype=torch.float32, device=x.device)
    given = (weight.offsets, scale, bias, None if add is None else add.contiguous())
    _rows_kernel[(tiles, cut.splits)](
        x.contiguous(), weight.words, weight.scales,
        *(weight.scales if one is None else one for one in given),  # what a flag switches off is not read
        out, partial, counters(x.device), B, N, eps, EXPONENT,
        D=D, WIDTH=width, BITS=weight.bits, ROWS=rows, BLOCK_N=cut.n, SPLITS=cut.splits,
        NORM=scale is not None, UNIT=float(unit_offset), OFFSET=weight.offsets is not None,
        BIAS=bias is not None, GATE=-1 if gate is None else ACTIVATION_NUMBERS[gate], ADD=add is not None,
        STAGES=cut.stages, num_warps=cut.warps, **launched(x),
    )  # fmt: skip
    return out
