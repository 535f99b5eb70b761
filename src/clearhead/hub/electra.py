"""ELECTRA: BERT with a table that may be narrow, as the generator or as the discriminator of its training."""

import dataclasses

from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import GELU_HEAD, SHAPE, SPAN, TAGGER, classes, embedding, layers
from clearhead.hub.fields import ACTIVATIONS, Json, field, of_class
from clearhead.hub.rules import same

DISCRIMINATOR = "ElectraForPreTraining"
KINDS: dict[str, Json] = classes(
    "Electra",
    pooler="gelu",
    ForMaskedLM=GELU_HEAD,
    ForTokenClassification={"head": "tagger", "head_bias": True, "pooler": "none"},
    Model={"head": "none"},
    # It says of each token if it was replaced: one number, through a layer with the activation of all.
    ForPreTraining={"head": "tagger", "head_bias": True, "n_classes": 1},
)
DISCRIMINATES = tuple(
    dataclasses.replace(rule, beside="head.pooler.weight")
    for rule in same(
        {
            "discriminator_predictions.dense": "head.pooler",
            "discriminator_predictions.dense_prediction": "head.out",
        }
    )
)

ELECTRA = Architecture(
    model_type="electra",
    classes=KINDS,
    prefix="electra.",
    config=(
        *SHAPE,
        field("embedding_size", "d_embedding", 128),
        field("hidden_size", "d_model", 256),
        field("num_attention_heads", "n_heads", 4),
        field("intermediate_size", "d_ff", 1024),
        field("max_position_embeddings", "max_positions", 512),
        of_class(DISCRIMINATOR, field("hidden_act", "pooler", "gelu", ACTIVATIONS)),
    ),
    rules=(
        *embedding("electra"),
        *same({"electra.embeddings_project": "encoder.embedding.project"}),
        *layers("electra"),
    ),
    heads={
        "mlm": same(
            {
                "generator_predictions.dense": "head.transform",
                "generator_predictions.LayerNorm": "head.norm",
                "generator_lm_head": "head.out",
            }
        ),
        "classifier": same({"classifier.dense": "head.pooler", "classifier.out_proj": "head.out"}),
        "tagger": DISCRIMINATES + TAGGER,
        "span": SPAN,
    },
    ignored=("electra.embeddings.position_ids",),
    carried=("discriminator_predictions.*", "generator_predictions.*", "generator_lm_head.*"),
)
