"""Falcon: attention and feed-forward side by side after one norm or one each; few key/value heads, fused with the queries."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, Cases, Field, Fixed, Says
from clearhead.hub.llama import classes, sizes
from clearhead.hub.rope import Rope
from clearhead.hub.rules import Rule, SplitHeads, same, split

BLOCK, THEIRS = "decoder.blocks.{i}", "transformer.h.{i}"
NEW, MULTI_QUERY, PARALLEL, NORMS = (
    "new_decoder_architecture",
    "multi_query",
    "parallel_attn",
    "num_ln_in_parallel_attn",
)

FALCON = Architecture(
    model_type="falcon",
    classes=classes("Falcon"),
    prefix="transformer.",
    config=(
        Fixed(
            {
                "family": "decoder",
                "positions": "rope",
                "norm": "layernorm",
                "norm_position": "pre",
                "bias": False,
                "norm_bias": True,
            }
        ),
        Says({"alibi": False}),
        *sizes(vocab_size=65024, hidden_size=4544, num_attention_heads=71, tie_word_embeddings=True),
        Field("ffn_hidden_size", "d_ff", None),
        Field("activation", "activation", "gelu", ACTIVATIONS),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("hidden_dropout", "dropout", 0.0),
        Field("bias", "qkv_bias", False),
        Field("bias", "attention_out_bias", False),
        Field("bias", "feedforward_bias", False),
        Rope(),
        Field("num_kv_heads", "n_kv_heads", None),
        Cases(
            {NEW: False, MULTI_QUERY: True, PARALLEL: True, NORMS: 2},
            (
                (
                    {NEW: False, MULTI_QUERY: True, PARALLEL: True},
                    {"n_kv_heads": 1, "parallel": True, "parallel_norms": 1},
                ),
                ({NEW: False, MULTI_QUERY: True, PARALLEL: False}, {"n_kv_heads": 1, "parallel": False}),
                ({NEW: True, PARALLEL: True, NORMS: 2}, {"parallel": True, "parallel_norms": 2}),
                ({NEW: True, PARALLEL: True, NORMS: 1}, {"parallel": True, "parallel_norms": 1}),
                (
                    {NEW: False, MULTI_QUERY: False, PARALLEL: True},
                    {"n_kv_heads": None, "parallel": True, "parallel_norms": 1},
                ),
                ({NEW: False, MULTI_QUERY: False, PARALLEL: False}, {"n_kv_heads": None, "parallel": False}),
            ),
        ),
    ),
    rules=(
        Rule("transformer.word_embeddings.weight", ("decoder.embedding.front.tokens.weight",)),
        *split(
            f"{THEIRS}.self_attention.query_key_value",
            [f"{BLOCK}.attention.{x}" for x in "qkv"],
            SplitHeads(),
        ),
        *same(
            {
                f"{THEIRS}.self_attention.dense": f"{BLOCK}.attention.out",
                f"{THEIRS}.mlp.dense_h_to_4h": f"{BLOCK}.feedforward.up",
                f"{THEIRS}.mlp.dense_4h_to_h": f"{BLOCK}.feedforward.down",
                "transformer.ln_f": "decoder.norm",
            }
        ),
        *same(
            {
                f"{THEIRS}.input_layernorm": f"{BLOCK}.attention_residual.before",
                f"{THEIRS}.post_attention_layernorm": f"{BLOCK}.feedforward_residual.before",
            },
            when={"parallel_norms": 1},
        ),
        *same(
            {
                f"{THEIRS}.ln_attn": f"{BLOCK}.attention_residual.before",
                f"{THEIRS}.ln_mlp": f"{BLOCK}.feedforward_residual.before",
            },
            when={"parallel_norms": 2},
        ),
    ),
    heads={
        "lm": same({"lm_head": "head.out"}),
        "classifier": same({"score": "head.out"}),
        "tagger": same({"classifier": "head.out"}),
    },
    ignored=("*.rotary_emb.inv_freq",),
)
