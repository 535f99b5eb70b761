"""BERT: a post-norm encoder with learned positions and segments. Others build on its tables."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, Field, Fixed, Json, Labels, Part, Says
from clearhead.hub.rules import Rule, renamed, same

BLOCK = "encoder.blocks.{i}"


def classes(name: str) -> dict[str, Json]:
    """The classes that each encoder of this kind has."""
    return {
        f"{name}ForMaskedLM": {"head": "mlm", "head_transform": True, "head_bias": True},
        f"{name}ForSequenceClassification": {
            "head": "classifier",
            "pooling": "cls",
            "pooler": "tanh",
            "head_bias": True,
        },
        f"{name}ForTokenClassification": {"head": "tagger", "head_bias": True},
        f"{name}ForQuestionAnswering": {"head": "span", "head_bias": True},
        f"{name}Model": {"head": "embedding", "pooling": "cls", "pooler": "tanh"},
    }


KIND: Json = {
    "family": "encoder",
    "positions": "learned",
    "embedding_norm": True,
    "norm": "layernorm",
    "norm_position": "post",
    "bias": True,
    "init": "bert",
}
SHAPE: tuple[Part, ...] = (
    Fixed(KIND),
    Says({"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}),
    Field("vocab_size", "vocab_size", 30522),
    Field("hidden_size", "d_model", 768),
    Field("num_hidden_layers", "n_layers", 12),
    Field("num_attention_heads", "n_heads", 12),
    Field("intermediate_size", "d_ff", 3072),
    Field("hidden_act", "activation", "gelu", ACTIVATIONS),
    Field("type_vocab_size", "n_types", 2, least=1),
    Field("layer_norm_eps", "norm_eps", 1e-12),
    Field("hidden_dropout_prob", "dropout", 0.1),
    Field("attention_probs_dropout_prob", "attention_dropout", 0.1),
    Field("initializer_range", "init_std", 0.02),
    Field("tie_word_embeddings", "tie_embeddings", True),
    Labels(),
)


def embedding(name: str) -> tuple[Rule, ...]:
    """Tables and their norm."""
    tables = {
        "word": "embedding.front.tokens",
        "position": "positions.table",
        "token_type": "embedding.types",
    }
    weights = tuple(
        Rule(f"{name}.embeddings.{theirs}_embeddings.weight", (f"encoder.{ours}.weight",))
        for theirs, ours in tables.items()
    )
    return weights + same({f"{name}.embeddings.LayerNorm": "encoder.embedding.norm"})


def layers(name: str) -> tuple[Rule, ...]:
    """Attention, feed-forward and their norms."""
    theirs = f"{name}.encoder.layer.{{i}}"
    return same(
        {
            f"{theirs}.attention.self.query": f"{BLOCK}.attention.q",
            f"{theirs}.attention.self.key": f"{BLOCK}.attention.k",
            f"{theirs}.attention.self.value": f"{BLOCK}.attention.v",
            f"{theirs}.attention.output.dense": f"{BLOCK}.attention.out",
            f"{theirs}.attention.output.LayerNorm": f"{BLOCK}.attention_residual.after",
            f"{theirs}.intermediate.dense": f"{BLOCK}.feedforward.up",
            f"{theirs}.output.dense": f"{BLOCK}.feedforward.down",
            f"{theirs}.output.LayerNorm": f"{BLOCK}.feedforward_residual.after",
        }
    )


def masked_head(transform: str, norm: str, out: str) -> tuple[Rule, ...]:
    """The head that predicts masked tokens. Its bias stands beside the output layer and in it; the latter is used."""
    pairs = {transform: "head.transform", norm: "head.norm", f"{out}.decoder": "head.out"}
    return (*same(pairs), Rule(f"{out}.bias", ("head.out.bias",), copy=True))


TAGGER, SPAN, POOLER = (
    same({"classifier": "head.out"}),
    same({"qa_outputs": "head.out"}),
    same({"bert.pooler.dense": "head.pooler"}),
)
MASKED = masked_head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"
)
RULES = embedding("bert") + layers("bert")


def older(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """With the names that norms had in the first checkpoints."""
    return (
        rules
        + renamed(rules, "LayerNorm.gamma", "LayerNorm.weight")
        + renamed(rules, "LayerNorm.beta", "LayerNorm.bias")
    )


BERT = Architecture(
    model_type="bert",
    classes=classes("Bert"),
    prefix="bert.",
    config=(*SHAPE, Field("max_position_embeddings", "max_positions", 512)),
    rules=older(RULES),
    heads={
        "mlm": older(MASKED),
        "classifier": POOLER + TAGGER,
        "tagger": TAGGER,
        "span": SPAN,
        "embedding": POOLER,
    },
    ignored=("bert.embeddings.position_ids",),
    carried=("bert.pooler.*", "cls.seq_relationship.*"),
)
