"""The training loop: every step in order, on one page.

Batches, dropout and learning rate of a step depend on its number alone. So a run that was stopped continues
exactly as if it had not been, and no random state has to be saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core.config.kinds import FULL, Windowed
from clearhead.core.transformer import Output, Transformer
from clearhead.errors import TrainingError
from clearhead.learn.batches.batch import Batch, Batches
from clearhead.learn.evaluation.evaluate import WRITTEN, validate, written_scores
from clearhead.learn.losses import Terms, arguments_for
from clearhead.learn.parallel import pipeline, shards
from clearhead.learn.parallel.pipeline import StageTransformer
from clearhead.learn.parallel.shards import local
from clearhead.learn.parallel.world import ALONE, World
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.task import Task
from clearhead.learn.training import faults, machine, optim, weights
from clearhead.learn.training.events import OnEvent, Reason, Saved, Skipped, Stepped, Validated
from clearhead.learn.training.state import (
    BEST,
    Saver,
    State,
    forget,
    optimizer_tensors,
    point,
    save_checkpoint,
    saved_steps,
    snapshot,
)
from clearhead.run.api import Model
from clearhead.run.kernels.lora import merged
from clearhead.run.quant.apply import dequantized
from clearhead.variants.routing import BALANCE

# A step whose loss or gradient is not finite is skipped. So many in a row, or more than so many that are also
# more than such a share of all steps, end the run.
IN_A_ROW, FEW, SHARE = 3, 10, 0.01
# In float16 the scale of the loss is halved after each infinite gradient, from 2^16 on: below 2^-24 a loss is
# lost in it. Those gradients are how it is found, and have no share.
HALVINGS = 40


def learn(run: TrainingRun, on_event: OnEvent, stop: Callable[[], bool]) -> Reason:
    """Train from `run.state` on; return why training ended. The last checkpoint may still be on its way."""
    plan, state, model = run.plan, run.state, run.model
    scaler = run.precision.scaler(state)
    stepper, meter = run.stepping(run, scaler, on_event), Meter(run, on_event)
    model.train()
    upcoming: pipeline.MicroBatches | None = run.batches(state.step + 1)
    while state.step < run.steps and run.patient:
        step, work = state.step + 1, upcoming or run.batches(state.step + 1)
        run.seed(step)
        optim.set_lr(run.optimizer, run.lr(step))
        with run.world.waiting(f"the gradients of step {step}"):
            total = stepper.gradients(work)
        prefetched = step < run.steps and not run.task.sampled
        upcoming = run.batches(step + 1) if prefetched else None  # prepared while the device works
        meter.settle()  # on a GPU: reads the step before, while the device works on this one
        read = stepper.update(total, work.targets)
        run.task.after_step(model)
        if run.ema is not None:
            run.ema.update(model)
        state.step, state.tokens = step, state.tokens + work.tokens
        meter.pending = step, work.batches, read, run.task.take_figures()
        if run.precision.device.type != "cuda":
            meter.settle()

        run.saver.finish(on_event)
        stopping, best = run.world.any(stop() or run.saver.failed), False
        if due(step, plan.validate_every, run.steps):
            meter.settle()
            meter.tick()
            with run.world.waiting(f"the validation of step {step}"):
                validated = validate_run(run)
            on_event(validated)
            meter.ticked = time.perf_counter()  # validation does not count
            best = validated.best or step in run.best_steps(plan.keep_best)[1:]
        if due(step, plan.save_every, run.steps) or best or stopping or not run.patient:
            meter.settle()
            meter.tick()
            with run.world.waiting(f"the checkpoint of step {step}"):
                run.saver.finish(on_event, wait=True)
                save(run, scaler)
        if stopping:
            return "stopped"
    return "done" if run.patient else "patience"


def due(step: int, every: int | None, steps: int) -> bool:
    """Return True at every `every`-th step and at the last one."""
    return step == steps or (every is not None and step % every == 0)


def validate_run(run: TrainingRun) -> Validated:
    """Validate, and record whether this is the best validation so far."""
    state, samples = run.state, tuple[str, ...]()
    with run.usable() as usable:
        metrics, missing = validate(
            usable, run.task, run.validation, run.precision.autocast, run.precision.device, run.world
        )
        if run.plan.samples or run.metric in WRITTEN:
            with run.whole(usable) as whole:
                scores, samples = run.world.once(lambda: written_by(run, whole))
            metrics |= scores
    state.validations.append({"step": state.step, **metrics})
    best = run.best_steps() == [state.step] and not math.isnan(metrics[run.metric])
    state.stale = 0 if best else state.stale + 1
    state.missing = missing if best else state.missing
    run.model.train()
    return Validated(state.step, metrics, best, samples)


def written_by(run: TrainingRun, model: Model | None) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the scores and samples of what a whole model writes."""
    assert model is not None, "only the first process has the whole model"
    return written_scores(model, run.task, run.validation, run.metric), run.samples(model)


def save(run: TrainingRun, scaler: Any = None) -> None:
    """Copy a checkpoint and begin to write it; then links are moved, and old checkpoints removed."""
    state, plan, model = run.state, run.plan, run.model
    if scaler is not None and scaler.is_enabled():
        state.scale, state.scale_age = scaler.get_scale(), scaler.state_dict()["_growth_tracker"]
    tensors = optimizer_tensors(run.optimizer, model)
    if run.ema is not None:
        tensors |= {f"ema/{name}": tensor for name, tensor in run.ema.state(bool(plan.lora)).items()}
    if run.ema is not None or plan.lora:
        tensors |= {f"weights/{name}": parameter.clone() for name, parameter in model.named_parameters()}
    with run.ema.applied(model) if run.ema is not None else nullcontext():
        if plan.quantize is None:
            taken = snapshot(run.loaded, model, run.structure, tensors, state)
        else:  # the model on disk is in floating point, as that of any other run
            plain = dequantized(model)
            taken = snapshot(replace(run.loaded, model=plain), plain, plain, tensors, state)

    def write() -> None:
        save_checkpoint(run.folder, taken, run.world.aside)
        if run.world.first:
            tidy(run, taken.state)

    run.saver.begin(Saved(state.step, run.folder), write)


def tidy(run: TrainingRun, state: State) -> None:
    """Point `best` to the best checkpoint, and remove those no longer needed."""
    steps, plan = saved_steps(run.folder), run.plan
    best = [step for step in run.best_steps(len(state.validations), state) if step in steps]
    if best:
        point(run.folder, BEST, best[0])
    whole = {*steps[-plan.keep_last :], *(best[:1] if plan.lora else ())}  # low-rank updates are left as such
    forget(run.folder, whole, {*averaged_steps(run), *best[: plan.keep_best]})


def averaged_steps(run: TrainingRun) -> list[int]:
    """Return the steps to average: the last of those saved by `save_every`, not for a stop or a best."""
    regular = [step for step in saved_steps(run.folder) if step and due(step, run.plan.save_every, run.steps)]
    return regular[-run.plan.average :] if run.plan.average else []


class Meter:
    """Reads the figures of each step, and measures time and speed; validation does not count."""

    def __init__(self, run: TrainingRun, on_event: OnEvent) -> None:
        self.run, self.on_event = run, on_event
        # A step not yet read: its number, batches, loss and gradient, and the figures of its task.
        self.pending: tuple[int, list[Batch], Callable[[], list[float]], dict[str, float]] | None = None
        self.began = run.state.step, run.state.seconds
        self.reported = run.state.tokens, run.state.seconds
        self.ticked = time.perf_counter()

    def settle(self) -> None:
        """Read the pending step: report it if that is due, or that it was skipped; raise if many are."""
        if self.pending is None:
            return
        run, (step, batches, read, figures) = self.run, self.pending
        loss, norm, _ = read()
        self.pending = None
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skip(step, batches, loss, norm)
            return
        run.state.skipped_last = 0
        if step % run.plan.log_every == 0 or step in (1, run.steps):
            self.on_event(self.report(loss, norm, figures))

    def skip(self, step: int, batches: list[Batch], loss: float, norm: float) -> None:
        """Count and report a step that was skipped; raise if that will not do. All processes agree on it."""
        run, state = self.run, self.run.state
        state.skipped, state.skipped_last = state.skipped + 1, state.skipped_last + 1
        scaled = run.precision.scaled and math.isfinite(loss)
        often = not scaled and state.skipped > max(FEW, SHARE * step)
        again = state.skipped_last >= min(HALVINGS if scaled else IN_A_ROW, run.steps)
        # Nothing cures weights that are not finite.
        lost = not all(local(parameter).isfinite().all() for parameter in run.model.parameters())
        if run.world.any(often or again or lost):
            run.seed(step)  # the optimizer did not step: the weights are still those before it
            work = run.model, batches, step, run.precision, run.plan, run.task, run.world
            why = faults.diagnose(*work, split_loss=None if run.empty is None else run.loss)
            raise TrainingError(f"{why} ({state.skipped:,} of {step:,} steps were not finite)")
        self.on_event(Skipped(step, loss, norm, state.skipped))

    def tick(self) -> None:
        """Add the time since the last tick to that of the run."""
        now = time.perf_counter()
        self.run.state.seconds += now - self.ticked
        self.ticked = now

    def report(self, loss: float, norm: float, figures: dict[str, float]) -> Stepped:
        """Return the figures of the last step, and the speed since the last report."""
        self.tick()
        run, state = self.run, self.run.state
        tokens, seconds = self.reported
        speed = (state.tokens - tokens) / max(state.seconds - seconds, 1e-9)
        self.reported = state.tokens, state.seconds
        first_step, first_seconds = self.began
        per_step = (state.seconds - first_seconds) / max(state.step - first_step, 1)
        return Stepped(
            step=state.step,
            steps=run.steps,
            loss=loss,
            rate=run.lr(state.step),
            norm=norm,
            tokens_per_second=speed,
            seconds=state.seconds,
            left=per_step * (run.steps - state.step),
            memory=machine.memory(run.precision.device),
            mfu=run.flops_per_token * speed / run.precision.peak
            if run.precision.peak and run.flops_per_token
            else None,
            figures=figures,
        )


# A run and its steps ----------------------------------------------------------------------------------------


class PlainStep:
    """A step in two parts: the gradients, and the update of the weights."""

    def __init__(self, run: TrainingRun, scaler: torch.amp.GradScaler, on_event: OnEvent) -> None:
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
    example: Any = None  # what `folder.first_example` returned
    flops_per_token: float = 0.0
    state: State = field(default_factory=State)
    world: World = ALONE  # the processes of the run
    compiled: Transformer | None = None  # a twin of the model that is compiled, with the same parts
    empty: Transformer | None = None  # the model without weights, where several processes hold parts of it
    partial: Sequence[nn.Parameter] = ()  # with gradients to be summed over the tensor axis
    saver: Saver = field(default_factory=Saver)
    fit: Callable[[Batch], Batch] = lambda batch: batch  # to one of the sizes of captured steps
    stepping: type[PlainStep] = PlainStep  # how steps are taken

    def __post_init__(self) -> None:
        self.terms = Terms.of(self.plan)

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
        whole = [self.fit(self.train.at(index)) for index in optim.batches_of(self.plan, step, self.steps)]
        return pipeline.micro_batches(whole, self.world, self.precision.device)

    def seed(self, step: int) -> None:
        """Seed dropout for a step."""
        torch.manual_seed(self.plan.seed * 1_000_003 + step + self.world.seed)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        return optim.lr_at(self.plan, step, self.steps, self.loaded.config.d_model)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, summed over its targets.

        Of a pipeline, the last stage returns it, without the balance of experts (see `StageTransformer`), and
        the others 0, whose gradient is that of what they have passed on.
        """
        plan = self.plan
        counted = bool(batch.n_rows)  # False: a row stands in for none
        with self.precision.autocast(), self.attention(), self.windowed():
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
                terms=self.terms,
            )
        return loss * counted

    @contextmanager
    def windowed(self) -> Iterator[None]:
        """Let layers that see all earlier tokens see as few as the schedule of the next step says."""
        windows = self.plan.window_schedule
        part = optim.part_of(len(windows) + 1, self.state.step + 1, self.steps)
        if part == len(windows):
            yield
            return
        stack, spec, kept = self.model.main, self.model.main.spec, Windowed(windows[part])
        kinds = tuple(kept if kind == FULL else kind for kind in spec.kinds)
        stack.spec = replace(spec, kinds=kinds)
        try:
            yield
        finally:
            stack.spec = spec

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
        merging = self.plan.lora and self.empty is None and self.plan.quantize is None
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
        weights = dict(shards.wholes(dict(self.model.named_parameters()), keep=self.world.first))
        if not self.world.first:
            yield None
            return
        model = shards.assembled(self.empty, weights)
        with merged(model) if self.plan.lora else nullcontext():
            yield replace(usable, model=model.eval())
