"""Granite: Llama with a factor on the embeddings, on the scores, on what each part adds and under the logits."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import Field, Power
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    EDGES,
    FEEDFORWARD,
    HEADS,
    IGNORED,
    NORMS,
    classes,
    shape,
)
from clearhead.hub.rope import Rope

GRANITE = Architecture(
    model_type="granite",
    classes=classes("Granite", sequence=False, token=False),
    prefix="model.",
    config=(
        *shape(),
        ACTIVATION,
        Rope(),
        *ATTENTION_BIAS,
        Field("mlp_bias", "feedforward_bias", False),
        Field("embedding_multiplier", "embedding_scale", 1.0),
        Field("residual_multiplier", "residual_scale", 1.0),
        Field("attention_multiplier", "attention_scale", 1.0),
        Power("logits_scaling", "logit_scale", -1, 1.0),
    ),
    rules=(*EDGES, *NORMS, *ATTENTION, *FEEDFORWARD),
    heads=HEADS,
    ignored=IGNORED,
)
