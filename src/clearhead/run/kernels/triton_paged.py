"""Attention of one new token per row to keys in blocks of a pool, in Triton. Imported only where Triton is.

Shapes: B rows, H heads, K key/value heads, G = H/K, E head width, S slots of the pool, M blocks of a row, R
rotated columns.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import triton
import triton.language as tl
from torch import Tensor

from clearhead.run.kernels.forms import HeadForm
from clearhead.run.kernels.triton_attend import Launch, _met, _own, _put, _turned
from clearhead.run.kernels.triton_launch import follow, launched

PROGRAMS = 256  # that keep all processors of a large GPU at work


@triton.jit
def _paged_kernel(
    qkv, keys, values, table, place, cos, sin, q_norm, k_norm, out, partial, stats, counts,
    S, table_stride, place_stride, angle_stride, scale, softcap, eps, NORM: tl.constexpr, UNIT: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, R: tl.constexpr,
    LAYOUT: tl.constexpr, CAP: tl.constexpr, REACH: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    WIDE_V: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The heads of one group and one part of a row's blocks; the first part also keeps the new token."""
    follow(AHEAD)
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

    slot = tl.load(table + filled // SIZE).to(tl.int64) * SIZE + filled % SIZE
    best, weight, total = _own(
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
    form: HeadForm,
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
