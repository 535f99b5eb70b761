"""Qwen2-MoE and Qwen3-MoE: Qwen's tables with a mixture of experts in some of the layers."""

from clearhead.core.config import ModelConfig
from clearhead.hub.fields import ConfigPart, Json, field, fixed
from clearhead.hub.files import refuse
from clearhead.hub.layers import count_layers, sliding_windows
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    BLOCK,
    EDGES,
    FEEDFORWARD,
    NORMS,
    QK_NORMS,
    THEIRS,
    llama_like,
    shape,
)
from clearhead.hub.llama_relatives import EXPERT, FUSED_EXPERTS, QWEN_SIZES
from clearhead.hub.rope import rope
from clearhead.hub.rules import same


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


MLP = f"{THEIRS}.mlp"
EXPERT_RULES = (
    *same({f"{MLP}.experts.{{j}}.{x}_proj": f"{EXPERT}.{{j}}.{x}" for x in ("gate", "up", "down")}),
    *FUSED_EXPERTS,
)
SHARED_EXPERT = same(
    {
        **{
            f"{MLP}.shared_expert.{x}_proj": f"{BLOCK}.feedforward.shared.{x}" for x in ("gate", "up", "down")
        },
        f"{MLP}.shared_expert_gate": f"{BLOCK}.feedforward.shared_gate",
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
    *shape(
        d_ff=5632,
        kv_heads=16,
        hidden_size=2048,
        num_hidden_layers=24,
        num_attention_heads=16,
        **QWEN_SIZES,
    ),
    ACTIVATION,
    field("qkv_bias", "qkv_bias", True),
    rope(),
    ConfigPart(_read_windows, WINDOWS.write),
    mixture(60, 4, 1408, shared=5632),
    rules=(*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD, *EXPERT_RULES, *SHARED_EXPERT),
)

QWEN3_MOE = llama_like(
    "qwen3_moe",
    "Qwen3Moe",
    *shape(
        d_ff=6144,
        kv_heads=4,
        hidden_size=2048,
        num_hidden_layers=24,
        **QWEN_SIZES,
    ),
    ACTIVATION,
    *ATTENTION_BIAS,
    fixed({"qk_norm": "head"}),
    rope(),
    ConfigPart(_read_one_window, _write_one_window),
    mixture(128, 8, 768),
    rules=(*EDGES, *NORMS, *ATTENTION, *QK_NORMS, *FEEDFORWARD, *EXPERT_RULES),
    aliases={"num_local_experts": "num_experts"},
)
