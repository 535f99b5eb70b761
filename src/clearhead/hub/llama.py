"""Llama 1, 2 and 3: a pre-norm decoder with rotary positions, RMSNorm and a gated feed-forward. Others build on its tables."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, Field, Fixed, Json, Labels, Part, Says
from clearhead.hub.rope import Rope
from clearhead.hub.rules import Rule, same

BLOCK, THEIRS = "decoder.blocks.{i}", "model.layers.{i}"


def classes(name: str, sequence: bool = True, token: bool = True) -> dict[str, Json]:
    """The classes that each decoder of this kind has, or those of them that there are."""
    heads: dict[str, Json] = {f"{name}ForCausalLM": {"head": "lm"}}
    if sequence:
        heads[f"{name}ForSequenceClassification"] = {
            "head": "classifier",
            "head_bias": False,
            "pooling": "last",
        }
    if token:
        heads[f"{name}ForTokenClassification"] = {"head": "tagger", "head_bias": True}
    return {**heads, f"{name}Model": {"head": "none"}}


SIZES = {  # their key: our field, and what Llama means where the key is absent
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("d_model", 4096),
    "num_hidden_layers": ("n_layers", 32),
    "num_attention_heads": ("n_heads", 32),
    "max_position_embeddings": ("max_positions", 2048),
    "attention_dropout": ("attention_dropout", 0.0),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", False),
}


def sizes(**defaults: object) -> tuple[Part, ...]:
    """What every decoder of this kind states; `defaults` where an absent key means something else than for Llama."""
    return (
        *(Field(theirs, ours, defaults.get(theirs, usual)) for theirs, (ours, usual) in SIZES.items()),
        Labels(),
    )


def shape(
    d_ff: int = 11008,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    **defaults: object,
) -> tuple[Part, ...]:
    """A decoder of Llama's kind: rotary positions, RMSNorm before each part, gated feed-forward, no biases."""
    return (
        Fixed(
            {
                "family": "decoder",
                "positions": "rope",
                "norm": "rmsnorm",
                "norm_position": "pre",
                "gated": True,
                "bias": False,
            }
        ),
        *sizes(**defaults),
        Field("intermediate_size", "d_ff", d_ff),
        Field("num_key_value_heads", "n_kv_heads", kv_heads),
        Field("head_dim", "d_head", head_dim),
        Field("rms_norm_eps", "norm_eps", eps),
    )


ACTIVATION = Field("hidden_act", "activation", "silu", ACTIVATIONS)
ATTENTION_BIAS = (
    Field("attention_bias", "qkv_bias", False),
    Field("attention_bias", "attention_out_bias", False),
)
ATTENTION = same(
    {f"{THEIRS}.self_attn.{x}_proj": f"{BLOCK}.attention.{y}" for x, y in zip("qkvo", ("q", "k", "v", "out"))}
)
FEEDFORWARD = same({f"{THEIRS}.mlp.{x}_proj": f"{BLOCK}.feedforward.{x}" for x in ("gate", "up", "down")})
EMBEDDING = Rule("model.embed_tokens.weight", ("decoder.embedding.front.tokens.weight",))
EDGES = (EMBEDDING, *same({"model.norm": "decoder.norm"}))
SCORE = same({"score": "head.out"})
HEADS = {"lm": same({"lm_head": "head.out"}), "classifier": SCORE, "tagger": SCORE}
NORMS = same(
    {
        f"{THEIRS}.input_layernorm": f"{BLOCK}.attention_residual.before",
        f"{THEIRS}.post_attention_layernorm": f"{BLOCK}.feedforward_residual.before",
    }
)
IGNORED = ("*.rotary_emb.inv_freq",)

LLAMA = Architecture(
    model_type="llama",
    classes=classes("Llama"),
    prefix="model.",
    config=(
        *shape(),
        ACTIVATION,
        Rope(),
        *ATTENTION_BIAS,
        Field("mlp_bias", "feedforward_bias", False),
        Says({"pretraining_tp": 1}),
    ),
    rules=(*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)
