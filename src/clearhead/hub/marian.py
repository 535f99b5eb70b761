"""Marian (Opus-MT): a post-norm encoder-decoder with sinusoidal positions and, at times, a vocabulary for each side."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.bart import BART_LIKE, BLOCKS, HEAD, OLD, SHAPE, SHARED, SOURCE, TARGET, classes
from clearhead.hub.fields import ACTIVATIONS, Cases, Field, Fixed, Scaled, Written
from clearhead.hub.rules import Rule

SHARE, TIE = "share_encoder_decoder_embeddings", "tie_word_embeddings"

MARIAN = Architecture(
    model_type="marian",
    classes=classes("Marian", "MTModel"),
    prefix="model.",
    config=(
        Fixed({**BART_LIKE, "positions": "sinusoidal", "sinusoid_layout": "half", "norm_position": "post"}),
        *SHAPE,
        Field("vocab_size", "source_vocab_size", 58101),
        Field("decoder_vocab_size", "vocab_size", 58101, otherwise="vocab_size"),
        Field("max_position_embeddings", "max_positions", 1024),
        Field("activation_function", "activation", "gelu", ACTIVATIONS),
        Field("attention_dropout", "attention_dropout", 0.0),
        Scaled("scale_embedding", "embedding_scale", 0.5, default=False, width="d_model"),
        Cases(
            {SHARE: True, TIE: True},
            (
                ({SHARE: True, TIE: True}, {"share_embeddings": True, "tie_embeddings": True}),
                ({SHARE: False, TIE: True}, {"share_embeddings": False, "tie_embeddings": True}),
                ({SHARE: False, TIE: False}, {"share_embeddings": False, "tie_embeddings": False}),
                (
                    {SHARE: True, TIE: False},
                    {"share_embeddings": False, "tie_embeddings": False},
                ),  # as in BART's TYING
            ),
        ),
        Written({"pad_token_id": None, "decoder_start_token_id": 0}),
    ),
    rules=(
        SHARED,
        Rule("model.encoder.embed_tokens.weight", (SOURCE,)),
        Rule("model.decoder.embed_tokens.weight", (TARGET,)),
        Rule("model.shared.weight", (SOURCE,)),
        Rule("model.shared.weight", (TARGET,)),
        *BLOCKS,
        *HEAD,
    ),
    ignored=(*OLD, "*.embed_positions.weight"),
    open=("head_bias",),
)
