"""The Transformer in one file: a forward pass in float64 from weights and config, with none of `core/`.

It is slow and plain on purpose: one row, one head at a time; masks are comparisons of numbers; every choice
of the config is an `if`. `clearhead check` compares a model with it, so that a fault on both sides of an
equality cannot pass unseen. And it says what a config means, from top to bottom: read it next to `core/`.
Weights, norms, embeddings and positions are in `reference_inputs`.

Shapes, all of one row: T query tokens, S key tokens, D model, E head width, H heads, V vocabulary or value
width.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor

from clearhead.core.config import BIASES, ModelConfig
from clearhead.core.config.kinds import FULL, Full, Kind, Windowed
from clearhead.inside.checks.reference_inputs import (
    ACTIVATIONS,
    ReferenceInputs,
    ReferenceRow,
    bucket,
    drawn_by,
    indexed,
    latent_projections,
    pairs,
    slope,
)
from clearhead.variants.kinds import (
    BlockCausal,
    Blocks,
    Dilated,
    GatedDeltaKind,
    GlobalKind,
    HybridKind,
    Latent,
    LinearKind,
    LowRank,
    Mamba2Kind,
    ShortConvKind,
    Strided,
)
from clearhead.variants.linear import orthogonal_features


def sees(kind: Kind, q: int, k: int, length: int, causal: bool) -> bool:
    """Return True if a query at position q chooses the key at position k, in a row of `length` tokens."""
    distance, first = abs(q - k), getattr(kind, "sinks", 0)
    match kind:
        case Full() | Latent():
            chosen = True
        case Windowed() | GlobalKind():
            chosen = distance < kind.size
        case Dilated():
            chosen = distance in range(0, kind.size * kind.step, kind.step)
        case Strided():
            chosen = distance < kind.step or distance % kind.step == 0
        case BlockCausal():
            chosen = k // kind.size <= q // kind.size
        case Blocks():
            mine, its = q // kind.size, k // kind.size
            blocks = mine + 1 if causal else math.ceil(length / kind.size)
            drawn = [drawn_by(kind.seed, mine, number) % max(blocks, 1) for number in range(kind.random)]
            near = abs(mine - its) <= kind.window // 2 or its in drawn
            everywhere = _globals(kind, length)
            chosen = near or length <= kind.full or q in everywhere or k in everywhere
        case _:
            raise TypeError(f"{kind} takes no mask over keys")
    return chosen or k < first


@cache
def _globals(kind: Blocks, length: int) -> frozenset[int]:
    """Return the positions of the tokens that see all and are seen by all."""
    size = kind.size if kind.counted == "blocks" else 1
    groups = [range(at, at + size) for at in range(0, length, size)]
    ends = groups[: kind.first] + groups[max(len(groups) - kind.last, 0) :]
    return frozenset(place for group in ends for place in group)


def times(kind: Blocks, q: int, k: int, length: int) -> int:
    """Return how often the key at position k stands in the softmax of the query at position q."""
    if length <= kind.full or q in _globals(kind, length):
        return 1
    first = kind.first * (kind.size if kind.counted == "blocks" else 1)
    return 1 + kind.repeat if k < first else 1


def global_tokens_of(kind: GlobalKind, row: ReferenceRow) -> list[bool]:
    """Return which tokens of a row see all and are seen by all."""
    real = [t for t, is_real in enumerate(row.real) if is_real]
    if row.marked is not None:
        chosen = [t for t in real if row.marked[t]]
    elif kind.tokens == "first":
        chosen = [t for t in real if row.positions[t] == 0]
    elif kind.tokens == "question":
        ends = [t for t in real if row.x[t] == kind.separator]
        chosen = [t for t in real if ends and t < ends[0]]
    else:
        chosen = []
    return [t in chosen for t in range(len(row.real))]


def features(kind: LinearKind, x: Tensor, scale: float, count: int) -> Tensor:
    """Return the features of queries or keys: [T, E] -> [T, F]."""
    if kind.features == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    if kind.features == "relu":
        return torch.where(x > 0, x, 0.0) + 0.001
    rows = orthogonal_features(count, x.shape[1], kind.seed).double()
    x = x * math.sqrt(scale)
    return (x @ rows.T - (x**2).sum(1, keepdim=True) / 2).exp() / math.sqrt(count)


def weighed(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return the mean of values weighted by dot products of features, over the keys that are seen: [T, V]."""
    weights = (q @ k.T) * seen
    total = weights.sum(1, keepdim=True)
    return torch.where(total > 0, weights @ v / total, 0.0)


def mixtures(
    inputs: ReferenceInputs, name: str, row: ReferenceRow, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix the real keys and values of a row by position: [S, E] -> [R, E] each."""
    real, positions = torch.tensor(row.real)[:, None], row.positions
    by_key, by_value = (inputs.weight(f"{name}.{part}_mix")[positions] * real for part in ("k", "v"))
    return by_key.T @ k, by_value.T @ v


def delta_rule(
    inputs: ReferenceInputs, name: str, row: ReferenceRow, kind: GatedDeltaKind, x: Tensor
) -> Tensor:
    """Read a row from left to right into a memory that decays and corrects itself: [T, D] -> [T, D]."""
    K, H, E, V = kind.sizes(row.plan)
    real = [t for t, is_real in enumerate(row.real) if is_real]
    mixed = torch.cat([inputs.linear(f"{name}.{part}", x[real]) for part in "qkv"], dim=1)
    mixed = silu(convolved(inputs, name, mixed))
    q, k, v = mixed[:, : K * E], mixed[:, K * E : 2 * K * E], mixed[:, 2 * K * E :]
    write = 1 / (1 + (-inputs.linear(f"{name}.beta", x[real])).exp())  # T H
    decay = inputs.linear(f"{name}.decay", x[real]) + inputs.weight(f"{name}.decay_bias")
    kept = (-inputs.weight(f"{name}.log_rate").exp() * decay.exp().log1p()).exp()
    gate, answers = inputs.linear(f"{name}.gate", x[real]), torch.zeros(len(x), H * V).double()
    for head in range(H):
        shared, memory = head * K // H, torch.zeros(E, V).double()
        for t, place in enumerate(real):
            one_q, one_k = (part[t, shared * E : shared * E + E] for part in (q, k))
            one_q, one_k = (each / ((each**2).sum() + 1e-6) ** 0.5 for each in (one_q, one_k))
            memory = memory * kept[t, head]
            memory = memory + write[t, head] * torch.outer(
                one_k, v[t, head * V : head * V + V] - one_k @ memory
            )
            z = one_q @ memory / E**0.5
            z = z / ((z**2).mean() + inputs.config.norm_eps) ** 0.5 * inputs.weight(f"{name}.norm.weight")
            opened = gate[t, head * V : head * V + V]
            answers[place, head * V : head * V + V] = z * opened / (1 + (-opened).exp())
    return inputs.linear(f"{name}.out", answers)


def convolved(inputs: ReferenceInputs, name: str, x: Tensor) -> Tensor:
    """Return the short convolution of the real tokens of a row: [T, W] -> [T, W]."""
    kernel = inputs.weight(f"{name}.conv")[:, 0]
    padded = torch.cat([torch.zeros(kernel.shape[1] - 1, x.shape[1]).double(), x])
    y = [(padded[t : t + kernel.shape[1]] * kernel.T).sum(0) for t in range(len(x))]
    bias = inputs.weight(f"{name}.conv_bias") if f"{name}.conv_bias" in inputs.weights else 0.0
    return torch.stack([x[:0].sum(0), *y])[1:] + bias


def silu(x: Tensor) -> Tensor:
    """Return x · sigmoid(x)."""
    return x / (1 + (-x).exp())


def short_convolution(inputs: ReferenceInputs, name: str, row: ReferenceRow, x: Tensor) -> Tensor:
    """Convolve the real tokens of a row between two gates: [T, D] -> [T, D]."""
    real, answers = [t for t, is_real in enumerate(row.real) if is_real], torch.zeros_like(x)
    b, c, v = (inputs.linear(f"{name}.{part}", x[real]) for part in "kqv")
    answers[real] = c * convolved(inputs, name, b * v)
    return inputs.linear(f"{name}.out", answers)


def state_space(inputs: ReferenceInputs, name: str, row: ReferenceRow, kind: Mamba2Kind, x: Tensor) -> Tensor:
    """Read a row from left to right into a memory that decays (Mamba-2): [T, D] -> [T, D]."""
    (H, V), E, K = kind.sizes(row.plan), kind.d_state, kind.groups
    real = [t for t, is_real in enumerate(row.real) if is_real]

    def made(part: str) -> Tensor:
        return inputs.linear(f"{name}.{part}", x[real]) * float(getattr(kind, f"{part}_scale"))

    mixed = silu(convolved(inputs, name, torch.cat([made(part) for part in "vkq"], dim=1)))
    v, k, q = mixed[:, : H * V], mixed[:, H * V : H * V + K * E], mixed[:, H * V + K * E :]
    dt = (made("dt") + inputs.weight(f"{name}.dt_bias")).exp().log1p()  # T H
    dt = torch.where(dt < kind.dt_min, kind.dt_min, torch.where(dt > kind.dt_max, kind.dt_max, dt))
    kept, skip = (-inputs.weight(f"{name}.log_rate").exp() * dt).exp(), inputs.weight(f"{name}.skip")
    v, heads = v.reshape(-1, H, V), [head * K // H for head in range(H)]
    k, q = (x.reshape(-1, K, E)[:, heads] for x in (k, q))  # T H E
    found, memory = torch.zeros(len(real), H * V).double(), torch.zeros(H, E, V).double()
    for t in range(len(real)):
        write = k[t, :, :, None] * v[t, :, None] * dt[t, :, None, None]
        memory = memory * kept[t, :, None, None] + write
        found[t] = ((q[t, :, :, None] * memory).sum(1) + skip[:, None] * v[t]).flatten()
    found = found * (1.0 if kind.norm_first else silu(made("gate")))
    width = H * V // (K if kind.norm == "groups" else 1)
    for start in range(0, H * V, width) if kind.norm != "none" else ():
        own = slice(start, start + width)
        found[:, own] /= ((found[:, own] ** 2).mean(1, keepdim=True) + inputs.config.norm_eps) ** 0.5
    answers = torch.zeros(len(x), H * V).double()
    weight = 1.0 if kind.norm == "none" else inputs.weight(f"{name}.norm.weight")
    answers[real] = found * weight * (silu(made("gate")) if kind.norm_first else 1.0)
    return inputs.linear(f"{name}.out", answers)


def signed_row(distance: int, config: ModelConfig) -> int:
    """Return the row of the table of disentangled positions for a query this far right of its key."""
    span, furthest = config.relative_buckets // 2, config.relative_max_distance
    half, away, sign = span // 2, abs(distance), -1 if distance < 0 else 1
    if furthest != span and away > half:
        away = half + math.ceil(math.log(away / half) / math.log((furthest - 1) / half) * (half - 1))
    return min(max(span + sign * away, 0), 2 * span - 1)


def by_distance(
    inputs: ReferenceInputs, name: str, row: ReferenceRow, head: int, q: Tensor, k: Tensor
) -> Tensor:
    """Return the relative-distance terms of one head's scores, from queries and keys [T, E]: [T, T]."""
    config, plan = inputs.config, row.plan
    vectors = inputs.weight(f"{row.stack}.positions.table.weight")
    if config.relative_norm:
        vectors = inputs.norm(f"{row.stack}.positions.norm", vectors)
    shared = head // (plan.n_heads // plan.n_kv_heads)
    met = []  # the vectors as queries and as keys of this head
    for kind, number in (("q", head), ("k", shared)):
        projected = inputs.linear(f"{name}.{kind}", vectors)
        if config.qk_norm == "full":
            projected = inputs.norm(f"{name}.{kind}_norm", projected)
        projected = projected[:, number * plan.d_head : (number + 1) * plan.d_head]
        met.append(inputs.norm(f"{name}.{kind}_norm", projected) if config.qk_norm == "head" else projected)
    added = torch.zeros(len(q), len(k), dtype=torch.float64)
    for i, here in enumerate(row.positions):
        which = [signed_row(here - there, config) for there in row.positions]
        if config.relative_terms != "p2c":
            added[i] += met[1][which] @ q[i]
        if config.relative_terms != "c2p":
            added[i] += (met[0][which] * k).sum(-1)
    return added * plan.attention_scale


# The forward pass -------------------------------------------------------------------------------------------


AT_ONCE = 8192  # rows of the output table that are widened to float64 at a time


def reference_logits(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    ids: Tensor,
    mask: Tensor | None = None,
    *,
    loudness: float = 1.0,
    learns: bool = False,
    **arguments: Tensor,
) -> Tensor:
    """Return what `model(ids, mask, ...).logits` must be, in float64 on the CPU, from the same arguments.

    `weights` is its state dict. `loudness` multiplies what each stack embeds, as an edit of the tap
    `embedding` does. `learns`: as in training, without dropout.
    """
    plain = Reference(config, weights, loudness, learns)
    rows = (plain.read(number, ids, mask, **arguments) for number in range(ids.shape[0]))
    return torch.stack([plain.head(*row) for row in rows])


Memory = tuple[Tensor, ReferenceRow] | None  # the encoder's states [S, D], and the row that it has read


class Reference(ReferenceInputs):
    """A config and its weights; the methods follow the forward pass, after those of `ReferenceInputs`."""

    def read(
        self,
        number: int,
        ids: Tensor,
        mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        **details: Tensor,
    ) -> tuple[Tensor, ReferenceRow]:
        """Return the last states [T, D] of one row of a batch, and the row; `details` are those of `row`."""
        memory = None
        if source is not None:
            heard = self.row(number, self.config.stacks[0], source, source_mask)
            memory = self.stack(heard), heard
        row = self.row(number, self.config.main, ids, mask, **details)
        return self.stack(row, memory), row

    # Blocks -------------------------------------------------------------------------------------------------

    def stack(self, row: ReferenceRow, memory: Memory = None) -> Tensor:
        """Run embedding, blocks, final norm -> [T, D]; cross-attention reads `memory`."""
        x, layers = self.embed(row), row.plan.n_layers
        sets, loop = min(self.config.layer_groups or layers, layers), self.config.loop
        for layer in range(layers):
            run = self.block if row.plan.capacities[layer] == 1 else self.routed
            own = layer * sets // layers
            if loop is not None and layer >= loop[0]:
                left = layer - loop[0] - loop[1] * loop[2]  # layers since the loop ended
                own = loop[0] + ((layer - loop[0]) % loop[1] if left < 0 else loop[1] + left)
            x = self.shortcuts(f"{row.stack}.blocks.{own}.shortcut", layer, x, row)
            x = run(f"{row.stack}.blocks.{own}", layer, x, row, memory)
        return self.norm(f"{row.stack}.norm", x) if self.config.final_norm else x

    def routed(self, name: str, layer: int, x: Tensor, row: ReferenceRow, memory: Memory) -> Tensor:
        """Run one layer on the tokens that its router sends through; the others pass by: [T, D] -> [T, D]."""
        scores, share = self.linear(f"{name}.router.score", x)[:, 0], row.plan.capacities[layer]
        real = [t for t, is_real in enumerate(row.real) if is_real]
        best = sorted(real, key=scores.neg().tolist().__getitem__)[: math.ceil(share * len(real) - 1e-9)]
        by_rank = self.learns or not row.plan.causal
        chosen = sorted(best) if by_rank else [t for t in real if scores[t] > 0]
        if not chosen:
            return x
        answer = self.block(name, layer, x[chosen], row.part(chosen), memory)
        mixed = x.clone()
        mixed[chosen] = x[chosen] + scores[chosen, None] * (answer - x[chosen])
        return mixed

    def block(self, name: str, layer: int, x: Tensor, row: ReferenceRow, memory: Memory) -> Tensor:
        """Run one layer: [T, D] -> [T, D]."""
        config = self.config
        attention = partial(self.attention, f"{name}.attention", layer, row, None)
        mixture = config.n_experts and layer not in config.dense_layers
        feedforward = partial(self.experts if mixture else self.feedforward, f"{name}.feedforward")
        if config.parallel:
            normed = config.first_norm or layer > 0
            first = self.norm(f"{name}.attention_residual.before", x) if normed else x
            second = (
                first if config.parallel_norms == 1 else self.norm(f"{name}.feedforward_residual.before", x)
            )
            x = x + self.answer(f"{name}.attention_residual", attention(first))
            return x + self.answer(f"{name}.feedforward_residual", feedforward(second))
        if row.plan.kinds[layer].name != "none":
            normed = config.first_norm or layer > 0
            x = self.sublayer(f"{name}.attention_residual", x, attention, normed=normed)
        if row.plan.cross:
            x = self.sublayer(
                f"{name}.cross_residual", x, partial(self.attention, f"{name}.cross", layer, row, memory)
            )
        if layer in config.feedforward_skips:
            return x
        return self.sublayer(f"{name}.feedforward_residual", x, feedforward)

    def sublayer(self, name: str, x: Tensor, part: Callable[[Tensor], Tensor], normed: bool = True) -> Tensor:
        """Add to the residual stream what one part computes from it: [T, D] -> [T, D]."""
        place = self.config.norm_position
        read = self.norm(f"{name}.before", x) if place in ("pre", "sandwich") and normed else x
        x = x + self.answer(name, part(read))
        return self.norm(f"{name}.after", x) if place == "post" else x

    def answer(self, name: str, y: Tensor) -> Tensor:
        """Return what a part adds to the stream: its output, normalised and scaled by the config."""
        if self.config.norm_position in ("sandwich", "output"):
            y = self.norm(f"{name}.inside", y)
        return y * self.config.residual_scale

    def attention(self, name: str, layer: int, row: ReferenceRow, memory: Memory, x: Tensor) -> Tensor:
        """Attend from each query [T, D] to the keys that it may see, of `memory` or of x itself -> [T, D]."""
        kind = FULL if memory is not None else row.plan.kinds[layer]
        if isinstance(kind, GatedDeltaKind):
            return delta_rule(self, name, row, kind, x)
        if isinstance(kind, HybridKind):
            mixed = state_space(self, f"{name}.mixer", row, kind, x * kind.mixer_in) * kind.mixer_out
            z = self.attended(name, layer, row, None, x * kind.attention_in, FULL)
            return self.linear(f"{name}.out", z) * kind.attention_out + mixed
        if isinstance(kind, Mamba2Kind):
            return state_space(self, name, row, kind, x)
        if isinstance(kind, ShortConvKind):
            return short_convolution(self, name, row, x)
        z = self.attended(name, layer, row, memory, x, kind)
        if isinstance(kind, GlobalKind):  # global queries see all, by projections of their own
            whole = self.attended(name, layer, row, memory, x, FULL, "_global")
            z = torch.where(torch.tensor(global_tokens_of(kind, row))[:, None], whole, z)
        if self.config.attention_gate:
            z = z / (1 + (-self.linear(f"{name}.gate", x)).exp())
        return self.linear(f"{name}.out", z)

    def attended(
        self, name: str, layer: int, row: ReferenceRow, memory: Memory, x: Tensor, kind: Kind, which: str = ""
    ) -> Tensor:
        """Return the concatenated outputs of the heads: [T, D] -> [T, H·V]; `which` names the projections."""
        config, plan, cross = self.config, row.plan, memory is not None
        (read, keys), window = memory or (x, row), kind.reach
        if isinstance(kind, Latent):
            q, k, v = latent_projections(self, name, row, kind, x)
        else:
            q, k, v = (self.linear(f"{name}.{part}{which}", x if part == "q" else read) for part in "qkv")
        if not cross:
            v = self.values(name.replace(".attention", ".shortcut"), layer, v, row)
        if config.qk_norm == "full":
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        seen, z = self.seen(row, keys, plan.causal and not cross, kind if kind.masked else FULL), []
        if isinstance(kind, Latent) and kind.top:
            seen = indexed(self, name, row, kind, x, seen)
        repeated = self.log_times(row, keys, kind) if isinstance(kind, Blocks) and kind.repeat else 0.0
        heads = plan.heads_of(f"{plan.prefix}blocks.{layer}.{'cross' if cross else 'attention'}")
        for number, head in enumerate(heads):
            shared = number // (plan.n_heads // plan.n_kv_heads)  # neighbours share a key/value head
            one_q, one_k = _cut(q, number, plan.d_head), _cut(k, shared, plan.d_head)
            if config.qk_norm == "head":
                one_q, one_k = self.norm(f"{name}.q_norm", one_q), self.norm(f"{name}.k_norm", one_k)
            if config.positions == "rope" and not cross and layer not in config.rope_skips:
                # The columns of a latent head that rotate are its last ones, of other heads the first.
                own = plan.d_head - plan.d_rotary if isinstance(kind, Latent) else 0
                one_q = torch.cat([one_q[:, :own], self.rotated(one_q[:, own:], row, window)], 1)
                one_k = torch.cat([one_k[:, :own], self.rotated(one_k[:, own:], keys, window)], 1)
            one_v = _cut(v, shared, plan.d_value)
            if isinstance(kind, LinearKind):
                phi = partial(features, kind, scale=plan.attention_scale, count=kind.n_features(plan))
                z.append(weighed(phi(one_q), phi(one_k), one_v, seen))
                continue
            if isinstance(kind, LowRank):
                one_k, one_v = mixtures(self, name, keys, one_k, one_v)
                seen = torch.ones(len(one_q), len(one_k), dtype=torch.bool)
            scores = one_q @ one_k.T * plan.attention_scale
            if config.attention_softcap is not None:
                scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
            if config.positions in BIASES and not cross:
                scores = scores + self.bias(row, head)
            if config.positions == "disentangled" and not cross:
                scores = scores + by_distance(self, name, row, number, one_q, one_k)
            scores = scores + repeated
            weights = _softmax(scores, seen)
            if config.attention_sink:  # keys share what the sink leaves of each softmax
                keys_sum = scores.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
                weights = (
                    weights
                    * (keys_sum - torch.logaddexp(keys_sum, self.weight(f"{name}.sink")[number])).exp()
                )
            z.append(weights @ one_v)
        if config.head_gate:
            opened = 1 / (1 + (-self.linear(f"{name}.gate", x[:, : config.head_gate])).exp())  # T H
            z = [each * opened[:, number, None] for number, each in enumerate(z)]
        return torch.cat(z, dim=-1)

    def seen(self, queries: ReferenceRow, keys: ReferenceRow, causal: bool, kind: Kind) -> Tensor:
        """Return which key each query may see: [T, S]."""
        order = pairs(queries.order, keys.order)
        past = order <= 0 if causal else torch.ones_like(order, dtype=torch.bool)
        if kind == FULL:
            return torch.tensor(keys.real) & past
        chosen = cache(lambda q, k: sees(kind, q, k, keys.length, causal))
        table = [[chosen(q, k) for k in keys.positions] for q in queries.positions]
        found = torch.tensor(table)
        if isinstance(kind, GlobalKind):
            found = found | torch.tensor(global_tokens_of(kind, keys))
        return torch.tensor(keys.real) & past & found

    def log_times(self, queries: ReferenceRow, keys: ReferenceRow, kind: Blocks) -> Tensor:
        """Return the logarithm of how often each key stands in the softmax of each query: [T, S]."""
        counted = cache(lambda q, k: times(kind, q, k, keys.length))
        table = [[counted(q, k) for k in keys.positions] for q in queries.positions]
        return torch.tensor(table).double().log()

    def bias(self, row: ReferenceRow, head: int) -> Tensor:
        """Return what one head adds to its scores, by distance: [T, T]."""
        distances, where = row.distances
        if self.config.positions == "alibi":
            return (-slope(head, row.plan.n_heads) * distances.double().abs())[where]
        buckets = [bucket(distance, not row.plan.causal, self.config) for distance in distances.tolist()]
        return self.weight(f"{row.stack}.positions.table.weight")[buckets, head][where]

    def feedforward(self, name: str, x: Tensor) -> Tensor:
        """Apply the feed-forward to each token by itself: [T, D] -> [T, D]."""
        activation, up = ACTIVATIONS[self.config.activation], self.linear(f"{name}.up", x)
        if self.config.gated:
            gate, most = self.linear(f"{name}.gate", x), self.config.gated_clamp or torch.inf
            gate, up = gate * self.config.gate_scale, up * self.config.up_scale
            gate, up = torch.where(gate > most, most, gate), up.sign() * up.abs().clamp(max=most)
            return self.linear(f"{name}.down", activation(gate) * (up + self.config.gated_shift))
        return self.linear(f"{name}.down", activation(up))

    def experts(self, name: str, x: Tensor) -> Tensor:
        """Send each token to the few feed-forwards that its router scores highest: [T, D] -> [T, D]."""
        config, powers = self.config, self.linear(f"{name}.router", x).exp()
        every, answers, shares = range(config.n_experts), torch.zeros_like(x), torch.zeros_like(powers)
        sigmoid = config.router_order == "sigmoid_topk"
        chosen_share = config.router_order == "topk_softmax" or config.router_renormalise
        added = (
            self.weight(f"{name}.correction") if config.router_correction else torch.zeros(config.n_experts)
        )
        for share, scores in zip(shares, powers / (1 + powers) if sigmoid else powers):
            total = scores.sum() if not sigmoid else 1.0
            counted = (scores / total + added).tolist()
            among = self.of_groups(counted, 2 if sigmoid else 1)
            chosen = sorted(among, key=lambda expert: -counted[expert])[: config.n_active_experts]
            share[chosen] = (
                scores[chosen] / (scores[chosen].sum() if chosen_share else total) * config.router_scale
            )
        for expert in every:
            tokens = shares[:, expert].nonzero()[:, 0]
            answer = self.feedforward(f"{name}.experts.{expert}", x[tokens])
            answers[tokens] += shares[tokens, expert, None] * answer
        if config.d_shared_expert:
            shared = self.feedforward(f"{name}.shared", x)
            if config.shared_expert_gate:
                shared = shared / (1 + (-self.linear(f"{name}.shared_gate", x)).exp())
            answers = answers + shared
        return answers

    def of_groups(self, scores: list[float], best: int) -> list[int]:
        """Return the experts of the groups whose `best` scores, added up, are highest."""
        config, size = self.config, self.config.n_experts // self.config.router_groups
        groups = [range(start, start + size) for start in range(0, config.n_experts, size)]
        ranked = sorted(groups, key=lambda group: -sum(sorted(scores[expert] for expert in group)[-best:]))
        return sorted(expert for group in ranked[: config.n_active_groups] for expert in group)

    # What comes out -----------------------------------------------------------------------------------------

    def head(self, hidden: Tensor, row: ReferenceRow) -> Tensor:
        """Return the output of the head for the last states [T, D]."""
        match self.config.head:
            case "lm" | "mlm":
                return self.language(hidden, row)
            case "classifier":
                return self.linear("head.out", self.pooled(hidden, row))
            case "embedding":
                pooled = self.pooled(hidden, row)
                length = max(float((pooled**2).sum().sqrt()), 1e-12)
                return pooled / length if self.config.normalise else pooled
            case "none":
                return hidden
        hidden = self.bent(hidden)
        if self.config.head_layer:
            wide = ACTIVATIONS[self.config.readout.activation](self.linear("head.up", hidden))
            hidden = self.norm("head.norm", hidden + self.linear("head.down", wide))
        return self.linear("head.out", hidden)

    def language(self, hidden: Tensor, row: ReferenceRow) -> Tensor:
        """Return a score for each token of the vocabulary: [T, D] -> [T, V]."""
        config = self.config
        if config.head_transform or config.d_embedding != config.d_model:
            hidden = self.linear("head.transform", hidden)
        if config.head_transform:
            hidden = self.norm("head.norm", ACTIVATIONS[config.readout.activation](hidden))
        table = self.weights[self.table(row.stack) if config.tie_embeddings else "head.out.weight"].detach()
        parts = [hidden @ some.cpu().double().T for some in torch.split(table, AT_ONCE)]
        logits = torch.cat(parts, dim=-1) * config.logit_scale
        if config.head_bias:
            logits = logits + self.weight("head.out.bias")
        cap = config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def pooled(self, hidden: Tensor, row: ReferenceRow) -> Tensor:
        """Pool a row into one vector: [T, D] -> [D]."""
        how, real = self.config.pooling, hidden[torch.tensor(row.real)]
        return self.bent(real.mean(0) if how == "mean" else real[0 if how == "cls" else -1])

    def bent(self, x: Tensor) -> Tensor:
        """Apply the dense layer of a head, its activation and its norm: [..., D] -> [..., D]."""
        dense = self.config.pooler
        if dense == "none":
            return x
        x = self.linear("head.pooler", x)
        x = torch.tanh(x) if dense == "tanh" else ACTIVATIONS[dense](x)
        return self.norm("head.pooler_norm", x) if self.config.pooler_norm else x


def _cut(x: Tensor, head: int, width: int) -> Tensor:
    """Return one head's columns: [T, heads·width] -> [T, width]."""
    return x[:, head * width : (head + 1) * width]


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Return the attention of each query over the keys it sees, or zeros: [T, S] -> [T, S]."""
    scores = scores.masked_fill(~seen, -torch.inf)
    powers = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    return powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)
