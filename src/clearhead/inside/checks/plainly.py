"""The Transformer in one file: a forward pass in float64 from weights and config, with none of `model/`.

It is slow and plain on purpose: one row, one head at a time; masks are comparisons of numbers; every choice
of the config is an `if`. `clearhead check` holds a model against it, so that a fault on both sides of an
equality cannot pass unseen. And it says what a config means, from top to bottom: read it beside `model/`.

Shapes, all of one row: T query tokens, S key tokens, D model, E head width, V vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from clearhead.config import BIASES, ModelConfig, StackSpec
from clearhead.inside.checks.plain_inputs import ACTIVATIONS, PlainInputs, PlainTokens
from clearhead.inside.checks.plain_positions import bucket, rotated, slope

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
    rows = []
    for row in range(ids.shape[0]):

        def of(x: Tensor | None, row: int = row) -> Tensor | None:
            return None if x is None else x[row if x.shape[0] > 1 else 0].cpu()

        x, read, where = ids[row].cpu(), of(source), of(positions)
        memory, behind = None, None
        if config.encoder is not None and config.decoder is not None:
            assert read is not None and source is not None
            behind = plain.tokens(config.encoder, read, of(source_mask), None, _longest(source_mask, None))
            memory = plain.stack("encoder", config.encoder, read, behind, of(source_mask), None, None, None)
        name, plan = (
            ("decoder", config.decoder) if config.decoder is not None else ("encoder", config.encoder)
        )
        assert plan is not None
        tokens = plain.tokens(plan, x, of(mask), where, _longest(mask, positions))
        hidden = plain.stack(name, plan, x, tokens, of(mask), of(types), memory, behind)
        rows.append(plain.head(hidden, tokens))
    return torch.stack(rows)


def _longest(mask: Tensor | None, positions: Tensor | None) -> int:
    """Return the number of tokens of the longest row; 0: as many as there are."""
    if positions is not None:
        return int(positions.max()) + 1
    return 0 if mask is None else int(mask.sum(1).max())


class Plain(PlainInputs):
    """A config and its weights; the methods follow the forward pass, after those of `PlainInputs`."""

    # Blocks -------------------------------------------------------------------------------------------------

    def stack(
        self,
        stack: str,
        plan: StackSpec,
        x: Tensor,
        tokens: PlainTokens,
        mask: Tensor | None,
        types: Tensor | None,
        memory: Tensor | None,
        behind: PlainTokens | None,
    ) -> Tensor:
        """Run embedding, blocks, final norm -> [T, D]; cross-attention reads `memory` [S, D] of `behind`."""
        config = self.config
        stream = self.embed(stack, plan, x, tokens, mask, types)
        sets = min(config.layer_groups or plan.n_layers, plan.n_layers)
        for layer in range(plan.n_layers):
            name = f"{stack}.blocks.{layer * sets // plan.n_layers}"
            stream = self.block(name, stack, plan, layer, stream, tokens, memory, behind)
        return self.norm(f"{stack}.norm", stream) if config.final_norm else stream

    def block(
        self,
        name: str,
        stack: str,
        plan: StackSpec,
        layer: int,
        x: Tensor,
        tokens: PlainTokens,
        memory: Tensor | None,
        behind: PlainTokens | None,
    ) -> Tensor:
        """Run one layer: [T, D] -> [T, D]."""
        config = self.config
        heads = f"{plan.prefix}blocks.{layer}"

        def attention(read: Tensor) -> Tensor:
            return self.attention(
                f"{name}.attention",
                f"{heads}.attention",
                stack,
                plan,
                layer,
                read,
                tokens,
                read,
                tokens,
                False,
            )

        def cross(read: Tensor) -> Tensor:
            assert memory is not None and behind is not None
            return self.attention(
                f"{name}.cross", f"{heads}.cross", stack, plan, layer, read, tokens, memory, behind, True
            )

        def feedforward(read: Tensor) -> Tensor:
            return (
                self.experts(f"{name}.feedforward", read)
                if config.n_experts
                else self.feedforward(f"{name}.feedforward", read)
            )

        if config.parallel:
            read = self.norm(f"{name}.attention_residual.before", x)
            other = (
                read if config.parallel_norms == 1 else self.norm(f"{name}.feedforward_residual.before", x)
            )
            x = x + self.answer(f"{name}.attention_residual", attention(read))
            return x + self.answer(f"{name}.feedforward_residual", feedforward(other))
        x = self.sublayer(f"{name}.attention_residual", x, attention)
        if plan.cross:
            x = self.sublayer(f"{name}.cross_residual", x, cross)
        return self.sublayer(f"{name}.feedforward_residual", x, feedforward)

    def sublayer(self, name: str, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Add to the residual stream what one part computes from it: [T, D] -> [T, D]."""
        place = self.config.norm_position
        y = part(self.norm(f"{name}.before", x) if place in ("pre", "sandwich") else x)
        x = x + self.answer(name, y)
        return self.norm(f"{name}.after", x) if place == "post" else x

    def answer(self, name: str, y: Tensor) -> Tensor:
        """Return what a part adds to the stream: its output, normalised and scaled by the config."""
        if self.config.norm_position in ("sandwich", "output"):
            y = self.norm(f"{name}.inside", y)
        return y * self.config.residual_scale

    def attention(
        self,
        name: str,
        heads_of: str,
        stack: str,
        plan: StackSpec,
        layer: int,
        x: Tensor,
        tokens: PlainTokens,
        memory: Tensor,
        keys: PlainTokens,
        cross: bool,
    ) -> Tensor:
        """Attend from each query [T, D] to the keys of `memory` [S, D] that it may see -> [T, D]."""
        config, window = self.config, plan.windows[layer]
        q, k, v = (
            self.linear(f"{name}.q", x),
            self.linear(f"{name}.k", memory),
            self.linear(f"{name}.v", memory),
        )
        if config.qk_norm == "full":
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        seen = self.seen(tokens, keys, plan.causal and not cross, None if cross else window)
        z = []
        for number, head in enumerate(plan.heads_of(heads_of)):
            shared = number // (plan.n_heads // plan.n_kv_heads)  # neighbours share a key/value head
            one_q, one_k = _cut(q, number, plan.d_head), _cut(k, shared, plan.d_head)
            if config.qk_norm == "head":
                one_q, one_k = self.norm(f"{name}.q_norm", one_q), self.norm(f"{name}.k_norm", one_k)
            if config.positions == "rope" and not cross and layer not in config.rope_skips:
                one_q = rotated(one_q, tokens.positions, tokens.longest, config, window)
                one_k = rotated(one_k, keys.positions, keys.longest, config, window)
            scores = one_q @ one_k.T * plan.attention_scale
            if config.attention_softcap is not None:
                scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
            if config.positions in BIASES and not cross:
                scores = scores + self.bias(stack, plan, head, tokens, keys)
            weights = _softmax(scores, seen)
            if config.attention_sink:  # keys share what the sink leaves of each softmax
                keys_sum = scores.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
                weights = (
                    weights
                    * (keys_sum - torch.logaddexp(keys_sum, self.weight(f"{name}.sink")[number])).exp()
                )
            z.append(weights @ _cut(v, shared, plan.d_value))
        return self.linear(f"{name}.out", torch.cat(z, dim=-1))

    def seen(self, queries: PlainTokens, keys: PlainTokens, causal: bool, window: int | None) -> Tensor:
        """Return which key each query may see: [T, S]."""
        rows = []
        for t, here in enumerate(queries.positions):
            allowed = []
            for s, there in enumerate(keys.positions):
                past = not causal or keys.order[s] <= queries.order[t]
                allowed.append(keys.real[s] and past and (window is None or abs(here - there) < window))
            rows.append(allowed)
        return torch.tensor(rows)

    def bias(self, stack: str, plan: StackSpec, head: int, queries: PlainTokens, keys: PlainTokens) -> Tensor:
        """Return what one head adds to its scores, by distance: [T, S]."""
        if self.config.positions == "alibi":
            steep = slope(head, plan.n_heads)
            return torch.tensor(
                [[-steep * abs(q - k) for k in keys.positions] for q in queries.positions],
                dtype=torch.float64,
            )
        table = self.weight(f"{stack}.positions.table.weight")
        rows = [
            [bucket(k - q, not plan.causal, self.config) for k in keys.positions] for q in queries.positions
        ]
        return table[torch.tensor(rows), head]

    def feedforward(self, name: str, x: Tensor) -> Tensor:
        """Apply the feed-forward to each token by itself: [T, D] -> [T, D]."""
        activation = ACTIVATIONS[self.config.activation]
        if self.config.gated:
            return self.linear(
                f"{name}.down", activation(self.linear(f"{name}.gate", x)) * self.linear(f"{name}.up", x)
            )
        return self.linear(f"{name}.down", activation(self.linear(f"{name}.up", x)))

    def experts(self, name: str, x: Tensor) -> Tensor:
        """Send each token to the few feed-forwards that its router scores highest: [T, D] -> [T, D]."""
        config, scores, answers = self.config, self.linear(f"{name}.router", x), []
        for token in range(x.shape[0]):
            chosen = sorted(range(config.n_experts), key=lambda expert: -float(scores[token, expert]))[
                : config.n_active_experts
            ]
            among = chosen if config.router_order == "topk_softmax" else list(range(config.n_experts))
            share = scores[token, chosen].exp() / scores[token, among].exp().sum()
            if config.router_order == "softmax_topk" and config.router_renormalise:
                share = share / share.sum()
            parts = [
                self.feedforward(f"{name}.experts.{expert}", x[token : token + 1])[0] for expert in chosen
            ]
            answers.append(sum((part * weight for part, weight in zip(parts, share)), torch.zeros_like(x[0])))
        return torch.stack(answers)

    # What comes out -----------------------------------------------------------------------------------------

    def head(self, hidden: Tensor, tokens: PlainTokens) -> Tensor:
        """Return the output of the head for the last states [T, D]."""
        kind = self.config.head
        if kind in ("lm", "mlm"):
            return self.language(hidden)
        if kind in ("classifier", "embedding"):
            pooled = self.pooled(hidden, [t for t, real in enumerate(tokens.real) if real])
            if kind == "classifier":
                return self.linear("head.out", pooled[None])[0]
            return pooled / max(float((pooled**2).sum().sqrt()), 1e-12) if self.config.normalise else pooled
        return hidden if kind == "none" else self.linear("head.out", hidden)

    def language(self, hidden: Tensor) -> Tensor:
        """Return a score for each token of the vocabulary: [T, D] -> [T, V]."""
        config = self.config
        if config.head_transform or config.d_embedding != config.d_model:
            hidden = self.linear("head.transform", hidden)
        if config.head_transform:
            assert config.head_activation is not None
            hidden = self.norm("head.norm", ACTIVATIONS[config.head_activation](hidden))
        hidden = hidden * config.logit_scale
        name = (
            self.table("decoder" if config.decoder is not None else "encoder")
            if config.tie_embeddings
            else "head.out.weight"
        )
        rows = torch.split(self.weights[name].detach(), AT_ONCE)
        logits = torch.cat([hidden @ some.cpu().double().T for some in rows], dim=-1)
        if config.head_bias:
            logits = logits + self.weight("head.out.bias")
        cap = config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def pooled(self, hidden: Tensor, real: list[int]) -> Tensor:
        """Pool a row into one vector: [T, D] -> [D]."""
        how, dense = self.config.pooling, self.config.pooler
        vector = hidden[real].mean(0) if how == "mean" else hidden[real[0] if how == "cls" else real[-1]]
        if dense == "none":
            return vector
        vector = self.linear("head.pooler", vector[None])[0]
        return torch.tanh(vector) if dense == "tanh" else vector.clamp(min=0)


def _cut(x: Tensor, head: int, width: int) -> Tensor:
    """Return one head's columns: [T, heads·width] -> [T, width]."""
    return x[:, head * width : (head + 1) * width]


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Return the attention of each query over the keys it sees, or zeros: [T, S] -> [T, S]."""
    scores = scores.masked_fill(~seen, -torch.inf)
    powers = (scores - scores.amax(-1, keepdim=True).clamp(min=-1e300)).exp()
    return powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)
