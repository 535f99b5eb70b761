"""What a run keeps on disk: checkpoints that open anywhere as a model.

`checkpoints/step-N/` holds the model as it would be used (averaged and merged, where that is asked for),
`training.safetensors` (optimizer, averages, and the weights in training where they differ) and
`training.json` (counters). Several processes write several files of each, with an index. `last` and `best`
are links to the newest and the best checkpoint. Checkpoints and links are written under another name and
renamed, so a run that is killed at any moment leaves the last checkpoint whole. One that is kept only because
it is the best, or for an average, keeps the model alone.
"""

import copy
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError, ClearheadError, first_line, refuse
from clearhead.hub.checkpoint import Description
from clearhead.hub.files import MODEL, read_json, whole_folder
from clearhead.hub.weights import Outgoing, open_tensors, write_tensors
from clearhead.learn.parallel import shards
from clearhead.learn.parallel.shards import Exchange, Part, part_of
from clearhead.learn.training.events import OnEvent, Saved
from clearhead.learn.training.weights import merged_tensors
from clearhead.run.api import Model
from clearhead.run.bundle import SHARD_SIZE

TENSORS, COUNTERS = "training", "training.json"  # files of tensors begin so
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
    skipped: int = 0  # steps that were not taken, because loss or gradient was not finite
    skipped_last: int = 0  # how many of them are the last ones, in a row
    validations: list[dict[str, float]] = field(default_factory=list)
    missing: str = ""  # what the best validation found that the model never predicts
    # What the run chose by the machine at its beginning, and keeps: see docs/decisions/choices-and-bits.md.
    choices: dict[str, Any] = field(default_factory=dict)

    def best(self, metric: str, larger: bool, count: int = 1) -> list[int]:
        """Return the steps of the best validations, best first; of equals the lower loss, then the first."""

        def place(row: dict[str, float]) -> tuple[float, ...]:
            worth = (-row[metric] if larger else row[metric], row["loss"], row["step"])
            return tuple(math.inf if math.isnan(value) else value for value in worth)

        return [int(row["step"]) for row in sorted(self.validations, key=place)[:count]]


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint on its way to disk: what this process holds of it, copied to main memory."""

    settings: Model  # tokenizer, labels and all else but the weights
    described: Description
    tensors: Mapping[str, Outgoing]  # the model's, as they are written
    parts: Mapping[str, Part]  # of the model's parameters and of what belongs to them, by name
    state: State
    theirs: Mapping[str, Any] | None = None  # config.json, where it is not that of the model alone


def snapshot(
    loaded: Model, usable: nn.Module, empty: Transformer, tensors: Mapping[str, Tensor], state: State
) -> Snapshot:
    """Copy a model and the tensors that belong to it; where processes hold parts, each copies its own.

    `empty` has every parameter of the model, and may have no weights.
    """
    described = loaded.described()
    named = dict(usable.named_parameters()) | dict(tensors)  # whose names have a / and are others
    tensors_of = merged_tensors(empty, described) if loaded.towers is None else loaded.towers.outgoing()
    theirs = None
    if loaded.image_encoder is not None:
        named |= dict(loaded.image_encoder.named_parameters("image"))
        theirs, tensors_of = loaded.image_encoder.saved(described, tensors_of)
    parts = {name: part_of(tensor) for name, tensor in named.items()}
    return Snapshot(loaded, described, tensors_of, parts, copy.deepcopy(state), theirs)


def save_checkpoint(folder: Path, taken: Snapshot, group: ProcessGroup | None = None) -> Path:
    """Write `checkpoints/step-N` atomically, and point `last` to it; every process of `group` writes files.

    What fails in one process is raised in all of them.
    """
    target = folder / CHECKPOINTS / f"step-{taken.state.step}"
    exchange = Exchange(taken.parts, group)
    with ExitStack() as stack:
        error, work = None, target
        try:
            if exchange.rank == 0:
                if target.exists():
                    _remove(target)
                work = stack.enter_context(whole_folder(target))
        except CheckpointError as failure:
            error = failure
        error, work = exchange.gathered((error, work))[0]
        if error is not None:
            raise error
        _write(work, taken, exchange)
        if exchange.rank == 0:
            taken.settings.write_settings(work, taken.described, taken.tensors, taken.theirs)
            (work / COUNTERS).write_text(json.dumps(asdict(taken.state), indent=1))
    if exchange.rank == 0:
        point(folder, LAST, taken.state.step)
    return target


def _write(work: Path, taken: Snapshot, exchange: Exchange) -> None:
    """Write this process's files of the model and of what belongs to it; return when all are written."""
    others = {name: Outgoing(*form, (name,)) for name, form in exchange.forms.items() if "/" in name}
    failed = None
    for stem, tensors, most in ((MODEL, taken.tensors, SHARD_SIZE), (TENSORS, others, math.inf)):
        try:
            write_tensors(work, stem, tensors, exchange.fetch, most, exchange.rank, exchange.processes)
        except Exception as error:  # the others wait for what this process has
            failed = getattr(error, "strerror", None) or first_line(error)
    for failure in exchange.gathered(failed):
        refuse(failure is not None, f"cannot write {work}: {failure}", CheckpointError)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], State]:
    """Return what `save_checkpoint` wrote next to the model; tensors are pages of files, read when used."""
    try:
        tensors = {name: entry.read() for name, entry in open_tensors(folder, TENSORS).items()}
        return tensors, State(**read_json(folder / COUNTERS))
    except (CheckpointError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be resumed from: {error}") from None


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    checkpoints = [folder / CHECKPOINTS / f"step-{step}" for step in saved_steps(folder)]
    return next((path for path in reversed(checkpoints) if (path / COUNTERS).is_file()), None)


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
            for path in place.glob(f"{TENSORS}*"):
                path.unlink()
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
        optimizer.state[parameters[owner]][key] = (
            tensors[name].clone() if on_cpu else shards.parted(tensors[name], parameters[owner])
        )


# Written during training ------------------------------------------------------------------------------------


class Saver:
    """One write at a time, in a thread of its own."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.event: Saved | None = None  # of what is written
        self.error: ClearheadError | None = None

    def begin(self, event: Saved, write: Callable[[], object]) -> None:
        """Start to write a checkpoint; the one before must have been waited for."""

        def run() -> None:
            try:
                write()
            except ClearheadError as error:
                self.error = error
            except Exception as error:
                self.error = CheckpointError(f"step {event.step} was not saved: {first_line(error)}")

        self.event, self.thread = event, threading.Thread(target=run, name="saving", daemon=True)
        self.thread.start()

    @property
    def failed(self) -> bool:
        """True where the last write has failed; `finish` raises why."""
        return self.error is not None

    def finish(self, on_event: OnEvent = lambda event: None, wait: bool = False) -> None:
        """Tell of a checkpoint that is written; `wait` until it is, and raise what its write failed with."""
        if self.thread is None or (self.thread.is_alive() and not wait) or (self.failed and not wait):
            return
        self.thread.join()
        self.thread = None
        if self.error is not None:
            raise self.error
        assert self.event is not None
        on_event(self.event)

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Let a write come to its end where a block ends in an error."""
        try:
            yield
        except BaseException:
            if self.thread is not None:
                self.thread.join()
            raise
