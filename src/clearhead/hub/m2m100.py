"""M2M-100 and NLLB: a pre-norm encoder-decoder with sinusoidal positions that begin after the padding id."""

from clearhead.hub.architecture import Architecture
from clearhead.hub.bart import BODY, OLD, SHAPE, TABLES, TYING, classes
from clearhead.hub.fields import ACTIVATIONS, field, fixed, positions_after_padding, scaled

M2M100 = Architecture(
    model_type="m2m_100",
    classes=classes("M2M100"),
    prefix="model.",
    config=(
        fixed(
            {
                "family": "encoder-decoder",
                "positions": "sinusoidal",
                "sinusoid_layout": "half",
                "sinusoid_ends": True,
                "norm": "layernorm",
                "norm_position": "pre",
                "head_bias": False,
            }
        ),
        *SHAPE,
        field("vocab_size", "vocab_size", 128112),
        positions_after_padding(rows=1024, padding=1, counted=False),
        field("activation_function", "activation", "relu", ACTIVATIONS),
        field("attention_dropout", "attention_dropout", 0.1),
        scaled("scale_embedding", "embedding_scale", 0.5, default=True, width="d_model"),
        TYING,
    ),
    rules=(*TABLES, *BODY),
    ignored=(*OLD, "*.embed_positions.weights"),
)
