"""Checkpoints: a model directory becomes a config and a model, and the other way round.

The model is built on the meta device, where it costs no memory, and each parameter then takes the file's own bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.config import ModelConfig
from clearhead.data.files import RECIPE
from clearhead.errors import CheckpointError, ClearheadError, ConfigError, nearest
from clearhead.hub.architecture import POOLER_KEY, Architecture, check_sizes
from clearhead.hub.files import Entry, open_weights, read_json, write_json, write_weights
from clearhead.hub.registry import ARCHITECTURES, architecture_of, nearest_to
from clearhead.hub.rules import Match, Rule, Same, matches
from clearhead.model.transformer import Transformer

READERS = 2  # more would hold more copies at once than they gain
SECTION = "clearhead"  # of config.json: our own config, where no architecture says all of it
OWN = Architecture(SECTION, {"ClearheadModel": {}}, (), ())  # tensors under our own names


@dataclass(frozen=True)
class Description:
    """What a config.json says."""

    theirs: dict[str, Any]
    config: ModelConfig
    architecture: Architecture
    carried: Mapping[str, Entry] = field(
        default_factory=dict
    )  # tensors of other heads in the file it came with


def describe(folder: Path) -> Description:
    """Read config.json; where it does not name a class, as old files do not, the tensors tell."""
    if (folder / RECIPE).is_file() and not (folder / "config.json").exists():
        use = f"use {folder / 'last'}, or " if (folder / "last").is_dir() else ""
        raise CheckpointError(
            f"the run in {folder} is not finished: {use}go on with clearhead train --resume {folder}"
        )
    theirs = read_json(folder / "config.json")
    if SECTION not in theirs and not (theirs.get("model_type") and theirs.get("architectures")):
        theirs = _recognise(folder, theirs)
    section = theirs.get(SECTION)
    architecture = OWN if theirs.get("model_type") == SECTION else architecture_of(theirs)
    if section is None and architecture is not OWN:
        return Description(theirs, architecture.read(theirs), architecture)
    if not isinstance(section, dict) or not isinstance(section.get("config"), dict):
        raise CheckpointError(f'{folder / "config.json"} has no config in its "{SECTION}" section')
    check_sizes(section["config"])
    try:
        return Description(theirs, ModelConfig.from_dict(section["config"]), architecture)
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None


class _Undrawn(TorchFunctionMode):
    """Leave fresh weights as they are: on the meta device, drawing them does nothing but import a compiler, for seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def empty_model(config: ModelConfig) -> Transformer:
    """A model on the meta device, where it costs no memory, for weights that are at hand."""
    with torch.device("meta"), _Undrawn():
        return Transformer(config)


def load_model(
    folder: Path, description: Description, dtype: torch.dtype | None = None
) -> tuple[Transformer, Description]:
    """The model of a directory, on the CPU, in the dtype of the file unless `dtype` says otherwise; and what its weights add."""
    plan = _plan(folder, description, open_weights(folder))
    description, entries, model, chosen = plan.description, plan.entries, plan.model, plan.chosen
    parameters = dict(model.named_parameters())
    wanted = [[tuple(parameters[name].shape) for name in match.ours] for match in chosen]
    with ThreadPoolExecutor(
        READERS if dtype is None else 1
    ) as readers:  # each holds a copy of one tensor, of another size if converted
        read = readers.map(
            lambda match, shapes: _read(entries[match.theirs], match, shapes, description.config, dtype),
            chosen,
            wanted,
        )
        tensors = list(read)
    for match, shapes, ours in zip(chosen, wanted, tensors):
        for name, tensor, shape in zip(match.ours, ours, shapes):
            if tuple(tensor.shape) != shape:
                theirs = entries[match.theirs].shape
                raise CheckpointError(
                    f"{folder}: tensor {match.theirs} has shape {theirs} and {name} needs {shape}: config.json does not fit"
                )
            if not tensor.is_floating_point():
                raise CheckpointError(
                    f"{folder}: tensor {match.theirs} has dtype {tensor.dtype}: weights must be floating point"
                )
            _put(model, name, tensor)
    model.tie()
    return model.eval(), description


@dataclass(frozen=True)
class _Plan:
    """How the tensors of a file fill a model that is still empty."""

    description: Description
    entries: dict[str, Entry]
    model: Transformer
    chosen: list[Match]


def _plan(folder: Path, description: Description, entries: dict[str, Entry]) -> _Plan:
    """Which tensor fills which parameter; an error when one is left over on either side."""
    architecture = description.architecture
    if architecture.prefix and not any(name.startswith(architecture.prefix) for name in entries):
        entries = {
            architecture.prefix + name: entry for name, entry in entries.items()
        }  # saved from the bare base model
    description = _as_stored(_without_pooler(description, entries), entries)
    layers = description.config.layer_groups or description.config.n_layers
    if layers > len(entries):  # before they are all made
        raise CheckpointError(
            f"{folder}: config.json says {layers} layers, and the weights are {len(entries)} tensors: they do not belong together"
        )
    model = empty_model(description.config)
    parameters = dict(model.named_parameters())
    chosen, unused = _choose(model, architecture, entries)
    carried = {name: entries[name] for name in sorted(unused) if architecture.is_carried(name)}
    unused -= set(carried)
    _check_complete(parameters, chosen, unused, architecture, folder)
    return _Plan(dataclasses.replace(description, carried=carried), entries, model, chosen)


def _recognise(folder: Path, theirs: dict[str, Any]) -> dict[str, Any]:
    """config.json with the class added whose rules read every tensor of the file; as it is, where none or several kinds do."""
    stated = theirs.get("model_type")
    known = [ARCHITECTURES[kind] for kind in ARCHITECTURES if stated in (None, kind)]
    found: list[tuple[int, int, dict[str, Any]]] = []
    try:
        entries = open_weights(folder)
    except CheckpointError:
        return theirs
    for architecture in known:
        for name in architecture.classes if architecture.names_all(entries) else ():
            guess = {**theirs, "model_type": architecture.model_type, "architectures": [name]}
            try:
                plan = _plan(folder, Description(guess, architecture.read(guess), architecture), entries)
            except ClearheadError:
                continue
            found.append((len(plan.description.carried), len(found), guess))
    if len({guess["model_type"] for _, _, guess in found}) != 1:
        return theirs
    return min(found)[2]  # the class that leaves the fewest tensors aside


def _read(
    entry: Entry, match: Match, shapes: list[tuple[int, ...]], config: ModelConfig, dtype: torch.dtype | None
) -> list[Tensor]:
    """One tensor of the file as ours; where that makes copies, the file's pages are given back at once."""
    theirs = entry.read()
    if not theirs.is_floating_point():
        return [theirs]
    try:
        ours = match.operation.load([theirs], shapes, config)
    except RuntimeError:  # it cannot be cut into those shapes
        return [theirs]
    ours = ours if dtype is None else [tensor.to(dtype) for tensor in ours]
    if match.operation.copies or dtype not in (None, theirs.dtype):
        entry.release()
    return ours


def _without_pooler(description: Description, entries: dict[str, Entry]) -> Description:
    """The description as it is, or, where a base model's file holds no pooler, that of the same model without."""
    config, theirs = description.config, description.theirs
    expected = config.head == "embedding" and config.pooler != "none" and SECTION not in theirs
    if not expected or any(".pooler." in name for name in entries):
        return description
    return dataclasses.replace(
        description, config=description.architecture.read({**theirs, POOLER_KEY: False})
    )


def _as_stored(description: Description, entries: dict[str, Entry]) -> Description:
    """The description, or where the file holds an output layer unlike the one described, that of the layer it holds.

    Some config.json say "tied" of weights that are not: two tensors that differ are two, whatever it says.
    """
    config, architecture = description.config, description.architecture
    rules = architecture.rules + architecture.heads.get(config.head or "none", ())

    def stored(*ours: str) -> Entry | None:
        names = [
            rule.theirs for name in ours for rule in rules if rule.ours == (name,) and rule.counts(config)
        ]
        return next((entries[name] for name in names if name in entries), None)

    if config.head not in ("lm", "mlm"):
        return description
    table = stored("decoder.embedding.front.tokens.weight", "encoder.embedding.front.tokens.weight")
    out = stored("head.out.weight")
    if (
        config.tie_embeddings
        and table is not None
        and out is not None
        and not torch.equal(table.read(), out.read())
    ):
        config = config.replace(tie_embeddings=False)
    if config.head_bias and "head_bias" in architecture.open and stored("head.out.bias") is None:
        config = config.replace(head_bias=False)
    return dataclasses.replace(description, config=config)


def _choose(
    model: Transformer, architecture: Architecture, entries: dict[str, Entry]
) -> tuple[list[Match], set[str]]:
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
    """The rules of an architecture that count for this model; our own format has each parameter under its own name."""
    head = architecture.heads.get(model.config.head or "none", ())
    counting = tuple(rule for rule in architecture.rules + head if rule.counts(model.config))
    return counting or tuple(Rule(name, (name,), Same()) for name, _ in model.named_parameters())


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name a parameter goes by -> the one under which it is listed first."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _check_complete(
    parameters: dict[str, Any],
    chosen: list[Match],
    unused: set[str],
    architecture: Architecture,
    folder: Path,
) -> None:
    filled = {name for match in chosen for name in match.ours}
    missing = [name for name in parameters if name not in filled]
    if unused:
        name = min(unused)
        known = [
            rule.theirs for rules in (architecture.rules, *architecture.heads.values()) for rule in rules
        ]
        raise CheckpointError(
            f"{folder}: no rule of {architecture.model_type} reads the tensor {name}{_more(unused)}{nearest(name, known)}: "
            f"config.json and the weights do not belong together"
        )
    if missing:
        raise CheckpointError(
            f"{folder}: no tensor fills {missing[0]}{_more(missing)}: the file is incomplete, or config.json is another model's"
        )


def _more(names: Any) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, nn.Parameter(tensor))


# Saving ---------------------------------------------------------------------------------------------------------------


def exported_config(
    config: ModelConfig, original: Description | None = None
) -> tuple[Architecture, dict[str, Any]]:
    """The architecture to save as, and its config.json.

    Keys of the config.json a model came with are kept where we have no word for them. Where no architecture says all
    of our config, a section of our own does.
    """
    known = original is not None and original.config == config
    if known and original is not None:
        return original.architecture, dict(original.theirs)
    architecture, differences = nearest_to(config)
    if architecture is None or differences:
        return OWN, {
            "architectures": list(OWN.classes),
            "model_type": SECTION,
            SECTION: {"config": config.to_dict()},
        }
    theirs = architecture.write(config)
    assert theirs is not None
    if architecture.read(theirs) != config:  # it computes the same, and would train differently
        theirs[SECTION] = {"config": config.to_dict()}
    return architecture, theirs


def explain_export(config: ModelConfig, original: Description | None = None) -> tuple[str, str]:
    """What a model is saved as, and, where no architecture is exactly it, which fields stand in the way."""
    architecture, theirs = exported_config(config, original)
    if architecture is not OWN:
        return f"{theirs['architectures'][0]} ({architecture.model_type})", ""
    closest, differences = nearest_to(config)
    if closest is None:
        return (
            SECTION,
            "no Hugging Face architecture has this family and head, so its config.json carries clearhead's own section",
        )
    listed = ", ".join(differences[:6]) + (", ..." if len(differences) > 6 else "")
    return (
        SECTION,
        f"the nearest Hugging Face architecture is {closest.model_type}, which cannot express {listed}",
    )


def save_model(
    folder: Path,
    model: Transformer,
    architecture: Architecture,
    theirs: dict[str, Any],
    shard_size: int,
    dtype: torch.dtype | None = None,
    carried: Mapping[str, Entry] | None = None,
) -> None:
    """config.json and the weights, into a folder that exists; `carried` tensors are written as they are."""
    carried = carried or {}
    made = dict(export_state(model, architecture))
    parameters = dict(model.named_parameters())
    kinds = {name: dtype or parameters[match.ours[0]].dtype for name, match in made.items()}
    kinds |= {name: dtype or entry.dtype for name, entry in carried.items()}
    sizes = {
        name: sum(parameters[ours].numel() for ours in match.ours) * kinds[name].itemsize
        for name, match in made.items()
    }
    sizes |= {name: math.prod(entry.shape) * kinds[name].itemsize for name, entry in carried.items()}
    base = bool(architecture.prefix) and model.config.head in ("none", "embedding")

    def make(name: str) -> Tensor:
        name = architecture.prefix + name if base else name
        if name in carried:
            return carried[name].read().to(kinds[name])
        match = made[name]
        tensor = match.operation.save(
            [parameters[ours].detach().to(kinds[name]).cpu() for ours in match.ours], model.config
        )[0]
        return (
            tensor.clone() if match.copy else tensor
        )  # the format has no place for two names of the same bytes

    if base:
        sizes = {name.removeprefix(architecture.prefix): size for name, size in sizes.items()}
    write_weights(folder, sizes, make, shard_size)
    write_json(
        folder / "config.json", {**theirs, "dtype": str(next(iter(kinds.values()))).removeprefix("torch.")}
    )


def export_state(model: Transformer, architecture: Architecture) -> dict[str, Match]:
    """By their name, how each tensor of the checkpoint is made of our parameters; each parameter is written once."""
    canonical = _canonical_names(model)
    made: dict[str, Match] = {}
    written: set[str] = set()
    for match in matches(rules_of(architecture, model), canonical):
        ours = tuple(canonical[name] for name in match.ours)
        if ours[0] not in written or match.copy:
            written.update(ours)
            made[match.theirs] = Match(match.theirs, ours, match.operation, match.copy)
    missing = [name for name, _ in model.named_parameters() if name not in written]
    if missing:
        raise CheckpointError(f"no rule of {architecture.model_type} writes {missing[0]}{_more(missing)}")
    return made
