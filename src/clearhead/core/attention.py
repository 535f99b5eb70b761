"""Attention: the module that owns the projections. The formula is in `attend`, the masks are in `masks`.

Self-attention and cross-attention are one module: cross-attention takes its keys and values from `memory`.

Shapes: B batch, T query length, S key length, D model, H heads, K key/value heads, E head width.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from clearhead.core import masks, norms, positions
from clearhead.core.attend import KERNELS, attend_bytes
from clearhead.core.cache import CrossKeys, LayerKeys
from clearhead.core.config import LEARNED_BIASES, StackSpec
from clearhead.core.config.kinds import Kind, Strided
from clearhead.core.steps import Pass, Step, linear_step, norm_step
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.blocks import plain_blocks
from clearhead.variants.gathered import attend_blocks


class Attention(nn.Module):
    """Multi-head attention; grouped-query or multi-query with fewer key/value heads."""

    def __init__(self, spec: StackSpec, name: str) -> None:
        super().__init__()
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
        self.gate = nn.Linear(spec.d_model, width, bias=spec.qkv_bias) if spec.attention_gate else None
        self.q_norm = norms.make_norm(spec.norm, q_width) if normed else None
        self.k_norm = norms.make_norm(spec.norm, k_width) if normed else None

    def forward(
        self,
        x: Tensor,
        view: masks.View,
        memory: Tensor | None = None,
        cache: LayerKeys | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]; cross-attention reads `memory` [B, S, D]."""
        B, T, _ = x.shape
        known = isinstance(cache, CrossKeys) and cache.k is not None  # an earlier call has read the memory
        if cache is not None and known:
            q, (k, v) = self.split("q", self.q(x), self.n_heads, self.q_norm, tap), cache.read()
        else:
            q, k, v = self.project(x, x if memory is None else memory)
            q, k, v = tap.step("q", q), tap.step("k", k), tap.step("v", v)
            q = self.split("q", q, self.n_heads, self.q_norm, tap)  # B H T E
            k = self.split("k", k, self.n_kv_heads, self.k_norm, tap)  # B K S E
            v = self.split("v", v, self.n_kv_heads, None, tap)
        if view.rotary is not None:
            q = tap.step("q_rotated", positions.rotate(q, view.rotary, self.layout))
            k = tap.step("k_rotated", positions.rotate(k, view.rotary, self.layout))
        q, k, v = tap("q", q), tap("k", k), tap("v", v)
        z = self.attend(q, k, v, view, None if known else cache, tap, x)  # B H T E
        if self.gate is not None:
            gate = tap.step("gate", self.gate(x)).view(B, T, self.n_heads, -1).transpose(1, 2)
            z = tap.step("mixed", z) * gate.sigmoid()
        z = tap("z", z).transpose(1, 2).reshape(B, T, self.n_heads * self.d_value)  # B T H·E
        return tap("out", self.out(tap.step("concat", z)))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: masks.View, cache: LayerKeys | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """Attend with queries [B, H, T, E], made of x [B, T, D], to keys and values [B, K, S, E]."""
        if cache is not None:
            k, v = cache.update(k, v)
        kernel, dropout = self.kernel, self.dropout if self.training else 0.0
        if tap.wants("scores", "pattern"):
            kernel = "eager"
        heads = list(self.heads) if self.pruned else None
        if view.blocks is not None and kernel != "eager":
            return attend_blocks(
                q, k, v, view.blocks, self.scale,
                softcap=self.softcap, sink=self.sinks(), dropout=dropout, heads=heads,
            )  # fmt: skip
        view = view.spelled_out()
        bias = view.bias
        if bias is not None and heads is not None and bias.shape[1] > 1:
            bias = bias[:, heads]
        return KERNELS[kernel](
            q, k, v, view.mask, bias, self.scale, causal=view.causal, softcap=self.softcap,
            sink=self.sinks(), dropout=dropout, tap=tap,
        )  # fmt: skip

    def sinks(self) -> Tensor | None:
        """Return the score of each head's sink [H], where there is one."""
        return self.sink

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, T, D] to queries [B, T, H·E], `source` [B, S, D] to keys and values [B, S, K·E]."""
        return self.q(x), self.k(source), self.v(source)

    def head_shares(self) -> dict[str, tuple[int, bool, int]]:
        """Return how heads share out each weight: its axis, if by key/value heads, the width of a head."""
        E, Ev = self.d_head, self.d_value
        inputs = {"q": (0, False, E), "k": (0, True, E), "v": (0, True, Ev), "gate": (0, False, Ev)}
        shares = {f"{name}.{kind}": inputs[name] for name in inputs for kind in ("weight", "bias")}
        return {**shares, "out.weight": (1, False, Ev), "sink": (0, False, 1)}

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


def attention_steps(
    spec: StackSpec,
    run: Pass,
    name: str,
    T: int,
    S: int,
    sees: Kind,
    kind: Literal["attention", "cross"],
) -> Iterator[Step]:
    """Yield the steps of one attention of T queries and S keys."""
    B, D, own = run.batch, spec.d_model, kind == "attention"
    blocks = plain_blocks(sees, T, spec.causal) if own else None
    H, K, E, Ev = len(spec.heads_of(name)), spec.kv_heads_of(name), spec.d_head, spec.d_value
    eager = spec.attention_softcap is not None or spec.attention_sink
    fused = not eager and Ev == E and not (own and spec.positions in LEARNED_BIASES)
    repeated = not fused and not eager  # PyTorch's unfused path copies and widens all, for each head
    for projection, rows, heads, width in (("q", B * T, H, E), ("k", B * S, K, E), ("v", B * S, K, Ev)):
        kept = rows * width * (H * run.wide if repeated else heads * run.size) if blocks is None else 0
        if not own and projection != "q" and run.half:
            kept += rows * D * run.size  # its own copy of the source
        yield linear_step(
            f"{name}.{projection}",
            kind,
            rows,
            D,
            heads * width,
            spec.key_bias if projection == "k" else spec.qkv_bias,
            kept=kept,
            joined=own and sees.shares,
        )
        if projection != "v" and spec.qk_norm != "none":
            groups = 1 if spec.qk_norm == "full" else heads
            yield norm_step(f"{name}.{projection}_norm", spec.norm, run, rows, heads * E // groups, groups)
    # Values are a view of the joined product and keep all of it: q and k too, as they were before rotation.
    changed = spec.positions == "rope" if spec.qk_norm == "none" else run.half
    pinned = B * T * (H + K) * E * run.size if own and changed and fused and sees.shares else 0
    # Partly rotated queries are concatenated. The answer takes on their layout and, ungated, is copied again.
    partly = fused and own and spec.positions == "rope" and spec.d_rotary < E and not spec.attention_gate
    copies = 1 + partly
    kept, answer = attend_bytes(spec, run, own, H, T, S, sees, fused), B * T * H * Ev * run.size
    asking, asked = H // K * T, S
    if blocks is not None:  # gathered keys and values, queries and answers by blocks, log-sums, masks
        size, count, whole = blocks  # of queries, so many see all keys
        queries, met = (T + size - 1) // size * size, size * count
        asking, asked = H // K, queries * met + whole * S  # pairs of the two
        gathered = queries // size * met * K * (E + Ev) * run.size
        mask = (B * queries * met + whole * S) * (run.size if not eager else 1)
        kept = B * (gathered + (queries + whole) * H * ((E + Ev) * run.size + 4)) + mask
        if isinstance(sees, Strided):  # scores, their exponentials, the pattern, and both answers with sums
            kept += B * H * (asked * (2 * run.wide + run.size) + 2 * T * (Ev + 2) * run.wide)
        if whole:  # they read all of q, k and v
            kept += B * T * (H * E + K * (E + Ev)) * run.size
        else:
            pinned = 0
    yield Step(f"{name}.scores", kind, m=asking, n=asked, k=E, count=B * K, kept=kept)
    yield Step(f"{name}.z", kind, m=asking, n=Ev, k=asked, count=B * K, kept=copies * answer + pinned)
    if spec.attention_sink:
        yield Step(f"{name}.sink", kind, H)
    if spec.attention_gate:  # its sigmoid, the answer before it, and in half precision its own input
        kept = 2 * answer + (B * T * D * run.size if run.half else 0)
        yield linear_step(f"{name}.gate", kind, B * T, D, H * Ev, spec.qkv_bias, kept=kept)
    yield linear_step(f"{name}.out", kind, B * T, H * Ev, D, spec.attention_out_bias)
