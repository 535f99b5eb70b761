"""One row times a weight of few bits, with norm, gate and residual, in Triton. Imported only where Triton is.

Shapes: D width in, N width out, W words of a row, G groups of a row.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.fast.codes import Codes
from clearhead.fast.triton_launch import follow, launched
from clearhead.fast.triton_step import ACTIVATION_NUMBERS, _activate


@triton.jit
def number_at(words, run, BITS: tl.constexpr):
    """The codes of one run in words, in float32.

    Their bits stay where they are, and become the last ones of a float that counts from a power of two.
    """
    WITHIN: tl.constexpr = 5 if BITS == 4 else 2  # codes of a word that are within a float's 23 bits
    place = (run % WITHIN) * BITS
    moved = tl.where(run < WITHIN, words, words >> (WITHIN * BITS))
    made = (moved & (((1 << BITS) - 1) << place)) | ((150 - place) << 23)
    return made.to(tl.float32, bitcast=True) - ((1 << (23 - place)) + (1 << (BITS - 1)))


@triton.jit
def _products(words, scale, offset, value, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Rows [N] of words [N, W] with scales [N, W/4, P], times inputs [1, W, P], P codes of a word."""
    shape: tl.constexpr = [words.shape[0], words.shape[1] // 4, 4, 32 // BITS]
    codes = number_at(words[:, :, None], tl.arange(0, 32 // BITS)[None, None, :], BITS)
    total = tl.sum(tl.reshape(codes * value, shape), 2) * scale.to(tl.float32)
    if OFFSET:
        total += tl.sum(tl.reshape(value, [1, shape[1], 4, shape[3]]), 2) * offset.to(tl.float32)
    return tl.sum(tl.sum(total, 2), 1)


@triton.jit
def _codes_kernel(
    x, words, scales, offsets, norm, bias, add, out, N, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program takes a few rows of words from end to end, and asks for them before anything else."""
    n, j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, WIDE)
    PER: tl.constexpr = 32 // BITS  # runs of 32 columns in 32 words
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    run = tl.arange(0, PER)[None, None, :] * 32
    four = (tl.arange(0, WIDE // 4) * 4)[None, :, None]  # words that have one scale for each run
    group = (four // 32 * 32 * PER + run) // GROUP
    rows, far = n.to(tl.int64), tl.cast(N, tl.int64)  # far: rows from the gate to what it gates
    read, at = (n < N)[:, None] & (j < WIDTH)[None, :], rows[:, None, None] * GROUPS + group
    w = tl.load(words + rows[:, None] * WIDTH + j[None, :], mask=read, other=0)
    within = (n < N)[:, None, None] & (group < GROUPS)
    scale = tl.load(scales + at, mask=within, other=0.0)
    offset = scale
    if OFFSET:
        offset = tl.load(offsets + at, mask=within, other=0.0)
    if GATE >= 0:
        up = tl.load(words + (rows + far)[:, None] * WIDTH + j[None, :], mask=read, other=0)
        scale_up = tl.load(scales + at + far * GROUPS, mask=within, other=0.0)
        offset_up = scale_up
        if OFFSET:
            offset_up = tl.load(offsets + at + far * GROUPS, mask=within, other=0.0)
    k = (j // 32 * 32 * PER + j % 32)[None, :, None] + run
    if NORM:
        factor = tl.load(norm + k, mask=k < D, other=0.0).to(tl.float32) + UNIT
    follow(AHEAD)
    value = tl.load(x + k, mask=k < D, other=0.0).to(tl.float32)
    size = 1.0
    if NORM:
        size = tl.rsqrt(tl.sum(value * value) / D + eps)
        value *= factor
    y = _products(w, scale, offset, value, BITS, OFFSET) * size
    z = y
    if GATE >= 0:
        z = _products(up, scale_up, offset_up, value, BITS, OFFSET) * size
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
    weight: Codes,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    unit_offset: bool,
    gate: str | None,
    add: Tensor | None,
    rows: int = 4,
) -> Tensor:
    """Take one row, `rows` rows of the weight to a program; see `kernels.step_linear`."""
    D, N, width = x.shape[-1], len(weight.words) // (1 if gate is None else 2), weight.words.shape[1]
    out = x.new_empty(*x.shape[:-1], N)
    wide = max(128, triton.next_power_of_2(width))
    given = (weight.offsets, scale, bias, None if add is None else add.contiguous())
    _codes_kernel[(triton.cdiv(N, rows),)](
        x.contiguous(), weight.words, weight.scales,
        *(weight.scales if one is None else one for one in given),  # what a flag switches off is not read
        out, N, eps,
        D=D, WIDTH=width, WIDE=wide, GROUP=weight.group, BITS=weight.bits, BLOCK_N=rows,
        NORM=scale is not None, UNIT=float(unit_offset), OFFSET=weight.offsets is not None,
        BIAS=bias is not None, GATE=-1 if gate is None else ACTIVATION_NUMBERS[gate], ADD=add is not None,
        num_warps=min(16, wide // 128), **launched(x, 2),
    )  # fmt: skip
    return out


@triton.jit
def _spread_kernel(
    words, scales, offsets, ids, out,
    D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """One row, and a block of its words: the numbers that the codes stand for."""
    to, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS * 32 + tl.arange(0, ROWS * 32)
    row = to
    if CHOSEN:
        row = tl.load(ids + to).to(tl.int64)
    w = tl.load(words + row * WIDTH + j, mask=j < WIDTH, other=0)
    PER: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    run = tl.arange(0, PER)[None, :]
    k = (j // 32 * 32 * PER + j % 32)[:, None] + run * 32
    at = row * GROUPS + k // GROUP
    made = number_at(w[:, None], run, BITS) * tl.load(scales + at, mask=k < D, other=0.0).to(tl.float32)
    if OFFSET:
        made += tl.load(offsets + at, mask=k < D, other=0.0).to(tl.float32)
    tl.store(out + to * D + k, made.to(TO), mask=k < D)


def spread(weight: Codes, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Return the numbers that the codes stand for, of all rows or of those of `ids` [n]: [N, D]."""
    count, (_, width) = len(weight.words) if ids is None else len(ids), weight.words.shape
    out = torch.empty(count, weight.columns, dtype=dtype, device=weight.words.device)
    _spread_kernel[(count, triton.cdiv(width, 128))](
        weight.words, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        weight.words if ids is None else ids.contiguous(), out,
        D=weight.columns, WIDTH=width, GROUP=weight.group, BITS=weight.bits,
        OFFSET=weight.offsets is not None, CHOSEN=ids is not None, ROWS=4,
        TO=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
    )  # fmt: skip
    return out
