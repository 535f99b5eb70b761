"""OLMo 2: Llama with its norms after each part instead of before, and norms over queries and keys."""

from clearhead.hub.fields import fixed
from clearhead.hub.llama import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    BLOCK,
    EDGES,
    FEEDFORWARD,
    QK_NORMS,
    THEIRS,
    classes,
    llama_like,
    shape,
)
from clearhead.hub.rope import rope
from clearhead.hub.rules import same

NORMS = same(
    {
        f"{THEIRS}.post_attention_layernorm": f"{BLOCK}.attention_residual.inside",
        f"{THEIRS}.post_feedforward_layernorm": f"{BLOCK}.feedforward_residual.inside",
    }
)

OLMO2 = llama_like(
    "olmo2",
    classes("Olmo2", token=False),
    *shape(eps=1e-5, vocab_size=50304),
    ACTIVATION,
    rope(),
    *ATTENTION_BIAS,
    fixed({"norm_position": "output", "qk_norm": "full"}),
    rules=(*EDGES, *ATTENTION, *QK_NORMS, *FEEDFORWARD, *NORMS),
)
