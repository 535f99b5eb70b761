"""The fields of a config, and the specifications they become.

`Fields` is what a user asks for. `resolve` derives a field that is None there from the others, as its comment
says. The parts of a model are built from `StackSpec` and `HeadSpec`, where every value is final.
`StackFields` is what a user and a stack have in common.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from clearhead.core.config.kinds import Kind, Windowed
from clearhead.errors import ConfigError, check_names, check_types, refuse

Family = Literal["decoder", "encoder", "encoder-decoder"]
Input = Literal["tokens", "patches", "vectors", "frames"]
PositionName = Literal[
    "learned", "sinusoidal", "rope", "alibi", "relative", "learned+relative", "disentangled", "none"
]
TABLES = ("learned", "learned+relative")  # schemes with a vector for each position, up to max_positions
BIASES = ("alibi", "relative", "learned+relative")  # those that add a bias to the scores, one for each head
LEARNED_BIASES = ("relative", "learned+relative", "disentangled")  # those whose scores learn by distance
NormName = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["pre", "post", "sandwich", "output"]
ActivationName = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "relu2"]
PoolerName = Literal["none", "tanh", ActivationName]
HeadName = Literal["lm", "mlm", "classifier", "tagger", "span", "embedding", "none"]
Pooling = Literal["cls", "mean", "last"]
Initialisation = Literal["xavier", "gpt2", "bert"]
MOST_LAYERS, MOST_WIDE = 10_000, 2**24  # far beyond any model


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary angles are stretched beyond the length a model was trained on."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = 1.0  # longrope: 1 stands for max_positions / original_positions
    original_positions: int | None = None  # trained length; None: the model's max_positions
    low_frequency_factor: float = 1.0  # llama3: wavelengths longer than original / low are divided by factor
    high_frequency_factor: float = 4.0  # llama3: wavelengths shorter than original / high are kept
    beta_fast: float = 32.0  # yarn: rotations over the trained length above which a pair is kept
    beta_slow: float = 1.0  # yarn: rotations below which a pair is interpolated
    truncate: bool = True  # yarn: round the ends of the ramp to whole pairs
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin; None: from the factor
    mscale: float | None = None  # yarn: the two weights from which some models derive attention_factor
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None  # longrope: one divisor per pair within the trained length
    long_factor: tuple[float, ...] | None = None  # longrope: and beyond it

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            refuse(value <= 0, f"rope scaling {name} {value} must be positive", ConfigError)
        refuse(
            self.kind == "longrope" and (self.short_factor is None or self.long_factor is None),
            "rope scaling longrope needs short_factor and long_factor, one number per rotated pair",
            ConfigError,
        )


@dataclass(frozen=True, kw_only=True)
class StackFields:
    """Fields that users set and a stack takes over unchanged; None switches a feature off."""

    # Size
    vocab_size: int = 0  # required wherever ids go in or out
    d_model: int = 512  # width of the residual stream
    n_layers: int = 6  # of the decoder, or of the only stack
    n_heads: int = 8  # queries of each token, side by side
    # by attention: {"blocks.3.attention": (0, 5)}
    pruned_heads: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)

    # Embedding
    # of the encoder where there is one: ids, image patches, vectors (linear) or frames (conv)
    input: Input = "tokens"
    embedding_scale: float = 1.0  # the original Transformer multiplies by sqrt(d_model)
    embedding_norm: bool = False  # a norm after the embedding
    # a narrower token table is widened by itself, without a bias, before segments and positions are added
    project_tokens: bool = False
    n_types: int = 0  # segment (token type) embeddings
    smear_gate: int = 0  # adds the embedding before, gated by so many leading columns of the token; 0: off
    bigrams: int = 0  # rows of a table of vectors for pairs of tokens, found by a hash; 0: none
    patch_size: int = 16  # patches: height and width of a square, in pixels
    n_channels: int = 3  # patches: 3 for colour, 1 for grey
    class_token: bool = False  # patches: a learned vector before the first patch
    patch_bias: bool = True  # patches, vectors: in their projection
    d_input: int = 0  # vectors, frames: width of one input vector
    conv_kernel: int = 3  # frames: two convolutions of this width, the second with the stride below
    conv_stride: int = 2  # frames: 2 halves their number

    # Positions
    positions: PositionName = "learned"  # how order is told: a table, waves, rotation or a bias
    max_positions: int = 1024  # longest sequence; for schemes without a table, the length it is meant for
    position_offset: int = 0  # learned: rows skipped at the start of the table
    sinusoid_layout: Literal["interleaved", "half"] = "interleaved"  # sin, cos, sin, ...; half: all sin first
    sinusoid_ends: bool = False  # slowest frequency exactly 1/10,000, not one step above it as in the paper
    rope_base: float = 10_000.0  # larger: slower rotation, for longer texts
    rope_local_base: float | None = None  # base in layers with a window; None: rope_base, with the scaling
    rope_layout: Literal["half", "interleaved"] = "half"  # pairs are (i, i + E/2), or (2i, 2i + 1)
    rope_scaling: RopeScaling | None = None  # beyond the trained length; see RopeScaling
    rope_skips: tuple[int, ...] = ()  # layers, counted from 0, in which nothing is rotated
    # rotated pairs of each axis, as time, height, width of a token of an image (mrope); (): positions alone
    rope_sections: tuple[int, ...] = ()
    rope_axial: bool = False  # the frequencies of each section begin anew; else all are those of one head
    relative_buckets: int = 32  # relative: biases per head, by distance; disentangled: vectors
    relative_max_distance: int = 128  # relative, disentangled: from here on, one bucket
    # disentangled: queries meet the vector of a distance ("c2p"), keys do ("p2c"), or both
    relative_terms: Literal["both", "c2p", "p2c"] = "both"
    relative_norm: bool = False  # disentangled: a norm on those vectors

    # Attention
    attention_softcap: float | None = None  # scores become cap * tanh(scores / cap)
    attention_sink: bool = False  # a learned score per head that no key has: it takes weight from all of them
    # what the heads found, times a sigmoid of a projection; gated-delta layers have a gate of their own
    attention_gate: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"  # norm on queries and keys, per head or over all heads
    head_gate: int = 0  # a gate of one number for each head, made of so many leading columns; 0: none
    value_residual: bool = False  # values are mixed with those of the first layer, by two learned numbers
    value_embeddings: tuple[int, ...] = ()  # layers, counted from 0, whose values a table of tokens adds to

    # Feed-forward
    activation: ActivationName = "gelu"  # between the two linear layers
    gated: bool = False  # a third layer: activation(gate) * up
    # gated: before the activation the gate is at most this, and what it multiplies lies within -this and this
    gated_clamp: float | None = None
    gated_shift: float = 0.0  # gated: added to what the gate multiplies, after the clamp
    gate_scale: float = 1.0  # gated: the gate is multiplied by it, before its activation
    up_scale: float = 1.0  # gated: what the gate multiplies is multiplied by it
    n_experts: int = 0  # 0: one feed-forward; else a mixture of them
    n_active_experts: int = 2  # how many each token visits
    # softmax over the chosen, or over all; or a sigmoid of each
    router_order: Literal["topk_softmax", "softmax_topk", "sigmoid_topk"] = "topk_softmax"
    router_renormalise: bool = True  # softmax_topk, sigmoid_topk: make the chosen weights sum to one
    router_bias: bool = False  # in the layer that chooses experts
    # sigmoid_topk: a number for each expert, added where they are chosen, and not to their weights; training
    # moves it against the expert's load, in place of a loss that spreads tokens
    router_correction: bool = False
    router_groups: int = 1  # experts are chosen from the best groups of neighbours alone
    n_active_groups: int = 1  # how many groups that is
    router_scale: float = 1.0  # the weights of the chosen are multiplied by it
    d_shared_expert: int = 0  # width of one more expert that each token visits; 0: none
    shared_expert_gate: bool = True  # what it answers is weighed by a sigmoid
    dense_layers: tuple[int, ...] = ()  # layers, counted from 0, with one feed-forward in place of a mixture
    feedforward_skips: tuple[int, ...] = ()  # layers, counted from 0, with attention alone

    # Residual
    norm_position: NormPosition = "pre"  # before or after a sublayer, both, or on its output
    first_norm: bool = True  # False: no pre-norm in the first attention; the embedding norm replaces it
    parallel: bool = False  # attention and feed-forward read the same input and are added together
    parallel_norms: Literal[1, 2] = 1  # one norm for both, or one each
    residual_scale: float = 1.0  # on what each sublayer adds
    input_skips: bool = False  # each layer reads the stream and the first layer's input, by learned numbers
    mirror_skips: bool = False  # U-shaped: the last layer also reads what the first one left, and so on

    # Dropout, in training only
    dropout: float = 0.0  # on embeddings and what sublayers add
    feedforward_dropout: float = 0.0  # between the two feed-forward layers
    layer_drop: float = 0.0  # stochastic depth: chance that a row of the batch skips a sublayer

    @property
    def rotates_by_length(self) -> bool:
        """Whether angles depend on the longest row of a call, so on all that is read together."""
        return self.rope_scaling is not None and self.rope_scaling.kind in ("dynamic", "longrope")


@dataclass(frozen=True, kw_only=True)
class Fields(StackFields):
    """All that a user may say about a Transformer: `StackFields`, and what is derived or not a stack's."""

    # Size
    family: Family = "decoder"  # which stacks there are, and who sees the future
    n_encoder_layers: int | None = None  # encoder-decoder: None: n_layers
    n_kv_heads: int | None = None  # key/value heads; None: n_heads; 1: multi-query; between: grouped-query
    n_encoder_heads: int | None = None  # encoder-decoder: None: n_heads
    d_head: int | None = None  # None: d_model / n_heads
    # encoder-decoder: None: d_head; where that is d_model / n_heads: d_model / n_encoder_heads
    d_encoder_head: int | None = None
    d_value: int | None = None  # width of a value head; None: d_head
    d_ff: int | None = None  # None: 4 * d_model
    d_encoder_ff: int | None = None  # encoder-decoder: None: d_ff
    max_encoder_positions: int | None = None  # encoder-decoder: None: max_positions
    d_expert: int | None = None  # width of an expert; None: d_ff
    layer_groups: int | None = None  # None: every layer its own weights; k: runs of layers share k sets
    # (first, layers, times): a span of layers, used several times; n_layers counts every use
    loop: tuple[int, int, int] | None = None
    n_mtp_layers: int = 0  # decoder: layers that predict tokens after the next one (multi-token prediction)

    # Embedding
    source_vocab_size: int | None = None  # encoder-decoder: None: vocab_size
    d_embedding: int | None = None  # narrower token table, projected up to d_model; None: d_model
    # a linear layer after the tables; None: where d_embedding is not d_model
    embedding_projection: bool | None = None
    share_embeddings: bool = True  # encoder-decoder: one token table for both sides
    tie_embeddings: bool = True  # the output layer is the transposed (decoder) token table
    image_size: tuple[int, int] | None = None  # patches: height, width

    # Attention
    # kind of attention, such as "linear(elu)": see `kinds`; a tuple sets it per layer, and is repeated
    attention: str | tuple[str, ...] = "full"
    window: int | tuple[int | None, ...] | None = None  # attention "window(128)", for short; or by layer
    attention_scale: float | None = None  # None: 1 / sqrt(d_head)
    rope_fraction: float = 1.0  # part of each head that is rotated

    # Depth
    # mixture of depths: share of the tokens that a router sends through a layer, in every second layer;
    # a tuple sets it per layer, and is repeated
    depth_capacity: float | tuple[float, ...] = 1.0

    # Biases
    bias: bool = True  # in every linear layer and norm, unless a field below says otherwise
    qkv_bias: bool | None = None  # None: bias
    # of keys alone; softmax is invariant to it, unless RoPE rotates it; None: qkv_bias
    key_bias: bool | None = None
    attention_out_bias: bool | None = None  # None: bias
    feedforward_bias: bool | None = None  # None: bias
    norm_bias: bool | None = None  # layernorm only; None: bias

    # Norm
    norm: NormName = "layernorm"  # rmsnorm: no mean is subtracted, and no bias
    norm_eps: float = 1e-5  # added to the variance before the root
    norm_unit_offset: bool = False  # the scale is 1 + weight
    final_norm: bool | None = None  # after the last block; None: all but post-norm

    # Dropout, in training only
    attention_dropout: float | None = None  # on attention weights; None: dropout
    embedding_dropout: float | None = None  # None: dropout

    # Head
    head: HeadName | None = None  # None: classifier if n_classes is set, else lm or (encoder) mlm
    n_classes: int = 0  # classifier, tagger: number of labels
    pooling: Pooling | None = None  # None: cls for a bidirectional model, last for a causal one
    pooler: PoolerName = "none"  # a dense layer after pooling (tagger, span: on each token), its activation
    pooler_bias: bool = True  # in that layer, and in the dense layer of head_transform
    pooler_norm: bool = False  # a norm after that layer
    normalise: bool = False  # embedding: scale the vector to length one
    head_transform: bool | None = None  # lm, mlm: dense, activation, norm before the output; None: mlm only
    head_layer: bool = False  # tagger, span: a feed-forward, added and normalised, before the output
    head_activation: ActivationName | None = None  # of that transform or layer; None: activation
    head_bias: bool | None = None  # None: all but lm
    logit_scale: float = 1.0  # logits are multiplied by it
    logit_softcap: float | None = None  # logits become cap * tanh(logits / cap)

    # Initialisation
    init: Initialisation = "gpt2"  # the distribution of fresh weights
    init_std: float = 0.02  # spread of fresh weights; xavier has its own
    zero_init: bool = False  # weights that write to the residual stream begin at 0

    def __new__(cls, *values: object, **named: object) -> Self:
        """Refuse an unknown name, with the nearest one, before Python does without it."""
        check_names(cls, named)
        return super().__new__(cls)


def passing(share: float, tokens: int) -> int:
    """Return how many of `tokens` go through a layer that takes a share of them: one at least, rounded up."""
    return math.ceil(share * tokens - 1e-9)


@dataclass(frozen=True)
class NormSpec:
    """A norm of any width."""

    kind: NormName
    eps: float
    bias: bool
    unit_offset: bool


@dataclass(frozen=True, kw_only=True)
class StackSpec(StackFields):
    """Everything that the parts of one stack, the encoder's or the decoder's, are built from.

    Fields that are not explained here mean what they mean in `Fields`, for this stack.
    """

    prefix: str  # of its tap names: "" for the stack that feeds the head, else "encoder."
    causal: bool
    cross: bool  # each block also attends to another stack's output

    n_kv_heads: int
    d_head: int
    d_value: int
    d_ff: int
    d_expert: int
    block_of: tuple[int, ...]  # number of the block of each layer; layers that share weights have the same
    d_embedding: int  # width of the token table
    embedding_projection: bool  # of the sum of tokens, segments and positions, to d_model
    image_size: tuple[int, int]
    d_rotary: int  # leading columns of a head that RoPE rotates
    kinds: tuple[Kind, ...]  # of attention, one per layer
    capacities: tuple[float, ...]  # of each layer, the share of the tokens that go through; 1: all
    attention_scale: float
    qkv_bias: bool
    key_bias: bool
    attention_out_bias: bool
    feedforward_bias: bool
    norm: NormSpec
    final_norm: bool
    attention_dropout: float
    embedding_dropout: float

    @property
    def carries(self) -> bool:
        """Whether layers read more of earlier ones than the stream that the last of them left."""
        return bool(self.input_skips or self.mirror_skips or self.value_residual or self.value_embeddings)

    @property
    def recalls(self) -> bool:
        """Whether a token reads the one before it in front of the first layer."""
        return bool(self.smear_gate or self.bigrams)

    @property
    def stateful(self) -> bool:
        """Whether a cache keeps a state of earlier tokens."""
        return self.recalls or any(kind.stateful for kind in self.kinds)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer of another kind."""
        return tuple(kind.size if isinstance(kind, Windowed) else None for kind in self.kinds)

    @functools.cached_property
    def whole_kinds(self) -> tuple[Kind, ...]:
        """The different kinds of attention of the layers that all tokens go through."""
        return tuple(dict.fromkeys(kind for kind, share in zip(self.kinds, self.capacities) if share == 1))

    @property
    def d_summed(self) -> int:
        """Width of tokens, segments and positions when they are added."""
        return self.d_model if self.project_tokens else self.d_embedding

    @property
    def bounded(self) -> bool:
        """Whether weights belong to positions, so that none past `max_positions` can be read."""
        return self.positions in TABLES or any(kind.bounded for kind in self.kinds)

    @property
    def n_patches(self) -> int:
        """Number of patches of one image."""
        height, width = self.image_size
        return (height // self.patch_size) * (width // self.patch_size)

    def n_tokens(self, length: int) -> int:
        """Return the number of tokens that the front makes of `length` inputs."""
        if self.input == "patches":
            return self.n_patches + self.class_token
        stride = self.conv_stride if self.input == "frames" else 1
        return (length + stride - 1) // stride  # rounded up

    def state_shapes(self, layer: int) -> list[tuple[int, ...]]:
        """Return the shapes of what a layer keeps of one row in place of keys; none if it keeps keys."""
        return self.kinds[layer].state_shapes(
            self, self.kv_heads_of(f"{self.prefix}blocks.{layer}.attention")
        )

    def feedforwards(self, layer: int) -> dict[str, int]:
        """Return the width of each feed-forward of a layer, by its name in the block; experts are several."""
        if layer in self.feedforward_skips:
            return {}
        if not self.n_experts or layer in self.dense_layers:
            return {"feedforward": self.d_ff}
        experts = {f"feedforward.experts.{number}": self.d_expert for number in range(self.n_experts)}
        return {**experts, **({"feedforward.shared": self.d_shared_expert} if self.d_shared_expert else {})}

    def heads_of(self, attention: str) -> tuple[int, ...]:
        """Return the heads that pruning has left in the attention of this name."""
        gone = self.pruned_heads.get(attention, ())
        return tuple(head for head in range(self.n_heads) if head not in gone)

    def kv_heads_of(self, attention: str) -> int:
        """Return the number of key/value heads left there; heads are pruned by whole groups."""
        return len(self.heads_of(attention)) * self.n_kv_heads // self.n_heads


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """Everything that the head is built from; fields mean what they mean in `Fields`."""

    head: HeadName
    d_model: int
    d_embedding: int
    vocab_size: int
    n_classes: int  # of a span: begins here, ends here
    tied: bool  # the output layer is the token table
    pooling: Pooling
    pooler: PoolerName
    pooler_bias: bool
    pooler_norm: bool
    normalise: bool
    transform: bool
    head_layer: bool
    d_ff: int
    activation: ActivationName
    bias: bool
    logit_scale: float
    logit_softcap: float | None
    norm: NormSpec
    dropout: float
