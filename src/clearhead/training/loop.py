"""The training loop: every step in order, on one page.

A step's batches, dropout and rate follow from its number alone. So a run that was stopped goes on as if it never had been,
and nothing random has to be saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.batches.batch import Batch, Batches
from clearhead.bundle import Model
from clearhead.errors import TrainingError
from clearhead.model.transformer import Transformer
from clearhead.tasks.spec import TaskSpec
from clearhead.training.averaging import Ema
from clearhead.training.events import OnEvent, Saved, Stepped, Validated
from clearhead.training.faults import diagnose
from clearhead.training.lora import merged
from clearhead.training.losses import batch_loss
from clearhead.training.machine import memory
from clearhead.training.optim import set_rate, step_if_finite
from clearhead.training.plan import TrainPlan
from clearhead.training.precision import Precision
from clearhead.training.schedule import rate
from clearhead.training.state import (
    BEST,
    State,
    forget,
    optimizer_tensors,
    point,
    save_checkpoint,
    saved_steps,
)
from clearhead.training.validate import validate


@dataclass
class Run:
    """All that a run is made of."""

    folder: Path
    task: TaskSpec
    plan: TrainPlan  # with nothing left to choose
    loaded: Model  # the model in training, with its tokenizer and labels
    train: Batches
    validation: Batches
    optimizer: torch.optim.Optimizer
    precision: Precision
    device: torch.device
    attention: Callable[[], AbstractContextManager[object]] = nullcontext  # see `machine.quick_attention`
    ema: Ema | None = None
    samples: Callable[[Model], tuple[str, ...]] = lambda loaded: ()
    flops_per_token: float = 0.0
    state: State = field(default_factory=State)

    @property
    def model(self) -> Transformer:
        """The model in training."""
        return self.loaded.model

    @property
    def steps(self) -> int:
        """How many there are in all."""
        assert self.plan.steps is not None
        return self.plan.steps

    @property
    def metric(self) -> str:
        """What the best checkpoint is chosen by."""
        assert self.plan.metric is not None
        return self.plan.metric

    @property
    def larger(self) -> bool:
        """Return True if more of the metric is better: of every metric but the loss."""
        return self.metric != "loss"

    @property
    def patient(self) -> bool:
        """Has there been progress, or is the lack of it still borne?"""
        return self.plan.patience is None or self.state.stale < self.plan.patience

    def batches(self, step: int) -> list[Batch]:
        """What step number `step`, counted from 1, learns from."""
        first = (step - 1) * self.plan.accumulate
        return [self.train.at(first + place).to(self.device) for place in range(self.plan.accumulate)]

    @contextmanager
    def usable(self) -> Iterator[Model]:
        """The model as it would be used now: averaged and merged, where that is asked for."""
        averaged = self.ema.applied(self.model) if self.ema is not None else nullcontext()
        with averaged, merged(self.model) if self.plan.lora else nullcontext():
            yield replace(self.loaded, _copy=None)


def learn(run: Run, on_event: OnEvent, stop: Callable[[], bool]) -> str:
    """Train from where `run.state` stands; why it ended: done, patience or stopped."""
    plan, state, model, optimizer = run.plan, run.state, run.model, run.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scaler = run.precision.scaler(state)
    clock = Clock(run)
    last: Taken | None = None  # asked for, and not yet known to have gone well

    def settle() -> None:
        """See that the last step went well, and report it if that is due."""
        nonlocal last
        if last is not None:
            loss, norm = last.numbers(run)
            if last.step % plan.log_every == 0 or last.step in (1, run.steps):
                on_event(clock.report(loss, norm))
        last = None

    model.train()
    upcoming = run.batches(state.step + 1)
    while state.step < run.steps and run.patient:
        step = state.step + 1
        torch.manual_seed(plan.seed * 1_000_003 + step)
        set_rate(optimizer, rate(plan, step, run.steps, model.config.d_model))
        batches = upcoming
        targets = max(1, sum(batch.n_targets for batch in batches))
        total = torch.zeros((), device=run.device)
        for batch in batches:
            with run.precision.autocast(), run.attention():
                loss, _ = batch_loss(
                    model, batch, plan.label_smoothing, plan.loss_chunk, objective=run.task.objective
                )
            scaler.scale(loss / targets).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if step < run.steps:
            upcoming = run.batches(step + 1)  # made ready while the device works
        settle()  # the step before, on a GPU: it is not kept waiting, it has this step's work to do
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(trained, plan.clip or math.inf)
        last = Taken(step, batches, step_if_finite(optimizer, scaler, total / targets, norm))
        optimizer.zero_grad(set_to_none=True)
        if run.ema is not None:
            run.ema.update(model)
        state.step, state.tokens = step, state.tokens + sum(batch.n_tokens for batch in batches)

        if run.device.type != "cuda":
            settle()
        stopping, best = stop(), False
        if due(step, plan.validate_every, run.steps):
            settle()
            with clock.paused():
                judged = judge(run)
                on_event(judged)
            best = judged.best or step in state.best(run.metric, run.larger, plan.keep_best)[1:]
        if due(step, plan.save_every, run.steps) or best or stopping or not run.patient:
            settle()
            clock.tick()
            save(run, scaler)
            on_event(Saved(step, run.folder))
        if stopping:
            return "stopped"
    return "done" if run.patient else "patience"


def due(step: int, every: int | None, steps: int) -> bool:
    """Is it time? The last step always is."""
    return step == steps or (every is not None and step % every == 0)


def judge(run: Run) -> Validated:
    """Validate, and remember the best."""
    state = run.state
    with run.usable() as usable:
        metrics = validate(usable, run.task, run.validation, run.precision, run.device, run.metric)
        samples = run.samples(usable)
    state.validations.append({"step": state.step, **metrics})
    best = state.best(run.metric, run.larger) == [state.step] and not math.isnan(
        metrics[run.metric]
    )
    state.stale = 0 if best else state.stale + 1
    run.model.train()
    return Validated(state.step, metrics, best, samples)


def save(run: Run, scaler: Any = None) -> None:
    """Write a checkpoint, move the links, and remove what need not be kept."""
    state, plan = run.state, run.plan
    if scaler is not None and scaler.is_enabled():
        state.scale, state.scale_age = scaler.get_scale(), scaler.state_dict()["_growth_tracker"]
    tensors = optimizer_tensors(run.optimizer, run.model)
    if run.ema is not None:
        tensors |= {f"ema/{name}": tensor for name, tensor in run.ema.state().items()}
    if run.ema is not None or plan.lora:
        tensors |= {f"weights/{name}": parameter.clone() for name, parameter in run.model.named_parameters()}
    with run.usable() as usable:
        save_checkpoint(run.folder, usable, tensors, state)
    steps = saved_steps(run.folder)
    judged = [
        step for step in state.best(run.metric, run.larger, len(state.validations)) if step in steps
    ]
    if judged:
        point(run.folder, BEST, judged[0])
    forget(run.folder, {*steps[-plan.keep_last :], *averaged(run), *judged[: plan.keep_best]})


def averaged(run: Run) -> list[int]:
    """The steps whose weights make the average: the last of those saved by plan, not because the run was stopped or did well."""
    regular = [step for step in saved_steps(run.folder) if step and due(step, run.plan.save_every, run.steps)]
    return regular[-run.plan.average :] if run.plan.average else []


@dataclass(frozen=True)
class Taken:
    """A step that the optimizer has been asked for. It changes nothing where its loss or gradient is not finite."""

    step: int
    batches: list[Batch]
    read: Callable[[], list[float]]  # see `step_if_finite`

    def numbers(self, run: Run) -> tuple[float, float]:
        """Its loss and the norm of its gradient; ends the run and says what went wrong, if something did."""
        loss, norm, verdict = self.read()
        if not math.isfinite(verdict):
            torch.manual_seed(
                run.plan.seed * 1_000_003 + self.step
            )  # the weights are still those before the step
            raise TrainingError(diagnose(run.model, self.batches, self.step, run.precision, run.plan, run.task.objective))
        return loss, norm


class Clock:
    """Time and speed of a run, validation left out."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.since, self.tokens, self.step = time.perf_counter(), run.state.tokens, run.state.step
        self.first_step, self.first_seconds = run.state.step, run.state.seconds
        self.ticked = self.since

    def tick(self) -> None:
        """Add the time since the last tick to the run's."""
        now = time.perf_counter()
        self.run.state.seconds += now - self.ticked
        self.ticked = now

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside is not training."""
        self.tick()
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        self.ticked += took
        self.since += took

    def report(self, loss: float, norm: float) -> Stepped:
        """Figures of the last step and the speed since the last report."""
        self.tick()
        state, plan, now = self.run.state, self.run.plan, time.perf_counter()
        speed = (state.tokens - self.tokens) / max(now - self.since, 1e-9)
        self.since, self.tokens = now, state.tokens
        done = state.step - self.first_step
        left = (state.seconds - self.first_seconds) / max(done, 1) * (self.run.steps - state.step)
        peak = self.run.precision.peak
        return Stepped(
            state.step,
            self.run.steps,
            loss,
            rate(plan, state.step, self.run.steps, self.run.model.config.d_model),
            norm,
            speed,
            state.seconds,
            left,
            memory(self.run.device),
            self.run.flops_per_token * speed / peak if peak and self.run.flops_per_token else None,
        )
