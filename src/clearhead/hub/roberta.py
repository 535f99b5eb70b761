"""RoBERTa: BERT's encoder, with positions that count from the row after the padding id's and heads of its own."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.bert import SHAPE, SPAN, TAGGER, classes, embedding, layers, masked_head
from clearhead.hub.rules import same
from clearhead.hub.tables import PositionsAfterPadding

MASKED = {
    "head": "mlm",
    "head_transform": True,
    "head_bias": True,
    "head_activation": "gelu",
}  # whatever the layers have

ROBERTA = Architecture(
    model_type="roberta",
    classes={**classes("Roberta"), "RobertaForMaskedLM": MASKED},
    prefix="roberta.",
    config=(*SHAPE, PositionsAfterPadding(rows=512, padding=1)),
    rules=embedding("roberta") + layers("roberta"),
    heads={
        "mlm": masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head"),
        "classifier": same({"classifier.dense": "head.pooler", "classifier.out_proj": "head.out"}),
        "tagger": TAGGER,
        "span": SPAN,
        "embedding": same({"roberta.pooler.dense": "head.pooler"}),
    },
    ignored=("roberta.embeddings.position_ids",),
    carried=("roberta.pooler.*",),
)
