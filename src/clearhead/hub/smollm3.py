"""SmolLM 3: Llama with layers, every fourth, that rotate nothing."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import Field, Windows, Written
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    EDGES,
    FEEDFORWARD,
    HEADS,
    IGNORED,
    NORMS,
    classes,
    shape,
)
from clearhead.hub.rope import Rope, Skips

SMOLLM3 = Architecture(
    model_type="smollm3",
    classes=classes("SmolLM3"),
    prefix="model.",
    config=(
        *shape(
            kv_heads=4,
            vocab_size=128256,
            hidden_size=2048,
            num_hidden_layers=36,
            num_attention_heads=16,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
        ACTIVATION,
        Rope(base=2_000_000.0),
        Skips("no_rope_layers", "no_rope_layer_interval", 4),
        *ATTENTION_BIAS,
        Field("mlp_bias", "feedforward_bias", False),
        Windows(switch="use_sliding_window"),
        Written(
            {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        ),  # by default, rows of the released models' token table
    ),
    rules=(*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)
