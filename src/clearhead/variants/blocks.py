"""Planning by blocks: each block of queries meets only the blocks of keys that a mask may allow.

`plan_blocks` finds them by the rule of the dense mask, so that time and memory grow with the keys that are
seen, not with all pairs. `BlockPlan.attend` attends as the plan says. The few queries that see everything,
global tokens, are attended on their own.

Shapes: B batch, H heads, K key/value heads, T queries, S keys, E head width, b tokens of a block, N blocks of
queries, M blocks of keys that each of them meets, G global queries of a row.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core import masks
from clearhead.core.config import BIASES, StackSpec
from clearhead.core.config.kinds import Kind
from clearhead.core.stack import Stack
from clearhead.variants.block_attention import BlockPlan, Columns
from clearhead.variants.kinds import Blocks, Strided

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

WORTH = 3  # keys that a dense mask would have for each key that a block meets, at least
NEVER = 1 << 60  # a position that no token has
APART = 1 << 32  # between the positions of two documents
FLEX_BLOCK = 128  # tokens of a block of `flex_attention`, which the kernel's own tiles divide
FLEX_WIDTHS = range(16, 129)  # of heads, that its kernel has room for

Bias = Callable[[masks.TokenInfo, masks.TokenInfo], Tensor | None]  # queries, keys -> [B, 1|H, T, S]


def plan_for(
    stack: Stack, queries: masks.TokenInfo, keys: masks.TokenInfo, kind: Kind, dtype: torch.dtype, bias: Bias
) -> BlockPlan | None:
    """Return the plan of one pass through layers of a stack; None where a dense mask is as good."""
    size = kind.block_size
    if size is None or min(queries.length, keys.length) < 4 * min(size, FLEX_BLOCK):
        return None  # a step of one token goes no further
    flexible = flex_serves(stack.spec, kind, keys, dtype, stack.training) and any(
        getattr(block.attention, "kernel", None) == "flex" for block in stack.blocks
    )
    return plan_blocks(queries, keys, kind, stack.spec.causal, bias, flexible)


def flex_serves(
    spec: StackSpec, kind: Kind, tokens: masks.TokenInfo, dtype: torch.dtype, training: bool
) -> bool:
    """Return whether `flex_attention` can attend: to scores without additions, on a CPU without gradients."""
    return (
        (tokens.order.is_cuda or not torch.is_grad_enabled())
        and dtype != torch.float64
        and spec.d_head in FLEX_WIDTHS
        and spec.d_value in FLEX_WIDTHS
        and spec.positions not in BIASES
        and not (isinstance(kind, Blocks) and kind.repeat)
        and spec.attention_softcap is None
        and not spec.attention_sink
        and not (training and spec.attention_dropout)
        and not torch.compiler.is_compiling()
    )


def flex_mask(
    met: Tensor,
    queries: masks.TokenInfo,
    keys: masks.TokenInfo,
    kind: Kind,
    causal: bool,
    lengths: tuple[int, int],
) -> "BlockMask":
    """Return the mask of `flex_attention`: `met` [B|1, N, M] says which blocks meet, predicates say the rest.

    Tokens are those of whole blocks; `lengths` are how many queries and keys there are.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rule, each = kind.rule(causal), int(met.shape[0] > 1)  # 0: all rows are alike

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        rules = masks.rules(queries, keys, causal, rule, lambda x: x[b * each, q], lambda x: x[b * each, k])
        return functools.reduce(torch.logical_and, rules)

    count = met.sum(2, dtype=torch.int32)[:, None]  # B|1 1 N
    order = met.to(torch.int8).argsort(dim=2, descending=True, stable=True).to(torch.int32)[:, None]
    return BlockMask.from_kv_blocks(
        count, order, BLOCK_SIZE=FLEX_BLOCK, mask_mod=allowed, seq_lengths=lengths
    )


def plan_blocks(
    queries: masks.TokenInfo,
    keys: masks.TokenInfo,
    kind: Kind,
    causal: bool,
    bias: Bias,
    flexible: bool = False,
) -> BlockPlan | None:
    """Return the plan of one pass over these tokens; None where a dense mask is as good.

    `flexible`: the plan is for `flex_attention`, which takes no bias.
    """
    size = kind.block_size
    flexible = flexible and not isinstance(kind, Strided)
    size = FLEX_BLOCK if flexible and size is not None else size
    if size is None or min(queries.length, keys.length) < 4 * size or keys.until is not None:
        return None
    # How many blocks meet is known only from the tokens. To disable the compiler is to load it: not before.
    planned = _planned
    if torch.compiler.is_compiling():
        planned = torch.compiler.disable(_planned)  # type: ignore[no-untyped-call]
    return planned(size, queries, keys, kind, causal, bias, flexible)


def _planned(
    size: int,
    queries: masks.TokenInfo,
    keys: masks.TokenInfo,
    kind: Kind,
    causal: bool,
    bias: Bias,
    flexible: bool,
) -> BlockPlan | None:
    alike = (queries.order, keys.order, *(() if queries.globals is None else (queries.globals,)))
    rows = max(x.shape[0] for x in alike)
    padded_q, padded_k = (_padded(tokens, size, rows) for tokens in (queries, keys))
    columns, by_blocks = None, kind.near if isinstance(kind, Strided) else kind
    met = _meeting(padded_q, padded_k, by_blocks, causal, size)  # B N blocks of keys
    N, count = met.shape[1], int(met.sum(2).amax())
    if count == 0 or (count * size + _column(kind, keys.length)) * WORTH > keys.length:
        return None
    if flexible:
        lengths = queries.length, keys.length
        allowed = flex_mask(met, padded_q, padded_k, kind, causal, lengths)
        return _with_globals(BlockPlan(size, met, allowed, None), queries, keys, kind, causal, bias)
    order = met.to(torch.int8).argsort(dim=2, descending=True, stable=True)[:, :, :count]  # B N M
    slots = (order[..., None] * size + torch.arange(size, device=order.device)).flatten(1)  # B N·M·b
    q = padded_q.map(lambda x: x.reshape(-1, size))  # B·N b
    k = padded_k.map(lambda x: x.gather(1, slots).view(-1, count * size))  # B·N M·b
    mask, _ = masks.compose(q, k, causal=causal, kind=by_blocks)
    assert mask is not None  # padding is spelled out
    if isinstance(kind, Strided):
        spelled_q, spelled_k = (_padded(tokens, 1, rows) for tokens in (queries, keys))
        columns = plan_columns(spelled_q, spelled_k, kind, causal, bias)
    there = met.gather(2, order).repeat_interleave(size, 2)[:, :, None]  # B N 1 M·b: the rest fills a table
    met_bias = bias(q, k)
    plan = BlockPlan(
        size,
        order,
        mask.view(rows, N, size, -1) & there,
        None if met_bias is None else met_bias.view(rows, N, *met_bias.shape[1:]),
        columns=columns,
    )
    return _with_globals(plan, queries, keys, kind, causal, bias)


@functools.lru_cache(maxsize=256)
def plain_blocks(kind: Kind, length: int, causal: bool) -> tuple[int, int, int] | None:
    """Return block size, key blocks per query block, and global queries, of a row without padding.

    Columns, of strided attention, have as many pairs as one of their tokens for each remainder would have if
    it saw all: they count as global queries. None: a dense mask is made.
    """
    size = kind.block_size
    if size is None or length < 4 * size:
        return None
    tokens = masks.tokens_from(1, length, torch.device("cpu"))
    padded = _padded(kind.describe(tokens, causal, tokens.order, None), size, 1)
    by_blocks = kind.near if isinstance(kind, Strided) else kind
    count = int(_meeting(padded, padded, by_blocks, causal, size).sum(2).amax())
    seeing_all, column = _seeing_all(tokens, kind), _column(kind, length)
    globals_ = 0 if seeing_all is None else int(seeing_all.sum())
    dense = count == 0 or (count * size + column) * WORTH > length
    return None if dense else (size, count, column or globals_)


def _column(kind: Kind, length: int) -> int:
    """Return how many tokens stand in the longest column of a row without padding; 0: there are none."""
    return (length + kind.step - 1) // kind.step if isinstance(kind, Strided) else 0


def _padded(tokens: masks.TokenInfo, size: int, rows: int) -> masks.TokenInfo:
    """Return the tokens of whole blocks, with padding and documents spelled out for each row."""
    missing = -tokens.length % size
    order, positions, real, documents = (nnf.pad(x.expand(rows, -1), (0, missing)) for x in tokens.tensors())
    totals = None if tokens.totals is None else nnf.pad(tokens.totals.expand(rows, -1), (0, missing))
    packed = None if tokens.documents is None else documents
    marked = None if tokens.globals is None else nnf.pad(tokens.globals.expand(rows, -1), (0, missing))
    return masks.TokenInfo(order, positions, real, packed, plain=False, totals=totals, globals=marked)


def meeting(queries: masks.TokenInfo, keys: masks.TokenInfo, kind: Kind, causal: bool, size: int) -> Tensor:
    """Return which blocks of keys a block of queries may see in any row: [blocks, blocks of keys]."""
    rows = max(queries.order.shape[0], keys.order.shape[0])
    padded_q, padded_k = (_padded(tokens, size, rows) for tokens in (queries, keys))
    met = _meeting(padded_q, padded_k, kind, causal, size)
    seeing_all = _seeing_all(padded_q, kind)
    if seeing_all is not None:
        met = met | seeing_all.view(rows, -1, 1, size).any(-1)
    return met.any(0)


def _meeting(queries: masks.TokenInfo, keys: masks.TokenInfo, kind: Kind, causal: bool, size: int) -> Tensor:
    """Return which blocks of keys may hold one that a block of queries sees: [B, N, blocks of keys].

    It goes by the least and the largest position of each block, so it may name a block too many. Positions of
    different documents are far apart.
    """

    def both(values: Callable[[masks.TokenInfo], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def _ends(x: Tensor, tokens: masks.TokenInfo, size: int) -> tuple[Tensor, Tensor]:
    """Return the least and the largest value of real tokens in each block: [B, N] each."""
    assert tokens.real is not None
    low = torch.where(tokens.real, x, NEVER).view(x.shape[0], -1, size).amin(-1)
    high = torch.where(tokens.real, x, -NEVER).view(x.shape[0], -1, size).amax(-1)
    return low, high


def _meeting_blocks(
    queries: masks.TokenInfo, keys: masks.TokenInfo, kind: Blocks, causal: bool, size: int
) -> Tensor:
    """Return the same for blocks of positions: [B, N, blocks of keys]."""
    B, half = queries.order.shape[0], kind.window // 2
    # Blocks count on from one document to the next. Where two share a number, one is met too many.
    before = ((queries.order - queries.positions) // kind.size).clamp(min=0)
    block = keys.positions // kind.size + ((keys.order - keys.positions) // kind.size).clamp(min=0)
    near = [queries.positions // kind.size + step for step in range(-half, half + 1)]
    wanted = torch.stack(
        [*near, *kind.random_blocks(queries.positions, queries.totals, causal, kind.random_offsets())], dim=-1
    )  # B T wanted
    wanted, count = wanted + before[..., None], int(block.amax()) + 1
    assert queries.real is not None and keys.real is not None

    def named(blocks: Tensor, real: Tensor) -> Tensor:
        """Mark the blocks that the tokens of each block name: [B, T, n] -> [B, N, count]."""
        inside = (blocks >= 0) & (blocks < count) & real[..., None]
        table = torch.zeros(B, real.shape[1] // size, count, device=real.device)
        numbers = blocks.clamp(0, count - 1).view(B, -1, size * blocks.shape[-1])
        return table.scatter_reduce(2, numbers, inside.view_as(numbers).float(), "amax")

    met = named(wanted, queries.real) @ named(block[..., None], keys.real).transpose(1, 2) > 0
    k_low, _ = _ends(keys.positions, keys, size)
    start, end = kind.between_ends(keys.totals)
    met = met | (k_low < start)[:, None]
    if end is not None and queries.totals is not None:
        _, past = _ends(keys.positions - end, keys, size)
        shortest, _ = _ends(queries.totals, queries, size)
        met = met | (past >= 0)[:, None] | (shortest <= kind.full)[:, :, None]
    return met


def _seeing_all(queries: masks.TokenInfo, kind: Kind) -> Tensor | None:
    """Return which queries are global: [B|1, T]; None: none of them."""
    if not isinstance(kind, Blocks):
        return queries.globals
    start, end = kind.between_ends(queries.totals)
    seeing_all = queries.positions < start
    if end is not None:
        seeing_all = seeing_all | (queries.positions >= end)
    return seeing_all & queries.real_mask()


def _with_globals(
    plan: BlockPlan, queries: masks.TokenInfo, keys: masks.TokenInfo, kind: Kind, causal: bool, bias: Bias
) -> BlockPlan:
    """Add the queries that see everything to a plan."""
    seeing_all = _seeing_all(queries, kind)
    if seeing_all is None:
        return plan
    count = int(seeing_all.sum(1).amax())
    if count == 0:
        return plan
    slots = seeing_all.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]  # B G
    picked = queries.map(lambda x: x.expand(slots.shape[0], -1).gather(1, slots))
    picked = replace(picked, plain=False)
    mask, _ = masks.compose(picked, keys, causal=causal, kind=kind)
    return BlockPlan(plan.size, plan.index, plan.mask, plan.bias, slots, mask, bias(picked, keys))


def plan_columns(
    queries: masks.TokenInfo, keys: masks.TokenInfo, kind: Strided, causal: bool, bias: Bias
) -> Columns:
    """Return the columns of tokens whose padding is spelled out in each row."""
    of_queries, of_keys = (_columns(tokens, kind.step) for tokens in (queries, keys))
    R, rows = kind.step, len(of_queries)
    q = queries.map(lambda x: x.expand(rows, -1).gather(1, of_queries.clamp(min=0)).view(rows * R, -1))
    k = keys.map(lambda x: x.expand(rows, -1).gather(1, of_keys.clamp(min=0)).view(rows * R, -1))
    k = replace(k, real=k.real_mask() & (of_keys >= 0).view_as(k.order))
    mask, _ = masks.compose(q, k, causal=causal, kind=kind)
    both, _ = masks.compose(q, k, causal=causal, kind=kind.near)  # those have been attended by blocks
    assert mask is not None and both is not None
    met_bias = bias(q, k)
    count = torch.arange(of_queries.shape[1], device=of_queries.device).expand_as(of_queries)
    index = torch.zeros_like(queries.order).expand(rows, -1)
    spare = nnf.pad(index, (0, 1)).scatter(1, of_queries.where(of_queries >= 0, index.shape[1]), count)
    return Columns(
        of_queries.clamp(min=0),
        of_keys.clamp(min=0),
        (mask & ~both).view(rows, R, *mask.shape[2:]),
        None if met_bias is None else met_bias.view(rows, R, *met_bias.shape[1:]),
        spare[:, :-1],
    )


def _columns(tokens: masks.TokenInfo, step: int) -> Tensor:
    """Return the slots of each column, in order, -1 where it is shorter than another: [B, step · longest]."""
    real, column = tokens.real_mask(), tokens.positions % step
    rows, length = real.shape
    order = torch.where(real, column, step).argsort(dim=1, stable=True)  # padding last
    sizes = torch.zeros(rows, step, dtype=torch.long, device=real.device)
    sizes = sizes.scatter_add(1, column.expand_as(real), real.long())
    longest = max(1, int(sizes.max()))
    starts = sizes.cumsum(1) - sizes
    within = torch.arange(longest, device=real.device)
    slots = order.gather(1, (starts[:, :, None] + within).clamp(max=length - 1).flatten(1))
    return torch.where((within < sizes[:, :, None]).flatten(1), slots, -1)
