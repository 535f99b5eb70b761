"""Falcon: attention and feed-forward side by side, few key/value heads, stored with their queries."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, cases, field, fixed
from clearhead.hub.llama import BLOCK, INV_FREQ, QKV, TOKENS, classes, heads, sizes
from clearhead.hub.rope import rope
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
        fixed({"bias": False, "norm_bias": True}),
        fixed(only={"alibi": False}),
        *sizes(vocab_size=65024, hidden_size=4544, num_attention_heads=71, tie_word_embeddings=True),
        field("ffn_hidden_size", "d_ff", None),
        field("activation", "activation", "gelu", ACTIVATIONS),
        field("layer_norm_epsilon", "norm_eps", 1e-5),
        field("hidden_dropout", "dropout", 0.0),
        *(field("bias", ours, False) for ours in ("qkv_bias", "attention_out_bias", "feedforward_bias")),
        rope(),
        field("num_kv_heads", "n_kv_heads", None),
        cases(
            {NEW: False, MULTI_QUERY: True, PARALLEL: True, NORMS: 2},
            ({NEW: False, MULTI_QUERY: True, PARALLEL: True}, {"n_kv_heads": 1, **ONE_NORM}),
            ({NEW: False, MULTI_QUERY: True, PARALLEL: False}, {"n_kv_heads": 1, "parallel": False}),
            ({NEW: True, PARALLEL: True, NORMS: 2}, {"parallel": True, "parallel_norms": 2}),
            ({NEW: True, PARALLEL: True, NORMS: 1}, ONE_NORM),
            ({NEW: False, MULTI_QUERY: False, PARALLEL: True}, {"n_kv_heads": None, **ONE_NORM}),
            ({NEW: False, MULTI_QUERY: False, PARALLEL: False}, {"n_kv_heads": None, "parallel": False}),
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
