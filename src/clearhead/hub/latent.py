"""Decoders with multi-head latent attention: DeepSeek-V2 and V3, and GLM-4-MoE-Lite; and GLM-4-MoE.

Each is Llama's tables with a mixture with shared experts in all layers but the first ones; all but the last
have latents in place of keys and values. DeepSeek's yarn sharpens the softmax too: `mscale_all_dim`
multiplies the scale of scores.
"""

import dataclasses
import math

from clearhead.core.config import ModelConfig, RopeScaling
from clearhead.hub.fields import REQUIRED, ConfigPart, Json, count_layers, field, fixed, keys
from clearhead.hub.files import refuse, refuse_key
from clearhead.hub.llama import (
    ATTENTION_BIAS,
    BLOCK,
    LAYER,
    QK_NORMS,
    classes,
    llama_like,
    llama_rules,
    shape,
)
from clearhead.hub.mixtures import EXPERT_RULES, FEEDFORWARD, MLP
from clearhead.hub.mtp import AFTER, ALIASES, NEXTN
from clearhead.hub.rope import rope
from clearhead.hub.rules import Rule, grouped, joined, same
from clearhead.variants.kinds import Latent

OURS, THEIRS = f"{BLOCK}.attention", f"{LAYER}.self_attn"
MIXTURE_RULES = (
    *EXPERT_RULES,
    Rule(f"{MLP}.gate.e_score_correction_bias", (f"{FEEDFORWARD}.correction",)),
    *same({f"{MLP}.shared_experts.{{gate,up,down}}_proj": f"{FEEDFORWARD}.shared.{{gate,up,down}}"}),
)
QUERIES = same({f"{THEIRS}.q_b_proj": f"{OURS}.q"})
RULES: tuple[Rule, ...] = (
    *llama_rules(qkvo=""),
    # Queries of a latent, or of the token itself.
    *(dataclasses.replace(rule, needs=f"{OURS}.q_down.weight") for rule in QUERIES),
    *same({f"{THEIRS}.q_proj": f"{OURS}.q", f"{THEIRS}.o_proj": f"{OURS}.out"}),
    *same({f"{THEIRS}.q_a_proj": f"{OURS}.q_down", f"{THEIRS}.q_a_layernorm": f"{OURS}.q_down_norm"}),
    *same({f"{THEIRS}.kv_a_layernorm": f"{OURS}.kv_down_norm"}),
    *joined(f"{THEIRS}.kv_a_proj_with_mqa", [f"{OURS}.kv_down", f"{OURS}.k_shared"]),
    *joined(f"{THEIRS}.kv_b_proj", [f"{OURS}.k", f"{OURS}.v"], grouped(lambda config: config.n_heads)),
    *MIXTURE_RULES,
)


def latents(
    rank: int, query_rank: int, own: int, rotary: int, value: int, indexed: bool = False
) -> ConfigPart:
    """Return the part for the ranks of latents, the widths of a head, and rotation.

    Args:
        rank: kv_lora_rank, where config.json does not say.
        query_rank: q_lora_rank, the same; null is a value of its own.
        own: qk_nope_head_dim, the same.
        rotary: qk_rope_head_dim, the same.
        value: v_head_dim, the same.
        indexed: an indexer chooses the keys of each query, as in DeepSeek-V3.2.
    """
    sizes = {"kv_lora_rank": rank, "qk_nope_head_dim": own, "qk_rope_head_dim": rotary, "v_head_dim": value}
    parts = {key: field(key, key, usual, least=1) for key, usual in sizes.items()}
    queries = field("q_lora_rank", "query_rank", query_rank, least=1, null=True)
    rotation = rope()

    def read(theirs: Json) -> Json:
        heads, stated = theirs.get("num_attention_heads"), theirs.get("num_key_value_heads")
        other = heads is not None and stated not in (None, heads)
        refuse_key(other, "num_key_value_heads", stated, f"every one of {heads} heads has keys of its own")
        kept, own, rotary, value = (int(part.read(theirs)[key]) for key, part in parts.items())
        turned = theirs.get("head_dim")
        refuse_key(turned not in (None, rotary), "head_dim", turned, f"here it is qk_rope_head_dim, {rotary}")
        low, turns = queries.read(theirs)["query_rank"], rotation.read(theirs)
        return {
            **turns,
            "rope_fraction": _share(rotary, own + rotary),
            "attention": str(Latent(kept, low or 0, **(_read_index(theirs) if indexed else {}))),
            "d_head": own + rotary,
            "d_value": value,
            "attention_scale": (own + rotary) ** -0.5 * _sharper(theirs, turns["rope_scaling"]),
        }

    def write(config: ModelConfig) -> Json:
        (kind,) = set(config.main.kinds)
        assert isinstance(kind, Latent) and indexed == bool(kind.top)
        index = {key: getattr(kind, ours) for key, (ours, _) in INDEX.items()} if indexed else {}
        return {
            **index,
            **rotation.write(config),
            **{"kv_lora_rank": kind.rank, "q_lora_rank": kind.query_rank or None},
            "qk_nope_head_dim": config.main.d_head - config.main.d_rotary,
            **dict.fromkeys(("qk_rope_head_dim", "head_dim"), config.main.d_rotary),
            "v_head_dim": config.d_value,
            "num_key_value_heads": config.n_heads,
        }

    return ConfigPart(read, write)


INDEX = {
    "index_topk": ("top", 2048),
    "index_n_heads": ("index_heads", 64),
    "index_head_dim": ("index_width", 128),
}


def _read_index(theirs: Json) -> Json:
    values: Json = {}
    for key, (name, usual) in INDEX.items():
        values |= field(key, name, usual, least=1).read(theirs)
    return values


def _share(part: int, whole: int) -> float:
    """Return the fraction that gives `part` columns of `whole`, rounded down."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, 1)


def _sharper(theirs: Json, scaling: RopeScaling | None) -> float:
    """Return by how much yarn multiplies the scale of the scores."""
    stated = (theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}).get("mscale_all_dim")
    if scaling is None or not stated:
        return 1.0
    refuse_key(scaling.kind != "yarn", "mscale_all_dim", stated, "supported is rope_type yarn with it")
    return (0.1 * stated * math.log(scaling.factor) + 1.0) ** 2 if scaling.factor > 1 else 1.0


def routed(
    order: str,
    experts: int,
    active: int | None,
    width: int,
    shared: int,
    scale: float,
    groups: tuple[int, int],
) -> tuple[ConfigPart, ...]:
    """Return the parts for how experts are chosen, but for the groups' method and the layers that have none.

    Args:
        order: the router's, which never varies.
        experts: n_routed_experts, where config.json does not say.
        active: num_experts_per_tok, the same; None: it must.
        width: moe_intermediate_size, the same.
        shared: n_shared_experts, the same.
        scale: routed_scaling_factor, the same.
        groups: n_group and topk_group, the same.
    """
    counts = field("n_shared_experts", "count", shared, least=1)
    narrow = field("moe_intermediate_size", "d_expert", width, least=1)

    def read(theirs: Json) -> Json:
        each = narrow.read(theirs)["d_expert"]
        return {"d_expert": each, "d_shared_expert": each * counts.read(theirs)["count"]}

    def write(config: ModelConfig) -> Json:
        count, left = divmod(config.d_shared_expert, config.d_expert or 1)
        refuse(left or not count, f"d_shared_expert {config.d_shared_expert} is no whole number of experts")
        return {"moe_intermediate_size": config.d_expert, "n_shared_experts": count}

    return (
        field("n_routed_experts", "n_experts", experts, least=1),
        field("num_experts_per_tok", "n_active_experts", REQUIRED if active is None else active),
        field("routed_scaling_factor", "router_scale", scale),
        ConfigPart(read, write),
        field("n_group", "router_groups", groups[0], least=1),
        field("topk_group", "n_active_groups", groups[1], least=1),
        fixed({"router_order": order, "shared_expert_gate": False}),
    )


def mixture(dense: ConfigPart, *parts: ConfigPart) -> ConfigPart:
    """Return the part for a mixture in all layers but those that `dense` names; none where it names all."""

    def read(theirs: Json) -> Json:
        values = dense.read(theirs)
        if len(values["dense_layers"]) == count_layers(theirs):
            return {}
        for part in parts:
            values |= part.read(theirs)
        return values

    def write(config: ModelConfig) -> Json:
        written = dense.write(config)
        for part in parts if config.n_experts else ():
            written |= part.write(config)
        return written

    return ConfigPart(read, write)


def first_dense(usual: int) -> ConfigPart:
    """Return the part for a number of first layers without experts."""
    key = field("first_k_dense_replace", "count", usual, least=0)

    def read(theirs: Json) -> Json:
        return {"dense_layers": tuple(range(min(key.read(theirs)["count"], count_layers(theirs))))}

    def write(config: ModelConfig) -> Json:
        count = len(config.dense_layers) if config.n_experts else config.n_layers
        assert not config.n_experts or config.dense_layers == tuple(range(count))
        return {"first_k_dense_replace": count}

    return ConfigPart(read, write)


def _read_layer_types(theirs: Json) -> Json:
    layers, first = count_layers(theirs), theirs.get("first_k_dense_replace")
    types = theirs.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    unknown = sorted({*types} - {"dense", "sparse"})
    refuse_key(unknown, "mlp_layer_types", unknown[:1], "supported are dense and sparse")
    refuse(len(types) != layers, f"config.json has {len(types)} mlp_layer_types for {layers} layers")
    dense = tuple(layer for layer, kind in enumerate(types) if kind == "dense")
    other = first is not None and dense != tuple(range(min(first, layers)))
    refuse_key(other, "first_k_dense_replace", first, f"mlp_layer_types have {len(dense)} dense layers")
    return {"dense_layers": dense}


def _write_layer_types(config: ModelConfig) -> Json:
    layers = range(config.n_layers)
    dense = config.dense_layers if config.n_experts else layers
    return {"mlp_layer_types": ["dense" if layer in dense else "sparse" for layer in layers]}


GREEDY, LIMITED = "greedy", "group_limited_greedy"


def _read_method(theirs: Json) -> Json:
    """Read the groups of a router that goes by them in one of two methods alone."""
    method = theirs.get("topk_method", GREEDY)
    refuse_key(method not in (GREEDY, LIMITED), "topk_method", method, f"supported are {GREEDY}, {LIMITED}")
    return {"router_groups": 1, "n_active_groups": 1} if method == GREEDY else {}


METHOD = ConfigPart(
    _read_method, lambda config: {"topk_method": LIMITED if config.router_groups > 1 else GREEDY}
)

DEEPSEEK_V2 = llama_like(
    "deepseek_v2",
    classes("DeepseekV2", token=False),
    *shape(),
    *ATTENTION_BIAS,
    latents(512, 1536, own=128, rotary=64, value=128),
    mixture(
        first_dense(0),
        *routed("softmax_topk", 64, None, 1407, shared=2, scale=1.0, groups=(1, 1)),
        METHOD,
        fixed({"router_renormalise": False}),
    ),
    # Of a norm over the chosen weights, transformers computes none, and the model's own code does.
    fixed({"rope_layout": "interleaved"}, only={"scoring_func": "softmax", "norm_topk_prob": False}),
    fixed(only={"moe_layer_freq": 1, "mlp_bias": False}),
    rules=RULES,
    aliases={"num_local_experts": "n_routed_experts"},
)


def switch(theirs: str, part: ConfigPart) -> ConfigPart:
    """Return the part for a switch that is on unless config.json says otherwise: null is off, as 0 is."""
    return ConfigPart(
        lambda config_json: part.read({theirs: bool(config_json.get(theirs, True))}), part.write
    )


LAYOUTS = {True: "interleaved", False: "half"}
LAYOUT = switch("rope_interleave", field("rope_interleave", "rope_layout", names=LAYOUTS))
NORMED = switch("norm_topk_prob", field("norm_topk_prob", "router_renormalise"))
SIGMOID = (
    fixed({"router_correction": True}),
    fixed(only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
)

DEEPSEEK_V3 = llama_like(
    "deepseek_v3",
    "DeepseekV3",
    *shape(d_ff=18432, vocab_size=129280, d_model=7168, n_layers=61, n_heads=128, max_positions=4096),
    *ATTENTION_BIAS,
    latents(512, 1536, own=128, rotary=64, value=128),
    LAYOUT,
    mixture(
        first_dense(3),
        *routed("sigmoid_topk", 256, 8, 2048, shared=1, scale=2.5, groups=(8, 4)),
        NORMED,
        *SIGMOID,
    ),
    NEXTN,
    rules=RULES,
    aliases={"num_local_experts": "n_routed_experts", **ALIASES},
    mtp=AFTER,
)

GLM4_MOE_LITE = llama_like(
    "glm4_moe_lite",
    classes("Glm4MoeLite", sequence=False, token=False),
    *shape(d_ff=10240, norm_eps=1e-5, vocab_size=154880, d_model=2048, n_layers=47, n_heads=20),
    *keys(max_positions=202752),
    *ATTENTION_BIAS,
    latents(512, 768, own=192, rotary=64, value=256),
    LAYOUT,
    mixture(
        ConfigPart(_read_layer_types, _write_layer_types),
        *routed("sigmoid_topk", 64, 4, 1536, shared=1, scale=1.8, groups=(1, 1)),
        NORMED,
        *SIGMOID,
    ),
    NEXTN,
    rules=RULES,
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim", **ALIASES},
    mtp=AFTER,
)

# DeepSeek-V3.2: DeepSeek-V3 with an indexer in each layer.

FIRST_DENSE = first_dense(3)


def _read_dense(theirs: Json) -> Json:
    if not theirs.get("mlp_layer_types"):
        return FIRST_DENSE.read(theirs)
    return _read_layer_types({**theirs, "first_k_dense_replace": None})  # which counts without them alone


def _write_dense(config: ModelConfig) -> Json:
    first = not config.n_experts or config.dense_layers == tuple(range(len(config.dense_layers)))
    return {**_write_layer_types(config), **(FIRST_DENSE.write(config) if first else {})}


DEEPSEEK_V32 = llama_like(
    "deepseek_v32",
    classes("DeepseekV32", sequence=False, token=False),
    *shape(d_ff=18432, vocab_size=129280, d_model=7168, n_layers=61, n_heads=128, max_positions=163840),
    *ATTENTION_BIAS,
    latents(512, 1536, own=128, rotary=64, value=128, indexed=True),
    fixed({"rope_layout": "interleaved"}, only={"rope_interleave": True}),
    mixture(
        ConfigPart(_read_dense, _write_dense),
        *routed("sigmoid_topk", 256, 8, 2048, shared=1, scale=2.5, groups=(8, 4)),
        NORMED,
        *SIGMOID,
    ),
    NEXTN,
    rules=(
        *RULES,
        *same({f"{THEIRS}.indexer.wq_b": f"{OURS}.index_q", f"{THEIRS}.indexer.wk": f"{OURS}.index_k"}),
        *same({f"{THEIRS}.indexer.k_norm": f"{OURS}.index_norm"}),
        *same({f"{THEIRS}.indexer.weights_proj": f"{OURS}.index_weights"}),
    ),
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts", **ALIASES},
    mtp=AFTER,
)

# GLM-4-MoE (GLM-4.5 to 4.7): DeepSeek's mixture, with grouped-query attention.

HEAD_NORMS = field("use_qk_norm", "qk_norm", False, {False: "none", True: "head"})

GLM4_MOE = llama_like(
    "glm4_moe",
    classes("Glm4Moe", sequence=False, token=False),
    *shape(d_ff=10944, n_kv_heads=8, norm_eps=1e-5, vocab_size=151552, d_model=4096, n_layers=46, n_heads=96),
    *keys(max_positions=131072),
    field("attention_bias", "qkv_bias", False),
    HEAD_NORMS,
    rope(fraction=0.5),
    mixture(
        first_dense(1),
        *routed("sigmoid_topk", 128, 8, 1408, shared=1, scale=1.0, groups=(1, 1)),
        NORMED,
        *SIGMOID,
    ),
    NEXTN,
    rules=(*llama_rules(qk_norms=QK_NORMS), *MIXTURE_RULES),
    aliases={"num_local_experts": "n_routed_experts", **ALIASES},
    mtp=AFTER,
)
