"""One row times a weight of few bits, with norm, gate and residual, in Triton. Imported only where Triton is.

Shapes: D width in, N width out.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.fast.codes import Codes
from clearhead.fast.triton_launch import launched, lets_next, waits
from clearhead.fast.triton_step import ACTIVATION_NUMBERS, Tile, _activate

EXPONENT = 150 << 23  # of a float whose last bit counts one


@triton.jit
def number_at(words, run: tl.constexpr, exponent, BITS: tl.constexpr):
    """The codes of one run in words, in float32.

    Their bits stay where they are, and become the last ones of a float that counts from a power of two. That
    is one instruction where `exponent`, `EXPONENT`, is a number that the compiler does not know.
    """
    WITHIN: tl.constexpr = 5 if BITS == 4 else 2  # codes of a word that are within a float's 23 bits
    place: tl.constexpr = (run % WITHIN) * BITS
    moved = words if run < WITHIN else words >> (WITHIN * BITS)
    made = (moved & (((1 << BITS) - 1) << place)) | (exponent - (place << 23))
    return made.to(tl.float32, bitcast=True) - ((1 << (23 - place)) + (1 << (BITS - 1)))


@triton.jit
def _apart(tensor, COUNT: tl.constexpr):
    """The columns of the last axis, one by one: [Q, N, COUNT] -> [N, Q], COUNT times."""
    if COUNT == 1:
        return (tl.trans(tl.reshape(tensor, [tensor.shape[0], tensor.shape[1]])),)
    else:
        halves: tl.constexpr = [tensor.shape[0], tensor.shape[1], 2, COUNT // 2]
        first, second = tl.split(tl.permute(tl.reshape(tensor, halves), (0, 1, 3, 2)))
        return _apart(first, COUNT // 2) + _apart(second, COUNT // 2)


@triton.jit
def _block(
    words, scales, offsets, rows, within, start, WIDTH: tl.constexpr, PER: tl.constexpr, WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """Words [N, WIDE] from `start` on; for each four of them, scales and offsets of runs [WIDE/4, N, PER]."""
    j, four, run = start + tl.arange(0, WIDE), start // 4 + tl.arange(0, WIDE // 4), tl.arange(0, PER)
    w = tl.load(
        words + rows[:, None] * WIDTH + j[None, :], mask=within[:, None] & (j < WIDTH)[None, :], other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    at = rows[None, :, None] * (WIDTH // 32 * PER) + (four // 8 * PER)[:, None, None] + run[None, None, :]
    inside = within[None, :, None] & (four * 4 < WIDTH)[:, None, None]
    scale = tl.load(scales + at, mask=inside, other=0.0)
    offset = scale
    if OFFSET:
        offset = tl.load(offsets + at, mask=inside, other=0.0)
    return w, scale, offset


@triton.jit
def _times(block, values, exponent, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """The products of one block [N, WIDE/4] with inputs [WIDE], a tensor for each run."""
    w, scale, offset = block
    PER: tl.constexpr = 32 // BITS
    N: tl.constexpr = w.shape[0]
    Q: tl.constexpr = w.shape[1] // 4
    total = tl.zeros([N, Q], tl.float32)
    scale, offset = _apart(scale, PER), _apart(offset, PER)
    for run in tl.static_range(PER):
        value = values[run]
        sums = tl.sum(tl.reshape(number_at(w, run, exponent, BITS) * value[None, :], [N, Q, 4]), 2)
        total += sums * scale[run].to(tl.float32)
        if OFFSET:
            total += tl.sum(tl.reshape(value, [1, Q, 4]), 2) * offset[run].to(tl.float32)
    return total


@triton.jit
def _runs(x, start, D: tl.constexpr, PER: tl.constexpr, WIDE: tl.constexpr):
    """Numbers that meet words [WIDE] from `start` on: a tensor [WIDE] for each run."""
    j, found = start + tl.arange(0, WIDE), ()
    for run in tl.static_range(PER):
        k = j // 32 * 32 * PER + run * 32 + j % 32
        found += (tl.load(x + k, mask=k < D, other=0.0),)
    return found


@triton.jit
def _codes_kernel(
    x, words, scales, offsets, norm, bias, add, out, N, eps, exponent,
    D: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr,
    BLOCK_N: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Each program takes a few rows of words from end to end, and asks for them before anything else."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    PER: tl.constexpr = 32 // BITS  # runs of 32 columns in 32 words
    BLOCKS: tl.constexpr = (WIDTH + WIDE - 1) // WIDE
    rows, within = n.to(tl.int64), n < N
    far = tl.cast(N, tl.int64)  # rows from the gate to what it gates
    lets_next(AHEAD)
    first, second, factors = (), (), ()
    for block in tl.static_range(BLOCKS):
        first += (_block(words, scales, offsets, rows, within, block * WIDE, WIDTH, PER, WIDE, OFFSET),)
        if GATE >= 0:
            second += (
                _block(words, scales, offsets, rows + far, within, block * WIDE, WIDTH, PER, WIDE, OFFSET),
            )
        if NORM:
            factors += (_runs(norm, block * WIDE, D, PER, WIDE),)
    waits(AHEAD)
    added = tl.zeros([BLOCK_N], tl.float32)
    if ADD:
        added = tl.load(add + n, mask=within, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_N, WIDE // 4], tl.float32)
    total_up = total
    square = tl.zeros([WIDE], tl.float32)
    for block in tl.static_range(BLOCKS):
        given, values = _runs(x, block * WIDE, D, PER, WIDE), ()
        for run in tl.static_range(PER):
            value = given[run].to(tl.float32)
            if NORM:
                square += value * value
                value *= factors[block][run].to(tl.float32) + UNIT
            values += (value,)
        total += _times(first[block], values, exponent, BITS, OFFSET)
        if GATE >= 0:
            total_up += _times(second[block], values, exponent, BITS, OFFSET)
    y = tl.sum(total, 1)
    z = y
    if GATE >= 0:
        z = tl.sum(total_up, 1)
    if NORM:
        size = tl.rsqrt(tl.sum(square, 0) / D + eps)
        y *= size
        z *= size
    if BIAS:
        y += tl.load(bias + n, mask=within, other=0.0).to(tl.float32)
    if GATE >= 0:
        if BIAS:
            z += tl.load(bias + N + n, mask=within, other=0.0).to(tl.float32)
        y = _activate(y, GATE) * z
    tl.store(out + n, y + added, mask=within)


def linear(
    x: Tensor,
    weight: Codes,
    bias: Tensor | None,
    scale: Tensor | None,
    eps: float,
    unit_offset: bool,
    gate: str | None,
    add: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """Take one row; see `kernels.step_linear`."""
    D, N, width = x.shape[-1], len(weight.words) // (1 if gate is None else 2), weight.words.shape[1]
    out = x.new_empty(*x.shape[:-1], N)
    tile = tile or Tile(2 if gate is None else 4, 256, 2)
    given = (weight.offsets, scale, bias, None if add is None else add.contiguous())
    _codes_kernel[(triton.cdiv(N, tile.n),)](
        x.contiguous(), weight.words, weight.scales,
        *(weight.scales if one is None else one for one in given),  # what a flag switches off is not read
        out, N, eps, EXPONENT,
        D=D, WIDTH=width, WIDE=tile.k, BITS=weight.bits, BLOCK_N=tile.n,
        NORM=scale is not None, UNIT=float(unit_offset), OFFSET=weight.offsets is not None,
        BIAS=bias is not None, GATE=-1 if gate is None else ACTIVATION_NUMBERS[gate], ADD=add is not None,
        num_warps=tile.warps, **launched(x, 2),
    )  # fmt: skip
    return out


@triton.jit
def _spread_kernel(
    words, scales, offsets, ids, out, exponent,
    D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    CHOSEN: tl.constexpr, ROWS: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """One row, and a block of its words: the numbers that the codes stand for."""
    to, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS * 32 + tl.arange(0, ROWS * 32)
    row = to
    if CHOSEN:
        row = tl.load(ids + to).to(tl.int64)
    w = tl.load(words + row * WIDTH + j, mask=j < WIDTH, other=0)
    PER: tl.constexpr = 32 // BITS
    for run in tl.static_range(PER):
        k, at = j // 32 * 32 * PER + run * 32 + j % 32, row * (WIDTH // 32 * PER) + j // 32 * PER + run
        made = number_at(w, run, exponent, BITS) * tl.load(scales + at, mask=k < D, other=0.0).to(tl.float32)
        if OFFSET:
            made += tl.load(offsets + at, mask=k < D, other=0.0).to(tl.float32)
        tl.store(out + to * D + k, made.to(TO), mask=k < D)


def spread(weight: Codes, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Return the numbers that the codes stand for, of all rows or of those of `ids` [n]: [N, D]."""
    count, (_, width) = len(weight.words) if ids is None else len(ids), weight.words.shape
    out = torch.empty(count, weight.columns, dtype=dtype, device=weight.words.device)
    _spread_kernel[(count, triton.cdiv(width, 128))](
        weight.words, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        weight.words if ids is None else ids.contiguous(), out, EXPONENT,
        D=weight.columns, WIDTH=width, BITS=weight.bits,
        OFFSET=weight.offsets is not None, CHOSEN=ids is not None, ROWS=4,
        TO=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
    )  # fmt: skip
    return out
