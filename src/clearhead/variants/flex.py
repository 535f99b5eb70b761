"""PyTorch's `flex_attention` as one way to attend by blocks on a GPU, with the predicates of the dense mask.

It compiles a kernel of each kind's predicate, skips the blocks that the plan leaves out, and gathers nothing.
`attending(model, "flex")` asks for it. A CPU has no backward pass of it, and none is asked of it there.

Shapes: B batch, H heads, K key/value heads, T queries, S keys, E head width, N blocks of queries, M of keys.
"""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.config import BIASES, StackSpec
from clearhead.core.config.kinds import Blocks, Kind
from clearhead.variants.choices import predicate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

DYNAMIC = True  # one kernel for all lengths; else each length is compiled anew
BLOCK = 128  # tokens of a block, which the kernel's own tiles divide
WIDTHS = range(16, 129)  # of heads, that the kernel has room for


def serves(spec: StackSpec, kind: Kind, tokens: masks.Tokens, dtype: torch.dtype, training: bool) -> bool:
    """Return whether `flex_attention` can attend: to scores without additions, on a CPU without gradients."""
    return (
        (tokens.order.is_cuda or not torch.is_grad_enabled())
        and dtype != torch.float64
        and spec.d_head in WIDTHS
        and spec.d_value in WIDTHS
        and spec.positions not in BIASES
        and not (isinstance(kind, Blocks) and kind.repeat)
        and spec.attention_softcap is None
        and not spec.attention_sink
        and not (training and spec.attention_dropout)
        and not torch.compiler.is_compiling()
    )


def asked(blocks: Iterable[nn.Module]) -> bool:
    """Return whether the attention of a block was told to use it."""
    return any(getattr(getattr(block, "attention", None), "kernel", None) == "flex" for block in blocks)


def flex_mask(
    met: Tensor, queries: masks.Tokens, keys: masks.Tokens, kind: Kind, causal: bool, lengths: tuple[int, int]
) -> "BlockMask":
    """Return the mask of `flex_attention`: `met` [B|1, N, M] says which blocks meet, predicates say the rest.

    Tokens are those of whole blocks; `lengths` are how many queries and keys there are.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rule, each = predicate(kind, causal), int(met.shape[0] > 1)  # 0: all rows are alike

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = masks.rules(queries, keys, causal, rule, lambda x: x[b * each, q], lambda x: x[b * each, k])
        return functools.reduce(torch.logical_and, found)

    count = met.sum(2, dtype=torch.int32)[:, None]  # B|1 1 N
    order = met.to(torch.int8).argsort(dim=2, descending=True, stable=True).to(torch.int32)[:, None]
    return BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=BLOCK, mask_mod=allowed, seq_lengths=lengths)


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
