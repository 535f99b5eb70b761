"""GPT-NeoX and Pythia: attention and feed-forward side by side, rotary positions in part of each head."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, cases, field
from clearhead.hub.llama import BLOCK, INV_FREQ, QKV, TOKENS, classes, heads, sizes
from clearhead.hub.rope import rope
from clearhead.hub.rules import HEAD_GROUPS, Rule, joined, same

THEIRS = "gpt_neox.layers.{i}"

GPT_NEOX = Architecture(
    model_type="gpt_neox",
    classes=classes("GPTNeoX"),
    prefix="gpt_neox.",
    config=(
        *sizes(vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64),
        field("intermediate_size", "d_ff", 24576),
        field("hidden_act", "activation", "gelu", ACTIVATIONS),
        field("layer_norm_eps", "norm_eps", 1e-5),
        field("hidden_dropout", "dropout", 0.0),
        field("attention_bias", "qkv_bias", True),
        field("attention_bias", "attention_out_bias", True),
        rope(
            fraction=0.25,
            theta_keys=("rotary_emb_base", "rope_theta"),
            fraction_keys=("rotary_pct", "partial_rotary_factor"),
        ),
        cases(
            {"use_parallel_residual": True},
            ({"use_parallel_residual": True}, {"parallel": True, "parallel_norms": 2}),
            ({"use_parallel_residual": False}, {"parallel": False}),
        ),
    ),
    rules=(
        Rule("gpt_neox.embed_in.weight", TOKENS),
        *joined(f"{THEIRS}.attention.query_key_value", QKV, HEAD_GROUPS),
        *same(
            {
                f"{THEIRS}.attention.dense": f"{BLOCK}.attention.out",
                f"{THEIRS}.mlp.dense_h_to_4h": f"{BLOCK}.feedforward.up",
                f"{THEIRS}.mlp.dense_4h_to_h": f"{BLOCK}.feedforward.down",
                f"{THEIRS}.input_layernorm": f"{BLOCK}.attention_residual.before",
                f"{THEIRS}.post_attention_layernorm": f"{BLOCK}.feedforward_residual.before",
                "gpt_neox.final_layer_norm": "decoder.norm",
            }
        ),
    ),
    heads=heads(lm=("embed_out", "lm_head")),
    ignored=("*.attention.bias", "*.attention.masked_bias", INV_FREQ),
)
