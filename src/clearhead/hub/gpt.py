"""GPT-2, GPT-NeoX with Pythia, and Falcon: decoders that store queries, keys and values as one tensor."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, LABELS, WHOLE_HEADS, cases, field, fixed
from clearhead.hub.llama import BLOCK, INV_FREQ, QKV, TOKENS, classes, heads, sizes
from clearhead.hub.rope import rope
from clearhead.hub.rules import HEAD_GROUPS, JOINED_TRANSPOSED, TRANSPOSED, Rule, joined, same

# GPT-2: a pre-norm decoder with learned positions. Its linear weights are stored [in, out].

GPT2_BLOCK = "transformer.h.{i}"

GPT2_SCALES = fixed(
    only={
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "scale_attn_weights": True,
    }
)

GPT2 = Architecture(
    model_type="gpt2",
    classes=classes("GPT2", "GPT2LMHeadModel"),
    prefix="transformer.",
    config=(
        fixed({"family": "decoder", "positions": "learned", "norm": "layernorm", "norm_position": "pre"}),
        GPT2_SCALES,
        field("vocab_size", "vocab_size", 50257),
        field("n_positions", "max_positions", 1024),
        field("n_embd", "d_model", 768),
        field("n_layer", "n_layers", 12),
        field("n_head", "n_heads", 12),
        field("n_inner", "d_ff", None),
        field("activation_function", "activation", "gelu_new", ACTIVATIONS),
        field("layer_norm_epsilon", "norm_eps", 1e-5),
        field("resid_pdrop", "dropout", 0.1),
        field("attn_pdrop", "attention_dropout", 0.1),
        field("embd_pdrop", "embedding_dropout", 0.1),
        field("initializer_range", "init_std", 0.02),
        field("tie_word_embeddings", "tie_embeddings", True),
        LABELS,
    ),
    rules=(
        Rule("transformer.wte.weight", TOKENS),
        Rule("transformer.wpe.weight", ("decoder.positions.table.weight",)),
        *joined(f"{GPT2_BLOCK}.attn.c_attn", QKV, JOINED_TRANSPOSED),
        *same(
            {
                f"{GPT2_BLOCK}.attn.c_proj": f"{BLOCK}.attention.out",
                f"{GPT2_BLOCK}.mlp.c_fc": f"{BLOCK}.feedforward.up",
                f"{GPT2_BLOCK}.mlp.c_proj": f"{BLOCK}.feedforward.down",
            },
            TRANSPOSED,
        ),
        *same(
            {
                f"{GPT2_BLOCK}.ln_1": f"{BLOCK}.attention_residual.before",
                f"{GPT2_BLOCK}.ln_2": f"{BLOCK}.feedforward_residual.before",
                "transformer.ln_f": "decoder.norm",
            }
        ),
    ),
    heads=heads(),
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)

# GPT-NeoX and Pythia: attention and feed-forward side by side, rotary positions in part of each head.

NEOX_BLOCK = "gpt_neox.layers.{i}"

GPT_NEOX = Architecture(
    model_type="gpt_neox",
    classes=classes("GPTNeoX"),
    prefix="gpt_neox.",
    config=(
        *sizes(vocab_size=50432, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64),
        WHOLE_HEADS,
        field("intermediate_size", "d_ff", 24576),
        field("hidden_act", "activation", "gelu", ACTIVATIONS),
        field("layer_norm_eps", "norm_eps", 1e-5),
        field("hidden_dropout", "dropout", 0.0),
        field("attention_bias", "qkv_bias", True),
        field("attention_bias", "attention_out_bias", True),
        rope(
            fraction=0.25,
            theta_key="rotary_emb_base",
            fraction_key="rotary_pct",
        ),
        cases(
            {"use_parallel_residual": True},
            ({"use_parallel_residual": True}, {"parallel": True, "parallel_norms": 2}),
            ({"use_parallel_residual": False}, {"parallel": False}),
        ),
    ),
    rules=(
        Rule("gpt_neox.embed_in.weight", TOKENS),
        *joined(f"{NEOX_BLOCK}.attention.query_key_value", QKV, HEAD_GROUPS),
        *same(
            {
                f"{NEOX_BLOCK}.attention.dense": f"{BLOCK}.attention.out",
                f"{NEOX_BLOCK}.mlp.dense_h_to_4h": f"{BLOCK}.feedforward.up",
                f"{NEOX_BLOCK}.mlp.dense_4h_to_h": f"{BLOCK}.feedforward.down",
                f"{NEOX_BLOCK}.input_layernorm": f"{BLOCK}.attention_residual.before",
                f"{NEOX_BLOCK}.post_attention_layernorm": f"{BLOCK}.feedforward_residual.before",
                "gpt_neox.final_layer_norm": "decoder.norm",
            }
        ),
    ),
    heads=heads(lm=("embed_out", "lm_head")),
    ignored=("*.attention.bias", "*.attention.masked_bias", INV_FREQ),
)

# Falcon: attention and feed-forward side by side, few key/value heads, stored with their queries.

FALCON_BLOCK = "transformer.h.{i}"
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
        *joined(f"{FALCON_BLOCK}.self_attention.query_key_value", QKV, HEAD_GROUPS),
        *same(
            {
                f"{FALCON_BLOCK}.self_attention.dense": f"{BLOCK}.attention.out",
                f"{FALCON_BLOCK}.mlp.dense_h_to_4h": f"{BLOCK}.feedforward.up",
                f"{FALCON_BLOCK}.mlp.dense_4h_to_h": f"{BLOCK}.feedforward.down",
                "transformer.ln_f": "decoder.norm",
            }
        ),
        *same(
            {
                f"{FALCON_BLOCK}.input_layernorm": f"{BLOCK}.attention_residual.before",
                f"{FALCON_BLOCK}.post_attention_layernorm": f"{BLOCK}.feedforward_residual.before",
            },
            when={"parallel_norms": 1},
        ),
        *same(
            {
                f"{FALCON_BLOCK}.ln_attn": f"{BLOCK}.attention_residual.before",
                f"{FALCON_BLOCK}.ln_mlp": f"{BLOCK}.feedforward_residual.before",
            },
            when={"parallel_norms": 2},
        ),
    ),
    heads=heads(),
    ignored=(INV_FREQ,),
    aliases={"n_embed": "hidden_size"},
)
