"""ViT: a pre-norm encoder of image patches with a class token.

Its patch projection is stored as a convolution.
"""

from clearhead.hub.architecture import Architecture
from clearhead.hub.fields import ACTIVATIONS, LABELS, WHOLE_HEADS, field, fixed, patches
from clearhead.hub.rules import Rule, reshaped, same

BLOCK, THEIRS = "encoder.blocks.{i}", "vit.encoder.layer.{i}"
KERNEL = reshaped(lambda config: (config.d_model, config.n_channels, config.patch_size, config.patch_size))
ROWS = reshaped(lambda config: (1, -1, config.d_model))

VIT = Architecture(
    model_type="vit",
    classes={
        "ViTForImageClassification": {
            "head": "classifier",
            "pooling": "cls",
            "pooler": "none",
            "head_bias": True,
        },
        "ViTModel": {"head": "embedding", "pooling": "cls", "pooler": "tanh"},
    },
    prefix="vit.",
    config=(
        fixed(
            {
                "family": "encoder",
                "input": "patches",
                "positions": "learned",
                "norm": "layernorm",
                "norm_position": "pre",
                "init": "bert",
            }
        ),
        fixed(only={"pooler_act": "tanh"}),
        patches(image=224, patch=16),
        WHOLE_HEADS,
        field("num_channels", "n_channels", 3),
        field("hidden_size", "d_model", 768),
        field("num_hidden_layers", "n_layers", 12),
        field("num_attention_heads", "n_heads", 12),
        field("intermediate_size", "d_ff", 3072),
        field("hidden_act", "activation", "gelu", ACTIVATIONS),
        field("qkv_bias", "qkv_bias", True),
        field("layer_norm_eps", "norm_eps", 1e-12),
        field("hidden_dropout_prob", "dropout", 0.0),
        field("attention_probs_dropout_prob", "attention_dropout", 0.0),
        field("initializer_range", "init_std", 0.02),
        LABELS,
    ),
    rules=(
        Rule("vit.embeddings.cls_token", ("encoder.embedding.front.class_token",), ROWS),
        Rule("vit.embeddings.position_embeddings", ("encoder.positions.table.weight",), ROWS),
        Rule(
            "vit.embeddings.patch_embeddings.projection.weight",
            ("encoder.embedding.front.project.weight",),
            KERNEL,
        ),
        Rule("vit.embeddings.patch_embeddings.projection.bias", ("encoder.embedding.front.project.bias",)),
        *same(
            {
                f"{THEIRS}.layernorm_before": f"{BLOCK}.attention_residual.before",
                f"{THEIRS}.attention.attention.query": f"{BLOCK}.attention.q",
                f"{THEIRS}.attention.attention.key": f"{BLOCK}.attention.k",
                f"{THEIRS}.attention.attention.value": f"{BLOCK}.attention.v",
                f"{THEIRS}.attention.output.dense": f"{BLOCK}.attention.out",
                f"{THEIRS}.layernorm_after": f"{BLOCK}.feedforward_residual.before",
                f"{THEIRS}.intermediate.dense": f"{BLOCK}.feedforward.up",
                f"{THEIRS}.output.dense": f"{BLOCK}.feedforward.down",
                "vit.layernorm": "encoder.norm",
            }
        ),
    ),
    heads={
        "classifier": same({"classifier": "head.out"}),
        "embedding": same({"vit.pooler.dense": "head.pooler"}),
    },
    carried=("vit.pooler.*",),
)
