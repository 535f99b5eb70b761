"""Adapters of a model, by name: low-rank updates that are applied beside its weights, or merged into them."""

from pathlib import Path

import torch
from torch import Tensor, nn

from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError, nearest
from clearhead.hub.architecture import Architecture
from clearhead.hub.files import read_json, refuse
from clearhead.hub.peft import Adapter, RankUpdate, read_adapter, write_adapter
from clearhead.hub.peft_settings import SETTINGS
from clearhead.run.kernels.lora import LoraLinear, merge


class Adapters:
    """The adapters of one model, by name: any of them may be used at once, merged or beside the weights."""

    def __init__(self, model: Transformer, architecture: Architecture) -> None:
        self.model, self.architecture = model, architecture
        self.known: dict[str, Adapter] = {}
        self.used: tuple[str, ...] = ()
        self._plain: dict[str, nn.Module] = {}  # the layers without their updates

    def add(self, name: str, folder: str | Path) -> None:
        """Read an adapter from a directory of PEFT's; `use` applies it."""
        self.known[name] = read_adapter(Path(folder), self.model.config, self.architecture)

    def use(self, *names: str, merged: bool = False) -> None:
        """Apply these adapters and no others; without names, leave the model exactly as it was loaded.

        The updates of several add up. `merged` updates are added to the weights, which takes no time in a
        forward pass; the weights before are kept.
        """
        for name in names:
            refuse(
                name not in self.known,
                f'no adapter is called "{name}"{nearest(name, self.known)}: '
                f"there are {', '.join(self.known) or 'none: add one first'}",
            )
        for layer, part in self._plain.items():
            self.model.set_submodule(layer, part)
        self._plain = {layer: self.model.get_submodule(layer) for name in names for layer in self.known[name]}
        for name in names:
            for layer, update in self.known[name].items():
                part = self.model.get_submodule(layer)
                weight = next(part.parameters())
                wide = torch.promote_types(weight.dtype, update.a.dtype)
                a, b = (one.to(weight.device, wide) for one in (update.a, update.b))
                self.model.set_submodule(layer, LoraLinear.of(part, a, b, update.scale).eval())
        if merged:
            merge(self.model)
        self.used = names

    def products(self, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and B of each layer, with the factor in A, in the model's dtype and on its device."""
        weight = next(self.model.parameters())
        return {
            layer: ((one.scale * one.a).to(weight), one.b.to(weight))
            for layer, one in self.known[name].items()
        }

    def save(self, name: str, folder: str | Path, base: str | Path | None = None) -> None:
        """Write an adapter as PEFT does; `base` is what it says of the model that it belongs to."""
        refuse(name not in self.known, f'no adapter is called "{name}"{nearest(name, self.known)}')
        write_adapter(Path(folder), self.known[name], self.model.config, self.architecture, base)


def is_adapter(folder: Path) -> bool:
    """Return whether a directory holds an adapter, and no model of its own."""
    return (folder / SETTINGS).is_file() and not (folder / "config.json").exists()


def base_of(folder: Path) -> Path:
    """Return the directory of the model that an adapter says it belongs to."""
    stated = read_json(folder / SETTINGS).get("base_model_name_or_path")
    places = [Path(stated), folder / stated] if isinstance(stated, str) and stated else []
    found = next((place for place in places if place.exists() and not is_adapter(place)), None)
    if found is None:
        raise CheckpointError(
            f"{folder} holds an adapter of {stated!r}, which is no model directory here: "
            "load the model, and add this directory to its adapters"
        )
    return found


def trained_updates(model: nn.Module, alpha: float) -> dict[str, RankUpdate]:
    """Return the updates that a model is trained with, by layer."""
    return {
        name: RankUpdate(part.a.detach().cpu(), part.b.detach().cpu(), alpha)
        for name, part in model.named_modules()
        if isinstance(part, LoraLinear)
    }
