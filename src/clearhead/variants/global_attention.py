"""Attention with global tokens, which see everything and are seen by everything (Longformer).

Shapes: B batch, T length, D model, H heads, K key/value heads, E head width, G global tokens of a row.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks, positions
from clearhead.core.attention import Attention, eager, fused, of_heads
from clearhead.core.cache import LayerKV
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.block_attention import BlockPlan
from clearhead.variants.blocks import plain_blocks
from clearhead.variants.kinds import GlobalKind
from clearhead.variants.steps import Pass, Step, attention_steps, linear_step


class GlobalAttention(Attention):
    """Attention in which global tokens see all tokens, through projections of their own (Longformer)."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind = FULL) -> None:
        super().__init__(spec, name, kind)
        self.q_global, self.k_global, self.v_global = (
            nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            for layer in (self.q, self.k, self.v)
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: masks.View, layer_kv: LayerKV | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """Attend with queries [B, H, T, E] to keys and values [B, K, T, E]; global ones by projecting x."""
        marked, plan = view.described().globals, view.blocks
        if marked is None:
            return super().attend(q, k, v, view, layer_kv, tap, x)
        if not isinstance(plan, BlockPlan) or self.kernel == "eager" or tap.wants("scores", "pattern"):
            # Each query meets the keys of its own projections: the other half of it is zero.
            mine = marked[:, None, :, None]  # B|1 1 T 1
            q_own, k_own, v_own = self._projected(x, view.rotary, x, view, tap)
            q = torch.cat([q.masked_fill(mine, 0.0), q_own.masked_fill(~mine, 0.0)], dim=-1)  # B H T 2E
            k, v = torch.cat([k, k_own], dim=-1), torch.cat([v, v_own], dim=-1)
            ordinary, own = super().attend(q, k, v, view, layer_kv, tap, x).chunk(2, dim=-1)
            return torch.where(mine, own, ordinary)
        z = super().attend(q, k, v, replace(view, blocks=replace(plan, globals=None)), layer_kv, tap, x)
        if plan.globals is None:
            return z
        slots = plan.globals.expand(x.shape[0], -1)  # B G
        bias = of_heads(plan.global_bias, list(self.heads))
        at, asking = slots[:, None, :, None], x.take_along_dim(slots[:, :, None], 1)  # B G D
        rotary = view.rotary and positions.Rotary(*(part.take_along_dim(at, 2) for part in view.rotary))
        how: dict[str, Any] = {
            "mask": plan.global_mask, "bias": bias, "softcap": self.softcap, "sink": self.sink,
            "dropout": self.dropout if self.training else 0.0,
        }  # fmt: skip
        plain = rotary is None and self.k_norm is None  # keys are linear in x, by plain weights
        plain &= all(type(layer) is nn.Linear for layer in (self.k_global, self.v_global))
        if plain and self.n_heads * slots.shape[1] < self.k_global.out_features:
            whole = self._absorbed(asking, x, how)
        else:
            whole = fused(*self._projected(asking, rotary, x, view, tap), scale=self.scale, **how)
        # A row with fewer global tokens than another has slots of others here, which keep what they have.
        mine = marked.take_along_dim(slots, 1)[:, None, :, None]
        return z.scatter(2, at.expand_as(whole), torch.where(mine, whole, z.take_along_dim(at, 2)))

    def _absorbed(self, asking: Tensor, x: Tensor, how: dict[str, Any]) -> Tensor:
        """Attend with tokens [B, G, D] to x [B, T, D], whose keys and values are not computed: [B, H, G, E].

        Since q · (W x + b) = (Wᵀ q) · x + q · b, a few queries absorb the key projection. Values are
        projected once the tokens are mixed.
        """

        def rows(layer: nn.Linear) -> Tensor:
            """Return the weights of each head with the bias as a column more: [H, E, D+1]."""
            bias = layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
            both = torch.cat([layer.weight, bias[:, None]], dim=1).view(self.n_kv_heads, -1, x.shape[2] + 1)
            return both.repeat_interleave(self.n_heads // self.n_kv_heads, 0)

        q = self.split("q_global", self.q_global(asking), self.n_heads, self.q_norm, SILENT)
        source = nnf.pad(x, (0, 1), value=1.0)[:, None]  # B 1 T D+1: one head of keys for all, and of values
        scale = self.d_head**-0.5 if self.scale is None else self.scale
        mixed = eager(q @ rows(self.k_global), source, source, scale=scale, **how)  # B H G D+1
        return mixed @ rows(self.v_global).mT

    def _projected(
        self, queries: Tensor, rotary: positions.Rotary | None, x: Tensor, view: masks.View, tap: Tap
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens [B, G, D], and their angles, to queries [B, H, G, E], and x to keys and values."""
        q, k, v = (
            self.split(f"{name}_global", tap.step(f"{name}_global", layer(source)), count, norm, tap)
            for name, layer, source, count, norm in (
                ("q", self.q_global, queries, self.n_heads, self.q_norm),
                ("k", self.k_global, x, self.n_kv_heads, self.k_norm),
                ("v", self.v_global, x, self.n_kv_heads, None),
            )
        )
        if rotary is not None and view.rotary is not None:
            q = positions.rotate(q, rotary, self.layout)
            k = positions.rotate(k, view.rotary, self.layout)
        return q, k, v

    def head_axes(self) -> dict[str, tuple[int, bool, int]]:
        """Return the same for the projections of global tokens too."""
        axes = super().head_axes()
        own = {name: axis for name, axis in axes.items() if name[0] in "qkv"}
        return {**axes, **{f"{name[0]}_global{name[1:]}": axis for name, axis in own.items()}}

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps of attention with global tokens: one in each row, or none where calls name them."""
        assert isinstance(kind, GlobalKind)
        B, D, E, Ev = run.batch, spec.d_model, spec.d_head, spec.d_value
        heads, kv_heads = len(spec.heads_of(name)), spec.kv_heads_of(name)
        dense, none = plain_blocks(kind, T, causal=False) is None, kind.tokens == "given"
        for step in attention_steps(spec, run, name, T, T, kind, "attention"):
            if step.name == f"{name}.scores":
                # Few queries are absorbed in place of all keys, where these are linear in x.
                absorbed = (
                    not dense and spec.positions != "rope" and spec.qk_norm == "none" and heads < kv_heads * E
                )
                queries, keys = T if dense else 1, 1 if absorbed else T
                for part, rows, width in (
                    ("q", B * queries, heads * E),
                    ("k", B * keys, kv_heads * E),
                    ("v", B * keys, kv_heads * Ev),
                ):
                    kept = 0 if none else rows * width * run.size
                    bias = spec.key_bias if part == "k" else spec.qkv_bias
                    own = linear_step(f"{name}.{part}_global", "attention", rows, D, width, bias, kept=kept)
                    yield replace(own, m=0) if none else own
                if not none and not dense:
                    kept = B * T * (2 * heads * run.wide + (D + 1) * run.size * absorbed)
                    k, n = (D + 1, D + 1) if absorbed else (E, Ev)
                    yield Step(f"{name}.scores_global", "attention", m=heads, n=T, k=k, count=B, kept=kept)
                    yield Step(f"{name}.z_global", "attention", m=heads, n=n, k=T, count=B)
            widened = dense and not none
            if widened and step.name == f"{name}.scores":
                step = replace(step, k=2 * step.k)
            if widened and step.name == f"{name}.z":
                step = replace(step, n=2 * step.n, kept=3 * step.kept)  # both halves, and the chosen ones
            yield step
