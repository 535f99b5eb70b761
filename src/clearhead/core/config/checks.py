"""Checks of a config: each error is one line with the value, what is allowed and the way out."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from clearhead import errors
from clearhead.core.config.fields import BIASES, TABLES, Fields, StackSpec
from clearhead.core.config.kinds import Full, Kind, Rules, Windowed
from clearhead.core.config.registry import Registry
from clearhead.core.config.typed import check_least, check_values
from clearhead.errors import ConfigError, nearest

refuse = functools.partial(errors.refuse, error=ConfigError)

MOST_LAYERS, MOST_WIDE = 10_000, 2**24  # far beyond any model
LAYERS = ("n_layers", "n_encoder_layers")
HEADS = ("n_heads", "n_kv_heads", "n_encoder_heads")
WIDTHS = ("d_model", "d_head", "d_encoder_head", "d_value", "d_ff", "d_encoder_ff", "d_expert", "d_embedding")
COUNTS = (
    *("max_positions", "max_encoder_positions", "patch_size", "n_channels"),
    *("conv_kernel", "conv_stride"),
)
FROM_ZERO = (
    "vocab_size",
    "n_types",
    "n_experts",
    "d_shared_expert",
    "n_classes",
    "d_input",
    "position_offset",
)
ABOVE_ZERO = ("rope_base", "rope_local_base", "attention_softcap", "logit_softcap", "gated_clamp")
PROBABILITIES = ("dropout", "attention_dropout", "embedding_dropout", "feedforward_dropout", "layer_drop")
GATED = ("gated_clamp", "gated_shift")
MIXTURE = ("router_bias", "d_expert", "d_shared_expert", "dense_layers")
TWO_STACKS = (
    *("n_encoder_layers", "n_encoder_heads", "d_encoder_head", "d_encoder_ff"),
    *("max_encoder_positions", "source_vocab_size"),
)
# What may be wrong with the fields of a variant, asked of a config that uses it.
VARIANTS: Registry[Callable[[Fields, Sequence[StackSpec]], Rules]] = Registry(
    {
        "experts": "clearhead.variants.routing:expert_mistakes",
        "depth": "clearhead.variants.routing:depth_mistakes",
        "relative": "clearhead.variants.positions:relative_mistakes",
        "learned+relative": "clearhead.variants.positions:relative_mistakes",
        "disentangled": "clearhead.variants.positions:disentangled_mistakes",
    }
)


def check_given(config: Fields) -> None:
    """Check each field by itself, before anything is derived from it."""
    check_least(config, 1, *LAYERS, *HEADS, *WIDTHS, *COUNTS)
    for names, most in ((LAYERS, MOST_LAYERS), ((*HEADS, *WIDTHS), MOST_WIDE)):
        for name in names:
            value = getattr(config, name) or 0
            refuse(value > most, f"{name} {value:,} is more than any model has: {most:,} is the most")
    check_least(config, 0, *FROM_ZERO)
    check_values(config, ABOVE_ZERO, lambda value: bool(value > 0), "must be above 0")
    check_values(
        config,
        PROBABILITIES,
        allowed=lambda p: 0 <= p < 1,
        rule="is not a probability: choose 0 (off) up to, but not including, 1",
    )
    if config.depth_capacity != 1:
        _check(VARIANTS["depth"](config, ()))
    family, groups, layout = config.family, config.layer_groups, config.norm_position
    both = family == "encoder-decoder"
    _check(
        [
            (config.init_std < 0, f"init_std {config.init_std} must be 0 or more: 0.02 is usual"),
            (config.attention_scale == 0, "attention_scale 0 makes every score 0: leave it out"),
            (config.norm_eps <= 0, f"norm_eps {config.norm_eps} must be above 0: 1e-5 is usual"),
            *(
                (
                    not config.gated and getattr(config, name),
                    f"{name} {getattr(config, name)} needs a gate: set gated true, or leave {name} out",
                )
                for name in GATED
            ),
            *(
                (
                    not config.n_experts and getattr(config, name),
                    f"{name} needs a router: set n_experts, or leave {name} out",
                )
                for name in MIXTURE
            ),
            (
                config.norm == "rmsnorm" and config.norm_bias,
                "rmsnorm has no bias: leave norm_bias unset, or choose norm layernorm",
            ),
            (
                groups is not None and not 1 <= groups <= config.n_layers,
                f"layer_groups {groups} must lie between 1 and n_layers {config.n_layers}",
            ),
            *(
                (
                    not both and getattr(config, name) is not None,
                    f"{name} belongs to family encoder-decoder, and this is {family}: leave it out",
                )
                for name in TWO_STACKS
            ),
            (
                not config.first_norm and (layout not in ("pre", "sandwich") or groups is not None),
                "first_norm false leaves out the norm before the first attention: "
                "it needs norm_position pre or sandwich, and no layer_groups",
            ),
            (
                config.parallel and both,
                "parallel has no place for cross-attention: "
                "choose family decoder or encoder, or parallel false",
            ),
            (
                config.parallel and layout not in ("pre", "sandwich"),
                f"parallel needs norm_position pre or sandwich, not {layout}",
            ),
        ]
    )


def check_specs(config: Fields, stacks: Sequence[StackSpec]) -> None:
    """Check the fields against each other, once all of them have values."""
    H, K, last = config.n_heads, config.n_kv_heads or config.n_heads, config.n_layers - 1
    fitting = ", ".join(str(n) for n in range(1, H + 1) if H % n == 0)
    _check([(H % K, f"n_heads {H} is not divisible by n_kv_heads {K}: choose n_kv_heads from {fitting}")])
    for stack in stacks:
        heads, K = "n_encoder_heads" if stack.prefix else "n_heads", stack.n_kv_heads
        _check([(stack.n_heads % K, f"{heads} {stack.n_heads} is not divisible by n_kv_heads {K}")])
        first = dict(zip(stack.block_of[::-1], stack.kinds[::-1], strict=True))
        for layer, kind in enumerate(stack.kinds):
            _check(_kind(config, stack, layer, kind, first[stack.block_of[layer]]))
    apart = config.positions == "disentangled"
    _check(
        [
            (
                not apart and (config.relative_norm or config.relative_terms != "both"),
                "relative_norm and relative_terms belong to positions disentangled: leave them out",
            ),
            *(
                (not 0 <= layer <= last, f"rope_skips names layer {layer}, and there are layers 0 to {last}")
                for layer in config.rope_skips
            ),
        ]
    )
    for name in (*(["experts"] if config.n_experts else []), config.positions):
        if name in VARIANTS:
            _check(VARIANTS[name](config, stacks))
    for stack in stacks if config.positions == "rope" else ():
        _check(_rope(config, stack))
    _check_pruned(config, stacks)
    _check(_embedding(config))
    _check(_head(config))


def _check(rules: Iterable[tuple[object, str]]) -> None:
    for mistake, line in rules:
        refuse(mistake, line)


def _kind(config: Fields, stack: StackSpec, layer: int, kind: Kind, first: Kind) -> Rules:
    """Check a kind of attention against what else the config asks of its layer; `first` owns its weights."""
    said, scoreless = kind.of_layer(layer), not kind.chooses
    return [
        (
            not (kind.shares and first.shares) and kind != first,
            f'{said} shares its weights with a layer of "{first}" by layer_groups: give both the same kind',
        ),
        (kind.both_sides and stack.causal, f"{said} reads later tokens too: it is for encoders"),
        (
            config.positions == "disentangled" and not isinstance(kind, Full | Windowed),
            f"{said} does not meet distances: with positions disentangled, choose full or window",
        ),
        (
            scoreless and config.positions in BIASES,
            f"{said} has no scores to which positions {config.positions} could add a bias: "
            "choose rope, learned, sinusoidal or none",
        ),
        (
            scoreless and config.attention_softcap is not None,
            f"{said} has no scores for attention_softcap: leave one out",
        ),
        (scoreless and config.attention_sink, f"{said} has no softmax for attention_sink: leave one out"),
        *kind.mistakes(config, stack, layer),
    ]


def _rope(config: Fields, stack: StackSpec) -> Rules:
    fraction, scaling, pairs = config.rope_fraction, config.rope_scaling, stack.d_rotary // 2
    kind = scaling.kind if scaling is not None else None
    listed = {
        name: len(getattr(scaling, name))
        for name in (("short_factor", "long_factor") if kind == "longrope" else ())
    }
    return [
        (
            not 0 < fraction <= 1 or stack.d_rotary < 2,
            f"rope_fraction {fraction} of d_head {stack.d_head} rotates no pair: choose above 0, up to 1",
        ),
        (
            stack.d_rotary % 2,
            f"rope rotates pairs, and {stack.d_rotary} of d_head {stack.d_head} is odd: "
            "choose an even d_head or another rope_fraction",
        ),
        (
            kind == "dynamic" and pairs < 2,
            "rope scaling dynamic needs two rotated pairs at least: choose a wider d_head or another kind",
        ),
        *(
            (
                count != pairs,
                f"rope scaling {name} lists {count} numbers, and {pairs} pairs are rotated: "
                "give one for each",
            )
            for name, count in listed.items()
        ),
    ]


def _check_pruned(config: Fields, stacks: Sequence[StackSpec]) -> None:
    parts = {
        f"{stack.prefix}blocks.{layer}.{part}": stack
        for stack in stacks
        for layer in range(stack.n_layers)
        for part in (("attention", "cross") if stack.cross else ("attention",))
    }
    for name, heads in config.pruned_heads.items():
        refuse(
            name not in parts,
            f'pruned_heads names "{name}", which this model has not{nearest(name, parts)}',
        )
        H, group = parts[name].n_heads, parts[name].n_heads // parts[name].n_kv_heads
        _check(
            [
                (
                    any(not 0 <= head < H for head in heads) or len(set(heads)) != len(heads),
                    f"pruned_heads of {name} are {list(heads)}: "
                    f"name each of the heads 0 to {H - 1} once at most",
                ),
                (
                    len(heads) == H,
                    f"pruned_heads of {name} leaves no head: keep one at least, or drop the layer",
                ),
                (
                    len(heads) != len({head // group for head in heads}) * group,
                    f"pruned_heads of {name} splits a key/value group: heads go by whole groups of {group}",
                ),
            ]
        )
    refuse(
        config.pruned_heads and config.qk_norm == "full",
        "pruned_heads would change the norm that qk_norm full takes over all heads: "
        "choose qk_norm head or none",
    )
    for stack, part in itertools.product(stacks if config.pruned_heads else (), ("attention", "cross")):
        for layer, block in enumerate(stack.block_of):
            first = stack.block_of.index(block)
            one, other = (stack.heads_of(f"{stack.prefix}blocks.{n}.{part}") for n in (first, layer))
            refuse(
                one != other,
                f"pruned_heads differ in layers {first} and {layer}, and layer_groups shares weights between "
                "them: name the same heads for both",
            )


def _embedding(config: Fields) -> Rules:
    """Return what may be wrong with what goes in: tables, patches, vectors, frames."""
    both, kind, head = config.family == "encoder-decoder", config.input, config.head
    predicts = head in ("lm", "mlm")
    reads = kind == "tokens" or both or predicts
    shared = both and kind == "tokens" and config.share_embeddings
    return [
        (
            config.d_embedding != config.d_model and not config.embedding_projection,
            f"d_embedding {config.d_embedding} must be projected to d_model {config.d_model}: "
            "leave embedding_projection out",
        ),
        (
            config.project_tokens and config.d_embedding == config.d_model,
            f"project_tokens widens a narrower token table, and d_embedding is d_model {config.d_model}: "
            "leave project_tokens out",
        ),
        (
            kind != "tokens" and not both and predicts,
            f"head {head} predicts ids and input is {kind}: "
            "choose head classifier, tagger, embedding or none",
        ),
        (
            reads and config.vocab_size < 1,
            "vocab_size is not set: give the number of tokens of the tokenizer, 1 at least",
        ),
        (
            shared and config.source_vocab_size != config.vocab_size,
            f"share_embeddings needs one vocabulary, and source_vocab_size {config.source_vocab_size} "
            f"differs from vocab_size {config.vocab_size}: set share_embeddings false",
        ),
        *(_image(config) if kind == "patches" else ()),
        (
            kind in ("vectors", "frames") and config.d_input < 1,
            f"d_input {config.d_input} must be 1 or more",
        ),
        (
            config.conv_kernel % 2 == 0,
            f"conv_kernel {config.conv_kernel} is even, and would shift the frames: choose an odd width",
        ),
        (
            config.class_token and kind != "patches",
            f"class_token belongs to input patches, and input is {kind}: put a CLS id in the text instead",
        ),
        (
            not config.patch_bias and kind != "patches",
            f"patch_bias belongs to input patches, and input is {kind}: leave it out",
        ),
    ]


def _image(config: Fields) -> Rules:
    if config.image_size is None:
        return [(True, "input patches needs image_size, as (height, width)")]
    size, patch = config.image_size, config.patch_size
    needed = (size[0] // patch) * (size[1] // patch) + config.class_token
    table = config.positions in TABLES and config.family != "encoder-decoder"
    return [
        (
            any(side % patch for side in size) or min(size) < patch,
            f"image_size {size} is not a whole number of patches of {patch}: change one of the two",
        ),
        (
            table and config.max_positions < needed,
            f"max_positions {config.max_positions} is below the {needed} positions of one image: raise it",
        ),
    ]


def _head(config: Fields) -> Rules:
    """Return what may be wrong with the head."""
    layered = config.head_layer and config.head not in ("tagger", "span")
    return [
        (
            config.head in ("classifier", "tagger") and config.n_classes < 1,
            f"head {config.head} needs n_classes, 1 at least",
        ),
        (
            config.pooler_norm and config.pooler == "none",
            "pooler_norm follows a pooler, and there is none: choose pooler tanh or an activation",
        ),
        (layered, f"head_layer is for head tagger or span, and head is {config.head}: leave it out"),
        (
            config.head == "mlm" and config.family != "encoder",
            f"head mlm reads both sides of a mask and family is {config.family}: "
            "choose family encoder, or head lm",
        ),
    ]
