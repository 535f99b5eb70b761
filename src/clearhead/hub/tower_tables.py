"""Checkpoints of two towers: a table for each tower, as of any architecture, and one for what joins them."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clearhead.core.config import ModelConfig
from clearhead.errors import CheckpointError, ConfigError
from clearhead.hub.architecture import QUANTIZATION, Architecture
from clearhead.hub.fields import ACTIVATIONS, ConfigPart, Json, field, fixed, patches
from clearhead.hub.files import refuse
from clearhead.hub.rules import Rule, reshaped, same
from clearhead.hub.weights import Entry
from clearhead.variants.towers import TowersConfig

Tower = Literal["text", "image"]
SECTIONS: dict[Tower, str] = {"text": "text_config", "image": "vision_config"}  # of config.json
PREFIXES: dict[Tower, str] = {"text": "text_model.", "image": "vision_model."}  # of the tensors
KERNEL = reshaped(lambda config: (config.d_model, config.n_channels, config.patch_size, config.patch_size))


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
        older = theirs.get(f"{SECTIONS[name]}_dict")  # where it is there, transformers heeds it alone
        stated = older if older is not None else theirs.get(SECTIONS[name]) or {}
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
        refuse(
            theirs.get(QUANTIZATION),
            f"config.json has {QUANTIZATION}: weights of two towers must be floating point",
        )
        towers = {name: self.tower(name).read(self.section(theirs, name)) for name in SECTIONS}
        side = self.section(theirs, "image").get("image_size")
        frame = (side, side) if isinstance(side, int) else tuple(side) if side else None
        try:
            joint = self.read_joint(theirs, towers["text"], towers["image"])
            return TowersConfig(text=towers["text"], image=towers["image"], frame=frame, **joint)
        except ConfigError as error:
            raise CheckpointError(f"config.json describes a model that cannot be built: {error}") from None
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"config.json has a value of the wrong kind: {error}") from None

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
        found: dict[str, dict[str, Entry]] = {"text": {}, "image": {}, "joint": {}}
        for name, entry in entries.items():
            tower = next((one for one, prefix in PREFIXES.items() if name.startswith(prefix)), None)
            place = "joint" if name in joint else tower
            if place is None:
                raise CheckpointError(f"{folder}: no rule of {self.model_type} reads the tensor {name}")
            found[place][name] = entry
        return found

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


def block_rules(theirs: str, ours: str) -> tuple[Rule, ...]:
    """Return the rules of a stack's blocks."""
    layer, block = f"{theirs}encoder.layers.{{i}}", f"{ours}.blocks.{{i}}"
    projections = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}
    return same(
        {
            f"{layer}.layer_norm1": f"{block}.attention_residual.before",
            **{f"{layer}.self_attn.{a}": f"{block}.attention.{b}" for a, b in projections.items()},
            f"{layer}.layer_norm2": f"{block}.feedforward_residual.before",
            f"{layer}.mlp.fc1": f"{block}.feedforward.up",
            f"{layer}.mlp.fc2": f"{block}.feedforward.down",
        }
    )


def shape(
    width: int, layers: int, heads: int, ff: int, activation: str, eps: float, **ours: Any
) -> tuple[ConfigPart, ...]:
    """Return the parts that every tower has, with their values where config.json does not say."""
    return (
        fixed({"positions": "learned", "norm": "layernorm", "norm_position": "pre", "init": "bert", **ours}),
        field("hidden_size", "d_model", width),
        field("num_hidden_layers", "n_layers", layers),
        field("num_attention_heads", "n_heads", heads),
        field("intermediate_size", "d_ff", ff),
        field("hidden_act", "activation", activation, ACTIVATIONS),
        field("layer_norm_eps", "norm_eps", eps),
        field("attention_dropout", "attention_dropout", 0.0),
    )


def text_tower(
    kind: str, name: str, family: str, vocabulary: int, length: int, *more: ConfigPart
) -> Architecture:
    """Return the table of a tower of texts."""
    stack = "decoder" if family == "decoder" else "encoder"
    return Architecture(
        model_type=kind,
        classes={name: {"head": "none"}},
        config=(
            field("vocab_size", "vocab_size", vocabulary),
            field("max_position_embeddings", "max_positions", length),
            *more,
        ),
        rules=(
            Rule("text_model.embeddings.token_embedding.weight", (f"{stack}.embedding.front.tokens.weight",)),
            Rule("text_model.embeddings.position_embedding.weight", (f"{stack}.positions.table.weight",)),
            *block_rules("text_model.", stack),
            *same({"text_model.final_layer_norm": f"{stack}.norm"}),
        ),
        prefix=PREFIXES["text"],
        ignored=("*.position_ids",),
        named=True,
    )


def image_tower(kind: str, name: str, patch: int, class_token: bool, *more: ConfigPart) -> Architecture:
    """Return the table of a tower of images."""
    patched, placed = "vision_model.embeddings.patch_embedding", "vision_model.embeddings.position_embedding"
    front = "encoder.embedding.front"
    return Architecture(
        model_type=kind,
        classes={name: {"head": "none"}},
        config=(
            patches(224, patch, class_token, cut=True),
            field("num_channels", "n_channels", 3),
            *more,
        ),
        rules=(
            *((Rule("vision_model.embeddings.class_embedding", (f"{front}.class_token",)),) * class_token),
            Rule(f"{patched}.weight", (f"{front}.project.weight",), KERNEL),
            Rule(f"{patched}.bias", (f"{front}.project.bias",)),
            Rule(f"{placed}.weight", ("encoder.positions.table.weight",)),
            *same({"vision_model.pre_layrnorm": "encoder.embedding.norm"}),
            *block_rules("vision_model.", "encoder"),
            *same({"vision_model.post_layernorm": "encoder.norm"}),
        ),
        prefix=PREFIXES["image"],
        ignored=("*.position_ids",),
        named=True,
    )
