"""StableLM: Llama with LayerNorm and rotation of a part of each head; some have attention and feed-forward side by side."""

from clearhead.hub.fields import Field, Fixed
from clearhead.hub.llama import ACTIVATION, llama_like, sizes
from clearhead.hub.rope import Rope

STABLELM = llama_like(
    "stablelm",
    "StableLm",
    Fixed({"gated": True, "bias": False, "norm_bias": True}),
    *sizes(vocab_size=50304, hidden_size=2560, max_position_embeddings=4096),
    Field("intermediate_size", "d_ff", 6912),
    ACTIVATION,
    Field("num_key_value_heads", "n_kv_heads", 32),
    Field("layer_norm_eps", "norm_eps", 1e-5),
    Field("use_qkv_bias", "qkv_bias", False),
    Field("use_parallel_residual", "parallel", False),
    Field("hidden_dropout", "dropout", 0.0),
    Fixed(only={"qk_layernorm": False}),  # with it, each head has norm weights of its own
    Rope(fraction=0.25),
)
