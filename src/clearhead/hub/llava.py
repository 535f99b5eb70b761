"""LLaVA: a decoder, an image tower, and two linear layers that make tokens of what the tower saw.

Decoder and tower are read and written by their own tables; here is how one config.json and one set of tensors
hold both. `vision_feature_layer` and `vision_feature_select_strategy` say which states of the tower are read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.core.config import ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub import llama, vision
from clearhead.hub.architecture import QUANTIZATION, Architecture, reading_config
from clearhead.hub.fields import ACTIVATIONS, Json
from clearhead.hub.files import refuse, refuse_key
from clearhead.hub.rules import Rule, same
from clearhead.hub.vision import SECTIONS, Tower
from clearhead.hub.weights import Entry
from clearhead.variants.images import ImageConfig

LARGE: Json = {  # the tower of a config.json that states none
    **{"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14},
    **{"image_size": 336, "num_hidden_layers": 24, "num_attention_heads": 16},
}
STRATEGIES = {"default": True, "full": False}  # whether the first state of an image is left out
TOKEN, ALIAS = "image_token_index", "image_token_id"


@dataclass(frozen=True)
class ImagesTable:
    """Data alone: the architectures that the decoder and the tower may have, and the tensors of neither."""

    model_type: str
    named: str  # the class of its checkpoints
    processor: str  # transformers' class of what prepares its inputs
    texts: Mapping[str, Architecture]  # the first is that of a config.json that names none
    towers: Mapping[str, Architecture]
    rules: tuple[Rule, ...]
    places: tuple[
        tuple[str, Tower | str, str], ...
    ]  # how names begin, whose tensor that is, and its own name
    prefixes: Mapping[str, str]  # that are put before the names of each when they are written

    def section(self, theirs: Json, name: Tower) -> Json:
        """Return the part of a config.json that is about the decoder or the tower, as if it were alone."""
        stated, tables = theirs.get(SECTIONS[name]), self.texts if name == "text" else self.towers
        stated = (LARGE if name == "image" else {}) if stated is None else stated
        refuse(not isinstance(stated, dict), f"config.json has a {SECTIONS[name]} that is no table of fields")
        kind = stated.get("model_type", next(iter(tables)))
        key = f"{SECTIONS[name]}.model_type"
        refuse_key(kind not in tables, key, kind, f"supported in {self.model_type} are {', '.join(tables)}")
        own: Json = {"model_type": kind, "architectures": list(tables[kind].classes)[:1]}
        if name == "text" and theirs.get("tie_word_embeddings"):
            own["tie_word_embeddings"] = True
        without = ("vision_use_head",) if name == "image" else ()  # states are read, and no pooled vector
        return {**{key: value for key, value in stated.items() if key not in without}, **own}

    def read(self, theirs: Json) -> tuple[ModelConfig, ImageConfig]:
        """Return the configs of the decoder and of the image encoder, from a config.json."""
        stated = (theirs.get("architectures") or [self.named])[0]
        known = f"supported for {self.model_type} is {self.named}"
        refuse(stated != self.named, f'config.json names the class "{stated}": {known}')
        packed = theirs.get(QUANTIZATION)
        refuse_key(
            packed, QUANTIZATION, packed, "weights of a model that reads images must be floating point"
        )
        text, image = (self.section(theirs, name) for name in SECTIONS)
        with reading_config():
            model = self.texts[text["model_type"]].read(text)
            tower = self.towers[image["model_type"]].read(image)
            return model, ImageConfig(tower=tower, width=model.d_model, **_joint(theirs, model, image))

    def write(self, text: Json, model: ModelConfig, config: ImageConfig) -> Json | None:
        """Return the config.json of a decoder, whose own is `text`, with such an image encoder; or None."""
        tower = next((one for one in self.towers.values() if one.differences(config.tower) == []), None)
        if tower is None:
            return None
        height, width = config.frame or (0, 0)
        side = {"image_size": height if height == width else [height, width]}
        sections = {"text_config": text, "vision_config": {**(tower.write(config.tower) or {}), **side}}
        theirs = {
            "architectures": [self.named],
            "model_type": self.model_type,
            **{
                name: {k: v for k, v in part.items() if k != "architectures"}
                for name, part in sections.items()
            },
            TOKEN: config.token_id,
            "image_seq_length": config.count,
            "vision_feature_layer": config.layers[0] if len(config.layers) == 1 else list(config.layers),
            "vision_feature_select_strategy": "default" if config.skip_first else "full",
            "projector_hidden_act": next(
                act for act, ours in ACTIVATIONS.items() if ours == config.activation
            ),
            "multimodal_projector_bias": config.bias,
            "tie_word_embeddings": model.tie_embeddings,
        }
        try:
            return theirs if self.read(theirs) == (model, config) else None
        except CheckpointError:
            return None

    def tensors(self, entries: Mapping[str, Entry], folder: Path) -> dict[str, dict[str, Entry]]:
        """Return the tensors of a file, under their own names, by where they belong; "joint" for neither."""
        found: dict[str, dict[str, Entry]] = {"text": {}, "image": {}, "joint": {}}
        for name, entry in entries.items():
            for beginning, place, own in self.places:
                if match := re.match(beginning, name):
                    found[place][own + name[match.end() :]] = entry
                    break
            else:
                raise CheckpointError(f"{folder}: no rule of {self.model_type} reads the tensor {name}")
        return found


def _joint(theirs: Json, model: ModelConfig, image: Json) -> dict[str, Any]:
    """Return the fields that are neither the decoder's nor the tower's."""
    token = theirs.get(ALIAS, theirs.get(TOKEN, 32000))
    refuse_key(theirs.get(TOKEN, token) != token, TOKEN, theirs.get(TOKEN), f"and {ALIAS} is {token}")
    among = type(token) is int and 0 <= token < model.vocab_size
    refuse_key(not among, TOKEN, token, f"it must be an id of the vocabulary, 0 to {model.vocab_size - 1}")
    layer, bias = theirs.get("vision_feature_layer", -2), theirs.get("multimodal_projector_bias", True)
    how = theirs.get("vision_feature_select_strategy", "default")
    act = theirs.get("projector_hidden_act", "gelu")
    for key, value, known in (
        ("vision_feature_select_strategy", how, STRATEGIES),
        ("projector_hidden_act", act, ACTIVATIONS),
        ("multimodal_projector_bias", bias, (True, False)),
    ):
        refuse_key(value not in known, key, value, f"choose from {', '.join(map(str, known))}")
    layers = layer if isinstance(layer, list) else [layer]
    whole = all(type(number) is int for number in layers)
    refuse_key(not whole, "vision_feature_layer", layer, "it must be a whole number, or several")
    side = image.get("image_size", 224)
    return {
        **{"token_id": token, "layers": tuple(layers), "skip_first": STRATEGIES[how], "bias": bool(bias)},
        "activation": ACTIVATIONS[act],
        "frame": (side, side) if isinstance(side, int) else tuple(side),
    }


LLAVA = ImagesTable(
    model_type="llava",
    named="LlavaForConditionalGeneration",
    processor="LlavaProcessor",
    # Others scale what the table of tokens gives, or logits, elsewhere than transformers does it here.
    texts={table.model_type: table for table in (llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3)},
    towers={table.model_type: table for table in (vision.CLIP.image, vision.SIGLIP.image)},
    rules=same({"multi_modal_projector.linear_{1,2}": "{up,down}"}),
    places=(  # as they were written first, and as newer files have them
        (r"(model\.)?language_model\.(model\.)?(?=lm_head\.)|(?=lm_head\.)", "text", ""),
        (r"(model\.)?language_model\.(model\.)?", "text", "model."),
        (r"(model\.)?vision_tower\.(vision_model\.)?", "image", vision.PREFIXES["image"]),
        (r"(model\.)?(?=multi_modal_projector\.)", "joint", ""),
    ),
    prefixes={"text": "language_model.", "image": "vision_tower.vision_model."},
)
