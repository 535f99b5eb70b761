"""Qwen 2 and 2.5: Llama with biases on queries, keys and values, and a window in later layers. Qwen 3: a norm on them instead."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import Fixed, Windows
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    BLOCK,
    EDGES,
    FEEDFORWARD,
    HEADS,
    IGNORED,
    NORMS,
    THEIRS,
    classes,
    shape,
)
from clearhead.hub.rope import Rope
from clearhead.hub.rules import same

WINDOWS = Windows(default=4096, switch="use_sliding_window", full_below="max_window_layers", below=28)
SIZES = {"vocab_size": 151936, "max_position_embeddings": 32768}
QK_NORMS = same({f"{THEIRS}.self_attn.{x}_norm": f"{BLOCK}.attention.{x}_norm" for x in "qk"})

QWEN2 = Architecture(
    model_type="qwen2",
    classes=classes("Qwen2"),
    prefix="model.",
    config=(*shape(d_ff=22016, **SIZES), ACTIVATION, Fixed({"qkv_bias": True}), Rope(), WINDOWS),
    rules=(*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)

QWEN3 = Architecture(
    model_type="qwen3",
    classes=classes("Qwen3"),
    prefix="model.",
    config=(
        *shape(d_ff=22016, head_dim=128, **SIZES),
        ACTIVATION,
        *ATTENTION_BIAS,
        Fixed({"qk_norm": "head"}),
        Rope(),
        WINDOWS,
    ),
    rules=(*EDGES, *NORMS, *ATTENTION, *QK_NORMS, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)
