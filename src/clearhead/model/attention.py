"""Attention: the module that owns the projections. The math of attending is in `attend`, what may be seen in `masks`.

Self-attention and cross-attention are the same module: cross-attention takes its keys and values from `memory`.

Shapes: B batch, T query length, S key length, D model, H heads, K key/value heads, E head width.
"""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.config import ModelConfig, StackPlan
from clearhead.model.attend import KERNELS
from clearhead.model.cache import CrossKeys, LayerKeys
from clearhead.model.masks import View
from clearhead.model.norms import make_norm
from clearhead.model.positions import rotate
from clearhead.model.taps import SILENT, Tap


class Attention(nn.Module):
    """Multi-head attention, grouped or multi-query where there are fewer key/value heads."""

    def __init__(self, config: ModelConfig, plan: StackPlan, name: str) -> None:
        super().__init__()
        self.heads = config.kept_heads(
            name, plan.n_heads
        )  # which of the config's heads these are, after pruning
        self.pruned = len(self.heads) < plan.n_heads
        self.n_heads = len(self.heads)
        self.n_kv_heads = self.n_heads * plan.n_kv_heads // plan.n_heads
        self.d_head, self.d_value = plan.d_head, plan.d_value
        self.scale, self.softcap = plan.attention_scale, config.attention_softcap
        self.dropout = config.attention_dropout or 0.0
        self.layout = config.rope_layout
        self.kernel = "fused"

        self.q = nn.Linear(config.d_model, self.n_heads * self.d_head, bias=bool(config.qkv_bias))
        self.k = nn.Linear(config.d_model, self.n_kv_heads * self.d_head, bias=bool(config.qkv_bias))
        self.v = nn.Linear(config.d_model, self.n_kv_heads * self.d_value, bias=bool(config.qkv_bias))
        self.out = nn.Linear(
            self.n_heads * self.d_value, config.d_model, bias=bool(config.attention_out_bias)
        )
        self.norm_over = config.qk_norm
        each, whole = config.qk_norm == "head", config.qk_norm == "full"
        self.q_norm = (
            make_norm(config, self.q.out_features if whole else self.d_head) if each or whole else None
        )
        self.k_norm = (
            make_norm(config, self.k.out_features if whole else self.d_head) if each or whole else None
        )

    def forward(
        self,
        x: Tensor,
        view: View,
        memory: Tensor | None = None,
        cache: LayerKeys | CrossKeys | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]; `memory` [B, S, D] is what cross-attention reads."""
        B, T, _ = x.shape
        if isinstance(cache, CrossKeys) and cache.filled:
            q, (k, v) = self._heads(self.q(x), self.n_heads, self.q_norm), cache.read()
            update = None
        else:
            q, k, v = self.project(x, x if memory is None else memory)
            q = self._heads(q, self.n_heads, self.q_norm)  # B H T E
            k = self._heads(k, self.n_kv_heads, self.k_norm)  # B K S E
            v = self._heads(v, self.n_kv_heads, None)
            update = cache.update if cache is not None else None
        if view.rotary is not None:
            q, k = rotate(q, view.rotary, self.layout), rotate(k, view.rotary, self.layout)
        q, k, v = tap("q", q), tap("k", k), tap("v", v)
        if update is not None:
            k, v = update(k, v)

        watched = tap.wants("scores", "pattern")
        attend = KERNELS["eager" if watched else self.kernel]
        bias = view.bias
        if bias is not None and self.pruned and bias.shape[1] > 1:
            bias = bias[:, list(self.heads)]
        dropout = self.dropout if self.training else 0.0
        z = attend(
            q,
            k,
            v,
            view.mask,
            bias,
            self.scale,
            causal=view.causal,
            softcap=self.softcap,
            dropout=dropout,
            tap=tap,
        )
        z = tap("z", z)  # B H T E
        return tap("out", self.out(z.transpose(1, 2).reshape(B, T, self.n_heads * self.d_value)))

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x [B, T, D], keys and values of `source` [B, S, D], heads still side by side: [B, T, H·E] and so on."""
        return self.q(x), self.k(source), self.v(source)

    def _heads(self, x: Tensor, n_heads: int, norm: nn.Module | None) -> Tensor:
        """Split heads, with the norm over all of them or over each: [B, T, heads·width] -> [B, heads, T, width]."""
        if norm is not None and self.norm_over == "full":
            x = norm(x)
        x = x.view(*x.shape[:2], n_heads, -1)
        if norm is not None and self.norm_over == "head":
            x = norm(x)
        return x.transpose(1, 2)
