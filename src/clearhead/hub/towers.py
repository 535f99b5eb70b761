"""Directories of two towers, or of a decoder with one: each part as any model, and what joins them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError
from clearhead.hub import checkpoint
from clearhead.hub.architecture import common_dtype
from clearhead.hub.checkpoint import Description
from clearhead.hub.fields import Json
from clearhead.hub.files import read_json, read_json_if_any, refuse
from clearhead.hub.registry import IMAGES, TOWERS
from clearhead.hub.rules import matches
from clearhead.hub.vision import PREFIXES, Tower, TowersTable
from clearhead.hub.vision_language import LLAVA, ImagesTable
from clearhead.hub.weights import Outgoing, cast, finite, open_weights
from clearhead.variants.images import ImageConfig, ImageEncoder
from clearhead.variants.towers import Towers, TowersConfig

OF_TOWERS = ("text.", "image.")  # how the names of a tower's parameters begin


@dataclass(frozen=True)
class TowersDescription:
    """What the config.json of two towers says."""

    theirs: dict[str, Any]
    config: TowersConfig
    table: TowersTable

    def tower(self, name: Tower) -> checkpoint.Description:
        """Return the description of one tower, as if it were alone."""
        section, architecture = self.table.section(self.theirs, name), self.table.tower(name)
        config = self.config.text if name == "text" else self.config.image
        return checkpoint.Description(section, config, architecture.model_type)


def has_towers(folder: Path) -> bool:
    """Return whether a directory holds two towers."""
    kind = read_json_if_any(folder / "config.json").get("model_type") if folder.is_dir() else None
    return isinstance(kind, str) and kind in TOWERS


def describe_towers(folder: Path) -> TowersDescription:
    """Read the config.json of two towers."""
    theirs = read_json(folder / "config.json")
    table = TOWERS[theirs["model_type"]]
    return TowersDescription(theirs, table.read(theirs), table)


def new_description(config: TowersConfig) -> TowersDescription:
    """Return what towers that were built here are saved as: the table that is exactly their config."""
    for table in TOWERS.values():
        theirs = table.write(config)
        if theirs is not None:
            return TowersDescription(theirs, config, table)
    raise CheckpointError(
        f"no architecture of two towers is exactly this one ({', '.join(TOWERS)} were tried): "
        "save its towers, m.text and m.image"
    )


class JoinedTowers(Towers):
    """Two towers with the config.json that they came with, or that is written for them."""

    def __init__(
        self,
        config: TowersConfig,
        text: Transformer | None = None,
        image: Transformer | None = None,
        description: TowersDescription | None = None,
    ) -> None:
        super().__init__(config, text, image)
        self.description = new_description(config) if description is None else description

    @property
    def theirs(self) -> dict[str, Any]:
        """The config.json."""
        return self.description.theirs

    def outgoing(self, dtype: torch.dtype | None = None) -> dict[str, Outgoing]:
        """Return the tensors that the towers are written as, by name; sources are names of parameters."""
        parameters, tensors = dict(self.named_parameters()), dict[str, Outgoing]()
        towers: tuple[tuple[Tower, Transformer], ...] = (("text", self.text), ("image", self.image))
        for name, tower in towers:
            for bare, tensor in checkpoint.outgoing(tower, self.description.tower(name), dtype).items():
                sources = tuple(f"{name}.{source}" for source in tensor.sources)
                tensors[PREFIXES[name] + bare] = dataclasses.replace(tensor, sources=sources)
        own = [name for name in parameters if not name.startswith(OF_TOWERS)]
        for rule in matches(self.description.table.rules, own):
            tensors[rule.theirs] = checkpoint.outgoing_tensor(rule, parameters, self.config.image, dtype)
        return tensors


@torch.inference_mode(False)
def load_towers(
    folder: Path, dtype: torch.dtype | None = None, mapped: bool = True, check_finite: bool = True
) -> JoinedTowers:
    """Return the towers of a directory, on the CPU; see `checkpoint.load_model`."""
    description = describe_towers(folder)
    table, config = description.table, description.config
    entries = open_weights(folder, mapped)
    dtype = dtype or common_dtype(description.theirs, entries.values())
    by_tower = table.tensors(entries, folder)
    how = (dtype, mapped)
    text, image = (
        checkpoint.load_model(folder, description.tower(tower), *how, by_tower[tower], check_finite)[0]
        for tower in ("text", "image")
    )
    model = JoinedTowers(config, text, image, description)
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    shapes = {name: tuple(x.shape) for name, x in parameters.items() if not name.startswith(OF_TOWERS)}
    for rule in matches(table.rules, shapes):
        refuse(
            rule.theirs not in by_tower["joint"],
            f"{folder}: no tensor fills {rule.ours[0]}: {rule.theirs} is missing, the file is incomplete",
        )
        entry = by_tower["joint"].pop(rule.theirs)
        tensors = checkpoint.Unread(folder, config.image, shapes, []).read(rule, entry)
        if check_finite:
            finite(folder, rule.theirs, tensors)
        whole = [cast(x, dtype or entry.dtype, rule.theirs).clone() for x in tensors]
        checkpoint.put_parameters(modules, dict(zip(rule.ours, whole)))
    for name in [*by_tower["joint"]][:1]:
        raise CheckpointError(f"{folder}: tensor {name} has no place: config.json and weights do not fit")
    return model.eval()


def has_images(folder: Path) -> bool:
    """Return whether a directory holds a decoder that reads images."""
    kind = read_json_if_any(folder / "config.json").get("model_type") if folder.is_dir() else None
    return isinstance(kind, str) and kind in IMAGES


class JoinedImages(ImageEncoder):
    """The image encoder of a decoder, with the config.json that both came with."""

    def __init__(
        self,
        config: ImageConfig,
        tower: Transformer | None = None,
        theirs: Json | None = None,
        table: ImagesTable = LLAVA,
        tower_description: Description | None = None,
    ) -> None:
        super().__init__(config, tower)
        self.theirs, self.table, self.tower_description = theirs, table, tower_description

    @property
    def fact(self) -> str:
        """What to know of it at a glance."""
        tower, count = self.config.tower, sum(weight.numel() for weight in self.parameters())
        size = f"{tower.n_layers} layers, d_model {tower.d_model}, {count:,} parameters"
        if self.config.any_size:
            return f"a token for each {self.config.multiple} x {self.config.multiple} pixels, by {size}"
        return f"{self.config.count} tokens for each{' tile' if self.table.prompt else ''}, by {size}"

    def processor(self, token: str | None) -> Json:
        """Return the processor_config.json, by which transformers counts the tokens of an image."""
        return self.table.processor(self.config, token)

    def saved(
        self, text: Description, decoder: Mapping[str, Outgoing], dtype: torch.dtype | None = None
    ) -> tuple[Json, dict[str, Outgoing]]:
        """Return config.json and tensors of a decoder, which alone is saved as `text`, with this encoder.

        Sources are names of parameters, those of the encoder behind "image.".
        """
        kept = self.theirs if self.theirs and self.table.read(self.theirs)[0] == text.config else None
        theirs = kept or self.table.write(text.theirs, text.config, self.config)
        refuse(
            theirs is None,
            f"{self.table.model_type} has no decoder like this one (saved as {text.kind}), or no such tower: "
            "leave out what changed it, or save the decoder alone, with image_encoder None",
        )
        assert theirs is not None
        image = self.table.section(theirs, "image")
        tower = self.tower_description or Description(image, self.config.tower, image["model_type"])
        tensors = {self.table.name_in_file("text", bare): tensor for bare, tensor in decoder.items()}
        for bare, tensor in checkpoint.outgoing(self.tower, tower, dtype).items():
            tensors[self.table.name_in_file("image", bare)] = _renamed(tensor, "image.tower.")
        own = dict(self.named_parameters())
        for rule in matches(self.table.rules, own):
            tensor = checkpoint.outgoing_tensor(rule, own, self.config.tower, dtype)
            tensors[self.table.name_in_file("joint", rule.theirs)] = _renamed(tensor, "image.")
        return theirs, tensors


def _renamed(tensor: Outgoing, prefix: str) -> Outgoing:
    return dataclasses.replace(tensor, sources=tuple(prefix + source for source in tensor.sources))


@torch.inference_mode(False)
def load_with_images(
    folder: Path, dtype: torch.dtype | None = None, mapped: bool = True, check_finite: bool = True
) -> tuple[Transformer, Description, JoinedImages]:
    """Return the decoder of a directory, what it alone is saved as, and its image encoder, on the CPU."""
    theirs = read_json(folder / "config.json")
    table = IMAGES[theirs["model_type"]]
    _, config = table.read(theirs)
    entries = open_weights(folder, mapped)
    dtype = dtype or common_dtype(theirs, entries.values())
    by_place = table.tensors(entries, folder)
    model, text = checkpoint.load_model(
        folder, checkpoint.describe(folder / "text"), dtype, mapped, by_place["text"], check_finite
    )
    tower, image = checkpoint.load_model(
        folder, checkpoint.describe(folder / "image"), dtype, mapped, by_place["image"], check_finite
    )
    images = JoinedImages(config, tower, theirs, table, image)
    parameters, modules = dict(images.named_parameters()), dict(images.named_modules())
    shapes = {name: tuple(x.shape) for name, x in parameters.items() if not name.startswith("tower.")}
    joint = by_place["joint"]
    for rule in matches(table.rules, shapes):
        missing = (
            f"{folder}: no tensor fills {rule.ours[0]}: {rule.theirs} is missing, the file is incomplete"
        )
        refuse(rule.theirs not in joint, missing)
        entry = joint.pop(rule.theirs)
        tensors = checkpoint.Unread(folder, config.tower, shapes, []).read(rule, entry)
        if check_finite:
            finite(folder, rule.theirs, tensors)
        whole = [cast(x, dtype or entry.dtype, rule.theirs).clone() for x in tensors]
        checkpoint.put_parameters(modules, dict(zip(rule.ours, whole)))
    left = next(iter(joint), None)
    refuse(left, f"{folder}: tensor {left} has no place: config.json and weights do not fit")
    return model, text, images.eval()
