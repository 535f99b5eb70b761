"""The bookkeeping of a step in two kernels, in Triton: what each row sees, and what it says next.

Imported only where Triton is. Shapes: B rows, S slots, R rotated columns, V vocabulary.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import torch
import triton
import triton.language as tl
from torch import Tensor

from clearhead.core.positions import Rotary
from clearhead.run.kernels.fixed_cache import FixedCache
from clearhead.run.kernels.forms import NOTHING
from clearhead.run.kernels.triton_launch import follow, launched


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
    AHEAD: tl.constexpr,
):  # fmt: skip
    """One row: the most probable token, the first of those alike."""
    follow(AHEAD)
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
