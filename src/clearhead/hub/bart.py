"""BART and mBART: encoder and decoder with learned positions, norms after (BART) or before (mBART) each part.

M2M-100 with NLLB, and Marian, come from the same code and build on these tables.
"""

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import (
    ACTIVATIONS,
    ConfigPart,
    Json,
    cases,
    field,
    fixed,
    positions_after_padding,
    scaled,
)
from clearhead.hub.rules import Rule, reshaped, same

PARTS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}
SOURCE, TARGET = (f"{stack}.embedding.front.tokens.weight" for stack in ("encoder", "decoder"))


def classes(name: str, generator: str = "ForConditionalGeneration") -> dict[str, Json]:
    """Return the classes that each encoder-decoder of this kind has."""
    return {f"{name}{generator}": {"head": "lm"}, f"{name}Model": {"head": "none"}}


SHAPE: tuple[ConfigPart, ...] = (
    field("d_model", "d_model", 1024),
    field("encoder_layers", "n_encoder_layers", 12),
    field("decoder_layers", "n_layers", 12),
    field("encoder_attention_heads", "n_encoder_heads", 16),
    field("decoder_attention_heads", "n_heads", 16),
    field("encoder_ffn_dim", "d_encoder_ff", 4096),
    field("decoder_ffn_dim", "d_ff", 4096),
    field("dropout", "dropout", 0.1),
    field("activation_dropout", "feedforward_dropout", 0.0),
    field("init_std", "init_std", 0.02),
)
# Where transformers does not tie the output layer, it shares nothing between encoder and decoder either.
TYING = cases(
    {"tie_word_embeddings": True},
    ({"tie_word_embeddings": True}, {"tie_embeddings": True, "share_embeddings": True}),
    ({"tie_word_embeddings": False}, {"tie_embeddings": False, "share_embeddings": False}),
)
GELU: tuple[ConfigPart, ...] = (
    field("max_position_embeddings", "max_positions", 1024),
    field("activation_function", "activation", "gelu", ACTIVATIONS),
    field("attention_dropout", "attention_dropout", 0.0),
    scaled("scale_embedding", "embedding_scale", 0.5, default=False, width="d_model"),
)
BART_LIKE: Json = {"family": "encoder-decoder", "norm": "layernorm", "head_bias": True}

# One table: the name "shared". Two tables: the stacks' own names.
STACK_TABLES = (
    Rule("model.shared.weight", (SOURCE,), when={"share_embeddings": True}),
    Rule("model.encoder.embed_tokens.weight", (SOURCE,)),
    Rule("model.decoder.embed_tokens.weight", (TARGET,)),
)
TABLES = (
    *STACK_TABLES,
    Rule("model.shared.weight", (SOURCE,), copy=True),  # every file must have it, read or not
    Rule("model.shared.weight", (TARGET,)),  # older files with an output layer of its own, and one table
)


def blocks(stack: str) -> tuple[Rule, ...]:
    """Return the rules of one stack.

    A model has a norm before or after a part: the rule for the other finds nothing.
    """
    theirs, ours = f"model.{stack}.layers.{{i}}", f"{stack}.blocks.{{i}}"
    norms = {"self_attn": "attention", "encoder_attn": "cross", "final": "feedforward"}
    return (
        *same(
            {
                **{f"{theirs}.self_attn.{x}": f"{ours}.attention.{y}" for x, y in PARTS.items()},
                **{f"{theirs}.encoder_attn.{x}": f"{ours}.cross.{y}" for x, y in PARTS.items()},
                f"{theirs}.fc1": f"{ours}.feedforward.up",
                f"{theirs}.fc2": f"{ours}.feedforward.down",
                f"model.{stack}.layernorm_embedding": f"{stack}.embedding.norm",
                f"model.{stack}.layer_norm": f"{stack}.norm",
            }
        ),
        *same({f"{theirs}.{x}_layer_norm": f"{ours}.{y}_residual.before" for x, y in norms.items()}),
        *same({f"{theirs}.{x}_layer_norm": f"{ours}.{y}_residual.after" for x, y in norms.items()}),
        Rule(f"model.{stack}.embed_positions.weight", (f"{stack}.positions.table.weight",)),
    )


BODY = (
    *blocks("encoder"),
    *blocks("decoder"),
    Rule("lm_head.weight", ("head.out.weight",)),
    Rule("final_logits_bias", ("head.out.bias",), reshaped(lambda config: (1, config.vocab_size))),
)
TIED = (
    "model.shared.weight",
    *(f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")),
    "lm_head.weight",
)
ALIASES = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
}
OLD = ("model.encoder.version", "model.decoder.version")


def bart(model_type: str, name: str, norm_position: str) -> Architecture:
    """Return BART or mBART, which differ in where their norms stand."""
    return Architecture(
        model_type,
        classes(name),
        config=(
            fixed({**BART_LIKE, "positions": "learned", "position_offset": 2, "embedding_norm": True}),
            fixed({"norm_position": norm_position}),
            *SHAPE,
            field("vocab_size", "vocab_size", 50265),
            *GELU,
            TYING,
        ),
        rules=(*TABLES, *BODY),
        prefix="model.",
        ignored=OLD,
        open=("head_bias",),
        tied=TIED,
        aliases=ALIASES,
    )


BART, MBART = bart("bart", "Bart", "post"), bart("mbart", "MBart", "pre")

# M2M-100 and NLLB: norms before each part, sinusoidal positions that begin after the padding id.

M2M100 = Architecture(
    model_type="m2m_100",
    classes=classes("M2M100"),
    prefix="model.",
    config=(
        fixed(
            {
                "family": "encoder-decoder",
                "positions": "sinusoidal",
                "sinusoid_layout": "half",
                "sinusoid_ends": True,
                "norm": "layernorm",
                "norm_position": "pre",
                "head_bias": False,
            }
        ),
        *SHAPE,
        field("vocab_size", "vocab_size", 128112),
        positions_after_padding(rows=1024, padding=1, counted=False),
        field("activation_function", "activation", "relu", ACTIVATIONS),
        field("attention_dropout", "attention_dropout", 0.1),
        scaled("scale_embedding", "embedding_scale", 0.5, default=True, width="d_model"),
        TYING,
    ),
    rules=(*TABLES, *BODY),
    ignored=(*OLD, "*.embed_positions.weights"),
    tied=TIED,
    aliases=ALIASES,
)

# Marian (Opus-MT): norms after each part, sinusoidal positions, some with two vocabularies.

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
    tied=TIED,
    aliases=ALIASES,
)
