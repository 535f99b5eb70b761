"""OLMo 2: Llama with its norms after each part instead of before, and a norm over all queries and over all keys."""

from __future__ import annotations

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import Fixed
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    BLOCK,
    EDGES,
    FEEDFORWARD,
    HEADS,
    IGNORED,
    THEIRS,
    classes,
    shape,
)
from clearhead.hub.qwen import QK_NORMS
from clearhead.hub.rope import Rope
from clearhead.hub.rules import same

OLMO2 = Architecture(
    model_type="olmo2",
    classes=classes("Olmo2", token=False),
    prefix="model.",
    config=(
        *shape(eps=1e-5, vocab_size=50304),
        ACTIVATION,
        Rope(),
        *ATTENTION_BIAS,
        Fixed({"norm_position": "output", "qk_norm": "full"}),
    ),
    rules=(
        *EDGES,
        *ATTENTION,
        *QK_NORMS,
        *FEEDFORWARD,
        *same(
            {
                f"{THEIRS}.post_attention_layernorm": f"{BLOCK}.attention_residual.inside",
                f"{THEIRS}.post_feedforward_layernorm": f"{BLOCK}.feedforward_residual.inside",
            }
        ),
    ),
    heads=HEADS,
    ignored=IGNORED,
)
