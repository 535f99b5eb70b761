"""Checks of a config: each error is one line with the value, what is allowed and the way out."""

import functools
import itertools
from collections.abc import Sequence

from clearhead import errors
from clearhead.core.config.ends import Rules, embedding_rules, head_rules
from clearhead.core.config.fields import BIASES, Fields, StackSpec
from clearhead.core.config.kinds import Blocks, Full, GatedDeltaKind, GlobalKind, Kind, Windowed
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
    family, groups, place = config.family, config.layer_groups, config.norm_position
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
                not config.first_norm and (place not in ("pre", "sandwich") or groups is not None),
                "first_norm false leaves out the norm before the first attention: "
                "it needs norm_position pre or sandwich, and no layer_groups",
            ),
            (
                config.parallel and both,
                "parallel has no place for cross-attention: "
                "choose family decoder or encoder, or parallel false",
            ),
            (
                config.parallel and place not in ("pre", "sandwich"),
                f"parallel needs norm_position pre or sandwich, not {place}",
            ),
        ]
    )


def check_specs(config: Fields, stacks: Sequence[StackSpec]) -> None:
    """Check the fields against each other, once all of them have values."""
    _check(_attention(config))
    for stack in stacks:
        _check(_heads(stack))
        _check(_mixture(stack))
        first = dict(zip(stack.block_of[::-1], stack.kinds[::-1], strict=True))
        for layer, kind in enumerate(stack.kinds):
            _check(_kind(config, stack, layer, kind, first[stack.block_of[layer]]))
    _check(_positions(config))
    for stack in stacks if config.positions == "rope" else ():
        _check(_rope(config, stack))
    _check_pruned(config, stacks)
    _check(embedding_rules(config))
    _check(head_rules(config))


def _check(rules: Rules) -> None:
    for mistake, line in rules:
        refuse(mistake, line)


def _attention(config: Fields) -> Rules:
    H, K = config.n_heads, config.n_kv_heads or config.n_heads
    active, experts = config.n_active_experts, config.n_experts
    fitting = ", ".join(str(n) for n in range(1, H + 1) if H % n == 0)
    return [
        (H % K, f"n_heads {H} is not divisible by n_kv_heads {K}: choose n_kv_heads from {fitting}"),
        (
            experts and not 1 <= active <= experts,
            f"n_active_experts {active} must lie between 1 and n_experts {experts}",
        ),
    ]


def _heads(stack: StackSpec) -> Rules:
    heads = "n_encoder_heads" if stack.prefix else "n_heads"
    return [
        (
            stack.n_heads % stack.n_kv_heads,
            f"{heads} {stack.n_heads} is not divisible by n_kv_heads {stack.n_kv_heads}",
        ),
    ]


def _mixture(stack: StackSpec) -> Rules:
    dense, last = {*stack.dense_layers}, stack.n_layers - 1
    wrong = next((layer for layer in dense if not 0 <= layer <= last), None)
    mixed = [layer for layer in range(stack.n_layers) if layer not in dense]
    whole = {stack.block_of[layer] for layer in dense if 0 <= layer <= last}
    torn = next((layer for layer in mixed if stack.block_of[layer] in whole), None)
    return [
        (wrong is not None, f"dense_layers names layer {wrong}, and there are layers 0 to {last}"),
        (not mixed, "dense_layers leaves no layer to the experts: set n_experts 0, or name fewer layers"),
        (
            torn is not None,
            f"layer {torn} shares its weights by layer_groups with one of the dense_layers: name both",
        ),
    ]


def _kind(config: Fields, stack: StackSpec, layer: int, kind: Kind, first: Kind) -> Rules:
    """Check a kind of attention against what else the config asks of its layer; `first` owns its weights."""
    said = f'attention "{kind}" of layer {layer}'
    rules: Rules = [
        (
            not (kind.shares and first.shares) and kind != first,
            f'{said} shares its weights with a layer of "{first}" by layer_groups: give both the same kind',
        ),
        (kind.both_sides and stack.causal, f"{said} reads later tokens too: it is for encoders"),
        (
            isinstance(kind, GlobalKind)
            and kind.tokens == "question"
            and (config.input != "tokens" or kind.separator >= config.vocab_size),
            f"{said} needs ids with a separator below vocab_size {config.vocab_size}: set separator",
        ),
    ]
    rules.append(
        (
            config.positions == "disentangled" and not isinstance(kind, Full | Windowed),
            f"{said} does not meet distances: with positions disentangled, choose full or window",
        )
    )
    if isinstance(kind, Blocks):
        unknown = ", and a decoder does not know where its text ends: leave it out"
        rules += [
            (kind.window % 2 == 0, f"{said} has window {kind.window}: choose an odd number of blocks"),
            (kind.last and stack.causal, f"{said} has last {kind.last}{unknown}"),
            (kind.full and stack.causal, f"{said} has full {kind.full}{unknown}"),
            (kind.repeat and not kind.first, f"{said} has repeat {kind.repeat}: set first, whom it repeats"),
        ]
    if kind.chooses:
        return rules
    own = f"{stack.prefix}blocks.{layer}.attention"
    return [
        *rules,
        (
            config.positions in BIASES,
            f"{said} has no scores to which positions {config.positions} could add a bias: "
            "choose rope, learned, sinusoidal or none",
        ),
        (config.attention_softcap is not None, f"{said} has no scores for attention_softcap: leave one out"),
        (config.attention_sink, f"{said} has no softmax for attention_sink: leave one out"),
        (
            isinstance(kind, GatedDeltaKind) and not stack.causal,
            f"{said} reads from left to right: it is for decoders",
        ),
        (
            isinstance(kind, GatedDeltaKind) and config.pruned_heads.get(own),
            f"pruned_heads names {own}, whose heads share a convolution and a gate: prune other layers",
        ),
        (
            isinstance(kind, GatedDeltaKind)
            and (kind.value_heads or stack.n_heads) % (kind.key_heads or stack.n_kv_heads),
            f"{said} has value heads that are no multiple of its key heads: set key_heads or value_heads",
        ),
    ]


def _positions(config: Fields) -> Rules:
    buckets, most, last = config.relative_buckets, 2 * config.relative_max_distance - 1, config.n_layers - 1
    apart, span, furthest = config.positions == "disentangled", buckets // 2, config.relative_max_distance
    return [
        (
            apart and config.family != "encoder",
            f"positions disentangled is for encoders, and family is {config.family}: choose rope or relative",
        ),
        (
            apart and (buckets % 2 or span < 2 or not (furthest == span or furthest > span // 2 + 1)),
            f"relative_buckets {buckets} must be even, 4 at least, and half of it be relative_max_distance "
            f"{furthest}, or a quarter of it lie below that by 2 at least",
        ),
        (
            not apart and (config.relative_norm or config.relative_terms != "both"),
            "relative_norm and relative_terms belong to positions disentangled: leave them out",
        ),
        (
            config.positions.endswith("relative") and not 4 <= buckets <= most,
            f"relative_buckets {buckets} must lie between 4 and {most}, or relative_max_distance rise",
        ),
        *(
            (not 0 <= layer <= last, f"rope_skips names layer {layer}, and there are layers 0 to {last}")
            for layer in config.rope_skips
        ),
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
