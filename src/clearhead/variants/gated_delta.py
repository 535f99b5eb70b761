"""Gated delta rule: a memory of constant size that decays, and forgets what it is about to overwrite.

    S_t = exp(g_t) S_{t-1} + β_t k_t (v_t - exp(g_t) S_{t-1}ᵀ k_t)ᵀ        out_t = S_tᵀ q_t / sqrt(E)

`gated_delta` computes it chunk by chunk, `GatedDelta` owns the projections, and `DeltaLayer` is the same in a
block.

Shapes: B batch, T length, D model, K key heads, H value heads (a multiple of K), E key width, V value width,
N chunks of C tokens, W width of the convolution's input, 2·K·E + H·V.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import Kind
from clearhead.core.dtypes import uncast, wide
from clearhead.core.norms import RMSNorm
from clearhead.core.taps import SILENT, Tap
from clearhead.errors import ConfigError, refuse
from clearhead.variants.kinds import GatedDeltaKind
from clearhead.variants.linear import CHUNK, GROUP, matmul
from clearhead.variants.recurrent import RecurrentLayer, RecurrentState, convolve, decays
from clearhead.variants.steps import Pass, Step, linear_step

LARGEST_RATE = 16.0  # fresh decay rates are uniform up to here


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    chunk: int = CHUNK,
    group: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the rule to q, k [B, K, T, E] and v [B, H, T, V]: return [B, H, T, V] and the state [B, H, E, V].

    `g` [B, H, T] is the log of the decay, at most 0, and `beta` [B, H, T] the strength of the write. A slot
    whose g and beta are 0 changes nothing, as padding must not. `starts` [B, T] is True where the state is
    forgotten before the token: the first of a document. `state` [B, H, E, V] comes from an earlier call. The
    state is float32 at least. `group` chunks have their states computed at once; by default,
    several on a GPU and one on a CPU.
    """
    with uncast(v):
        out, state = _by_chunks(wide(q), wide(k), wide(v), wide(g), wide(beta), state, starts, chunk, group)
    return out.to(v.dtype), state


def _by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    chunk: int,
    group: int | None,
) -> tuple[Tensor, Tensor]:
    """Solve for the writes of all chunks at once, then carry the state from chunk to chunk."""
    (B, H, T, V), (K, E), C = v.shape, (k.shape[1], k.shape[3]), min(chunk, max(v.shape[2], 1))
    N, more = (T + C - 1) // C, -T % C
    q = F.pad(q * E**-0.5, (0, 0, 0, more)).reshape(B, K, N, C, E).repeat_interleave(H // K, dim=1)
    k = F.pad(k, (0, 0, 0, more)).reshape(B, K, N, C, E).repeat_interleave(H // K, dim=1)
    v = F.pad(v, (0, 0, 0, more)).reshape(B, H, N, C, V)
    g, beta = (F.pad(x, (0, more)).reshape(B, H, N, C) for x in (g, beta))

    decay, entering, leaving = decays(g, starts)

    # What token i writes depends on what the tokens before it in the chunk write: (1 + L) writes = ...
    strong = k * beta[..., None]
    system = matmul(strong, k.mT) * decay
    targets = torch.cat([v * beta[..., None], strong * entering], dim=-1)
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    writes, corrections = solved.tensor_split((V,), dim=-1)  # without a state, and per state

    state = v.new_zeros(B, H, E, V) if state is None else state
    ends, into = entering[..., -1:, :], (k * leaving).mT  # B H N E C
    group = (GROUP if v.is_cuda else 1) if group is None else group
    chunks = (writes, corrections, ends, into, state)
    states, written, state = _by_groups(*chunks, group) if 1 < group < N else _carried(*chunks)
    within = matmul(q, k.mT) * decay
    out = matmul(q * entering, states) + matmul(within, written)
    return out.reshape(B, H, N * C, V)[:, :, :T], state


def _carried(
    writes: Tensor, corrections: Tensor, ends: Tensor, into: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state [..., E, V] from chunk to chunk: those before each, what each writes, the last one.

    Chunks are the third axis from the end: `writes` [..., N, C, V], `corrections` [..., N, C, E], `ends`
    [..., N, 1, 1], `into` [..., N, E, C].
    """
    states, written = [], []
    # `unbind`, since the gradient of each index would be a tensor as long as all chunks.
    for write, correction, end, inward in zip(*(x.unbind(-3) for x in (writes, corrections, ends, into))):
        states.append(state)
        written.append(write - matmul(correction, state))
        state = state * end + matmul(inward, written[-1])
    return torch.stack(states, dim=-3), torch.stack(written, dim=-3), state


def _by_groups(
    writes: Tensor, corrections: Tensor, ends: Tensor, into: Tensor, state: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same for groups of chunks at once, which costs more matmuls and takes fewer steps.

    What leaves a group is linear in what enters it: carried next to a state of zeros, the identity becomes
    the matrix by which the group multiplies. A GPU would take longer to begin the steps of all chunks in
    a row.
    """
    (N, _, V), E, more = writes.shape[-3:], into.shape[-2], -writes.shape[-3] % group
    padding = (0, 0, 0, 0, 0, more)  # chunks that change nothing
    parts = [F.pad(x, padding) for x in (F.pad(writes, (0, E)), corrections, into)]
    parts.insert(2, F.pad(ends, padding, value=1.0))
    writes_, corrections_, ends_, into_ = (
        x.reshape(*x.shape[:2], -1, group, *x.shape[3:]) for x in parts
    )  # B H G M ...
    identity = F.pad(torch.eye(E, dtype=state.dtype, device=state.device), (V, 0))  # E V+E
    begin = identity.expand(*into_.shape[:3], -1, -1)
    inside, _, after = _carried(writes_, corrections_, ends_, into_, begin)
    entering = []  # the state before each group
    for last in after.unbind(2):
        entering.append(state)
        state = last[..., :V] + matmul(last[..., V:], state)
    before = torch.stack(entering, dim=2)[:, :, :, None].expand(*inside.shape[:4], -1, -1)
    states = (inside[..., :V] + matmul(inside[..., V:], before)).flatten(2, 3)[:, :, :N]
    return states, writes - matmul(corrections, states), state


class GatedDelta(nn.Module):
    """A layer of the gated delta rule: projections, short convolution, rule, gated norm, output."""

    def __init__(
        self,
        d_model: int,
        n_key_heads: int,
        n_value_heads: int,
        d_key: int,
        d_value: int,
        kernel: int = 4,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        refuse(
            n_value_heads % n_key_heads,
            f"{n_value_heads} value heads cannot share {n_key_heads} key heads: choose a multiple of them",
            ConfigError,
        )
        self.n_key_heads, self.n_value_heads = n_key_heads, n_value_heads
        keys, values = n_key_heads * d_key, n_value_heads * d_value
        self.borders = (keys, 2 * keys)  # between queries, keys and values
        self.q, self.k = nn.Linear(d_model, keys, bias=False), nn.Linear(d_model, keys, bias=False)
        self.v, self.gate = nn.Linear(d_model, values, bias=False), nn.Linear(d_model, values, bias=False)
        self.beta = nn.Linear(d_model, n_value_heads, bias=False)
        self.decay = nn.Linear(d_model, n_value_heads, bias=False)
        # Not a Conv1d module: the spreads of `initialise` are for layers that mix their channels.
        self.conv = nn.Parameter(torch.empty(2 * keys + values, 1, kernel).uniform_(-1, 1) * kernel**-0.5)
        self.decay_bias = nn.Parameter(torch.ones(n_value_heads))
        self.log_rate = nn.Parameter(torch.empty(n_value_heads).uniform_(0.01, LARGEST_RATE).log())
        self.norm = RMSNorm(d_value, eps, bias=False, unit_offset=False)
        self.out = nn.Linear(values, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        real: Tensor | None = None,
        documents: Tensor | None = None,
        state: RecurrentState | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]; see `gated_delta`.

        `real` [B|1, T] is False for padding: neither rule nor convolution sees it, wherever it stands.
        `documents` [B|1, T] are ids in runs, and a run sees nothing before it. `state` goes on from earlier
        calls, and is updated.
        """
        B, T, _ = x.shape
        mixed = [tap.step(f"{n}_projected", part(x)) for n, part in zip("qkv", (self.q, self.k, self.v))]
        convolved, starts = convolve(torch.cat(mixed, dim=-1), self.per_head()[0], real, documents, state)
        q, k, v = tap.step("conv", convolved).tensor_split(self.borders, dim=-1)
        q, k = (_unit(each.reshape(B, T, self.n_key_heads, -1)).transpose(1, 2) for each in (q, k))
        v = v.reshape(B, T, self.n_value_heads, -1).transpose(1, 2)
        q, k, v = tap("q", q), tap("k", k), tap("v", v)  # B K T E, B K T E, B H T V

        _, decay_bias, log_rate = self.per_head()
        beta = wide(self.beta(x)).sigmoid().transpose(1, 2)  # B H T
        # Contiguous, since a compiled graph is wrong about the layout of softplus' gradient.
        step = wide(self.decay(x)).transpose(1, 2).contiguous() + wide(decay_bias)[:, None]
        g = -wide(log_rate).exp()[:, None] * F.softplus(step)
        if real is not None:
            beta, g = (value.masked_fill(~real[:, None], 0.0) for value in (beta, g))
        beta, g = tap.step("beta", beta), tap.step("decay", g)
        z, memory = gated_delta(q, k, v, g, beta, state.memory if state is not None else None, starts=starts)
        if state is not None:
            state.memory = memory.detach()

        z = tap("z", z).transpose(1, 2)  # B T H V
        gate = tap.step("gate", self.gate(x)).reshape(z.shape)
        z = (self.norm(z) * F.silu(wide(gate))).to(z.dtype)
        return tap("out", self.out(tap.step("concat", z.reshape(B, T, -1))))

    def per_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the convolution [W, 1, kernel], and bias [H] and log of the rate [H] of the decay."""
        return self.conv, self.decay_bias, self.log_rate


class DeltaLayer(RecurrentLayer, GatedDelta):  # type: ignore[misc]
    """A layer of the gated delta rule in a block."""

    def __init__(self, spec: StackSpec, name: str, kind: Kind) -> None:
        assert isinstance(kind, GatedDeltaKind)
        GatedDelta.__init__(self, spec.d_model, *kind.sizes(spec), kernel=kind.kernel, eps=spec.norm.eps)

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
        """Yield the steps on rows of T tokens."""
        assert isinstance(kind, GatedDeltaKind)
        yield from gated_delta_steps(run, name, T, spec.d_model, *kind.sizes(spec), kind.kernel)


def _unit(x: Tensor) -> Tensor:
    """Divide by the norm over the last axis."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_steps(
    run: Pass,
    name: str,
    T: int,
    d_model: int,
    n_key_heads: int,
    n_value_heads: int,
    d_key: int,
    d_value: int,
    kernel: int = 4,
) -> Iterator[Step]:
    """Yield the steps of one layer of the gated delta rule on rows of T tokens without padding."""
    D, K, H, E, V, rows = d_model, n_key_heads, n_value_heads, d_key, d_value, run.batch * T
    C, size, keys, values = min(CHUNK, T), run.wide, n_key_heads * d_key, n_value_heads * d_value
    N, width = (T + C - 1) // C, 2 * keys + values
    slots, half = run.batch * N * C, run.size < run.wide  # rows, filled up to whole chunks
    for part, d_out in (("q", keys), ("k", keys), ("v", values)):
        yield linear_step(f"{name}.{part}", "attention", rows, D, d_out, bias=False)
    # Half precision is widened for each tap. Else the taps are views of one tensor.
    taps = kernel * rows + kernel if half else rows + run.batch * (kernel - 1)
    convolved = rows * 2 * keys if half else rows * width
    kept = (taps + rows) * width + convolved + 2 * rows * K
    yield Step(f"{name}.conv", "attention", kernel * width, kept=kept * size)
    for part, kept in (("beta", rows + slots), ("decay", 2 * rows + slots)):
        yield linear_step(f"{name}.{part}", "attention", rows, D, H, bias=False, kept=kept * H * size)
    yield Step(f"{name}.log_rate", "attention", H, kept=2 * H * size)
    yield Step(f"{name}.decay_bias", "attention", H)

    # Triangles of pairs: the decay, both matmuls of queries and keys, both with the decay.
    square = H * slots * C * size
    read = H * slots * E * size
    matmuls: tuple[tuple[str, int, int, int, int, int, int], ...] = (
        ("overlaps", N, C, C, E, 2, 3 * square + 2 * C * C + 2 * read),
        ("solved", N, C, E + V, C, 2, H * slots * (E + 2 * V) * size),  # as a matmul with the inverse
        ("corrections", N - 1, C, V, E, 2, 2 * N * run.batch * H * E * V * size),
        ("first_correction", 1, C, V, E, 1, 0),  # of a state of zeros, which has no gradient
        ("updates", N - 1, E, V, C, 2, read + 2 * H * slots * V * size),
        ("last_update", 1, E, V, C, 0, 0),  # of a state that nobody reads
        ("recalled", N, C, V, E, 2 if N > 1 else 1, read if N > 1 else 0),
        ("scores", N, C, C, E, 2, 2 * square + read),
        ("z", N, C, V, C, 2, H * (rows if half else slots) * V * size),
    )
    for part, chunks, m, n, k, gradients, kept in matmuls:
        count = run.batch * H * chunks
        yield Step(f"{name}.{part}", "attention", 0, 0, m, n, k, count, gradients, kept)
    yield linear_step(f"{name}.gate", "attention", rows, D, values, bias=False, kept=2 * rows * values * size)
    kept = rows * values * (size + run.size) + rows * H * size
    yield Step(f"{name}.norm", "norms", V, kept=kept)
    yield linear_step(f"{name}.out", "attention", rows, values, D, bias=False, kept=rows * values * run.size)
