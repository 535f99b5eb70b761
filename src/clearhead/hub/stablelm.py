"""StableLM: Llama with LayerNorm and rotation of a part of each head; some have attention and feed-forward side by side."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import Field, Fixed, Says
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    EDGES,
    FEEDFORWARD,
    HEADS,
    IGNORED,
    NORMS,
    classes,
    sizes,
)
from clearhead.hub.rope import Rope

STABLELM = Architecture(
    model_type="stablelm",
    classes=classes("StableLm"),
    prefix="model.",
    config=(
        Fixed(
            {
                "family": "decoder",
                "positions": "rope",
                "norm": "layernorm",
                "norm_position": "pre",
                "gated": True,
            }
        ),
        Fixed({"bias": False, "norm_bias": True}),
        *sizes(vocab_size=50304, hidden_size=2560, max_position_embeddings=4096),
        Field("intermediate_size", "d_ff", 6912),
        ACTIVATION,
        Field("num_key_value_heads", "n_kv_heads", 32),
        Field("layer_norm_eps", "norm_eps", 1e-5),
        Field("use_qkv_bias", "qkv_bias", False),
        Field("use_parallel_residual", "parallel", False),
        Field("hidden_dropout", "dropout", 0.0),
        Says({"qk_layernorm": False}),  # there, each head has norm weights of its own
        Rope(fraction=0.25),
    ),
    rules=(*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)
