"""Decoders with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE and Next, gpt-oss, OLMoE, Granite-MoE.

Each is Llama's tables with experts in place of feed-forwards, in some layers or all.
"""

import dataclasses

from clearhead.core.config import ModelConfig
from clearhead.hub.fields import (
    ConfigPart,
    Json,
    checked_layer_types,
    count_layers,
    field,
    fixed,
    keys,
    sliding_windows,
)
from clearhead.hub.files import refuse
from clearhead.hub.llama import (
    ATTENTION_BIAS,
    BLOCK,
    EVERY_GRANITE,
    LAYER,
    QK_NORMS,
    QWEN_SIZES,
    classes,
    llama_like,
    llama_rules,
    shape,
)
from clearhead.hub.mtp import ALIASES, APART, NEXT_ONE
from clearhead.hub.rope import rope
from clearhead.hub.rules import EXPERTS, INTERLEAVED_EXPERTS, Rule, grouped, joined, same
from clearhead.variants.kinds import GatedDeltaKind

MLP, MOE = f"{LAYER}.mlp", f"{LAYER}.block_sparse_moe"
FEEDFORWARD = f"{BLOCK}.feedforward"
EXPERT = f"{FEEDFORWARD}.experts"


def fused_experts(router: str, wide: str, narrow: str) -> tuple[Rule, ...]:
    """Return the rules for every expert in two tensors: gates and ups, and downs."""
    return (
        Rule(router, (f"{FEEDFORWARD}.router.weight",)),
        Rule(wide, (f"{EXPERT}.{{J}}.gate.weight", f"{EXPERT}.{{J}}.up.weight"), EXPERTS),
        Rule(narrow, (f"{EXPERT}.{{J}}.down.weight",), EXPERTS),
    )


# As transformers 5 holds them in memory, and writes them when asked to.
FUSED_EXPERTS = fused_experts(f"{MLP}.gate.weight", f"{MLP}.experts.gate_up_proj", f"{MLP}.experts.down_proj")
EXPERT_RULES = (
    *same({f"{MLP}.experts.{{j}}.{x}_proj": f"{EXPERT}.{{j}}.{x}" for x in ("gate", "up", "down")}),
    *FUSED_EXPERTS,
)

# Mixtral: Mistral with experts in every layer.

MIXTRAL = llama_like(
    "mixtral",
    "Mixtral",
    *shape(d_ff=14336, n_kv_heads=8, norm_eps=1e-5, max_positions=131072),
    rope(base=1_000_000.0),
    sliding_windows(),
    field("num_local_experts", "n_experts", 8, least=1),
    *keys(n_active_experts=2),
    rules=(
        *llama_rules(gated=""),
        Rule(f"{MOE}.gate.weight", (f"{FEEDFORWARD}.router.weight",)),
        *(
            Rule(f"{MOE}.experts.{{j}}.{theirs}.weight", (f"{EXPERT}.{{j}}.{ours}.weight",))
            for theirs, ours in {"w1": "gate", "w3": "up", "w2": "down"}.items()
        ),
        *FUSED_EXPERTS,
    ),
    aliases={"num_experts": "num_local_experts"},
)

# Qwen2-MoE and Qwen3-MoE: Qwen's tables with a mixture of experts in some of the layers.


def mixture(
    experts: int, active: int, width: int, shared: int | None = None, summed: bool = False
) -> ConfigPart:
    """Return the part for experts in every n-th layer but those of a list.

    Args:
        experts: num_experts, where config.json does not say.
        active: num_experts_per_tok, the same.
        width: moe_intermediate_size, the same.
        shared: shared_expert_intermediate_size, the same; None: there is no such expert.
        summed: norm_topk_prob, the same.
    """
    parts = (
        field("num_experts", "n_experts", experts),
        field("num_experts_per_tok", "n_active_experts", active),
        field("moe_intermediate_size", "d_expert", width),
        field("norm_topk_prob", "router_renormalise", summed),
        fixed({"router_order": "softmax_topk"}),
        fixed({"d_shared_expert": 0})
        if shared is None
        else field("shared_expert_intermediate_size", "d_shared_expert", shared, least=1),
    )

    def read(theirs: Json) -> Json:
        values: Json = {}
        for part in parts:
            values |= part.read(theirs)
        every, listed = theirs.get("decoder_sparse_step", 1), theirs.get("mlp_only_layers") or ()
        layers = range(count_layers(theirs))
        dense = tuple(layer for layer in layers if layer in listed or (layer + 1) % every)
        if values["n_experts"] < 1 or len(dense) == len(layers):
            return {}
        return {**values, "dense_layers": dense}

    def write(config: ModelConfig) -> Json:
        if not config.n_experts:
            return {"num_experts": 0}
        written: Json = {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
        for part in parts:
            written |= part.write(config)
        return written

    return ConfigPart(read, write)


SHARED_EXPERT = same(
    {
        f"{MLP}.shared_expert.{{gate,up,down}}_proj": f"{FEEDFORWARD}.shared.{{gate,up,down}}",
        f"{MLP}.shared_expert_gate": f"{FEEDFORWARD}.shared_gate",
    }
)
SWITCH = "use_sliding_window"
WINDOWS, ONE_WINDOW = sliding_windows(default=4096, switch=SWITCH), sliding_windows(default=4096)


def _read_windows(theirs: Json) -> Json:
    refuse(
        theirs.get(SWITCH) and theirs.get("layer_types") is None,
        f"config.json has {SWITCH} and no layer_types, and releases of transformers disagree on which layers "
        "have a window then: state layer_types",
    )
    return WINDOWS.read(theirs)


def _read_one_window(theirs: Json) -> Json:
    return ONE_WINDOW.read(theirs) if theirs.get(SWITCH) else {"window": None}


def _write_one_window(config: ModelConfig) -> Json:
    written = ONE_WINDOW.write(config)
    return {**written, SWITCH: written["sliding_window"] is not None}


QWEN2_MOE = llama_like(
    "qwen2_moe",
    "Qwen2Moe",
    *shape(d_ff=5632, n_kv_heads=16, d_model=2048, n_layers=24, n_heads=16, qkv_bias=True, **QWEN_SIZES),
    rope(),
    ConfigPart(_read_windows, WINDOWS.write),
    mixture(60, 4, 1408, shared=5632),
    rules=(*llama_rules(), *EXPERT_RULES, *SHARED_EXPERT),
)

QWEN3_MOE = llama_like(
    "qwen3_moe",
    "Qwen3Moe",
    *shape(d_ff=6144, n_kv_heads=4, d_model=2048, n_layers=24, **QWEN_SIZES),
    *ATTENTION_BIAS,
    fixed({"qk_norm": "head"}),
    rope(),
    ConfigPart(_read_one_window, _write_one_window),
    mixture(128, 8, 768),
    rules=(*llama_rules(qk_norms=QK_NORMS), *EXPERT_RULES),
    aliases={"num_local_experts": "num_experts"},
)

# Qwen3-Next: Qwen 3 with gated delta layers, gated heads in the full layers, and a shared expert. Its files
# join projections: group by group, q, k, v and gate of a delta layer, the strengths of its writes and decays,
# and head by head the queries and gates of a full layer.

FULL, DELTA = "full_attention", "linear_attention"
DELTA_SIZES = {  # their key: what it is of the kind, and its value where the key is absent
    "linear_num_key_heads": ("key_heads", 16),
    "linear_num_value_heads": ("value_heads", 32),
    "linear_key_head_dim": ("d_key", 128),
    "linear_value_head_dim": ("d_value", 128),
    "linear_conv_kernel_dim": ("kernel", 4),
}


def delta_of(config: ModelConfig) -> GatedDeltaKind | None:
    """Return the first gated delta layer's kind with all its sizes; None where there is no such layer."""
    for kind in config.main.kinds:
        if isinstance(kind, GatedDeltaKind):
            names = [entry.name for entry in dataclasses.fields(kind)]
            return GatedDeltaKind(**dict(zip(names, (*kind.sizes(config.main), kind.kernel))))
    return None


def _read_layers(theirs: Json) -> Json:
    layers, every = count_layers(theirs), theirs.get("full_attention_interval", 4)
    types = theirs.get("layer_types")
    if types is None:
        types = [DELTA if (layer + 1) % every else FULL for layer in range(layers)]
    checked_layer_types(types, (FULL, DELTA))
    refuse(len(types) != layers, f"config.json has {len(types)} layer_types for {layers} layers")
    sizes: Json = {}
    for key, (name, usual) in DELTA_SIZES.items():
        sizes |= field(key, name, usual, least=1).read(theirs)
    kinds = {FULL: "full", DELTA: str(GatedDeltaKind(**sizes))}
    return {"attention": tuple(kinds[kind] for kind in types)}


def _write_layers(config: ModelConfig) -> Json:
    delta = delta_of(config)
    sizes = {} if delta is None else {key: getattr(delta, name) for key, (name, _) in DELTA_SIZES.items()}
    types = [DELTA if isinstance(kind, GatedDeltaKind) else FULL for kind in config.main.kinds]
    return {"layer_types": types, **sizes}


def _key_heads(config: ModelConfig) -> int:
    delta = delta_of(config)
    assert delta is not None  # the rule leads to parameters of such a layer
    return delta.key_heads


BY_HEAD, BY_KEY_HEAD = grouped(lambda config: config.n_heads), grouped(_key_heads)
OURS, LINEAR = f"{BLOCK}.attention", f"{LAYER}.linear_attn"
DELTA_RULES: tuple[Rule, ...] = (
    *joined(f"{LINEAR}.in_proj_qkvz", [f"{OURS}.{name}" for name in ("q", "k", "v", "gate")], BY_KEY_HEAD),
    *joined(f"{LINEAR}.in_proj_ba", [f"{OURS}.beta", f"{OURS}.decay"], BY_KEY_HEAD),
    Rule(f"{LINEAR}.conv1d.weight", (f"{OURS}.conv",)),
    Rule(f"{LINEAR}.dt_bias", (f"{OURS}.decay_bias",)),
    Rule(f"{LINEAR}.A_log", (f"{OURS}.log_rate",)),
    *same({f"{LINEAR}.norm": f"{OURS}.norm", f"{LINEAR}.out_proj": f"{OURS}.out"}),
)
FULL_RULES = (
    *joined(f"{LAYER}.self_attn.q_proj", [f"{OURS}.q", f"{OURS}.gate"], BY_HEAD),
    *same(
        {
            f"{LAYER}.self_attn.{{k,v,o}}_proj": f"{OURS}.{{k,v,out}}",
            f"{LAYER}.{QK_NORMS}": f"{OURS}.{{q,k}}_norm",
        }
    ),
)

QWEN3_NEXT = llama_like(
    "qwen3_next",
    "Qwen3Next",
    *shape(None, d_ff=5632, n_kv_heads=2, d_head=256, d_model=2048, n_layers=48, n_heads=16, **QWEN_SIZES),
    field("hidden_act", "activation", "silu", {"silu": "silu", "swish": "silu"}),  # the convolution's too
    *ATTENTION_BIAS,
    fixed({"qk_norm": "head", "norm_unit_offset": True, "attention_gate": True}),
    rope(fraction=0.25),
    ConfigPart(_read_layers, _write_layers),
    mixture(512, 10, 512, shared=512, summed=True),
    NEXT_ONE,
    rules=(
        *llama_rules(qkvo=""),
        *(dataclasses.replace(rule, needs=f"{OURS}.conv") for rule in DELTA_RULES),
        *(dataclasses.replace(rule, needs=f"{OURS}.q_norm.weight") for rule in FULL_RULES),
        *EXPERT_RULES,
        *SHARED_EXPERT,
    ),
    carried=("mtp.*",),  # a layer that cannot be one of ours
    aliases=ALIASES,
    mtp=APART,
)

# gpt-oss: sinks, alternating windows, and experts whose gates are clamped. Released files hold the experts in
# 4 bits, which `quantized` reads.

GPT_OSS = llama_like(
    "gpt_oss",
    "GptOss",
    *shape(None, d_ff=2880, n_kv_heads=8, d_head=64, norm_eps=1e-5, vocab_size=201088, d_model=2880),
    *keys(n_layers=36, n_heads=64, max_positions=131072, n_active_experts=4),
    field("attention_bias", "qkv_bias", True),
    field("attention_bias", "attention_out_bias", True),
    fixed({"attention_sink": True, "feedforward_bias": True, "router_bias": True, "gated_shift": 1.0}),
    field("swiglu_alpha", "activation", 1.702, {1.702: "quick_gelu", 1.0: "silu"}),
    field("swiglu_limit", "gated_clamp", 7.0),
    field("num_local_experts", "n_experts", 128, least=1),
    rope(
        base=150_000.0,
        usual={
            **{"rope_type": "yarn", "factor": 32.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    ),
    sliding_windows(pattern=2, default=128),
    rules=(
        *llama_rules(gated=""),
        Rule(f"{LAYER}.self_attn.sinks", (f"{BLOCK}.attention.sink",)),
        *same({f"{MLP}.router": f"{FEEDFORWARD}.router"}),
        *(
            Rule(
                f"{MLP}.experts.{theirs}{ending}",
                tuple(f"{EXPERT}.{{J}}.{name}.{kind}" for name in ours),
                INTERLEAVED_EXPERTS,
            )
            for theirs, ours in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
            for ending, kind in (("", "weight"), ("_bias", "bias"))
        ),
    ),
    aliases={"num_experts": "num_local_experts"},
    quantized=("mxfp4",),
)

# OLMoE: norms over queries and keys, and a mixture of experts in every layer.

OLMOE = llama_like(
    "olmoe",
    classes("Olmoe", sequence=False, token=False),
    *shape(d_ff=2048, norm_eps=1e-5, vocab_size=50304, d_model=2048, n_layers=16, n_heads=16),
    *keys(max_positions=4096, n_active_experts=8),
    *ATTENTION_BIAS,
    fixed({"qk_norm": "full", "router_order": "softmax_topk"}, only={"clip_qkv": None}),
    fixed(written={"pad_token_id": None}),
    field("num_experts", "n_experts", 64, least=1),
    field("norm_topk_prob", "router_renormalise", False),
    rope(),
    rules=(*llama_rules(gated="", qk_norms=QK_NORMS), *EXPERT_RULES),
    aliases={"num_local_experts": "num_experts"},
)

# Granite-MoE: Granite's factors and a mixture of experts, all of them in two tensors.

GRANITE_MOE = llama_like(
    "granitemoe",
    classes("GraniteMoe", sequence=False, token=False),
    *EVERY_GRANITE,
    field("num_local_experts", "n_experts", 8, least=1),
    *keys(n_active_experts=2),
    rules=(
        *llama_rules(gated=""),
        *fused_experts(
            f"{MOE}.router.layer.weight", f"{MOE}.input_linear.weight", f"{MOE}.output_linear.weight"
        ),
        # As transformers 5 holds them in memory, and writes them when asked to.
        *fused_experts(f"{MOE}.router.weight", f"{MOE}.experts.gate_up_proj", f"{MOE}.experts.down_proj"),
    ),
)
