"""`TrainingRun`: everything a run works with; `PlainStep`: how it takes a step.

A step has two parts: the gradients of its batches, then the update of the weights.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core.transformer import Output, Transformer
from clearhead.learn.batches.batch import Batch, Batches
from clearhead.learn.losses import arguments_for
from clearhead.learn.parallel import pipeline, shards
from clearhead.learn.parallel.pipeline import StageTransformer
from clearhead.learn.parallel.world import ALONE, World
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.task import Task
from clearhead.learn.training import machine, optim, weights
from clearhead.learn.training.events import OnEvent
from clearhead.learn.training.saving import Saver
from clearhead.learn.training.state import State
from clearhead.run.api import Model
from clearhead.run.kernels.lora import merged
from clearhead.variants.routing import BALANCE


class PlainStep:
    """A step in two parts: the gradients, and the update of the weights."""

    def __init__(self, run: "TrainingRun", scaler: torch.amp.GradScaler, on_event: OnEvent) -> None:
        self.run, self.scaler, self.on_event, model = run, scaler, on_event, run.model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.counted = model.counted() if isinstance(model, StageTransformer) else self.trained

    def gradients(self, work: pipeline.MicroBatches) -> Tensor:
        """Add up the gradients of a step; return its loss [], summed over the targets of this process."""
        run, scaler = self.run, self.scaler
        return pipeline.gradients(
            run.loaded.model, work, run.world, run.loss, lambda loss: run.backward(scaler.scale(loss))
        )

    def update(self, total: Tensor, targets: int) -> Callable[[], list[float]]:
        """Clip the gradients and take the step; return what `optim.step_if_finite` returns."""
        run = self.run
        run.world.complete(run.partial)
        self.scaler.unscale_(run.optimizer)
        norm = run.world.clip(self.trained, run.plan.clip or math.inf, self.counted)
        mean = run.world.sum(total, stages=True) / max(1, targets)
        read = optim.step_if_finite(run.optimizer, self.scaler, mean, norm)
        run.optimizer.zero_grad(set_to_none=True)
        return read


@dataclass
class TrainingRun:
    """Everything a run works with."""

    folder: Path
    task: Task
    plan: TrainPlan  # with nothing left to choose
    steps: int  # of the whole run
    metric: str  # that the best checkpoint is chosen by
    loaded: Model  # the model in training, with its tokenizer and labels
    train: Batches
    validation: Batches
    optimizer: torch.optim.Optimizer
    precision: machine.Precision
    attention: Callable[[], AbstractContextManager[object]] = nullcontext  # see `machine.quick_attention`
    ema: weights.Ema | None = None
    samples: Callable[[Model], tuple[str, ...]] = lambda loaded: ()
    example: Any = None  # what `tries.first_example` returned
    flops_per_token: float = 0.0
    state: State = field(default_factory=State)
    world: World = ALONE  # the processes of the run
    compiled: Transformer | None = None  # a twin of the model that is compiled, with the same parts
    empty: Transformer | None = None  # the model without weights, where several processes hold parts of it
    partial: Sequence[nn.Parameter] = ()  # with gradients to be summed over the tensor axis
    saver: Saver = field(default_factory=Saver)
    fit: Callable[[Batch], Batch] = lambda batch: batch  # to one of the sizes of recorded steps
    stepping: type[PlainStep] = PlainStep  # how steps are taken

    @property
    def model(self) -> Transformer:
        """The model in training."""
        return self.task.module(self.loaded)  # type: ignore[return-value]

    @property
    def runner(self) -> Transformer:
        """What is called in place of the model: its compiled twin, where there is one."""
        return self.model if self.compiled is None else self.compiled

    @property
    def patient(self) -> bool:
        """True while the metric has improved within the last `patience` validations."""
        return self.plan.patience is None or self.state.stale < self.plan.patience

    @property
    def structure(self) -> Transformer:
        """A model with every parameter of the one in training, by shape and name."""
        return self.model if self.empty is None else self.empty

    def best_steps(self, count: int = 1, state: State | None = None) -> list[int]:
        """Return the steps of the best validations, the best first."""
        return (state or self.state).best(self.metric, self.metric != "loss", count)

    def batches(self, step: int) -> pipeline.MicroBatches:
        """Return the batches of a step, of which this process has some of the rows; the first step is 1."""
        size = self.plan.accumulate
        whole = [self.fit(self.train.at(index)) for index in range((step - 1) * size, step * size)]
        return pipeline.micro_batches(whole, self.world, self.precision.device)

    def seed(self, step: int) -> None:
        """Seed dropout for a step."""
        torch.manual_seed(self.plan.seed * 1_000_003 + step + self.world.seed)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        return optim.rate(self.plan, step, self.steps, self.loaded.config.d_model)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, summed over its targets.

        Of a pipeline, the last stage returns it, without the balance of experts (see `StageTransformer`), and
        the others 0, whose gradient is that of what they have passed on.
        """
        plan = self.plan
        counted = bool(batch.n_rows)  # False: a row stands in for none
        with self.precision.autocast(), self.attention():
            if not self.world.last:
                passed: Output = self.runner(**arguments_for(self.model, batch), logits="none")
                return passed.required_logits
            loss, _ = self.task.batch_loss(
                self.runner,
                batch,
                plan.label_smoothing,
                plan.loss_chunk,
                0.0 if isinstance(self.model, StageTransformer) else BALANCE,
                total=lambda value: self.world.sum(value * counted),
            )
        return loss * counted

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss []; what is computed again for it takes the same kernels."""
        with self.attention():
            loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def usable(self) -> Iterator[Model]:
        """Give the model as it would be used now: averaged and merged, where the plan asks for it.

        One that is split is not merged, which `whole` does.
        """
        averaged = self.ema.applied(self.model) if self.ema is not None else nullcontext()
        merging = self.plan.lora and self.empty is None
        with averaged, merged(self.model) if merging else nullcontext():
            try:
                yield self.loaded if self.compiled is None else replace(self.loaded, model=self.compiled)
            finally:
                shards.rest(self.model)

    @contextmanager
    def whole(self, usable: Model) -> Iterator[Model | None]:
        """Give what `usable` gave as one plain model, on the CPU where it is split; None but in the first."""
        if self.empty is None:
            yield usable
            return
        found = dict(shards.wholes(dict(self.model.named_parameters()), keep=self.world.first))
        if not self.world.first:
            yield None
            return
        made = shards.assembled(self.empty, found)
        with merged(made) if self.plan.lora else nullcontext():
            yield replace(usable, model=made.eval())
