"""A run made ready from a checkpoint: as it was, or longer."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from clearhead.core.config.typed import plain
from clearhead.errors import CheckpointError, ConfigError, TrainingError, refuse
from clearhead.hub.files import write_text
from clearhead.learn.data.files import RECIPE
from clearhead.learn.parallel import shards
from clearhead.learn.parallel.plan import ParallelPlan
from clearhead.learn.parallel.world import ALONE, World
from clearhead.learn.recipe import SECTIONS, Recipe, Settings, read_recipe
from clearhead.learn.tasks import table
from clearhead.learn.training import machine, optim
from clearhead.learn.training.events import Note, OnEvent
from clearhead.learn.training.prepare import FINGERPRINT, assemble, encode_batches
from clearhead.learn.training.reference import read_reference
from clearhead.learn.training.running import TrainingRun
from clearhead.learn.training.state import load_checkpoint, restore_optimizer
from clearhead.run.api import load, open_empty
from clearhead.run.bundle import best_device
from clearhead.run.kernels.transpose import lay_out_rows

# What may change in a run that goes on: how long it is, and what is validated, kept and shown on the way.
CHANGEABLE = tuple(
    f"train.{name}"
    for name in (
        *("steps", "validate_every", "save_every", "patience", "keep_best", "keep_last", "log_every"),
        *("samples", "offload", "threads", "compile"),
    )
) + tuple(f"parallel.{field.name}" for field in dataclasses.fields(ParallelPlan))


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
        [optim.rate(plan, step, steps, width) for step in range(1, done + 1)] for steps in (before, run.steps)
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
