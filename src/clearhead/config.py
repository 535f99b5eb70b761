"""`ModelConfig`: everything that decides what a Transformer is, in one frozen, validated, serialisable dataclass.

The groups come in the order in which a reader meets the parts: size, embedding, positions, attention, feed-forward,
norm, dropout, head, initialisation. A value of None means "derived from the rest": `__post_init__` fills it in, so a
built config always shows the number that holds. `replace` derives anew whatever was derived before.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from clearhead.errors import ConfigError, nearest
from clearhead.typed import check_names, check_types, from_plain, plain

Family = Literal["decoder", "encoder", "encoder-decoder"]
Input = Literal["tokens", "patches", "vectors", "frames"]
PositionName = Literal["learned", "sinusoidal", "rope", "alibi", "relative", "none"]
NormName = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["pre", "post", "sandwich", "output"]
ActivationName = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"]
HeadName = Literal["lm", "mlm", "classifier", "tagger", "span", "embedding", "none"]
Pooling = Literal["cls", "mean", "last"]
Initialisation = Literal["xavier", "gpt2", "bert"]
MOST_LAYERS, MOST_WIDE = 10_000, 2**24  # what no model comes near


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
        if self.factor <= 0:
            raise ConfigError(f"rope scaling factor {self.factor} must be positive")
        if self.kind == "longrope" and (self.short_factor is None or self.long_factor is None):
            raise ConfigError(
                "rope scaling longrope needs short_factor and long_factor, one number per rotated pair"
            )


@dataclass(frozen=True)
class StackPlan:
    """What one stack of blocks (the encoder's or the decoder's) is made of: the config as a stack sees it."""

    prefix: str  # of its names in `taps` and `pruned_heads`: "" for the stack that feeds the head, else "encoder."
    input: Input
    vocab_size: int
    d_embedding: int  # width of what is embedded, before a projection to d_model
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_value: int
    attention_scale: float
    d_ff: int
    windows: tuple[int | None, ...]  # one per layer
    causal: bool
    cross: bool  # does each block also attend to another stack's output?


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Transformer, described. See the module's docstring; every field has a comment beside it."""

    # Size
    family: Family = "decoder"
    vocab_size: int = 0  # required wherever ids go in or out
    d_model: int = 512
    n_layers: int = 6  # of the decoder, or of the only stack
    n_encoder_layers: int | None = None  # encoder-decoder: None: n_layers
    n_heads: int = 8
    n_kv_heads: int | None = None  # key/value heads; None: n_heads; 1: multi-query; between: grouped-query
    n_encoder_heads: int | None = None  # encoder-decoder: None: n_heads
    d_head: int | None = None  # None: d_model / n_heads
    d_encoder_head: int | None = (
        None  # encoder-decoder: None: d_head; where that is d_model / n_heads: d_model / n_encoder_heads
    )
    d_value: int | None = None  # width of a value head; None: d_head
    d_ff: int | None = None  # None: 4 * d_model
    d_encoder_ff: int | None = None  # encoder-decoder: None: d_ff
    layer_groups: int | None = (
        None  # None: every layer its own weights; k: runs of layers share k sets of weights
    )
    pruned_heads: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict, hash=False
    )  # {"blocks.3.attention": (0, 5)}

    # Embedding
    input: Input = (
        "tokens"  # of the encoder where there is one: ids, image patches, vectors (linear) or frames (conv)
    )
    source_vocab_size: int | None = None  # encoder-decoder: None: vocab_size
    d_embedding: int | None = None  # narrower token table, projected up to d_model; None: d_model
    embedding_projection: bool | None = (
        None  # a linear layer after the tables; None: where d_embedding is not d_model
    )
    embedding_scale: float = 1.0  # the original Transformer multiplies by sqrt(d_model)
    embedding_norm: bool = False
    n_types: int = 0  # segment (token type) embeddings
    share_embeddings: bool = True  # encoder-decoder: one token table for both sides
    tie_embeddings: bool = True  # the output layer is the transposed (decoder) token table
    image_size: tuple[int, int] | None = None  # patches: height, width
    patch_size: int = 16
    n_channels: int = 3
    class_token: bool = False  # patches: a learned vector before the first patch
    d_input: int = 0  # vectors, frames: width of one input vector
    conv_kernel: int = 3  # frames: two convolutions of this width, the second with the stride below
    conv_stride: int = 2

    # Positions
    positions: PositionName = "learned"
    max_positions: int = 1024  # longest sequence; for schemes without a table, the length it is meant for
    position_offset: int = 0  # learned: rows skipped at the start of the table
    sinusoid_layout: Literal["interleaved", "half"] = (
        "interleaved"  # sin, cos, sin, cos ... or all sin, then all cos
    )
    sinusoid_ends: bool = (
        False  # slowest wave exactly 10,000 long (True) or one step short of it, as in the paper
    )
    rope_base: float = 10_000.0
    rope_local_base: float | None = (
        None  # base in layers that have a window; None: rope_base, with the scaling
    )
    rope_fraction: float = 1.0  # part of each head that is rotated
    rope_layout: Literal["half", "interleaved"] = "half"  # pairs are (i, i + E/2), or (2i, 2i + 1)
    rope_scaling: RopeScaling | None = None
    rope_skips: tuple[int, ...] = ()  # layers, counted from 0, in which nothing is rotated
    relative_buckets: int = 32
    relative_max_distance: int = 128

    # Attention
    window: int | tuple[int | None, ...] | None = (
        None  # keys nearer than this are seen; a tuple sets it per layer
    )
    attention_scale: float | None = None  # None: 1 / sqrt(d_head)
    attention_softcap: float | None = None  # scores become cap * tanh(scores / cap)
    qk_norm: Literal["none", "head", "full"] = "none"  # norm on queries and keys, per head or over all heads
    bias: bool = True  # in every linear layer and norm, unless a field below says otherwise
    qkv_bias: bool | None = None
    attention_out_bias: bool | None = None

    # Feed-forward
    activation: ActivationName = "gelu"
    gated: bool = False
    feedforward_bias: bool | None = None
    n_experts: int = 0  # 0: one feed-forward; else a mixture of them
    n_active_experts: int = 2  # how many each token visits
    router_order: Literal["topk_softmax", "softmax_topk"] = (
        "topk_softmax"  # softmax over the chosen, or over all
    )
    router_renormalise: bool = True  # softmax_topk: make the chosen weights sum to one

    # Norm
    norm: NormName = "layernorm"
    norm_position: NormPosition = "pre"
    norm_eps: float = 1e-5
    norm_bias: bool | None = None  # layernorm only
    norm_unit_offset: bool = False  # the scale is 1 + weight
    final_norm: bool | None = None  # after the last block; None: all but post-norm
    parallel: bool = False  # attention and feed-forward read the same input and are added together
    parallel_norms: Literal[1, 2] = 1  # one norm for both, or one each
    residual_scale: float = 1.0  # on what each sublayer adds

    # Dropout, in training only
    dropout: float = 0.0
    attention_dropout: float | None = None  # on attention weights; None: dropout
    embedding_dropout: float | None = None  # None: dropout
    feedforward_dropout: float = 0.0  # between the two feed-forward layers
    layer_drop: float = 0.0  # stochastic depth: chance that a row of the batch skips a sublayer

    # Head
    head: HeadName | None = None  # None: classifier if n_classes is set, else lm or (encoder) mlm
    n_classes: int = 0
    pooling: Pooling | None = None  # None: cls for a bidirectional model, last for a causal one
    pooler: Literal["none", "tanh", "relu"] = "none"  # a dense layer after pooling
    normalise: bool = False  # embedding: scale the vector to length one
    head_transform: bool | None = None  # lm, mlm: dense, activation, norm before the output; None: mlm only
    head_activation: ActivationName | None = None  # of that transform; None: activation
    head_bias: bool | None = None  # None: all but lm
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    # Initialisation
    init: Initialisation = "gpt2"
    init_std: float = 0.02

    # ------------------------------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        check_types(self)
        self._check_sizes()
        for name, value in self._derived().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_attention()
        self._check_embedding()
        self._check_head()

    def _derived(self) -> dict[str, Any]:
        """What each field that may be None is when nobody sets it."""
        both = self.family == "encoder-decoder"
        if self.d_head is None and self.d_model % self.n_heads:
            fitting = ", ".join(str(n) for n in range(1, self.d_model + 1) if self.d_model % n == 0)
            raise ConfigError(
                f"d_model {self.d_model} is not divisible by n_heads {self.n_heads}: set d_head, or choose n_heads from {fitting}"
            )
        usual_head = "classifier" if self.n_classes else "mlm" if self.family == "encoder" else "lm"
        usual_d_head, usual_d_ff = self.d_model // self.n_heads, 4 * self.d_model
        # Where the decoder's heads divide d_model among them, the encoder's do too.
        divided = (
            self.n_encoder_heads is not None
            and self.d_head in (None, usual_d_head)
            and self.d_model % self.n_heads == 0
        )
        if divided and self.d_encoder_head is None and self.d_model % (self.n_encoder_heads or 1):
            raise ConfigError(
                f"d_model {self.d_model} is not divisible by n_encoder_heads {self.n_encoder_heads}: set d_encoder_head"
            )
        head, d_head, d_ff = self.head or usual_head, self.d_head or usual_d_head, self.d_ff or usual_d_ff
        return {
            "n_encoder_layers": self.n_layers if both else None,
            "n_kv_heads": self.n_heads,
            "n_encoder_heads": self.n_heads if both else None,
            "d_head": usual_d_head,
            "d_encoder_head": (self.d_model // (self.n_encoder_heads or 1) if divided else d_head)
            if both
            else None,
            "d_value": d_head,
            "d_ff": usual_d_ff,
            "d_encoder_ff": d_ff if both else None,
            "source_vocab_size": self.vocab_size if both else None,
            "d_embedding": self.d_model,
            "embedding_projection": self.d_embedding not in (None, self.d_model),
            "attention_scale": d_head**-0.5,
            "qkv_bias": self.bias,
            "attention_out_bias": self.bias,
            "feedforward_bias": self.bias,
            "norm_bias": self.bias and self.norm == "layernorm",
            "final_norm": self.norm_position != "post",
            "attention_dropout": self.dropout,
            "embedding_dropout": self.dropout,
            "head": usual_head,
            "pooling": "cls" if self.family == "encoder" else "last",
            "head_transform": head == "mlm",
            "head_activation": self.activation,
            "head_bias": head != "lm",
        }

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed; what stands at its derived value is derived anew, unless it is named."""
        check_names(ModelConfig, changes)
        derived = {name: None for name, value in self._derived().items() if getattr(self, name) == value}
        return dataclasses.replace(self, **{**derived, **changes})

    # What the model is built from -------------------------------------------------------------------------------------

    @property
    def encoder(self) -> StackPlan | None:
        """The bidirectional stack, or None."""
        if self.family == "decoder":
            return None
        if self.family == "encoder":
            return self._plan(
                "",
                self.n_layers,
                self.n_heads,
                self.n_kv_heads,
                self.d_ff,
                self.input,
                self.vocab_size,
                self.d_head,
            )
        kv_heads = self.n_encoder_heads if self.n_kv_heads == self.n_heads else self.n_kv_heads
        return self._plan(
            "encoder.",
            self.n_encoder_layers,
            self.n_encoder_heads,
            kv_heads,
            self.d_encoder_ff,
            self.input,
            self.source_vocab_size,
            self.d_encoder_head,
        )

    @property
    def decoder(self) -> StackPlan | None:
        """The causal stack, or None."""
        if self.family == "encoder":
            return None
        both = self.family == "encoder-decoder"
        kind: Input = "tokens" if both else self.input
        plan = self._plan(
            "", self.n_layers, self.n_heads, self.n_kv_heads, self.d_ff, kind, self.vocab_size, self.d_head
        )
        return dataclasses.replace(plan, causal=True, cross=both)

    def _plan(
        self,
        prefix: str,
        layers: int | None,
        heads: int | None,
        kv: int | None,
        d_ff: int | None,
        kind: Input,
        vocab: int | None,
        d_head: int | None,
    ) -> StackPlan:
        width = self.d_embedding if kind == "tokens" else self.d_model
        assert (
            width is not None
            and layers is not None
            and heads is not None
            and kv is not None
            and d_ff is not None
            and vocab is not None
        )
        assert (
            d_head is not None
            and self.d_head is not None
            and self.d_value is not None
            and self.attention_scale is not None
        )
        windows = self.window if isinstance(self.window, tuple) else (self.window,) * layers
        # What follows from the width of a head follows from this stack's.
        d_value = d_head if self.d_value == self.d_head else self.d_value
        scale = d_head**-0.5 if self.attention_scale == self.d_head**-0.5 else self.attention_scale
        return StackPlan(
            prefix,
            kind,
            vocab,
            width,
            layers,
            heads,
            kv,
            d_head,
            d_value,
            scale,
            d_ff,
            windows,
            causal=False,
            cross=False,
        )

    @property
    def n_patches(self) -> int:
        """Patches of one image (patch models)."""
        assert self.image_size is not None
        height, width = self.image_size
        return (height // self.patch_size) * (width // self.patch_size)

    def kept_heads(self, attention: str, n_heads: int) -> tuple[int, ...]:
        """The heads, of `n_heads`, that the attention of this name still has."""
        gone = set(self.pruned_heads.get(attention, ()))
        return tuple(head for head in range(n_heads) if head not in gone)

    def first_sharing(self, layer: int, n_layers: int) -> int:
        """The first of a stack's layers that has the same weights as this one; the layer itself where none are shared."""
        groups = min(self.layer_groups or n_layers, n_layers)
        return -(-(layer * groups // n_layers) * n_layers // groups)

    # Cross-checks -----------------------------------------------------------------------------------------------------

    def _check_sizes(self) -> None:
        for name in (
            "d_model",
            "n_layers",
            "n_heads",
            "max_positions",
            "patch_size",
            "n_channels",
            "conv_kernel",
            "conv_stride",
        ):
            _positive(name, getattr(self, name))
        widths = ("d_head", "d_encoder_head", "d_value", "d_ff", "d_encoder_ff", "d_embedding")
        for name in ("n_encoder_layers", "n_kv_heads", "n_encoder_heads", *widths):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in (
            "n_layers",
            "n_encoder_layers",
            "d_model",
            "n_heads",
            "n_kv_heads",
            "n_encoder_heads",
            *widths,
        ):
            most = MOST_LAYERS if name.endswith("layers") else MOST_WIDE
            if (getattr(self, name) or 0) > most:
                raise ConfigError(
                    f"{name} {getattr(self, name):,} is more than any model has: {most:,} is the most"
                )
        for name in ("vocab_size", "n_types", "n_experts", "n_classes", "d_input", "position_offset"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} {getattr(self, name)} must be 0 or more")
        for name in ("rope_base", "rope_local_base", "attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ConfigError(f"{name} {getattr(self, name)} must be above 0")
        for name in (
            "dropout",
            "attention_dropout",
            "embedding_dropout",
            "feedforward_dropout",
            "layer_drop",
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(
                    f"{name} {value} is not a probability: choose 0 (off) up to, but not including, 1"
                )
        if self.init_std < 0:
            raise ConfigError(f"init_std {self.init_std} must be 0 or more: 0.02 is usual")
        if self.norm_eps <= 0:
            raise ConfigError(f"norm_eps {self.norm_eps} must be above 0: 1e-5 is usual")
        if self.norm == "rmsnorm" and self.norm_bias:
            raise ConfigError("rmsnorm has no bias: leave norm_bias unset, or choose norm layernorm")
        if self.layer_groups is not None and not 1 <= self.layer_groups <= self.n_layers:
            raise ConfigError(
                f"layer_groups {self.layer_groups} must lie between 1 and n_layers {self.n_layers}"
            )
        if self.family != "encoder-decoder":
            for name in (
                "n_encoder_layers",
                "n_encoder_heads",
                "d_encoder_head",
                "d_encoder_ff",
                "source_vocab_size",
            ):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name} belongs to family encoder-decoder, and this is {self.family}: leave it out"
                    )
        if self.parallel and self.family == "encoder-decoder":
            raise ConfigError(
                "parallel has no place for cross-attention: choose family decoder or encoder, or parallel false"
            )
        if self.parallel and self.norm_position not in ("pre", "sandwich"):
            raise ConfigError(f"parallel needs norm_position pre or sandwich, not {self.norm_position}")

    def _check_attention(self) -> None:
        assert self.n_kv_heads is not None and self.d_head is not None
        if self.n_heads % self.n_kv_heads:
            fitting = ", ".join(str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0)
            raise ConfigError(
                f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}: choose n_kv_heads from {fitting}"
            )
        if (
            self.n_encoder_heads is not None
            and self.n_kv_heads != self.n_heads
            and self.n_encoder_heads % self.n_kv_heads
        ):
            raise ConfigError(
                f"n_encoder_heads {self.n_encoder_heads} is not divisible by n_kv_heads {self.n_kv_heads}"
            )
        if isinstance(self.window, tuple):
            for layers, name in ((self.n_layers, "n_layers"), (self.n_encoder_layers, "n_encoder_layers")):
                if layers is not None and len(self.window) != layers:
                    raise ConfigError(
                        f"window lists {len(self.window)} layers and {name} is {layers}: give one entry per layer, or one number"
                    )
        for window in self.window if isinstance(self.window, tuple) else (self.window,):
            if window is not None:
                _positive("window", window)
        for d_head in {self.d_head, self.d_encoder_head or self.d_head} if self.positions == "rope" else ():
            rotated = rotated_width(d_head, self.rope_fraction)
            if not 0 < self.rope_fraction <= 1 or rotated < 2:
                raise ConfigError(
                    f"rope_fraction {self.rope_fraction} of d_head {d_head} rotates no pair: choose above 0, up to 1"
                )
            if rotated % 2:
                raise ConfigError(
                    f"rope rotates pairs, and {rotated} of d_head {d_head} is odd: choose an even d_head or another rope_fraction"
                )
            self._check_scaling(rotated // 2)
        for layer in self.rope_skips:
            if not 0 <= layer < self.n_layers:
                raise ConfigError(
                    f"rope_skips names layer {layer}, and there are layers 0 to {self.n_layers - 1}"
                )
        if self.positions == "relative" and not 4 <= self.relative_buckets < 2 * self.relative_max_distance:
            most = 2 * self.relative_max_distance - 1
            raise ConfigError(
                f"relative_buckets {self.relative_buckets} must lie between 4 and {most}, or relative_max_distance rise"
            )
        if self.n_experts and not 1 <= self.n_active_experts <= self.n_experts:
            raise ConfigError(
                f"n_active_experts {self.n_active_experts} must lie between 1 and n_experts {self.n_experts}"
            )
        self._check_pruned()

    def _check_scaling(self, pairs: int) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        if scaling.kind == "dynamic" and pairs < 2:
            raise ConfigError(
                "rope scaling dynamic needs two rotated pairs at least: choose a wider d_head or another kind"
            )
        for name, factors in (("short_factor", scaling.short_factor), ("long_factor", scaling.long_factor)):
            if scaling.kind == "longrope" and factors is not None and len(factors) != pairs:
                raise ConfigError(
                    f"rope scaling {name} lists {len(factors)} numbers, and {pairs} pairs are rotated: give one for each"
                )

    def _check_pruned(self) -> None:
        plans = [plan for plan in (self.encoder, self.decoder) if plan is not None]
        sizes = {
            f"{plan.prefix}blocks.{layer}.{part}": (plan.n_heads, plan.n_heads // plan.n_kv_heads)
            for plan in plans
            for layer in range(plan.n_layers)
            for part in (("attention", "cross") if plan.cross else ("attention",))
        }
        for name, heads in self.pruned_heads.items():
            if name not in sizes:
                raise ConfigError(
                    f'pruned_heads names "{name}", which this model has not{nearest(name, sizes)}'
                )
            n_heads, group = sizes[name]
            if any(not 0 <= head < n_heads for head in heads) or len(set(heads)) != len(heads):
                raise ConfigError(
                    f"pruned_heads of {name} are {list(heads)}: name each of the heads 0 to {n_heads - 1} once at most"
                )
            if len(heads) == n_heads:
                raise ConfigError(
                    f"pruned_heads of {name} leaves no head: keep one at least, or drop the layer"
                )
            members = {head // group for head in heads}
            if len(heads) != len(members) * group:
                raise ConfigError(
                    f"pruned_heads of {name} splits a key/value group: heads go by whole groups of {group}"
                )
        if self.pruned_heads and self.qk_norm == "full":
            raise ConfigError(
                "pruned_heads would change the norm that qk_norm full takes over all heads: choose qk_norm head or none"
            )
        for plan in plans if self.pruned_heads and self.layer_groups is not None else ():
            for layer, part in itertools.product(range(plan.n_layers), ("attention", "cross")):
                first = self.first_sharing(layer, plan.n_layers)
                one, other = (
                    set(self.pruned_heads.get(f"{plan.prefix}blocks.{n}.{part}", ())) for n in (first, layer)
                )
                if one != other:
                    raise ConfigError(
                        f"pruned_heads differ in layers {first} and {layer}, and layer_groups shares weights between them: "
                        "name the same heads for both"
                    )

    def _check_embedding(self) -> None:
        if self.d_embedding != self.d_model and not self.embedding_projection:
            raise ConfigError(
                f"d_embedding {self.d_embedding} must be projected to d_model {self.d_model}: leave embedding_projection out"
            )
        if self.input != "tokens" and self.family != "encoder-decoder" and self.head in ("lm", "mlm"):
            raise ConfigError(
                f"head {self.head} predicts ids and input is {self.input}: choose head classifier, tagger, embedding or none"
            )
        texts = self.input == "tokens" or self.family == "encoder-decoder" or self.head in ("lm", "mlm")
        if texts and self.vocab_size < 1:
            raise ConfigError("vocab_size is not set: give the number of tokens of the tokenizer, 1 at least")
        if (
            self.family == "encoder-decoder"
            and self.input == "tokens"
            and self.share_embeddings
            and self.source_vocab_size != self.vocab_size
        ):
            raise ConfigError(
                f"share_embeddings needs one vocabulary, and source_vocab_size {self.source_vocab_size} differs from "
                f"vocab_size {self.vocab_size}: set share_embeddings false"
            )
        if self.input == "patches":
            if self.image_size is None:
                raise ConfigError("input patches needs image_size, as (height, width)")
            if (
                any(side % self.patch_size for side in self.image_size)
                or min(self.image_size) < self.patch_size
            ):
                raise ConfigError(
                    f"image_size {self.image_size} is not a whole number of patches of {self.patch_size}: change one of the two"
                )
        if self.input in ("vectors", "frames"):
            _positive("d_input", self.d_input)
        if self.conv_kernel % 2 == 0:
            raise ConfigError(
                f"conv_kernel {self.conv_kernel} is even, and would shift the frames: choose an odd width"
            )
        if self.class_token and self.input != "patches":
            raise ConfigError(
                f"class_token belongs to input patches, and input is {self.input}: put a CLS id in the text instead"
            )
        if self.positions == "learned" and self.input == "patches" and self.family != "encoder-decoder":
            needed = self.n_patches + self.class_token
            if self.max_positions < needed:
                raise ConfigError(
                    f"max_positions {self.max_positions} is below the {needed} positions of one image: raise it"
                )

    def _check_head(self) -> None:
        if self.head in ("classifier", "tagger") and self.n_classes < 1:
            raise ConfigError(f"head {self.head} needs n_classes, 1 at least")
        if self.head == "mlm" and self.family != "encoder":
            raise ConfigError(
                f"head mlm reads both sides of a mask and family is {self.family}: choose family encoder, or head lm"
            )

    # JSON -------------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The config as plain JSON values; fields at their default are left out."""
        values: dict[str, Any] = {"family": self.family}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            default = (
                entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
            )
            if value != default:
                values[entry.name] = plain(value)
        return values

    def to_json(self) -> str:
        """The config as a JSON text that `from_json` reads back into an equal config."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """A config from plain JSON values; an unknown name is an error that suggests the nearest known one."""
        return from_plain(cls, values)

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """A config from the text that `to_json` wrote."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"config is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"config must be a JSON object, not {type(values).__name__}")
        return cls.from_dict(values)


def rotated_width(d_head: int, fraction: float) -> int:
    """How many leading columns of a head RoPE rotates."""
    return int(d_head * fraction)


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} {value} must be 1 or more")
