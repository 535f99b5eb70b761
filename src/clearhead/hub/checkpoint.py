"""Checkpoints: a model directory becomes a config and a model, and the other way round.

The model is built on the meta device, where it costs no memory, and each parameter then takes the file's own bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.errors import CheckpointError, ConfigError, nearest
from clearhead.hub.architecture import Architecture
from clearhead.hub.files import Entry, open_weights, read_json, write_json, write_weights
from clearhead.hub.registry import architecture_of, nearest_to
from clearhead.hub.rules import Match, Rule, Same, matches
from clearhead.model.transformer import Transformer

SECTION = "clearhead"  # of config.json: our own config, where no architecture says all of it
OWN = Architecture(SECTION, {"ClearheadModel": {}}, (), ())  # tensors under our own names


@dataclass(frozen=True)
class Description:
    """What a config.json says."""

    theirs: dict[str, Any]
    config: ModelConfig
    architecture: Architecture


def describe(folder: Path) -> Description:
    """Read config.json alone."""
    theirs = read_json(folder / "config.json")
    section = theirs.get(SECTION)
    architecture = OWN if theirs.get("model_type") == SECTION else architecture_of(theirs)
    if section is None and architecture is not OWN:
        return Description(theirs, architecture.read(theirs), architecture)
    if not isinstance(section, dict) or not isinstance(section.get("config"), dict):
        raise CheckpointError(f'{folder / "config.json"} has no config in its "{SECTION}" section')
    try:
        return Description(theirs, ModelConfig.from_dict(section["config"]), architecture)
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None


def load_model(folder: Path, description: Description, dtype: torch.dtype | None = None) -> Transformer:
    """The model of a directory, on the CPU, in the dtype of the file unless `dtype` says otherwise."""
    entries = open_weights(folder)
    architecture = description.architecture
    if architecture.prefix and not any(name.startswith(architecture.prefix) for name in entries):
        entries = {architecture.prefix + name: entry for name, entry in entries.items()}  # saved from the bare base model
    with torch.device("meta"):
        model = Transformer(description.config)
    parameters = dict(model.named_parameters())
    chosen, unused = _choose(model, architecture, entries)
    _check_complete(parameters, chosen, unused, architecture, folder)
    for match in chosen:
        shapes = [tuple(parameters[name].shape) for name in match.ours]
        theirs = entries[match.theirs].read(match.operation.copies)
        try:
            ours = match.operation.load([theirs], shapes, description.config)
        except RuntimeError:
            ours = [theirs]
        for name, tensor, shape in zip(match.ours, ours, shapes):
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{folder}: tensor {match.theirs} has shape {tuple(theirs.shape)} and {name} needs {shape}: config.json does not fit"
                )
            if not tensor.is_floating_point():
                raise CheckpointError(f"{folder}: tensor {match.theirs} has dtype {tensor.dtype}: weights must be floating point")
            _put(model, name, tensor if dtype is None else tensor.to(dtype))
    model.tie()
    return model.eval()


def _choose(model: Transformer, architecture: Architecture, entries: dict[str, Entry]) -> tuple[list[Match], set[str]]:
    """The rule that fills each parameter, and the tensors of the file that none of them reads."""
    canonical = _canonical_names(model)
    chosen: dict[str, Match] = {}
    unused = set(entries)
    for match in matches(rules_of(architecture, model), canonical):
        if match.theirs not in entries:
            continue
        unused.discard(match.theirs)  # a tied tensor that is written twice is read once
        ours = tuple(canonical[name] for name in match.ours)
        if ours[0] not in chosen:
            chosen[ours[0]] = Match(match.theirs, ours, match.operation)
    return list(chosen.values()), {name for name in unused if not architecture.is_ignored(name)}


def rules_of(architecture: Architecture, model: Transformer) -> tuple[Rule, ...]:
    """The rules of an architecture; our own format has each parameter under its own name."""
    return architecture.rules or tuple(Rule(name, (name,), Same()) for name, _ in model.named_parameters())


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name a parameter goes by -> the one under which it is listed first."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(parameter), name) for name, parameter in model.named_parameters(remove_duplicate=False)}


def _check_complete(parameters: dict[str, Any], chosen: list[Match], unused: set[str], architecture: Architecture, folder: Path) -> None:
    filled = {name for match in chosen for name in match.ours}
    missing = [name for name in parameters if name not in filled]
    if unused:
        name = min(unused)
        known = [rule.theirs for rule in architecture.rules]
        raise CheckpointError(
            f"{folder}: no rule of {architecture.model_type} reads the tensor {name}{_more(unused)}{nearest(name, known)}: "
            f"config.json and the weights do not belong together"
        )
    if missing:
        raise CheckpointError(f"{folder}: no tensor fills {missing[0]}{_more(missing)}: the file is incomplete, or config.json is another model's")


def _more(names: Any) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(tensor))


# Saving ---------------------------------------------------------------------------------------------------------------


def exported_config(config: ModelConfig, original: Description | None = None) -> tuple[Architecture, dict[str, Any]]:
    """The architecture to save as, and its config.json.

    Keys of the config.json a model came with are kept where we have no word for them. Where no architecture says all
    of our config, a section of our own does.
    """
    known = original is not None and original.config == config
    if known and original is not None:
        return original.architecture, dict(original.theirs)
    architecture, differences = nearest_to(config)
    if architecture is None or differences:
        return OWN, {"architectures": list(OWN.classes), "model_type": SECTION, SECTION: {"config": config.to_dict()}}
    theirs = architecture.write(config)
    assert theirs is not None
    if architecture.read(theirs) != config:  # it computes the same, and would train differently
        theirs[SECTION] = {"config": config.to_dict()}
    return architecture, theirs


def save_model(
    folder: Path, model: Transformer, architecture: Architecture, theirs: dict[str, Any], shard_size: int, dtype: torch.dtype | None = None
) -> None:
    """config.json and the weights, into a folder that exists."""
    made = dict(export_state(model, architecture))
    parameters = dict(model.named_parameters())
    kind = dtype or next(iter(parameters.values())).dtype
    sizes = {name: sum(parameters[ours].numel() for ours in match.ours) * kind.itemsize for name, match in made.items()}
    base = bool(architecture.prefix) and model.config.head == "none"

    def make(name: str) -> Tensor:
        match = made[architecture.prefix + name if base else name]
        return match.operation.save([parameters[ours].detach().to(kind).cpu() for ours in match.ours], model.config)[0]

    if base:
        sizes = {name.removeprefix(architecture.prefix): size for name, size in sizes.items()}
    write_weights(folder, sizes, make, shard_size)
    write_json(folder / "config.json", {**theirs, "dtype": str(kind).removeprefix("torch.")})


def export_state(model: Transformer, architecture: Architecture) -> dict[str, Match]:
    """By their name, how each tensor of the checkpoint is made of our parameters; each parameter is written once."""
    canonical = _canonical_names(model)
    made: dict[str, Match] = {}
    written: set[str] = set()
    for match in matches(rules_of(architecture, model), canonical):
        ours = tuple(canonical[name] for name in match.ours)
        if ours[0] not in written:
            written.update(ours)
            made[match.theirs] = Match(match.theirs, ours, match.operation)
    missing = [name for name, _ in model.named_parameters() if name not in written]
    if missing:
        raise CheckpointError(f"no rule of {architecture.model_type} writes {missing[0]}{_more(missing)}")
    return made
