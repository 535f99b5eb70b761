"""A model as it is written: its architecture, its config.json, and the tensors of its file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError
from clearhead.hub.architecture import SECTION, Architecture
from clearhead.hub.checkpoint import OWN, Description, matching_rules, more
from clearhead.hub.files import write_json
from clearhead.hub.registry import nearest_to
from clearhead.hub.rules import Rule
from clearhead.hub.weights import Entry, cast
from clearhead.hub.writing import Outgoing


def exported(config: ModelConfig, original: Description | None = None) -> Description:
    """Return what a model is saved as: its architecture and config.json, and tensors of other heads.

    A model that is as it was loaded is saved as it came, with keys that we have no word for. Where no
    architecture expresses all of our config, a section of our own does.
    """
    if original is not None and original.config == config:
        return original
    architecture, differences = nearest_to(config)
    own = {SECTION: {"config": config.to_dict()}}
    theirs = None if architecture is None or differences else architecture.write(config)
    if architecture is None or theirs is None:
        return Description(
            {"architectures": list(OWN.classes), "model_type": SECTION, **own}, config, SECTION
        )
    if architecture.read(theirs) != config:  # it computes the same, and would train differently
        theirs |= own
    return Description(theirs, config, architecture.model_type)


def explain_export(config: ModelConfig, original: Description | None = None) -> tuple[str, str]:
    """Return what a model is saved as, and the fields that keep it from being a Hugging Face architecture."""
    saved = exported(config, original)
    if saved.kind != SECTION:
        return f"{saved.theirs['architectures'][0]} ({saved.kind})", ""
    closest, differences = nearest_to(config)
    if closest is None:
        return SECTION, (
            "no Hugging Face architecture has this family and head, "
            "so config.json has clearhead's own section"
        )
    listed = ", ".join(differences[:6]) + (", ..." if len(differences) > 6 else "")
    return SECTION, (
        f"the nearest Hugging Face architecture is {closest.model_type}, which cannot express {listed}"
    )


def outgoing(
    model: Transformer, description: Description, dtype: torch.dtype | None = None
) -> dict[str, Outgoing]:
    """Return the tensors that a model is written as, by name; carried ones stay as they are.

    Their sources are names of parameters. The weights themselves are not read.
    """
    architecture, carried = description.stored or description.architecture, description.carried
    parameters = dict(model.named_parameters())
    base = architecture.prefix if model.config.head in ("none", "embedding") else ""

    def made(name: str, rule: Rule) -> Outgoing:
        ours = [parameters[each] for each in rule.ours]
        given = dtype or ours[0].dtype
        empty = [torch.empty(one.shape, dtype=given, device="meta") for one in ours]
        shape = rule.operation.save(empty, model.config)[0].shape

        def make(sources: list[Tensor]) -> Tensor:
            return rule.operation.save([cast(one, given, name) for one in sources], model.config)[0]

        return Outgoing(tuple(shape), given, rule.ours, make)

    def kept(name: str, entry: Entry) -> Outgoing:
        given = dtype or entry.dtype
        return Outgoing(entry.shape, given, (), lambda sources: cast(entry.read(), given, name))

    tensors = {name: made(name, rule) for name, rule in export_state(model, architecture).items()}
    tensors |= {name: kept(name, entry) for name, entry in carried.items()}
    return {name.removeprefix(base): one for name, one in tensors.items()}


class Stated(Protocol):
    """What has a config.json."""

    @property
    def theirs(self) -> dict[str, Any]: ...  # noqa: D102


def write_config(folder: Path, description: Stated, tensors: Mapping[str, Outgoing]) -> None:
    """Write config.json of a model that is written as these tensors."""
    first = str(next((one.dtype for one in tensors.values() if one.dtype.is_floating_point), torch.float32))
    write_json(folder / "config.json", {**description.theirs, "dtype": first.removeprefix("torch.")})


def export_state(model: Transformer, architecture: Architecture) -> dict[str, Rule]:
    """Return the rule that makes each tensor of the checkpoint, by name; each parameter is written once."""
    made: dict[str, Rule] = {}
    written: set[str] = set()
    for rule in matching_rules(model, architecture):
        if rule.ours[0] not in written or rule.copy:
            written.update(rule.ours)
            made[rule.theirs] = rule
    missing = [name for name, _ in model.named_parameters() if name not in written]
    if missing:
        raise CheckpointError(f"no rule of {architecture.model_type} writes {missing[0]}{more(missing)}")
    return made
