"""Cohere, StarCoder2, Nemotron, GLM, OLMo 3, OLMoE and Granite-MoE: Llama's tables with what differs."""

from clearhead.hub.fields import ACTIVATIONS, WHOLE_HEADS, ConfigPart, Json, field, fixed, power
from clearhead.hub.layers import count_layers, sliding_windows
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    BLOCK,
    EDGES,
    FEEDFORWARD,
    FEEDFORWARD_BIAS,
    NORMS,
    QK_NORMS,
    THEIRS,
    classes,
    llama_like,
    shape,
    sizes,
)
from clearhead.hub.llama_relatives import EXPERT, NORMS_AFTER, ROUTER, TANH
from clearhead.hub.qwen_moe import EXPERT_RULES
from clearhead.hub.rope import rope, two_ropes
from clearhead.hub.rules import EXPERTS, Rule, joined, same

# Cohere (Command R): LayerNorm without bias, attention and feed-forward side by side, neighbours rotate
# together, scaled logits. Cohere 2: layers with a window rotate, the others do not.

EVERY_COHERE = (
    *sizes(
        vocab_size=256000,
        hidden_size=8192,
        num_hidden_layers=40,
        num_attention_heads=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    WHOLE_HEADS,
    fixed({"gated": True, "bias": False, "parallel": True, "rope_layout": "interleaved"}),
    fixed(written={"pad_token_id": None}),  # by default a row of the released models' token table
    field("intermediate_size", "d_ff", 22528),
    field("num_key_value_heads", "n_kv_heads", None),
    field("layer_norm_eps", "norm_eps", 1e-5),
    field("logit_scale", "logit_scale", 0.0625),
    ACTIVATION,
    *ATTENTION_BIAS,
)
COHERE_WINDOWS = sliding_windows(pattern=4, default=4096, pattern_key="sliding_window_pattern")


def _read_cohere_layers(theirs: Json) -> Json:
    window = COHERE_WINDOWS.read(theirs)["window"]
    each = window if isinstance(window, tuple) else (window,) * count_layers(theirs)
    return {"window": window, "rope_skips": tuple(n for n, width in enumerate(each) if width is None)}


COHERE = llama_like(
    "cohere",
    classes("Cohere", sequence=False, token=False),
    *EVERY_COHERE,
    rope(base=500_000.0),
    fixed(only={"use_qk_norm": False}),  # with it, each head has norm weights of its own
)

COHERE2 = llama_like(
    "cohere2",
    classes("Cohere2", sequence=False, token=False),
    *EVERY_COHERE,
    rope(),
    ConfigPart(_read_cohere_layers, COHERE_WINDOWS.write),
)

# StarCoder2: LayerNorm, biases, a feed-forward without a gate.

STARCODER2 = llama_like(
    "starcoder2",
    "Starcoder2",
    *sizes(
        vocab_size=49152,
        hidden_size=3072,
        num_hidden_layers=30,
        num_attention_heads=24,
        max_position_embeddings=4096,
        initializer_range=0.018042,
        tie_word_embeddings=True,
    ),
    fixed({"norm_bias": True}),
    field("intermediate_size", "d_ff", 12288),
    field("num_key_value_heads", "n_kv_heads", 2),
    field("head_dim", "d_head", None),
    field("hidden_act", "activation", "gelu_pytorch_tanh", TANH),
    field("norm_epsilon", "norm_eps", 1e-5),
    *(field("use_bias", ours, True) for ours in ("qkv_bias", "attention_out_bias", "feedforward_bias")),
    field("residual_dropout", "dropout", 0.0),
    field("embedding_dropout", "embedding_dropout", 0.0),
    rope(),
    sliding_windows(),
    rules=(
        *EDGES,
        *NORMS,
        *ATTENTION,
        *same(
            {
                f"{THEIRS}.mlp.c_fc": f"{BLOCK}.feedforward.up",
                f"{THEIRS}.mlp.c_proj": f"{BLOCK}.feedforward.down",
            }
        ),
    ),
)

# Nemotron: LayerNorm whose weights are stored less one, squared ReLU without a gate, half of a head rotates.

NEMOTRON = llama_like(
    "nemotron",
    "Nemotron",
    *sizes(
        vocab_size=256000,
        hidden_size=6144,
        num_attention_heads=48,
        max_position_embeddings=4096,
        initializer_range=0.0134,
    ),
    fixed({"bias": False, "norm_bias": True, "norm_unit_offset": True}),
    field("intermediate_size", "d_ff", 24576),
    field("num_key_value_heads", "n_kv_heads", None),
    field("head_dim", "d_head", None),
    field("hidden_act", "activation", "relu2", ACTIVATIONS),
    field("norm_eps", "norm_eps", 1e-5),
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    rope(fraction=0.5),
)

# GLM: half of each head rotates, neighbours together, and gate and up are one tensor. GLM-4 (0414): norms
# after each part too.

EVERY_GLM = (
    *shape(
        d_ff=13696,
        kv_heads=2,
        head_dim=128,
        eps=1.5625e-07,
        vocab_size=151552,
        num_hidden_layers=40,
        max_position_embeddings=131072,
    ),
    ACTIVATION,
    fixed({"rope_layout": "interleaved"}, written={"pad_token_id": None}),
    field("attention_bias", "qkv_bias", True),
    rope(fraction=0.5),
)
GLM_RULES = (
    *EDGES,
    *ATTENTION,
    *joined(f"{THEIRS}.mlp.gate_up_proj", [f"{BLOCK}.feedforward.gate", f"{BLOCK}.feedforward.up"]),
    *same({f"{THEIRS}.mlp.down_proj": f"{BLOCK}.feedforward.down"}),
    *NORMS,
)

GLM = llama_like("glm", "Glm", *EVERY_GLM, rules=GLM_RULES)

GLM4 = llama_like(
    "glm4",
    "Glm4",
    *EVERY_GLM,
    fixed({"norm_position": "sandwich"}),
    rules=(
        *GLM_RULES,
        *same(
            {
                f"{THEIRS}.post_self_attn_layernorm": f"{BLOCK}.attention_residual.inside",
                f"{THEIRS}.post_mlp_layernorm": f"{BLOCK}.feedforward_residual.inside",
            }
        ),
    ),
)

# OLMo 3: OLMo 2 with a window in three of four layers, where nothing scales the rotation.

OLMO3 = llama_like(
    "olmo3",
    classes("Olmo3", token=False),
    *shape(eps=1e-5, vocab_size=50304),
    ACTIVATION,
    *ATTENTION_BIAS,
    fixed({"norm_position": "output", "qk_norm": "full"}),
    fixed(written={"pad_token_id": None}),
    two_ropes(base=500_000.0, local=500_000.0, local_key=None),
    sliding_windows(pattern=4, default=4096),
    rules=(*EDGES, *ATTENTION, *QK_NORMS, *FEEDFORWARD, *NORMS_AFTER),
)

# OLMoE: norms over queries and keys, and a mixture of experts in every layer.

OLMOE = llama_like(
    "olmoe",
    classes("Olmoe", sequence=False, token=False),
    *shape(
        d_ff=2048,
        eps=1e-5,
        vocab_size=50304,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=4096,
    ),
    ACTIVATION,
    *ATTENTION_BIAS,
    fixed({"qk_norm": "full", "router_order": "softmax_topk"}, only={"clip_qkv": None}),
    fixed(written={"pad_token_id": None}),
    field("num_experts", "n_experts", 64, least=1),
    field("num_experts_per_tok", "n_active_experts", 8),
    field("norm_topk_prob", "router_renormalise", False),
    rope(),
    rules=(*EDGES, *NORMS, *ATTENTION, *QK_NORMS, *EXPERT_RULES),
    aliases={"num_local_experts": "num_experts"},
)

# Granite-MoE: Granite's factors and a mixture of experts, all of them in two tensors.

MOE = f"{THEIRS}.block_sparse_moe"

GRANITE_MOE = llama_like(
    "granitemoe",
    classes("GraniteMoe", sequence=False, token=False),
    *shape(),
    ACTIVATION,
    rope(),
    *ATTENTION_BIAS,
    field("embedding_multiplier", "embedding_scale", 1.0),
    field("residual_multiplier", "residual_scale", 1.0),
    field("attention_multiplier", "attention_scale", 1.0),
    power("logits_scaling", "logit_scale", -1, 1.0),
    field("num_local_experts", "n_experts", 8, least=1),
    field("num_experts_per_tok", "n_active_experts", 2),
    rules=(
        *EDGES,
        *NORMS,
        *ATTENTION,
        *(  # the second names are those that transformers 5 holds in memory, and writes when asked to
            rule
            for router, wide, narrow in (
                ("router.layer.weight", "input_linear.weight", "output_linear.weight"),
                ("router.weight", "experts.gate_up_proj", "experts.down_proj"),
            )
            for rule in (
                Rule(f"{MOE}.{router}", ROUTER),
                Rule(f"{MOE}.{wide}", (f"{EXPERT}.{{J}}.gate.weight", f"{EXPERT}.{{J}}.up.weight"), EXPERTS),
                Rule(f"{MOE}.{narrow}", (f"{EXPERT}.{{J}}.down.weight",), EXPERTS),
            )
        ),
    ),
)
