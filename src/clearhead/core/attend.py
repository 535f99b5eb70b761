"""Attending: softmax(q kᵀ · scale + bias, where allowed) v, as pure functions of tensors.

`eager` spells the formula out and shows scores and pattern to the tap. `fused` calls PyTorch's fused kernel.
Both have the same signature and give the same answer: zeros, with finite gradients, for a query that may
attend to nothing.

Shapes: B batch, H heads, K key/value heads (H a multiple of K), T query length, S key length, E head width.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.core.config import BIASES, LEARNED_BIASES, StackSpec
from clearhead.core.config.kinds import Kind
from clearhead.core.dtypes import wide
from clearhead.core.steps import Pass
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.torch_kernel import attend_by_torch


class Attend(Protocol):
    """q [B,H,T,E], k [B,K,S,E], v [B,K,S,Ev] -> [B,H,T,Ev].

    `mask` [B|1, 1|H, T, S] is True where a query may attend. `causal` stands for "key slot <= query slot".
    `bias` [B|1, 1|H, T, S] is added to the scaled scores. `scale` defaults to 1/sqrt(E). `softcap` bounds
    scores. `sink` [H] is one more score in each softmax, and its weight goes nowhere. Where keys, values and
    mask have B / N rows, each row serves N rows of one query: the beams of a source.
    """

    def __call__(  # noqa: D102
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        *,
        causal: bool = False,
        softcap: float | None = None,
        sink: Tensor | None = None,
        dropout: float = 0.0,
        tap: Tap = SILENT,
    ) -> Tensor: ...


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    *,
    causal: bool = False,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    tap: Tap = SILENT,
) -> Tensor:
    """Compute each step of attention by itself; see `Attend`."""
    B, H, T, E = q.shape
    if k.shape[0] < B:
        shared = B // k.shape[0]
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        mask = mask if mask is None or mask.shape[0] == 1 else mask.repeat_interleave(shared, 0)
    K, S = k.shape[1:3]
    scale = E**-0.5 if scale is None else scale
    if causal:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril()[None, None]
    # The heads of a group become more queries of its key/value head, so that no key is copied.
    grouped = q.reshape(B, K, H // K * T, E)
    scores = tap.step("scores", (grouped @ k.transpose(-2, -1)).view(B, H, T, S))
    scores = tap.step("scaled", scores * scale)
    if softcap is not None:
        scores = tap.step("softcapped", softcap * torch.tanh(scores / softcap))
    if bias is not None:
        scores = tap.step("biased", scores + bias)
    if mask is not None:
        # The lowest finite number, not -inf: gradients stay finite in a row that may attend to nothing.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    scores = tap("scores", tap.step("masked", scores))
    if sink is not None:
        column = sink.to(scores.dtype).view(1, H, 1, 1).expand(B, H, T, 1)
        scores = tap.step("sink", torch.cat([scores, column], dim=-1))  # B H T S+1
    pattern = torch.softmax(wide(scores), dim=-1).to(q.dtype)[..., :S]  # B H T S
    if mask is not None:
        pattern = pattern.masked_fill(~mask, 0.0)
    pattern = F.dropout(tap("pattern", pattern), dropout, training=dropout > 0)
    return (pattern.reshape(B, K, H // K * T, S) @ v).view(B, H, T, v.shape[-1])


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    *,
    causal: bool = False,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    tap: Tap = SILENT,
) -> Tensor:
    """Call PyTorch's fused kernel, which has no soft-cap and no sink, and no taps; see `Attend`."""
    if softcap is not None or sink is not None:
        return eager(
            q, k, v, mask, bias, scale, causal=causal, softcap=softcap, sink=sink, dropout=dropout, tap=tap
        )
    B, H, T, E = q.shape
    K = k.shape[1]
    if k.shape[0] < B and T == 1:  # rows that share keys become the queries of one row: no key is copied
        together = q.reshape(k.shape[0], -1, H, E).transpose(1, 2)  # B/N H N E
        return fused(together, k, v, mask, bias, scale, dropout=dropout).transpose(1, 2).reshape(B, H, 1, -1)
    if bias is not None:
        if causal:
            mask = torch.ones(T, k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
            causal = False
        mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, float("-inf"))
    if T == 1 and K < H and not causal and (mask is None or mask.shape[1] == 1):
        # One query per head: the heads of a group become the queries of one head, so that no key is copied.
        grouped = q.reshape(B, K, H // K, E)
        # What comes back is laid out as the kernel likes it: on some GPUs it has no view of this shape.
        return attend_by_torch(grouped, k, v, mask, dropout, scale=scale).reshape(B, H, 1, -1)
    return attend_by_torch(q, k, v, mask, dropout, causal, scale)


# "flex" is `fused`, but for rows that are planned by blocks: those go through `kinds.flex` where it serves.
KERNELS: dict[str, Attend] = {"eager": eager, "fused": fused, "flex": fused}


def attend_bytes(
    spec: StackSpec, run: Pass, own: bool, H: int, T: int, S: int, kind: Kind, fused: bool
) -> int:
    """Return the bytes that the kernel of this attention keeps for the backward pass, but for its answer."""
    square, values = T * S, run.batch * H * T * S  # elements of a mask and of the pattern
    windowed = not kind.sees_all(S)
    masked = windowed or (own and spec.causal)
    capped, sink = spec.attention_softcap is not None, spec.attention_sink
    if capped or sink:
        # The eager kernel keeps tanh, softmax, the pattern if masked or cast, and the mask twice.
        copied = run.size if masked or run.size < run.wide else 0
        columns = run.batch * H * T * (run.wide if masked else run.wide + copied) if sink else 0
        each = (run.size if capped else 0) + run.wide + copied
        return values * each + columns + (2 * square if masked else 0)
    if not fused:
        return values * run.wide + (square if masked and own and spec.positions in LEARNED_BIASES else 0)
    log_sums = run.batch * H * T * 4
    if own and spec.positions in BIASES and masked:
        return log_sums + H * square * run.size
    return log_sums + (square * run.size if windowed else 0)
