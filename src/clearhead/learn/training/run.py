"""`train`: from data to a model directory, step by step; `rehearse`: the same up to the first step."""

import dataclasses
import glob
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import CheckpointError, ConfigError, TrainingError, plain, refuse
from clearhead.hub.files import MODEL, whole_folder, write_text
from clearhead.hub.weights import Outgoing, open_tensors, write_tensors
from clearhead.learn.data import corpora, files
from clearhead.learn.data.files import RECIPE
from clearhead.learn.data.given import Given, given_or_paths
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.evaluate import validate, written_scores
from clearhead.learn.parallel import ParallelPlan, shards
from clearhead.learn.parallel.pipeline import staged
from clearhead.learn.parallel.shards import materialise
from clearhead.learn.parallel.world import joined
from clearhead.learn.recipe import BASE, SECTIONS, Recipe, Settings, read_recipe
from clearhead.learn.tasks import table
from clearhead.learn.training import build, faults, loop, machine, optim, weights
from clearhead.learn.training.events import Finished, Note, OnEvent, Reason, Started, Validated, logged
from clearhead.learn.training.fit import names_of
from clearhead.learn.training.folder import (
    command_to_try,
    leave_adapter,
    leave_card,
    mark,
    new_folder,
    ours,
    resumed_folder,
)
from clearhead.learn.training.loop import TrainingRun
from clearhead.learn.training.prepare import (
    FINGERPRINT,
    Job,
    assemble,
    encode_batches,
    is_based,
    prepare,
    read_reference,
)
from clearhead.learn.training.state import (
    BEST,
    CHECKPOINTS,
    LAST,
    PRETRAIN,
    TENSORS,
    load_checkpoint,
    newest,
    restore_optimizer,
)
from clearhead.run.api import Model, load, open_empty
from clearhead.run.bundle import SHARD_SIZE, best_device
from clearhead.run.kernels.transpose import lay_out_rows
from clearhead.run.quant.layers import distinct
from clearhead.variants.costs import LEARNING

# What may change in a run that goes on: how long it is, and what is validated, kept and shown on the way.
CHANGEABLE = tuple(
    f"train.{name}"
    for name in (
        *("steps", "validate_every", "save_every", "patience", "keep_best", "keep_last", "log_every"),
        *("samples", "offload", "threads", "compile"),
    )
) + tuple(f"parallel.{field.name}" for field in dataclasses.fields(ParallelPlan))


@dataclass(frozen=True)
class Trained:
    """The result of a run."""

    model: Model  # with the best weights by the run's metric
    folder: Path
    step: int
    metrics: dict[str, float]  # of the best validation, and its step
    reason: Reason
    command: str = ""  # `clearhead` and this uses the model on an example from the data
    skipped: int = 0  # steps that were not taken, because loss or gradient was not finite


def train(
    data: Any = (),
    *,
    recipe: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    settings: Settings = (),
    resume: str | Path | None = None,
    overwrite: bool = False,
    on_event: OnEvent = lambda event: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Train a model from files and write it to a folder, as `clearhead train` does.

    Args:
        data: files, folders, globs, or the name of an embedded corpus; none: what the recipe names. Or rows
            in memory, which are written into the folder of the run: a list or any iterable of texts,
            dictionaries or tuples, a dictionary of columns, a frame of pandas or polars, an Arrow table, a
            data set of Hugging Face `datasets`.
        recipe: a recipe, its name, or its file; None: chosen by the data.
        out: the folder to write; None: `runs/` and the name of the data.
        settings: changes of the recipe: `{"train.steps": 2000}`, or strings such as `train.steps=2000`.
        resume: the folder of a run to continue, by its own recipe. `settings` may make it longer, finished or
            not: `{"train.steps": 4000}`; everything else must be left out.
        overwrite: remove an earlier run in `out`.
        on_event: called with every event of the run.
        stop: called after each step; True saves and ends the run, which can be resumed later.
    """
    settings = settings if isinstance(settings, Mapping) else list(settings)
    if resume is not None:
        refuse(
            given_or_paths(data) != () or recipe is not None or out is not None or overwrite,
            "resume continues with the run's own recipe and folder: "
            "leave data, recipe, out and overwrite out",
        )
    with joined() as world:
        tell: OnEvent = on_event if world.first else lambda event: None
        if resume is None:
            plan, folder, rows = planned(data, recipe, out, settings)
        else:
            folder = Path(resume)
        named = recipe is not None or resume is not None
        job = Job(folder, tell, world, stop, given=None if named else names_of(settings))
        if resume is not None or world.once(lambda: ours(folder)):
            with world.holding(resumed_folder(folder, tell), folder):
                return _resume(job, settings if resume is not None else ())
        needed = (*plan.data.paths, *plan.data.validation, plan.tokens.model, plan.model.get(BASE))
        paths = [Path(path) for path in needed if path is not None]
        with world.holding(new_folder(folder, overwrite, paths, tell), lambda: None) as keep:
            world.agree(
                {
                    f"{name}.{key}": value
                    for name in SECTIONS
                    for key, value in plain(getattr(plan, name)).items()
                }
            )
            return _start(world.once(lambda: with_rows(plan, rows, job)), replace(job, keep=keep))


def planned(
    data: Any, recipe: str | Path | Recipe | None, out: str | Path | None, settings: Settings
) -> tuple[Recipe, Path, Given | None]:
    """Return the recipe of a new run, its paths absolute, the folder to write, and rows in memory, if any.

    See `train` for the arguments.
    """
    plan = read_recipe(recipe, settings)
    table.row_of(plan.data.task)  # refuses a task that does not exist
    source = given_or_paths(data)
    if not isinstance(source, Given) and source:
        plan = plan.replace("data", paths=source)
    folder = Path(out) if out is not None else Path("runs") / run_name(plan.data)
    return with_absolute_paths(plan), folder, source if isinstance(source, Given) else None


def with_rows(plan: Recipe, rows: Given | None, job: Job) -> Recipe:
    """Write rows in memory, if any, into the folder, and return the recipe that reads them there."""
    if rows is None:
        return plan
    for line in rows.notes:
        job.note(line)
    if plan.data.format or plan.data.pattern:
        job.note("data.format and data.pattern are for files: rows in memory need none")
    return plan.replace("data", format=None, pattern=None, **rows.write(job.folder))


def _start(recipe: Recipe, job: Job) -> Trained:
    """Run the first stage, if there are two, then the run itself."""
    if job.world.first:
        write_text(job.folder / files.RECIPE, recipe.to_toml())
        mark(job.folder)
    if recipe.train.pretrain:
        first = _pretrain(recipe, replace(job, folder=job.folder / PRETRAIN))
        if first.reason == "stopped":
            return replace(first, folder=job.folder)
        recipe = recipe.replace("model", base=str(first.folder.absolute()))
        recipe = recipe.replace("tokens", kind=None).replace("train", pretrain=0)
    run = prepare(recipe, job)
    baseline = None
    if is_based(recipe):
        with run.world.waiting("the validation of the base"):
            baseline = loop.validate_run(run)
    with run.world.waiting("the first checkpoint"):
        loop.save(run)
        run.saver.finish(wait=True)
    job.keep()
    return _finish(run, job, baseline)


def _pretrain(recipe: Recipe, job: Job) -> Trained:
    """Start or resume the first stage in its own folder: masked language modelling on the same texts."""
    if job.world.once(lambda: newest(job.folder) is not None):
        return _resume(job)
    _, name = table.open_examples(recipe.data)
    fits = " and ".join(sorted(name for name, task in table.TASKS.items() if task.pretrain))
    refuse(not table.TASKS[name].pretrain, f"train.pretrain is for {fits}, and this is {name}: set it to 0")
    table.TASKS[name].check_metric(recipe.train.metric)
    steps = recipe.train.pretrain
    job.note(f"first stage: {steps:,} steps of masked language modelling")
    later = {
        **{"pretrain": 0, "metric": None, "patience": None, "average": 0},  # are of the second stage
        **{"lora": 0, "quantize": None, "freeze": (), "layer_decay": 1.0},  # keep trained weights: none yet
        **{"class_weights": None, "standardise": False},
    }
    recipe = recipe.replace("train", steps=steps, epochs=None, **later)
    return _start(recipe.replace("data", task="mlm", texts_only=True, token_dropout=0.0), job)


def _resume(job: Job, settings: Settings = ()) -> Trained:
    checkpoint = job.world.once(lambda: newest(job.folder))
    recipe = job.world.once(lambda: changed_recipe(job.folder, settings))
    if checkpoint is None:  # it ended in its first stage
        return _start(recipe, job)
    if job.world.first:
        mark(job.folder)
        for unfinished in (job.folder / CHECKPOINTS).glob(".step-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
    return _finish(restore(recipe, checkpoint, job), job)


def _finish(run: TrainingRun, job: Job, baseline: Validated | None = None) -> Trained:
    """Train to the end, choose the weights, and write them to the folder itself.

    `baseline` is the validation before the first step.
    """
    state, first = run.state, run.world.first
    parameters, trainable = parameter_counts(run.empty or run.model)
    tell, board = job.on_event, run.plan.tensorboard
    log = logged(run.folder, state.step, tell, board) if first else nullcontext(tell)
    with log as tell:
        tell(
            Started(
                folder=run.folder,
                task=run.task.name,
                parameters=parameters,
                trainable=trainable,
                steps=run.steps,
                step=state.step,
                device=str(run.precision.device),
            )
        )
        if baseline is not None:
            tell(baseline)
        with faults.naming_memory(state, run.world), run.saver.completing():
            reason = loop.learn(run, tell, job.stop)
            run.saver.finish(tell, wait=True)
        run.world.meet()  # the links are moved
        chosen, metrics = _chosen(run, reason)
        for line in _verdict(run, metrics) if reason != "stopped" else ():
            tell(Note(line))
        tell(Finished(run.folder, state.step, state.seconds, metrics, reason, state.skipped))
    use = command_to_try(run.task, run.example, chosen, run.folder) if reason != "stopped" else ""
    if first and reason != "stopped":
        leave_card(run, chosen, metrics, use)
    return Trained(chosen, run.folder, state.step, metrics, reason, use, state.skipped)


def _verdict(run: TrainingRun, metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence where nothing was better than the base, and one on what is never predicted."""
    if metrics.get("step") == 0:
        kept = f"{run.metric} {metrics[run.metric]:.4g}"
        yield f"nothing improved on the base ({kept}): the base is kept as it was"
    if run.state.missing and metrics.get("step") in run.best_steps():
        yield run.state.missing


def _chosen(run: TrainingRun, reason: Reason) -> tuple[Model, dict[str, float]]:
    """Return the best checkpoint with its metrics, or the average of the last checkpoints with its own.

    Unless the run was stopped, it is written to the folder itself.
    """
    best = run.folder / BEST
    checkpoint = (best if best.exists() else run.folder / LAST).resolve()
    step = int(checkpoint.name.removeprefix("step-"))
    metrics = next((row for row in run.state.validations if row["step"] == step), {})
    if reason == "stopped":
        return load(checkpoint), metrics
    steps = loop.averaged_steps(run)  # none, where patience ended the run before the first of them
    if run.world.first:
        _write_model(run.folder, checkpoint, [run.folder / CHECKPOINTS / f"step-{step}" for step in steps])
    run.world.meet()
    chosen = load(run.folder)
    if run.world.first and len(steps) < 2:
        leave_adapter(run, chosen, checkpoint)
    return chosen, metrics if len(steps) < 2 else {"step": run.state.step, **_judged(run, chosen)}


def _write_model(folder: Path, checkpoint: Path, averaged: list[Path]) -> None:
    """Write the model of a checkpoint to a folder, or its weights averaged over several, one at a time."""
    several = len(averaged) > 1
    with whole_folder(folder) as work:
        for path in checkpoint.iterdir():
            ours = path.name.startswith(TENSORS) or (several and path.match(f"{MODEL}*.safetensors*"))
            if not ours:
                copy: Any = shutil.copyfile if path.is_file() else shutil.copytree
                copy(path, work / path.name)
        if several:
            opened = [open_tensors(path, MODEL) for path in averaged]
            tensors = {
                name: Outgoing(tensor.shape, tensor.dtype, (name,)) for name, tensor in opened[0].items()
            }

            def mean(name: str, owner: int) -> Tensor:
                return weights.average({name: stored[name].read()} for stored in opened)[name]

            write_tensors(work, MODEL, tensors, mean, SHARD_SIZE)


def _judged(run: TrainingRun, chosen: Model) -> dict[str, float]:
    """Return the metrics of a model on the validation data; several processes split it as in training."""
    judged, device = chosen, run.precision.device
    if run.world.size == 1:
        judged.model.to(device)
    else:
        from clearhead.learn.parallel.split import split  # takes seconds to import

        judged, unread = open_empty(run.folder)
        if run.world.extent("pipeline") > 1:
            judged.model = staged(judged.model, run.world, device)
        split(judged.model, run.world)
        materialise(judged.model, device, unread)
    metrics, _ = validate(judged, run.task, run.validation, run.precision.autocast, device, run.world)
    chosen.model.to("cpu")
    return metrics | run.world.once(lambda: written_scores(chosen, run.task, run.validation, run.metric))


# The names in a recipe --------------------------------------------------------------------------------------


def run_name(plan: DataPlan) -> str:
    """Name a run for its first file or folder; for a glob, name it for the folder that is searched."""
    first = Path(plan.paths[0]).absolute() if plan.paths else Path("model")
    named = next((path for path in (first, *first.parents) if not glob.has_magic(path.name)), first)
    return named.name.split(".")[0] or "model"


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Make the paths of a recipe absolute; the name of a corpus or a preset stays as it is."""

    def absolute(path: str, prefix: bool = False) -> str:
        # A prefix names several files: `train` for train.en and train.de.
        is_path = "/" in path or Path(path).exists() or (prefix and any(glob.iglob(f"{path}*")))
        return str(Path(path).absolute()) if is_path else path

    paths = {
        name: tuple(absolute(path, prefix=path not in corpora.CORPORA) for path in getattr(recipe.data, name))
        for name in ("paths", "validation")
    }
    recipe = recipe.replace("data", **paths)
    rewards = (absolute(name) if ".py" in name else name for name in recipe.grpo.reward)
    tools = recipe.grpo.tools and absolute(recipe.grpo.tools)
    recipe = recipe.replace("grpo", reward=tuple(rewards), tools=tools)
    for section, key, path in (
        ("tokens", "model", recipe.tokens.model),
        ("model", BASE, recipe.model.get(BASE)),
    ):
        if path is not None:
            recipe = recipe.replace(section, **{key: absolute(path)})
    return recipe


# A run that goes on -----------------------------------------------------------------------------------------


def changed_recipe(folder: Path, settings: Settings) -> Recipe:
    """Read the recipe of a run that is resumed, with the settings that may change on resume."""
    old, new = (read_recipe(folder / RECIPE, some) for some in ((), settings))
    for section in SECTIONS:
        ours, theirs = (plain(getattr(recipe, section)) for recipe in (old, new))
        for key in sorted(ours.keys() | theirs.keys()):
            refuse(
                ours.get(key) != theirs.get(key) and f"{section}.{key}" not in CHANGEABLE,
                f"{section}.{key} cannot change in a run that goes on: {', '.join(CHANGEABLE)} can; "
                f"for the rest begin a new run with --set model.base={folder}",
                ConfigError,
            )
    refuse(
        new.train.steps is None and not new.train.pretrain,
        "train.steps cannot be unset in a run that goes on",
    )
    return new


def restore(recipe: Recipe, checkpoint: Path, job: Job) -> TrainingRun:
    """Prepare a run again as it was at a checkpoint; write its recipe where that was changed."""
    folder, world = job.folder, job.world
    precision = _same_precision(recipe, folder)
    corpus, name = table.open_examples(recipe.data)
    task = table.task_named(name).planned(recipe)
    fingerprint = folder / FINGERPRINT
    began = fingerprint.read_text().strip() if fingerprint.is_file() else corpus.fingerprint
    refuse(
        began.partition(":")[0] != corpus.fingerprint.partition(":")[0],
        f"{folder} was begun by a version of clearhead that read and split its data in another way, so that "
        "training and validation would mix: finish it with that version, or begin a new run with "
        f"--set model.base={folder}",
        TrainingError,
    )
    refuse(
        began != corpus.fingerprint,
        f"the data of {folder} has changed since the run began: put the old files back, or begin a new run",
        TrainingError,
    )
    unread = None
    if world.size == 1:
        loaded = load(checkpoint, dtype=torch.float32)
        base = None if recipe.train.quantize is None else build.base_of(recipe)
        if base is not None:  # its weights are quantized anew, and updated by what was learned
            loaded.model.load_state_dict(base.model.state_dict())
        lay_out_rows(loaded.model)
    else:
        loaded, unread = open_empty(checkpoint, torch.float32)
    batches = encode_batches(recipe, task, corpus, loaded, Job(folder, world=world))  # reported before
    tensors, state = load_checkpoint(checkpoint)
    run = assemble(job, recipe, task, corpus, loaded, batches, precision, unread, state.choices)
    read_reference(run)
    now = machine.place(precision.device)
    before = {name: state.choices.get(name, value) for name, value in now.items()}
    if before != now:
        ours, theirs = (f"{place['processor']} by PyTorch {place['torch']}" for place in (now, before))
        job.note(f"begun on {theirs}, the run goes on on {ours}: numbers differ in their last digits")
    run.state = dataclasses.replace(state, choices=run.state.choices)
    _check_unchanged(run, tensors)
    named = dict(run.model.named_parameters())
    elsewhere = set() if run.empty is None else dict(run.empty.named_parameters()).keys() - named.keys()
    tensors = {name: tensor for name, tensor in tensors.items() if elsewhere.isdisjoint(name.split("/"))}
    kept = _named(tensors, "weights/")
    shards.put(named, {name: shards.part_like(tensor, named[name]) for name, tensor in kept.items()})
    restore_optimizer(run.optimizer, run.model, tensors)
    if run.ema is not None:
        run.ema.restore(_named(tensors, "ema/"))
    job.note(f"resuming from step {run.state.step}")
    _lengthen(run, read_recipe(folder / RECIPE).train.steps or run.steps, job)
    world.meet()  # all have read it
    if world.first:
        write_text(folder / RECIPE, recipe.to_toml())
    return run


def _same_precision(recipe: Recipe, folder: Path) -> machine.Precision:
    """Return the precision that the run began with, or refuse to go on in another one."""
    try:
        return machine.choose_precision(recipe.train, best_device(recipe.train.device))
    except ConfigError as error:
        raise ConfigError(
            f"{folder} was begun in {recipe.train.precision}, and a run goes on as it began ({error}); for a "
            f"new run from its weights set model.base={folder}"
        ) from None


def _lengthen(run: TrainingRun, before: int, job: Job) -> None:
    """Say where a run of `before` steps, made longer, is not what it would have been from the beginning."""
    done, plan, width = run.state.step, run.plan, run.loaded.config.d_model
    refuse(run.steps < done, f"train.steps {run.steps} is less than the {done} steps that are done: set more")
    for name in ("accumulate_schedule", "window_schedule"):
        refuse(
            bool(getattr(plan, name)) and done > 0 and run.steps != before,
            f"train.steps {run.steps}, and the run began with {before}: train.{name} divides the steps into "
            f"equal parts, and {done} are done; go on with {before}, or begin a new run",
            ConfigError,
        )
    rates = (
        [optim.lr_at(plan, step, steps, width) for step in range(1, done + 1)]
        for steps in (before, run.steps)
    )
    first = next((step for step, (old, new) in enumerate(zip(*rates), 1) if old != new), None)
    if first is not None:
        job.note(
            f"{run.steps:,} steps in place of {before:,}: the {plan.schedule} rate of steps {first:,} to "
            f"{done:,} was that of {before:,}, so the end is not that of {run.steps:,} steps in one run"
        )


def _check_unchanged(run: TrainingRun, tensors: Mapping[str, Tensor]) -> None:
    """Raise if the checkpoint does not fit the recipe, which lies next to it and may have been edited."""
    saved, parameters = _named(tensors, "weights/"), run.model.named_parameters()
    moments = {name.rpartition("/")[2] for name in _named(tensors, "optimizer/")}
    kinds = ("momentum" in moments, "rows" in moments, not moments.isdisjoint(("row_var", "variance")))
    muon, name = any(group["orthogonal"] for group in run.optimizer.param_groups), run.plan.optimizer
    fits = {
        "lora": all(saved.get(name, parameter).shape == parameter.shape for name, parameter in parameters),
        "optimizer": not moments or kinds == (muon, muon and name == "normuon", name == "adafactor"),
        "metric": all(run.metric in row for row in run.state.validations),
    }
    for key, fitting in fits.items():
        refuse(
            not fitting,
            f"train.{key} has changed since {run.folder} began: put it back in {RECIPE}, or begin a new run",
            CheckpointError,
        )


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# Rehearsal --------------------------------------------------------------------------------------------------


FILES = 100_000  # bytes of what lies next to the weights of a checkpoint: tokenizer, settings, counters


@dataclass(frozen=True)
class Rehearsal:
    """What a run would be."""

    folder: Path  # to be written
    recipe: Recipe  # with everything decided that was left open
    sizes: dict[str, Any]  # by name: parameters, steps, tokens, bytes, device

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {"folder": str(self.folder), **self.sizes, "recipe": dataclasses.asdict(self.recipe)}


def rehearse(
    data: Any = (),
    *,
    recipe: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    settings: Settings = (),
    on_event: OnEvent = lambda event: None,
) -> Rehearsal:
    """Decide all that a run decides: data, tokenizer, model, batches, steps; see `train` for the arguments.

    Of a run of two stages, the second is shown, from random weights.
    """
    settings = settings if isinstance(settings, Mapping) else list(settings)
    plan, folder, rows = planned(data, recipe, out, settings)
    if plan.train.pretrain:
        on_event(Note(f"first stage: {plan.train.pretrain:,} steps of masked language modelling; not shown"))
        plan = plan.replace("train", pretrain=0)
    with tempfile.TemporaryDirectory() as work, joined() as world:
        job = Job(Path(work), on_event, world, given=None if recipe else names_of(settings))
        run = prepare(with_rows(plan, rows, job), job)
        decided = read_recipe(job.folder / RECIPE)
        first, (count, n_trained) = run.train.at(0), parameter_counts(run.model)
        learning = LEARNING[plan.train.optimizer] - 4  # bytes apart from the value
        read = {"tokens of the first batch": first.n_tokens} if run.task.tokens is not None else {}
        whole = folder.absolute()
        there = next(place for place in (whole, *whole.parents) if place.is_dir())
        sizes = {
            "task": run.task.name,
            "parameters": count,
            "trained parameters": n_trained,
            "bytes of weights, gradients and moments": weight_bytes(run.model) + learning * n_trained,
            "bytes on disk, at most": on_disk(run, job.folder),
            "bytes free there": shutil.disk_usage(there).free,
            "steps": run.steps,
            "batches in an epoch": run.train.per_epoch,
            "batches to validate on": run.validation.per_epoch,
            "rows of the first batch": len(first),
            **read,
            "device": str(run.precision.device),
        }
    return Rehearsal(folder, decided, sizes)


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Return the number of weights, and of those that are trained."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    frozen = sum(part.in_features * part.out_features for part in distinct(model))
    return sum(size for size, _ in sizes) + frozen, sum(size for size, trained in sizes if trained)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's weights in training: float32, but for those that are quantized."""
    codes = sum(part.size for part in distinct(model))
    return codes + 4 * sum(parameter.numel() for parameter in model.parameters())


def on_disk(run: TrainingRun, prepared: Path) -> int:
    """Return the most bytes that the folder of a run holds at a time; `prepared` holds what is there already.

    A new checkpoint is written before an old one is removed; the model at the end comes when that is done.
    """
    plan = run.plan
    count, trained = parameter_counts(run.model)
    weights, moments = 4 * count, (LEARNING[plan.optimizer] - 8) * trained
    others = moments + (4 * trained if plan.ema else 0) + (4 * count if plan.ema or plan.lora else 0)
    saves = 1 + math.ceil(run.steps / (plan.save_every or run.steps))  # with that of step 0
    whole = min(plan.keep_last + (1 if plan.lora else 0), saves)
    alone = min(plan.keep_best + plan.average, saves)
    prepared_bytes = sum(path.stat().st_size for path in prepared.rglob("*") if path.is_file())
    files = FILES * (whole + alone + 1)
    return prepared_bytes + files + whole * (weights + others) + alone * weights + weights + others
