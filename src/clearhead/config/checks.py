"""Checks of a config: each error is one line with the value, what is allowed and the way out."""

import functools
import itertools
from collections.abc import Sequence

from clearhead import errors
from clearhead.config.fields import Fields, StackSpec
from clearhead.errors import ConfigError, nearest

refuse = functools.partial(errors.refuse, error=ConfigError)

MOST_LAYERS, MOST_WIDE = 10_000, 2**24  # far beyond any model
LAYERS = ("n_layers", "n_encoder_layers")
HEADS = ("n_heads", "n_kv_heads", "n_encoder_heads")
WIDTHS = ("d_model", "d_head", "d_encoder_head", "d_value", "d_ff", "d_encoder_ff", "d_embedding")
SIZES = (*LAYERS, *HEADS, *WIDTHS)
COUNTS = ("max_positions", "patch_size", "n_channels", "conv_kernel", "conv_stride")
ABOVE_ZERO = ("rope_base", "rope_local_base", "attention_softcap", "logit_softcap")
PROBABILITIES = ("dropout", "attention_dropout", "embedding_dropout", "feedforward_dropout", "layer_drop")
TWO_STACKS = ("n_encoder_layers", "n_encoder_heads", "d_encoder_head", "d_encoder_ff", "source_vocab_size")


def check_given(config: Fields) -> None:
    """Check each field by itself, before anything is derived from it."""
    given = {name: value for name in vars(config) if (value := getattr(config, name)) is not None}
    for name in given.keys() & {*SIZES, *COUNTS}:
        refuse(given[name] < 1, f"{name} {given[name]} must be 1 or more")
    for name in given.keys() & set(SIZES):
        most = MOST_LAYERS if name in LAYERS else MOST_WIDE
        above = given[name] > most
        refuse(above, f"{name} {given[name]:,} is more than any model has: {most:,} is the most")
    for name in ("vocab_size", "n_types", "n_experts", "n_classes", "d_input", "position_offset"):
        refuse(given[name] < 0, f"{name} {given[name]} must be 0 or more")
    for name in given.keys() & set(ABOVE_ZERO):
        refuse(given[name] <= 0, f"{name} {given[name]} must be above 0")
    for name in given.keys() & set(PROBABILITIES):
        wrong, way_out = not 0 <= given[name] < 1, "choose 0 (off) up to, but not including, 1"
        refuse(wrong, f"{name} {given[name]} is not a probability: {way_out}")
    refuse(config.init_std < 0, f"init_std {config.init_std} must be 0 or more: 0.02 is usual")
    refuse(config.norm_eps <= 0, f"norm_eps {config.norm_eps} must be above 0: 1e-5 is usual")
    bias = config.norm == "rmsnorm" and config.norm_bias
    refuse(bias, "rmsnorm has no bias: leave norm_bias unset, or choose norm layernorm")
    groups, layers = config.layer_groups, config.n_layers
    wrong = groups is not None and not 1 <= groups <= layers
    refuse(wrong, f"layer_groups {groups} must lie between 1 and n_layers {layers}")
    for name in given.keys() & set(TWO_STACKS) if config.family != "encoder-decoder" else ():
        raise ConfigError(
            f"{name} belongs to family encoder-decoder, and this is {config.family}: leave it out"
        )
    if config.parallel:
        refuse(
            config.family == "encoder-decoder",
            "parallel has no place for cross-attention: choose family decoder or encoder, or parallel false",
        )
        place = config.norm_position
        wrong = place not in ("pre", "sandwich")
        refuse(wrong, f"parallel needs norm_position pre or sandwich, not {place}")


def check_specs(config: Fields, stacks: Sequence[StackSpec]) -> None:
    """Check the fields against each other, once all of them have values."""
    _check_attention(config, stacks)
    _check_rope(config, stacks)
    _check_pruned(config, stacks)
    _check_embedding(config)
    _check_head(config)


def _check_attention(config: Fields, stacks: Sequence[StackSpec]) -> None:
    H, K = config.n_heads, config.n_kv_heads or config.n_heads
    fitting = ", ".join(str(n) for n in range(1, H + 1) if H % n == 0)
    refuse(H % K, f"n_heads {H} is not divisible by n_kv_heads {K}: choose n_kv_heads from {fitting}")
    for stack in stacks:
        heads, layers = ("n_encoder_heads", "n_encoder_layers") if stack.prefix else ("n_heads", "n_layers")
        wrong = stack.n_heads % stack.n_kv_heads
        refuse(wrong, f"{heads} {stack.n_heads} is not divisible by n_kv_heads {stack.n_kv_heads}")
        refuse(
            len(stack.windows) != stack.n_layers,
            f"window lists {len(stack.windows)} layers and {layers} is {stack.n_layers}: "
            "give one entry per layer, or one number",
        )
        for window in stack.windows:
            refuse(window is not None and window < 1, f"window {window} must be 1 or more")
    buckets, most = config.relative_buckets, 2 * config.relative_max_distance - 1
    refuse(
        config.positions == "relative" and not 4 <= buckets <= most,
        f"relative_buckets {buckets} must lie between 4 and {most}, or relative_max_distance rise",
    )
    active, experts = config.n_active_experts, config.n_experts
    wrong = experts and not 1 <= active <= experts
    refuse(wrong, f"n_active_experts {active} must lie between 1 and n_experts {experts}")


def _check_rope(config: Fields, stacks: Sequence[StackSpec]) -> None:
    for layer in config.rope_skips:
        last = config.n_layers - 1
        refuse(not 0 <= layer <= last, f"rope_skips names layer {layer}, and there are layers 0 to {last}")
    fraction, scaling = config.rope_fraction, config.rope_scaling
    for stack in stacks if config.positions == "rope" else ():
        pairs = stack.d_rotary // 2
        refuse(
            not 0 < fraction <= 1 or stack.d_rotary < 2,
            f"rope_fraction {fraction} of d_head {stack.d_head} rotates no pair: choose above 0, up to 1",
        )
        refuse(
            stack.d_rotary % 2,
            f"rope rotates pairs, and {stack.d_rotary} of d_head {stack.d_head} is odd: "
            "choose an even d_head or another rope_fraction",
        )
        if scaling is None:
            continue
        refuse(
            scaling.kind == "dynamic" and pairs < 2,
            "rope scaling dynamic needs two rotated pairs at least: choose a wider d_head or another kind",
        )
        for name in ("short_factor", "long_factor") if scaling.kind == "longrope" else ():
            count = len(getattr(scaling, name))
            listed = f"rope scaling {name} lists {count} numbers, and {pairs} pairs are rotated"
            refuse(count != pairs, f"{listed}: give one for each")


def _check_pruned(config: Fields, stacks: Sequence[StackSpec]) -> None:
    parts = {
        f"{stack.prefix}blocks.{layer}.{part}": stack
        for stack in stacks
        for layer in range(stack.n_layers)
        for part in (("attention", "cross") if stack.cross else ("attention",))
    }
    for name, heads in config.pruned_heads.items():
        unknown = name not in parts
        refuse(unknown, f'pruned_heads names "{name}", which this model has not{nearest(name, parts)}')
        H, group = parts[name].n_heads, parts[name].n_heads // parts[name].n_kv_heads
        refuse(
            any(not 0 <= head < H for head in heads) or len(set(heads)) != len(heads),
            f"pruned_heads of {name} are {list(heads)}: name each of the heads 0 to {H - 1} once at most",
        )
        none_left = len(heads) == H
        refuse(none_left, f"pruned_heads of {name} leaves no head: keep one at least, or drop the layer")
        refuse(
            len(heads) != len({head // group for head in heads}) * group,
            f"pruned_heads of {name} splits a key/value group: heads go by whole groups of {group}",
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


def _check_embedding(config: Fields) -> None:
    both, head = config.family == "encoder-decoder", config.head
    refuse(
        config.d_embedding != config.d_model and not config.embedding_projection,
        f"d_embedding {config.d_embedding} must be projected to d_model {config.d_model}: "
        "leave embedding_projection out",
    )
    predicts = head in ("lm", "mlm")
    refuse(
        config.input != "tokens" and not both and predicts,
        f"head {head} predicts ids and input is {config.input}: "
        "choose head classifier, tagger, embedding or none",
    )
    reads = config.input == "tokens" or both or predicts
    missing = reads and config.vocab_size < 1
    refuse(missing, "vocab_size is not set: give the number of tokens of the tokenizer, 1 at least")
    shared = both and config.input == "tokens" and config.share_embeddings
    refuse(
        shared and config.source_vocab_size != config.vocab_size,
        f"share_embeddings needs one vocabulary, and source_vocab_size {config.source_vocab_size} differs "
        f"from vocab_size {config.vocab_size}: set share_embeddings false",
    )
    if config.input == "patches":
        _check_image(config)
    if config.input in ("vectors", "frames"):
        refuse(config.d_input < 1, f"d_input {config.d_input} must be 1 or more")
    kernel = config.conv_kernel
    refuse(kernel % 2 == 0, f"conv_kernel {kernel} is even, and would shift the frames: choose an odd width")
    refuse(
        config.class_token and config.input != "patches",
        f"class_token belongs to input patches, and input is {config.input}: "
        "put a CLS id in the text instead",
    )


def _check_image(config: Fields) -> None:
    size, patch = config.image_size, config.patch_size
    if size is None:
        raise ConfigError("input patches needs image_size, as (height, width)")
    refuse(
        any(side % patch for side in size) or min(size) < patch,
        f"image_size {size} is not a whole number of patches of {patch}: change one of the two",
    )
    needed = (size[0] // patch) * (size[1] // patch) + config.class_token
    table = config.positions == "learned" and config.family != "encoder-decoder"
    refuse(
        table and config.max_positions < needed,
        f"max_positions {config.max_positions} is below the {needed} positions of one image: raise it",
    )


def _check_head(config: Fields) -> None:
    head = config.head
    missing = head in ("classifier", "tagger") and config.n_classes < 1
    refuse(missing, f"head {head} needs n_classes, 1 at least")
    refuse(
        head == "mlm" and config.family != "encoder",
        f"head mlm reads both sides of a mask and family is {config.family}: "
        "choose family encoder, or head lm",
    )
