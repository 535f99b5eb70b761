"""SigLIP: both towers see all; a text is its last slot, padding too, and an image what a learned query finds.

Texts are therefore all of one length. The text's linear layer leads to the width of the image tower.
"""

from typing import Any

from clearhead.core.config import ModelConfig
from clearhead.hub.fields import WHOLE_HEADS, Json, fixed
from clearhead.hub.rules import JOINED, Rule, reshaped, same
from clearhead.hub.tower_tables import TowersTable, image_tower, shape, text_tower
from clearhead.variants.towers import TowersConfig

HEAD = "vision_model.head"
QUERY = reshaped(lambda config: (1, 1, config.d_model))


def _read(theirs: Json, text: ModelConfig, image: ModelConfig) -> dict[str, Any]:
    older = theirs.get("text_config_dict")
    width = (older if older is not None else theirs.get("text_config") or {}).get("projection_size")
    projections = {"text_projection": "bias", "image_projection": "none"}
    return {"width": width or text.d_model, "loss": "sigmoid", "pooling": "attention", **projections}


def _write(config: TowersConfig) -> tuple[Json, Json]:
    return {}, {"projection_size": config.width}


SIGLIP = TowersTable(
    model_type="siglip",
    named="SiglipModel",
    text=text_tower(
        *("siglip_text_model", "SiglipTextModel", "encoder", 32000, 64),
        *shape(768, 12, 12, 3072, "gelu_pytorch_tanh", 1e-6, family="encoder"),
    ),
    image=image_tower(
        *("siglip_vision_model", "SiglipVisionModel", 16, False),
        fixed(only={"vision_use_head": True}),
        *shape(768, 12, 12, 3072, "gelu_pytorch_tanh", 1e-6, family="encoder", input="patches"),
        WHOLE_HEADS,
    ),
    read_joint=_read,
    write_joint=_write,
    rules=(
        *same({"text_model.head": "text_out"}),
        Rule(f"{HEAD}.probe", ("image_pool.query",), QUERY),
        Rule(
            f"{HEAD}.attention.in_proj_weight",
            tuple(f"image_pool.attention.{name}.weight" for name in "qkv"),
            JOINED,
        ),
        Rule(
            f"{HEAD}.attention.in_proj_bias",
            tuple(f"image_pool.attention.{name}.bias" for name in "qkv"),
            JOINED,
        ),
        *same(
            {
                f"{HEAD}.attention.out_proj": "image_pool.attention.out",
                f"{HEAD}.layernorm": "image_pool.norm",
                f"{HEAD}.mlp.fc1": "image_pool.feedforward.up",
                f"{HEAD}.mlp.fc2": "image_pool.feedforward.down",
            }
        ),
        Rule("logit_scale", ("logit_scale",)),
        Rule("logit_bias", ("logit_bias",)),
    ),
    images={
        **{"image_processor_type": "SiglipImageProcessor", "do_resize": True, "resample": 3},
        **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True},
        **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    },
    pads=True,
)
