"""Attending by blocks, as a plan says, by gathered keys, columns or `flex_attention`: a dense mask's answer.

Shapes: B batch, H heads, K key/value heads, T queries, S keys, E head width, b tokens of a block, N blocks of
queries, M blocks of keys that each of them meets, G global queries of a row.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core import masks
from clearhead.core.attend import fused
from clearhead.variants import flex, strided

AT_ONCE = 1 << 24  # values of gathered keys in one product, where nothing is kept for a backward pass


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: masks.BlockPlan,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    heads: list[int] | None = None,
) -> Tensor:
    """Attend as the plan says: q [B,H,T,E], k [B,K,S,E], v [B,K,S,Ev] -> [B,H,T,Ev].

    `heads` are the heads that pruning has left, where the plan has a bias for each.
    """
    if plan.columns is not None and isinstance(plan.mask, Tensor):
        summed = partial(strided.summed, scale=scale, softcap=softcap, dropout=dropout)
        close = _gathered(q, k, v, plan, plan.mask, summed, heads)
        far = strided.attend_columns(q, k, v, plan.columns, summed, heads)
        return strided.joined([close, far], sink).to(q.dtype)
    attend = partial(fused, scale=scale, softcap=softcap, sink=sink, dropout=dropout)
    if isinstance(plan.mask, Tensor):
        z = _gathered(q, k, v, plan, plan.mask, attend, heads)
    else:
        z = flex.attend_flex(q, k, v, plan.mask, scale)
    if plan.globals is None:
        return z
    slots = plan.globals.expand(q.shape[0], -1)[:, None, :, None]
    picked = q.gather(2, slots.expand(-1, q.shape[1], -1, q.shape[3]))
    full = attend(picked, k, v, plan.global_mask, _of_heads(plan.global_bias, heads))
    return z.scatter(2, slots.expand(-1, q.shape[1], -1, z.shape[3]), full)


def _of_heads(bias: Tensor | None, heads: list[int] | None) -> Tensor | None:
    return bias if bias is None or heads is None or bias.shape[1] == 1 else bias[:, heads]


def _gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: masks.BlockPlan,
    allowed: Tensor,
    attend: Callable[..., Tensor],
    heads: list[int] | None,
) -> Tensor:
    """Gather the blocks of keys that each block of queries meets, and attend to them: [B,H,T,Ev]."""
    B, H, T, _ = q.shape
    b, (rows, N, M) = plan.size, plan.index.shape

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
        index, mask = plan.index[of_plan], allowed[of_plan, :, None]
        bias = None if plan.bias is None else _of_heads(plan.bias[of_plan], heads)
        for start in range(0, N, some):
            part = slice(start, start + some)
            k_met, v_met = (
                x[row][index[part]].transpose(1, 2).flatten(2, 3) for x in (k_blocks, v_blocks)
            )  # n K M·b E
            bias_met = None if bias is None else bias[part]
            answers.append(attend(q_blocks[row, part], k_met, v_met, mask[part], bias_met))
    return torch.cat(answers).view(B, N, H, b, -1).transpose(1, 2).flatten(2, 3)[:, :, :T]  # B H T Ev
