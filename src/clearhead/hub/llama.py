"""Llama 1, 2 and 3: a pre-norm decoder with rotary positions, RMSNorm and a gated feed-forward. Others build on its tables."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, Field, Fixed, Labels, Part, Rope, Says
from clearhead.hub.rules import Rule, same

BLOCK, THEIRS = "decoder.blocks.{i}", "model.layers.{i}"


def classes(name: str) -> dict[str, dict[str, object]]:
    """The classes that each decoder of this kind has."""
    return {
        f"{name}ForCausalLM": {"head": "lm"},
        f"{name}ForSequenceClassification": {"head": "classifier", "head_bias": False, "pooling": "last"},
        f"{name}ForTokenClassification": {"head": "tagger", "head_bias": True},
        f"{name}Model": {"head": "none"},
    }


SHAPE: tuple[Part, ...] = (
    Fixed({"family": "decoder", "positions": "rope", "norm": "rmsnorm", "norm_position": "pre", "gated": True, "bias": False}),
    Field("vocab_size", "vocab_size", 32000),
    Field("hidden_size", "d_model", 4096),
    Field("intermediate_size", "d_ff", 11008),
    Field("num_hidden_layers", "n_layers", 32),
    Field("num_attention_heads", "n_heads", 32),
    Field("num_key_value_heads", "n_kv_heads", None),
    Field("head_dim", "d_head", None),
    Field("max_position_embeddings", "max_positions", 2048),
    Field("rms_norm_eps", "norm_eps", 1e-6),
    Field("attention_dropout", "attention_dropout", 0.0),
    Field("initializer_range", "init_std", 0.02),
    Field("hidden_act", "activation", "silu", ACTIVATIONS),
    Field("tie_word_embeddings", "tie_embeddings", False),
    Labels(),
)

ATTENTION = same({f"{THEIRS}.self_attn.{x}_proj": f"{BLOCK}.attention.{y}" for x, y in zip("qkvo", ("q", "k", "v", "out"))})
FEEDFORWARD = same({f"{THEIRS}.mlp.{x}_proj": f"{BLOCK}.feedforward.{x}" for x in ("gate", "up", "down")})
EDGES = (
    Rule("model.embed_tokens.weight", ("decoder.embedding.front.tokens.weight",)),
    *same({"model.norm": "decoder.norm", "lm_head": "head.out", "score": "head.out"}),
)
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
        *SHAPE,
        Rope(),
        Field("attention_bias", "qkv_bias", False),
        Field("attention_bias", "attention_out_bias", False),
        Field("mlp_bias", "feedforward_bias", False),
        Says({"pretraining_tp": 1}),
    ),
    rules=(*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD),
    ignored=IGNORED,
)
