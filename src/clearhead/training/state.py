"""What a run keeps on disk: its folder, and checkpoints that open anywhere as a model.

`checkpoints/step-N/` holds the model as it would be used (averaged and merged, where that is asked for),
`training.safetensors` (optimizer, averages, and the weights in training where they differ) and
`training.json` (counters). `last` and `best` are links to the newest and the best checkpoint. Checkpoints and
links are written under another name and renamed, so a run that is killed at any moment leaves the last
checkpoint whole.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clearhead.api import Model
from clearhead.data.files import RECIPE
from clearhead.errors import CheckpointError, refuse
from clearhead.hub.files import read_json, whole_folder

TENSORS, COUNTERS = "training.safetensors", "training.json"
CHECKPOINTS, LAST, BEST = "checkpoints", "last", "best"
CACHE = "data"  # the folder of encoded examples
PRETRAIN = "pretrain"  # the folder of the first stage, where there are two
OWN = (  # what a run writes
    *(RECIPE, CACHE, PRETRAIN, CHECKPOINTS, BEST, LAST, "log.jsonl", "loss.png", "tensorboard", ".*"),
    *("*.safetensors", "*.index.json", "*config.json", "tokenizer.json", "modules.json", "1_Pooling"),
)
CACHED = ("fingerprint", "*-train-*", "*-validation-*", ".*")  # what it writes into its cache


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


def forget(folder: Path, keep: set[int]) -> None:
    """Remove the checkpoints of all other steps."""
    for step in set(saved_steps(folder)) - keep:
        _remove(folder / CHECKPOINTS / f"step-{step}")


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
        optimizer.state[parameters[owner]][key] = tensors[name].clone().to(device=device)


# The folder ----------------------------------------------------------------------------------------------


@contextmanager
def new_folder(folder: Path, overwrite: bool, needed: Iterable[Path] = ()) -> Iterator[Callable[[], None]]:
    """Create the folder of a new run.

    The folder must not exist, be empty or, with `overwrite`, hold nothing but an earlier run and none of the
    files `needed`. The function that is yielded keeps the new run; an error before it is called restores what
    was there.
    """
    folder = folder.resolve()
    _check(folder, overwrite, needed)
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    before: Path | None = None  # where an earlier run waits
    try:
        if folder.is_dir() and any(folder.iterdir()):
            before = Path(tempfile.mkdtemp(prefix=f".{folder.name}.before-", dir=folder.parent))
            os.replace(folder, before)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {folder}: {error.strerror}") from None
    with ExitStack() as undo:
        undo.callback(_put_back, folder, before, created)

        def keep() -> None:
            undo.pop_all()
            if before is not None:
                shutil.rmtree(before, ignore_errors=True)

        yield keep


def _put_back(folder: Path, before: Path | None, created: list[Path]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        if before is not None:
            os.replace(before, folder)
        elif not created:
            folder.mkdir(exist_ok=True)
        for place in created[1:]:
            place.rmdir()


def resumable(folder: Path) -> bool:
    """Return True if the folder holds a run with a checkpoint."""
    return newest(folder) is not None or newest(folder / PRETRAIN) is not None


def _check(folder: Path, overwrite: bool, needed: Iterable[Path]) -> None:
    refuse(
        folder.exists() and not folder.is_dir(),
        f"{folder} is a file: name a folder to write to",
        CheckpointError,
    )
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    refuse(
        not (folder / RECIPE).exists(),
        f"{folder} is not empty and holds no run: name another folder with --out",
        CheckpointError,
    )
    refuse(
        not overwrite and resumable(folder),
        f"{folder} holds another run: go on with clearhead train --resume {quote(str(folder))}, "
        "or add --overwrite or another --out",
        CheckpointError,
    )
    refuse(
        not overwrite,
        f"{folder} holds a run that never began: add --overwrite, or name another --out",
        CheckpointError,
    )
    inside = next((path for path in needed if path.resolve().is_relative_to(folder)), None)
    refuse(inside is not None, f"{inside} lies in {folder}, which would be overwritten: name another --out")
    for place, own in ((folder, OWN), (folder / CACHE, CACHED)):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            refuse(
                not any(fnmatch(path.name, pattern) for pattern in own),
                f"{path} is no part of a run, and would be lost: move it away, or name another --out",
                CheckpointError,
            )
