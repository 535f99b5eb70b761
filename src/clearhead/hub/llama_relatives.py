"""Llama's relatives: each is its tables with what differs.

Mistral, Mixtral, Qwen, Gemma, Phi, OLMo 2, StableLM, Granite and SmolLM 3.
"""

from clearhead.hub.fields import (
    ACTIVATIONS,
    WHOLE_HEADS,
    ConfigPart,
    field,
    fixed,
    power,
    scaled,
)
from clearhead.hub.layers import rope_skips, sliding_windows
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    BLOCK,
    EDGES,
    EMBEDDING,
    FEEDFORWARD,
    FEEDFORWARD_BIAS,
    NORMS,
    QK_NORMS,
    QKV,
    THEIRS,
    classes,
    llama_like,
    shape,
    sizes,
)
from clearhead.hub.rope import rope, two_ropes
from clearhead.hub.rules import EXPERTS, Rule, joined, same

# Mistral: a window in every layer. Mixtral: the same with a mixture of experts for a feed-forward.

MISTRAL = llama_like(
    "mistral",
    "Mistral",
    *shape(d_ff=14336, kv_heads=8, max_position_embeddings=131072),
    ACTIVATION,
    rope(),
    sliding_windows(default=4096),
)

MOE, EXPERT = f"{THEIRS}.block_sparse_moe", f"{BLOCK}.feedforward.experts"
ROUTER = (f"{BLOCK}.feedforward.router.weight",)
SEPARATE_EXPERTS = (
    Rule(f"{MOE}.gate.weight", ROUTER),
    Rule(f"{MOE}.experts.{{j}}.w1.weight", (f"{EXPERT}.{{j}}.gate.weight",)),
    Rule(f"{MOE}.experts.{{j}}.w3.weight", (f"{EXPERT}.{{j}}.up.weight",)),
    Rule(f"{MOE}.experts.{{j}}.w2.weight", (f"{EXPERT}.{{j}}.down.weight",)),
)
FUSED_EXPERTS = (  # as transformers 5 holds them in memory, and writes them when asked to
    Rule(f"{THEIRS}.mlp.gate.weight", ROUTER),
    Rule(
        f"{THEIRS}.mlp.experts.gate_up_proj",
        (f"{EXPERT}.{{J}}.gate.weight", f"{EXPERT}.{{J}}.up.weight"),
        EXPERTS,
    ),
    Rule(f"{THEIRS}.mlp.experts.down_proj", (f"{EXPERT}.{{J}}.down.weight",), EXPERTS),
)

MIXTRAL = llama_like(
    "mixtral",
    "Mixtral",
    *shape(d_ff=14336, kv_heads=8, eps=1e-5, max_position_embeddings=131072),
    ACTIVATION,
    rope(base=1_000_000.0),
    sliding_windows(),
    field("num_local_experts", "n_experts", 8, least=1),
    field("num_experts_per_tok", "n_active_experts", 2),
    rules=(*EDGES, *NORMS, *ATTENTION, *SEPARATE_EXPERTS, *FUSED_EXPERTS),
    aliases={"num_experts": "num_local_experts"},
)

# Qwen 2 and 2.5: biases on queries, keys and values, and a window in later layers. Qwen 3: a norm on them
# instead.

QWEN_WINDOWS = sliding_windows(
    default=4096, switch="use_sliding_window", full_below="max_window_layers", below=28
)
QWEN_SIZES = {"vocab_size": 151936, "max_position_embeddings": 32768}

QWEN2 = llama_like(
    "qwen2",
    "Qwen2",
    *shape(d_ff=22016, **QWEN_SIZES),
    ACTIVATION,
    fixed({"qkv_bias": True}),
    rope(),
    QWEN_WINDOWS,
)

QWEN3 = llama_like(
    "qwen3",
    "Qwen3",
    *shape(d_ff=22016, head_dim=128, **QWEN_SIZES),
    ACTIVATION,
    *ATTENTION_BIAS,
    fixed({"qk_norm": "head"}),
    rope(),
    QWEN_WINDOWS,
    rules=(*EDGES, *NORMS, *ATTENTION, *QK_NORMS, *FEEDFORWARD),
)

# Gemma 1, 2 and 3 (text): scaled embeddings, and norm weights that are stored less one. Gemma 2 adds norms
# after each part, soft-caps and a window in every other layer. Gemma 3 has a norm on queries and keys in
# place of the soft-caps; five of six of its layers have a window, and rotate by a base of their own.

TANH = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}
GEMMA_SIZES = {"tie_word_embeddings": True, "vocab_size": 256000, "max_position_embeddings": 8192}
EVERY_GEMMA: tuple[ConfigPart, ...] = (
    fixed({"norm_unit_offset": True}),
    scaled(None, "embedding_scale", 0.5),
    *ATTENTION_BIAS,
    fixed(only={"use_bidirectional_attention": False}),
)
LATER_GEMMA: tuple[ConfigPart, ...] = (
    *shape(
        d_ff=9216,
        kv_heads=4,
        head_dim=256,
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        **GEMMA_SIZES,
    ),
    *EVERY_GEMMA,
    fixed({"norm_position": "sandwich"}),
    field("hidden_activation", "activation", "gelu_pytorch_tanh", TANH),
    power("query_pre_attn_scalar", "attention_scale", -0.5, 256, whole=True),
)
SANDWICH = same(
    {
        f"{THEIRS}.input_layernorm": f"{BLOCK}.attention_residual.before",
        f"{THEIRS}.post_attention_layernorm": f"{BLOCK}.attention_residual.inside",
        f"{THEIRS}.pre_feedforward_layernorm": f"{BLOCK}.feedforward_residual.before",
        f"{THEIRS}.post_feedforward_layernorm": f"{BLOCK}.feedforward_residual.inside",
    }
)

GEMMA = llama_like(
    "gemma",
    "Gemma",
    *shape(
        d_ff=24576,
        kv_heads=16,
        head_dim=256,
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        **GEMMA_SIZES,
    ),
    *EVERY_GEMMA,
    # Its first files said gelu and meant the tanh formula.
    field("hidden_act", "activation", "gelu_pytorch_tanh", {**TANH, "gelu": "gelu_tanh"}),
    rope(),
)

GEMMA2 = llama_like(
    "gemma2",
    "Gemma2",
    *LATER_GEMMA,
    rope(),
    sliding_windows(pattern=2, default=4096),
    field("attn_logit_softcapping", "attention_softcap", 50.0, null=True),
    field("final_logit_softcapping", "logit_softcap", 30.0, null=True),
    rules=(*EDGES, *SANDWICH, *ATTENTION, *FEEDFORWARD),
)

GEMMA3 = llama_like(
    "gemma3_text",
    classes("Gemma3Text", "Gemma3ForCausalLM", token=False),
    *LATER_GEMMA,
    field("vocab_size", "vocab_size", 262208),
    field("max_position_embeddings", "max_positions", 131072),
    fixed({"qk_norm": "head"}),
    two_ropes(base=1_000_000.0, local=10_000.0),
    sliding_windows(pattern=6, default=4096, pattern_key="sliding_window_pattern"),
    fixed(only={"attn_logit_softcapping": None}),  # transformers reads it, and does not use it
    field("final_logit_softcapping", "logit_softcap", None),
    rules=(*EDGES, *SANDWICH, *ATTENTION, *QK_NORMS, *FEEDFORWARD),
)

# Phi 1 to 2: attention and feed-forward side by side after one norm, with biases. Phi-3 and 4: fused weights.

PHI_DROPOUTS = (field("resid_pdrop", "dropout", 0.0), field("embd_pdrop", "embedding_dropout", 0.0))

PHI = llama_like(
    "phi",
    {**classes("Phi"), "PhiForCausalLM": {"head": "lm", "head_bias": True}},
    fixed({"parallel": True}),
    *sizes(vocab_size=51200, hidden_size=2048, num_hidden_layers=24),
    field("intermediate_size", "d_ff", 8192),
    field("num_key_value_heads", "n_kv_heads", None),
    field("head_dim", "d_head", None),
    field("hidden_act", "activation", "gelu_new", ACTIVATIONS),
    field("layer_norm_eps", "norm_eps", 1e-5),
    *PHI_DROPOUTS,
    field("qk_layernorm", "qk_norm", False, {False: "none", True: "head"}),
    rope(fraction=0.5),
    rules=(
        EMBEDDING,
        *same(
            {
                **{f"{THEIRS}.self_attn.{x}_proj": f"{BLOCK}.attention.{x}" for x in "qkv"},
                f"{THEIRS}.self_attn.dense": f"{BLOCK}.attention.out",
                **{f"{THEIRS}.self_attn.{x}_layernorm": f"{BLOCK}.attention.{x}_norm" for x in "qk"},
                f"{THEIRS}.mlp.fc1": f"{BLOCK}.feedforward.up",
                f"{THEIRS}.mlp.fc2": f"{BLOCK}.feedforward.down",
                f"{THEIRS}.input_layernorm": f"{BLOCK}.attention_residual.before",
                "model.final_layernorm": "decoder.norm",
            }
        ),
    ),
)

PHI3 = llama_like(
    "phi3",
    "Phi3",
    *shape(d_ff=8192, eps=1e-5, vocab_size=32064, hidden_size=3072, max_position_embeddings=4096),
    ACTIVATION,
    *PHI_DROPOUTS,
    rope(fraction=1.0, kinds=("longrope",), trained=4096),
    sliding_windows(),
    # By default these are rows of the released models' token table.
    fixed(written={"pad_token_id": None, "eos_token_id": None}),
    rules=(
        *EDGES,
        *NORMS,
        *joined(f"{THEIRS}.self_attn.qkv_proj", QKV),
        *joined(f"{THEIRS}.mlp.gate_up_proj", [f"{BLOCK}.feedforward.gate", f"{BLOCK}.feedforward.up"]),
        *same(
            {
                f"{THEIRS}.self_attn.o_proj": f"{BLOCK}.attention.out",
                f"{THEIRS}.mlp.down_proj": f"{BLOCK}.feedforward.down",
            }
        ),
    ),
)

# OLMo 2: norms after each part instead of before, and norms over queries and keys.

NORMS_AFTER = same(
    {
        f"{THEIRS}.post_attention_layernorm": f"{BLOCK}.attention_residual.inside",
        f"{THEIRS}.post_feedforward_layernorm": f"{BLOCK}.feedforward_residual.inside",
    }
)

OLMO2 = llama_like(
    "olmo2",
    classes("Olmo2", token=False),
    *shape(eps=1e-5, vocab_size=50304),
    ACTIVATION,
    rope(),
    *ATTENTION_BIAS,
    fixed({"norm_position": "output", "qk_norm": "full"}),
    rules=(*EDGES, *ATTENTION, *QK_NORMS, *FEEDFORWARD, *NORMS_AFTER),
)

# StableLM: LayerNorm, and rotary positions in part of each head.

STABLELM = llama_like(
    "stablelm",
    "StableLm",
    fixed({"gated": True, "bias": False, "norm_bias": True}),
    *sizes(vocab_size=50304, hidden_size=2560, max_position_embeddings=4096),
    WHOLE_HEADS,
    field("intermediate_size", "d_ff", 6912),
    ACTIVATION,
    field("num_key_value_heads", "n_kv_heads", 32),
    field("layer_norm_eps", "norm_eps", 1e-5),
    field("use_qkv_bias", "qkv_bias", False),
    field("use_parallel_residual", "parallel", False),
    field("hidden_dropout", "dropout", 0.0),
    fixed(only={"qk_layernorm": False}),  # with it, each head has norm weights of its own
    rope(fraction=0.25),
)

# Granite: factors on the embeddings, the scores, the residual branches and the logits.

GRANITE = llama_like(
    "granite",
    classes("Granite", sequence=False, token=False),
    *shape(),
    ACTIVATION,
    rope(),
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    field("embedding_multiplier", "embedding_scale", 1.0),
    field("residual_multiplier", "residual_scale", 1.0),
    field("attention_multiplier", "attention_scale", 1.0),
    power("logits_scaling", "logit_scale", -1, 1.0),
)

# SmolLM 3: layers, every fourth, that do not rotate.

SMOLLM3_SKIPS = rope_skips("no_rope_layers", "no_rope_layer_interval", 4)

SMOLLM3 = llama_like(
    "smollm3",
    "SmolLM3",
    *shape(
        kv_heads=4,
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    ACTIVATION,
    rope(base=2_000_000.0),
    SMOLLM3_SKIPS,
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    sliding_windows(switch="use_sliding_window", skips=SMOLLM3_SKIPS),
    # By default these are rows of the released models' token table.
    fixed(written={"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}),
)
