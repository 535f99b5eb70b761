"""Checks of a config: each error is one line with the value, what is allowed and the way out.

A function of mistakes yields the line of each mistake that a config makes; the first is refused.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import get_args, get_type_hints

from clearhead.core.attention import Attention, attention_class
from clearhead.core.config.fields import BIASES, MOST_LAYERS, MOST_WIDE, TABLES, Fields, StackSpec
from clearhead.core.config.kinds import KINDS, Full, Kind, Mistakes, Windowed
from clearhead.core.config.registry import Registry
from clearhead.errors import ConfigError, check_least, check_values, nearest, refuse

LAYERS = ("n_layers", "n_encoder_layers")
HEADS = ("n_heads", "n_kv_heads", "n_encoder_heads")
WIDTHS = ("d_model", "d_head", "d_encoder_head", "d_value", "d_ff", "d_encoder_ff", "d_expert", "d_embedding")
COUNTS = (
    *("max_positions", "max_encoder_positions", "patch_size", "n_channels"),
    *("conv_kernel", "conv_stride", "router_groups", "n_active_groups"),
)
FROM_ZERO = (
    *("vocab_size", "n_types", "n_experts", "d_shared_expert", "n_mtp_layers"),
    *("n_classes", "d_input", "position_offset", "head_gate", "smear_gate", "bigrams"),
)
ABOVE_ZERO = (
    "rope_base",
    "rope_local_base",
    "attention_softcap",
    "logit_softcap",
    "gated_clamp",
    "router_scale",
)
PROBABILITIES = ("dropout", "attention_dropout", "embedding_dropout", "feedforward_dropout", "layer_drop")
GATED = ("gated_clamp", "gated_shift", "gate_scale", "up_scale")
MIXTURE = (
    *("router_bias", "router_correction", "router_groups", "n_active_groups", "router_scale"),
    *("d_expert", "d_shared_expert", "shared_expert_gate", "dense_layers"),
)
TWO_STACKS = (
    *("n_encoder_layers", "n_encoder_heads", "d_encoder_head", "d_encoder_ff"),
    *("max_encoder_positions", "source_vocab_size"),
)


def check_given(config: Fields) -> None:
    """Check each field by itself, before anything is derived from it."""
    check_least(config, 1, *LAYERS, *HEADS, *WIDTHS, *COUNTS)
    for names, most in (((*LAYERS, "n_mtp_layers"), MOST_LAYERS), ((*HEADS, *WIDTHS), MOST_WIDE)):
        rule = f"is more than any model has: {most:,} is the most"
        for name in names:
            value = getattr(config, name) or 0
            if value > most:
                raise ConfigError(f"{name} {value:,} {rule}")
    check_least(config, 0, *FROM_ZERO)
    check_values(config, ABOVE_ZERO, lambda value: bool(value > 0), "must be above 0")
    rule = "is not a probability: choose 0 (off) up to, but not including, 1"
    check_values(config, PROBABILITIES, lambda p: 0 <= p < 1, rule)
    if config.depth_capacity != 1:
        _refuse_first(VARIANTS["depth"](config, ()))
    _refuse_first(_given_mistakes(config))


def check_specs(config: Fields, stacks: Sequence[StackSpec]) -> None:
    """Check the fields against each other, once all of them have values."""
    _refuse_first(_spec_mistakes(config, stacks))


def _refuse_first(mistakes: Mistakes) -> None:
    for mistake in mistakes:
        raise ConfigError(mistake)


def _given_mistakes(config: Fields) -> Iterator[str]:
    family, groups, layout = config.family, config.layer_groups, config.norm_position
    both = family == "encoder-decoder"
    if config.init_std < 0:
        yield f"init_std {config.init_std} must be 0 or more: 0.02 is usual"
    if config.attention_scale == 0:
        yield "attention_scale 0 makes every score 0: leave it out"
    if config.head_gate and (config.attention_gate or config.head_gate > config.d_model):
        yield (
            f"head_gate {config.head_gate} reads so many of the {config.d_model} columns of a token, in "
            "place of attention_gate: choose fewer, or leave attention_gate out"
        )
    if config.norm_eps <= 0:
        yield f"norm_eps {config.norm_eps} must be above 0: 1e-5 is usual"
    for name in GATED:
        if not config.gated and getattr(config, name) != getattr(Fields, name):
            yield f"{name} {getattr(config, name)} needs a gate: set gated true, or leave {name} out"
    if config.n_experts and not config.gate_scale == config.up_scale == 1:
        yield "gate_scale and up_scale are of one feed-forward: leave them or n_experts out"
    for name in MIXTURE:
        if not config.n_experts and getattr(config, name) != getattr(Fields, name):
            yield f"{name} needs a router: set n_experts, or leave {name} out"
    if config.norm == "rmsnorm" and config.norm_bias:
        yield "rmsnorm has no bias: leave norm_bias unset, or choose norm layernorm"
    if groups is not None and not 1 <= groups <= config.n_layers:
        yield f"layer_groups {groups} must lie between 1 and n_layers {config.n_layers}"
    if config.loop is not None:
        first, span, times = config.loop
        if min(first, span - 1, times - 1) < 0 or first + span * times > config.n_layers:
            yield (
                f"loop {config.loop} must be (first, layers, times) of which first + layers · times is "
                f"n_layers {config.n_layers} at most, and layers and times 1 at least"
            )
        if both or groups is not None or not config.first_norm:
            yield "loop is for one stack with its first norm, and no layer_groups: leave one of them out"
    for name in TWO_STACKS:
        if not both and getattr(config, name) is not None:
            yield f"{name} belongs to family encoder-decoder, and this is {family}: leave it out"
    if not config.first_norm and (layout not in ("pre", "sandwich") or groups is not None):
        yield (
            "first_norm false leaves out the norm before the first attention: "
            "it needs norm_position pre or sandwich, and no layer_groups"
        )
    if config.parallel and both:
        yield "parallel has no place for cross-attention: choose family decoder or encoder, or parallel false"
    if config.parallel and layout not in ("pre", "sandwich"):
        yield f"parallel needs norm_position pre or sandwich, not {layout}"


def _spec_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Iterator[str]:
    H, K, last = config.n_heads, config.n_kv_heads or config.n_heads, config.n_layers - 1
    if H % K:
        fitting = ", ".join(str(n) for n in range(1, H + 1) if H % n == 0)
        yield f"n_heads {H} is not divisible by n_kv_heads {K}: choose n_kv_heads from {fitting}"
    for stack in stacks:
        heads, K = "n_encoder_heads" if stack.prefix else "n_heads", stack.n_kv_heads
        if stack.n_heads % K:
            yield f"{heads} {stack.n_heads} is not divisible by n_kv_heads {K}"
        first = dict(zip(stack.block_of[::-1], stack.kinds[::-1], strict=True))
        for layer, kind in enumerate(stack.kinds):
            yield from _kind_mistakes(config, stack, layer, kind, first[stack.block_of[layer]])
    apart = config.positions == "disentangled"
    if not apart and (config.relative_norm or config.relative_terms != "both"):
        yield "relative_norm and relative_terms belong to positions disentangled: leave them out"
    for layer in config.feedforward_skips:
        if not 0 <= layer <= last:
            yield f"feedforward_skips names layer {layer}, and there are layers 0 to {last}"
    for stack in stacks:
        yield from _halved_mistakes(config, stack)
    for layer in config.rope_skips:
        if not 0 <= layer <= last:
            yield f"rope_skips names layer {layer}, and there are layers 0 to {last}"
    for stack in stacks if config.positions == "rope" else ():
        yield from _rope_mistakes(config, stack)
    if config.rope_sections and config.positions != "rope":
        yield f"rope_sections belongs to positions rope, and positions is {config.positions}: leave it out"
    used = {
        "experts": config.n_experts,
        config.positions: config.positions in VARIANTS,
        "rope_scaling": config.rope_scaling is not None and config.positions == "rope",
        "pruned_heads": config.pruned_heads,
        "patches": config.input == "patches",
        "mtp": config.n_mtp_layers,
        "shortcuts": any(stack.carries for stack in stacks),
        "previous": config.smear_gate or config.bigrams,
    }
    for name in (name for name, uses in used.items() if uses):
        yield from VARIANTS[name](config, stacks)
    yield from _embedding_mistakes(config)
    yield from _head_mistakes(config)


def _kind_mistakes(config: Fields, stack: StackSpec, layer: int, kind: Kind, first: Kind) -> Iterator[str]:
    """Check a kind of attention against what else the config asks of its layer; `first` owns its weights."""
    name = kind.of_layer(layer)
    if not (kind.shares and first.shares) and kind != first:
        yield f'{name} shares its weights with a layer of "{first}" by layer_groups: give both the same kind'
    if kind.both_sides and stack.causal:
        yield f"{name} reads later tokens too: it is for encoders"
    if config.positions == "disentangled" and not isinstance(kind, Full | Windowed):
        yield f"{name} does not meet distances: with positions disentangled, choose full or window"
    if not kind.masked and config.positions in BIASES:
        yield (
            f"{name} has no scores to which positions {config.positions} could add a bias: "
            "choose rope, learned, sinusoidal or none"
        )
    if not kind.masked and config.attention_softcap is not None:
        yield f"{name} has no scores for attention_softcap: leave one out"
    if not kind.masked and config.attention_sink:
        yield f"{name} has no softmax for attention_sink: leave one out"
    if stack.head_gate and not issubclass(attention_class(stack, layer), Attention) and kind.name != "none":
        yield f"{name} takes no head_gate: leave it out, or choose another kind of attention"
    yield from kind.mistakes(config, stack, layer)


def _halved_mistakes(config: Fields, stack: StackSpec) -> Iterator[str]:
    """Check blocks that have attention alone, or a feed-forward alone."""
    lacks = [
        [kind.name == "none", layer in stack.feedforward_skips] for layer, kind in enumerate(stack.kinds)
    ]
    if [True, True] in lacks:
        layer = lacks.index([True, True])
        yield f'layer {layer} has attention "none" and is in feedforward_skips: leave it one of both'
    if [any(part) for part in zip(*lacks)] == [False, False]:
        return
    if config.norm_position != "pre" or config.parallel:
        layout = "parallel" if config.parallel else f"norm_position {config.norm_position}"
        yield f"blocks of attention or a feed-forward alone have one norm, before it: leave {layout} out"
    if any(lacks[layer] != lacks[stack.block_of.index(block)] for layer, block in enumerate(stack.block_of)):
        yield "feedforward_skips differ in layers that share weights by layer_groups: name all or none"


def _rope_mistakes(config: Fields, stack: StackSpec) -> Iterator[str]:
    fraction, d_head = config.rope_fraction, stack.d_head
    if not 0 < fraction <= 1 or stack.d_rotary < 2:
        yield f"rope_fraction {fraction} of d_head {d_head} rotates no pair: choose above 0, up to 1"
    if stack.d_rotary % 2:
        yield (
            f"rope rotates pairs, and {stack.d_rotary} of d_head {d_head} is odd: "
            "choose an even d_head or another rope_fraction"
        )
    sections, scaling = config.rope_sections, config.rope_scaling
    if sections and (min(sections) < 1 or 2 * sum(sections) != stack.d_rotary):
        yield f"rope_sections {sections} must be pairs of all of the {stack.d_rotary} columns that rotate"
    if sections and (config.family == "encoder-decoder" or stack.rotates_by_length):
        kind = "encoder-decoder" if scaling is None else f"rope scaling {scaling.kind}"
        yield f"rope_sections does not go with {kind}: leave one of them out"
    if config.rope_axial and (not sections or scaling is not None or config.rope_local_base is not None):
        yield "rope_axial is for rope_sections of one base without rope_scaling: leave it out"


def _embedding_mistakes(config: Fields) -> Iterator[str]:
    """Yield what is wrong with what goes in: tables, patches, vectors, frames."""
    both, kind, head = config.family == "encoder-decoder", config.input, config.head
    predicts = head in ("lm", "mlm")
    if config.d_embedding != config.d_model and not config.embedding_projection:
        yield (
            f"d_embedding {config.d_embedding} must be projected to d_model {config.d_model}: "
            "leave embedding_projection out"
        )
    if config.project_tokens and config.d_embedding == config.d_model:
        yield (
            f"project_tokens widens a narrower token table, and d_embedding is d_model {config.d_model}: "
            "leave project_tokens out"
        )
    if kind != "tokens" and not both and predicts:
        yield (
            f"head {head} predicts ids and input is {kind}: choose head classifier, tagger, embedding or none"
        )
    if (kind == "tokens" or both or predicts) and config.vocab_size < 1:
        yield "vocab_size is not set: give the number of tokens of the tokenizer, 1 at least"
    shared = both and kind == "tokens" and config.share_embeddings
    if shared and config.source_vocab_size != config.vocab_size:
        yield (
            f"share_embeddings needs one vocabulary, and source_vocab_size {config.source_vocab_size} "
            f"differs from vocab_size {config.vocab_size}: set share_embeddings false"
        )
    if kind in ("vectors", "frames") and config.d_input < 1:
        yield f"d_input {config.d_input} must be 1 or more"
    if config.conv_kernel % 2 == 0:
        yield f"conv_kernel {config.conv_kernel} is even, and would shift the frames: choose an odd width"
    if config.class_token and kind != "patches":
        yield f"class_token belongs to input patches, and input is {kind}: put a CLS id in the text instead"
    if not config.patch_bias and kind not in ("patches", "vectors"):
        yield f"patch_bias belongs to input patches or vectors, and input is {kind}: leave it out"


def _head_mistakes(config: Fields) -> Iterator[str]:
    if config.head in ("classifier", "tagger") and config.n_classes < 1:
        yield f"head {config.head} needs n_classes, 1 at least"
    if config.pooler_norm and config.pooler == "none":
        yield "pooler_norm follows a pooler, and there is none: choose pooler tanh or an activation"
    if config.head_layer and config.head not in ("tagger", "span"):
        yield f"head_layer is for head tagger or span, and head is {config.head}: leave it out"
    if config.head == "mlm" and config.family != "encoder":
        yield (
            f"head mlm reads both sides of a mask and family is {config.family}: "
            "choose family encoder, or head lm"
        )


# The text of a kind of attention ----------------------------------------------------------------------------

# The least value of a number; the others may be 0.
AT_LEAST = {"size": 1, "step": 1, "window": 1, "rank": 1, "kernel": 2, "groups": 1, "d_state": 1}


def read_kind(text: str) -> Kind:
    """Return the kind that a text such as `window(128, sinks=4)` names."""
    parts = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    name, inner = parts.groups() if parts else (text, None)
    known = ", ".join(KINDS)
    refuse(
        name not in KINDS,
        f'attention "{text}" is no kind of attention{nearest(str(name), KINDS)}: choose from {known}',
        ConfigError,
    )
    kind = KINDS[name]
    names = [entry.name for entry in dataclasses.fields(kind)]
    values: dict[str, int | float | str] = {}
    positional: list[str] = []
    for index, item in enumerate(part.strip() for part in (inner or "").split(",") if part.strip()):
        key, equals, value = (side.strip() for side in item.partition("="))
        refuse(
            not equals and index != len(positional),
            f'attention "{text}" has "{item}" after a number with a name: give it a name too',
            ConfigError,
        )
        positional += [] if equals else [item]
        key, value = (key, value) if equals else (names[index] if index < len(names) else "", key)
        takes = f"{name} takes {', '.join(names)}" if names else f"{name} takes nothing in brackets"
        refuse(key not in names, f'attention "{text}" has "{item}": {takes}', ConfigError)
        refuse(key in values, f'attention "{text}" gives {key} twice: {takes}', ConfigError)
        values[key] = _value(text, key, value, get_type_hints(kind)[key])
    return kind(**values)


def _value(text: str, key: str, value: str, hint: object) -> int | float | str:
    choices = ("False", "True") if hint is bool else get_args(hint)
    if hint is float:
        wrong = re.fullmatch(r"\d+(\.\d*)?(e-?\d+)?|inf", value) is None
        refuse(wrong, f'attention "{text}" has {key} {value}: it must be a number, 0 or more', ConfigError)
        return float(value)
    if choices:
        refuse(
            value not in choices,
            f'attention "{text}" has {key} "{value}": choose from {", ".join(choices)}',
            ConfigError,
        )
        return value == "True" if hint is bool else value
    least = AT_LEAST.get(key, 0)
    refuse(
        not value.isdecimal() or int(value) < least,
        f'attention "{text}" has {key} {value}: it must be a whole number, {least} or more',
        ConfigError,
    )
    return int(value)


# Fields that few configs set --------------------------------------------------------------------------------


def rope_scaling_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Iterator[str]:
    """Yield what is wrong with the scaling of rotary positions."""
    scaling = config.rope_scaling
    assert scaling is not None
    for pairs in (stack.d_rotary // 2 for stack in stacks):
        if scaling.kind == "dynamic" and pairs < 2:
            needs = "needs two rotated pairs at least: choose a wider d_head or another kind"
            yield f"rope scaling dynamic {needs}"
        for name in ("short_factor", "long_factor") if scaling.kind == "longrope" else ():
            count = len(getattr(scaling, name))
            if count != pairs:
                lists = f"rope scaling {name} lists {count} numbers, and {pairs} pairs are rotated"
                yield f"{lists}: give one for each"


def pruned_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Iterator[str]:
    """Yield what is wrong with the heads that are pruned."""
    parts = {
        f"{stack.prefix}blocks.{layer}.{part}": stack
        for stack in stacks
        for layer in range(stack.n_layers)
        for part in (("attention", "cross") if stack.cross else ("attention",))
    }
    for name, heads in config.pruned_heads.items():
        if name not in parts:
            yield f'pruned_heads names "{name}", which this model has not{nearest(name, parts)}'
        H, group = parts[name].n_heads, parts[name].n_heads // parts[name].n_kv_heads
        if any(not 0 <= head < H for head in heads) or len(set(heads)) != len(heads):
            once = f"name each of the heads 0 to {H - 1} once at most"
            yield f"pruned_heads of {name} are {list(heads)}: {once}"
        if len(heads) == H:
            yield f"pruned_heads of {name} leaves no head: keep one at least, or drop the layer"
        if len(heads) != len({head // group for head in heads}) * group:
            yield f"pruned_heads of {name} splits a key/value group: heads go by whole groups of {group}"
    if config.qk_norm == "full":
        yield (
            "pruned_heads would change the norm that qk_norm full takes over all heads: "
            "choose qk_norm head or none"
        )
    for stack, part in itertools.product(stacks, ("attention", "cross")):
        for layer, block in enumerate(stack.block_of):
            first = stack.block_of.index(block)
            heads, others = (stack.heads_of(f"{stack.prefix}blocks.{n}.{part}") for n in (first, layer))
            if heads != others:
                yield (
                    f"pruned_heads differ in layers {first} and {layer}, and layer_groups shares weights "
                    "between them: name the same heads for both"
                )


def patch_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Iterator[str]:
    """Yield what is wrong with the size of images."""
    size, patch = config.image_size, config.patch_size
    if size is None:
        yield "input patches needs image_size, as (height, width)"
        return
    if any(side % patch for side in size) or min(size) < patch:
        yield f"image_size {size} is not a whole number of patches of {patch}: change one of the two"
    needed = (size[0] // patch) * (size[1] // patch) + config.class_token
    table = config.positions in TABLES and config.family != "encoder-decoder"
    if table and config.max_positions < needed:
        yield f"max_positions {config.max_positions} is below the {needed} positions of one image: raise it"


# What may be wrong with the fields of a variant, for a config that uses it.
VARIANTS: Registry[Callable[[Fields, Sequence[StackSpec]], Mistakes]] = Registry(
    {
        "experts": "clearhead.variants.routing:expert_mistakes",
        "depth": "clearhead.variants.routing:depth_mistakes",
        "relative": "clearhead.variants.positions:relative_mistakes",
        "learned+relative": "clearhead.variants.positions:relative_mistakes",
        "disentangled": "clearhead.variants.positions:disentangled_mistakes",
        "rope_scaling": rope_scaling_mistakes,
        "pruned_heads": pruned_mistakes,
        "patches": patch_mistakes,
        "mtp": "clearhead.variants.mtp:mtp_mistakes",
        "shortcuts": "clearhead.variants.shortcuts:shortcut_mistakes",
        "previous": "clearhead.variants.shortcuts:previous_mistakes",
    }
)
