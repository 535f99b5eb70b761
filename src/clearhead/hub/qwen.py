"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and a window in later layers.

Qwen 3: a norm on them instead.
"""

from clearhead.hub.fields import fixed, sliding_windows
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    EDGES,
    FEEDFORWARD,
    NORMS,
    QK_NORMS,
    llama_like,
    shape,
)
from clearhead.hub.rope import rope

WINDOWS = sliding_windows(default=4096, switch="use_sliding_window", full_below="max_window_layers", below=28)
SIZES = {"vocab_size": 151936, "max_position_embeddings": 32768}

QWEN2 = llama_like(
    "qwen2", "Qwen2", *shape(d_ff=22016, **SIZES), ACTIVATION, fixed({"qkv_bias": True}), rope(), WINDOWS
)

QWEN3 = llama_like(
    "qwen3",
    "Qwen3",
    *shape(d_ff=22016, head_dim=128, **SIZES),
    ACTIVATION,
    *ATTENTION_BIAS,
    fixed({"qk_norm": "head"}),
    rope(),
    WINDOWS,
    rules=(*EDGES, *NORMS, *ATTENTION, *QK_NORMS, *FEEDFORWARD),
)
