"""Attention: the formula as pure functions of tensors, then the module that owns the projections.

The formula is softmax(q kᵀ · scale + bias, where allowed) v. `eager` spells it out and shows scores and
pattern to the tap. `fused` calls PyTorch's fused kernel. Both have the same signature and give the same
answer: zeros, with finite gradients, for a query that may attend to nothing. Masks are made in `masks`.

Self-attention and cross-attention are one module: cross-attention takes its keys and values from `memory`.

Shapes: B batch, T query length, S key length, D model, H heads, K key/value heads (H a multiple of K),
E head width.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.core import masks, norms, positions
from clearhead.core.cache import CrossKeys, LayerKeys
from clearhead.core.config import BIASES, LEARNED_BIASES, StackSpec
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.config.registry import Registry
from clearhead.core.dtypes import wide
from clearhead.core.steps import Pass, Step, linear_step, norm_step
from clearhead.core.taps import SILENT, Tap


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
    scores. `sink` [H] is one more score in each softmax, and its weight goes nowhere. Where keys, values and
    mask have B / N rows, each row serves N rows of one query: the beams of a source.
    """
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
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    tap: Tap = SILENT,
) -> Tensor:
    """Call PyTorch's fused kernel, which has no soft-cap and no sink, and no taps; see `eager`."""
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


SOUND = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attend_by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend: q [B,H,T,E], k [B,K,S,E], v [B,K,S,Ev] -> [B,H,T,Ev]; a causal pass has no mask."""
    H, K = q.shape[1], k.shape[1]
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    doubtful = q.is_cuda and learning and not causal
    if mask is not None and K < H and q.is_cuda and (doubtful or not _may_use_cudnn()):
        k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))  # else a slow kernel takes it
    with sound() if doubtful else nullcontext():
        out = nnf.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=k.shape[1] < H
        )
    if mask is not None and mask.dtype == torch.bool and q.is_cuda:
        # For a query that may attend to nothing, one of the GPU's kernels returns a mean, not zeros.
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return out


def sound() -> AbstractContextManager[object]:
    """Return a context in which attention has gradients that can be trusted: any kernel but cuDNN's.

    Its gradient of the queries is NaN under a mask where the keys fill half of their last tile of 128, and
    all scores of a query are below about -89: the rest of the tile is scored 0, and exp(0 + 89) overflows.
    A query that sees one key comes to such scores first. (pytorch/pytorch#196678.)
    """
    return sdpa_kernel(SOUND) if torch.compiler.is_compiling() else without_cudnn()


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Do without cuDNN's attention for the length of a `with` block."""
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _may_use_cudnn() -> bool:
    """Return True if cuDNN's attention may be chosen; compiled code takes what was chosen outside of it."""
    if torch.compiler.is_compiling():
        return True
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


# "flex" is `fused`, but for rows planned by blocks: those go through `flex_attention` where it serves.
KERNELS: dict[str, Callable[..., Tensor]] = {"eager": eager, "fused": fused, "flex": fused}


class Attention(nn.Module):
    """Multi-head attention; grouped-query or multi-query with fewer key/value heads."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind = FULL) -> None:
        """Build the projections of the attention called `name`; subclasses read their `kind`."""
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
            return view.blocks.attend(
                q, k, v, scale=self.scale,
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

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps of self-attention on rows of T tokens."""
        yield from attention_steps(spec, run, name, T, T, kind, "attention")


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
    H, K, E, Ev = len(spec.heads_of(name)), spec.kv_heads_of(name), spec.d_head, spec.d_value
    eager = spec.attention_softcap is not None or spec.attention_sink
    planned = own and sees.block_size is not None
    blocks = masks.PLANS["cost"](spec, run, sees, T, H, K) if planned else None  # None: a dense mask
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
    queries, keys = H // K * T, S
    if blocks is not None:
        queries, keys, kept = H // K, blocks.pairs, blocks.kept
        pinned = pinned if blocks.whole else 0
    yield Step(f"{name}.scores", kind, m=queries, n=keys, k=E, count=B * K, kept=kept)
    yield Step(f"{name}.z", kind, m=queries, n=Ev, k=keys, count=B * K, kept=copies * answer + pinned)
    if spec.attention_sink:
        yield Step(f"{name}.sink", kind, H)
    if spec.attention_gate:  # its sigmoid, the answer before it, and in half precision its own input
        kept = 2 * answer + (B * T * D * run.size if run.half else 0)
        yield linear_step(f"{name}.gate", kind, B * T, D, H * Ev, spec.qkv_bias, kept=kept)
    yield linear_step(f"{name}.out", kind, B * T, H * Ev, D, spec.attention_out_bias)


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


VARIANTS = "clearhead.variants"
# By the kind of a layer, or by positions that need an attention of their own.
ATTENTIONS: Registry[Any] = Registry(
    {
        **dict.fromkeys(("full", "window", "dilated", "strided", "blocks"), Attention),
        "global": f"{VARIANTS}.global_attention:GlobalAttention",
        "linear": f"{VARIANTS}.linear:LinearAttention",
        "low-rank": f"{VARIANTS}.linear:LowRankAttention",
        "gated-delta": f"{VARIANTS}.gated_delta:DeltaLayer",
        "disentangled": f"{VARIANTS}.positions:DisentangledAttention",
    }
)


def attention_class(spec: StackSpec, layer: int) -> Any:
    """Return the class of the self-attention of a layer."""
    return ATTENTIONS[spec.positions if spec.positions in ATTENTIONS else spec.kinds[layer].name]
