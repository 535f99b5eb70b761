"""Linear attention: dot products of features in place of the softmax; time and memory grow with T alone.

    out_i = Σ_j (φ(q_i) · φ(k_j)) v_j  /  Σ_j (φ(q_i) · φ(k_j))

`FEATURES` has the maps φ, `attend_linear` the formula, and `LinearAttention` is the module. Both sums are
over φ(k_j) [v_j, 1]ᵀ, a matrix of constant size. A causal pass adds up such matrices chunk by chunk, and the
last of them is the state that decoding carries on.

Shapes: B batch, H heads, K key/value heads (H a multiple of K, G = H / K), T query length, S key length,
E head width, F features, V value width and one, N chunks of C tokens, R mixtures of low-rank attention.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.cache import LayerKV
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import Kind
from clearhead.core.dtypes import uncast, wide
from clearhead.core.masks import View
from clearhead.core.taps import Tap
from clearhead.errors import InputError, refuse
from clearhead.variants.caches import LayerState
from clearhead.variants.kinds import ABSENT, LinearKind, LowRank
from clearhead.variants.steps import Pass, Step, attention_steps

CHUNK = 64  # tokens that a causal pass takes at once
GROUP = 32  # chunks whose states are computed at once
RELU_FLOOR = 1e-3  # added to relu features, as in Performer's generalised attention
FAVOR_FLOOR = 1e-12  # below any feature that counts; keeps the normaliser away from zero
SMALLEST = 1e-20  # a normaliser nearer to zero than this has no meaning: the query saw nothing


class Features(NamedTuple):
    """Features of queries or keys: `values * exp(log_scale)`, the scale one number for each token.

    The scale of a query stands above and below the fraction, so only that of the keys is used.
    """

    values: Tensor  # B H T F
    log_scale: Tensor | None = None  # B H T; None: no scale


class LinearState(NamedTuple):
    """What causal linear attention carries from one call to the next, whatever their lengths."""

    sums: Tensor  # B K F V: of features times [value, 1], divided by exp(peak)
    peak: Tensor  # B K: the largest log scale among the keys
    document: Tensor | None = None  # B: the document that the sums belong to


def elu(x: Tensor, projection: Tensor | None = None) -> Features:
    """Map x [B, H, T, E] to elu(x) + 1 (Katharopoulos et al. 2020), positive also where elu rounds to -1."""
    x = wide(x)
    return Features(x.clamp(max=0).exp() + x.relu())


def relu(x: Tensor, projection: Tensor | None = None) -> Features:
    """Map x [B, H, T, E] to relu(x) + 0.001 (Choromanski et al. 2021, generalised attention)."""
    return Features(wide(x).relu() + RELU_FLOOR)


def favor(
    x: Tensor,
    projection: Tensor,
    scale: float | None = None,
    kind: Literal["positive", "trigonometric"] = "positive",
) -> Features:
    """Map x [B, H, T, E] to random features whose dot products estimate exp(scale · q·k) (FAVOR+).

    `projection` [F, E] is drawn by `orthogonal_features`; `scale` defaults to 1/sqrt(E). Each token is
    divided by its own largest feature, and `log_scale` keeps the factor: nothing overflows, and no token's
    features depend on another's. A maximum over all keys, as others take it, depends on padding, on the batch
    and on later tokens. "trigonometric" features, twice F, estimate the same kernel with signs.
    """
    with uncast(x):
        x = wide(x) * (x.shape[-1] ** -0.25 if scale is None else math.sqrt(scale))
        projected = x @ projection.to(x.dtype).T  # B H T F
        half_square = x.square().sum(-1) / 2
    per_feature = math.log(projection.shape[0]) / 2
    if kind == "trigonometric":
        return Features(torch.cat([projected.sin(), projected.cos()], dim=-1), half_square - per_feature)
    largest = projected.detach().amax(-1)
    values = (projected - largest[..., None]).exp() + FAVOR_FLOOR
    return Features(values, largest - half_square - per_feature)


def orthogonal_features(n_features: int, d_head: int, seed: int, independent: bool = False) -> Tensor:
    """Draw the projection of FAVOR+ [F, E]: Gaussian rows, orthogonal in blocks of E, or `independent`."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n_features, d_head, generator=generator, dtype=torch.float64)
    if independent:
        return rows.float()
    blocks = []
    for _ in range(0, n_features, d_head):
        basis, upper = torch.linalg.qr(torch.randn(d_head, d_head, generator=generator, dtype=torch.float64))
        blocks.append(basis * upper.diagonal().sign())  # so that every rotation is equally likely
    # Their norms are those of independent rows, so each row alone is Gaussian.
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return (torch.cat(blocks)[:n_features] * lengths).float()


FEATURES: dict[str, Callable[..., Features]] = {"elu": elu, "relu": relu, "favor": favor}


def attend_linear(
    fq: Tensor,
    fk: Tensor,
    v: Tensor,
    *,
    causal: bool,
    log_scale: Tensor | None = None,
    real: Tensor | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    state: LinearState | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, LinearState | None]:
    """Attend with features fq [B, H, T, F], fk [B, K, S, F] to v [B, K, S, V-1]: [B, H, T, V-1], new state.

    `log_scale` [B, K, S] belongs to fk. `real` [B|1, S] is False for padding, which adds nothing.
    `documents` are the ids of queries [B|1, T] and of keys [B|1, S], in runs: a query sees its own document.
    `state` stands for the tokens of earlier calls, so calls in chunks equal one call. If `causal`, queries
    and keys are the same tokens. If not, a query sees every key and the state; packed rows have no state.
    A query that sees nothing gets zeros, with finite gradients. States and sums are float32 at least.
    """
    (B, _, T, _), (_, K, S, _) = fq.shape, fk.shape
    refuse(
        causal and T != S, f"causal linear attention of {T} queries to {S} keys: give as many keys as queries"
    )
    refuse(
        not causal and documents is not None and state is not None,
        "linear attention without causality carries no state over packed documents: give one of the two",
    )
    with uncast(v):
        values = nnf.pad(wide(v), (0, 1), value=1.0)  # B K S V
        scale = None if log_scale is None else wide(log_scale)
        if real is not None:
            real = real.expand(B, S)
            values = values.masked_fill(~real[:, None, :, None], 0.0)
            scale = None if scale is None else scale.masked_fill(~real[:, None], ABSENT)
        q, k, of_queries, of_keys = wide(fq), wide(fk), None, None
        if documents is not None:
            of_queries, of_keys = documents[0].expand(B, T), documents[1].expand(B, S)
            scale = values.new_zeros(B, K, S) if scale is None else scale
        if causal:
            sums, after = _scan(q, k, values, scale, real, of_queries, of_keys, state, min(chunk, max(T, 1)))
        elif of_queries is None or of_keys is None or scale is None:
            sums, after = _whole(q, k, values, scale, state)
        else:
            sums, after = _by_document(q, k, values, scale, of_queries, of_keys), None
        weight = sums[..., -1:]
        weight = weight.masked_fill(weight.abs() < SMALLEST, SMALLEST)  # may be negative for signed features
        return (sums[..., :-1] / weight).to(v.dtype), after


def _whole(
    q: Tensor, k: Tensor, values: Tensor, scale: Tensor | None, state: LinearState | None
) -> tuple[Tensor, LinearState]:
    """Let every query see every key: two matmuls."""
    B, K, _, F = k.shape
    peak = values.new_full((B, K), 0.0 if scale is None else ABSENT) if state is None else state.peak
    sums = None if state is None else state.sums
    if scale is not None:
        highest = torch.cat([scale.detach(), peak[..., None]], dim=-1).amax(-1).clamp(min=ABSENT / 2)
        values = values * (scale - highest[..., None]).exp()[..., None]
        sums = None if sums is None else sums * (peak - highest).exp()[..., None, None]
        peak = highest
    new = k.mT @ values
    sums = new if sums is None else sums + new
    grouped = q.reshape(B, K, -1, F) @ sums  # B K G·T V
    return grouped.reshape(B, q.shape[1], -1, sums.shape[-1]), LinearState(sums, peak, None)


def _by_document(
    q: Tensor, k: Tensor, values: Tensor, scale: Tensor, of_queries: Tensor, of_keys: Tensor
) -> Tensor:
    """Let every query see the keys of its document, one row and one document at a time."""
    sums = values.new_zeros(*q.shape[:3], values.shape[-1])
    for row in range(q.shape[0]):
        for document in set(of_queries[row].tolist()):
            queries, keys = of_queries[row] == document, of_keys[row] == document
            its_k, its_values, its_scale = (x[row, None][:, :, keys] for x in (k, values, scale))
            its_q = q[row, None][:, :, queries]
            sums[row, :, queries] = _whole(its_q, its_k, its_values, its_scale, None)[0][0]
    return sums


def _scan(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    scale: Tensor | None,
    real: Tensor | None,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    state: LinearState | None,
    C: int,
) -> tuple[Tensor, LinearState]:
    """Let every query see the keys up to its own: those of its chunk by matmuls, earlier ones by a state."""
    (B, H, T, F), (K, V), more = q.shape, (k.shape[1], values.shape[-1]), -q.shape[2] % C
    N, G = (T + more) // C, H // K
    if state is None:
        absent = values.new_full((B, K), 0.0 if scale is None else ABSENT)
        state = LinearState(values.new_zeros(B, K, F, V), absent, None if of_keys is None else of_keys[:, 0])
    q = nnf.pad(q, (0, 0, 0, more)).reshape(B, K, G, N, C, F).transpose(2, 3).reshape(B, K, N, G * C, F)
    k = nnf.pad(k, (0, 0, 0, more)).reshape(B, K, N, C, F)
    values = nnf.pad(values, (0, 0, 0, more)).reshape(B, K, N, C, V)
    scores = matmul(q, k.mT).reshape(B, K, N, G, C, C)  # of the keys in the same chunk

    if scale is None:
        totals = torch.cat([state.sums[:, :, None], matmul(k.mT, values)], dim=2).cumsum(2)
        after = state._replace(sums=totals[:, :, -1])
        earlier = matmul(q, totals[:, :, :-1])  # B K N G·C V
        scores = scores.tril()
    else:
        real = torch.ones(B, T, dtype=torch.bool, device=q.device) if real is None else real
        visible = _Visible.of(real, of_queries, of_keys, state.document, C, more)
        scale = nnf.pad(scale, (0, more), value=ABSENT).reshape(B, K, N, C)
        added = torch.where(visible.adds, scale, ABSENT)  # B K N C
        peaks = added.detach().amax(-1).clamp(min=ABSENT / 2)  # B K N
        sums = matmul(k.mT, values * (added - peaks[..., None]).exp()[..., None])  # B K N F V
        states, highest = _carried(sums, peaks, visible.keeps, state)  # B K N+1 F V, B K N+1
        after = LinearState(states[:, :, N], highest[:, :, N], None if of_keys is None else visible.last)

        seen = torch.where(visible.pairs, scale[..., None, :], ABSENT)  # B K N C C
        read = torch.where(visible.reads, highest[:, :, :N, None], ABSENT)  # B K N C
        top = torch.maximum(seen.detach().amax(-1), read).clamp(min=ABSENT / 2)  # of all that a query sees
        scores = scores * (seen - top[..., None]).exp()[:, :, :, None]
        earlier = matmul(q, states[:, :, :N]).reshape(B, K, N, G, C, V)
        earlier = (earlier * (read - top).exp()[:, :, :, None, :, None]).reshape(B, K, N, G * C, V)
    out = matmul(scores.reshape(B, K, N, G * C, C), values) + earlier
    out = out.reshape(B, K, N, G, C, V).transpose(2, 3).reshape(B, H, N * C, V)
    return out[:, :, :T], after


def _carried(sums: Tensor, peaks: Tensor, keeps: Tensor, state: LinearState) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk and after the last: [B, K, N+1, F, V], and its peaks [B, K, N+1].

    `sums` [B, K, N, F, V] are of each chunk, divided by exp(`peaks`) [B, K, N]. Where `keeps` [B, 1, N] is
    False, a chunk begins anew. A group of chunks is one matmul with a triangle of factors, none above 1: as
    many steps as there are chunks would take a GPU longer to begin than to compute.
    """
    (B, K, _, F, V), states, highest = sums.shape, [state.sums[:, :, None]], [state.peak[:, :, None]]
    for new, high, kept in zip(*(torch.split(x, GROUP, 2) for x in (sums, peaks, keeps))):
        M, entering = new.shape[2], highest[-1][:, :, -1:]
        high = torch.cat([entering, high], dim=2)  # B K M+1: of the state that enters, and of chunks
        run = nnf.pad((~kept).long().cumsum(2), (1, 0))
        earlier = torch.ones(M + 1, M + 1, dtype=torch.bool, device=run.device).tril()
        met = (run[..., None] == run[..., None, :]) & earlier
        seen = torch.where(met, high[..., None, :], ABSENT)[:, :, 1:]  # B K M M+1
        top = seen.amax(-1)
        factors = torch.where(met[:, :, 1:], (seen - top[..., None]).exp(), 0.0)
        parts = torch.cat([states[-1][:, :, -1:], new], dim=2).reshape(B, K, M + 1, F * V)
        states.append(matmul(factors, parts).reshape(B, K, M, F, V))
        highest.append(top)
    return torch.cat(states, dim=2), torch.cat(highest, dim=2)


class _Visible(NamedTuple):
    """Which documents meet: the tokens of a chunk, and the state that enters it."""

    pairs: Tensor  # B 1 N C C: a query sees a key of its chunk
    reads: Tensor  # B 1 N C: a query sees the state
    adds: Tensor  # B 1 N C: a key goes into the next state
    keeps: Tensor  # B 1 N: the state goes into the next one
    last: Tensor  # B: the document of the last real token

    @classmethod
    def of(
        cls,
        real: Tensor,
        of_queries: Tensor | None,
        of_keys: Tensor | None,
        document: Tensor | None,
        C: int,
        more: int,
    ) -> Self:
        """Compare the documents of queries and keys [B, T] by chunks of C, after `more` slots of padding."""
        B, T = real.shape
        one = torch.zeros(B, T, dtype=torch.long, device=real.device)
        of_queries, of_keys = one if of_queries is None else of_queries, one if of_keys is None else of_keys
        before = of_keys[:, 0] if document is None else document
        # Padding belongs to the document of the last real token: its own id says nothing.
        slots = torch.arange(T, device=real.device)
        token = torch.where(real, slots, -1).cummax(1).values
        of_keys = torch.where(token < 0, before[:, None], of_keys.gather(1, token.clamp(min=0)))
        of_keys = torch.cat([of_keys, of_keys[:, -1:].expand(B, more)], dim=1).reshape(B, 1, -1, C)
        of_queries = nnf.pad(of_queries, (0, more)).reshape(B, 1, -1, C)
        last = of_keys[..., -1]  # B 1 N
        entering = torch.cat([before[:, None, None], last[..., :-1]], dim=2)  # the document of each state
        earlier = torch.ones(C, C, dtype=torch.bool, device=real.device).tril()
        pairs = (of_queries[..., None] == of_keys[..., None, :]) & earlier
        return cls(
            pairs,
            of_queries == entering[..., None],
            of_keys == last[..., None],
            entering == last,
            last[:, 0, -1],
        )


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply many small matrices, [..., m, k] @ [..., k, n], with no transposed second factor on a CPU.

    For such a factor OpenBLAS takes up to 20 times as long, in the backward pass of any matmul too.
    """
    return cast(Tensor, _Matmul.apply(a, b))  # type: ignore[no-untyped-call]


class _Matmul(torch.autograd.Function):
    """A matmul whose gradients are such matmuls again."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        for_a, for_b = ctx.needs_input_grad
        ctx.save_for_backward(a if for_b else None, b if for_a else None)
        return a @ (b.contiguous() if b.device.type == "cpu" else b)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of both factors, None for one that has none."""
        (a, b), (for_a, for_b) = ctx.saved_tensors, ctx.needs_input_grad
        return matmul(upstream, b.mT) if for_a else None, matmul(a.mT, upstream) if for_b else None


class LinearAttention(Attention):
    """Attention whose softmax is a dot product of features: the keys add up to a state of constant size."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind) -> None:
        assert isinstance(kind, LinearKind)
        super().__init__(spec, name)
        self.features, self.seed, self.causal = kind.features, kind.seed, spec.causal
        self.count = kind.n_features(spec)
        self._rows: Tensor | None = None  # F E: random features of the seed, drawn when first used

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: View, layer_kv: LayerKV | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """Attend with queries [B, H, T, E] to keys and values [B, K, T, E], and to the state."""
        tokens = view.described()
        fq, fk = self.mapped(q), self.mapped(k)
        keys = layer_kv if isinstance(layer_kv, LayerState) else None
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

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps on rows of T tokens."""
        assert isinstance(kind, LinearKind)
        yield from _in_place_of_scores(spec, run, name, T, kind, linear_matmuls(spec, run, name, T, kind))


class LowRankAttention(Attention):
    """Attention to R mixtures of the keys, with learned weights for each position (Linformer)."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind) -> None:
        assert isinstance(kind, LowRank)
        super().__init__(spec, name)
        shape = (spec.max_positions, kind.rank)
        self.k_mix = nn.Parameter(torch.randn(shape) / math.sqrt(kind.rank))
        self.v_mix = nn.Parameter(torch.randn(shape) / math.sqrt(kind.rank))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: View, layer_kv: LayerKV | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """Attend with queries [B, H, T, E] to mixtures of keys and values [B, K, T, E]."""
        tokens = view.described()
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
        return super().attend(q, k, v, View(), None, tap, x)

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps on rows of T tokens."""
        assert isinstance(kind, LowRank)
        yield from _in_place_of_scores(spec, run, name, T, kind, low_rank_matmuls(spec, run, name, T, kind))


def _in_place_of_scores(
    spec: StackSpec, run: Pass, name: str, T: int, kind: Kind, matmuls: Iterator[Step]
) -> Iterator[Step]:
    """Yield the steps of an attention of T tokens, with other matmuls for scores and pattern."""
    for step in attention_steps(spec, run, name, T, T, kind, "attention"):
        if step.name == f"{name}.scores":
            yield from matmuls
        elif step.name == f"{name}.z":
            yield replace(step, m=0, n=0, k=0)
        else:
            yield step


def linear_matmuls(spec: StackSpec, run: Pass, name: str, T: int, kind: LinearKind) -> Iterator[Step]:
    """Yield the matmuls of linear attention: chunk by chunk in a decoder, two for all in an encoder."""
    H, K, F, V = len(spec.heads_of(name)), spec.kv_heads_of(name), kind.n_features(spec), spec.d_value + 1
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


def low_rank_matmuls(spec: StackSpec, run: Pass, name: str, T: int, kind: LowRank) -> Iterator[Step]:
    """Yield the mixing of keys and values, and the attention to the mixtures."""
    B, H, K, E, Ev = run.batch, len(spec.heads_of(name)), spec.kv_heads_of(name), spec.d_head, spec.d_value
    R, weights = kind.rank, spec.max_positions * kind.rank
    for part, width in (("k_mix", E), ("v_mix", Ev)):
        kept = (T * R + B * K * R * width) * run.size
        yield Step(f"{name}.{part}", "attention", weights, m=R, n=width, k=T, count=B * K, kept=kept)
    yield Step(f"{name}.scores", "attention", m=H // K * T, n=R, k=E, count=B * K, kept=B * H * T * 4)
    yield Step(f"{name}.mixed", "attention", m=H // K * T, n=Ev, k=R, count=B * K)
