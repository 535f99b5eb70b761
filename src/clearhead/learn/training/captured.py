"""Training steps captured as CUDA graphs: the device runs a whole pass at one call of the host.

Handing over the kernels of a small model one by one takes the host longer than the device needs for them. So
both passes are captured once for each size of batch, and the update once. Batches are padded up to a few
sizes for it. What changes from step to step lies in tensors of fixed address: batch, rate, number of targets.
Dropout goes on as it would: a replay takes the seed that the step has set.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from clearhead.core.taps import SILENT, tap_for
from clearhead.errors import first_line
from clearhead.learn.batches.batch import Batch, padded_up, scored_up
from clearhead.learn.parallel.pipeline import MicroBatches
from clearhead.learn.training import optim
from clearhead.learn.training.events import Note, OnEvent
from clearhead.learn.training.loop import PlainStep, TrainingRun
from clearhead.run.kernels.steps import GraphRecorder

MOST = 256  # sizes of batches that are recorded; further ones run as they are
Launch: TypeAlias = Callable[[], object]
Size: TypeAlias = tuple[object, ...]


def capture_steps(run: TrainingRun) -> None:
    """Let a run take captured steps."""
    run.fit, run.stepping = functools.partial(fit, run), CapturedStep


def fit(run: TrainingRun, batch: Batch) -> Batch:
    """Bring a batch to one of a few sizes."""
    return scored_up(padded_up(batch, run.loaded.max_length) if run.train.ragged else batch)


def size_of(batch: Batch) -> Size:
    """Return all that a recording of a batch depends on."""
    shapes = ((name, tuple(tensor.shape), tensor.dtype) for name, tensor in batch.tensors().items())
    return (*shapes, batch.n_scored)


def can_capture(run: TrainingRun) -> bool:
    """Return True if steps can be captured, as far as that is known before the first one."""
    config = run.loaded.config
    return bool(
        run.task.capturable
        and run.precision.device.type == "cuda"
        and run.world.mesh is None
        and not (run.precision.scaled or run.plan.checkpointing or run.plan.window_schedule)
        and not run.plan.mtp_weight
        and run.optimizer.defaults.get("fused")  # which skips a step by itself; Adafactor cannot
        and not config.n_experts
        and config.depth_capacity == 1
    )


class CapturedStep(PlainStep):
    """A step whose passes and update replay CUDA graphs; each batch size is captured at its first use.

    The first update is not captured, since it creates the state of the optimizer. What cannot be captured
    runs eagerly, and is reported.
    """

    def __init__(self, run: TrainingRun, scaler: torch.amp.GradScaler, on_event: OnEvent) -> None:
        super().__init__(run, scaler, on_event)
        device = run.precision.device
        # None: what it would replay is run
        self.recorder = GraphRecorder() if device.type == "cuda" else None
        self.recording = True
        self.passes: dict[Size, CapturedPass] = {}
        self.replay_update: Launch | None = None
        self.targets, self.total = torch.ones((), device=device), torch.zeros((), device=device)
        self.numbers = torch.zeros(3, device=device)  # see `optim.step_if_finite`
        for group in run.optimizer.param_groups:
            group["lr"], group["capturable"] = torch.tensor(float(group["lr"]), device=device), True

    def gradients(self, work: MicroBatches) -> Tensor:
        """See `PlainStep.gradients`."""
        self.targets.fill_(max(1, work.targets))
        if self._ready(work.batches):
            for batch in work.batches:
                self.passes[size_of(batch)](batch)
        else:
            self.total += super().gradients(work)
        return self.total

    def update(self, total: Tensor, targets: int) -> Callable[[], list[float]]:
        """See `PlainStep.update`."""
        if self.replay_update is None and self.recording and self.run.optimizer.state:
            self.replay_update = self._recorded(self._update)
        (self.replay_update or self._update)()
        return optim.read_later(self.numbers)

    def _update(self) -> None:
        run = self.run
        norm = run.world.clip(self.trained, run.plan.clip or math.inf, self.counted)
        mean = self.total / self.targets
        self.numbers.copy_(torch.stack([mean, norm, mean + norm]))
        optim.step_unless(run.optimizer, ~self.numbers[-1].isfinite())
        torch._foreach_zero_([parameter.grad for parameter in self.trained if parameter.grad is not None])
        self.total.zero_()

    def _ready(self, batches: Sequence[Batch]) -> bool:
        """Record the sizes that are new; return False if these batches must run as they are."""
        if not self.recording or watched(self.run):
            return False
        for batch in batches:
            if size_of(batch) not in self.passes and len(self.passes) < MOST:
                self._record(batch)
        return all(size_of(batch) in self.passes for batch in batches)

    def _record(self, batch: Batch) -> None:
        """Record both passes over batches of the size of this one."""
        fixed = Batch(**{name: tensor.clone() for name, tensor in batch.tensors().items()})
        fixed.__dict__.update({name: getattr(batch, name) for name in Batch.COUNTS})

        def warm_up() -> None:
            _, gradients = self._gradients(fixed)  # what is made at first use is made now
            for parameter, gradient in zip(self.trained, gradients):
                if gradient is not None and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

        def passes() -> None:
            loss, gradients = self._gradients(fixed)
            pairs = [(weight.grad, grad) for weight, grad in zip(self.trained, gradients) if grad is not None]
            torch._foreach_add_(*map(list, zip(*pairs)))
            self.total.add_(loss)

        replay = self._recorded(passes, warm_up)
        if replay is not None:
            self.passes[size_of(batch)] = CapturedPass(fixed, replay)

    def _gradients(self, batch: Batch) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Return the loss of a batch [], and the gradients of its share of the mean."""
        loss = self.run.loss(batch)
        with self.run.attention():
            return loss.detach(), torch.autograd.grad(loss / self.targets, self.trained, allow_unused=True)

    def _recorded(self, launch: Launch, warm_up: Launch | None = None) -> Launch | None:
        """Record what `launch` launches, after a warm-up; on failure report it, and record no more."""
        devices = [self.run.precision.device] if self.recorder is not None else []
        try:
            if warm_up is not None:
                aside = nullcontext() if self.recorder is None else self.recorder.aside()
                with torch.random.fork_rng(devices), aside:
                    warm_up()
            return launch if self.recorder is None else self.recorder.record(launch)
        except Exception as error:  # an operation that waits for the device, or one that no recording holds
            self.recording, self.replay_update = False, None
            self.passes.clear()
            self.on_event(Note(f"steps are not recorded, and slower for it: {first_line(error)}"))
            return None


@dataclass(frozen=True)
class CapturedPass:
    """Both passes over batches of one size."""

    batch: Batch  # of fixed address
    replay: Launch

    def __call__(self, batch: Batch) -> None:
        """Add the gradients and the loss of a batch."""
        for mine, tensor in zip(self.batch.tensors().values(), batch.tensors().values()):
            mine.copy_(tensor, non_blocking=True)
        self.replay()


def watched(run: TrainingRun) -> bool:
    """Return True if somebody listens to the passes of the model, whom a replay would not call."""
    parts = run.model.modules()
    hooked = any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in parts)
    return hooked or tap_for(run.model) is not SILENT
