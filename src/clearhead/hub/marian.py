"""Marian (Opus-MT): a post-norm encoder-decoder with sinusoidal positions, some with two vocabularies."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.bart import BART_LIKE, BODY, GELU, OLD, SHAPE, SOURCE, STACK_TABLES, TARGET, classes
from clearhead.hub.fields import cases, field, fixed
from clearhead.hub.rules import Rule

SHARE, TIE = "share_encoder_decoder_embeddings", "tie_word_embeddings"

MARIAN = Architecture(
    model_type="marian",
    classes=classes("Marian", "MTModel"),
    prefix="model.",
    config=(
        fixed({**BART_LIKE, "positions": "sinusoidal", "sinusoid_layout": "half", "norm_position": "post"}),
        *SHAPE,
        field("vocab_size", "source_vocab_size", 58101),
        field("decoder_vocab_size", "vocab_size", 58101, otherwise="vocab_size"),
        *GELU,
        cases(
            {SHARE: True, TIE: True},
            ({SHARE: True, TIE: True}, {"share_embeddings": True, "tie_embeddings": True}),
            ({SHARE: False, TIE: True}, {"share_embeddings": False, "tie_embeddings": True}),
            ({SHARE: False, TIE: False}, {"share_embeddings": False, "tie_embeddings": False}),
            # As in BART's TYING: what is not tied is not shared.
            ({SHARE: True, TIE: False}, {"share_embeddings": False, "tie_embeddings": False}),
        ),
        fixed(written={"pad_token_id": None, "decoder_start_token_id": 0}),
    ),
    rules=(
        *STACK_TABLES,
        Rule("model.shared.weight", (SOURCE,)),
        Rule("model.shared.weight", (TARGET,)),
        *BODY,
    ),
    ignored=(*OLD, "*.embed_positions.weight"),
    open=("head_bias",),
)
