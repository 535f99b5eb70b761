"""A run up to its first step: every decision and every size, and nothing trained or written."""

import dataclasses
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.learn.data.files import RECIPE
from clearhead.learn.parallel.world import joined
from clearhead.learn.recipe import Recipe, Settings, read_recipe
from clearhead.learn.training.events import Note, OnEvent
from clearhead.learn.training.loop import TrainingRun
from clearhead.learn.training.prepare import prepare
from clearhead.learn.training.run import planned, with_rows
from clearhead.variants.costs import LEARNING

FILES = 100_000  # bytes of what lies beside the weights of a checkpoint: tokenizer, settings, counters


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
    plan, folder, given = planned(data, recipe, out, settings)
    if plan.train.pretrain:
        on_event(Note(f"first stage: {plan.train.pretrain:,} steps of masked language modelling; not shown"))
        plan = plan.replace("train", pretrain=0)
    with tempfile.TemporaryDirectory() as work, joined() as world:
        run = prepare(with_rows(plan, given, Path(work), on_event), Path(work), on_event, world)
        decided = read_recipe(Path(work) / RECIPE)
        first, trained = run.train.at(0), [one for one in run.model.parameters() if one.requires_grad]
        count = sum(one.numel() for one in run.model.parameters())
        n_trained = sum(one.numel() for one in trained)
        learning = LEARNING[plan.train.optimizer] - 4  # bytes beside the value
        read = {"tokens of the first batch": first.n_tokens} if run.task.tokens is not None else {}
        sizes = {
            "task": run.task.name,
            "parameters": count,
            "trained parameters": n_trained,
            "bytes of weights, gradients and moments": 4 * count + learning * n_trained,
            "bytes on disk, at most": on_disk(run, Path(work)),
            "bytes free there": shutil.disk_usage(_existing(folder)).free,
            "steps": run.steps,
            "batches in an epoch": run.train.per_epoch,
            "batches to validate on": run.validation.per_epoch,
            "rows of the first batch": len(first),
            **read,
            "device": str(run.precision.device),
        }
    return Rehearsal(folder, decided, sizes)


def on_disk(run: TrainingRun, prepared: Path) -> int:
    """Return the most bytes that the folder of a run holds at a time; `prepared` holds what is there already.

    A new checkpoint is written before an old one is removed; the model at the end comes when that is done.
    """
    plan, model = run.plan, run.model
    count = sum(one.numel() for one in model.parameters())
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    weights, moments = 4 * count, (LEARNING[plan.optimizer] - 8) * trained
    beside = moments + (4 * trained if plan.ema else 0) + (4 * count if plan.ema or plan.lora else 0)
    saves = 1 + math.ceil(run.steps / (plan.save_every or run.steps))  # with that of step 0
    whole = min(plan.keep_last + (1 if plan.lora else 0), saves)
    alone = min(plan.keep_best + plan.average, saves)
    held = sum(path.stat().st_size for path in prepared.rglob("*") if path.is_file())
    files = FILES * (whole + alone + 1)
    return held + files + whole * (weights + beside) + alone * weights + weights + beside


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    whole = folder.absolute()
    return next(place for place in (whole, *whole.parents) if place.is_dir())
