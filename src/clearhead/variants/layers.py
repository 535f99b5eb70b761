"""Attention with weights or formulas of its own, as modules of a block.

Each is called as `Attention` is. `attention_for` returns the module of a layer by its kind.

Shapes: B batch, T length, D model, H heads, K key/value heads, E head width, R mixtures, F features,
G global tokens of a row.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.attention import Attention, attention_steps
from clearhead.core.cache import LayerKeys, StateKeys
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import GatedDeltaKind, GlobalKind, Kind, LinearKind, LowRank
from clearhead.core.steps import Pass, Step
from clearhead.core.taps import SILENT, Tap
from clearhead.errors import InputError, refuse
from clearhead.variants.disentangled import DisentangledAttention, disentangled_steps
from clearhead.variants.everywhere import GlobalAttention, global_steps, tokens_of
from clearhead.variants.gated_delta import GatedDelta, GatedDeltaState, gated_delta_steps
from clearhead.variants.linear import (
    CHUNK,
    FEATURES,
    GROUP,
    Features,
    LinearState,
    attend_linear,
    orthogonal_features,
)


class LinearAttention(Attention):
    """Attention whose softmax is a product of features: the keys add up to a state of constant size."""

    def __init__(self, spec: StackSpec, name: str, kind: LinearKind) -> None:
        super().__init__(spec, name)
        self.features, self.seed, self.causal = kind.features, kind.seed, spec.causal
        self.count = spec.n_features(kind)
        self._rows: Tensor | None = None  # F E: random features of the seed, drawn when first used

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: masks.View, cache: LayerKeys | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """Attend with queries [B, H, T, E] to keys and values [B, K, T, E], and to the state."""
        tokens = tokens_of(view)
        fq, fk = self.mapped(q), self.mapped(k)
        keys = cache if isinstance(cache, StateKeys) else None
        state = LinearState(*keys.state) if keys is not None and keys.state else None
        documents = None if tokens.documents is None else (tokens.documents, tokens.documents)
        if state is not None and state.document is None and documents is not None:
            raise InputError("this cache was filled without documents: name them from its first call on")
        attend = partial(
            attend_linear, fq.values, fk.values,
            causal=self.causal, log_scale=fk.log_scale, real=tokens.real, documents=documents,
        )  # fmt: skip
        z, after = attend(v, state=state)
        if keys is not None and after is not None:
            keys.keep(*(part for part in after if part is not None))
        if not tap.wants("pattern"):
            return z
        # Values that tell the keys apart give the share of each; earlier tokens are in the state, unnamed.
        B, K, S, _ = v.shape
        if state is not None:
            state = state._replace(sums=nnf.pad(state.sums[..., -1:], (S, 0)))
        apart = torch.eye(S, dtype=v.dtype, device=v.device).expand(B, K, S, S)
        pattern = attend(apart, state=state, chunk=S)[0]  # B H T S
        shown = tap("pattern", pattern)
        if shown is pattern:
            return z
        return z + ((shown - pattern).reshape(B, K, -1, S) @ v).reshape(z.shape)

    def mapped(self, x: Tensor) -> Features:
        """Return the features of queries or keys: [B, H, T, E] -> [B, H, T, F]."""
        if self.features != "favor":
            return FEATURES[self.features](x)
        if self._rows is None or self._rows.device != x.device:
            with torch.inference_mode(False):
                self._rows = orthogonal_features(self.count, self.d_head, self.seed).to(x.device)
        return FEATURES[self.features](x, self._rows, self.scale)


class LowRankAttention(Attention):
    """Attention to R mixtures of the keys, with learned weights for each position (Linformer)."""

    def __init__(self, spec: StackSpec, name: str, kind: LowRank) -> None:
        super().__init__(spec, name)
        shape = (spec.max_positions, kind.rank)
        self.k_mix = nn.Parameter(torch.randn(shape) / math.sqrt(kind.rank))
        self.v_mix = nn.Parameter(torch.randn(shape) / math.sqrt(kind.rank))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: masks.View, cache: LayerKeys | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """Attend with queries [B, H, T, E] to mixtures of keys and values [B, K, T, E]."""
        tokens = tokens_of(view)
        refuse(
            tokens.documents is not None,
            "low-rank attention mixes all tokens of a row, and packed documents must not meet: pad them",
        )

        def mixed(x: Tensor, weights: Tensor) -> Tensor:
            """[B, K, T, E] -> [B, K, R, E]."""
            shares = weights[tokens.positions]  # B|1 T R
            if tokens.real is not None:
                shares = shares.masked_fill(~tokens.real[..., None], 0.0)
            return shares.transpose(1, 2)[:, None] @ x

        k, v = tap.step("k_mix", mixed(k, self.k_mix)), tap.step("v_mix", mixed(v, self.v_mix))
        return super().attend(q, k, v, masks.View(), None, tap, x)


class DeltaLayer(GatedDelta):
    """A layer of the gated delta rule in a block."""

    def __init__(self, spec: StackSpec, name: str, kind: GatedDeltaKind) -> None:
        super().__init__(spec.d_model, *spec.delta_sizes(kind), kernel=kind.kernel, eps=spec.norm.eps)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        view: masks.View,
        memory: Tensor | None = None,
        cache: LayerKeys | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        tokens, held = tokens_of(view), GatedDeltaState()
        keys = cache if isinstance(cache, StateKeys) else None
        if keys is not None and keys.state:
            held.memory, held.tail, *document = keys.state
            held.document = document[0] if document else None
        y = super().forward(x, tokens.real, tokens.documents, held if keys is not None else None, tap)
        if keys is not None and held.memory is not None and held.tail is not None:
            keys.keep(held.memory, held.tail, *(() if held.document is None else (held.document,)))
        return y


def attention_for(spec: StackSpec, name: str, layer: int) -> nn.Module:
    """Build the self-attention of a layer."""
    kind = spec.kinds[layer]
    match kind:
        case GlobalKind():
            return GlobalAttention(spec, name)
        case LinearKind():
            return LinearAttention(spec, name, kind)
        case LowRank():
            return LowRankAttention(spec, name, kind)
        case GatedDeltaKind():
            return DeltaLayer(spec, name, kind)
        case _:
            distances = spec.positions == "disentangled"
            return DisentangledAttention(spec, name) if distances else Attention(spec, name)


def kind_steps(spec: StackSpec, run: Pass, layer: int, T: int) -> Iterator[Step]:
    """Yield the steps of the self-attention of a layer on rows of T tokens."""
    name, kind = f"{spec.prefix}blocks.{layer}.attention", spec.kinds[layer]
    match kind:
        case GatedDeltaKind():
            yield from gated_delta_steps(run, name, T, spec.d_model, *spec.delta_sizes(kind), kind.kernel)
        case GlobalKind():
            yield from global_steps(spec, run, name, T, kind)
        case LinearKind():
            yield from _in_place_of_scores(
                spec, run, name, T, kind, linear_products(spec, run, name, T, kind)
            )
        case LowRank():
            yield from _in_place_of_scores(
                spec, run, name, T, kind, low_rank_products(spec, run, name, T, kind)
            )
        case _ if spec.positions == "disentangled":
            yield from disentangled_steps(spec, run, name, T, kind)
        case _:
            yield from attention_steps(spec, run, name, T, T, kind, "attention")


def _in_place_of_scores(
    spec: StackSpec, run: Pass, name: str, T: int, kind: Kind, products: Iterator[Step]
) -> Iterator[Step]:
    """Yield the steps of an attention of T tokens, with other products for scores and pattern."""
    for step in attention_steps(spec, run, name, T, T, kind, "attention"):
        if step.name == f"{name}.scores":
            yield from products
        elif step.name == f"{name}.z":
            yield replace(step, m=0, n=0, k=0)
        else:
            yield step


def linear_products(spec: StackSpec, run: Pass, name: str, T: int, kind: LinearKind) -> Iterator[Step]:
    """Yield the products of linear attention: chunk by chunk in a decoder, two for all in an encoder."""
    H, K, F, V = len(spec.heads_of(name)), spec.kv_heads_of(name), spec.n_features(kind), spec.d_value + 1
    if kind.features == "favor":
        each = run.batch * (H + K)  # their rows have no gradient
        yield Step(f"{name}.features", "attention", m=T, n=F, k=spec.d_head, count=each, gradients=1)
    C = min(CHUNK, T) if spec.causal else T
    N = (T + C - 1) // C
    features, values = run.batch * N * C * (H + K) * F, run.batch * N * C * (H + K) * V
    states = run.batch * K * (N + spec.causal) * F * V
    square = run.batch * N * H * C * C if spec.causal else 0
    # Favor scales features and pairs, and keeps both factors.
    maps, pairs = {"elu": (3, 1), "relu": (1, 1), "favor": (2, 3)}[kind.features]
    kept = (maps * features + values + states + pairs * square) * run.wide
    yield Step(f"{name}.state", "attention", m=F, n=V, k=C, count=run.batch * K * N, kept=kept)
    yield Step(f"{name}.read", "attention", m=H // K * C, n=V, k=F, count=run.batch * K * N)
    for group in (min(GROUP, N - first) for first in range(0, N if spec.causal and pairs > 1 else 0, GROUP)):
        yield Step(
            f"{name}.carried", "attention", m=group, n=F * V, k=group + 1, count=run.batch * K, gradients=1
        )
    if spec.causal:
        yield Step(f"{name}.scores", "attention", m=H // K * C, n=C, k=F, count=run.batch * K * N)
        yield Step(f"{name}.within", "attention", m=H // K * C, n=V, k=C, count=run.batch * K * N)


def low_rank_products(spec: StackSpec, run: Pass, name: str, T: int, kind: LowRank) -> Iterator[Step]:
    """Yield the mixing of keys and values, and the attention to the mixtures."""
    B, H, K, E, Ev = run.batch, len(spec.heads_of(name)), spec.kv_heads_of(name), spec.d_head, spec.d_value
    R, weights = kind.rank, spec.max_positions * kind.rank
    for part, width in (("k_mix", E), ("v_mix", Ev)):
        kept = (T * R + B * K * R * width) * run.size
        yield Step(f"{name}.{part}", "attention", weights, m=R, n=width, k=T, count=B * K, kept=kept)
    yield Step(f"{name}.scores", "attention", m=H // K * T, n=R, k=E, count=B * K, kept=B * H * T * 4)
    yield Step(f"{name}.mixed", "attention", m=H // K * T, n=Ev, k=R, count=B * K)
