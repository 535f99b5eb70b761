"""State-space layers: Mamba-2, whose memory decays by a scalar of each head and token (SSD).

    S_t = exp(dt_t a) S_{t-1} + dt_t k_t v_tᵀ        z_t = S_tᵀ q_t + d v_t

In the papers k, q and v are B, C and x. Heads of a group share k and q. Token by token this is a recurrence;
`ssd` computes it chunk by chunk, which is the same sum, as attention with decays in place of a softmax.

Shapes: B batch, T length, D model, K groups, H heads (G = H / K of each group), E width of a key (the state),
V width of a head, N chunks of C tokens, W width of the convolution's input, 2·K·E + H·V.
"""

import math
from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.core.attention import Attention
from clearhead.core.cache import LayerKV
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import Kind
from clearhead.core.dtypes import uncast, wide
from clearhead.core.masks import View
from clearhead.core.norms import RMSNorm, rms_norm
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.caches import KeysAndState
from clearhead.variants.kinds import HybridKind, Mamba2Kind
from clearhead.variants.linear import CHUNK, matmul
from clearhead.variants.recurrent import RecurrentLayer, RecurrentState, convolution_step, convolve, decays
from clearhead.variants.steps import Pass, Step, attention_steps, linear_step

LARGEST_RATE = 16.0  # fresh decay rates are uniform up to here
FRESH_STEPS = (0.001, 0.1)  # fresh steps dt lie between, evenly by their logarithm


def ssd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    state: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to q, k [B, K, T, E] and v [B, H, T, V]: [B, H, T, V] and the state [B, H, E, V].

    `g` [B, H, T] is the log of the decay, at most 0, and `dt` [B, H, T] the strength of the write. A slot
    whose g and dt are 0 changes nothing, as padding must not. `starts` [B, T] is True where the state is
    forgotten before the token: the first of a document. `state` [B, H, E, V] comes from an earlier call. The
    state is float32 at least.
    """
    with uncast(v):
        out, state = _by_chunks(wide(q), wide(k), wide(v), wide(g), wide(dt), state, starts, chunk)
    return out.to(v.dtype), state


def _by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    dt: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Attend within chunks, add up what each writes, carry the state from chunk to chunk, and read it."""
    (B, H, T, V), (K, E), C = v.shape, (k.shape[1], k.shape[3]), min(chunk, max(v.shape[2], 1))
    G, N, more = H // K, (T + C - 1) // C, -T % C
    q, k = (F.pad(x, (0, 0, 0, more)).reshape(B, K, N, C, E) for x in (q, k))
    writes = F.pad(v * dt[..., None], (0, 0, 0, more)).reshape(B, K, G, N, C, V)
    decay, entering, leaving = (
        x.reshape(B, K, G, *x.shape[2:]) for x in decays(F.pad(g, (0, more)).reshape(B, H, N, C), starts)
    )

    def side_by_side(x: Tensor) -> Tensor:  # the heads of a group, as columns that one k or q meets
        return x.permute(0, 1, 3, 4, 2, 5).flatten(4)  # B K G N C V -> B K N C G·V

    updates = matmul(k.mT, side_by_side(writes * leaving))  # B K N E G·V
    left = entering[..., -1:, :].permute(0, 1, 3, 4, 2, 5).expand(-1, -1, -1, -1, -1, V).flatten(4)
    memory = v.new_zeros(B, K, E, G * V) if state is None else _grouped(state, K)
    states = []
    # `unbind`, since the gradient of each index would be a tensor as long as all chunks.
    for end, update in zip(left.unbind(2), updates.unbind(2)):
        states.append(memory)
        memory = memory * end + update
    recalled = matmul(q, torch.stack(states, dim=2)).reshape(B, K, N, C, G, V).permute(0, 1, 4, 2, 3, 5)
    within = matmul(q, k.mT)[:, :, None] * decay  # B K G N C C
    out = recalled * entering + matmul(within, writes)
    memory = memory.reshape(B, K, E, G, V).transpose(2, 3).reshape(B, H, E, V)
    return out.reshape(B, H, N * C, V)[:, :, :T], memory


def _grouped(state: Tensor, groups: int) -> Tensor:
    """Lay the states of a group side by side: [B, H, E, V] -> [B, K, E, G·V]."""
    B, H, E, V = state.shape
    return state.reshape(B, groups, H // groups, E, V).transpose(2, 3).flatten(3)


class Mamba2(nn.Module):
    """A Mamba-2 mixer: projections, short convolution, recurrence, skip, gated norm, output."""

    def __init__(self, d_model: int, kind: Mamba2Kind, heads: int, d_head: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.kind, self.n_heads, self.n_groups = kind, heads, kind.groups
        keys, values = kind.groups * kind.d_state, heads * d_head
        self.borders = (values, values + keys)  # between values, keys and queries
        self.gate, self.v = (nn.Linear(d_model, values, bias=kind.bias) for _ in range(2))
        self.k, self.q = (nn.Linear(d_model, keys, bias=kind.bias) for _ in range(2))
        self.dt = nn.Linear(d_model, heads, bias=kind.bias)
        # Not a Conv1d module: the spreads of `initialise` are for layers that mix their channels.
        width, kernel = values + 2 * keys, kind.kernel
        self.conv = nn.Parameter(torch.empty(width, 1, kernel).uniform_(-1, 1) * kernel**-0.5)
        self.conv_bias = nn.Parameter(torch.zeros(width)) if kind.conv_bias else None
        low, high = map(math.log, FRESH_STEPS)
        steps = torch.empty(heads).uniform_(low, high).exp()
        self.dt_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())  # softplus of it is the step
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, LARGEST_RATE).log())
        self.skip = nn.Parameter(torch.ones(heads))
        normed = kind.norm != "none"
        self.norm = RMSNorm(values, eps, bias=False, unit_offset=False) if normed else None
        self.out = nn.Linear(values, d_model, bias=kind.bias)

    def forward(
        self,
        x: Tensor,
        real: Tensor | None = None,
        documents: Tensor | None = None,
        state: RecurrentState | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]; see `ssd`.

        `real` [B|1, T] is False for padding: neither recurrence nor convolution sees it, wherever it stands.
        `documents` [B|1, T] are ids in runs, and a run sees nothing before it. `state` goes on from earlier
        calls, and is updated.
        """
        B, T, _ = x.shape

        def made(name: str) -> Tensor:
            y, scale = getattr(self, name)(x), getattr(self.kind, f"{name}_scale")
            return cast(Tensor, y if scale == 1 else y * scale)

        mixed = [tap.step(f"{name}_projected", made(name)) for name in "vkq"]
        convolved, starts = convolve(
            torch.cat(mixed, dim=-1), self.conv, real, documents, state, self.conv_bias
        )
        v, k, q = tap.step("conv", convolved).tensor_split(self.borders, dim=-1)
        q, k = (each.reshape(B, T, self.n_groups, -1).transpose(1, 2) for each in (q, k))
        v = v.reshape(B, T, self.n_heads, -1).transpose(1, 2)
        q, k, v = tap("q", q), tap("k", k), tap("v", v)  # B K T E, B K T E, B H T V

        # Contiguous, since a compiled graph is wrong about the layout of softplus' gradient.
        dt = F.softplus(wide(made("dt")).transpose(1, 2).contiguous() + wide(self.dt_bias)[:, None])
        if (self.kind.dt_min, self.kind.dt_max) != (0.0, math.inf):
            dt = dt.clamp(self.kind.dt_min, self.kind.dt_max)
        if real is not None:
            dt = dt.masked_fill(~real[:, None], 0.0)
        dt = tap.step("dt", dt)  # B H T
        g = tap.step("decay", -wide(self.log_rate).exp()[:, None] * dt)
        z, memory = ssd(q, k, v, g, dt, state.memory if state is not None else None, starts=starts)
        if state is not None:
            state.memory = memory.detach()
        z = tap("z", z + v * self.skip[:, None, None].to(v.dtype)).transpose(1, 2)  # B T H V
        gate = F.silu(wide(tap.step("gate", made("gate"))))
        y, first = wide(z.reshape(B, T, -1)), self.kind.norm_first
        y = self._normed(y) * gate if first else self._normed(y * gate)
        return tap("out", self.out(tap.step("concat", y.to(x.dtype))))

    def _normed(self, y: Tensor) -> Tensor:
        """Norm all heads, or those of each group: [B, T, H·V] -> the same."""
        if self.norm is None:
            return y
        groups = self.n_groups if self.kind.norm == "groups" else 1
        scale = self.norm.weight.view(groups, -1)
        return rms_norm(y.view(*y.shape[:2], groups, -1), scale, self.norm.eps, False).flatten(2)


class Mamba2Layer(RecurrentLayer, Mamba2):  # type: ignore[misc]
    """A Mamba-2 mixer in a block."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind) -> None:
        assert isinstance(kind, Mamba2Kind)
        Mamba2.__init__(self, spec.d_model, kind, *kind.sizes(spec), eps=spec.norm.eps)

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps on rows of T tokens."""
        assert isinstance(kind, Mamba2Kind)
        yield from mamba2_steps(run, name, T, spec.d_model, kind, *kind.sizes(spec))


class HybridLayer(Attention):
    """Attention and a Mamba-2 mixer of the same input, added; see `HybridKind`."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind) -> None:
        assert isinstance(kind, HybridKind)
        super().__init__(spec, name)
        self.kind, self.mixer = kind, Mamba2Layer(spec, name, kind)

    def forward(
        self,
        x: Tensor,
        view: View,
        memory: Tensor | None = None,
        layer_kv: LayerKV | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        keys, state = (layer_kv.keys, layer_kv.state) if isinstance(layer_kv, KeysAndState) else (None, None)
        kind = self.kind
        attended = super().forward(_scaled(x, kind.attention_in), view, None, keys, tap)
        mixed = self.mixer(_scaled(x, kind.mixer_in), view, None, state, tap.part("mixer"))
        mixed = tap.step("mixed", _scaled(mixed, kind.mixer_out))
        return tap("out", _scaled(attended, kind.attention_out) + mixed)

    def output(self, z: Tensor, x: Tensor, tap: Tap) -> Tensor:
        """Join what the heads found: [B, H, T, E] -> [B, T, D]."""
        z = tap("z", z).transpose(1, 2).flatten(2)  # B T H·E
        return tap.step("attended", self.out(tap.step("concat", z)))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps on rows of T tokens."""
        assert isinstance(kind, HybridKind)
        for part, scale in (("attended", kind.attention_in), ("mixed", kind.mixer_in)):
            if scale != 1:  # a copy of the input
                yield Step(f"{name}.{part}", "attention", kept=run.batch * T * spec.d_model * run.size)
        yield from attention_steps(spec, run, name, T, T, kind, "attention")
        yield from mamba2_steps(run, f"{name}.mixer", T, spec.d_model, kind, *kind.sizes(spec))


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale


def mamba2_steps(
    run: Pass, name: str, T: int, d_model: int, kind: Mamba2Kind, heads: int, d_head: int
) -> Iterator[Step]:
    """Yield the steps of one Mamba-2 mixer on rows of T tokens without padding."""
    D, K, H, E, V, rows = d_model, kind.groups, heads, kind.d_state, d_head, run.batch * T
    C, size, keys, values = min(CHUNK, T), run.wide, kind.groups * kind.d_state, heads * d_head
    N, G = (T + C - 1) // C, heads // kind.groups
    slots = run.batch * N * C  # rows, filled up to whole chunks
    for part, d_out in (("v", values), ("k", keys), ("q", keys)):
        yield linear_step(f"{name}.{part}", "attention", rows, D, d_out, bias=kind.bias)
    yield convolution_step(run, name, T, values + 2 * keys, kind.kernel, kind.conv_bias)
    yield linear_step(f"{name}.dt", "attention", rows, D, H, bias=kind.bias, kept=4 * rows * H * size)
    yield Step(f"{name}.log_rate", "attention", H, kept=2 * H * size)
    yield Step(f"{name}.dt_bias", "attention", H)
    square, states = H * slots * C * size, run.batch * N * K * E * G * V * size
    several = 2 if N > 1 else 0
    matmuls: tuple[tuple[str, int, int, int, int, int, int], ...] = (
        ("updates", K * N, E, G * V, C, several, 2 * H * slots * V * size),
        ("recalled", K * N, C, G * V, E, 2 if N > 1 else 1, 2 * states + H * slots * V * size),
        ("scores", K * N, C, C, E, 2, K * slots * (C + 2 * E) * size),
        ("z", H * N, C, V, C, 2, 2 * square + H * slots * V * size),
    )
    for part, count, m, n, k, gradients, kept in matmuls:
        yield Step(f"{name}.{part}", "attention", 0, 0, m, n, k, run.batch * count, gradients, kept)
    yield Step(f"{name}.skip", "attention", H, kept=rows * values * size)
    yield linear_step(f"{name}.gate", "attention", rows, D, values, kind.bias, kept=3 * rows * values * size)
    if kind.norm != "none":
        yield Step(f"{name}.norm", "norms", values, kept=2 * rows * values * size)
    yield linear_step(f"{name}.out", "attention", rows, values, D, kind.bias, kept=rows * values * run.size)
