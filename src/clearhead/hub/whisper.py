"""Whisper: an encoder of log-mel frames and a decoder of text, norms before each part, keys without bias.

Both position tables are stored, that of the encoder too, though its waves are never trained.
"""

from clearhead.hub.architecture import Architecture
from clearhead.hub.bart import ALIASES, blocks, classes
from clearhead.hub.fields import ACTIVATIONS, field, fixed
from clearhead.hub.rules import Rule, same

TABLE = "model.decoder.embed_tokens.weight"

WHISPER = Architecture(
    model_type="whisper",
    classes=classes("Whisper"),
    prefix="model.",
    config=(
        fixed(
            {
                "family": "encoder-decoder",
                "input": "frames",
                "positions": "learned",
                "norm": "layernorm",
                "norm_position": "pre",
                "key_bias": False,
                "head_bias": False,
            },
            written={"pad_token_id": None, "decoder_start_token_id": 0, "begin_suppress_tokens": None},
        ),
        field("vocab_size", "vocab_size", 51865),
        field("num_mel_bins", "d_input", 80),
        field("d_model", "d_model", 384),
        field("encoder_layers", "n_encoder_layers", 4),
        field("decoder_layers", "n_layers", 4),
        field("encoder_attention_heads", "n_encoder_heads", 6),
        field("decoder_attention_heads", "n_heads", 6),
        field("encoder_ffn_dim", "d_encoder_ff", 1536),
        field("decoder_ffn_dim", "d_ff", 1536),
        field("max_source_positions", "max_encoder_positions", 1500),
        field("max_target_positions", "max_positions", 448),
        field("activation_function", "activation", "gelu", ACTIVATIONS),
        field("dropout", "dropout", 0.0),
        field("attention_dropout", "attention_dropout", 0.0),
        field("activation_dropout", "feedforward_dropout", 0.0),
        field("init_std", "init_std", 0.02),
        field("tie_word_embeddings", "tie_embeddings", True),
    ),
    rules=(
        *same(
            {
                "model.encoder.conv1": "encoder.embedding.front.first",
                "model.encoder.conv2": "encoder.embedding.front.second",
            }
        ),
        Rule(TABLE, ("decoder.embedding.front.tokens.weight",)),
        *blocks("encoder"),
        *blocks("decoder"),
        Rule("proj_out.weight", ("head.out.weight",)),
    ),
    tied=(TABLE, "proj_out.weight"),
    aliases={"num_key_value_heads": "encoder_attention_heads", **ALIASES},
)
