"""Steps: what each part of a model costs. `costs` adds them up without building a model.

Every part has a function that yields a `Step` for whatever owns weights, multiplies matrices or keeps bytes
for the backward pass: those of the core are here (`STEPS`), a variant has its own as a method `steps`.

Shapes: B batch, T query length, S key length, D model, H heads, K key/value heads, E head width.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, cast

from clearhead.core.attention import Attention, attention_class
from clearhead.core.config import BIASES, LEARNED_BIASES, HeadSpec, ModelConfig, NormSpec, StackSpec
from clearhead.core.config.fields import passing
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.embedding import FRONTS, TokenFront
from clearhead.core.feedforward import FeedForward, feedforward_class
from clearhead.core.heads import HEADS, LanguageHead
from clearhead.core.positions import POSITIONS, AlibiPositions, LearnedPositions, RopePositions
from clearhead.core.stack import PREVIOUS, ROUTERS, SHORTCUTS
from clearhead.core.transformer import MTP, shares_front
from clearhead.variants.blocks import plain_blocks
from clearhead.variants.kinds import Strided

Part = Literal["embedding", "positions", "attention", "cross", "feedforward", "norms", "head"]
INDEX = 8  # bytes of one id
# What an activation keeps for the backward pass besides its output: its input, but for these.
ACTIVATION_COPIES = {"relu": 0, "quick_gelu": 2}


@dataclass(frozen=True)
class Step:
    """One step of the forward pass; a matmul is `count` times [m, k] @ [k, n]."""

    name: str  # as taps name it: "blocks.3.attention.q", "encoder.norm", "head.out"
    part: Part
    parameters: int = 0  # without those that an earlier step has counted
    idle: int = 0  # the part of them in experts that a token does not visit
    m: int = 0
    n: int = 0
    k: int = 0
    count: int = 1
    gradients: int = 2  # matmuls in the backward pass: one for each factor that has a gradient
    kept: int = 0  # bytes held for the backward pass
    weights: int = 0  # of its matrix, without those that an earlier step has counted
    joined: bool = False  # training concatenates its matrix with others, anew in each pass

    @property
    def forward(self) -> int:
        """FLOPs of the forward pass."""
        return 2 * self.m * self.n * self.k * self.count

    @property
    def backward(self) -> int:
        """FLOPs of the backward pass."""
        return self.gradients * self.forward

    def reused(self) -> Self:
        """Return the same step without weights, which an earlier step has counted."""
        return dataclasses.replace(self, parameters=0, idle=0, weights=self.weights if self.joined else 0)


class Pass(NamedTuple):
    """The size of one forward pass. In half precision its weights are float32, under autocast."""

    batch: int  # rows
    size: int  # bytes of one value of a matmul
    autocast: bool = True  # else weights and the residual stream are of this size too
    mtp: bool = False  # whether MTP layers run too, and the head for each

    @property
    def wide(self) -> int:
        """Bytes of one value of a weight, of the residual stream, and where half precision is widened."""
        return max(self.size, 4) if self.autocast else self.size

    @property
    def half(self) -> bool:
        """Return True where matmuls read copies of their inputs and of their weights."""
        return self.size < self.wide


def linear_step(
    name: str, part: Part, rows: int, d_in: int, d_out: int, bias: bool, joined: bool = False, **more: int
) -> Step:
    """Return the step of a linear layer on `rows` vectors."""
    parameters, weights = (d_in + bias) * d_out, d_in * d_out
    return Step(name, part, parameters, m=rows, n=d_out, k=d_in, weights=weights, joined=joined, **more)


def norm_step(
    name: str, norm: NormSpec, run: Pass, rows: int, width: int, groups: int = 1, input_kept: bool = False
) -> Step:
    """Return the step of `groups` norms of `width` in each row; an earlier step may have kept the input.

    The input is float32 at least: the residual stream, or a copy of what a matmul returned.
    """
    parameters, values = width * (1 + norm.bias), rows * groups * width
    inputs = 0 if input_kept else values
    if norm.kind == "layernorm":
        return Step(name, "norms", parameters, kept=inputs * run.wide + 2 * rows * groups * 4)
    return Step(name, "norms", parameters, kept=(values + inputs + rows * groups) * run.wide)


def model_steps(config: ModelConfig, run: Pass, length: int, source_length: int) -> Iterator[Step]:
    """Yield every step of one forward pass, in order, from the config alone."""
    lengths, memory = [source_length, length][-len(config.stacks) :], 0
    for stack, inputs in zip(config.stacks, lengths):
        yield from stack_steps(stack, run, inputs, memory, stack is config.decoder and shares_front(config))
        memory = stack.n_tokens(inputs)
    yield from steps_of(HEADS[config.readout.head])(config.readout, run, memory)
    if config.n_mtp_layers:
        yield from steps_of(MTP["layers"])(config, run, memory)


def stack_steps(
    spec: StackSpec, run: Pass, length: int, memory: int = 0, shared_front: bool = False
) -> Iterator[Step]:
    """Yield the steps on rows of `length` inputs; the other stack counts the weights of a `shared_front`."""
    tokens, rows = spec.n_tokens(length), run.batch * spec.n_tokens(length)
    yield from embedding_steps(spec, run, length, shared_front)
    for layer, block in enumerate(spec.block_of):
        for step in block_steps(spec, run, layer, tokens, memory):
            yield step.reused() if block in spec.block_of[:layer] else step
    if spec.final_norm:
        yield norm_step(f"{spec.prefix}norm", spec.norm, run, rows, spec.d_model)
    if spec.prefix and not run.half:  # every cross-attention reads the output of this stack: it is kept once
        yield Step(f"{spec.prefix}hidden", "cross", kept=rows * spec.d_model * run.size)


def block_steps(spec: StackSpec, run: Pass, layer: int, tokens: int, memory: int) -> Iterator[Step]:
    """Yield the steps of one layer on rows of `tokens`; cross-attention reads `memory` tokens."""
    name, D, layout = f"{spec.prefix}blocks.{layer}", spec.d_model, spec.norm_position
    if spec.capacities[layer] < 1:
        yield from ROUTERS["depth"].steps(spec, run, name, layer, tokens)
    tokens = passing(spec.capacities[layer], tokens)
    if spec.carries:
        yield from SHORTCUTS["steps"](spec, run, f"{name}.shortcut", layer, run.batch * tokens)
    rows, whole = run.batch * tokens, "feedforward" in spec.feedforwards(layer)  # else a mixture
    attend = steps_of(attention_class(spec, layer))(spec, run, f"{name}.attention", tokens, spec.kinds[layer])
    sublayers: dict[Part, Iterator[Step]] = {"attention": attend}
    if spec.cross:
        sublayers["cross"] = attention_steps(spec, run, f"{name}.cross", tokens, memory, FULL, "cross")
    sublayers["feedforward"] = steps_of(feedforward_class(spec, layer))(
        spec, run, f"{name}.feedforward", rows
    )
    for part, steps in sublayers.items():
        if part in lacks_of(spec, layer):
            continue
        residual = f"{name}.{part}_residual"
        second = spec.parallel and part == "feedforward"  # it reads the same stream as attention
        shared = second and spec.parallel_norms == 1  # it reads what attention has read
        bare = part == "attention" and layer == 0 and not spec.first_norm
        if layout in ("pre", "sandwich") and not shared and not bare:
            yield norm_step(f"{residual}.before", spec.norm, run, rows, D, input_kept=second)
        if run.half or not shared:
            inputs = 2 if part == "feedforward" and spec.gated and whole else 1
            yield Step(f"{residual}.read", part, kept=(inputs if run.half else 1) * rows * D * run.size)
        yield from steps
        if layout in ("sandwich", "output"):
            yield norm_step(f"{residual}.inside", spec.norm, run, rows, D)
        if spec.dropout:
            yield Step(f"{residual}.dropout", part, kept=rows * D)
        if layout == "post":
            yield norm_step(f"{residual}.after", spec.norm, run, rows, D)


def lacks_of(spec: StackSpec, layer: int) -> set[Part]:
    """Return the sublayers that a block does not have."""
    attention: set[Part] = {"attention"} if spec.kinds[layer].name == "none" else set()
    return attention | (set() if spec.feedforwards(layer) else {"feedforward"})


def embedding_steps(spec: StackSpec, run: Pass, length: int, shared: bool) -> Iterator[Step]:
    """Yield the steps of embedding `length` inputs; a `shared` front has its weights counted elsewhere."""
    name, D, width = f"{spec.prefix}embedding", spec.d_model, spec.d_summed
    tokens = spec.n_tokens(length)
    rows = run.batch * tokens
    for step in steps_of(FRONTS[spec.input])(spec, run, f"{name}.front", length):
        yield step.reused() if shared else step
    if spec.n_types:
        yield Step(f"{name}.types", "embedding", spec.n_types * width)
    yield from steps_of(POSITIONS[spec.positions])(spec, run, f"{spec.prefix}positions", tokens)
    if spec.embedding_norm:
        yield norm_step(f"{name}.norm", spec.norm, run, rows, width)
    if spec.embedding_projection:
        yield linear_step(
            f"{name}.project", "embedding", rows, width, D, bias=True, kept=rows * width * run.size
        )
    if spec.embedding_dropout:
        yield Step(f"{name}.dropout", "embedding", kept=rows * D)
    if spec.recalls:
        yield from PREVIOUS["previous_steps"](spec, run, f"{spec.prefix}previous", rows)


def token_steps(spec: StackSpec, run: Pass, name: str, length: int) -> Iterator[Step]:
    """Yield the table, and what widens it."""
    V, width, rows = spec.vocab_size, spec.d_embedding, run.batch * length
    yield Step(f"{name}.tokens", "embedding", V * width, kept=rows * INDEX)
    if spec.project_tokens:
        kept = rows * width * run.size
        yield linear_step(f"{name}.project", "embedding", rows, width, spec.d_model, False, kept=kept)


def learned_position_steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
    """Yield the table."""
    parameters = (spec.max_positions + spec.position_offset) * spec.d_summed
    yield Step(f"{name}.table", "positions", parameters, kept=tokens * INDEX)


def rope_steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
    """Yield cosines and sines, once for each window."""
    each = 2 * spec.d_rotary * 4 * len(spec.whole_kinds)
    yield Step(f"{name}.rotary", "positions", kept=tokens * each)


def alibi_steps(spec: StackSpec, run: Pass, name: str, tokens: int) -> Iterator[Step]:
    """Yield the bias of all layers; under a causal mask, each layer keeps a masked copy instead."""
    if not spec.causal:
        whole = any(window is None or window >= tokens for window in spec.windows)
        yield Step(f"{name}.bias", "positions", kept=spec.n_heads * tokens**2 * run.size if whole else 0)


def self_attention_steps(spec: StackSpec, run: Pass, name: str, T: int, kind: Kind) -> Iterator[Step]:
    """Yield the steps of self-attention on rows of T tokens."""
    yield from attention_steps(spec, run, name, T, T, kind, "attention")


def attention_steps(
    spec: StackSpec, run: Pass, name: str, T: int, S: int, sees: Kind, kind: Literal["attention", "cross"]
) -> Iterator[Step]:
    """Yield the steps of one attention of T queries and S keys."""
    B, D, own = run.batch, spec.d_model, kind == "attention"
    H, K, E, Ev = len(spec.heads_of(name)), spec.kv_heads_of(name), spec.d_head, spec.d_value
    eager = spec.attention_softcap is not None or spec.attention_sink
    planned = own and sees.block_size is not None
    blocks = block_cost(spec, run, sees, T, H, K) if planned else None  # None: a dense mask
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
    # Values are a view of the joined matmul and keep all of it: q and k too, as they were before rotation.
    changed = spec.positions == "rope" if spec.qk_norm == "none" else run.half
    pinned = B * T * (H + K) * E * run.size if own and changed and fused and sees.shares else 0
    # Partly rotated queries are concatenated. The answer takes on their layout and, ungated, is copied again.
    gated = spec.attention_gate or spec.head_gate
    partly = fused and own and spec.positions == "rope" and spec.d_rotary < E and not gated
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
    if gated:  # its sigmoid, the answer before it, and in half precision its own input
        wide, read = (H, spec.head_gate) if spec.head_gate else (H * Ev, D)
        kept = answer + B * T * wide * run.size + (B * T * read * run.size if run.half else 0)
        yield linear_step(f"{name}.gate", kind, B * T, read, wide, spec.qkv_bias, kept=kept)
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


class BlockCost(NamedTuple):
    """What attending by blocks costs: pairs of a query and a key, bytes kept, queries that see all."""

    pairs: int
    kept: int
    whole: int


def block_cost(spec: StackSpec, run: Pass, kind: Kind, T: int, H: int, K: int) -> BlockCost | None:
    """Return the cost on rows of T tokens without padding; None where a dense mask is made."""
    blocks = plain_blocks(kind, T, spec.causal)
    if blocks is None:
        return None
    size, count, whole = blocks  # of queries, so many see all keys
    B, E, Ev = run.batch, spec.d_head, spec.d_value
    queries, met = (T + size - 1) // size * size, size * count
    pairs = queries * met + whole * T
    # Gathered keys and values, queries and answers by blocks, log-sums, masks.
    gathered = queries // size * met * K * (E + Ev) * run.size
    eager = spec.attention_softcap is not None or spec.attention_sink
    mask = (B * queries * met + whole * T) * (1 if eager else run.size)
    kept = B * (gathered + (queries + whole) * H * ((E + Ev) * run.size + 4)) + mask
    if isinstance(kind, Strided):  # scores, their exponentials, the pattern, and both answers with sums
        kept += B * H * (pairs * (2 * run.wide + run.size) + 2 * T * (Ev + 2) * run.wide)
    if whole:  # they read all of q, k and v
        kept += B * T * (H * E + K * (E + Ev)) * run.size
    return BlockCost(pairs, kept, whole)


def feedforward_steps(
    spec: StackSpec, run: Pass, name: str, rows: int, width: int | None = None, copies: int = 1, idle: int = 0
) -> Iterator[Step]:
    """Yield the steps of a feed-forward, or of `copies` experts of which a token skips `idle`, on `rows`."""
    D, F, bias = spec.d_model, width or spec.d_ff, spec.feedforward_bias
    wide_values = rows * F * run.size

    def experts(step: Step) -> Step:
        parameters, weights = copies * step.parameters, copies * step.weights
        return dataclasses.replace(step, parameters=parameters, weights=weights, idle=idle * step.parameters)

    for projection in ("gate", "up") if spec.gated else ("up",):
        activated = projection == "gate" or not spec.gated
        copies_kept = 1 + (ACTIVATION_COPIES.get(spec.activation, 1) if activated else 0)
        copies_kept += spec.gated_clamp is not None  # the input of the clamp
        kept = wide_values * copies_kept
        yield experts(linear_step(f"{name}.{projection}", "feedforward", rows, D, F, bias, kept=kept))
    if spec.feedforward_dropout:
        yield Step(f"{name}.dropout", "feedforward", kept=rows * F)
    kept = wide_values if spec.gated or spec.feedforward_dropout else 0
    yield experts(linear_step(f"{name}.down", "feedforward", rows, F, D, bias, kept=kept))


def language_steps(spec: HeadSpec, run: Pass, tokens: int) -> Iterator[Step]:
    """Yield the transform, and the matmul with the table."""
    rows, D, width, V = run.batch * tokens, spec.d_model, spec.d_embedding, spec.vocab_size
    if spec.transform or width != D:
        kept = rows * D * run.size
        yield linear_step("head.transform", "head", rows, D, width, spec.pooler_bias, kept=kept)
    if spec.transform:
        if spec.activation != "relu":
            yield Step("head.activation", "head", kept=rows * width * run.size)
        yield norm_step("head.norm", spec.norm, run, rows, width)
    kept = rows * (width + (V if spec.logit_softcap is not None else 0)) * run.size
    out = linear_step("head.out", "head", rows, width, V, spec.bias, kept=kept)
    yield dataclasses.replace(out, parameters=V if spec.bias else 0) if spec.tied else out


STEPS: dict[type, Callable[..., Iterator[Step]]] = {
    TokenFront: token_steps,
    LearnedPositions: learned_position_steps,
    RopePositions: rope_steps,
    AlibiPositions: alibi_steps,
    Attention: self_attention_steps,
    FeedForward: feedforward_steps,
    LanguageHead: language_steps,
}


def steps_of(part: type) -> Callable[..., Iterator[Step]]:
    """Return what yields the steps of a part: its own method, or what `STEPS` has for it or for its base."""
    for base in part.__mro__:
        if "steps" in vars(base):
            return cast(Callable[..., Iterator[Step]], part.steps)  # type: ignore[attr-defined]
        if base in STEPS:
            return STEPS[base]
    return lambda *sizes: iter(())  # it costs nothing: no positions, no head
