"""gpt-oss: Llama's tables with sinks, alternating windows, and experts whose gates are clamped.

Released files hold the experts in 4 bits, which `mxfp4` reads.
"""

import dataclasses

from clearhead.hub.fields import field, fixed
from clearhead.hub.layers import sliding_windows
from clearhead.hub.llama import ATTENTION, BLOCK, EDGES, NORMS, THEIRS, llama_like, shape
from clearhead.hub.rope import rope
from clearhead.hub.rules import INTERLEAVED_EXPERTS, Rule, same

FEEDFORWARD = f"{BLOCK}.feedforward"
EXPERT_RULES = tuple(
    Rule(
        f"{THEIRS}.mlp.experts.{theirs}",
        tuple(f"{FEEDFORWARD}.experts.{{J}}.{name}.{kind}" for name in ours),
        INTERLEAVED_EXPERTS,
    )
    for theirs, ours, kind in (
        ("gate_up_proj", ("gate", "up"), "weight"),
        ("gate_up_proj_bias", ("gate", "up"), "bias"),
        ("down_proj", ("down",), "weight"),
        ("down_proj_bias", ("down",), "bias"),
    )
)

LLAMA_LIKE = llama_like(
    "gpt_oss",
    "GptOss",
    *shape(
        d_ff=2880,
        kv_heads=8,
        head_dim=64,
        eps=1e-5,
        vocab_size=201088,
        hidden_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        max_position_embeddings=131072,
    ),
    field("attention_bias", "qkv_bias", True),
    field("attention_bias", "attention_out_bias", True),
    fixed({"attention_sink": True, "feedforward_bias": True, "router_bias": True, "gated_shift": 1.0}),
    field("swiglu_alpha", "activation", 1.702, {1.702: "quick_gelu", 1.0: "silu"}),
    field("swiglu_limit", "gated_clamp", 7.0),
    field("num_local_experts", "n_experts", 128, least=1),
    field("num_experts_per_tok", "n_active_experts", 4),
    rope(
        base=150_000.0,
        usual={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    sliding_windows(pattern=2, default=128),
    rules=(
        *EDGES,
        *NORMS,
        *ATTENTION,
        Rule(f"{THEIRS}.self_attn.sinks", (f"{BLOCK}.attention.sink",)),
        *same({f"{THEIRS}.mlp.router": f"{FEEDFORWARD}.router"}),
        *EXPERT_RULES,
    ),
    aliases={"num_experts": "num_local_experts"},
)
GPT_OSS = dataclasses.replace(LLAMA_LIKE, quantized=("mxfp4",))
