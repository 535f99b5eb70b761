"""T5, T5 v1.1 and mT5: relative positions, one table per stack; attention scores unscaled, logits scaled where they are tied."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import Cases, ConfigPart, Depths, Field, Fixed, Json, Scaled
from clearhead.hub.rules import Rule, same

PARTS = {"q": "q", "k": "k", "v": "v", "o": "out"}
ACTIVATIONS = {"relu": "relu", "gelu": "gelu_tanh", "gelu_new": "gelu_tanh", "silu": "silu", "swish": "silu"}


def classes(name: str) -> dict[str, Json]:
    """Return the classes that T5 and mT5 have."""
    return {
        f"{name}ForConditionalGeneration": {"family": "encoder-decoder", "head": "lm"},
        f"{name}Model": {"family": "encoder-decoder", "head": "none"},
        f"{name}EncoderModel": {"family": "encoder", "head": "none"},
    }


SHAPE: tuple[ConfigPart, ...] = (
    Fixed(
        {
            "positions": "relative",
            "attention_scale": 1.0,
            "norm": "rmsnorm",
            "norm_position": "pre",
            "bias": False,
        }
    ),
    Field("vocab_size", "vocab_size"),
    Field("d_model", "d_model"),
    Field("d_kv", "d_head"),
    Field("d_ff", "d_ff"),
    Field("num_heads", "n_heads"),
    Depths("num_layers", "num_decoder_layers"),
    Field("relative_attention_num_buckets", "relative_buckets", 32),
    Field("relative_attention_max_distance", "relative_max_distance", 128),
    Field("n_positions", "max_positions", 512),
    Field("layer_norm_epsilon", "norm_eps", 1e-6),
    Field("dropout_rate", "dropout", 0.1),
    Field("dropout_rate", "feedforward_dropout", 0.1),
    Field("tie_word_embeddings", "tie_embeddings", True),
    Fixed(written={"decoder_start_token_id": 0}),
)
# "gelu" is the tanh formula behind a gate, and the exact one without.
BENDS = (
    *(
        ({"feed_forward_proj": f"gated-{word}"}, {"activation": name, "gated": True})
        for word, name in ACTIVATIONS.items()
    ),
    *(
        ({"feed_forward_proj": word}, {"activation": name, "gated": False})
        for word, name in {**ACTIVATIONS, "gelu": "gelu"}.items()
    ),
)


def block(stack: str, kinds: tuple[str, ...]) -> tuple[Rule, ...]:
    """Return the rules of one stack's blocks, whose sublayers are numbered: SelfAttention, perhaps EncDecAttention, and the feed-forward."""
    theirs, ours, last = f"{stack}.block.{{i}}.layer", f"{stack}.blocks.{{i}}", len(kinds)
    attention = {"SelfAttention": "attention", "EncDecAttention": "cross"}
    wide = f"{theirs}.{last}.DenseReluDense"
    return (
        *same(
            {
                f"{theirs}.{n}.{kind}.{x}": f"{ours}.{attention[kind]}.{y}"
                for n, kind in enumerate(kinds)
                for x, y in PARTS.items()
            }
        ),
        *same(
            {
                **{
                    f"{theirs}.{n}.layer_norm": f"{ours}.{attention[kind]}_residual.before"
                    for n, kind in enumerate(kinds)
                },
                f"{theirs}.{last}.layer_norm": f"{ours}.feedforward_residual.before",
                f"{stack}.final_layer_norm": f"{stack}.norm",
                f"{wide}.wi_0": f"{ours}.feedforward.gate",
                f"{wide}.wo": f"{ours}.feedforward.down",
            }
        ),
        Rule(f"{wide}.wi_1.weight", (f"{ours}.feedforward.up.weight",), when={"gated": True}),
        Rule(f"{wide}.wi.weight", (f"{ours}.feedforward.up.weight",), when={"gated": False}),
        Rule(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            (f"{stack}.positions.table.weight",),
        ),
    )


RULES = (
    Rule("shared.weight", ("encoder.embedding.front.tokens.weight",)),
    Rule("encoder.embed_tokens.weight", ("encoder.embedding.front.tokens.weight",)),
    Rule("decoder.embed_tokens.weight", ("decoder.embedding.front.tokens.weight",)),
    *block("encoder", ("SelfAttention",)),
    *block("decoder", ("SelfAttention", "EncDecAttention")),
    Rule("lm_head.weight", ("head.out.weight",)),
)
IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

T5 = Architecture(
    model_type="t5",
    classes=classes("T5"),
    config=(
        *SHAPE,
        Cases({"feed_forward_proj": "relu"}, BENDS),
        Scaled(
            "scale_decoder_outputs", "logit_scale", -0.5, width="d_model", otherwise="tie_word_embeddings"
        ),
    ),
    rules=RULES,
    ignored=IGNORED,
)
MT5 = Architecture(
    model_type="mt5",
    classes=classes("MT5"),
    config=(*SHAPE, Cases({"feed_forward_proj": "gated-gelu"}, BENDS)),
    rules=RULES,
    ignored=IGNORED,
)
