"""StableLM: Llama with LayerNorm and rotary positions in part of each head."""

from clearhead.hub.fields import field, fixed
from clearhead.hub.llama import ACTIVATION, llama_like, sizes
from clearhead.hub.rope import rope

STABLELM = llama_like(
    "stablelm",
    "StableLm",
    fixed({"gated": True, "bias": False, "norm_bias": True}),
    *sizes(vocab_size=50304, hidden_size=2560, max_position_embeddings=4096),
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
