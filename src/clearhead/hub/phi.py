"""Phi 1 to 2: attention and feed-forward side by side after one norm, with biases.

Phi-3 and 4: Llama, with fused weights.
"""

from clearhead.hub.fields import ACTIVATIONS, field, fixed, sliding_windows
from clearhead.hub.llama import (
    ACTIVATION,
    BLOCK,
    EDGES,
    EMBEDDING,
    NORMS,
    QKV,
    THEIRS,
    classes,
    llama_like,
    shape,
    sizes,
)
from clearhead.hub.rope import rope
from clearhead.hub.rules import joined, same

DROPOUTS = (field("resid_pdrop", "dropout", 0.0), field("embd_pdrop", "embedding_dropout", 0.0))

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
    *DROPOUTS,
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
    *DROPOUTS,
    rope(fraction=1.0),
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
