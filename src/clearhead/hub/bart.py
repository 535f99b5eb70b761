"""BART and mBART: encoder and decoder with learned positions, norms after (BART) or before (mBART) each part.

M2M-100 and Marian come from the same code and build on these tables.
"""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, Cases, Field, Fixed, Json, Part, Scaled
from clearhead.hub.rules import Reshape, Rule, same

PARTS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}
STACKS = ("encoder", "decoder")
SOURCE, TARGET = (f"{stack}.embedding.front.tokens.weight" for stack in STACKS)


def classes(name: str, generator: str = "ForConditionalGeneration") -> dict[str, Json]:
    """The classes that each encoder-decoder of this kind has."""
    return {f"{name}{generator}": {"head": "lm"}, f"{name}Model": {"head": "none"}}


SHAPE: tuple[Part, ...] = (
    Field("d_model", "d_model", 1024),
    Field("encoder_layers", "n_encoder_layers", 12),
    Field("decoder_layers", "n_layers", 12),
    Field("encoder_attention_heads", "n_encoder_heads", 16),
    Field("decoder_attention_heads", "n_heads", 16),
    Field("encoder_ffn_dim", "d_encoder_ff", 4096),
    Field("decoder_ffn_dim", "d_ff", 4096),
    Field("dropout", "dropout", 0.1),
    Field("activation_dropout", "feedforward_dropout", 0.0),
    Field("init_std", "init_std", 0.02),
)
# Where transformers does not tie the output layer, it shares nothing between encoder and decoder either.
TYING = Cases(
    {"tie_word_embeddings": True},
    (
        ({"tie_word_embeddings": True}, {"tie_embeddings": True, "share_embeddings": True}),
        ({"tie_word_embeddings": False}, {"tie_embeddings": False, "share_embeddings": False}),
    ),
)
LEARNED: tuple[Part, ...] = (
    Field("vocab_size", "vocab_size", 50265),
    Field("max_position_embeddings", "max_positions", 1024),
    Field("activation_function", "activation", "gelu", ACTIVATIONS),
    Field("attention_dropout", "attention_dropout", 0.0),
    Scaled("scale_embedding", "embedding_scale", 0.5, default=False, width="d_model"),
    TYING,
)
BART_LIKE: Json = {"family": "encoder-decoder", "norm": "layernorm", "head_bias": True}
BART_LEARNED: Json = {**BART_LIKE, "positions": "learned", "position_offset": 2, "embedding_norm": True}

# One table: the name "shared". Two tables: the stacks' own names.
SHARED = Rule("model.shared.weight", (SOURCE,), when={"share_embeddings": True})
TABLES = (
    SHARED,
    Rule("model.encoder.embed_tokens.weight", (SOURCE,)),
    Rule("model.decoder.embed_tokens.weight", (TARGET,)),
    Rule(
        "model.shared.weight", (SOURCE,), copy=True
    ),  # nothing reads it where there are two, and yet it must be there
    Rule("model.shared.weight", (TARGET,)),  # older files with an output layer of its own, and one table
)
# A norm stands before or after its part: a model has one of the two, and the rule for the other finds nothing.
BLOCKS = tuple(
    rule
    for stack in STACKS
    for theirs, ours in [(f"model.{stack}.layers.{{i}}", f"{stack}.blocks.{{i}}")]
    for rule in same(
        {
            **{f"{theirs}.self_attn.{x}": f"{ours}.attention.{y}" for x, y in PARTS.items()},
            **{f"{theirs}.encoder_attn.{x}": f"{ours}.cross.{y}" for x, y in PARTS.items()},
            f"{theirs}.fc1": f"{ours}.feedforward.up",
            f"{theirs}.fc2": f"{ours}.feedforward.down",
            f"model.{stack}.layernorm_embedding": f"{stack}.embedding.norm",
            f"model.{stack}.layer_norm": f"{stack}.norm",
        }
    )
    + same({f"{theirs}.self_attn_layer_norm": f"{ours}.attention_residual.before"})
    + same({f"{theirs}.self_attn_layer_norm": f"{ours}.attention_residual.after"})
    + same({f"{theirs}.encoder_attn_layer_norm": f"{ours}.cross_residual.before"})
    + same({f"{theirs}.encoder_attn_layer_norm": f"{ours}.cross_residual.after"})
    + same({f"{theirs}.final_layer_norm": f"{ours}.feedforward_residual.before"})
    + same({f"{theirs}.final_layer_norm": f"{ours}.feedforward_residual.after"})
    + (Rule(f"model.{stack}.embed_positions.weight", (f"{stack}.positions.table.weight",)),)
)
HEAD = (
    Rule("lm_head.weight", ("head.out.weight",)),
    Rule("final_logits_bias", ("head.out.bias",), Reshape(lambda config: (1, config.vocab_size))),
)
OLD = ("model.encoder.version", "model.decoder.version")

BART = Architecture(
    model_type="bart",
    classes=classes("Bart"),
    prefix="model.",
    config=(Fixed({**BART_LEARNED, "norm_position": "post"}), *SHAPE, *LEARNED),
    rules=(*TABLES, *BLOCKS, *HEAD),
    ignored=OLD,
    open=("head_bias",),
)
MBART = Architecture(
    model_type="mbart",
    classes=classes("MBart"),
    prefix="model.",
    config=(Fixed({**BART_LEARNED, "norm_position": "pre"}), *SHAPE, *LEARNED),
    rules=(*TABLES, *BLOCKS, *HEAD),
    ignored=OLD,
    open=("head_bias",),
)
