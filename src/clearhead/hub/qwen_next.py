"""Qwen3-Next: Qwen 3's tables with gated delta layers, gated heads in the full layers, and a shared expert.

Its files join projections: group by group, q, k, v and gate of a delta layer, the strengths of its writes and
decays, and head by head the queries and gates of a full layer.
"""

import dataclasses

from clearhead.core.config import ModelConfig
from clearhead.hub.fields import ConfigPart, Json, field, fixed
from clearhead.hub.files import refuse
from clearhead.hub.layers import count_layers
from clearhead.hub.llama import (
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
from clearhead.hub.llama_relatives import QWEN_SIZES
from clearhead.hub.qwen_moe import EXPERT_RULES, SHARED_EXPERT, mixture
from clearhead.hub.rope import rope
from clearhead.hub.rules import Rule, grouped, joined, same
from clearhead.variants.kinds import GatedDeltaKind

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
    unknown = sorted({*types} - {FULL, DELTA})
    refuse(unknown, f"config.json has layer_types {unknown[:1]}: only {FULL} and {DELTA} are supported")
    refuse(len(types) != layers, f"config.json has {len(types)} layer_types for {layers} layers")
    sizes: Json = {}
    for key, (name, usual) in DELTA_SIZES.items():
        sizes |= field(key, name, usual, least=1).read(theirs)
    kinds = {FULL: "full", DELTA: str(GatedDeltaKind(**sizes))}
    return {"attention": tuple(kinds[one] for one in types)}


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
OURS, LINEAR = f"{BLOCK}.attention", f"{THEIRS}.linear_attn"
DELTA_RULES: tuple[Rule, ...] = (
    *joined(f"{LINEAR}.in_proj_qkvz", [f"{OURS}.{name}" for name in ("q", "k", "v", "gate")], BY_KEY_HEAD),
    *joined(f"{LINEAR}.in_proj_ba", [f"{OURS}.beta", f"{OURS}.decay"], BY_KEY_HEAD),
    Rule(f"{LINEAR}.conv1d.weight", (f"{OURS}.conv",)),
    Rule(f"{LINEAR}.dt_bias", (f"{OURS}.decay_bias",)),
    Rule(f"{LINEAR}.A_log", (f"{OURS}.log_rate",)),
    *same({f"{LINEAR}.norm": f"{OURS}.norm", f"{LINEAR}.out_proj": f"{OURS}.out"}),
)
FULL_RULES = (
    *joined(f"{THEIRS}.self_attn.q_proj", [f"{OURS}.q", f"{OURS}.gate"], BY_HEAD),
    *(rule for rule in ATTENTION if "q_proj" not in rule.theirs),
    *QK_NORMS,
)

LLAMA_LIKE = llama_like(
    "qwen3_next",
    "Qwen3Next",
    *shape(
        d_ff=5632,
        kv_heads=2,
        head_dim=256,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=16,
        **QWEN_SIZES,
    ),
    field("hidden_act", "activation", "silu", {"silu": "silu", "swish": "silu"}),  # the convolution's too
    *ATTENTION_BIAS,
    fixed({"qk_norm": "head", "norm_unit_offset": True, "attention_gate": True}),
    rope(fraction=0.25),
    ConfigPart(_read_layers, _write_layers),
    mixture(512, 10, 512, shared=512, summed=True),
    rules=(
        *EDGES,
        *NORMS,
        *(dataclasses.replace(rule, beside=f"{OURS}.conv") for rule in DELTA_RULES),
        *(dataclasses.replace(rule, beside=f"{OURS}.q_norm.weight") for rule in FULL_RULES),
        *FEEDFORWARD,
        *EXPERT_RULES,
        *SHARED_EXPERT,
    ),
)
# A head that predicts several tokens at once. transformers leaves it out, and so do we.
QWEN3_NEXT = dataclasses.replace(LLAMA_LIKE, carried=("mtp.*",))
