"""Attending by blocks, as a plan says: the answer of a dense mask, with keys that are not seen left out.

Each block of queries gathers the blocks of keys that it meets; strided attention adds columns. Or else
`attending(model, "flex")` asks for PyTorch's `flex_attention`, which compiles a kernel and gathers nothing. A
CPU has no backward pass of that one, and none is needed there.

Tokens whose positions leave the same remainder by the step of strided attention stand in one column. Columns
are attended each by itself, so that T tokens and steps of √T take T·√T dot products. Both answers are joined
by the sums of their softmaxes.

Shapes: B batch, H heads, K key/value heads, T queries, S keys, E head width, b tokens of a block, N blocks of
queries, M blocks of keys that each of them meets, G global queries of a row, R remainders, Q queries and
C keys of the longest column.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core.attention import fused, of_heads, scores_of
from clearhead.core.dtypes import wide

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

AT_ONCE = 1 << 24  # values of gathered keys in one matmul, where nothing is kept for a backward pass
DYNAMIC = True  # flex: one kernel for all lengths; else each length is compiled anew


@dataclass(frozen=True)
class Columns:
    """The tokens of each column, and who of them may attend to whom; R columns of Q queries and C keys."""

    queries: Tensor  # B|1 R·Q: slots
    keys: Tensor  # B|1 R·C
    mask: Tensor  # B|1 R Q C
    bias: Tensor | None  # B|1 R 1|H Q C
    index: Tensor  # B|1 T: where each query stands among `queries`


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of keys that each block of queries attends to, with their masks and biases."""

    size: int  # b
    index: Tensor  # B|1 N M: numbers of the blocks of keys
    mask: "Tensor | BlockMask"  # B|1 N b M·b, or what `flex_attention` takes in its place
    bias: Tensor | None  # B|1 N H b M·b
    globals: Tensor | None = None  # B|1 G: slots of the queries that see everything
    global_mask: Tensor | None = None  # B|1 1 G S
    global_bias: Tensor | None = None  # B|1 H G S
    columns: Columns | None = None  # of strided attention: what the blocks leave out

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        dropout: float = 0.0,
        heads: list[int] | None = None,
    ) -> Tensor:
        """Attend: q [B,H,T,E], k [B,K,S,E], v [B,K,S,Ev] -> [B,H,T,Ev].

        `heads` are the heads that pruning has left, where the plan has a bias for each.
        """
        if self.columns is not None and isinstance(self.mask, Tensor):
            with_sums = partial(summed, scale=scale, softcap=softcap, dropout=dropout)
            close = self._gathered(q, k, v, self.mask, with_sums, heads)
            far = attend_columns(q, k, v, self.columns, with_sums, heads)
            return joined([close, far], sink).to(q.dtype)
        attend = partial(fused, scale=scale, softcap=softcap, sink=sink, dropout=dropout)
        if isinstance(self.mask, Tensor):
            z = self._gathered(q, k, v, self.mask, attend, heads)
        else:
            z = attend_flex(q, k, v, self.mask, scale)
        if self.globals is None:
            return z
        slots = self.globals.expand(q.shape[0], -1)[:, None, :, None]
        picked = q.gather(2, slots.expand(-1, q.shape[1], -1, q.shape[3]))
        full = attend(picked, k, v, self.global_mask, of_heads(self.global_bias, heads))
        return z.scatter(2, slots.expand(-1, q.shape[1], -1, z.shape[3]), full)

    def _gathered(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        allowed: Tensor,
        attend: Callable[..., Tensor],
        heads: list[int] | None,
    ) -> Tensor:
        """Gather the blocks of keys for each block of queries, and attend to them: [B,H,T,Ev]."""
        B, H, T, _ = q.shape
        b, (rows, N, M) = self.size, self.index.shape

        def in_blocks(x: Tensor) -> Tensor:
            """[B, heads, tokens, E] -> [B, blocks, heads, b, E]."""
            x = nnf.pad(x, (0, 0, 0, -x.shape[2] % b))
            return x.view(B, x.shape[1], -1, b, x.shape[3]).transpose(1, 2)

        q_blocks, k_blocks, v_blocks = in_blocks(q), in_blocks(k), in_blocks(v)
        kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        some = N if kept else max(1, AT_ONCE // (M * b * k.shape[1] * k.shape[3]))
        answers = []
        for row in range(B):
            of_plan = row if rows > 1 else 0
            index, mask = self.index[of_plan], allowed[of_plan, :, None]
            bias = None if self.bias is None else of_heads(self.bias[of_plan], heads)
            for start in range(0, N, some):
                part = slice(start, start + some)
                k_met, v_met = (
                    x[row][index[part]].transpose(1, 2).flatten(2, 3) for x in (k_blocks, v_blocks)
                )  # n K M·b E
                bias_met = None if bias is None else bias[part]
                answers.append(attend(q_blocks[row, part], k_met, v_met, mask[part], bias_met))
        return torch.cat(answers).view(B, N, H, b, -1).transpose(1, 2).flatten(2, 3)[:, :, :T]  # B H T Ev


def attend_columns(
    q: Tensor, k: Tensor, v: Tensor, columns: Columns, attend: Callable[..., Tensor], heads: list[int] | None
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

    bias = None if columns.bias is None else of_heads(each(columns.bias), heads)
    q = picked(q, columns.queries)
    k, v = picked(k, columns.keys), picked(v, columns.keys)
    z = attend(q, k, v, each(columns.mask)[:, None], bias)  # B·R H Q Ev+1
    z = z.view(B, R, *z.shape[1:]).transpose(1, 2).flatten(2, 3)
    at = columns.index.expand(B, -1)[:, None, :, None].expand(-1, z.shape[1], -1, z.shape[3])
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
    (B, H, T, _), (K, S) = q.shape, k.shape[1:3]
    scores = wide(scores_of(q, k, bias, scale, softcap))
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


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: "BlockMask", scale: float | None) -> Tensor:
    """Attend as the mask says: q [B,H,T,E], k [B,K,S,E], v [B,K,S,Ev] -> [B,H,T,Ev]."""
    run = compiled() if q.is_cuda else _plain()
    q, k = q.to(v.dtype), k.to(v.dtype)
    return cast(Tensor, run(q, k, v, block_mask=mask, scale=scale, enable_gqa=k.shape[1] < q.shape[1]))


def _plain() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.lru_cache
def compiled() -> Callable[..., Any]:
    """Compile it, whole or not at all: its uncompiled form holds the scores of every pair."""
    return torch.compile(_plain(), dynamic=DYNAMIC, fullgraph=True)
