"""`train`: from data to a model directory, step by step."""

import dataclasses
import glob
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config.typed import plain
from clearhead.errors import CheckpointError, ConfigError, TrainingError, refuse
from clearhead.hub.files import MODEL, whole_folder, write_text
from clearhead.hub.weights import Outgoing, open_tensors, write_tensors
from clearhead.learn.data import corpora, files
from clearhead.learn.data.files import RECIPE
from clearhead.learn.data.given import Given, given_or_paths
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.evaluate import validate, written_scores
from clearhead.learn.parallel import shards
from clearhead.learn.parallel.pipeline import staged
from clearhead.learn.parallel.plan import ParallelPlan
from clearhead.learn.parallel.shards import materialise
from clearhead.learn.parallel.world import ALONE, World, joined
from clearhead.learn.recipe import BASE, SECTIONS, Recipe, Settings, read_recipe
from clearhead.learn.tasks import table
from clearhead.learn.training import faults, loop, machine, optim, prepare, weights
from clearhead.learn.training.departure import command_to_try, leave_adapter, leave_card
from clearhead.learn.training.events import Finished, Note, OnEvent, Reason, Started, Validated, logged
from clearhead.learn.training.folder import mark, new_folder, ours, resumed_folder
from clearhead.learn.training.loop import TrainingRun
from clearhead.learn.training.prepare import FINGERPRINT, assemble, encode_batches, read_reference
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
            plan, folder, given = planned(data, recipe, out, settings)
        else:
            folder = Path(resume)
        if resume is not None or world.once(lambda: ours(folder)):
            with world.holding(resumed_folder(folder, tell), folder):
                return _resume(world, folder, tell, stop, settings if resume is not None else ())
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
            plan = world.once(lambda: with_rows(plan, given, folder, tell))
            return _start(world, plan, folder, tell, stop, keep)


def planned(
    data: Any, recipe: str | Path | Recipe | None, out: str | Path | None, settings: Settings
) -> tuple[Recipe, Path, Given | None]:
    """Return the recipe of a new run, its paths absolute, the folder to write, and rows in memory, if any.

    See `train` for the arguments.
    """
    plan = read_recipe(recipe, settings)
    table.shape_of(plan.data.task)  # refuses a task that does not exist
    given = given_or_paths(data)
    if not isinstance(given, Given) and given:
        plan = plan.replace("data", paths=given)
    folder = Path(out) if out is not None else Path("runs") / run_name(plan.data)
    return with_absolute_paths(plan), folder, given if isinstance(given, Given) else None


def with_rows(plan: Recipe, given: Given | None, folder: Path, on_event: OnEvent) -> Recipe:
    """Write rows in memory, if any, into the folder, and return the recipe that reads them there."""
    if given is None:
        return plan
    for line in given.notes:
        on_event(Note(line))
    if plan.data.format or plan.data.pattern:
        on_event(Note("data.format and data.pattern are for files: rows in memory need none"))
    return plan.replace("data", format=None, pattern=None, **given.write(folder))


def _start(
    world: World,
    recipe: Recipe,
    folder: Path,
    on_event: OnEvent,
    stop: Callable[[], bool],
    keep: Callable[[], None] = lambda: None,
) -> Trained:
    """Run the first stage, if there are two, then the run itself; call `keep` at the first checkpoint."""
    if world.first:
        write_text(folder / files.RECIPE, recipe.to_toml())
        mark(folder)
    if recipe.train.pretrain:
        first = _pretrain(world, recipe, folder / PRETRAIN, on_event, stop, keep)
        if first.reason == "stopped":
            return replace(first, folder=folder)
        recipe = recipe.replace("model", base=str(first.folder.absolute()))
        recipe = recipe.replace("tokens", kind=None).replace("train", pretrain=0)
    run = prepare.prepare(recipe, folder, on_event, world)
    baseline = None
    if prepare.is_based(recipe):
        with run.world.waiting("the validation of the base"):
            baseline = loop.validate_run(run)
    with run.world.waiting("the first checkpoint"):
        loop.save(run)
        run.saver.finish(wait=True)
    keep()
    return _finish(run, on_event, stop, baseline)


def _pretrain(
    world: World,
    recipe: Recipe,
    folder: Path,
    on_event: OnEvent,
    stop: Callable[[], bool],
    keep: Callable[[], None],
) -> Trained:
    """Start or resume the first stage in its own folder: masked language modelling on the same texts."""
    if world.once(lambda: newest(folder) is not None):
        return _resume(world, folder, on_event, stop)
    _, name = table.open_examples(recipe.data)
    fits = " and ".join(sorted(name for name, task in table.TASKS.items() if task.pretrain))
    refuse(not table.TASKS[name].pretrain, f"train.pretrain is for {fits}, and this is {name}: set it to 0")
    table.TASKS[name].check_metric(recipe.train.metric)
    steps = recipe.train.pretrain
    on_event(Note(f"first stage: {steps:,} steps of masked language modelling"))
    later = {
        **{"pretrain": 0, "metric": None, "patience": None, "average": 0},  # are of the second stage
        **{"lora": 0, "freeze": (), "layer_decay": 1.0},  # keep trained weights, and there are none yet
        "class_weights": None,
    }
    recipe = recipe.replace("train", steps=steps, epochs=None, **later)
    return _start(world, recipe.replace("data", task="mlm", texts_only=True), folder, on_event, stop, keep)


def _resume(
    world: World, folder: Path, on_event: OnEvent, stop: Callable[[], bool], settings: Settings = ()
) -> Trained:
    checkpoint = world.once(lambda: newest(folder))
    recipe = world.once(lambda: changed_recipe(folder, settings))
    if checkpoint is None:  # it ended in its first stage
        return _start(world, recipe, folder, on_event, stop)
    if world.first:
        mark(folder)
        for unfinished in (folder / CHECKPOINTS).glob(".step-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
    return _finish(restore(recipe, folder, checkpoint, on_event, world), on_event, stop)


def _finish(
    run: TrainingRun, on_event: OnEvent, stop: Callable[[], bool], baseline: Validated | None = None
) -> Trained:
    """Train to the end, choose the weights, and write them to the folder itself.

    `baseline` is the validation before the first step.
    """
    state, first, whole = run.state, run.world.first, run.empty or run.model
    log = logged(run.folder, state.step, on_event, run.plan.tensorboard) if first else nullcontext(on_event)
    with log as tell:
        tell(
            Started(
                folder=run.folder,
                task=run.task.name,
                parameters=sum(one.numel() for one in whole.parameters()),
                trainable=sum(one.numel() for one in whole.parameters() if one.requires_grad),
                steps=run.steps,
                step=state.step,
                device=str(run.precision.device),
            )
        )
        if baseline is not None:
            tell(baseline)
        with faults.naming_memory(state, run.world), run.saver.completing():
            reason = loop.learn(run, tell, stop)
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
    found = (best if best.exists() else run.folder / LAST).resolve()
    step = int(found.name.removeprefix("step-"))
    metrics = next((row for row in run.state.validations if row["step"] == step), {})
    if reason == "stopped":
        return load(found), metrics
    steps = loop.averaged_steps(run)  # none, where patience ended the run before the first of them
    if run.world.first:
        _write_model(run.folder, found, [run.folder / CHECKPOINTS / f"step-{step}" for step in steps])
    run.world.meet()
    chosen = load(run.folder)
    if run.world.first and len(steps) < 2:
        leave_adapter(run, chosen, found)
    return chosen, metrics if len(steps) < 2 else {"step": run.state.step, **_judged(run, chosen)}


def _write_model(folder: Path, found: Path, averaged: list[Path]) -> None:
    """Write the model of a checkpoint to a folder, or its weights averaged over several, one at a time."""
    several = len(averaged) > 1
    with whole_folder(folder) as work:
        for path in found.iterdir():
            ours = path.name.startswith(TENSORS) or (several and path.match(f"{MODEL}*.safetensors*"))
            if not ours:
                shutil.copyfile(path, work / path.name) if path.is_file() else shutil.copytree(
                    path, work / path.name
                )
        if several:
            opened = [open_tensors(path, MODEL) for path in averaged]
            tensors = {name: Outgoing(one.shape, one.dtype, (name,)) for name, one in opened[0].items()}

            def mean(name: str, owner: int) -> Tensor:
                return weights.average({name: one[name].read()} for one in opened)[name]

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
    for section, key, path in (
        ("tokens", "model", recipe.tokens.model),
        ("model", BASE, recipe.model.get(BASE)),
    ):
        if path is not None:
            recipe = recipe.replace(section, **{key: absolute(path)})
    return recipe


# A run that goes on -----------------------------------------------------------------------------------------


def changed_recipe(folder: Path, settings: Settings) -> Recipe:
    """Read the recipe of a run that goes on, with settings that a run may change on its way."""
    old, new = (read_recipe(folder / RECIPE, some) for some in ((), settings))
    for section in SECTIONS:
        ours, theirs = (plain(getattr(one, section)) for one in (old, new))
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


def restore(
    recipe: Recipe, folder: Path, checkpoint: Path, on_event: OnEvent, world: World = ALONE
) -> TrainingRun:
    """Prepare a run again as it was at a checkpoint; write its recipe where that was changed."""
    precision = _same_precision(recipe, folder)
    corpus, name = table.open_examples(recipe.data)
    task = table.task_named(name)
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
        lay_out_rows(loaded.model)
    else:
        loaded, unread = open_empty(checkpoint, torch.float32)
    batches = encode_batches(recipe, task, corpus, loaded, folder, lambda event: None, world)  # told before
    tensors, state = load_checkpoint(checkpoint)
    made = (recipe, task, corpus, loaded, batches, precision, folder, on_event, world, unread)
    run = assemble(*made, began=state.choices)
    read_reference(run)
    now = machine.place(precision.device)
    before = {name: state.choices.get(name, value) for name, value in now.items()}
    if before != now:
        ours, theirs = (f"{one['processor']} by PyTorch {one['torch']}" for one in (now, before))
        on_event(Note(f"begun on {theirs}, the run goes on on {ours}: numbers differ in their last digits"))
    run.state = dataclasses.replace(state, choices=run.state.choices)
    _check_unchanged(run, tensors)
    named = dict(run.model.named_parameters())
    elsewhere = set() if run.empty is None else dict(run.empty.named_parameters()).keys() - named.keys()
    tensors = {name: one for name, one in tensors.items() if elsewhere.isdisjoint(name.split("/"))}
    kept = _named(tensors, "weights/")
    shards.put(named, {name: shards.part_like(one, named[name]) for name, one in kept.items()})
    restore_optimizer(run.optimizer, run.model, tensors)
    if run.ema is not None:
        run.ema.restore(_named(tensors, "ema/"))
    on_event(Note(f"resuming from step {run.state.step}"))
    _lengthen(run, read_recipe(folder / RECIPE).train.steps or run.steps, on_event)
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


def _lengthen(run: TrainingRun, before: int, on_event: OnEvent) -> None:
    """Say where a run of `before` steps, made longer, is not what it would have been from the beginning."""
    done, plan, width = run.state.step, run.plan, run.loaded.config.d_model
    refuse(run.steps < done, f"train.steps {run.steps} is less than the {done} steps that are done: set more")
    rates = (
        [optim.lr_at(plan, step, steps, width) for step in range(1, done + 1)]
        for steps in (before, run.steps)
    )
    first = next((step for step, (old, new) in enumerate(zip(*rates), 1) if old != new), None)
    if first is not None:
        on_event(
            Note(
                f"{run.steps:,} steps in place of {before:,}: the {plan.schedule} rate of steps {first:,} to "
                f"{done:,} was that of {before:,}, so the end is not that of {run.steps:,} steps in one run"
            )
        )


def _check_unchanged(run: TrainingRun, tensors: Mapping[str, Tensor]) -> None:
    """Raise if the checkpoint does not fit the recipe, which lies beside it and may have been edited."""
    saved, parameters = _named(tensors, "weights/"), run.model.named_parameters()
    moments = {name.rpartition("/")[2] for name in _named(tensors, "optimizer/")}
    turned, factored = "momentum" in moments, not moments.isdisjoint(("row_var", "variance"))
    muon = any(group["orthogonal"] for group in run.optimizer.param_groups)
    fits = {
        "lora": all(saved.get(name, one).shape == one.shape for name, one in parameters),
        "optimizer": not moments or (turned, factored) == (muon, run.plan.optimizer == "adafactor"),
        "metric": all(run.metric in row for row in run.state.validations),
    }
    for key, fitting in fits.items():
        refuse(
            not fitting,
            f"train.{key} has changed since {run.folder} began: put it back in {RECIPE}, or begin a new run",
            CheckpointError,
        )


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
