"""Attention of one new token per row, in Triton: to keys of a cache, and to keys in blocks of a pool.

Imported only where Triton is. Shapes: B rows, H heads, K key/value heads, G = H/K, E head width, S slots, R
rotated columns.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.run.kernels.fixed_cache import HeadConfig
from clearhead.run.kernels.triton_step import Tile, counters, follow, launched, lets_next, waits


@triton.jit
def _rotated(
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
def _with_new_token(
    row, head, key_to, value_to, q, e, ev, cos, sin, k_norm, eps, scale, softcap, keeps,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, R: tl.constexpr,
    LAYOUT: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The softmax of the part that `keeps` the new token's key and value, and so far sees nothing else."""
    kind = key_to.dtype.element_ty
    key_at = row + (H + head) * E
    new_k = _rotated(key_at, e, E, cos, sin, R, LAYOUT, e < E, k_norm, eps, NORM, UNIT, 0).to(kind)
    new_v = tl.load(row + (H + K) * E + head * EV + ev, mask=ev < EV, other=0.0).to(kind)
    tl.store(key_to + e, new_k, mask=(e < E) & keeps)
    tl.store(value_to + ev, new_v, mask=(ev < EV) & keeps)
    scores = _capped(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale, softcap, CAP)
    weight = tl.where(keeps, 1.0, 0.0) + tl.zeros_like(scores)
    return tl.where(keeps, scores, float("-inf")), weight, weight[:, None] * new_v.to(tl.float32)[None, :]


@triton.jit
def _met(q, k, v, seen, best, weight, total, scale, softcap, CAP: tl.constexpr):
    """The softmax so far, after one more block of keys [WIDE, S] and values [S, WIDE_V]."""
    scores = _capped(tl.dot(q, k, input_precision="ieee") * scale, softcap, CAP)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    shrink = tl.exp(best - base)
    pattern = tl.exp(scores - base[:, None])
    total = total * shrink[:, None] + tl.dot(pattern.to(v.dtype), v, input_precision="ieee")
    return higher, weight * shrink + tl.sum(pattern, 1), total


@triton.jit
def _put(
    best, weight, total, out, partial, stats, counts, row, g, ev, split,
    G: tl.constexpr, EV: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store what the heads of group `row` found; of its parts, the one that is last puts them together."""
    if SPLITS == 1:
        at = (row * G + g)[:, None] * EV + ev[None, :]
        tl.store(out + at, total / weight[:, None], mask=(g < G)[:, None] & (ev < EV)[None, :])
    else:
        mine = (row * SPLITS + split) * G + g
        tl.store(
            partial + mine[:, None] * EV + ev[None, :], total, mask=(g < G)[:, None] & (ev < EV)[None, :]
        )
        tl.store(stats + mine * 2, best, mask=g < G)
        tl.store(stats + mine * 2 + 1, weight, mask=g < G)
        tl.debug_barrier()
        if tl.atomic_add(counts + row, 1, sem="acq_rel") == SPLITS - 1:
            h, part = tl.arange(0, triton.next_power_of_2(G)), tl.arange(0, SPLITS)
            every, known = (row * SPLITS + part)[:, None] * G + h[None, :], (h < G)[None, :]
            totals = tl.load(
                partial + every[:, :, None] * EV + ev[None, None, :],
                mask=known[:, :, None] & (ev < EV)[None, None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            bests = tl.load(stats + every * 2, mask=known, other=0.0, cache_modifier=".cg")
            weights = tl.load(stats + every * 2 + 1, mask=known, other=1.0, cache_modifier=".cg")
            shares = tl.exp(bests - tl.max(bests, 0)[None, :])
            joined = tl.sum(totals * shares[:, :, None], 0) / tl.sum(weights * shares, 0)[:, None]
            at = (row * G + h)[:, None] * EV + ev[None, :]
            tl.store(out + at, joined, mask=(h < G)[:, None] & (ev < EV)[None, :])
            tl.store(counts + row, 0)


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
def _slots(
    keys, values, mask, block, end, e, ev, E: tl.constexpr, EV: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """A block of slots: keys [WIDE, S], values [S, WIDE_V], and which are seen; from `end` on, none is."""
    s = block * BLOCK_S + tl.arange(0, BLOCK_S)
    k = tl.load(keys + s[None, :] * E + e[:, None], mask=(s < end)[None, :] & (e < E)[:, None], other=0.0)
    v = tl.load(
        values + s[:, None] * EV + ev[None, :], mask=(s < end)[:, None] & (ev < EV)[None, :], other=0.0
    )  # fmt: skip
    return k, v, tl.load(mask + s, mask=s < end, other=0) != 0


@triton.jit
def _attend_kernel(
    qkv, keys, values, slot, mask, cos, sin, q_norm, k_norm, out, partial, stats, counts,
    S, mask_stride, angle_stride, scale, softcap, eps, NORM: tl.constexpr, UNIT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, R: tl.constexpr,
    LAYOUT: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr, WIDE_V: tl.constexpr,
    BLOCK_S: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The heads of one group and one part of the slots; the first part also keeps the new token.

    What earlier steps have kept is there: the first slots are asked for before the new token's queries are.
    """
    lets_next(PDL)
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    g, e, ev = tl.arange(0, GROUP), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    filled = tl.load(slot).to(tl.int32)
    keys += (b * K + head).to(tl.int64) * S * E
    values += (b * K + head).to(tl.int64) * S * EV
    mask += b * mask_stride
    begin = _first_seen(mask, filled, 4096) // BLOCK_S
    share = tl.cdiv(tl.cdiv(filled, BLOCK_S) - begin, SPLITS)
    begin += split * share
    end = tl.minimum(filled, (begin + share) * BLOCK_S)
    k, v, seen = _slots(keys, values, mask, begin, end, e, ev, E, EV, BLOCK_S)
    waits(PDL)

    row = qkv + b * ((H + K) * E + K * EV)
    cos += b * angle_stride
    sin += b * angle_stride
    kind = keys.dtype.element_ty
    in_group = (g < G)[:, None] & (e < E)[None, :]
    heads_at = row + (head * G + g)[:, None] * E
    q = _rotated(
        heads_at, e[None, :], E, cos, sin, R, LAYOUT, in_group, q_norm, eps, NORM, UNIT, 1
    ).to(kind)  # fmt: skip
    best, weight, total = _with_new_token(
        row, head, keys + filled * E, values + filled * EV, q, e, ev, cos, sin, k_norm, eps, scale,
        softcap, split == 0, H, K, E, EV, R, LAYOUT, NORM, UNIT, CAP,
    )  # fmt: skip
    best, weight, total = _met(q, k, v, seen, best, weight, total, scale, softcap, CAP)
    for block in tl.range(begin + 1, tl.cdiv(end, BLOCK_S), num_stages=3):
        k, v, seen = _slots(keys, values, mask, block, end, e, ev, E, EV, BLOCK_S)
        best, weight, total = _met(q, k, v, seen, best, weight, total, scale, softcap, CAP)
    _put(best, weight, total, out, partial, stats, counts, b * K + head, g, ev, split, G, EV, SPLITS)


def attend_tile(rows: int, heads: int, slots: int) -> Tile:
    """Return the block of key slots and the number of splits that keep all SMs busy (split-K)."""
    parts = max(1, min(128 // (rows * heads), slots // 128))
    return Tile(64, 1 << (parts.bit_length() - 1), 8 if rows * heads < 64 else 4)


class Launch:
    """Arguments of both attention kernels: output buffers, rotary angles, norms, block sizes."""

    def __init__(self, qkv: Tensor, keys: Tensor, values: Tensor, form: HeadConfig, splits: int) -> None:
        (_, K, _, E), EV, H, B = keys.shape, values.shape[3], form.n_heads, qkv.shape[0]
        turned, normed = form.cos is not None, form.q_norm is not None
        self.out = qkv.new_empty(B, 1, H * EV)
        parts = B * H * splits if splits > 1 else 0
        partial = qkv.new_empty(max(1, parts * EV), dtype=torch.float32)
        stats = qkv.new_empty(max(1, parts * 2), dtype=torch.float32)
        unread = (stats, stats)  # what a flag switches off is not read
        cos, sin = (form.cos.contiguous(), form.sin.contiguous()) if turned else unread
        norms = (form.q_norm, form.k_norm) if normed else unread
        self.tensors = (cos, sin, *norms, self.out, partial, stats, counters(qkv.device))
        self.numbers = (
            cos.stride(0) if turned and cos.shape[0] > 1 else 0, form.scale, form.softcap or 1.0, form.eps
        )  # fmt: skip
        self.named = {
            "NORM": normed, "UNIT": float(form.unit_offset), "H": H, "K": K, "E": E, "EV": EV,
            "R": cos.shape[-1] if turned else 0, "LAYOUT": 0 if form.layout == "half" else 1,
            "CAP": form.softcap is not None, "GROUP": max(16, triton.next_power_of_2(H // K)),
            "WIDE": max(16, triton.next_power_of_2(E)), "WIDE_V": max(16, triton.next_power_of_2(EV)),
            "SPLITS": splits,
        }  # fmt: skip


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    slot: Tensor,
    mask: Tensor,
    form: HeadConfig,
    tile: Tile | None = None,
) -> Tensor:
    """See `kernels.step_attend`."""
    B, K, S, _ = keys.shape
    tile, seen = tile or attend_tile(B, K, S), mask.contiguous().view(torch.uint8)
    launch = Launch(qkv, keys, values, form, tile.k)
    _attend_kernel[(B, K, tile.k)](
        qkv.contiguous(), keys, values, slot, seen, *launch.tensors,
        S, seen.stride(0) if seen.shape[0] > 1 else 0, *launch.numbers, **launch.named,
        BLOCK_S=tile.n, num_warps=tile.warps, **launched(qkv, 2),
    )  # fmt: skip
    return launch.out


# Keys in blocks of a pool; M blocks of a row ----------------------------------------------------------------


PROGRAMS = 256  # that keep all processors of a large GPU at work


@triton.jit
def _paged_kernel(
    qkv, keys, values, table, place, cos, sin, q_norm, k_norm, out, partial, stats, counts,
    S, table_stride, place_stride, angle_stride, scale, softcap, eps, NORM: tl.constexpr, UNIT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, R: tl.constexpr,
    LAYOUT: tl.constexpr, CAP: tl.constexpr, REACH: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    WIDE_V: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The heads of one group and one part of a row's blocks; the first part also keeps the new token."""
    follow(PDL)
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // K
    g, e, ev = tl.arange(0, GROUP), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    filled = tl.load(place + b * place_stride).to(tl.int32)
    table += b * table_stride
    row = qkv + b * ((H + K) * E + K * EV)
    cos += b * angle_stride
    sin += b * angle_stride
    kind = keys.dtype.element_ty
    in_group = (g < G)[:, None] & (e < E)[None, :]
    heads_at = row + (head * G + g)[:, None] * E
    q = _rotated(
        heads_at, e[None, :], E, cos, sin, R, LAYOUT, in_group, q_norm, eps, NORM, UNIT, 1
    ).to(kind)  # fmt: skip
    keys += head.to(tl.int64) * S * E
    values += head.to(tl.int64) * S * EV

    slot = tl.load(table + filled // SIZE).to(tl.int64) * SIZE + filled % SIZE
    best, weight, total = _with_new_token(
        row, head, keys + slot * E, values + slot * EV, q, e, ev, cos, sin, k_norm, eps, scale,
        softcap, split == 0, H, K, E, EV, R, LAYOUT, NORM, UNIT, CAP,
    )  # fmt: skip
    first = 0
    if REACH > 0:
        first = tl.maximum(filled - REACH + 1, 0)
    start = first // SIZE
    blocks = tl.cdiv(filled, SIZE) - start
    share = tl.cdiv(blocks, SPLITS)
    for number in range(split * share, tl.minimum(split * share + share, blocks)):
        s = (start + number) * SIZE + tl.arange(0, SIZE)
        seen = (s < filled) & (s >= first)
        slots = tl.load(table + start + number).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        k = tl.load(keys + slots[None, :] * E + e[:, None], mask=seen[None, :] & (e < E)[:, None], other=0.0)
        v = tl.load(
            values + slots[:, None] * EV + ev[None, :], mask=seen[:, None] & (ev < EV)[None, :], other=0.0
        )
        best, weight, total = _met(q, k, v, seen, best, weight, total, scale, softcap, CAP)
    _put(best, weight, total, out, partial, stats, counts, b * K + head, g, ev, split, G, EV, SPLITS)


def splits_for(rows: int, heads: int, blocks: int) -> int:
    """Into how many parts the blocks of a row are split, so that all processors have work."""
    parts = max(1, min(PROGRAMS // (rows * heads), blocks))
    return 1 << (parts.bit_length() - 1)


def paged_attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    place: Tensor,
    size: int,
    reach: int,
    form: HeadConfig,
    splits: int | None = None,
) -> Tensor:
    """See `kernels.paged_attend`."""
    _, K, S, _ = keys.shape
    splits = splits or splits_for(len(qkv), K, table.shape[1])
    launch = Launch(qkv, keys, values, form, splits)
    _paged_kernel[(len(qkv), K, splits)](
        qkv.contiguous(), keys, values, table, place, *launch.tensors,
        S, table.stride(0), place.stride(0), *launch.numbers, **launch.named,
        REACH=reach, SIZE=size, num_warps=4, **launched(qkv),
    )  # fmt: skip
    return launch.out
