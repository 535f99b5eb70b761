"""GPT-2: a pre-norm decoder with learned positions.

Its linear weights are stored [in, out], q, k and v as one.
"""

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, LABELS, field, fixed
from clearhead.hub.llama import BLOCK, QKV, TOKENS, classes, heads
from clearhead.hub.rules import JOINED_TRANSPOSED, TRANSPOSED, Rule, joined, same

THEIRS = "transformer.h.{i}"
ONLY = {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "scale_attn_weights": True}

GPT2 = Architecture(
    model_type="gpt2",
    classes=classes("GPT2", "GPT2LMHeadModel"),
    prefix="transformer.",
    config=(
        fixed({"family": "decoder", "positions": "learned", "norm": "layernorm", "norm_position": "pre"}),
        fixed(only=ONLY),
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
        *joined(f"{THEIRS}.attn.c_attn", QKV, JOINED_TRANSPOSED),
        *same(
            {
                f"{THEIRS}.attn.c_proj": f"{BLOCK}.attention.out",
                f"{THEIRS}.mlp.c_fc": f"{BLOCK}.feedforward.up",
                f"{THEIRS}.mlp.c_proj": f"{BLOCK}.feedforward.down",
            },
            TRANSPOSED,
        ),
        *same(
            {
                f"{THEIRS}.ln_1": f"{BLOCK}.attention_residual.before",
                f"{THEIRS}.ln_2": f"{BLOCK}.feedforward_residual.before",
                "transformer.ln_f": "decoder.norm",
            }
        ),
    ),
    heads=heads(),
    ignored=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)
