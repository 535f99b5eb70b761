"""Gemma 1, 2 and 3 (text): Llama with scaled embeddings and norms around one.

Gemma 2 adds norms after each part, soft-caps and a window in every other layer; Gemma 3 a norm on queries and keys in place
of the soft-caps, and, in the five of six layers that have a window, rotation by a base of their own.
"""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, Field, Fixed, Part, Power, Says, Scaled, Windows
from clearhead.hub.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    BLOCK,
    EDGES,
    FEEDFORWARD,
    HEADS,
    IGNORED,
    NORMS,
    THEIRS,
    classes,
    shape,
)
from clearhead.hub.qwen import QK_NORMS
from clearhead.hub.rope import Rope, TwoRopes
from clearhead.hub.rules import same

TANH = {"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS}
ALL: tuple[Part, ...] = (
    Fixed({"norm_unit_offset": True}),
    Scaled(None, "embedding_scale", 0.5),
    *ATTENTION_BIAS,
    Says({"use_bidirectional_attention": False}),
)
LATER: tuple[Part, ...] = (
    *shape(
        d_ff=9216,
        kv_heads=4,
        head_dim=256,
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        tie_word_embeddings=True,
        vocab_size=256000,
        max_position_embeddings=8192,
    ),
    *ALL,
    Fixed({"norm_position": "sandwich"}),
    Field("hidden_activation", "activation", "gelu_pytorch_tanh", TANH),
    Power("query_pre_attn_scalar", "attention_scale", -0.5, 256, whole=True),
)
SANDWICH = same(
    {
        f"{THEIRS}.input_layernorm": f"{BLOCK}.attention_residual.before",
        f"{THEIRS}.post_attention_layernorm": f"{BLOCK}.attention_residual.inside",
        f"{THEIRS}.pre_feedforward_layernorm": f"{BLOCK}.feedforward_residual.before",
        f"{THEIRS}.post_feedforward_layernorm": f"{BLOCK}.feedforward_residual.inside",
    }
)

GEMMA = Architecture(
    model_type="gemma",
    classes=classes("Gemma"),
    prefix="model.",
    config=(
        *shape(
            d_ff=24576,
            kv_heads=16,
            head_dim=256,
            hidden_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            tie_word_embeddings=True,
            vocab_size=256000,
            max_position_embeddings=8192,
        ),
        *ALL,
        Field(
            "hidden_act", "activation", "gelu_pytorch_tanh", {**TANH, "gelu": "gelu_tanh"}
        ),  # its first files said gelu and meant this
        Rope(),
    ),
    rules=(*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)

GEMMA2 = Architecture(
    model_type="gemma2",
    classes=classes("Gemma2"),
    prefix="model.",
    config=(
        *LATER,
        Rope(),
        Windows(pattern=2, default=4096),
        Field("attn_logit_softcapping", "attention_softcap", 50.0, null=True),
        Field("final_logit_softcapping", "logit_softcap", 30.0, null=True),
    ),
    rules=(*EDGES, *SANDWICH, *ATTENTION, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)

GEMMA3 = Architecture(
    model_type="gemma3_text",
    classes={
        "Gemma3ForCausalLM": {"head": "lm"},
        "Gemma3TextForSequenceClassification": {"head": "classifier", "head_bias": False, "pooling": "last"},
        "Gemma3TextModel": {"head": "none"},
    },
    prefix="model.",
    config=(
        *LATER,
        Field("vocab_size", "vocab_size", 262208),
        Field("max_position_embeddings", "max_positions", 131072),
        Fixed({"qk_norm": "head"}),
        TwoRopes(base=1_000_000.0, local=10_000.0),
        Windows(pattern=6, default=4096),
        Field("attn_logit_softcapping", "attention_softcap", None),
        Field("final_logit_softcapping", "logit_softcap", None),
    ),
    rules=(*EDGES, *SANDWICH, *ATTENTION, *QK_NORMS, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)
