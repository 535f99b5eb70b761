"""Attention: the formula as pure functions of tensors, then the module that owns the projections.

The formula is softmax(q kᵀ · scale + bias, where allowed) v. `eager` spells it out and shows scores and
pattern to the tap. `fused` calls PyTorch's fused kernel. Both have the same signature and give the same
answer: zeros, with finite gradients, for a query that may attend to nothing. Masks are made in `masks`.

Self-attention and cross-attention are one module: cross-attention takes its keys and values from `memory`.

`tap("q", q)` shows an activation that a user may record or edit, `tap.step` an intermediate value to a trace.
Both return the tensor (`taps`). So the activation "q" is normed and rotated, "scores" are scaled and masked.
A `View` is what one layer may see: mask, bias and rotation (`masks`).

Shapes: B batch, T query length, S key length, D model, H heads, K key/value heads (H a multiple of K),
E head width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks, norms, positions
from clearhead.core.cache import LayerKV
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.config.registry import Registry
from clearhead.core.dtypes import wide
from clearhead.core.taps import SILENT, Tap


def scores_of(
    q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None, softcap: float | None, tap: Tap = SILENT
) -> Tensor:
    """Score each key for each query, with a soft-cap and a bias: q [B,H,T,E], k [B,K,S,E] -> [B,H,T,S]."""
    (B, H, T, E), (K, S) = q.shape, k.shape[1:3]
    # The heads of a group become more queries of its key/value head, so that no key is copied.
    grouped = q.reshape(B, K, H // K * T, E)
    scores = tap.step("scores", (grouped @ k.transpose(-2, -1)).view(B, H, T, S))
    scores = tap.step("scaled", scores * (E**-0.5 if scale is None else scale))
    if softcap is not None:
        scores = tap.step("softcapped", softcap * torch.tanh(scores / softcap))
    return scores if bias is None else tap.step("biased", scores + bias)


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
    """Attend step by step: q [B,H,T,E], k [B,K,S,E], v [B,K,S,Ev] -> [B,H,T,Ev].

    `mask` [B|1, 1|H, T, S] is True where a query may attend. `causal` stands for "key slot <= query slot".
    `bias` [B|1, 1|H, T, S] is added to the scaled scores. `scale` defaults to 1/sqrt(E). `softcap` bounds
    scores. `sink` [H] is one more learned logit in each softmax, without a value: it takes weight from all
    keys. Rows of keys, values and mask may be shared: with B / N of them, each serves N consecutive rows of
    queries (beams).
    """
    B, H, T, _ = q.shape
    if k.shape[0] < B:
        shared = B // k.shape[0]
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        mask = mask if mask is None or mask.shape[0] == 1 else mask.repeat_interleave(shared, 0)
    K, S = k.shape[1:3]
    if causal:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril()[None, None]
    scores = scores_of(q, k, bias, scale, softcap, tap)
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
    pattern = nnf.dropout(tap("pattern", pattern), dropout, training=dropout > 0)
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
    dropout: float = 0.0,
    **more: Any,
) -> Tensor:
    """Call PyTorch's fused kernel, which has no taps; a soft-cap or a sink, in `more`, is left to `eager`."""
    if more.get("softcap") is not None or more.get("sink") is not None:
        return eager(q, k, v, mask, bias, scale, causal=causal, dropout=dropout, **more)
    B, H, T, E = q.shape
    K = k.shape[1]
    if k.shape[0] < B and (T > 1 or causal):
        return eager(q, k, v, mask, bias, scale, causal=causal, dropout=dropout)
    if k.shape[0] < B:  # rows that share keys become the queries of one row: no key is copied
        together = q.reshape(k.shape[0], -1, H, E).transpose(1, 2)  # B/N H N E
        return fused(together, k, v, mask, bias, scale, dropout=dropout).transpose(1, 2).reshape(B, H, 1, -1)
    if bias is not None:
        if causal:
            mask = torch.ones(T, k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
            causal = False
        mask = bias.to(q.dtype) if mask is None else bias.to(q.dtype).masked_fill(~mask, float("-inf"))
    attend = DEVICES["cuda"] if q.is_cuda else nnf.scaled_dot_product_attention
    if T == 1 and K < H and not causal and (mask is None or mask.shape[1] == 1):
        # One query per head: the heads of a group become the queries of one head, so that no key is copied.
        grouped = q.reshape(B, K, H // K, E)
        return attend(grouped, k, v, mask, dropout, scale=scale).reshape(B, H, 1, -1)
    return attend(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=K < H)


# What stands for PyTorch's function on a device where not all of its kernels may be trusted.
DEVICES: Registry[Callable[..., Tensor]] = Registry({"cuda": "clearhead.variants.cuda_attention:attend"})
# "flex" is `fused`, but for rows planned by blocks: those go through `flex_attention` where it serves.
KERNELS: dict[str, Callable[..., Tensor]] = {"eager": eager, "fused": fused, "flex": fused}


class Attention(nn.Module):
    """Multi-head attention; grouped-query or multi-query with fewer key/value heads."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind = FULL) -> None:
        """Build the projections of the attention called `name`; subclasses read their `kind`."""
        super().__init__()
        DEVICES["cuda"]  # imported now, since passes may be compiled
        self.heads = spec.heads_of(name)  # numbers of the heads that pruning has left
        self.pruned = len(self.heads) < spec.n_heads
        self.n_heads, self.n_kv_heads = len(self.heads), spec.kv_heads_of(name)
        self.d_head, self.d_value = spec.d_head, spec.d_value
        self.scale, self.softcap = spec.attention_scale, spec.attention_softcap
        self.dropout = spec.attention_dropout
        self.layout, self.norm_over = spec.rope_layout, spec.qk_norm
        self.kernel = "fused"

        width = self.n_heads * self.d_value
        self.q = nn.Linear(spec.d_model, self.n_heads * self.d_head, bias=spec.qkv_bias)
        self.k = nn.Linear(spec.d_model, self.n_kv_heads * self.d_head, bias=spec.key_bias)
        self.v = nn.Linear(spec.d_model, self.n_kv_heads * self.d_value, bias=spec.qkv_bias)
        self.out = nn.Linear(width, spec.d_model, bias=spec.attention_out_bias)
        whole, normed = spec.qk_norm == "full", spec.qk_norm != "none"
        q_width, k_width = (self.q.out_features, self.k.out_features) if whole else (self.d_head, self.d_head)
        self.sink = nn.Parameter(torch.zeros(self.n_heads)) if spec.attention_sink else None
        gate = (spec.head_gate, self.n_heads) if spec.head_gate else (spec.d_model, width)
        gated = spec.attention_gate or spec.head_gate
        self.gate = nn.Linear(*gate, bias=spec.qkv_bias) if gated else None
        self.q_norm = norms.make_norm(spec.norm, q_width) if normed else None
        self.k_norm = norms.make_norm(spec.norm, k_width) if normed else None

    def forward(
        self,
        x: Tensor,
        view: masks.View,
        memory: Tensor | None = None,
        layer_kv: LayerKV | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]; cross-attention reads `memory` [B, S, D]."""
        cached = layer_kv is not None and layer_kv.source_cached  # those of the memory, by an earlier call
        if layer_kv is not None and cached:
            q, (k, v) = self.split("q", self.q(x), self.n_heads, self.q_norm, tap), layer_kv.buffers()
        else:
            q, k, v = self.project(x, x if memory is None else memory)
            q, k, v = tap.step("q", q), tap.step("k", k), tap.step("v", v)
            q = self.split("q", q, self.n_heads, self.q_norm, tap)  # B H T E
            k = self.split("k", k, self.n_kv_heads, self.k_norm, tap)  # B K S E
            v = self.split("v", v, self.n_kv_heads, None, tap)
            v = v if view.values is None else view.values(v)
        if view.rotary is not None:
            q = tap.step("q_rotated", positions.rotate(q, view.rotary, self.layout))
            k = tap.step("k_rotated", positions.rotate(k, view.rotary, self.layout))
        q, k, v = tap("q", q), tap("k", k), tap("v", v)
        # The view calls `attend`; keys that are cached for good are not to be added to the cache again.
        z = view.attended(self.attend, q, k, v, None if cached else layer_kv, tap, x)  # B H T E
        return self.output(z, x, tap)

    def output(self, z: Tensor, x: Tensor, tap: Tap) -> Tensor:
        """Gate what the heads found, where there is a gate, and join it: [B, H, T, E] -> [B, T, D]."""
        B, T, _ = x.shape
        if self.gate is not None:
            read = x[..., : self.gate.in_features]
            gate = tap.step("gate", self.gate(read)).view(B, T, self.n_heads, -1).transpose(1, 2)
            z = tap.step("mixed", z) * gate.sigmoid()
        z = tap("z", z).transpose(1, 2).reshape(B, T, self.n_heads * self.d_value)  # B T H·E
        return tap("out", self.out(tap.step("concat", z)))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: masks.View, layer_kv: LayerKV | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """Attend with queries [B, H, T, E], made of x [B, T, D], to keys and values [B, K, S, E]."""
        if layer_kv is not None:
            k, v = layer_kv.update(k, v)
        kernel, dropout = self.kernel, self.dropout if self.training else 0.0
        if tap.wants("scores", "pattern"):
            kernel = "eager"
        heads = list(self.heads) if self.pruned else None
        if view.blocks is not None and kernel != "eager":
            return view.blocks.attend(
                q, k, v, scale=self.scale,
                softcap=self.softcap, sink=self.sink_logits(), dropout=dropout, heads=heads,
            )  # fmt: skip
        view = view.spelled_out()
        return KERNELS[kernel](
            q, k, v, view.mask, of_heads(view.bias, heads), self.scale, causal=view.causal,
            softcap=self.softcap, sink=self.sink_logits(), dropout=dropout, tap=tap,
        )  # fmt: skip

    def sink_logits(self) -> Tensor | None:
        """Return `sink` for `eager`: a learned logit for each head [H], where there is one."""
        return self.sink

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, T, D] to queries [B, T, H·E], `source` [B, S, D] to keys and values [B, S, K·E]."""
        return self.q(x), self.k(source), self.v(source)

    def head_axes(self) -> dict[str, tuple[int, bool, int]]:
        """Return, for each weight: the axis split by heads, whether by key/value heads, rows per head."""
        E, Ev = self.d_head, self.d_value
        each = Ev if self.gate is None else self.gate.out_features // self.n_heads
        inputs = {"q": (0, False, E), "k": (0, True, E), "v": (0, True, Ev), "gate": (0, False, each)}
        axes = {f"{name}.{kind}": inputs[name] for name in inputs for kind in ("weight", "bias")}
        return {**axes, "out.weight": (1, False, Ev), "sink": (0, False, 1)}

    def split(self, name: str, x: Tensor, n_heads: int, norm: nn.Module | None, tap: Tap) -> Tensor:
        """Split heads, and norm all of them or each: [B, T, heads·width] -> [B, heads, T, width]."""
        if norm is not None and self.norm_over == "full":
            x = tap.step(f"{name}_norm", norm(x))
        B, T, _ = x.shape
        x = x.view(B, T, n_heads, -1)
        heads = tap.step(f"{name}_heads", x.transpose(1, 2))
        if norm is not None and self.norm_over == "head":
            return tap.step(f"{name}_norm", norm(x).transpose(1, 2))
        return heads


def of_heads(bias: Tensor | None, heads: list[int] | None) -> Tensor | None:
    """Return the bias [B|1, 1|H, T, S] of the heads that pruning has left; None: all of them."""
    return bias if bias is None or heads is None or bias.shape[1] <= len(heads) else bias[:, heads]


VARIANTS = "clearhead.variants"
# By the kind of a layer, or by positions that need an attention of their own.
ATTENTIONS: Registry[Any] = Registry(
    {
        **dict.fromkeys(("full", "window", "dilated", "strided", "blocks", "block-causal"), Attention),
        "global": f"{VARIANTS}.global_attention:GlobalAttention",
        **{"linear": f"{VARIANTS}.linear:LinearAttention", "low-rank": f"{VARIANTS}.linear:LowRankAttention"},
        **{"gated-delta": f"{VARIANTS}.gated_delta:DeltaLayer", "none": f"{VARIANTS}.halves:NoAttention"},
        **{"mamba2": f"{VARIANTS}.state_space:Mamba2Layer", "hybrid": f"{VARIANTS}.state_space:HybridLayer"},
        **{"conv": f"{VARIANTS}.recurrent:ShortConvLayer", "latent": f"{VARIANTS}.latent:LatentAttention"},
        "disentangled": f"{VARIANTS}.positions:DisentangledAttention",
    }
)


def attention_class(spec: StackSpec, layer: int) -> Any:
    """Return the class of the self-attention of a layer."""
    return ATTENTIONS[spec.positions if spec.positions == "disentangled" else spec.kinds[layer].name]
