"""Decoders with recurrent layers: Mamba-2, Bamba, Falcon-H1, Nemotron-H and LFM2.

Mamba-2 has state-space layers alone. Bamba and LFM2 are Llama's tables with state-space layers, or gated
short convolutions, in place of attention in most layers; each layer of Falcon-H1 has both. Each block of
Nemotron-H is one sublayer: state-space, attention, a feed-forward, or a mixture of experts.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.core.config import ModelConfig
from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import (
    ACTIVATIONS,
    WHOLE_HEADS,
    ConfigPart,
    Json,
    checked_layer_types,
    count_layers,
    field,
    fixed,
    keys,
)
from clearhead.hub.files import refuse, refuse_key
from clearhead.hub.llama import (
    ATTENTION_BIAS,
    BLOCK,
    FEEDFORWARD_BIAS,
    LAYER,
    classes,
    heads,
    llama_like,
    llama_rules,
    shape,
)
from clearhead.hub.rope import rope
from clearhead.hub.rules import EXPERTS, Rule, joined, renamed, same, stack_rules
from clearhead.variants.kinds import HybridKind, Mamba2Kind, ShortConvKind

OURS = f"{BLOCK}.attention"
INFINITY = {"__float__": "Infinity"}  # as transformers writes it
LIMIT = "time_step_limit"


def mixer_rules(theirs: str, ours: str = OURS) -> tuple[Rule, ...]:
    """Return the rules of a Mamba-2 mixer, by the name of their module."""
    rules = (
        *joined(f"{theirs}.in_proj", [f"{ours}.{name}" for name in ("gate", "v", "k", "q", "dt")]),
        Rule(f"{theirs}.conv1d.weight", (f"{ours}.conv",)),
        Rule(f"{theirs}.conv1d.bias", (f"{ours}.conv_bias",)),
        Rule(f"{theirs}.dt_bias", (f"{ours}.dt_bias",)),
        Rule(f"{theirs}.A_log", (f"{ours}.log_rate",)),
        Rule(f"{theirs}.D", (f"{ours}.skip",)),
        *same({f"{theirs}.norm": f"{ours}.norm", f"{theirs}.out_proj": f"{ours}.out"}),
    )
    return tuple(dataclasses.replace(rule, needs=f"{ours}.dt_bias") for rule in rules)


def limits_of(theirs: Json) -> tuple[float, float]:
    """Return between what the steps of a mixer lie."""
    stated = theirs.get(LIMIT)
    ends = [math.inf if end == INFINITY else end for end in stated] if stated else [0.0, math.inf]
    wrong = len(ends) != 2 or not all(isinstance(end, int | float) and end >= 0 for end in ends)
    refuse_key(wrong, LIMIT, stated, "supported are two numbers, 0 or more")
    return float(ends[0]), float(ends[1])


def written_limits(kind: Mamba2Kind) -> Json:
    """Return the key of `limits_of`."""
    return {LIMIT: [INFINITY if math.isinf(end) else end for end in (kind.dt_min, kind.dt_max)]}


class Mixer:
    """How the sizes of a Mamba-2 mixer are called: `names` has their key and its default for each of ours."""

    def __init__(self, names: Mapping[str, tuple[str, Any]], **fixed_values: Any) -> None:
        self.names, self.fixed = names, fixed_values

    def read(self, theirs: Json) -> Mamba2Kind:
        """Return the kind that a config.json describes, but for the limits of its steps."""
        values: Json = dict(self.fixed)
        for ours, (key, usual) in self.names.items():
            if isinstance(usual, bool):  # null is off
                values[ours] = bool(theirs.get(key, usual))
            else:
                values |= field(key, ours, usual, least=1).read(theirs)
        return Mamba2Kind(**values)

    def write(self, config: ModelConfig) -> tuple[Mamba2Kind | None, Json]:
        """Return the kind of the first such layer with all its sizes, and their keys; None without such."""
        for kind in config.main.kinds:
            if isinstance(kind, Mamba2Kind):
                count, width = kind.sizes(config.main)
                whole = dataclasses.replace(kind, heads=count, d_head=width)
                return whole, {key: getattr(whole, ours) for ours, (key, _) in self.names.items()}
        return None, {}


def _expansion(kind: Mamba2Kind, config: ModelConfig) -> int:
    """Return how many times as wide as the model the heads of a mixer are."""
    times, more = divmod(kind.heads * kind.d_head, config.d_model)
    refuse(more, f"{kind.heads} heads of {kind.d_head} are no multiple of d_model {config.d_model}")
    return times


# It is the activation of the convolution too, which has no other.
ACTIVATION = field("hidden_act", "activation", "silu", {"silu": "silu", "swish": "silu"})

# Mamba-2 ----------------------------------------------------------------------------------------------------

MIXER = Mixer(
    {
        **{"heads": ("num_heads", 128), "groups": ("n_groups", 8), "d_head": ("head_dim", 64)},
        **{"d_state": ("state_size", 128), "kernel": ("conv_kernel", 4)},
        **{"bias": ("use_bias", False), "conv_bias": ("use_conv_bias", True)},
    }
)


def _read_mamba2(theirs: Json) -> Json:
    layers, kind = count_layers(theirs), MIXER.read(theirs)
    low, high = limits_of(theirs)
    inner, times = kind.heads * kind.d_head, theirs.get("expand", 2)
    other = times is not None and inner != times * theirs["hidden_size"]
    refuse_key(other, "expand", times, f"{kind.heads} heads of {kind.d_head} say otherwise")
    return {
        "attention": str(dataclasses.replace(kind, dt_min=low, dt_max=high)),
        "feedforward_skips": tuple(range(layers)),
        **{"n_heads": kind.heads, "d_head": kind.d_head},
    }


def _write_mamba2(config: ModelConfig) -> Json:
    kind, written = MIXER.write(config)
    assert kind is not None
    return {**written, **written_limits(kind), "expand": _expansion(kind, config)}


BACKBONE = "backbone.layers.{i}"
EDGES = stack_rules("decoder", BACKBONE, tokens="backbone.embeddings", norm="backbone.norm_f")
FIRST_NORM = same({f"{BACKBONE}.norm": f"{BLOCK}.attention_residual.before"})

MAMBA2 = Architecture(
    "mamba2",
    classes("Mamba2", sequence=False, token=False),
    (
        fixed({"family": "decoder", "positions": "none", "norm": "rmsnorm", "norm_position": "pre"}),
        fixed({"bias": False, "max_positions": 2048}),  # the length of its training: nothing bounds it
        *keys({"norm_eps": "layer_norm_epsilon"}, vocab_size=32768, d_model=4096, n_layers=64),
        *keys({"norm_eps": "layer_norm_epsilon"}, norm_eps=1e-5, init_std=0.1, tie_embeddings=False),
        ConfigPart(_read_mamba2, _write_mamba2),
        ACTIVATION,
        # With it, transformers divides some of the weights that it has read.
        fixed(only={"rescale_prenorm_residual": False}),
    ),
    (*EDGES, *renamed(EDGES, "embedding.", "embeddings."), *FIRST_NORM, *mixer_rules(f"{BACKBONE}.mixer")),
    heads(),
    prefix="backbone.",
)

# Bamba: Llama's blocks, most of them with a mixer. Half of each head rotates.

BAMBA_MIXER = Mixer(
    {
        **{
            "heads": ("mamba_n_heads", 128),
            "groups": ("mamba_n_groups", 1),
            "d_head": ("mamba_d_head", None),
        },
        **{"d_state": ("mamba_d_state", 256), "kernel": ("mamba_d_conv", 4)},
        **{"bias": ("mamba_proj_bias", False), "conv_bias": ("mamba_conv_bias", True)},
    }
)


def _read_bamba(theirs: Json) -> Json:
    layers, times = count_layers(theirs), theirs.get("mamba_expand", 2)
    inner, count = times * theirs["hidden_size"], theirs.get("mamba_n_heads", 128)
    width = theirs.get("mamba_d_head", "auto")
    low, high = limits_of(theirs)
    sized = {**theirs, "mamba_d_head": inner // count if width == "auto" else width}
    kind = dataclasses.replace(BAMBA_MIXER.read(sized), dt_min=low, dt_max=high)
    other = kind.heads * kind.d_head != inner
    refuse_key(other, "mamba_expand", times, f"{kind.heads} heads of {kind.d_head} say otherwise")
    attends = theirs.get("attn_layer_indices") or ()
    return {"attention": tuple("full" if layer in attends else str(kind) for layer in range(layers))}


def _write_bamba(config: ModelConfig) -> Json:
    kind, written = BAMBA_MIXER.write(config)
    attends = [layer for layer, own in enumerate(config.main.kinds) if not isinstance(own, Mamba2Kind)]
    if kind is not None:
        written |= {**written_limits(kind), "mamba_expand": _expansion(kind, config)}
    else:  # transformers refuses sizes that no layer has, too
        written = {"mamba_n_heads": 1, "mamba_d_head": config.d_model, "mamba_expand": 1}
    return {"attn_layer_indices": attends, **written}


PART, ROTATION = "partial_rotary_factor", rope(fraction=0.5)
# transformers reads the key in rope_parameters alone.
HALF = ConfigPart(
    lambda theirs: ROTATION.read({key: value for key, value in theirs.items() if key != PART}), ROTATION.write
)

BAMBA = llama_like(
    "bamba",
    classes("Bamba", sequence=False, token=False),
    *shape(None, d_ff=14336, n_kv_heads=8, norm_eps=1e-5, vocab_size=128000, max_positions=262144),
    ACTIVATION,
    WHOLE_HEADS,
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    HALF,
    ConfigPart(_read_bamba, _write_bamba),
    rules=(
        *mixer_rules(f"{LAYER}.mamba"),
        *llama_rules(
            **{"norm": "model.final_layernorm", "gated": "feed_forward.{gate,up,down}_proj"},
            pre_norms="{input,pre_ff}_layernorm",
        ),
    ),
)

# Falcon-H1: attention and a mixer of the same input in each block, and factors on most of what is computed.

PAIR = ("gate_scale", "up_scale")
PARTS = ("gate_scale", "v_scale", "k_scale", "q_scale", "dt_scale")  # in the order of ssm_multipliers
FACTORS = {
    **{"attention_in": "attention_in_multiplier", "attention_out": "attention_out_multiplier"},
    **{"mixer_in": "ssm_in_multiplier", "mixer_out": "ssm_out_multiplier"},
}


def numbers(theirs: Json, key: str, names: Sequence[str]) -> dict[str, float]:
    """Return the numbers of a list by our names; 1 where there is none."""
    stated = theirs.get(key)
    stated = [1.0] * len(names) if stated is None else stated
    fits = isinstance(stated, list) and len(stated) == len(names)
    fits = fits and all(isinstance(value, int | float) and not isinstance(value, bool) for value in stated)
    refuse_key(not fits, key, stated, f"supported are {len(names)} numbers")
    return dict(zip(names, map(float, stated)))


def _read_falcon(theirs: Json) -> Json:
    width, count = theirs.get("mamba_d_head", "auto"), theirs.get("mamba_n_heads", 128)
    inner = theirs.get("mamba_d_ssm", 1024)
    if inner is None:
        inner = theirs.get("mamba_expand", 2) * theirs["hidden_size"]
    kind = BAMBA_MIXER.read({**theirs, "mamba_d_head": inner // count if width == "auto" else width})
    other = kind.heads * kind.d_head != inner
    refuse_key(other, "mamba_d_ssm", inner, f"{kind.heads} heads of {kind.d_head} say otherwise")
    low, high = limits_of(theirs)
    norm = bool(theirs.get("mamba_rms_norm", False))
    values: Json = {**vars(kind), "dt_min": low, "dt_max": high, "norm": "groups" if norm else "none"}
    values["norm_first"] = norm and bool(theirs.get("mamba_norm_before_gate", True))
    for ours, key in FACTORS.items():
        values |= field(key, ours, 1.0).read(theirs)
    values |= numbers(theirs, "ssm_multipliers", PARTS)
    bias = bool(theirs.get("projectors_bias", False))
    refuse_key(bias != kind.bias, "projectors_bias", bias, f"supported is mamba_proj_bias, {kind.bias}")
    scale = field("key_multiplier", "scale", 1.0).read(theirs)["scale"]
    pair = numbers(theirs, "mlp_multipliers", PAIR)
    odd = pair["up_scale"] != 1 and theirs.get("mlp_bias", False)
    refuse_key(odd, "mlp_multipliers", theirs.get("mlp_multipliers"), "with mlp_bias the second must be 1")
    own = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    return {
        "attention": str(HybridKind(**values)),
        "attention_scale": None if scale == 1 else scale * own**-0.5,
        **pair,
    }


def _write_falcon(config: ModelConfig) -> Json:
    kind, written = BAMBA_MIXER.write(config)
    refuse(not isinstance(kind, HybridKind), "no layer has attention next to a state-space layer")
    assert isinstance(kind, HybridKind)
    written |= {"mamba_rms_norm": kind.norm != "none", "mamba_norm_before_gate": kind.norm_first}
    return {
        **{**written, **written_limits(kind)},
        **{"mamba_d_ssm": kind.heads * kind.d_head, "projectors_bias": kind.bias},
        **{key: getattr(kind, ours) for ours, key in FACTORS.items()},
        "ssm_multipliers": [getattr(kind, part) for part in PARTS],
        "mlp_multipliers": [config.gate_scale, config.up_scale],
        "key_multiplier": round(config.main.attention_scale * config.main.d_head**0.5, 15),
    }


FALCON_H1 = llama_like(
    "falcon_h1",
    classes("FalconH1", sequence=False, token=False),
    *shape(None, d_ff=14336, n_kv_heads=8, norm_eps=1e-5, vocab_size=128000, max_positions=8192),
    ACTIVATION,
    rope(),
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    field("embedding_multiplier", "embedding_scale", 1.0),
    field("lm_head_multiplier", "logit_scale", 1.0),
    ConfigPart(_read_falcon, _write_falcon),
    rules=(
        *mixer_rules(f"{LAYER}.mamba", f"{OURS}.mixer"),
        *llama_rules(
            **{"norm": "model.final_layernorm", "gated": "feed_forward.{gate,up,down}_proj"},
            pre_norms="{input,pre_ff}_layernorm",
        ),
    ),
)

# Nemotron-H: each block is one sublayer. Nothing rotates.

NEMOTRON_MIXER = Mixer(
    {
        **{"heads": ("mamba_num_heads", 128), "groups": ("n_groups", 8), "d_head": ("mamba_head_dim", 64)},
        **{"d_state": ("ssm_state_size", 128), "kernel": ("conv_kernel", 4)},
        **{"bias": ("use_bias", False), "conv_bias": ("use_conv_bias", True)},
    },
    norm="groups",
)
STEP = field("time_step_min", "dt_min", 0.001, least=0)  # steps have no upper limit
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
OLD_WORDS = {"mamba": "linear_attention", "attention": "full_attention"}
ROUTED = (
    field("n_routed_experts", "n_experts", 8, least=1),
    field("num_experts_per_tok", "n_active_experts", 2, least=1),
    field("moe_intermediate_size", "d_expert", 7688, least=1),
    field("moe_shared_expert_intermediate_size", "d_shared_expert", 7688, least=1),
    field("routed_scaling_factor", "router_scale", 1.0),
    field("n_group", "router_groups", 1, least=1),
    field("topk_group", "n_active_groups", 1, least=1),
    field("norm_topk_prob", "router_renormalise", True),
    fixed({"router_order": "sigmoid_topk", "router_correction": True, "shared_expert_gate": False}),
    fixed(only={"moe_latent_size": None, "mlp_bias": False}),  # no expert has a bias
)


def _read_nemotron(theirs: Json) -> Json:
    types, pattern = theirs.get("layers_block_type"), theirs.get("hybrid_override_pattern")
    if types is None:
        unknown = sorted({*(pattern or "")} - {*LETTERS})
        refuse_key(unknown, "hybrid_override_pattern", unknown[:1], f"supported are {', '.join(LETTERS)}")
        types = [LETTERS[letter] for letter in pattern] if pattern else list(LETTERS.values())
    types = [OLD_WORDS.get(word, word) for word in types]
    checked_layer_types(types, tuple(LETTERS.values()))
    kind = dataclasses.replace(NEMOTRON_MIXER.read(theirs), **STEP.read(theirs))
    words = {"linear_attention": str(kind), "full_attention": "full", "moe": "none", "mlp": "none"}
    values: Json = {}
    if "moe" in types:
        values["dense_layers"] = tuple(layer for layer, word in enumerate(types) if word == "mlp")
        for part in ROUTED:
            values |= part.read(theirs)
    return {
        **values,
        "n_layers": len(types),
        "attention": tuple(words[word] for word in types),
        "feedforward_skips": tuple(layer for layer, word in enumerate(types) if words[word] != "none"),
    }


def _write_nemotron(config: ModelConfig) -> Json:
    kind, written = NEMOTRON_MIXER.write(config)
    types = []
    for layer, own in enumerate(config.main.kinds):
        expert = config.n_experts and layer not in config.dense_layers
        words = {"mamba2": "linear_attention", "none": "moe" if expert else "mlp"}
        types.append(words.get(own.name, "full_attention"))
    letters = {word: letter for letter, word in LETTERS.items()}
    written |= {} if kind is None else {"time_step_min": kind.dt_min, "expand": 2}
    written |= {
        "layers_block_type": types,
        "hybrid_override_pattern": "".join(letters[word] for word in types),
    }
    for part in ROUTED if config.n_experts else ():
        written |= part.write(config)
    return written


MIXED = f"{BACKBONE}.mixer"
EXPERT, ONE = f"{BLOCK}.feedforward.experts", f"{BLOCK}.feedforward"

NEMOTRON_RULES: tuple[Rule, ...] = (
    *EDGES,
    *mixer_rules(MIXED),
    *same({f"{MIXED}.{{q,k,v,o}}_proj": f"{OURS}.{{q,k,v,out}}"}),
    *FIRST_NORM,
    *same({f"{BACKBONE}.norm": f"{BLOCK}.feedforward_residual.before"}),
    *same({f"{MIXED}.{{up,down}}_proj": f"{ONE}.{{up,down}}"}),
    *same({f"{MIXED}.experts.{{j}}.{x}_proj": f"{EXPERT}.{{j}}.{x}" for x in ("up", "down")}),
    Rule(f"{MIXED}.gate.weight", (f"{ONE}.router.weight",)),
    Rule(f"{MIXED}.gate.e_score_correction_bias", (f"{ONE}.correction",)),
    *same({f"{MIXED}.shared_experts.{{up,down}}_proj": f"{ONE}.shared.{{up,down}}"}),
)
FUSED = tuple(
    Rule(f"{MIXED}.experts.{x}_proj", (f"{EXPERT}.{{J}}.{x}.weight",), EXPERTS) for x in ("up", "down")
)

NEMOTRON_H = Architecture(
    "nemotron_h",
    classes("NemotronH", sequence=False, token=False),
    (
        fixed({"family": "decoder", "positions": "none", "norm": "rmsnorm", "norm_position": "pre"}),
        fixed({"bias": False}, only={"tie_word_embeddings": False}),
        *keys(vocab_size=131072, d_model=4096, n_heads=32, n_kv_heads=8, d_head=128, max_positions=4096),
        *keys({"norm_eps": "layer_norm_epsilon"}, norm_eps=1e-5, d_ff=21504, init_std=0.02),
        *keys(attention_dropout=0.0, tie_embeddings=False),
        field("mlp_hidden_act", "activation", "relu2", ACTIVATIONS),
        fixed(only={"mamba_hidden_act": "silu"}),
        FEEDFORWARD_BIAS,
        ConfigPart(_read_nemotron, _write_nemotron),
    ),
    # The second names are those in memory, which transformers 5 writes when asked to.
    (*NEMOTRON_RULES, *FUSED, *renamed((*NEMOTRON_RULES, *FUSED), "model.", "backbone.")),
    heads(),
    prefix="backbone.",
    carried=("mtp.*",),  # a head that predicts several tokens at once: transformers leaves it out too
    aliases={
        **{"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
        **{"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"},
        "mamba_dt_min": "time_step_min",
    },
)

# LFM2: Llama's blocks, most of them with a gated short convolution.

CONV = "conv"


def _read_lfm2(theirs: Json) -> Json:
    layers, attends = count_layers(theirs), theirs.get("full_attn_idxs")
    types = theirs.get("layer_types")
    if types is None:
        types = [
            CONV if attends is not None and layer not in attends else "full_attention"
            for layer in range(layers)
        ]
    checked_layer_types(types, ("full_attention", CONV))
    refuse(len(types) != layers, f"config.json has {len(types)} layer_types for {layers} layers")
    values = field("conv_L_cache", "kernel", 3, least=2).read(theirs) | field(
        "conv_bias", "bias", False
    ).read(theirs)
    words = {"full_attention": "full", CONV: str(ShortConvKind(**values))}
    width = int(theirs.get("block_ff_dim") or theirs.get("intermediate_size", 12288))
    if theirs.get("block_auto_adjust_ff_dim", True):
        times, whole = theirs.get("block_ffn_dim_multiplier", 1.0), theirs.get("block_multiple_of", 256)
        width = int(2 * width / 3)
        if times is not None:
            refuse_key(whole < 1, "block_multiple_of", whole, "it must be 1 at least")
            width = whole * math.ceil(int(times * width) / whole)
    return {"attention": tuple(words[word] for word in types), "d_ff": width}


def _write_lfm2(config: ModelConfig) -> Json:
    kinds = config.main.kinds
    own = next((kind for kind in kinds if isinstance(kind, ShortConvKind)), ShortConvKind())
    return {
        "layer_types": [CONV if isinstance(kind, ShortConvKind) else "full_attention" for kind in kinds],
        **{"conv_L_cache": own.kernel, "conv_bias": own.bias},
        **{"intermediate_size": config.d_ff, "block_auto_adjust_ff_dim": False},
    }


SHORT = same({f"{LAYER}.conv.out_proj": f"{OURS}.out"}) + (
    *joined(f"{LAYER}.conv.in_proj", [f"{OURS}.{name}" for name in "kqv"]),
    Rule(f"{LAYER}.conv.conv.weight", (f"{OURS}.conv",)),
    Rule(f"{LAYER}.conv.conv.bias", (f"{OURS}.conv_bias",)),
)

LFM2 = llama_like(
    "lfm2",
    classes("Lfm2", sequence=False, token=False),
    *shape(None, d_ff=12288, n_kv_heads=8, vocab_size=65536, d_model=2560, max_positions=128000),
    *keys({"norm_eps": "norm_eps"}, norm_eps=1e-5, tie_embeddings=True),
    fixed({"qk_norm": "head", "activation": "silu"}),
    rope(base=1_000_000.0),
    WHOLE_HEADS,
    ConfigPart(_read_lfm2, _write_lfm2),
    rules=(
        *(dataclasses.replace(rule, needs=f"{OURS}.conv") for rule in SHORT),
        *llama_rules(
            **{"norm": "model.embedding_norm", "qkvo": "self_attn.{q_proj,k_proj,v_proj,out_proj}"},
            **{"qk_norms": "self_attn.{q,k}_layernorm", "gated": "feed_forward.{w1,w3,w2}"},
            pre_norms="{operator,ffn}_norm",
        ),
    ),
    aliases={"tie_embedding": "tie_word_embeddings"},
)
