"""BERT: a post-norm encoder with learned positions and segments.

RoBERTa (with XLM-RoBERTa and CamemBERT), DistilBERT and ALBERT build on its tables.
"""

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import (
    ACTIVATIONS,
    LABELS,
    ConfigPart,
    Json,
    field,
    fixed,
    positions_after_padding,
)
from clearhead.hub.rules import Rule, renamed, same

BLOCK = "encoder.blocks.{i}"


def classes(name: str, pooler: str = "tanh", **changes: Json) -> dict[str, Json]:
    """Return the classes that an encoder of this kind has; `changes` replace some, by how their names end."""
    pooled = {"pooling": "cls", "pooler": pooler}
    heads: dict[str, Json] = {
        "ForMaskedLM": {"head": "mlm", "head_transform": True, "head_bias": True},
        "ForSequenceClassification": {"head": "classifier", **pooled, "head_bias": True},
        "ForTokenClassification": {"head": "tagger", "head_bias": True},
        "ForQuestionAnswering": {"head": "span", "head_bias": True},
        "Model": {"head": "embedding", **pooled},
    }
    return {name + ending: head for ending, head in (heads | changes).items()}


KIND: Json = {
    "family": "encoder",
    "positions": "learned",
    "embedding_norm": True,
    "norm": "layernorm",
    "norm_position": "post",
    "bias": True,
    "init": "bert",
}
TYPES = field("type_vocab_size", "n_types", 2, least=1)
SHAPE: tuple[ConfigPart, ...] = (
    fixed(KIND),
    fixed(only={"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}),
    field("vocab_size", "vocab_size", 30522),
    field("hidden_size", "d_model", 768),
    field("num_hidden_layers", "n_layers", 12),
    field("num_attention_heads", "n_heads", 12),
    field("intermediate_size", "d_ff", 3072),
    field("hidden_act", "activation", "gelu", ACTIVATIONS),
    TYPES,
    field("layer_norm_eps", "norm_eps", 1e-12),
    field("hidden_dropout_prob", "dropout", 0.1),
    field("attention_probs_dropout_prob", "attention_dropout", 0.1),
    field("initializer_range", "init_std", 0.02),
    field("tie_word_embeddings", "tie_embeddings", True),
    LABELS,
)


def embedding(name: str) -> tuple[Rule, ...]:
    """Return the rules of the tables and their norm."""
    theirs = f"{name}.embeddings"
    return (
        Rule(f"{theirs}.word_embeddings.weight", ("encoder.embedding.front.tokens.weight",)),
        Rule(f"{theirs}.position_embeddings.weight", ("encoder.positions.table.weight",)),
        Rule(f"{theirs}.token_type_embeddings.weight", ("encoder.embedding.types.weight",)),
        *same({f"{theirs}.LayerNorm": "encoder.embedding.norm"}),
    )


def layers(name: str) -> tuple[Rule, ...]:
    """Return the rules of attention, feed-forward and their norms."""
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
    """Return the rules of the head that predicts masked tokens.

    Its bias is stored twice; the output layer's own is used.
    """
    pairs = {transform: "head.transform", norm: "head.norm", f"{out}.decoder": "head.out"}
    return (*same(pairs), Rule(f"{out}.bias", ("head.out.bias",), copy=True))


TAGGER, SPAN = same({"classifier": "head.out"}), same({"qa_outputs": "head.out"})
MASKED = masked_head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"
)


def heads(masked: tuple[Rule, ...], pooler: str) -> dict[str, tuple[Rule, ...]]:
    """Return the rules of every head, given those for masked tokens and the name of the pooler."""
    pool = same({pooler: "head.pooler"})
    return {"mlm": masked, "classifier": pool + TAGGER, "tagger": TAGGER, "span": SPAN, "embedding": pool}


def older(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules, and again with the names that norms had in the first checkpoints."""
    return (
        *rules,
        *renamed(rules, "LayerNorm.gamma", "LayerNorm.weight"),
        *renamed(rules, "LayerNorm.beta", "LayerNorm.bias"),
    )


BERT = Architecture(
    model_type="bert",
    classes=classes("Bert"),
    prefix="bert.",
    config=(*SHAPE, field("max_position_embeddings", "max_positions", 512)),
    rules=older(embedding("bert") + layers("bert")),
    heads=heads(older(MASKED), "bert.pooler.dense"),
    ignored=("bert.embeddings.position_ids",),
    carried=("bert.pooler.*", "cls.seq_relationship.*"),
)

# RoBERTa: positions that start at padding id + 1, and heads of its own.

# This head has GELU, whatever activation the layers have.
GELU_HEAD: Json = {"head": "mlm", "head_transform": True, "head_bias": True, "head_activation": "gelu"}


def roberta_like(model_type: str, name: str, named: bool = True) -> Architecture:
    """Return an architecture with RoBERTa's config and tensors; its classes begin with `name`."""
    return Architecture(
        model_type=model_type,
        classes=classes(name, ForMaskedLM=GELU_HEAD),
        prefix="roberta.",
        config=(*SHAPE, positions_after_padding(rows=512, padding=1)),
        rules=embedding("roberta") + layers("roberta"),
        heads={
            **heads(masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head"), "roberta.pooler.dense"),
            "classifier": same({"classifier.dense": "head.pooler", "classifier.out_proj": "head.out"}),
        },
        ignored=("roberta.embeddings.position_ids",),
        carried=("roberta.pooler.*",),
        named=named,
    )


ROBERTA = roberta_like("roberta", "Roberta", named=False)
XLM_ROBERTA = roberta_like("xlm-roberta", "XLMRoberta")
CAMEMBERT = roberta_like("camembert", "Camembert")

# DistilBERT: no segments and no pooler, under names of its own.

DISTIL_BLOCK = "distilbert.transformer.layer.{i}"

DISTILBERT = Architecture(
    model_type="distilbert",
    classes=classes("DistilBert", pooler="relu", Model={"head": "none"}),
    prefix="distilbert.",
    config=(
        # sinusoidal_pos_embds says how the position table was initialised; it is stored like any other.
        fixed({**KIND, "norm_eps": 1e-12}),
        field("vocab_size", "vocab_size", 30522),
        field("max_position_embeddings", "max_positions", 512),
        field("dim", "d_model", 768),
        field("n_layers", "n_layers", 6),
        field("n_heads", "n_heads", 12),
        field("hidden_dim", "d_ff", 3072),
        field("activation", "activation", "gelu", ACTIVATIONS),
        field("dropout", "dropout", 0.1),
        field("attention_dropout", "attention_dropout", 0.1),
        field("initializer_range", "init_std", 0.02),
        field("tie_word_embeddings", "tie_embeddings", True),
        LABELS,
    ),
    rules=(
        Rule("distilbert.embeddings.word_embeddings.weight", ("encoder.embedding.front.tokens.weight",)),
        Rule("distilbert.embeddings.position_embeddings.weight", ("encoder.positions.table.weight",)),
        *same(
            {
                "distilbert.embeddings.LayerNorm": "encoder.embedding.norm",
                **{
                    f"{DISTIL_BLOCK}.attention.{x}_lin": f"{BLOCK}.attention.{x}"
                    for x in ("q", "k", "v", "out")
                },
                f"{DISTIL_BLOCK}.sa_layer_norm": f"{BLOCK}.attention_residual.after",
                f"{DISTIL_BLOCK}.ffn.lin1": f"{BLOCK}.feedforward.up",
                f"{DISTIL_BLOCK}.ffn.lin2": f"{BLOCK}.feedforward.down",
                f"{DISTIL_BLOCK}.output_layer_norm": f"{BLOCK}.feedforward_residual.after",
            }
        ),
    ),
    heads={
        "mlm": same(
            {
                "vocab_transform": "head.transform",
                "vocab_layer_norm": "head.norm",
                "vocab_projector": "head.out",
            }
        ),
        "classifier": same({"pre_classifier": "head.pooler", "classifier": "head.out"}),
        "tagger": TAGGER,
        "span": SPAN,
    },
    ignored=("distilbert.embeddings.position_ids",),
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)

# ALBERT: a narrow token table, projected up, and layers that share their weights in groups.

ALBERT_BLOCK = "albert.encoder.albert_layer_groups.{i}.albert_layers.0"

ALBERT = Architecture(
    model_type="albert",
    classes=classes("Albert"),
    prefix="albert.",
    config=(
        *SHAPE,
        fixed({"embedding_projection": True}),
        fixed(only={"inner_group_num": 1}),
        field("vocab_size", "vocab_size", 30000),
        field("embedding_size", "d_embedding", 128),
        field("hidden_size", "d_model", 4096),
        field("num_hidden_groups", "layer_groups", 1),
        field("num_attention_heads", "n_heads", 64),
        field("intermediate_size", "d_ff", 16384),
        field("hidden_act", "activation", "gelu_new", ACTIVATIONS),
        field("hidden_dropout_prob", "dropout", 0.0),
        field("attention_probs_dropout_prob", "attention_dropout", 0.0),
        field("max_position_embeddings", "max_positions", 512),
    ),
    rules=(
        *embedding("albert"),
        *same(
            {
                "albert.encoder.embedding_hidden_mapping_in": "encoder.embedding.project",
                f"{ALBERT_BLOCK}.attention.query": f"{BLOCK}.attention.q",
                f"{ALBERT_BLOCK}.attention.key": f"{BLOCK}.attention.k",
                f"{ALBERT_BLOCK}.attention.value": f"{BLOCK}.attention.v",
                f"{ALBERT_BLOCK}.attention.dense": f"{BLOCK}.attention.out",
                f"{ALBERT_BLOCK}.attention.LayerNorm": f"{BLOCK}.attention_residual.after",
                f"{ALBERT_BLOCK}.ffn": f"{BLOCK}.feedforward.up",
                f"{ALBERT_BLOCK}.ffn_output": f"{BLOCK}.feedforward.down",
                f"{ALBERT_BLOCK}.full_layer_layer_norm": f"{BLOCK}.feedforward_residual.after",
            }
        ),
    ),
    heads=heads(masked_head("predictions.dense", "predictions.LayerNorm", "predictions"), "albert.pooler"),
    ignored=("albert.embeddings.position_ids",),
    carried=("albert.pooler.*", "sop_classifier.*"),
)
