"""Multi-head latent attention: keys and values of all heads are made of one narrow latent a token (DeepSeek).

    c = norm(W_down x)         the latent, of width C
    k = [W_k c ; rope(W_r x)]  the key of a head: columns of its own, then R that all heads share and rotate
    v = W_v c
    q = [q ; rope(q)]          of the token, or of a latent of its own

A cache keeps c and the shared columns, C + R numbers a token in place of H · (E + Ev). Two forms give the
same numbers. The naive form makes keys and values of every latent, as above. The absorbed form moves W_k to
the queries, (W_kᵀ q) · c = q · (W_k c), and W_v behind the sum of latents: one head of keys and values serves
all queries. It is cheaper where few queries meet many latents that a cache has kept, as in each decode step.

With an indexer (DeepSeek-V3.2), each query attends to the keys that score best by small heads of their own:

    score = Σ_h g_h · relu(q_h · k) / sqrt(I · H')
    q made of the latent of queries, k = layernorm(W_i x), g = W_g x

The keys k are cached next to the shared columns. The others are masked; where there are no
more keys than that, this is full attention. The indexer has no gradient: training leaves it as it is.

Shapes: B batch, T query length, S key length, D model, H heads, E head width, Ev width of a value head,
R columns of a head that rotate, C rank of the latent, I width of the indexer, H' its heads.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.core import masks, positions
from clearhead.core.attention import Attention
from clearhead.core.cache import LayerKV
from clearhead.core.config import NormSpec, StackSpec
from clearhead.core.config.kinds import Kind
from clearhead.core.norms import LayerNorm, RMSNorm
from clearhead.core.taps import SILENT, Tap
from clearhead.errors import refuse
from clearhead.variants.kinds import Latent
from clearhead.variants.steps import Pass, Step, attention_steps, linear_step, norm_step

EPS = 1e-6  # of the norms on latents, whatever that of the model


class LatentAttention(Attention):
    """Attention whose keys and values are made of latents; see `Latent`."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind) -> None:
        assert isinstance(kind, Latent)
        super().__init__(spec, name)
        H, D, C, low = self.n_heads, spec.d_model, kind.rank, kind.query_rank
        self.n_kv_heads = 1  # as a cache keeps them
        self.d_rotary, self.d_own = spec.d_rotary, self.d_head - spec.d_rotary
        self.q_down = nn.Linear(D, low, bias=spec.qkv_bias) if low else None
        self.q_down_norm = RMSNorm(low, EPS, bias=False, unit_offset=False) if low else None
        self.kv_down = nn.Linear(D, C, bias=spec.qkv_bias)
        self.kv_down_norm = RMSNorm(C, EPS, bias=False, unit_offset=False)
        self.k_shared = nn.Linear(D, self.d_rotary, bias=spec.key_bias)
        self.q = nn.Linear(low or D, H * self.d_head, bias=False)
        self.k = nn.Linear(C, H * self.d_own, bias=False)
        self.v = nn.Linear(C, H * self.d_value, bias=False)
        self.top, self.index_heads = kind.top, kind.index_heads
        if kind.top:
            self.index_q = nn.Linear(low, kind.index_heads * kind.index_width, bias=False)
            self.index_k = nn.Linear(D, kind.index_width, bias=False)
            self.index_norm = LayerNorm(kind.index_width, EPS, bias=True, unit_offset=False)
            self.index_weights = nn.Linear(D, kind.index_heads, bias=False)
            for part in (self.index_q, self.index_k, self.index_norm, self.index_weights):
                part.requires_grad_(False)

    def forward(
        self,
        x: Tensor,
        view: masks.View,
        memory: Tensor | None = None,
        layer_kv: LayerKV | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        low = self.low(x, tap)
        q, k, v = self.project(x, x, tap, low)
        q = self.split("q", q, self.n_heads, None, tap)  # B H T E
        k, latent = k[:, None], v[:, None]  # B 1 T R, B 1 T C
        if view.rotary is not None:
            own, turned = self._parts(q)
            turned = positions.rotate(turned, view.rotary, self.layout)
            q = tap.step("q_rotated", torch.cat([own, turned], -1))
            k = tap.step("k_rotated", positions.rotate(k, view.rotary, self.layout))
        indexed = x
        if self.top:
            indexed, key = self.index(x, low, view)
            k = torch.cat([k, key], -1)  # B 1 T R+I
        z = view.attended(self.attend, tap("q", q), k, latent, layer_kv, tap, indexed)  # B H T Ev
        return self.output(z, x, tap)

    @torch.no_grad()
    def index(self, x: Tensor, low: Tensor, view: masks.View) -> tuple[Tensor, Tensor]:
        """Return the queries of the indexer with the weights of its heads, [B, T, H'·I+H'], and its keys."""
        q = self.index_q(low).unflatten(-1, (self.index_heads, -1)).transpose(1, 2)  # B H' T I
        k = self.index_norm(self.index_k(x))[:, None]  # B 1 T I
        if (rotary := view.rotary) is not None:
            if self.layout == "interleaved":  # the indexer pairs halves, whatever the heads do
                rotary = positions.Rotary(*(torch.cat([x[..., ::2]] * 2, -1) for x in rotary))
            q, k = (positions.rotate(part, rotary, "half") for part in (q, k))
        return torch.cat([q.transpose(1, 2).flatten(2), self.index_weights(x)], -1), k

    @torch.no_grad()
    def chosen(self, indexed: Tensor, keys: Tensor, view: masks.View) -> masks.View:
        """Return the view in which each query sees the keys [B, 1, S, I] that score best for it alone."""
        T, (S, width) = indexed.shape[1], keys.shape[2:]
        if self.top >= S:
            return view
        q, weights = indexed[..., : -self.index_heads], indexed[..., -self.index_heads :]
        q = q.reshape(*q.shape[:2], self.index_heads, -1).transpose(1, 2)
        each = (q.float() @ keys.float().mT * width**-0.5).relu()  # B H' T S
        weights = weights.float() * self.index_heads**-0.5
        scores = (weights[:, :, None] @ each.transpose(1, 2))[:, :, 0]  # B T S
        view = view.spelled_out()
        mask = view.mask
        if view.causal:
            mask = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril()[None, None]
        scores = scores if mask is None else scores.masked_fill(~mask[:, 0], float("-inf"))
        # Of equal scores the first count, however many queries come at a time.
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., : self.top]
        seen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)[:, None]
        return replace(view, mask=seen if mask is None else seen & mask, causal=False)

    def low(self, x: Tensor, tap: Tap) -> Tensor:
        """Return what queries are made of: a latent of x [B, T, D], or x itself."""
        if self.q_down is None or self.q_down_norm is None:
            return x
        return tap.step("q_down_norm", self.q_down_norm(tap.step("q_down", self.q_down(x))))

    def project(
        self, x: Tensor, source: Tensor, tap: Tap = SILENT, low: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [B, T, D] to queries [B, T, H·E], the shared key [B, T, R] and the latent [B, T, C].

        `low`: what queries are made of, where it is known already.
        """
        q = tap.step("q", self.q(self.low(x, tap) if low is None else low))
        latent = tap.step("kv_down_norm", self.kv_down_norm(tap.step("kv_down", self.kv_down(source))))
        return q, tap.step("k_shared", self.k_shared(source)), latent

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: masks.View, layer_kv: LayerKV | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """Attend with queries [B, H, T, E] to shared keys [B, 1, S, R] and latents [B, 1, S, C].

        With an indexer, the keys are [B, 1, S, R+I], and `x` is what it asks with.
        """
        made, new = None, k
        if layer_kv is not None:
            k, latents = layer_kv.update(k, v)
        else:
            latents = v
        if self.top:
            view = self.chosen(x, k[..., self.d_rotary :], view)
            new, k = new[..., : self.d_rotary], k[..., : self.d_rotary]
        if tap.wants("k", "v"):  # of the new tokens, as in other kinds of attention
            keys, values = self.made(new, v)
            made = tap("k", keys.clone()), tap("v", values.clone())
            refuse(
                layer_kv is not None and not (torch.equal(made[0], keys) and torch.equal(made[1], values)),
                "edits of k and v reach no later token, since a cache of latent attention keeps no keys: "
                "edit a pass without a cache",
            )
        if layer_kv is not None:
            made, v = None, latents
        if made is None and self._absorbs(q.shape[2], k.shape[2]):
            own, turned = self._parts(q)
            q = torch.cat([own @ self._weight(self.k), turned], -1)  # B H T C+R
            z = super().attend(q, torch.cat([v, k], -1), v, view, None, tap, x)  # B H T C
            return z @ self._weight(self.v).mT
        return super().attend(q, *(made or self.made(k, v)), view, None, tap, x)

    def made(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Make the keys [B, H, S, E] and values [B, H, S, Ev] of each head of what a cache keeps."""
        own, values = (layer(v[:, 0]).unflatten(-1, (self.n_heads, -1)) for layer in (self.k, self.v))
        own = own.transpose(1, 2)
        return torch.cat([own, k.expand(-1, self.n_heads, -1, -1)], -1), values.transpose(1, 2)

    def _absorbs(self, T: int, S: int) -> bool:
        """Return whether T queries meet S kept latents more cheaply than these become keys and values."""
        C, R, E, Ev = self.v.in_features, self.d_rotary, self.d_head, self.d_value
        readable = all(isinstance(getattr(layer, "weight", None), Tensor) for layer in (self.k, self.v))
        if not readable or torch.compiler.is_exporting():  # a graph of any length has one form
            return False
        return S > T and T * (2 * C + R - E - Ev) < C * (self.d_own + Ev)

    def _weight(self, layer: nn.Module) -> Tensor:
        """Return the weight of each head, dequantized where it has to be: [H, N, C]."""
        weight = cast(Tensor, layer.weight)
        return weight.view(self.n_heads, -1, weight.shape[1])

    def _parts(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of queries that meet those of each head, and the ones that rotate."""
        return q[..., : self.d_own], q[..., self.d_own :]

    def head_axes(self) -> dict[str, tuple[int, bool, int]]:
        """Return the axes that heads split: those of parts computed from latents."""
        axes = {name: axis for name, axis in super().head_axes().items() if name[0] not in "kv"}
        return {**axes, "k.weight": (0, False, self.d_own), "v.weight": (0, False, self.d_value)}

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps of the naive form on rows of T tokens."""
        assert isinstance(kind, Latent)
        H, D, R, C = len(spec.heads_of(name)), spec.d_model, spec.d_rotary, kind.rank
        rows, size, low, norm = (
            run.batch * T,
            run.size,
            kind.query_rank,
            NormSpec("rmsnorm", EPS, False, False),
        )
        copied = rows * D * size if run.half else 0  # the input, once more for each matmul
        read: dict[str, tuple[int, int]] = {  # by the part computed from it: its width, and that of a head
            "q": (low or D, spec.d_head),
            "k": (C, spec.d_head - R),
            "v": (C, spec.d_value),
        }
        if low:
            yield linear_step(f"{name}.q_down", "attention", rows, D, low, spec.qkv_bias)
            yield norm_step(f"{name}.q_down_norm", norm, run, rows, low)
            yield Step(f"{name}.q_latent", "attention", kept=rows * low * size)
        yield linear_step(f"{name}.kv_down", "attention", rows, D, C, spec.qkv_bias, kept=copied)
        yield norm_step(f"{name}.kv_down_norm", norm, run, rows, C)
        yield Step(f"{name}.latent", "attention", kept=rows * C * size)
        yield linear_step(f"{name}.k_shared", "attention", rows, D, R, spec.key_bias, kept=copied)
        if kind.top:
            width, heads = kind.index_width, kind.index_heads
            for part, read_from, out in (("q", low, heads * width), ("k", D, width), ("weights", D, heads)):
                step = linear_step(f"{name}.index_{part}", "attention", rows, read_from, out, False)
                yield replace(step, gradients=0)
            yield Step(f"{name}.index_norm", "norms", 2 * width)
            if kind.top < T:
                scores = Step(f"{name}.index_scores", "attention", m=heads * T, n=T, k=width, count=run.batch)
                yield replace(scores, gradients=0)
                yield Step(f"{name}.index_sum", "attention", m=1, n=T, k=heads, count=rows, gradients=0)
        for step in attention_steps(spec, run, name, T, T, kind, "attention"):
            part = step.name.removeprefix(f"{name}.")
            if part in read:
                width, each = read[part]
                yield linear_step(step.name, "attention", rows, width, H * each, False, kept=step.kept)
            else:
                yield step
