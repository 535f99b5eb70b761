"""ALBERT: BERT with a narrow token table, projected up, and layers that share their weights in groups."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import BLOCK, SHAPE, classes, embedding, heads, masked_head
from clearhead.hub.fields import ACTIVATIONS, field, fixed
from clearhead.hub.rules import same

THEIRS = "albert.encoder.albert_layer_groups.{i}.albert_layers.0"

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
                f"{THEIRS}.attention.query": f"{BLOCK}.attention.q",
                f"{THEIRS}.attention.key": f"{BLOCK}.attention.k",
                f"{THEIRS}.attention.value": f"{BLOCK}.attention.v",
                f"{THEIRS}.attention.dense": f"{BLOCK}.attention.out",
                f"{THEIRS}.attention.LayerNorm": f"{BLOCK}.attention_residual.after",
                f"{THEIRS}.ffn": f"{BLOCK}.feedforward.up",
                f"{THEIRS}.ffn_output": f"{BLOCK}.feedforward.down",
                f"{THEIRS}.full_layer_layer_norm": f"{BLOCK}.feedforward_residual.after",
            }
        ),
    ),
    heads=heads(masked_head("predictions.dense", "predictions.LayerNorm", "predictions"), "albert.pooler"),
    ignored=("albert.embeddings.position_ids",),
    carried=("albert.pooler.*", "sop_classifier.*"),
)
