"""Kinds of attention that a config may name besides "full" and "window": their sizes, rules and states.

To add one: a class here, its name in `KINDS` (`core.config.kinds`), its module in `ATTENTIONS`
(`core.attention`). Rules take tensors of any shapes that broadcast, so that masks over pairs,
over gathered blocks and inside a compiled kernel are one rule.

Shapes: B batch (1 where all rows are alike), T query length, S key length.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.config.fields import Fields, StackSpec
from clearhead.core.config.kinds import Kind, Rule, Windowed, near, with_sinks
from clearhead.core.masks import TokenInfo
from clearhead.core.taps import SILENT, Tap

FeatureMap = Literal["elu", "relu", "favor"]
GlobalTokens = Literal["first", "question", "given"]
ABSENT = -1e30  # the log scale of a key that is not there; finite, since the difference of two is taken


@dataclass(frozen=True)
class Dilated(Kind):
    """Every `step`-th key on each side, `size` of them with the query's own, and the first `sinks` tokens."""

    name = "dilated"
    size: int = 128
    step: int = 2
    sinks: int = 0

    @property
    def reach(self) -> int | None:
        """The window that all of them lie in."""
        return (self.size - 1) * self.step + 1

    def rule(self, causal: bool) -> Rule:
        """Return the rule; see `Kind`."""
        size, step = self.size, self.step

        def chosen(q: Tensor, k: Tensor, totals: Tensor | None) -> Tensor:
            distance = (q - k).abs()
            return (distance < size * step) & (distance % step == 0)

        return with_sinks(chosen, self.sinks)


@dataclass(frozen=True)
class Strided(Kind):
    """Keys nearer than `step`, and every key at a multiple of `step` from the query (Sparse Transformer)."""

    name = "strided"
    step: int = 128
    sinks: int = 0

    @property
    def near(self) -> Windowed:
        """The kind that chooses the keys nearer than a step, and the sinks."""
        return Windowed(self.step, self.sinks)

    @property
    def block_size(self) -> int | None:
        """The blocks of the nearer keys; those farther away are attended by columns."""
        return self.near.block_size

    def rule(self, causal: bool) -> Rule:
        """Return the rule; see `Kind`."""
        step = self.step

        def chosen(q: Tensor, k: Tensor, totals: Tensor | None) -> Tensor:
            distance = (q - k).abs()
            return (distance < step) | (distance % step == 0)

        return with_sinks(chosen, self.sinks)


@dataclass(frozen=True)
class Blocks(Kind):
    """Blocks of keys around the query's own, global tokens, and blocks at random (BigBird, Longformer)."""

    name = "blocks"
    size: int = 64  # tokens of a block
    window: int = 3  # blocks around the query's own, which is one of them: an odd number
    first: int = 0  # tokens at the beginning that see all and are seen by all
    last: int = 0  # the same at the end
    random: int = 0  # blocks at random for each block of queries
    seed: int = 0
    sinks: int = 0
    counted: Literal["tokens", "blocks"] = "tokens"  # what first and last count
    repeat: int = 0  # how many times more the first ones stand in the softmax of the queries between the ends
    full: int = 0  # in rows of up to so many tokens, every query sees every key once

    def sees_all(self, length: int) -> bool:
        """Return whether the rows are short enough to be read in full."""
        return length <= self.full

    @property
    def block_size(self) -> int | None:
        """The blocks that it goes by."""
        return self.size

    def rule(self, causal: bool) -> Rule:
        """Return the rule; see `Kind`."""
        size, window, offsets = self.size, self.window, self.random_offsets()

        def chosen(q: Tensor, k: Tensor, totals: Tensor | None) -> Tensor:
            k_block = k // size
            seen = (q // size - k_block).abs() <= window // 2
            for target in self.random_blocks(q, totals, causal, offsets):
                seen = seen | (k_block == target)
            start, end = self.between_ends(totals)
            seen = seen | (q < start) | (k < start)
            if totals is not None and end is not None:
                seen = seen | (q >= end) | (k >= end) | (totals <= self.full)
            return seen

        return with_sinks(chosen, self.sinks)

    def between_ends(self, totals: Tensor | None) -> tuple[int, Tensor | None]:
        """Return where global tokens end, and by `totals` where they begin again: [B|1, T]."""
        if self.counted == "tokens":
            return self.first, None if totals is None else totals - self.last
        last_block = None if totals is None else (totals + self.size - 1) // self.size - self.last
        return self.first * self.size, None if last_block is None else last_block * self.size

    def random_offsets(self) -> list[int]:
        """Return the start of each random draw, by seed: `flex_attention` compiles integers of 31 bits."""
        return [(n * 0x85EBCA77 + self.seed * 0xC2B2AE3D + 1) & 0x7FFFFFFF for n in range(self.random)]

    def random_blocks(
        self, queries: Tensor, totals: Tensor | None, causal: bool, offsets: list[int]
    ) -> list[Tensor]:
        """Draw a block of keys for each query, one for each offset, by the query's own block: [B|1, T].

        A decoder's query draws among the blocks up to its own, so that it needs no later token to know them.
        """
        block, drawn = queries // self.size, []
        among = block + 1 if causal or totals is None else (totals + self.size - 1) // self.size
        for offset in offsets:
            mixed = (block * 0x9E3779B1 + offset) & 0x7FFFFFFF
            for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
                mixed = ((mixed ^ (mixed >> shift)) * factor) & 0x7FFFFFFF
            drawn.append(mixed % among.clamp(min=1))
        return drawn

    def describe(self, tokens: TokenInfo, causal: bool, ids: Tensor, global_mask: Tensor | None) -> TokenInfo:
        """Return an encoder's tokens with `totals`: one more than the last position of each document."""
        if causal:
            return tokens
        last = torch.where(tokens.real_mask(), tokens.positions, -1)
        if tokens.documents is None:
            return dataclasses.replace(tokens, totals=(last.amax(1, keepdim=True) + 1).expand_as(last))
        starts = torch.ones_like(tokens.documents)
        starts[:, 1:] = tokens.documents[:, 1:] != tokens.documents[:, :-1]
        run = (starts.cumsum(1) - 1).expand_as(last)  # number of each document in its row
        ends = torch.full_like(last, -1).scatter_reduce(1, run, last, "amax")
        return dataclasses.replace(tokens, totals=ends.gather(1, run) + 1)

    def with_counts(
        self,
        bias: Tensor | None,
        queries: TokenInfo,
        keys: TokenInfo,
        dtype: torch.dtype,
        name: str = "",
        tap: Tap = SILENT,
    ) -> Tensor | None:
        """Add the logarithm of how often each key stands in the softmax: [B|1, 1|H, T, S], or None.

        `name` ends the name of the step.
        """
        if not self.repeat or (queries.plain and self.sees_all(queries.length)):
            return bias
        start, end = self.between_ends(queries.totals)
        between = queries.positions >= start
        if queries.totals is not None and end is not None:
            between = between & (queries.positions < end) & (queries.totals > self.full)
        counted = (between[:, :, None] & (keys.positions < start)[:, None])[:, None]
        counts = tap.step(f"counts{name}", torch.where(counted, math.log1p(self.repeat), 0.0).to(dtype))
        return counts if bias is None else bias + counts

    def mistakes(self, config: Fields, stack: StackSpec, layer: int) -> Iterator[str]:
        """Yield what is wrong; see `Kind`."""
        name = self.of_layer(layer)
        if self.window % 2 == 0:
            yield f"{name} has window {self.window}: choose an odd number of blocks"
        for end in ("last", "full"):
            if getattr(self, end) and stack.causal:
                unknown = "a decoder does not know where its text ends: leave it out"
                yield f"{name} has {end} {getattr(self, end)}, and {unknown}"
        if self.repeat and not self.first:
            yield f"{name} has repeat {self.repeat}: set first, whom it repeats"


@dataclass(frozen=True)
class BlockCausal(Kind):
    """Every key of the query's own block, and of the blocks before it (BD3-LM).

    Tokens of a finished block never see later ones, so that a cache may hold them.
    """

    name = "block-causal"
    both_sides = True
    size: int = 4  # tokens of a block

    def sees_all(self, length: int) -> bool:
        """Return whether the rows are one block."""
        return length <= self.size

    def rule(self, causal: bool) -> Rule:
        """Return the rule; see `Kind`."""
        return lambda q, k, totals: k // self.size <= q // self.size

    def mistakes(self, config: Fields, stack: StackSpec, layer: int) -> Iterator[str]:
        """Yield what is wrong; see `Kind`."""
        if {*stack.kinds} != {self}:
            yield f"{self.of_layer(layer)} is undone by a layer that sees more: give every layer this kind"


@dataclass(frozen=True)
class GlobalKind(Kind):
    """Keys nearer than `size`, and global tokens, which see all and are seen by all (Longformer).

    Global tokens attend through projections of their own. Each call names the global tokens, as
    `global_mask`; `tokens` says it where a call does not.
    """

    name = "global"
    shares = False
    both_sides = True
    size: int = 257
    tokens: GlobalTokens = "first"  # the first; those before the first separator; none
    separator: int = 2  # question: the id that ends it; a row without one has no global tokens
    sinks: int = 0

    def sees_all(self, length: int) -> bool:
        """Return whether the window is as wide as the row."""
        return length <= self.size

    @property
    def nearby(self) -> int | None:
        """The window."""
        return self.size

    @property
    def global_tokens(self) -> str | None:
        """The field `tokens`."""
        return self.tokens

    def rule(self, causal: bool) -> Rule:
        """Return the window; `TokenInfo.globals` come on top."""
        return near(self.size, self.sinks)

    def describe(self, tokens: TokenInfo, causal: bool, ids: Tensor, global_mask: Tensor | None) -> TokenInfo:
        """Return the tokens with `globals`: which real ones see all, as `global_mask` or this kind says."""
        real = tokens.real_mask()
        if global_mask is not None:
            chosen = global_mask & real
        elif self.tokens == "first":
            chosen = (tokens.positions == 0) & real
        elif self.tokens == "question":
            separators = ((ids == self.separator) & real).cumsum(1)
            chosen = (separators == 0) & (separators[:, -1:] > 0) & real
        else:
            return tokens
        return dataclasses.replace(tokens, globals=chosen)

    def mistakes(self, config: Fields, stack: StackSpec, layer: int) -> Iterator[str]:
        """Yield what is wrong; see `Kind`."""
        unmarked = config.input != "tokens" or self.separator >= config.vocab_size
        if self.tokens == "question" and unmarked:
            needs = f"needs ids with a separator below vocab_size {config.vocab_size}"
            yield f"{self.of_layer(layer)} {needs}: set separator"


@dataclass(frozen=True)
class LinearKind(Kind):
    """A feature map in place of the softmax, so that keys add up to a state."""

    name = "linear"
    masked = False
    shares = False
    untapped = ("scores",)
    state_begins = (0.0, ABSENT)
    features: FeatureMap = "elu"
    count: int = 0  # favor: random features; 0: d_head · log(d_head), rounded up
    seed: int = 0  # favor: of these features

    def n_features(self, spec: StackSpec) -> int:
        """Return the number of features of a query or key."""
        if self.features != "favor":
            return spec.d_head
        return self.count or math.ceil(spec.d_head * math.log(spec.d_head))

    def state_shapes(self, spec: StackSpec, heads: int) -> list[tuple[int, ...]]:
        """Return the shapes of the sums of features times values, and of their largest scales."""
        return [(heads, self.n_features(spec), spec.d_value + 1), (heads,)]


@dataclass(frozen=True)
class LowRank(Kind):
    """Keys and values mixed into `rank` of each by learned weights over positions (Linformer)."""

    name = "low-rank"
    shares = False
    both_sides = bounded = True
    masked = patterned = False  # its shares are of mixtures
    rank: int = 64


@dataclass(frozen=True)
class Recurrent(Kind):
    """What reads from left to right, after a short convolution: a state stands in place of keys."""

    shares = has_heads = False
    masked = patterned = False
    untapped: ClassVar[tuple[str, ...]] = ("scores", "pattern")

    def mistakes(self, config: Fields, stack: StackSpec, layer: int) -> Iterator[str]:
        """Yield what is wrong; see `Kind`."""
        name, own = self.of_layer(layer), f"{stack.prefix}blocks.{layer}.attention"
        if not stack.causal:
            yield f"{name} reads from left to right: it is for decoders"
        if config.pruned_heads.get(own):
            yield f"pruned_heads names {own}, whose heads share a convolution and a gate: prune other layers"


@dataclass(frozen=True)
class GatedDeltaKind(Recurrent):
    """The gated delta rule, with a short convolution and an output gate (Gated DeltaNet)."""

    name = "gated-delta"
    key_heads: int = 0  # 0: n_kv_heads
    value_heads: int = 0  # 0: n_heads
    d_key: int = 0  # of a head; 0: d_head
    d_value: int = 0  # 0: d_value
    kernel: int = 4  # tokens that the convolution sees

    def sizes(self, spec: StackSpec) -> tuple[int, int, int, int]:
        """Return key heads, value heads and the widths of both; the stack's own where the kind says 0."""
        return (
            self.key_heads or spec.n_kv_heads,
            self.value_heads or spec.n_heads,
            self.d_key or spec.d_head,
            self.d_value or spec.d_value,
        )

    def state_shapes(self, spec: StackSpec, heads: int) -> list[tuple[int, ...]]:
        """Return the shapes of the memory, and of the inputs that the convolution still needs."""
        keys, values, d_key, d_value = self.sizes(spec)
        return [(values, d_key, d_value), (self.kernel - 1, 2 * keys * d_key + values * d_value)]

    def mistakes(self, config: Fields, stack: StackSpec, layer: int) -> Iterator[str]:
        """Yield what is wrong; see `Kind`."""
        yield from super().mistakes(config, stack, layer)
        keys, values, *_ = self.sizes(stack)
        if values % keys:
            multiple = "has value heads that are no multiple of its key heads"
            yield f"{self.of_layer(layer)} {multiple}: set key_heads or value_heads"


@dataclass(frozen=True)
class Mamba2Kind(Recurrent):
    """A memory that decays by a scalar of each head and token, after a short convolution (Mamba-2)."""

    name = "mamba2"
    heads: int = 0  # 0: n_heads
    groups: int = 1  # of heads that share keys and queries, which are called B and C there
    d_head: int = 0  # 0: d_head
    d_state: int = 128  # width of a key: the memory of a head is d_state x d_head
    kernel: int = 4  # tokens that the convolution sees
    dt_min: float = 0.0  # a step, the strength of a write, is at least this
    dt_max: float = math.inf  # and at most this
    norm: Literal["all", "groups", "none"] = "all"  # over all heads, or those of each group, after the gate
    norm_first: bool = False  # before the gate
    bias: bool = False  # in the linear layers
    conv_bias: bool = True
    gate_scale: float = 1.0  # what each layer computes of a token is multiplied by its number
    v_scale: float = 1.0
    k_scale: float = 1.0
    q_scale: float = 1.0
    dt_scale: float = 1.0

    def sizes(self, spec: StackSpec) -> tuple[int, int]:
        """Return the number of heads and their width; the stack's own where the kind says 0."""
        return self.heads or spec.n_heads, self.d_head or spec.d_head

    def state_shapes(self, spec: StackSpec, heads: int) -> list[tuple[int, ...]]:
        """Return the shapes of the memory, and of the inputs that the convolution still needs."""
        count, width = self.sizes(spec)
        return [
            (count, self.d_state, width),
            (self.kernel - 1, count * width + 2 * self.groups * self.d_state),
        ]

    def mistakes(self, config: Fields, stack: StackSpec, layer: int) -> Iterator[str]:
        """Yield what is wrong; see `Kind`."""
        yield from super().mistakes(config, stack, layer)
        heads, name = self.sizes(stack)[0], self.of_layer(layer)
        if heads % self.groups:
            yield f"{name} has {heads} heads, no multiple of its {self.groups} groups: set heads or groups"
        if not 0 <= self.dt_min <= self.dt_max:
            yield f"{name} has dt_min {self.dt_min} and dt_max {self.dt_max}: raise dt_max"
        if self.norm == "none" and self.norm_first:
            yield f"{name} has no norm to come first: choose norm all or groups, or leave norm_first out"


@dataclass(frozen=True)
class HybridKind(Mamba2Kind):
    """Every key, and a Mamba-2 mixer of the same input; both are added (Falcon-H1).

    A cache keeps keys and the mixer's state.
    """

    name = "hybrid"
    masked = stateful = True
    patterned = True  # of its heads; of what its mixer adds it says nothing
    untapped = ()
    also_tapped = ("mixer.q", "mixer.k", "mixer.v", "mixer.z", "mixer.out")
    attention_in: float = 1.0  # the input of attention is multiplied by it
    attention_out: float = 1.0  # what attention adds is multiplied by it
    mixer_in: float = 1.0  # the same of the mixer
    mixer_out: float = 1.0

    def sees_all(self, length: int) -> bool:
        """Return True."""
        return True

    def mistakes(self, config: Fields, stack: StackSpec, layer: int) -> Iterator[str]:
        """Yield what is wrong; see `Kind`."""
        yield from super().mistakes(config, stack, layer)
        name = self.of_layer(layer)
        if config.attention_gate:
            yield f"{name} has a gate in its mixer: leave attention_gate out"
        if stack.capacities[layer] < 1:
            yield f"{name} keeps keys and a state, for every token: leave depth_capacity out"


@dataclass(frozen=True)
class ShortConvKind(Recurrent):
    """A short convolution between two gates (LFM2)."""

    name = "conv"
    kernel: int = 3  # tokens that the convolution sees
    bias: bool = False  # in the linear layers and the convolution

    def state_shapes(self, spec: StackSpec, heads: int) -> list[tuple[int, ...]]:
        """Return the shape of the inputs that the convolution still needs."""
        return [(self.kernel - 1, spec.d_model)]


@dataclass(frozen=True)
class NoKind(Kind):
    """No attention: the block has a feed-forward alone."""

    name = "none"
    shares = has_heads = False
    masked = patterned = False
    untapped = ("q", "k", "v", "scores", "pattern", "z")

    def kept(self, spec: StackSpec, attention: str) -> tuple[int, int, int]:
        """Return that nothing is kept."""
        return 0, 0, 0


@dataclass(frozen=True)
class Latent(Kind):
    """Every key, of keys and values that are made of one latent a token (multi-head latent attention).

    A cache keeps the latent, and the key that all heads share: the columns that rotate, `rope_fraction` of a
    head and the last ones of it. What makes queries, keys and values of latents has no bias.
    """

    name = "latent"
    shares = False
    rank: int = 64  # width of the latent of keys and values
    query_rank: int = 0  # width of the latent of queries; 0: they are made of the token itself
    top: int = 0  # an indexer chooses so many keys for each query (sparse attention); 0: there is none
    index_heads: int = 64  # of the indexer
    index_width: int = 128  # of a head of the indexer, and of the key that it makes of a token

    def sees_all(self, length: int) -> bool:
        """Return True: the indexer chooses among all keys."""
        return True

    def kept(self, spec: StackSpec, attention: str) -> tuple[int, int, int]:
        """Return one head: the shared key, with that of the indexer, and the latent in place of a value."""
        return 1, spec.d_rotary + (self.index_width if self.top else 0), self.rank

    def mistakes(self, config: Fields, stack: StackSpec, layer: int) -> Iterator[str]:
        """Yield what is wrong; see `Kind`."""
        name, rotates = self.of_layer(layer), f"rotates {stack.d_rotary} of {stack.d_head} columns of a head"
        if config.positions != "rope":
            yield f"{name} tells order by columns that rotate: set positions rope, and rope_fraction"
        if stack.d_rotary >= stack.d_head:
            yield f"{name} {rotates}, and a latent makes the others: set rope_fraction below 1"
        if stack.n_kv_heads != stack.n_heads:
            yield f"{name} makes keys for each of {stack.n_heads} heads: leave n_kv_heads out"
        if config.qk_norm != "none":
            yield f"{name} has norms on its latents: leave qk_norm {config.qk_norm} out"
        if self.top and not self.query_rank:
            yield f"{name} has an indexer that reads the latent of queries: set query_rank"
        if self.top and self.index_width < stack.d_rotary:
            yield f"{name} {rotates}, and the indexer's index_width must be as wide at least"


def block_length(spec: StackSpec) -> int | None:
    """Return the tokens of a block, where attention is block-causal; in every layer or in none."""
    kind = spec.kinds[0]
    return kind.size if isinstance(kind, BlockCausal) else None


def denoises(config: ModelConfig) -> bool:
    """Return whether this is a diffusion language model: a bidirectional one that predicts masked tokens."""
    return config.family == "encoder" and config.head == "lm" and config.input == "tokens"


def shortened(kind: Kind, most: int) -> Kind:
    """Return the same kind with sizes of at most `most` tokens, for tests on short inputs."""
    sizes = ("size", "step", "first", "last", "sinks", "full")
    limited = {name: min(most, getattr(kind, name)) for name in sizes if hasattr(kind, name)}
    if isinstance(kind, Blocks):  # several windows of blocks are to fit into a row
        limited["size"] = min(limited["size"], max(1, most // 2))
    return dataclasses.replace(kind, **limited)
