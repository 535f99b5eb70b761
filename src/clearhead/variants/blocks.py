"""Planning by blocks: each block of queries meets only the blocks of keys that a mask may allow.

`plan_blocks` finds them from the same predicates as the dense mask, so that time and memory grow with the
keys that are seen, not with all pairs. `gathered.attend_blocks` attends as the plan says.
The few queries that see everything, global tokens, are attended on their own.

Shapes: B batch, H heads, K key/value heads, T queries, S keys, E head width, b tokens of a block, N blocks of
queries, M blocks of keys that each of them meets, G global queries of a row.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core import masks
from clearhead.core.config.kinds import Blocks, Dilated, GlobalKind, Kind, Strided, Windowed
from clearhead.core.taps import SILENT, Tap
from clearhead.variants import flex, strided
from clearhead.variants.choices import between_ends, global_tokens, log_counts, random_blocks

SMALLEST, LARGEST = 32, 256  # tokens of a block
WORTH = 3  # keys that a dense mask would have for each key that a block meets, at least
NEVER = 1 << 60  # a position that no token has
APART = 1 << 32  # between the positions of two documents

Bias = Callable[[masks.Tokens, masks.Tokens], Tensor | None]  # queries, keys -> [B, 1|H, T, S]


def block_size(kind: Kind) -> int | None:
    """Return how many tokens a block should have for this kind; None: blocks do not pay."""
    match kind:
        case Windowed() | Dilated() | GlobalKind():
            half = (kind.nearby or 1) // 2
            return min(LARGEST, max(SMALLEST, 1 << max(0, half - 1).bit_length()))
        case Blocks(size):
            return size
        case Strided():
            return block_size(strided.near(kind))
        case _:
            return None


def tokens_for(
    kind: Kind, tokens: masks.Tokens, causal: bool, ids: Tensor, global_mask: Tensor | None
) -> masks.Tokens:
    """Return the tokens with what a kind asks of them: their number, or which of them are global."""
    if isinstance(kind, GlobalKind):
        found = global_tokens(kind, ids, tokens.positions, tokens.real_mask(), global_mask)
        return tokens if found is None else replace(tokens, globals=found)
    return counted(tokens) if isinstance(kind, Blocks) and not causal else tokens


def counted(tokens: masks.Tokens) -> masks.Tokens:
    """Return the tokens with `totals`: one more than the last position of each token's document."""
    last = torch.where(tokens.real_mask(), tokens.positions, -1)
    if tokens.documents is None:
        return replace(tokens, totals=(last.amax(1, keepdim=True) + 1).expand_as(last))
    starts = torch.ones_like(tokens.documents)
    starts[:, 1:] = tokens.documents[:, 1:] != tokens.documents[:, :-1]
    run = (starts.cumsum(1) - 1).expand_as(last)  # number of each document in its row
    ends = torch.full_like(last, -1).scatter_reduce(1, run, last, "amax")
    return replace(tokens, totals=ends.gather(1, run) + 1)


def plan_blocks(
    queries: masks.Tokens, keys: masks.Tokens, kind: Kind, causal: bool, bias: Bias, flexible: bool = False
) -> masks.BlockPlan | None:
    """Return the plan of one pass over these tokens; None where a dense mask is as good.

    `flexible`: the plan is for `flex_attention`, which takes no bias.
    """
    size = block_size(kind)
    flexible = flexible and not isinstance(kind, Strided)
    size = flex.BLOCK if flexible and size is not None else size
    if size is None or min(queries.length, keys.length) < 4 * size or keys.until is not None:
        return None  # a compiled step of one token goes no further
    # How many blocks meet is known only from the tokens. To disable the compiler is to load it: not before.
    planned = _planned
    if torch.compiler.is_compiling():
        planned = torch.compiler.disable(_planned)  # type: ignore[no-untyped-call]
    return planned(size, queries, keys, kind, causal, bias, flexible)


def _planned(
    size: int,
    queries: masks.Tokens,
    keys: masks.Tokens,
    kind: Kind,
    causal: bool,
    bias: Bias,
    flexible: bool,
) -> masks.BlockPlan | None:
    alike = (queries.order, keys.order, *(() if queries.globals is None else (queries.globals,)))
    rows = max(x.shape[0] for x in alike)
    padded_q, padded_k = (_padded(tokens, size, rows) for tokens in (queries, keys))
    columns, by_blocks = None, strided.near(kind) if isinstance(kind, Strided) else kind
    met = _meeting(padded_q, padded_k, by_blocks, causal, size)  # B N blocks of keys
    N, count = met.shape[1], int(met.sum(2).amax())
    if count == 0 or (count * size + _column(kind, keys.length)) * WORTH > keys.length:
        return None
    if flexible:
        lengths = queries.length, keys.length
        allowed = flex.flex_mask(met, padded_q, padded_k, kind, causal, lengths)
        return _with_globals(masks.BlockPlan(size, met, allowed, None), queries, keys, kind, causal, bias)
    order = met.to(torch.int8).argsort(dim=2, descending=True, stable=True)[:, :, :count]  # B N M
    slots = (order[..., None] * size + torch.arange(size, device=order.device)).flatten(1)  # B N·M·b
    q = padded_q.map(lambda x: x.reshape(-1, size))  # B·N b
    k = padded_k.map(lambda x: x.gather(1, slots).view(-1, count * size))  # B·N M·b
    mask, _ = masks.compose(q, k, causal=causal, kind=by_blocks)
    assert mask is not None  # padding is spelled out
    if isinstance(kind, Strided):
        spelled_q, spelled_k = (_padded(tokens, 1, rows) for tokens in (queries, keys))
        columns = strided.plan_columns(spelled_q, spelled_k, kind, causal, bias)
    there = met.gather(2, order).repeat_interleave(size, 2)[:, :, None]  # B N 1 M·b: the rest fills a table
    found = bias(q, k)
    plan = masks.BlockPlan(
        size,
        order,
        mask.view(rows, N, size, -1) & there,
        None if found is None else found.view(rows, N, *found.shape[1:]),
        columns=columns,
    )
    return _with_globals(plan, queries, keys, kind, causal, bias)


@functools.lru_cache(maxsize=256)
def plain_blocks(kind: Kind, length: int, causal: bool) -> tuple[int, int, int] | None:
    """Return the size of a block, how many each meets, and the global queries of a row without padding.

    Columns, of strided attention, have as many pairs as one of their tokens for each remainder would have if
    it saw all: they count as global queries. None: a dense mask is made.
    """
    size = block_size(kind)
    if size is None or length < 4 * size:
        return None
    tokens = masks.tokens_from(1, length, torch.device("cpu"))
    padded = _padded(tokens_for(kind, tokens, causal, tokens.order, None), size, 1)
    by_blocks = strided.near(kind) if isinstance(kind, Strided) else kind
    count = int(_meeting(padded, padded, by_blocks, causal, size).sum(2).amax())
    seeing_all, column = _seeing_all(tokens, kind), _column(kind, length)
    globals_ = 0 if seeing_all is None else int(seeing_all.sum())
    dense = count == 0 or (count * size + column) * WORTH > length
    return None if dense else (size, count, column or globals_)


def _column(kind: Kind, length: int) -> int:
    """Return how many tokens stand in the longest column of a row without padding; 0: there are none."""
    return (length + kind.step - 1) // kind.step if isinstance(kind, Strided) else 0


def _padded(tokens: masks.Tokens, size: int, rows: int) -> masks.Tokens:
    """Return the tokens of whole blocks, with padding and documents spelled out for each row."""
    missing = -tokens.length % size
    order, positions, real, documents = (nnf.pad(x.expand(rows, -1), (0, missing)) for x in tokens.tensors())
    totals = None if tokens.totals is None else nnf.pad(tokens.totals.expand(rows, -1), (0, missing))
    packed = None if tokens.documents is None else documents
    marked = None if tokens.globals is None else nnf.pad(tokens.globals.expand(rows, -1), (0, missing))
    return masks.Tokens(order, positions, real, packed, plain=False, totals=totals, globals=marked)


def meeting(queries: masks.Tokens, keys: masks.Tokens, kind: Kind, causal: bool, size: int) -> Tensor:
    """Return which blocks of keys a block of queries may see in any row: [blocks, blocks of keys]."""
    rows = max(queries.order.shape[0], keys.order.shape[0])
    padded_q, padded_k = (_padded(tokens, size, rows) for tokens in (queries, keys))
    met = _meeting(padded_q, padded_k, kind, causal, size)
    everywhere = _seeing_all(padded_q, kind)
    if everywhere is not None:
        met = met | everywhere.view(rows, -1, 1, size).any(-1)
    return met.any(0)


def _meeting(queries: masks.Tokens, keys: masks.Tokens, kind: Kind, causal: bool, size: int) -> Tensor:
    """Return which blocks of keys may hold one that a block of queries sees: [B, N, blocks of keys].

    It goes by the least and the largest position of each block, so it may name a block too many. Positions of
    different documents are far apart.
    """

    def both(values: Callable[[masks.Tokens], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return least and largest values of queries, [B, N, 1], and of keys, [B, 1, blocks of keys]."""
        low, high = _ends(values(queries), queries, size)
        least, most = _ends(values(keys), keys, size)
        return low[:, :, None], high[:, :, None], least[:, None], most[:, None]

    if isinstance(kind, Blocks):
        met = _meeting_blocks(queries, keys, kind, causal, size)
    elif kind.nearby is None:
        blocks = (x.order.shape[1] // size for x in (queries, keys))
        met = torch.ones(queries.order.shape[0], *blocks, dtype=torch.bool, device=keys.order.device)
    else:
        q_low, q_high, k_low, k_high = both(lambda tokens: tokens.positions + tokens.document_ids() * APART)
        reach = kind.nearby or 1
        met = (k_high > q_low - reach) & (k_low < q_high + reach)
    q_low, q_high, k_low, k_high = both(lambda tokens: tokens.positions)
    met = met | (k_low < kind.kept_first)
    if keys.globals is not None:
        met = met | keys.globals.view(met.shape[0], 1, -1, size).any(-1)
    met = met & (q_high > -NEVER) & (k_high > -NEVER)  # neither is padding alone
    if causal:
        _, last, first, _ = both(lambda tokens: tokens.order)
        met = met & (first <= last)
    if queries.documents is not None and keys.documents is not None:
        q_low, q_high, k_low, k_high = both(lambda tokens: tokens.document_ids())
        met = met & (k_low <= q_high) & (k_high >= q_low)
    return met


def _ends(x: Tensor, tokens: masks.Tokens, size: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of real tokens in each block: [B, N] each."""
    assert tokens.real is not None
    low = torch.where(tokens.real, x, NEVER).view(x.shape[0], -1, size).amin(-1)
    high = torch.where(tokens.real, x, -NEVER).view(x.shape[0], -1, size).amax(-1)
    return low, high


def _meeting_blocks(
    queries: masks.Tokens, keys: masks.Tokens, kind: Blocks, causal: bool, size: int
) -> Tensor:
    """Return the same for blocks of positions: [B, N, blocks of keys]."""
    B, half = queries.order.shape[0], kind.window // 2
    # Blocks count on from one document to the next. Where two share a number, one is met too many.
    before = ((queries.order - queries.positions) // kind.size).clamp(min=0)
    block = keys.positions // kind.size + ((keys.order - keys.positions) // kind.size).clamp(min=0)
    near = [queries.positions // kind.size + step for step in range(-half, half + 1)]
    wanted = torch.stack(
        [*near, *random_blocks(kind, queries.positions, queries.totals, causal)], dim=-1
    )  # B T wanted
    wanted, count = wanted + before[..., None], int(block.amax()) + 1
    assert queries.real is not None and keys.real is not None

    def held(blocks: Tensor, real: Tensor) -> Tensor:
        """Mark the blocks that the tokens of each block name: [B, T, n] -> [B, N, count]."""
        inside = (blocks >= 0) & (blocks < count) & real[..., None]
        table = torch.zeros(B, real.shape[1] // size, count, device=real.device)
        places = blocks.clamp(0, count - 1).view(B, -1, size * blocks.shape[-1])
        return table.scatter_reduce(2, places, inside.view_as(places).float(), "amax")

    met = held(wanted, queries.real) @ held(block[..., None], keys.real).transpose(1, 2) > 0
    k_low, _ = _ends(keys.positions, keys, size)
    start, end = between_ends(kind, keys.totals)
    met = met | (k_low < start)[:, None]
    if end is not None and queries.totals is not None:
        _, past = _ends(keys.positions - end, keys, size)
        shortest, _ = _ends(queries.totals, queries, size)
        met = met | (past >= 0)[:, None] | (shortest <= kind.full)[:, :, None]
    return met


def _seeing_all(queries: masks.Tokens, kind: Kind) -> Tensor | None:
    """Return which queries are global: [B|1, T]; None: none of them."""
    if not isinstance(kind, Blocks):
        return queries.globals
    start, end = between_ends(kind, queries.totals)
    everywhere = queries.positions < start
    if end is not None:
        everywhere = everywhere | (queries.positions >= end)
    return everywhere & queries.real_mask()


def _with_globals(
    plan: masks.BlockPlan, queries: masks.Tokens, keys: masks.Tokens, kind: Kind, causal: bool, bias: Bias
) -> masks.BlockPlan:
    """Add the queries that see everything to a plan."""
    everywhere = _seeing_all(queries, kind)
    if everywhere is None:
        return plan
    count = int(everywhere.sum(1).amax())
    if count == 0:
        return plan
    slots = everywhere.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]  # B G
    picked = queries.map(lambda x: x.expand(slots.shape[0], -1).gather(1, slots))
    picked = replace(picked, plain=False)
    mask, _ = masks.compose(picked, keys, causal=causal, kind=kind)
    return masks.BlockPlan(plan.size, plan.index, plan.mask, plan.bias, slots, mask, bias(picked, keys))


def with_counts(
    total: Tensor | None,
    queries: masks.Tokens,
    keys: masks.Tokens,
    kind: Kind,
    dtype: torch.dtype,
    name: str = "",
    tap: Tap = SILENT,
) -> Tensor | None:
    """Add to a bias how often each key counts; `name` ends that of the step: [B|1, 1|H, T, S], or None."""
    counts = log_counts(kind, queries.positions, keys.positions, queries.totals, dtype)
    if counts is None or (queries.plain and kind.sees_all(queries.length)):
        return total
    counts = tap.step(f"counts{name}", counts)
    return counts if total is None else total + counts
