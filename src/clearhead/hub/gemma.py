"""Gemma 1, 2 and 3 (text): Llama with scaled embeddings and norm weights that are stored less one.

Gemma 2 adds norms after each part, soft-caps and a window in every other layer. Gemma 3 has a norm on queries
and keys in place of the soft-caps; five of six of its layers have a window, and rotate by a base of their
own.
"""

from clearhead.hub.fields import ACTIVATIONS, ConfigPart, field, fixed, power, scaled, sliding_windows
from clearhead.hub.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    BLOCK,
    EDGES,
    FEEDFORWARD,
    QK_NORMS,
    THEIRS,
    classes,
    llama_like,
    shape,
)
from clearhead.hub.rope import rope, two_ropes
from clearhead.hub.rules import same

TANH = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}
SIZES = {"tie_word_embeddings": True, "vocab_size": 256000, "max_position_embeddings": 8192}
ALL: tuple[ConfigPart, ...] = (
    fixed({"norm_unit_offset": True}),
    scaled(None, "embedding_scale", 0.5),
    *ATTENTION_BIAS,
    fixed(only={"use_bidirectional_attention": False}),
)
LATER_SIZES = {"hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, **SIZES}
LATER: tuple[ConfigPart, ...] = (
    *shape(d_ff=9216, kv_heads=4, head_dim=256, **LATER_SIZES),
    *ALL,
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
FIRST_SIZES = {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, **SIZES}

GEMMA = llama_like(
    "gemma",
    "Gemma",
    *shape(d_ff=24576, kv_heads=16, head_dim=256, **FIRST_SIZES),
    *ALL,
    # Its first files said gelu and meant the tanh formula.
    field("hidden_act", "activation", "gelu_pytorch_tanh", {**TANH, "gelu": "gelu_tanh"}),
    rope(),
)

GEMMA2 = llama_like(
    "gemma2",
    "Gemma2",
    *LATER,
    rope(),
    sliding_windows(pattern=2, default=4096),
    field("attn_logit_softcapping", "attention_softcap", 50.0, null=True),
    field("final_logit_softcapping", "logit_softcap", 30.0, null=True),
    rules=(*EDGES, *SANDWICH, *ATTENTION, *FEEDFORWARD),
)

GEMMA3 = llama_like(
    "gemma3_text",
    classes("Gemma3Text", "Gemma3ForCausalLM", token=False),
    *LATER,
    field("vocab_size", "vocab_size", 262208),
    field("max_position_embeddings", "max_positions", 131072),
    fixed({"qk_norm": "head"}),
    two_ropes(base=1_000_000.0, local=10_000.0),
    sliding_windows(pattern=6, default=4096),
    field("attn_logit_softcapping", "attention_softcap", None),
    field("final_logit_softcapping", "logit_softcap", None),
    rules=(*EDGES, *SANDWICH, *ATTENTION, *QK_NORMS, *FEEDFORWARD),
)
