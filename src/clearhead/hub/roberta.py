"""RoBERTa: BERT's encoder, with positions that start at padding id + 1 and heads of its own."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import SHAPE, classes, embedding, heads, layers, masked_head
from clearhead.hub.fields import positions_after_padding
from clearhead.hub.rules import same

# Its head has GELU, whatever activation the layers have.
MASKED = {"head": "mlm", "head_transform": True, "head_bias": True, "head_activation": "gelu"}

ROBERTA = Architecture(
    model_type="roberta",
    classes=classes("Roberta", ForMaskedLM=MASKED),
    prefix="roberta.",
    config=(*SHAPE, positions_after_padding(rows=512, padding=1)),
    rules=embedding("roberta") + layers("roberta"),
    heads={
        **heads(masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head"), "roberta.pooler.dense"),
        "classifier": same({"classifier.dense": "head.pooler", "classifier.out_proj": "head.out"}),
    },
    ignored=("roberta.embeddings.position_ids",),
    carried=("roberta.pooler.*",),
)
