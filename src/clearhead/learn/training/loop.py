"""The training loop: every step in order, on one page.

Batches, dropout and learning rate of a step depend on its number alone. So a run that was stopped continues
exactly as if it had not been, and no random state has to be saved.
"""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from clearhead.errors import TrainingError
from clearhead.learn.batches.batch import Batch
from clearhead.learn.evaluation.examples import WRITTEN, validate, written_scores
from clearhead.learn.parallel.shards import local
from clearhead.learn.training import faults, machine, optim
from clearhead.learn.training.events import OnEvent, Reason, Saved, Skipped, Stepped, Validated
from clearhead.learn.training.running import TrainingRun
from clearhead.learn.training.state import (
    BEST,
    State,
    forget,
    optimizer_tensors,
    point,
    save_checkpoint,
    saved_steps,
    snapshot,
)
from clearhead.run.api import Model

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
    one, meter = run.stepping(run, scaler, on_event), Meter(run, on_event)
    model.train()
    upcoming = run.batches(state.step + 1)
    while state.step < run.steps and run.patient:
        step, work = state.step + 1, upcoming
        run.seed(step)
        optim.set_rate(run.optimizer, run.rate(step))
        with run.world.waiting(f"the gradients of step {step}"):
            total = one.gradients(work)
        if step < run.steps:
            upcoming = run.batches(step + 1)  # prepared while the device works
        meter.settle()  # on a GPU: reads the step before, while the device works on this one
        read = one.update(total, work.targets)
        run.task.after_step(model)
        if run.ema is not None:
            run.ema.update(model)
        state.step, state.tokens = step, state.tokens + work.tokens
        meter.pending = step, work.batches, read
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
        taken = snapshot(run.loaded, model, run.structure, tensors, state)

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
        self.pending: tuple[int, list[Batch], Callable[[], list[float]]] | None = None  # a step not yet read
        self.began = run.state.step, run.state.seconds
        self.reported = run.state.tokens, run.state.seconds
        self.ticked = time.perf_counter()

    def settle(self) -> None:
        """Read the pending step: report it if that is due, or that it was skipped; raise if many are."""
        if self.pending is None:
            return
        run, (step, batches, read) = self.run, self.pending
        loss, norm, _ = read()
        self.pending = None
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skip(step, batches, loss, norm)
            return
        run.state.skipped_last = 0
        if step % run.plan.log_every == 0 or step in (1, run.steps):
            self.on_event(self.report(loss, norm))

    def skip(self, step: int, batches: list[Batch], loss: float, norm: float) -> None:
        """Count and report a step that was skipped; raise if that will not do. All processes agree on it."""
        run, state = self.run, self.run.state
        state.skipped, state.skipped_last = state.skipped + 1, state.skipped_last + 1
        scaled = run.precision.scaled and math.isfinite(loss)
        often = not scaled and state.skipped > max(FEW, SHARE * step)
        again = state.skipped_last >= min(HALVINGS if scaled else IN_A_ROW, run.steps)
        lost = not all(local(one).isfinite().all() for one in run.model.parameters())  # nothing cures that
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

    def report(self, loss: float, norm: float) -> Stepped:
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
            rate=run.rate(state.step),
            norm=norm,
            tokens_per_second=speed,
            seconds=state.seconds,
            left=per_step * (run.steps - state.step),
            memory=machine.memory(run.precision.device),
            mfu=run.flops_per_token * speed / run.precision.peak
            if run.precision.peak and run.flops_per_token
            else None,
        )
