"""The kernels of `kernels`, in Triton. Imported only where Triton is.

Shapes: B rows, D width in, N width out, H heads, K key/value heads, G = H/K, E head width, S slots, R
rotated columns.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Each program reads a few rows of the weight from end to end, all of it asked for at once."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = n.to(tl.int64)[:, None] * D
    within = (n < N)[:, None]
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
    tile = tile or Tile(4 if N < 8192 else 8, min(2048, triton.next_power_of_2(D)), 8)
    given = (bias, scale, None if add is None else add.contiguous())
    _linear_kernel[(triton.cdiv(N, tile.n),)](
        x.contiguous(), weight,
        *(weight if tensor is None else tensor for tensor in given),  # what a flag switches off is not read
        out, N, eps,
        D=D, BLOCK_N=tile.n, BLOCK_K=tile.k, NORM=scale is not None, UNIT=float(unit_offset),
        BIAS=bias is not None, GATE=-1 if gate is None else ACTIVATION_NUMBERS[gate], ADD=add is not None,
        num_warps=tile.warps,
    )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(x, scale, out, eps, D: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr):
    """One row: the RMS norm."""
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
        x, scale, out, eps, D=D, WIDE=wide, UNIT=float(unit_offset), num_warps=8 if wide > 2048 else 4
    )
    return out


@triton.jit
def _gate_kernel(y, out, N, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """A part of one row: the activated first half times the second."""
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
    _gate_kernel[grid](y, out, N, KIND=ACTIVATION_NUMBERS[gate], BLOCK=1024)
    return out


@triton.jit
def _turned(
    start, e, E: tl.constexpr, cos, sin, R: tl.constexpr, LAYOUT: tl.constexpr, within, norm, eps,
    NORM: tl.constexpr, UNIT: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """The vector at `start`, normed if NORM, and rotated: its first R columns, in pairs."""
    value = tl.load(start + e, mask=within, other=0.0).to(tl.float32)
    if NORM:
        size = tl.rsqrt(tl.sum(value * value, AXIS, keep_dims=True) / E + eps)
        value *= size * (tl.load(norm + e, mask=e < E, other=0.0).to(tl.float32) + UNIT)
    if R > 0:
        half: tl.constexpr = R // 2
        if LAYOUT == 0:
            partner, sign = tl.where(e < half, e + half, e - half), tl.where(e < half, -1.0, 1.0)
        else:
            partner, sign = e ^ 1, tl.where(e % 2 == 0, -1.0, 1.0)
        other = tl.load(start + partner, mask=within & (e < R), other=0.0).to(tl.float32)
        if NORM:
            other *= size * (tl.load(norm + partner, mask=e < R, other=0.0).to(tl.float32) + UNIT)
        value = value * tl.load(cos + e, mask=e < R, other=1.0) + other * sign * tl.load(
            sin + e, mask=e < R, other=0.0
        )
    return value


@triton.jit
def _capped(scores, softcap, CAP: tl.constexpr):
    if CAP:
        # This is softcap · tanh(scores / softcap).
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def _first_seen(mask, filled, WIDE: tl.constexpr):
    """The first slot that is seen: padding on the left, and what is before a window, is not read."""
    first = filled
    for start in range(0, filled, WIDE):
        s = start + tl.arange(0, WIDE)
        seen = tl.load(mask + s, mask=s < filled, other=0) != 0
        first = tl.minimum(first, tl.min(tl.where(seen, s, filled), 0))
    return first


@triton.jit
def _attend_kernel(
    qkv, keys, values, slot, mask, cos, sin, q_norm, k_norm, out, partial, stats,
    S, mask_stride, angle_stride, scale, softcap, eps, NORM: tl.constexpr, UNIT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, R: tl.constexpr,
    LAYOUT: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, WIDE_V: tl.constexpr,
    BLOCK_S: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The heads of one group and one part of the slots; the first part also keeps the new token."""
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    g, e, ev = tl.arange(0, GROUP), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    filled = tl.load(slot).to(tl.int32)
    row = qkv + b * ((H + K) * E + K * EV)
    cos += b * angle_stride
    sin += b * angle_stride
    kind = keys.dtype.element_ty
    in_group = (g < G)[:, None] & (e < E)[None, :]
    heads_at = row + (head * G + g)[:, None] * E
    q = _turned(
        heads_at, e[None, :], E, cos, sin, R, LAYOUT, in_group, q_norm, eps, NORM, UNIT, 1
    ).to(kind)  # fmt: skip
    keys += (b * K + head).to(tl.int64) * S * E
    values += (b * K + head).to(tl.int64) * S * EV

    best = tl.full([GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP], tl.float32)
    total = tl.zeros([GROUP, WIDE_V], tl.float32)
    if split == 0:
        key_at = row + (H + head) * E
        new_k = _turned(key_at, e, E, cos, sin, R, LAYOUT, e < E, k_norm, eps, NORM, UNIT, 0).to(kind)
        new_v = tl.load(row + (H + K) * E + head * EV + ev, mask=ev < EV, other=0.0).to(kind)
        tl.store(keys + filled * E + e, new_k, mask=e < E)
        tl.store(values + filled * EV + ev, new_v, mask=ev < EV)
        best = _capped(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale, softcap, CAP)
        weight += 1.0
        total += new_v.to(tl.float32)[None, :]

    mask += b * mask_stride
    begin = _first_seen(mask, filled, 4096) // BLOCK_S
    blocks = tl.cdiv(filled, BLOCK_S)
    share = tl.cdiv(blocks - begin, SPLITS)
    begin += split * share
    for block in tl.range(begin, tl.minimum(begin + share, blocks), num_stages=STAGES):
        s = block * BLOCK_S + tl.arange(0, BLOCK_S)
        seen = tl.load(mask + s, mask=s < filled, other=0) != 0
        k = tl.load(
            keys + s[None, :] * E + e[:, None], mask=(s < filled)[None, :] & (e < E)[:, None], other=0.0
        )
        scores = _capped(tl.dot(q, k, input_precision="ieee") * scale, softcap, CAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        shrink = tl.exp(best - base)
        pattern = tl.exp(scores - base[:, None])
        v = tl.load(
            values + s[:, None] * EV + ev[None, :], mask=(s < filled)[:, None] & (ev < EV)[None, :], other=0.0
        )
        total = total * shrink[:, None] + tl.dot(pattern.to(kind), v, input_precision="ieee")
        weight = weight * shrink + tl.sum(pattern, 1)
        best = higher

    heads = b * H + head * G + g
    inside = (g < G)[:, None] & (ev < EV)[None, :]
    if SPLITS == 1:
        tl.store(out + heads[:, None] * EV + ev[None, :], total / weight[:, None], mask=inside)
    else:
        part = heads * SPLITS + split
        tl.store(partial + part[:, None] * EV + ev[None, :], total, mask=inside)
        tl.store(stats + part * 2, best, mask=g < G)
        tl.store(stats + part * 2 + 1, weight, mask=g < G)


@triton.jit
def _join_kernel(partial, stats, out, EV: tl.constexpr, WIDE_V: tl.constexpr, SPLITS: tl.constexpr):
    """One head: the parts put together."""
    head = tl.program_id(0)
    part, ev = head * SPLITS + tl.arange(0, SPLITS), tl.arange(0, WIDE_V)
    best, weight = tl.load(stats + part * 2), tl.load(stats + part * 2 + 1)
    share = tl.exp(best - tl.max(best, 0))
    total = tl.load(partial + part[:, None] * EV + ev[None, :], mask=(ev < EV)[None, :], other=0.0)
    tl.store(
        out + head * EV + ev, tl.sum(total * share[:, None], 0) / tl.sum(weight * share, 0), mask=ev < EV
    )


def attend_tile(rows: int, heads: int, slots: int) -> Tile:
    """How many slots at a time, and into how many parts they are split, so that all processors have work."""
    block = 32 if rows * heads < 64 else 64
    parts = max(1, min(256 // (rows * heads), slots // block))
    return Tile(block, 1 << (parts.bit_length() - 1), 4 if block > 32 else 2)


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slot: Tensor,
    mask: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    layout: str,
    n_heads: int,
    scale: float,
    softcap: float | None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    unit_offset: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """See `kernels.step_attend`."""
    B, K, S, E = keys.shape
    EV, H = values.shape[3], n_heads
    tile = tile or attend_tile(B, K, S)
    split, turned, seen = tile.k > 1, cos is not None, mask.contiguous().view(torch.uint8)
    out = qkv.new_empty(B, 1, H * EV)
    partial = qkv.new_empty(B * H * tile.k * EV if split else 1, dtype=torch.float32)
    stats = qkv.new_empty(B * H * tile.k * 2 if split else 1, dtype=torch.float32)
    cos, sin = (cos.contiguous(), sin.contiguous()) if turned else (stats, stats)
    wide_v = max(16, triton.next_power_of_2(EV))
    _attend_kernel[(B, K, tile.k)](
        qkv.contiguous(), keys, values, slot, seen, cos, sin,
        *((stats, stats) if q_norm is None else (q_norm, k_norm)), out, partial, stats,
        S, seen.stride(0) if seen.shape[0] > 1 else 0, cos.stride(0) if turned and cos.shape[0] > 1 else 0,
        scale, softcap or 1.0, eps, NORM=q_norm is not None, UNIT=float(unit_offset),
        H=H, K=K, E=E, EV=EV, R=cos.shape[-1] if turned else 0, LAYOUT=0 if layout == "half" else 1,
        CAP=softcap is not None,
        GROUP=max(16, triton.next_power_of_2(H // K)), WIDE=max(16, triton.next_power_of_2(E)), WIDE_V=wide_v,
        BLOCK_S=tile.n, SPLITS=tile.k, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    if split:
        _join_kernel[(B * H,)](partial, stats, out, EV=EV, WIDE_V=wide_v, SPLITS=tile.k, num_warps=2)
    return out
