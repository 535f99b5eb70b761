"""Falcon: attention and feed-forward side by side after one norm or one each; few key/value heads, fused with the queries."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, Cases, Field, Fixed
from clearhead.hub.llama import BLOCK, INV_FREQ, QKV, TOKENS, classes, heads, sizes
from clearhead.hub.rope import Rope
from clearhead.hub.rules import HEAD_GROUPS, Rule, joined, same

THEIRS = "transformer.h.{i}"
NEW, MULTI_QUERY, PARALLEL = "new_decoder_architecture", "multi_query", "parallel_attn"
NORMS = "num_ln_in_parallel_attn"
ONE_NORM = {"parallel": True, "parallel_norms": 1}

FALCON = Architecture(
    model_type="falcon",
    classes=classes("Falcon"),
    prefix="transformer.",
    config=(
        Fixed({"bias": False, "norm_bias": True}),
        Fixed(only={"alibi": False}),
        *sizes(vocab_size=65024, hidden_size=4544, num_attention_heads=71, tie_word_embeddings=True),
        Field("ffn_hidden_size", "d_ff", None),
        Field("activation", "activation", "gelu", ACTIVATIONS),
        Field("layer_norm_epsilon", "norm_eps", 1e-5),
        Field("hidden_dropout", "dropout", 0.0),
        *(Field("bias", ours, False) for ours in ("qkv_bias", "attention_out_bias", "feedforward_bias")),
        Rope(),
        Field("num_kv_heads", "n_kv_heads", None),
        Cases(
            {NEW: False, MULTI_QUERY: True, PARALLEL: True, NORMS: 2},
            (
                ({NEW: False, MULTI_QUERY: True, PARALLEL: True}, {"n_kv_heads": 1, **ONE_NORM}),
                ({NEW: False, MULTI_QUERY: True, PARALLEL: False}, {"n_kv_heads": 1, "parallel": False}),
                ({NEW: True, PARALLEL: True, NORMS: 2}, {"parallel": True, "parallel_norms": 2}),
                ({NEW: True, PARALLEL: True, NORMS: 1}, ONE_NORM),
                ({NEW: False, MULTI_QUERY: False, PARALLEL: True}, {"n_kv_heads": None, **ONE_NORM}),
                ({NEW: False, MULTI_QUERY: False, PARALLEL: False}, {"n_kv_heads": None, "parallel": False}),
            ),
        ),
    ),
    rules=(
        Rule("transformer.word_embeddings.weight", TOKENS),
        *joined(f"{THEIRS}.self_attention.query_key_value", QKV, HEAD_GROUPS),
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
    heads=heads(),
    ignored=(INV_FREQ,),
)
