"""Attention of one new token per row to keys in blocks of a pool, in Triton. Imported only where Triton is.

Shapes: B rows, H heads, K key/value heads, G = H/K, E head width, S slots of the pool, M blocks of a row, R
rotated columns.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.fast.triton_step import _capped, _join_kernel, _turned

PROGRAMS = 256  # that keep all processors of a large GPU at work


@triton.jit
def _paged_kernel(
    qkv, keys, values, table, place, cos, sin, q_norm, k_norm, out, partial, stats,
    S, table_stride, place_stride, angle_stride, scale, softcap, eps, NORM: tl.constexpr, UNIT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, R: tl.constexpr,
    LAYOUT: tl.constexpr, CAP: tl.constexpr, REACH: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    WIDE_V: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The heads of one group and one part of a row's blocks; the first part also keeps the new token."""
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
    q = _turned(
        heads_at, e[None, :], E, cos, sin, R, LAYOUT, in_group, q_norm, eps, NORM, UNIT, 1
    ).to(kind)  # fmt: skip
    keys += head.to(tl.int64) * S * E
    values += head.to(tl.int64) * S * EV

    best = tl.full([GROUP], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP], tl.float32)
    total = tl.zeros([GROUP, WIDE_V], tl.float32)
    if split == 0:
        key_at = row + (H + head) * E
        new_k = _turned(key_at, e, E, cos, sin, R, LAYOUT, e < E, k_norm, eps, NORM, UNIT, 0).to(kind)
        new_v = tl.load(row + (H + K) * E + head * EV + ev, mask=ev < EV, other=0.0).to(kind)
        slot = tl.load(table + filled // SIZE).to(tl.int64) * SIZE + filled % SIZE
        tl.store(keys + slot * E + e, new_k, mask=e < E)
        tl.store(values + slot * EV + ev, new_v, mask=ev < EV)
        best = _capped(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale, softcap, CAP)
        weight += 1.0
        total += new_v.to(tl.float32)[None, :]

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
        scores = _capped(tl.dot(q, k, input_precision="ieee") * scale, softcap, CAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        shrink = tl.exp(best - base)
        pattern = tl.exp(scores - base[:, None])
        v = tl.load(
            values + slots[:, None] * EV + ev[None, :], mask=seen[:, None] & (ev < EV)[None, :], other=0.0
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
    splits: int | None = None,
) -> Tensor:
    """See `kernels.paged_attend`."""
    _, K, S, E = keys.shape
    B, EV, H = qkv.shape[0], values.shape[3], n_heads
    splits = splits or splits_for(B, K, table.shape[1])
    split, turned = splits > 1, cos is not None
    out = qkv.new_empty(B, 1, H * EV)
    partial = qkv.new_empty(B * H * splits * EV if split else 1, dtype=torch.float32)
    stats = qkv.new_empty(B * H * splits * 2 if split else 1, dtype=torch.float32)
    cos, sin = (cos.contiguous(), sin.contiguous()) if turned else (stats, stats)
    wide_v = max(16, triton.next_power_of_2(EV))
    _paged_kernel[(B, K, splits)](
        qkv.contiguous(), keys, values, table, place, cos, sin,
        *((stats, stats) if q_norm is None else (q_norm, k_norm)), out, partial, stats,
        S, table.stride(0), place.stride(0), cos.stride(0) if turned and cos.shape[0] > 1 else 0,
        scale, softcap or 1.0, eps, NORM=q_norm is not None, UNIT=float(unit_offset),
        H=H, K=K, E=E, EV=EV, R=cos.shape[-1] if turned else 0, LAYOUT=0 if layout == "half" else 1,
        CAP=softcap is not None, REACH=reach,
        GROUP=max(16, triton.next_power_of_2(H // K)), WIDE=max(16, triton.next_power_of_2(E)), WIDE_V=wide_v,
        SIZE=size, SPLITS=splits, num_warps=4,
    )  # fmt: skip
    if split:
        _join_kernel[(B * H,)](partial, stats, out, EV=EV, WIDE_V=wide_v, SPLITS=splits, num_warps=2)
    return out
