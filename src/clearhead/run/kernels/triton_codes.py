"""A row or a few, one after another, times a quantized weight, with norm, gate and residual, in Triton.

Imported only where Triton is.

The input is made whole numbers first, times a step for each unit of columns: of 16 bits, where bfloat16 has
8, and of 20 for float32. Then the device multiplies four bytes by four others and adds up in one instruction,
and scales come in once for a unit.

Shapes: D width in, N width out, U units of columns at a time, C columns of a unit.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.run.kernels.fixed_cache import MatmulConfig
from clearhead.run.kernels.triton_step import (
    ACTIVATION_NUMBERS,
    Tile,
    _activate,
    launched,
    lets_next,
    processors,
    waits,
)
from clearhead.run.quant.grid import Codes

# Whether the device has no instruction for four products of bytes.
SPELLED = tl.constexpr(torch.version.cuda is None or os.environ.get("TRITON_INTERPRET") == "1")
ROUNDING = tl.constexpr(3 << 22)  # added to a float32, leaves the nearest whole number in its last bits
ROUNDED = tl.constexpr(150 << 23 | 1 << 22)  # the bits of that


@triton.jit
def _dot4(codes, values, total, SIGNED: tl.constexpr):
    """Add four products of bytes, in words, to `total`; the second ones are signed where SIGNED."""
    if SPELLED:
        for place in tl.static_range(0, 32, 8):
            value = (values >> place) & 255
            if SIGNED:
                value = (value ^ 128) - 128
            total += ((codes >> place) & 255) * value
        return total
    elif SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [codes, values, total], tl.int32, True, 1
        )
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [codes, values, total], tl.int32, True, 1
        )


@triton.jit
def _pairs(x, start, D: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr, PAIRED: tl.constexpr):
    """Numbers of units from `start` on, in the order of words: two tensors [4U] for each pair of columns.

    PAIRED: a pair is read at once, as one word of two bfloat16.
    """
    word, found = start * 4 + tl.arange(0, WIDE * 4), ()
    for pair in tl.static_range(C // 8):
        at = tl.max_contiguous(tl.multiple_of(word // 4 * (C // 2) + pair * 4 + word % 4, 4), 4)
        if PAIRED:
            both = tl.load(x.to(tl.pointer_type(tl.int32)) + at, mask=at < D // 2, other=0)
            found += ((both << 16).to(tl.float32, bitcast=True),)
            found += ((both & -65536).to(tl.float32, bitcast=True),)
        else:
            found += (tl.load(x + at * 2, mask=at * 2 < D, other=0.0).to(tl.float32),)
            found += (tl.load(x + at * 2 + 1, mask=at * 2 + 1 < D, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _whole(values, BYTES: tl.constexpr):
    """Inputs as whole numbers times a step: the steps of units [U], sums of units [U], and bytes.

    Of these, the highest first, there is for each half of the codes a word of four columns [4U].
    """
    MOST: tl.constexpr = 32767.0 if BYTES == 2 else 524287.0  # so that the sums of a unit have 31 bits
    W: tl.constexpr = values[0].shape[0]
    largest = tl.abs(values[0])
    for column in tl.static_range(1, len(values)):
        largest = _larger(largest, tl.abs(values[column]))
    largest = _larger(tl.reduce(tl.reshape(largest, [W // 4, 4]), 1, _larger), 1e-30)
    more = tl.reshape(tl.broadcast_to((MOST / largest)[:, None], [W // 4, 4]), [W])
    wholes, total, found = (), tl.zeros([W], tl.int32), ()
    for column in tl.static_range(len(values)):
        wholes += ((values[column] * more + ROUNDING).to(tl.int32, bitcast=True) - ROUNDED,)
        total += wholes[column]
    for place in tl.static_range(8 * (BYTES - 1), -1, -8):
        for half in tl.static_range(0, len(values), 4):
            low = ((wholes[half] >> place) & 255) | ((wholes[half + 2] >> place) & 255) << 16
            high = ((wholes[half + 1] >> place) & 255) | ((wholes[half + 3] >> place) & 255) << 16
            found += (low | high << 8,)
    return largest / MOST, tl.sum(tl.reshape(total, [W // 4, 4]), 1), found


@triton.jit
def _block(
    words, scales, offsets, rows, within, start, WIDTH: tl.constexpr, PER: tl.constexpr, WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
):  # fmt: skip
    """Words [N, 4U] of units from `start` on, with scales and offsets [N, U]; PER units share one."""
    j, unit = start * 4 + tl.arange(0, WIDE * 4), start + tl.arange(0, WIDE)
    w = tl.load(
        words + rows[:, None] * WIDTH + j[None, :], mask=within[:, None] & (j < WIDTH)[None, :], other=0,
        eviction_policy="evict_first",
    )  # fmt: skip
    at = rows[:, None] * (WIDTH // 4 // PER) + (unit // PER)[None, :]
    inside = within[:, None] & (unit < WIDTH // 4)[None, :]
    scale = tl.load(scales + at, mask=inside, other=0.0)
    offset = scale
    if OFFSET:
        offset = tl.load(offsets + at, mask=inside, other=0.0)
    return w, scale, offset


@triton.jit
def _times(block, given, BITS: tl.constexpr, BYTES: tl.constexpr, OFFSET: tl.constexpr):
    """The products of one block with inputs, summed up by unit: [N, U]."""
    w, scale, offset = block
    step, total, pieces = given
    HALVES: tl.constexpr = 8 // BITS
    sums = tl.zeros(w.shape, tl.int32)
    for byte in tl.static_range(BYTES):
        sums = sums << 8
        for half in tl.static_range(HALVES):
            codes = w if HALVES == 1 else (w >> (4 * half)) & 0x0F0F0F0F
            sums = _dot4(codes, pieces[byte * HALVES + half][None, :], sums, byte == 0)
    sums = tl.sum(tl.reshape(sums, [scale.shape[0], scale.shape[1], 4]), 2)
    made = (sums - (total << (BITS - 1))[None, :]).to(tl.float32) * scale.to(tl.float32)
    if OFFSET:
        made += total.to(tl.float32)[None, :] * offset.to(tl.float32)
    return made * step[None, :]


@triton.jit
def _codes_kernel(
    x, words, scales, offsets, norm, bias, add, out, count, N, eps,
    D: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr,
    BLOCK_N: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    GATE: tl.constexpr, ADD: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few rows of words from end to end, asked for before anything else, and `count` rows of the input."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    C: tl.constexpr = 128 // BITS
    PER: tl.constexpr = 32 // C
    BLOCKS: tl.constexpr = (WIDTH // 4 + WIDE - 1) // WIDE
    rows, within = n.to(tl.int64), n < N
    far = tl.cast(N, tl.int64)  # rows from the gate to what it gates
    lets_next(PDL)
    first, second, factors = (), (), ()
    for block in tl.static_range(BLOCKS):
        first += (_block(words, scales, offsets, rows, within, block * WIDE, WIDTH, PER, WIDE, OFFSET),)
        if GATE >= 0:
            second += (
                _block(words, scales, offsets, rows + far, within, block * WIDE, WIDTH, PER, WIDE, OFFSET),
            )
        if NORM:
            factors += (_pairs(norm, block * WIDE, D, C, WIDE, PAIRED),)
    waits(PDL)
    for row in range(count):
        added = tl.zeros([BLOCK_N], tl.float32)
        if ADD:
            added = tl.load(add + row * N + n, mask=within, other=0.0).to(tl.float32)
        total = tl.zeros([BLOCK_N, WIDE], tl.float32)
        total_up = total
        square = tl.zeros([WIDE * 4], tl.float32)
        for block in tl.static_range(BLOCKS):
            values = _pairs(x + row * D, block * WIDE, D, C, WIDE, PAIRED)
            if NORM:
                plain, values = values, ()
                for column in tl.static_range(len(plain)):
                    square += plain[column] * plain[column]
                    values += (plain[column] * (factors[block][column] + UNIT),)
            given = _whole(values, BYTES)
            total += _times(first[block], given, BITS, BYTES, OFFSET)
            if GATE >= 0:
                total_up += _times(second[block], given, BITS, BYTES, OFFSET)
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
        tl.store(out + row * N + n, y + added, mask=within)


def tile_for(rows: int, units: int, bits: int, gated: bool, processors: int) -> Tile:
    """How a matmul of a quantized weight with one row is cut up, as was measured."""
    if gated:
        n, k, warps = 8, 32 if bits == 4 else 64, 2
    elif bits == 8:
        n, k, warps = (8, 64, 4) if units <= 128 and rows <= 8192 else (4, 128, 4)
    elif units > 64:
        n, k, warps = 8, 256, 8
    else:
        n, k, warps = (16, 64, 8) if rows >= 16 * processors else (8, 64, 4)
    while n > 1 and n * (2 if gated else 1) * units > 1024 * warps:  # a thread asks for 128 words at most
        n //= 2
    return Tile(n, min(k, triton.next_power_of_2(units)), warps)


def linear(x: Tensor, weight: Codes, form: MatmulConfig, tile: Tile | None = None) -> Tensor:
    """Take a few rows; see `kernels.step_linear`."""
    bias, scale, eps, unit_offset, gate, add = form
    D, N, width = x.shape[-1], len(weight.words) // (1 if gate is None else 2), weight.words.shape[1]
    out = x.new_empty(*x.shape[:-1], N)
    tile = tile or tile_for(N, width // 4, weight.bits, gate is not None, processors(x.device))
    x = x.contiguous()
    paired = D % 2 == 0 and all(
        tensor.dtype == torch.bfloat16 and tensor.data_ptr() % 4 == 0
        for tensor in (x, scale)
        if tensor is not None
    )
    given = (weight.offsets, scale, bias, None if add is None else add.contiguous())
    _codes_kernel[(triton.cdiv(N, tile.n),)](
        x, weight.words, weight.scales,
        *(weight.scales if x is None else x for x in given),  # what a flag switches off is not read
        out, x.numel() // D, N, eps,
        D=D, WIDTH=width, WIDE=tile.k, BITS=weight.bits, BLOCK_N=tile.n,
        BYTES=2 if x.dtype == torch.bfloat16 else 3,
        NORM=scale is not None, UNIT=float(unit_offset), OFFSET=weight.offsets is not None,
        BIAS=bias is not None, GATE=-1 if gate is None else ACTIVATION_NUMBERS[gate], ADD=add is not None,
        PAIRED=paired, num_warps=tile.warps, **launched(x, 2),
    )  # fmt: skip
    return out


@triton.jit
def numbers(words, scale, offset, half: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """What one half of the codes in words [N, W] stands for, by run [N, R]: [N, R, columns of a run].

    Of 4 bits, a half is 16 columns of each run; of 8 bits it is all 32.
    """
    N: tl.constexpr = words.shape[0]
    WIDE: tl.constexpr = words.shape[1] * 4 // scale.shape[1]
    codes = words if BITS == 8 else (words >> (4 * half)) & 0x0F0F0F0F
    even = tl.join(codes & 255, (codes >> 16) & 255)
    odd = tl.join((codes >> 8) & 255, (codes >> 24) & 255)
    dealt = tl.reshape(tl.join(even, odd), [N, words.shape[1] // 4, 4, 2, 2])  # unit, word, pair
    made = tl.reshape(tl.permute(dealt, (0, 1, 3, 2, 4)), [N, scale.shape[1], WIDE]) | ROUNDED
    made = made.to(tl.float32, bitcast=True) - (ROUNDING + (1 << (BITS - 1)))
    made *= scale.to(tl.float32)[:, :, None]
    if OFFSET:
        made += offset.to(tl.float32)[:, :, None]
    return made


@triton.jit
def columns_of(half: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Where the columns of `numbers` lie among those of the words: [R·columns of a run]."""
    c = tl.arange(0, WORDS * 4)
    if BITS == 4:
        c = c // 16 * 32 + half * 16 + c % 16
    return c


@triton.jit
def _spread_kernel(
    words, scales, offsets, ids, out,
    D: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr,
    CHOSEN: tl.constexpr, WORDS: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """One row, and a block of its words: the numbers that the codes stand for."""
    to, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * WORDS
    row = to
    if CHOSEN:
        row = tl.load(ids + to).to(tl.int64)
    EACH: tl.constexpr = BITS  # words of a run of 32 columns
    j, r = first + tl.arange(0, WORDS), first // EACH + tl.arange(0, WORDS // EACH)
    w = tl.load(words + row * WIDTH + j, mask=j < WIDTH, other=0)[None, :]
    at, inside = row * (WIDTH // EACH) + r, r < WIDTH // EACH
    scale = tl.load(scales + at, mask=inside, other=0.0)[None, :]
    offset = scale
    if OFFSET:
        offset = tl.load(offsets + at, mask=inside, other=0.0)[None, :]
    for half in tl.static_range(8 // BITS):
        made = tl.reshape(numbers(w, scale, offset, half, BITS, OFFSET), [WORDS * 4])
        k = first * (32 // BITS) + columns_of(half, BITS, WORDS)
        tl.store(out + to * D + k, made.to(TO), mask=k < D)


def spread(weight: Codes, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Dequantize all rows, or those of `ids` [n]: [N, D]."""
    count, (_, width) = len(weight.words) if ids is None else len(ids), weight.words.shape
    out = torch.empty(count, weight.columns, dtype=dtype, device=weight.words.device)
    _spread_kernel[(count, triton.cdiv(width, 128))](
        weight.words, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        weight.words if ids is None else ids.contiguous(), out,
        D=weight.columns, WIDTH=width, BITS=weight.bits,
        OFFSET=weight.offsets is not None, CHOSEN=ids is not None, WORDS=128,
        TO=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
    )  # fmt: skip
    return out
