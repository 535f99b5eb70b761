"""Granite: Llama with factors on the embeddings, the scores, the residual branches and the logits."""

from clearhead.hub.fields import field, power
from clearhead.hub.llama import ACTIVATION, ATTENTION_BIAS, FEEDFORWARD_BIAS, classes, llama_like, shape
from clearhead.hub.rope import rope

GRANITE = llama_like(
    "granite",
    classes("Granite", sequence=False, token=False),
    *shape(),
    ACTIVATION,
    rope(),
    *ATTENTION_BIAS,
    FEEDFORWARD_BIAS,
    field("embedding_multiplier", "embedding_scale", 1.0),
    field("residual_multiplier", "residual_scale", 1.0),
    field("attention_multiplier", "attention_scale", 1.0),
    power("logits_scaling", "logit_scale", -1, 1.0),
)
