"""The forward pass as a list of steps, from the config alone: what each step owns, multiplies and keeps.

`forward_steps` walks the parts in the order in which `model` runs them and yields a `Step` for whatever owns weights,
multiplies matrices or keeps bytes for the backward pass. `cost` adds the steps up.

Shapes: B batch, T query length, S key length, D model, H heads, K key/value heads, E head width, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from clearhead.config import ModelConfig, StackPlan, rotated_width

Part = Literal["embedding", "positions", "attention", "cross", "feedforward", "norms", "head"]
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of one value
INDEX = 8  # bytes of one id


@dataclass(frozen=True)
class Step:
    """One step of the forward pass; a product is `count` times [m, k] @ [k, n]."""

    name: str  # as in the model, less the name of the main stack: "blocks.3.attention.q", "encoder.norm", "head.out"
    part: Part
    parameters: int = 0  # those an earlier step has counted are left out
    idle: int = 0  # of them, weights of experts that a token does not visit
    m: int = 0
    n: int = 0
    k: int = 0
    count: int = 1
    gradients: int = 2  # products in the backward pass: one for each factor that has a gradient
    kept: int = 0  # bytes held for the backward pass

    @property
    def forward(self) -> int:
        """FLOPs of the forward pass."""
        return 2 * self.m * self.n * self.k * self.count

    @property
    def backward(self) -> int:
        """FLOPs of the backward pass."""
        return self.gradients * self.forward


def forward_steps(
    config: ModelConfig, length: int, source_length: int, batch: int, dtype: str
) -> Iterator[Step]:
    """Every step of one forward pass, in order."""
    walk = _Walk(config, batch, DTYPES[dtype])
    encoder, decoder = config.encoder, config.decoder
    source_tokens = 0
    if encoder is not None:
        source_tokens = tokens_of(config, encoder, source_length if decoder else length)
        yield from walk.stack(encoder, source_length if decoder else length)
    if decoder is not None:
        shared = encoder is not None and encoder.input == "tokens" and config.share_embeddings
        yield from walk.stack(decoder, length, source_tokens, shared)
        yield from walk.head(tokens_of(config, decoder, length))
    else:
        yield from walk.head(source_tokens)


class _Walk:
    """The forward pass, module by module, as the modules of `model` make it."""

    def __init__(self, config: ModelConfig, batch: int, size: int) -> None:
        self.config, self.batch, self.size = config, batch, size
        self.wide = max(size, 4)  # bytes of one value where half precision is widened

    def linear(
        self, name: str, part: Part, rows: int, d_in: int, d_out: int, bias: bool | None, **more: int
    ) -> Step:
        return Step(name, part, d_in * d_out + bool(bias) * d_out, m=rows, n=d_out, k=d_in, **more)

    def norm(self, name: str, rows: int, width: int, groups: int = 1, input_kept: bool = False) -> Step:
        """`groups` norms of `width` in each row, one set of weights; is the input kept by an earlier step?"""
        parameters, values = width * (1 + bool(self.config.norm_bias)), rows * groups * width
        if self.config.norm == "layernorm":
            return Step(
                name, "norms", parameters, kept=values * self.size * (not input_kept) + 2 * rows * groups * 4
            )
        if self.size < self.wide:  # the input is widened, and what is kept is the copy
            return Step(name, "norms", parameters, kept=2 * values * self.wide + rows * groups * self.wide)
        return Step(
            name, "norms", parameters, kept=values * self.size * (2 - input_kept) + rows * groups * self.size
        )

    def stack(
        self, plan: StackPlan, length: int, memory: int = 0, shared_front: bool = False
    ) -> Iterator[Step]:
        config, prefix, D, B = self.config, plan.prefix, self.config.d_model, self.batch
        tokens = tokens_of(config, plan, length)
        for step in self.front(plan, length):
            yield dataclasses.replace(step, parameters=0) if shared_front else step
        if config.n_types and plan.input == "tokens":
            yield Step(f"{prefix}embedding.types", "embedding", config.n_types * plan.d_embedding)
        yield from self.positions(plan, tokens)
        if config.embedding_norm:
            yield self.norm(f"{prefix}embedding.norm", B * tokens, plan.d_embedding)
        if config.embedding_projection and plan.input == "tokens":
            kept = B * tokens * plan.d_embedding * self.size
            yield self.linear(
                f"{prefix}embedding.project", "embedding", B * tokens, plan.d_embedding, D, True, kept=kept
            )
        if config.embedding_dropout:
            yield Step(f"{prefix}embedding.dropout", "embedding", kept=B * tokens * D)
        groups = min(config.layer_groups or plan.n_layers, plan.n_layers)
        used: set[int] = set()
        for layer in range(plan.n_layers):
            group = layer * groups // plan.n_layers
            for step in self.block(plan, layer, tokens, memory):
                yield dataclasses.replace(step, parameters=0, idle=0) if group in used else step
            used.add(group)
        if config.final_norm:
            yield self.norm(f"{prefix}norm", B * tokens, D)
        if prefix:  # the answer of this stack is read, and kept, by every cross-attention
            yield Step(f"{prefix}hidden", "cross", kept=B * tokens * D * self.size)

    def front(self, plan: StackPlan, length: int) -> Iterator[Step]:
        config, B, D, size = self.config, self.batch, self.config.d_model, self.size
        name = f"{plan.prefix}embedding.front"
        if plan.input == "tokens":
            yield Step(
                f"{name}.tokens", "embedding", plan.vocab_size * plan.d_embedding, kept=B * length * INDEX
            )
        elif plan.input == "patches":
            rows, width = B * config.n_patches, config.n_channels * config.patch_size**2
            yield self.linear(
                f"{name}.project", "embedding", rows, width, D, True, gradients=1, kept=rows * width * size
            )
            if config.class_token:
                yield Step(f"{name}.class_token", "embedding", D)
        elif plan.input == "vectors":
            kept = B * length * config.d_input * size
            yield self.linear(
                f"{name}.project", "embedding", B * length, config.d_input, D, True, gradients=1, kept=kept
            )
        else:  # each convolution is a product with the window laid out as a row, and keeps what it reads and what gelu reads
            kernel, after = config.conv_kernel, B * tokens_of(config, plan, length)
            kept = B * length * (config.d_input + D) * size
            yield self.linear(
                f"{name}.first",
                "embedding",
                B * length,
                config.d_input * kernel,
                D,
                True,
                gradients=1,
                kept=kept,
            )
            yield self.linear(
                f"{name}.second",
                "embedding",
                after,
                D * kernel,
                D,
                True,
                kept=(B * length + after) * D * size,
            )

    def positions(self, plan: StackPlan, tokens: int) -> Iterator[Step]:
        config, name = self.config, f"{plan.prefix}positions"
        if config.positions == "learned":
            rows = config.max_positions + config.position_offset
            yield Step(f"{name}.table", "positions", rows * plan.d_embedding, kept=tokens * INDEX)
        elif config.positions == "relative":
            kept = tokens**2 * INDEX * len(set(plan.windows))  # the buckets
            yield Step(f"{name}.table", "positions", config.relative_buckets * plan.n_heads, kept=kept)
        elif (
            config.positions == "alibi" and not plan.causal
        ):  # one for all layers, where no mask is put into it
            kept = (
                plan.n_heads
                * tokens**2
                * self.size
                * any(window is None or window >= tokens for window in plan.windows)
            )
            yield Step(f"{name}.bias", "positions", kept=kept)
        elif config.positions == "rope":
            rotated = rotated_width(plan.d_head, config.rope_fraction)
            yield Step(f"{name}.rotary", "positions", kept=2 * tokens * rotated * 4 * len(set(plan.windows)))

    def block(self, plan: StackPlan, layer: int, tokens: int, memory: int) -> Iterator[Step]:
        name = f"{plan.prefix}blocks.{layer}"
        attention = self.attention(
            f"{name}.attention", "attention", plan, tokens, tokens, plan.windows[layer]
        )
        yield from self.residual(f"{name}.attention_residual", "attention", tokens, attention)
        if plan.cross:
            cross = self.attention(f"{name}.cross", "cross", plan, tokens, memory, None)
            yield from self.residual(f"{name}.cross_residual", "cross", tokens, cross)
        feedforward = self.feedforward(f"{name}.feedforward", plan.d_ff, tokens)
        yield from self.residual(
            f"{name}.feedforward_residual", "feedforward", tokens, feedforward, second=self.config.parallel
        )

    def residual(
        self, name: str, part: Part, tokens: int, inner: Iterator[Step], second: bool = False
    ) -> Iterator[Step]:
        """A sublayer and how it joins the stream; `second`: in parallel to one that has read the same stream."""
        config, rows = self.config, self.batch * tokens
        D, one_norm = config.d_model, second and config.parallel_norms == 1
        if config.norm_position in ("pre", "sandwich") and not one_norm:
            yield self.norm(f"{name}.before", rows, D, input_kept=second)
        if not one_norm:
            yield Step(f"{name}.read", part, kept=rows * D * self.size)
        yield from inner
        if config.norm_position in ("sandwich", "output"):
            yield self.norm(f"{name}.inside", rows, D)
        if config.dropout:
            yield Step(f"{name}.dropout", part, kept=rows * D)
        if config.norm_position == "post":
            yield self.norm(f"{name}.after", rows, D)

    def attention(
        self, name: str, part: Part, plan: StackPlan, T: int, S: int, window: int | None
    ) -> Iterator[Step]:
        config, B, D, size = self.config, self.batch, self.config.d_model, self.size
        H, K = heads_left(config, plan, name)
        E, Ev = plan.d_head, plan.d_value
        own = part == "attention"  # cross-attention has neither positions nor causality
        fused = config.attention_softcap is None and Ev == E and not (own and config.positions == "relative")
        repeated = (
            not fused and config.attention_softcap is None
        )  # PyTorch's unfused path repeats keys and values for each head
        for projection, rows, heads, width in (("q", B * T, H, E), ("k", B * S, K, E), ("v", B * S, K, Ev)):
            kept = rows * (H if repeated else heads) * width * size
            yield self.linear(
                f"{name}.{projection}", part, rows, D, heads * width, config.qkv_bias, kept=kept
            )
            if projection != "v" and config.qk_norm != "none":
                whole = config.qk_norm == "full"
                yield self.norm(
                    f"{name}.{projection}_norm", rows, heads * E if whole else E, 1 if whole else heads
                )
        kept = self.attending(own, own and plan.causal, H, T, S, window, fused)
        yield Step(f"{name}.scores", part, m=H // K * T, n=S, k=E, count=B * K, kept=kept)
        partly_rotated = own and config.positions == "rope" and rotated_width(E, config.rope_fraction) < E
        copies = (
            2 if fused and partly_rotated else 1
        )  # joined queries have another layout, which the kernel's answer takes on
        yield Step(
            f"{name}.z", part, m=H // K * T, n=Ev, k=S, count=B * K, kept=copies * B * T * H * Ev * size
        )
        yield self.linear(f"{name}.out", part, B * T, H * Ev, D, config.attention_out_bias)

    def attending(
        self, own: bool, causal: bool, H: int, T: int, S: int, window: int | None, fused: bool
    ) -> int:
        """Bytes kept between scores and values, by the kernel that this attention gets."""
        config, size, square = self.config, self.size, T * S
        values = self.batch * H * square  # of the pattern
        windowed = window is not None and window < S
        masked = windowed or causal
        if (
            config.attention_softcap is not None
        ):  # eager: tanh, softmax and, masked, the pattern; and the mask, twice
            copied = masked or size < self.wide
            return values * (size + self.wide + copied * size) + 2 * masked * square
        if not fused:
            return values * size + masked * square * (own and config.positions == "relative")
        log_sums = self.batch * H * T * 4
        if own and config.positions == "alibi" and masked:
            return log_sums + H * square * size
        return log_sums + windowed * square * size

    def feedforward(self, name: str, d_ff: int, tokens: int) -> Iterator[Step]:
        config, D, size, rows, copies, idle = (
            self.config,
            self.config.d_model,
            self.size,
            self.batch * tokens,
            1,
            0,
        )
        bias = config.feedforward_bias
        if config.n_experts:
            copies, idle, active = (
                config.n_experts,
                config.n_experts - config.n_active_experts,
                config.n_active_experts,
            )
            softmax = (
                active if config.router_order == "topk_softmax" else copies + active + 1
            )  # the chosen; or all, the chosen, their sum
            kept = rows * (softmax * self.wide + active * (size + 3 * INDEX))  # and which, in which order
            yield self.linear(f"{name}.router", "feedforward", rows, D, copies, False, kept=kept)
            rows *= active
            yield Step(
                f"{name}.sorted", "feedforward", kept=3 * rows * D * size
            )  # what experts read, say, and say weighted
            name = f"{name}.experts"
        bent = config.activation != "relu"  # which keeps its answer; the others keep what they read as well
        for projection in ("gate", "up") if config.gated else ("up",):
            kept = rows * d_ff * size * (1 + (bent and (projection == "gate" or not config.gated)))
            step = self.linear(f"{name}.{projection}", "feedforward", rows, D, d_ff, bias, kept=kept)
            yield dataclasses.replace(step, parameters=copies * step.parameters, idle=idle * step.parameters)
        if config.feedforward_dropout:
            yield Step(f"{name}.dropout", "feedforward", kept=rows * d_ff)
        kept = rows * d_ff * size * (config.gated or bool(config.feedforward_dropout))
        step = self.linear(f"{name}.down", "feedforward", rows, d_ff, D, bias, kept=kept)
        yield dataclasses.replace(step, parameters=copies * step.parameters, idle=idle * step.parameters)

    def head(self, tokens: int) -> Iterator[Step]:
        config, D, B, size, rows = (
            self.config,
            self.config.d_model,
            self.batch,
            self.size,
            self.batch * tokens,
        )
        if config.head in ("lm", "mlm"):
            width = config.d_embedding or D
            if config.head_transform or width != D:
                yield self.linear("head.transform", "head", rows, D, width, True, kept=rows * D * size)
            if config.head_transform:
                if config.head_activation != "relu":
                    yield Step("head.activation", "head", kept=rows * width * size)
                yield self.norm("head.norm", rows, width)
            kept = rows * (width + config.vocab_size * (config.logit_softcap is not None)) * size
            step = self.linear(
                "head.out", "head", rows, width, config.vocab_size, config.head_bias, kept=kept
            )
            yield dataclasses.replace(
                step, parameters=step.parameters - width * config.vocab_size * config.tie_embeddings
            )
        elif config.head in ("tagger", "span"):
            classes = 2 if config.head == "span" else config.n_classes
            yield self.linear(
                "head.out",
                "head",
                rows,
                D,
                classes,
                config.head_bias,
                kept=rows * D * (size + bool(config.dropout)),
            )
        elif config.head in ("classifier", "embedding"):
            copied = config.pooling == "mean" or (config.dropout and config.pooler == "none")
            read = (
                (B if copied else rows) * D * size
            )  # one token's state is a view, and holds on to all of them
            if config.pooler != "none":
                yield self.linear("head.pooler", "head", B, D, D, True, kept=read)
                read = B * D * size
            if config.head == "classifier":
                yield self.linear("head.out", "head", B, D, config.n_classes, config.head_bias, kept=read)


def heads_left(config: ModelConfig, plan: StackPlan, attention: str) -> tuple[int, int]:
    """Query and key/value heads that pruning has left in the attention of this name."""
    heads = len(config.kept_heads(attention, plan.n_heads))
    return heads, heads * plan.n_kv_heads // plan.n_heads


def tokens_of(config: ModelConfig, plan: StackPlan, length: int) -> int:
    """How many tokens the front of a stack makes of `length` inputs."""
    if plan.input == "patches":
        return config.n_patches + config.class_token
    return -(-length // config.conv_stride) if plan.input == "frames" else length
