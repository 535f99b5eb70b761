"""The kernels of `kernels` around attention, in Triton: matmuls, norm, gate, a step's bookkeeping.

Imported only where Triton is.

From compute capability 9 on, a kernel may start while the one before it still runs. At level 1 it is launched
then and waits; at level 2 it also lets the next one start. All kernels that are launched so wait for the one
before them: by that, what came earlier has ended as well.

Before it waits, a kernel may read what no kernel of the step writes: weights, what earlier steps have kept,
and what came before the first kernel that lets others start, such as positions and masks.

Shapes: B rows, D width in, N width out, S slots, R rotated columns, V vocabulary.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.core.positions import Rotary
from clearhead.run.kernels.fixed_cache import NOTHING, FixedCache, MatmulConfig


@triton.jit
def lets_next(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL > 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def waits(PDL: tl.constexpr):
    """Wait until the kernel before has ended."""
    if PDL > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def follow(PDL: tl.constexpr):
    """Let the next kernel start, and wait until the one before has ended."""
    lets_next(PDL)
    waits(PDL)


@functools.cache
def _has_pdl(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launched(x: Tensor, level: int = 1) -> dict[str, int | bool]:
    """Return what a kernel on this tensor's device is launched with."""
    pdl = level if x.is_cuda and _has_pdl(x.device.index) else 0
    return {"PDL": pdl, "launch_pdl": True} if pdl else {"PDL": 0}


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Return zeros in which programs of one kernel count who is last; that one sets its own back to zero."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many processors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


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
        pointers = weight + n.to(tl.int64)[:, None] * D + k[None, :]
        inside = (n < N)[:, None] & (k < D)[None, :]
        blocks += (tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first"),)
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
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows of the weight from end to end, asked for before the input is there; AGAIN: then others."""
    lets_next(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, up = _asked(weight, n, N, D, BLOCK_K), weight + tl.cast(N, tl.int64) * D
    second, factors, given = first, (), ()
    if GATE >= 0:
        second = _asked(up, n, N, D, BLOCK_K)
    if NORM:
        for start in tl.static_range(0, D, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            factors += (tl.load(scale + k, mask=k < D, other=0.0),)
    waits(PDL)
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
    """How a matmul of a weight with a `few` rows is cut up, as was measured."""
    wide = max(64, min(2048, triton.next_power_of_2(columns)))
    if columns > 2048:
        return Tile(4 if columns <= 8192 else 2, wide, 8, 2 if few == 1 else 0)
    if gated:
        return Tile(4 if few == 1 else 2, wide, 4)
    if rows <= 16 * processors:
        return Tile(2, wide, 4)
    return Tile(4 if rows < 8192 else 8, wide, 8)


def linear(x: Tensor, weight: Tensor, form: MatmulConfig, tile: Tile | None = None) -> Tensor:
    """Take a row or a few; see `kernels.step_linear`."""
    bias, scale, eps, unit_offset, gate, add = form
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
    x, scale, out, eps, D: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row: the RMS norm."""
    follow(PDL)
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
def _gate_kernel(y, out, N, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A part of one row: the activated first half times the second."""
    follow(PDL)
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


# A step's bookkeeping ---------------------------------------------------------------------------------------


@triton.jit
def _mark_kernel(
    cursor, order, positions, real, documents, index, mask, cos_of, sin_of, cos, sin,
    S: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr, REACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the new token's order, its slot, what it sees of the others, and its angles."""
    b, slot = tl.program_id(0).to(tl.int64), tl.load(cursor)
    best = tl.full([BLOCK], -1, tl.int64)
    for start in tl.static_range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        seen = tl.load(real + b * S + s, mask=s < slot, other=0) != 0
        best = tl.maximum(best, tl.where(seen, tl.load(order + b * S + s, mask=s < slot, other=-1), -1))
    mine = tl.max(best, 0) + 1
    for start in tl.static_range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        seen = tl.load(real + b * S + s, mask=s < slot, other=0) != 0
        if REACH > 0:
            seen = seen & (tl.load(positions + b * S + s, mask=s < slot, other=0) > mine - REACH)
        tl.store(mask + b * S + s, (seen | (s == slot)).to(tl.uint8), mask=s < S)
    r = tl.arange(0, WIDE)
    tl.store(cos + b * R + r, tl.load(cos_of + mine * R + r, mask=r < R), mask=r < R)
    tl.store(sin + b * R + r, tl.load(sin_of + mine * R + r, mask=r < R), mask=r < R)
    tl.debug_barrier()  # what was read is not written before
    tl.store(order + b * S + slot, mine)
    tl.store(positions + b * S + slot, mine)
    tl.store(real + b * S + slot, 1)
    tl.store(documents + b * S + slot, 0)
    tl.store(index, slot)


def mark(cache: FixedCache, angles: Rotary, reach: int) -> tuple[Tensor, Rotary]:
    """Put one more token into the slots of each row; return its mask [B, 1, 1, S] and its rotation.

    `angles` [1, 1, S, R] are those of all positions. The slot is kept as `cache.index`.
    """
    slots, (B, S), R = cache.tokens, cache.tokens.order.shape, angles.cos.shape[-1]
    mask = torch.empty(B, 1, 1, S, dtype=torch.bool, device=slots.order.device)
    turned = Rotary(*(torch.empty(B, 1, 1, R, device=mask.device) for _ in range(2)))
    cache.index = torch.empty(1, dtype=torch.long, device=mask.device)
    _mark_kernel[(B,)](
        cache.cursor, slots.order, slots.positions, slots.real.view(torch.uint8), slots.documents,
        cache.index, mask.view(torch.uint8), *angles, *turned,
        S=S, R=R, WIDE=triton.next_power_of_2(R), REACH=reach, BLOCK=min(4096, triton.next_power_of_2(S)),
    )  # fmt: skip
    return mask, turned


@triton.jit
def _choose_kernel(
    logits, index, made, ids, kept, S, V: tl.constexpr, BLOCK: tl.constexpr, NONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row: the most probable token, the first of those alike."""
    follow(PDL)
    b = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.full([BLOCK], V, tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in tl.static_range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        given = tl.load(logits + b * V + v, mask=v < V, other=float("-inf"))
        tl.store(kept + b * V + v, given, mask=v < V)
        value = given.to(tl.float32)
        wrong = wrong | (value != value).to(tl.int32)
        place = tl.where((value > best) | ((place == V) & (v < V)), v, place)
        best = tl.maximum(best, value)
    highest = tl.max(best, 0)
    chosen = tl.min(tl.where(best == highest, place, V - 1), 0).to(tl.int64)
    tl.store(ids + b, chosen)
    tl.store(made + b * S + tl.load(index), tl.where(tl.max(wrong, 0) > 0, NONE, chosen))


def choose(logits: Tensor, index: Tensor, made: Tensor, ids: Tensor, kept: Tensor) -> None:
    """See `choosing.choose`."""
    B, V = logits.shape
    _choose_kernel[(B,)](
        logits.contiguous(), index, made, ids, kept, made.shape[1], V=V,
        BLOCK=min(8192, triton.next_power_of_2(V)), NONE=NOTHING, num_warps=16, **launched(logits),
    )  # fmt: skip
