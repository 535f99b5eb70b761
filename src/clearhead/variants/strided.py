"""Strided attention in two parts: keys nearer than a step, by blocks, and those a multiple of it away.

Tokens whose positions leave the same remainder stand in one column. Columns are attended each by itself, so
that T tokens and steps of √T take T·√T products. The two answers are joined by the sums of their softmaxes.

Shapes: B batch, H heads, K key/value heads, T queries, S keys, E head width, R remainders, that is the step,
Q queries and C keys of the longest column.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core import masks
from clearhead.core.config.kinds import Strided, Windowed
from clearhead.core.dtypes import wide


def near(kind: Strided) -> Windowed:
    """Return the kind that chooses the keys nearer than a step, and the sinks."""
    return Windowed(kind.step, kind.sinks)


def plan_columns(
    queries: masks.Tokens,
    keys: masks.Tokens,
    kind: Strided,
    causal: bool,
    bias: Callable[[masks.Tokens, masks.Tokens], Tensor | None],
) -> masks.Columns:
    """Return the columns of tokens whose padding is spelled out in each row."""
    of_queries, of_keys = (_columns(tokens, kind.step) for tokens in (queries, keys))
    R, rows = kind.step, len(of_queries)
    q = queries.map(lambda x: x.expand(rows, -1).gather(1, of_queries.clamp(min=0)).view(rows * R, -1))
    k = keys.map(lambda x: x.expand(rows, -1).gather(1, of_keys.clamp(min=0)).view(rows * R, -1))
    k = replace(k, real=k.real_mask() & (of_keys >= 0).view_as(k.order))
    mask, _ = masks.compose(q, k, causal=causal, kind=kind)
    both, _ = masks.compose(q, k, causal=causal, kind=near(kind))  # those have been attended by blocks
    assert mask is not None and both is not None
    found = bias(q, k)
    count = torch.arange(of_queries.shape[1], device=of_queries.device).expand_as(of_queries)
    place = torch.zeros_like(queries.order).expand(rows, -1)
    spare = nnf.pad(place, (0, 1)).scatter(1, of_queries.where(of_queries >= 0, place.shape[1]), count)
    return masks.Columns(
        of_queries.clamp(min=0),
        of_keys.clamp(min=0),
        (mask & ~both).view(rows, R, *mask.shape[2:]),
        None if found is None else found.view(rows, R, *found.shape[1:]),
        spare[:, :-1],
    )


def _columns(tokens: masks.Tokens, step: int) -> Tensor:
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


def attend_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    columns: masks.Columns,
    attend: Callable[..., Tensor],
    heads: list[int] | None,
) -> Tensor:
    """Attend within columns; `attend` answers as `summed` does: [B, H, T, Ev+1]."""
    B, R = len(q), columns.mask.shape[1]

    def picked(x: Tensor, slots: Tensor) -> Tensor:
        """[B, heads, tokens, E] -> [B·R, heads, Q|C, E]."""
        slots = slots.expand(B, -1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        return x.gather(2, slots).view(B, x.shape[1], R, -1, x.shape[3]).transpose(1, 2).flatten(0, 1)

    def each(x: Tensor) -> Tensor:
        """[B|1, R, ...] -> [B·R, ...]."""
        return x.expand(B, *x.shape[1:]).flatten(0, 1)

    bias = None if columns.bias is None else each(columns.bias)
    if bias is not None and heads is not None and bias.shape[1] > 1:
        bias = bias[:, heads]
    q = picked(q, columns.queries)
    k, v = picked(k, columns.keys), picked(v, columns.keys)
    z = attend(q, k, v, each(columns.mask)[:, None], bias)  # B·R H Q Ev+1
    z = z.view(B, R, *z.shape[1:]).transpose(1, 2).flatten(2, 3)
    at = columns.place.expand(B, -1)[:, None, :, None].expand(-1, z.shape[1], -1, z.shape[3])
    return z.gather(2, at)


def summed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    *,
    scale: float | None,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Attend as `eager` does; the last column is the logarithm of the sum of a softmax: [B, H, T, Ev+1]."""
    B, H, T, E = q.shape
    K, S = k.shape[1:3]
    scores = (q.reshape(B, K, H // K * T, E) @ k.transpose(-2, -1)).view(B, H, T, S)
    scores = scores * (E**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = wide(scores)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    total = scores.logsumexp(-1, keepdim=True)
    pattern = (scores - total).exp().masked_fill(~mask, 0.0).to(q.dtype)
    pattern = nnf.dropout(pattern, dropout, training=dropout > 0)
    z = (pattern.reshape(B, K, H // K * T, S) @ v).view(B, H, T, v.shape[-1])
    return torch.cat([z.to(total.dtype), total], dim=-1)


def joined(parts: list[Tensor], sink: Tensor | None) -> Tensor:
    """Join answers to different keys, each [B, H, T, Ev+1], into one to all of them: [B, H, T, Ev]."""
    totals = [part[..., -1:] for part in parts]
    if sink is not None:
        totals.append(sink.to(totals[0].dtype).view(1, -1, 1, 1).expand_as(totals[0]))
    shares = torch.softmax(torch.stack(totals), dim=0)
    return torch.stack([part[..., :-1] * share for part, share in zip(parts, shares)]).sum(0)
