"""The reference of preference tuning: what the model gave to every answer before its first step.

It is computed once, with the weights, the precision and the batches of the run, and kept beside them: no
second model stays in memory, and a run that is resumed reads it back. That the model still gives the same
before its first step is checked, on the first batch to train on.
"""

import numpy as np
import torch

from clearhead.core.transformer import evaluating
from clearhead.errors import CheckpointError, ConfigError, TrainingError, refuse
from clearhead.learn.batches.batch import Batch
from clearhead.learn.tasks.entries.chats import PreferenceBatches
from clearhead.learn.training.events import Note, OnEvent
from clearhead.learn.training.running import TrainingRun
from clearhead.learn.training.state import CACHE

# How far two computations of one log-probability may be apart, as a share of it: padding differs.
ALIKE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-3, "float8": 1e-1}


def keep_reference(run: TrainingRun, on_event: OnEvent) -> None:
    """Compute the reference of a new run of pairs, write it beside the run, and check it."""
    for side, batches in _sides(run).items():
        plan = run.world.plan
        refuse(
            plan.pipeline * plan.tensor * plan.context > 1,
            "preference tuning splits no model: leave parallel.pipeline, tensor and context at 1",
            ConfigError,
        )
        for batch in batches.all():
            assert batch.numbers is not None
            batches.reference[batch.numbers.numpy()] = logprobs(run, batch).cpu().numpy()
        if run.world.first:
            np.save(run.folder / CACHE / f"reference-{side}.npy", batches.reference, allow_pickle=False)
        if side == "train":
            on_event(Note(f"reference: the model itself before its first step; off by {_check(run):.1e}"))


def read_reference(run: TrainingRun) -> None:
    """Read the reference of a run that goes on."""
    for side, batches in _sides(run).items():
        path = run.folder / CACHE / f"reference-{side}.npy"
        try:
            found = np.load(path, allow_pickle=False)
        except (OSError, ValueError):
            raise CheckpointError(
                f"{path} is missing or damaged, and the model it was computed with is gone: begin a new run"
            ) from None
        refuse(
            found.shape != batches.reference.shape,
            f"{path} holds other pairs than the data: begin a new run",
            CheckpointError,
        )
        batches.reference[:] = found


@torch.no_grad()
def logprobs(run: TrainingRun, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities of the two answers of each row, [B, 2], as the run computes them."""
    moved = batch.to(run.precision.device)
    with evaluating(run.model), run.precision.autocast():
        return run.task.outputs_of(run.model, moved, run.plan.loss_chunk).float()


def _check(run: TrainingRun) -> float:
    """Refuse a model that differs from its reference before the first step; return the share it is off by."""
    first = run.train.at(0)
    assert first.reference is not None
    here = logprobs(run, first).cpu()
    apart = float(((here - first.reference).abs() / first.reference.abs().clamp(min=1)).max())
    refuse(
        not apart <= ALIKE[run.precision.name],
        f"the model differs from its reference by {apart:.1e} before the first step: "
        "this is a fault of the precision or the kernels; set train.precision=float32",
        TrainingError,
    )
    return apart


def _sides(run: TrainingRun) -> dict[str, PreferenceBatches]:
    both = {"validation": run.validation, "train": run.train}
    return {side: one for side, one in both.items() if isinstance(one, PreferenceBatches)}
