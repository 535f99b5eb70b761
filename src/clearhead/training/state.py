"""What a run keeps on disk: checkpoints that open anywhere as a model.

`checkpoints/step-N/` holds the model as it would be used (averaged and merged, where that is asked for),
`training.safetensors` (optimizer, averages, and the weights in training where they differ) and
`training.json` (counters). `last` and `best` are links to the newest and the best checkpoint. Checkpoints and
links are written under another name and renamed, so a run that is killed at any moment leaves the last
checkpoint whole. One that is kept only because it is the best, or for an average, keeps the model alone.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clearhead.api import Model
from clearhead.errors import CheckpointError, refuse
from clearhead.hub.files import read_json, whole_folder
from clearhead.parallel import shards

TENSORS, COUNTERS = "training.safetensors", "training.json"
CHECKPOINTS, LAST, BEST = "checkpoints", "last", "best"
CACHE = "data"  # the folder of encoded examples
PRETRAIN = "pretrain"  # the folder of the first stage, where there are two


@dataclass
class State:
    """The progress of a run. Batches and dropout depend on `step` alone: no random state has to be kept."""

    step: int = 0
    seconds: float = 0.0  # spent in training
    tokens: int = 0  # read in training
    scale: float | None = None  # of the loss, in float16
    scale_age: int = 0  # steps since it was last changed
    stale: int = 0  # validations since the best one
    validations: list[dict[str, float]] = field(default_factory=list)

    def best(self, metric: str, larger: bool, count: int = 1) -> list[int]:
        """Return the steps of the best validations, best first; of equals the lower loss, then the first."""

        def place(row: dict[str, float]) -> tuple[float, ...]:
            worth = (-row[metric] if larger else row[metric], row["loss"], row["step"])
            return tuple(math.inf if math.isnan(value) else value for value in worth)

        return [int(row["step"]) for row in sorted(self.validations, key=place)[:count]]


def save_checkpoint(folder: Path, usable: Model, tensors: Mapping[str, Tensor], state: State) -> Path:
    """Write `checkpoints/step-N` atomically, and point `last` to it."""
    target = folder / CHECKPOINTS / f"step-{state.step}"
    if target.exists():
        _remove(target)
    with whole_folder(target) as work:
        usable.save(work / "model")
        for path in (work / "model").iterdir():
            os.replace(path, work / path.name)
        (work / "model").rmdir()
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, work / TENSORS
        )
        (work / COUNTERS).write_text(json.dumps(asdict(state), indent=1))
    point(folder, LAST, state.step)
    return target


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], State]:
    """Read what `save_checkpoint` wrote beside the model."""
    try:
        return load_file(folder / TENSORS), State(**read_json(folder / COUNTERS))
    except (OSError, SafetensorError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be resumed from: {error}") from None


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    found = [folder / CHECKPOINTS / f"step-{step}" for step in saved_steps(folder)]
    return next((path for path in reversed(found) if (path / COUNTERS).is_file()), None)


def saved_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, in order."""
    names = (path.name.removeprefix("step-") for path in (folder / CHECKPOINTS).glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def point(folder: Path, name: str, step: int) -> None:
    """Point `last` or `best` to the checkpoint of a step, atomically."""
    new = folder / f".{name}"
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(Path(CHECKPOINTS) / f"step-{step}", target_is_directory=True)
        os.replace(new, folder / name)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / name}: {error.strerror}") from None


def forget(folder: Path, resume: Iterable[int], keep: Iterable[int]) -> None:
    """Keep the checkpoints of some steps to resume from, of others the model alone, and no other."""
    for step in set(saved_steps(folder)).difference(resume):
        place = folder / CHECKPOINTS / f"step-{step}"
        if step in keep:
            (place / COUNTERS).unlink(missing_ok=True)
            (place / TENSORS).unlink(missing_ok=True)
        else:
            _remove(place)


def _remove(folder: Path) -> None:
    """Rename a folder, then delete it: a folder that is half deleted never looks like a checkpoint."""
    away = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(away, ignore_errors=True)
    os.replace(folder, away)
    shutil.rmtree(away, ignore_errors=True)


# Optimizer state as named tensors ------------------------------------------------------------------


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state by the names of the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"optimizer/{names[id(parameter)]}/{key}": torch.as_tensor(value)
        for parameter, kept in optimizer.state.items()
        for key, value in kept.items()
        if value is not None
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Restore what `optimizer_tensors` returned."""
    parameters = dict(model.named_parameters())
    for name in (name for name in tensors if name.startswith("optimizer/")):
        _, owner, key = name.split("/")
        refuse(
            owner not in parameters,
            f"the checkpoint has optimizer state for {owner}, which the model has not: "
            "the recipe was changed",
            CheckpointError,
        )
        on_cpu = key == "step" and not getattr(optimizer, "defaults", {}).get("fused")
        device = None if on_cpu else parameters[owner].device
        value = tensors[name].clone().to(device=device)
        optimizer.state[parameters[owner]][key] = value if on_cpu else shards.parted(value, parameters[owner])
