"""CLIP: a causal text tower whose last word is the end token's, an image tower with a class token.

A linear layer without bias leads from each to the common space.
"""

from typing import Any

from clearhead.core.config import ModelConfig
from clearhead.hub.fields import WHOLE_HEADS, Json, fixed
from clearhead.hub.files import refuse
from clearhead.hub.rules import Rule
from clearhead.hub.tower_tables import TowersTable, image_tower, shape, text_tower
from clearhead.variants.towers import HIGHEST, TowersConfig

END, OLD_END = 49407, 2  # with the second, which was a mistake once, the highest id of a text is its end


def _read(theirs: Json, text: ModelConfig, image: ModelConfig) -> dict[str, Any]:
    older = theirs.get("text_config_dict")
    end = (older if older is not None else theirs.get("text_config") or {}).get("eos_token_id", END)
    refuse(type(end) is not int, f"config.json has eos_token_id {end!r} in text_config: it must be one id")
    width = theirs.get("projection_dim", 512)
    return {"width": width, "end_id": HIGHEST if end == OLD_END else end, "loss": "softmax"}


def _write(config: TowersConfig) -> tuple[Json, Json]:
    end = OLD_END if config.end_id == HIGHEST else config.end_id
    return {"projection_dim": config.width}, {"eos_token_id": end, "projection_dim": config.width}


CLIP = TowersTable(
    model_type="clip",
    named="CLIPModel",
    text=text_tower(
        *("clip_text_model", "CLIPTextModel", "decoder", 49408, 77),
        *shape(512, 12, 8, 2048, "quick_gelu", 1e-5, family="decoder"),
    ),
    image=image_tower(
        *("clip_vision_model", "CLIPVisionModel", 32, True),
        fixed({"embedding_norm": True, "patch_bias": False}),
        *shape(768, 12, 12, 3072, "quick_gelu", 1e-5, family="encoder", input="patches"),
        WHOLE_HEADS,
    ),
    read_joint=_read,
    write_joint=_write,
    rules=(
        Rule("text_projection.weight", ("text_out.weight",)),
        Rule("visual_projection.weight", ("image_out.weight",)),
        Rule("logit_scale", ("logit_scale",)),
    ),
    images={
        **{"image_processor_type": "CLIPImageProcessor", "do_resize": True, "resample": 3},
        **{"do_center_crop": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        **{"image_mean": [0.48145466, 0.4578275, 0.40821073], "do_convert_rgb": True},
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
)
