"""Images: ViT, and pairs of a text tower and an image tower, CLIP and SigLIP.

A checkpoint of two towers has a table for each tower, as any architecture, and one for what joins them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clearhead.core.config import ModelConfig
from clearhead.errors import CheckpointError
from clearhead.hub.architecture import QUANTIZATION, Architecture, reading_config
from clearhead.hub.bert import BERT_KEYS
from clearhead.hub.fields import LABELS, WHOLE_HEADS, ConfigPart, Json, field, fixed, keys, patches
from clearhead.hub.files import refuse, refuse_key
from clearhead.hub.preprocessor import CLIP_MEAN, CLIP_STD
from clearhead.hub.rules import JOINED, Rule, reshaped, same, stack_rules
from clearhead.hub.weights import Entry
from clearhead.variants.towers import HIGHEST, TowersConfig

KERNEL = reshaped(lambda config: (config.d_model, config.n_channels, config.patch_size, config.patch_size))
PRE_NORM: Json = {"positions": "learned", "norm": "layernorm", "norm_position": "pre", "init": "bert"}

# ViT: a pre-norm encoder of image patches with a class token. Patches are projected by a stored convolution.

ROWS = reshaped(lambda config: (1, -1, config.d_model))
FRONT = "encoder.embedding.front"


def patch_rules(theirs: str) -> tuple[Rule, ...]:
    """Return the rules of the projection of patches."""
    weight = Rule(f"{theirs}.weight", (f"{FRONT}.project.weight",), KERNEL)
    return (weight, Rule(f"{theirs}.bias", (f"{FRONT}.project.bias",)))


VIT = Architecture(
    model_type="vit",
    classes={
        "ViTForImageClassification": {
            **{"head": "classifier", "pooling": "cls", "pooler": "none", "head_bias": True}
        },
        "ViTModel": {"head": "embedding", "pooling": "cls", "pooler": "tanh"},
    },
    prefix="vit.",
    config=(
        fixed({**PRE_NORM, "family": "encoder", "input": "patches"}),
        fixed(only={"pooler_act": "tanh"}),
        patches(image=224, patch=16),
        WHOLE_HEADS,
        *keys({"n_channels": "num_channels"}, n_channels=3, d_model=768, n_layers=12, n_heads=12, d_ff=3072),
        *keys(activation="gelu", qkv_bias=True, norm_eps=1e-12, init_std=0.02),
        *keys(BERT_KEYS, dropout=0.0, attention_dropout=0.0),
        LABELS,
    ),
    rules=(
        Rule("vit.embeddings.cls_token", (f"{FRONT}.class_token",), ROWS),
        Rule("vit.embeddings.position_embeddings", ("encoder.positions.table.weight",), ROWS),
        *patch_rules("vit.embeddings.patch_embeddings.projection"),
        *stack_rules(
            "encoder",
            "vit.encoder.layer.{i}",
            **{"qkv": "attention.attention.{query,key,value}", "out": "attention.output.dense"},
            **{"mlp": "{intermediate,output}.dense", "pre_norms": "layernorm_{before,after}"},
            norm="vit.layernorm",
        ),
    ),
    heads={
        "classifier": same({"classifier": "head.out"}),
        "embedding": same({"vit.pooler.dense": "head.pooler"}),
    },
    carried=("vit.pooler.*",),
)

# Two towers -------------------------------------------------------------------------------------------------

Tower = Literal["text", "image"]
SECTIONS: dict[Tower, str] = {"text": "text_config", "image": "vision_config"}  # of config.json
PREFIXES: dict[Tower, str] = {"text": "text_model.", "image": "vision_model."}  # of the tensors


def stated_section(theirs: Json, name: Tower) -> Json:
    """Return what a config.json states of one tower."""
    older: Json | None = theirs.get(
        f"{SECTIONS[name]}_dict"
    )  # where it is there, transformers heeds it alone
    return older if older is not None else theirs.get(SECTIONS[name]) or {}


@dataclass(frozen=True)
class TowersTable:
    """Data alone: two architectures, how config.json joins them, and the tensors of neither."""

    model_type: str
    named: str  # the class of its checkpoints
    text: Architecture
    image: Architecture
    read_joint: Callable[[Json, ModelConfig, ModelConfig], Json]  # config.json -> fields of TowersConfig
    write_joint: Callable[[TowersConfig], tuple[Json, Json]]  # further keys of config.json, of text_config
    rules: tuple[Rule, ...]  # of tensors that belong to neither tower; operations read the image's config
    images: Mapping[str, Any]  # the preprocessor_config.json of a new model; sizes are added to it
    pads: bool = False  # texts are padded to the longest the model takes, and the padding is read

    def tower(self, name: Tower) -> Architecture:
        """Return the table of one tower."""
        return self.text if name == "text" else self.image

    def section(self, theirs: Json, name: Tower) -> Json:
        """Return the part of a config.json that is about one tower."""
        stated = stated_section(theirs, name)
        refuse(not isinstance(stated, dict), f"config.json has a {SECTIONS[name]} that is no table of fields")
        tower = self.tower(name)
        named = {"model_type": tower.model_type, "architectures": list(tower.classes)}
        return {**stated, **named}

    def read(self, theirs: Json) -> TowersConfig:
        """Return our config, from a config.json."""
        stated = (theirs.get("architectures") or [self.named])[0]
        refuse(
            stated != self.named,
            f'config.json names the class "{stated}": supported for {self.model_type} is {self.named}',
        )
        packed = theirs.get(QUANTIZATION)
        refuse_key(packed, QUANTIZATION, packed, "weights of two towers must be floating point")
        towers = {name: self.tower(name).read(self.section(theirs, name)) for name in SECTIONS}
        side = self.section(theirs, "image").get("image_size")
        frame = (side, side) if isinstance(side, int) else tuple(side) if side else None
        with reading_config():
            joint = self.read_joint(theirs, towers["text"], towers["image"])
            return TowersConfig(text=towers["text"], image=towers["image"], frame=frame, **joint)

    def write(self, config: TowersConfig) -> Json | None:
        """Return the config.json that is exactly this config, but for what only training heeds; or None."""
        towers = {"text": config.text, "image": config.image}
        sections: dict[str, Json] = {}
        for name in SECTIONS:
            if self.tower(name).differences(towers[name]) != []:
                return None
            written = self.tower(name).write(towers[name]) or {}
            sections[name] = {key: value for key, value in written.items() if key != "architectures"}
        more, of_text = self.write_joint(config)
        height, width = config.frame or (0, 0)
        sections["text"] |= of_text
        sections["image"]["image_size"] = height if height == width else [height, width]
        theirs = {
            "architectures": [self.named],
            "model_type": self.model_type,
            **{SECTIONS[name]: sections[name] for name in SECTIONS},
            **more,
        }
        try:
            back = self.read(theirs)
        except CheckpointError:
            return None
        return theirs if _joint(back) == _joint(config) else None

    def tensors(self, entries: Mapping[str, Entry], folder: Path) -> dict[str, dict[str, Entry]]:
        """Return the tensors of a file by where they belong: "text", "image", or "joint" for neither."""
        joint = {rule.theirs for rule in self.rules}
        by_tower: dict[str, dict[str, Entry]] = {"text": {}, "image": {}, "joint": {}}
        for name, entry in entries.items():
            tower = next(
                (tower_name for tower_name, prefix in PREFIXES.items() if name.startswith(prefix)), None
            )
            place = "joint" if name in joint else tower
            if place is None:
                raise CheckpointError(f"{folder}: no rule of {self.model_type} reads the tensor {name}")
            by_tower[place][name] = entry
        return by_tower

    def settings(self, config: TowersConfig) -> Json:
        """Return the preprocessor_config.json of a new model."""
        height, width = config.frame or (0, 0)
        sizes = {"height": height, "width": width}
        if not self.images.get("do_center_crop"):
            return {**self.images, "size": sizes}
        return {**self.images, "size": {"shortest_edge": min(height, width)}, "crop_size": sizes}


def _joint(config: TowersConfig) -> Json:
    """Return the fields that are not a tower's."""
    names = (each.name for each in dataclasses.fields(TowersConfig))
    return {name: getattr(config, name) for name in names if name not in SECTIONS}


def shape(
    width: int, layers: int, heads: int, wide: int, activation: str, eps: float, **ours: Any
) -> tuple[ConfigPart, ...]:
    """Return the parts that every tower has, with their values where config.json does not say."""
    return (
        fixed({**PRE_NORM, **ours}),
        *keys(d_model=width, n_layers=layers, n_heads=heads, d_ff=wide, activation=activation),
        *keys(norm_eps=eps, attention_dropout=0.0),
    )


LAYER = {"pre_norms": "layer_norm{1,2}", "qkvo": "self_attn.{q,k,v,out}_proj", "mlp": "mlp.fc{1,2}"}


def text_tower(
    kind: str, name: str, stack: str, vocabulary: int, length: int, *more: ConfigPart
) -> Architecture:
    """Return the table of a tower of texts."""
    embedding = "text_model.embeddings"
    return Architecture(
        model_type=kind,
        classes={name: {"head": "none"}},
        config=(*keys(vocab_size=vocabulary, max_positions=length), *more),
        rules=stack_rules(
            stack,
            "text_model.encoder.layers.{i}",
            **{"tokens": f"{embedding}.token_embedding", "positions": f"{embedding}.position_embedding"},
            **LAYER,
            norm="text_model.final_layer_norm",
        ),
        prefix=PREFIXES["text"],
        ignored=("*.position_ids",),
        named=True,
    )


def image_tower(
    kind: str, name: str, patch: int, class_token: bool, *more: ConfigPart, carried: tuple[str, ...] = ()
) -> Architecture:
    """Return the table of a tower of images."""
    embedding = "vision_model.embeddings"
    return Architecture(
        model_type=kind,
        classes={name: {"head": "none"}},
        config=(patches(224, patch, class_token, cut=True), field("num_channels", "n_channels", 3), *more),
        rules=(
            *((Rule(f"{embedding}.class_embedding", (f"{FRONT}.class_token",)),) * class_token),
            *patch_rules(f"{embedding}.patch_embedding"),
            *stack_rules(
                "encoder",
                "vision_model.encoder.layers.{i}",
                **{
                    "positions": f"{embedding}.position_embedding",
                    "embedding_norm": "vision_model.pre_layrnorm",
                },
                **LAYER,
                norm="vision_model.post_layernorm",
            ),
        ),
        prefix=PREFIXES["image"],
        ignored=("*.position_ids",),
        carried=carried,
        named=True,
    )


# CLIP: a causal text tower whose last word is the end token's, an image tower with a class token. A linear
# layer without bias leads from each to the common space.

END, OLD_END = 49407, 2  # with the second, which was a mistake once, the highest id of a text is its end


def _read_clip(theirs: Json, text: ModelConfig, image: ModelConfig) -> dict[str, Any]:
    end = stated_section(theirs, "text").get("eos_token_id", END)
    refuse_key(type(end) is not int, "text_config.eos_token_id", end, "it must be one id")
    width = theirs.get("projection_dim", 512)
    return {"width": width, "end_id": HIGHEST if end == OLD_END else end, "loss": "softmax"}


def _write_clip(config: TowersConfig) -> tuple[Json, Json]:
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
    read_joint=_read_clip,
    write_joint=_write_clip,
    rules=(
        Rule("text_projection.weight", ("text_out.weight",)),
        Rule("visual_projection.weight", ("image_out.weight",)),
        Rule("logit_scale", ("logit_scale",)),
    ),
    images={
        **{"image_processor_type": "CLIPImageProcessor", "do_resize": True, "resample": 3},
        **{"do_center_crop": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
        **{"image_mean": CLIP_MEAN, "do_convert_rgb": True, "image_std": CLIP_STD},
    },
)

# SigLIP: both towers see all; a text is its last slot, padding too, and an image what a learned query finds.
# Texts are therefore all of one length. The text's linear layer leads to the width of the image tower.

HEAD = "vision_model.head"
QUERY = reshaped(lambda config: (1, 1, config.d_model))


def _read_siglip(theirs: Json, text: ModelConfig, image: ModelConfig) -> dict[str, Any]:
    width = stated_section(theirs, "text").get("projection_size")
    projections = {"text_projection": "bias", "image_projection": "none"}
    return {"width": width or text.d_model, "loss": "sigmoid", "pooling": "attention", **projections}


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
        carried=(f"{HEAD}.*",),
    ),
    read_joint=_read_siglip,
    write_joint=lambda config: ({}, {"projection_size": config.width}),
    rules=(
        *same({"text_model.head": "text_out"}),
        Rule(f"{HEAD}.probe", ("image_pool.query",), QUERY),
        *(
            Rule(
                f"{HEAD}.attention.in_proj_{kind}",
                tuple(f"image_pool.attention.{name}.{kind}" for name in "qkv"),
                JOINED,
            )
            for kind in ("weight", "bias")
        ),
        *same(
            {
                f"{HEAD}.attention.out_proj": "image_pool.attention.out",
                f"{HEAD}.layernorm": "image_pool.norm",
                f"{HEAD}.mlp.fc{{1,2}}": "image_pool.feedforward.{up,down}",
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
