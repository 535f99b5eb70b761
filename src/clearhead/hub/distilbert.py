"""DistilBERT: BERT's encoder without segments and without a pooler, under names of its own."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import BLOCK, KIND, SPAN, TAGGER, classes
from clearhead.hub.fields import ACTIVATIONS, LABELS, field, fixed
from clearhead.hub.rules import Rule, same

THEIRS = "distilbert.transformer.layer.{i}"

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
                **{f"{THEIRS}.attention.{x}_lin": f"{BLOCK}.attention.{x}" for x in ("q", "k", "v", "out")},
                f"{THEIRS}.sa_layer_norm": f"{BLOCK}.attention_residual.after",
                f"{THEIRS}.ffn.lin1": f"{BLOCK}.feedforward.up",
                f"{THEIRS}.ffn.lin2": f"{BLOCK}.feedforward.down",
                f"{THEIRS}.output_layer_norm": f"{BLOCK}.feedforward_residual.after",
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
)
