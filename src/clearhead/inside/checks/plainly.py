"""The Transformer in one file: a forward pass in float64 from weights and config, with none of `model/`.

It is slow and plain on purpose: one row, one head at a time; masks are comparisons of numbers; every choice
of the config is an `if`. `clearhead check` holds a model against it, so that a fault on both sides of an
equality cannot pass unseen. And it says what a config means, from top to bottom: read it beside `model/`.

Shapes, all of one row: T query tokens, S key tokens, D model, E head width, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from clearhead.config import BIASES, ModelConfig
from clearhead.config.kinds import FULL, GatedDeltaKind, Kind, LinearKind, LowRank
from clearhead.inside.checks.plain_inputs import ACTIVATIONS, PlainInputs, PlainRow, bucket, pairs, slope
from clearhead.inside.checks.plain_kinds import delta_rule, features, mixtures, sees, weighed

AT_ONCE = 8192  # rows of the output table that are widened to float64 at a time


def plainly(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    ids: Tensor,
    mask: Tensor | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    positions: Tensor | None = None,
    types: Tensor | None = None,
    loudness: float = 1.0,
) -> Tensor:
    """Return what `model(ids, ...).logits` must be, in float64 on the CPU, from the same arguments.

    `weights` is its state dict. `loudness` multiplies what each stack embeds, as an edit of the tap
    `embedding` does.
    """
    plain = Plain(config, weights, loudness)
    given = (ids, mask, source, source_mask, positions, types)
    return torch.stack([plain.head(*plain.read(number, *given)) for number in range(ids.shape[0])])


Memory = tuple[Tensor, PlainRow] | None  # the encoder's states [S, D], and the row that it has read


class Plain(PlainInputs):
    """A config and its weights; the methods follow the forward pass, after those of `PlainInputs`."""

    def read(
        self,
        number: int,
        ids: Tensor,
        mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        positions: Tensor | None = None,
        types: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, PlainRow]:
        """Return the last states [T, D] of one row of a batch, and the row."""
        memory = None
        if source is not None:
            heard = self.row(number, self.config.stacks[0], source, source_mask)
            memory = self.stack(heard), heard
        row = self.row(number, self.config.main, ids, mask, positions, types, lengths)
        return self.stack(row, memory), row

    # Blocks -------------------------------------------------------------------------------------------------

    def stack(self, row: PlainRow, memory: Memory = None) -> Tensor:
        """Run embedding, blocks, final norm -> [T, D]; cross-attention reads `memory`."""
        x, layers = self.embed(row), row.plan.n_layers
        sets = min(self.config.layer_groups or layers, layers)
        for layer in range(layers):
            x = self.block(f"{row.stack}.blocks.{layer * sets // layers}", layer, x, row, memory)
        return self.norm(f"{row.stack}.norm", x) if self.config.final_norm else x

    def block(self, name: str, layer: int, x: Tensor, row: PlainRow, memory: Memory) -> Tensor:
        """Run one layer: [T, D] -> [T, D]."""
        config = self.config
        attention = partial(self.attention, f"{name}.attention", layer, row, None)
        mixture = config.n_experts and layer not in config.dense_layers
        feedforward = partial(self.experts if mixture else self.feedforward, f"{name}.feedforward")
        if config.parallel:
            first = self.norm(f"{name}.attention_residual.before", x)
            second = (
                first if config.parallel_norms == 1 else self.norm(f"{name}.feedforward_residual.before", x)
            )
            x = x + self.answer(f"{name}.attention_residual", attention(first))
            return x + self.answer(f"{name}.feedforward_residual", feedforward(second))
        x = self.sublayer(f"{name}.attention_residual", x, attention)
        if row.plan.cross:
            x = self.sublayer(
                f"{name}.cross_residual", x, partial(self.attention, f"{name}.cross", layer, row, memory)
            )
        return self.sublayer(f"{name}.feedforward_residual", x, feedforward)

    def sublayer(self, name: str, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Add to the residual stream what one part computes from it: [T, D] -> [T, D]."""
        place = self.config.norm_position
        read = self.norm(f"{name}.before", x) if place in ("pre", "sandwich") else x
        x = x + self.answer(name, part(read))
        return self.norm(f"{name}.after", x) if place == "post" else x

    def answer(self, name: str, y: Tensor) -> Tensor:
        """Return what a part adds to the stream: its output, normalised and scaled by the config."""
        if self.config.norm_position in ("sandwich", "output"):
            y = self.norm(f"{name}.inside", y)
        return y * self.config.residual_scale

    def attention(self, name: str, layer: int, row: PlainRow, memory: Memory, x: Tensor) -> Tensor:
        """Attend from each query [T, D] to the keys that it may see, of `memory` or of x itself -> [T, D]."""
        config, plan, cross = self.config, row.plan, memory is not None
        read, keys = memory or (x, row)
        kind = FULL if cross else plan.kinds[layer]
        if isinstance(kind, GatedDeltaKind):
            return delta_rule(self, name, row, kind, x)
        window = kind.reach
        q, k, v = self.linear(f"{name}.q", x), self.linear(f"{name}.k", read), self.linear(f"{name}.v", read)
        if config.qk_norm == "full":
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        seen, z = self.seen(row, keys, plan.causal and not cross, kind if kind.chooses else FULL), []
        heads = plan.heads_of(f"{plan.prefix}blocks.{layer}.{'cross' if cross else 'attention'}")
        for number, head in enumerate(heads):
            shared = number // (plan.n_heads // plan.n_kv_heads)  # neighbours share a key/value head
            one_q, one_k = _cut(q, number, plan.d_head), _cut(k, shared, plan.d_head)
            if config.qk_norm == "head":
                one_q, one_k = self.norm(f"{name}.q_norm", one_q), self.norm(f"{name}.k_norm", one_k)
            if config.positions == "rope" and not cross and layer not in config.rope_skips:
                one_q, one_k = self.rotated(one_q, row, window), self.rotated(one_k, keys, window)
            one_v = _cut(v, shared, plan.d_value)
            if isinstance(kind, LinearKind):
                phi = partial(features, kind, scale=plan.attention_scale, count=plan.n_features(kind))
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
            weights = _softmax(scores, seen)
            if config.attention_sink:  # keys share what the sink leaves of each softmax
                keys_sum = scores.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
                weights = (
                    weights
                    * (keys_sum - torch.logaddexp(keys_sum, self.weight(f"{name}.sink")[number])).exp()
                )
            z.append(weights @ one_v)
        if config.attention_gate:
            z = [torch.cat(z, dim=-1) / (1 + (-self.linear(f"{name}.gate", x)).exp())]
        return self.linear(f"{name}.out", torch.cat(z, dim=-1))

    def seen(self, queries: PlainRow, keys: PlainRow, causal: bool, kind: Kind) -> Tensor:
        """Return which key each query may see: [T, S]."""
        order = pairs(queries.order, keys.order)
        past = order <= 0 if causal else torch.ones_like(order, dtype=torch.bool)
        if kind == FULL:
            return torch.tensor(keys.real) & past
        length = max((place + 1 for place, real in zip(keys.positions, keys.real) if real), default=0)
        chosen = functools.cache(lambda q, k: sees(kind, q, k, length, causal))
        table = [[chosen(q, k) for k in keys.positions] for q in queries.positions]
        return torch.tensor(keys.real) & past & torch.tensor(table)

    def bias(self, row: PlainRow, head: int) -> Tensor:
        """Return what one head adds to its scores, by distance: [T, T]."""
        distances, where = row.distances
        if self.config.positions == "alibi":
            return (-slope(head, row.plan.n_heads) * distances.double().abs())[where]
        buckets = [bucket(one, not row.plan.causal, self.config) for one in distances.tolist()]
        return self.weight(f"{row.stack}.positions.table.weight")[buckets, head][where]

    def feedforward(self, name: str, x: Tensor) -> Tensor:
        """Apply the feed-forward to each token by itself: [T, D] -> [T, D]."""
        activation, up = ACTIVATIONS[self.config.activation], self.linear(f"{name}.up", x)
        if self.config.gated:
            gate, most = self.linear(f"{name}.gate", x), self.config.gated_clamp or torch.inf
            gate, up = torch.where(gate > most, most, gate), up.sign() * up.abs().clamp(max=most)
            return self.linear(f"{name}.down", activation(gate) * (up + self.config.gated_shift))
        return self.linear(f"{name}.down", activation(up))

    def experts(self, name: str, x: Tensor) -> Tensor:
        """Send each token to the few feed-forwards that its router scores highest: [T, D] -> [T, D]."""
        config, powers = self.config, self.linear(f"{name}.router", x).exp()
        every, answers, shares = range(config.n_experts), torch.zeros_like(x), torch.zeros_like(powers)
        chosen_share = config.router_order == "topk_softmax" or config.router_renormalise
        for share, scores in zip(shares, powers):
            chosen = sorted(every, key=scores.neg().tolist().__getitem__)[: config.n_active_experts]
            share[chosen] = scores[chosen] / scores[chosen if chosen_share else list(every)].sum()
        for expert in every:
            tokens = shares[:, expert].nonzero()[:, 0]
            answer = self.feedforward(f"{name}.experts.{expert}", x[tokens])
            answers[tokens] += shares[tokens, expert, None] * answer
        if config.d_shared_expert:
            share = 1 / (1 + (-self.linear(f"{name}.shared_gate", x)).exp())
            answers = answers + share * self.feedforward(f"{name}.shared", x)
        return answers

    # What comes out -----------------------------------------------------------------------------------------

    def head(self, hidden: Tensor, row: PlainRow) -> Tensor:
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
        return self.linear("head.out", hidden)

    def language(self, hidden: Tensor, row: PlainRow) -> Tensor:
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

    def pooled(self, hidden: Tensor, row: PlainRow) -> Tensor:
        """Pool a row into one vector: [T, D] -> [D]."""
        how, dense, real = self.config.pooling, self.config.pooler, hidden[torch.tensor(row.real)]
        vector = real.mean(0) if how == "mean" else real[0 if how == "cls" else -1]
        if dense == "none":
            return vector
        vector = self.linear("head.pooler", vector)
        return torch.tanh(vector) if dense == "tanh" else vector.clamp(min=0)


def _cut(x: Tensor, head: int, width: int) -> Tensor:
    """Return one head's columns: [T, heads·width] -> [T, width]."""
    return x[:, head * width : (head + 1) * width]


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Return the attention of each query over the keys it sees, or zeros: [T, S] -> [T, S]."""
    scores = scores.masked_fill(~seen, -torch.inf)
    powers = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    return powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)
