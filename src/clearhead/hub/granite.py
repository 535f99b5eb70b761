"""Granite: Llama with a factor on the embeddings, on the scores, on what each part adds and under the logits."""

from clearhead.hub.fields import Field, Power
from clearhead.hub.llama import ACTIVATION, ATTENTION_BIAS, FEEDFORWARD_BIAS, classes, llama_like, shape
from clearhead.hub.rope import Rope

GRANITE = llama_like(
    "granite",
    classes("Granite", sequence=False, token=False),
    *shape(),
    ACTIVATION,
    Rope(),
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    Field("embedding_multiplier", "embedding_scale", 1.0),
    Field("residual_multiplier", "residual_scale", 1.0),
    Field("attention_multiplier", "attention_scale", 1.0),
    Power("logits_scaling", "logit_scale", -1, 1.0),
)
