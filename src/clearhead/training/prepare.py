"""A run made ready, new or from a checkpoint: recipe, data, tokenizer, model, batches, optimizer."""

import glob
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from clearhead.api import Model, load
from clearhead.batches.batch import Batches
from clearhead.batches.even import EvenRows
from clearhead.costs import cost
from clearhead.data.corpora import CORPORA
from clearhead.data.examples import Corpus, Images
from clearhead.data.files import RECIPE
from clearhead.data.plan import DataPlan
from clearhead.errors import CheckpointError, TrainingError, refuse
from clearhead.fast.parts import like
from clearhead.fast.training import join_projections, recompute, suit_narrow
from clearhead.hub.files import write_text
from clearhead.model.heads import LanguageHead
from clearhead.presets import PRESETS
from clearhead.tasks.corpus import open_examples
from clearhead.tasks.spec import ENCODER, TaskSpec
from clearhead.tasks.table import task_named
from clearhead.training.averaging import Ema
from clearhead.training.build import base_of, build
from clearhead.training.data import encode_batches, find_tokenizer
from clearhead.training.events import Note, OnEvent
from clearhead.training.folder import CACHE
from clearhead.training.loop import TrainingRun
from clearhead.training.lora import add_lora
from clearhead.training.machine import narrow, pays, quick_attention
from clearhead.training.optim import make_optimizer
from clearhead.training.plan import TrainPlan
from clearhead.training.precision import best_device, choose_precision
from clearhead.training.recipe import BASE, Recipe, read_recipe
from clearhead.training.samples import sampler
from clearhead.training.schedule import warmup_steps
from clearhead.training.state import load_checkpoint, restore_optimizer

FINGERPRINT = f"{CACHE}/fingerprint"  # of the data a run began with


def prepare(recipe: Recipe, folder: Path, on_event: OnEvent) -> TrainingRun:
    """Prepare a new run; what the recipe leaves open is chosen, reported, and written to `train.toml`."""
    corpus, name = open_examples(recipe.data)
    task = task_named(name)
    task.check_metric(recipe.train.metric)
    for line in corpus.notes:
        on_event(Note(line))
    base = base_of(recipe)
    tokenizer, special = find_tokenizer(recipe, task, corpus, base, on_event)
    device = best_device(recipe.train.device)
    image = corpus.train.pixels.shape[1:] if isinstance(corpus.train, Images) else None
    loaded = build(recipe, name, tokenizer, special, corpus.labels, image, base, large=device.type != "cpu")
    recipe = recipe.replace("data", task=name)
    batches = encode_batches(recipe, task, corpus, loaded, folder, on_event)
    if base is None and task.usual is ENCODER and task.head != "mlm":
        on_event(
            Note("training starts from random weights: set model.base=DIR to start from a trained model")
        )
    for line in without_effect(recipe, task, loaded, base):
        on_event(Note(line))
    asked, precision = recipe.train.warmup, choose_precision(recipe.train, device).name
    recipe = settled(recipe, task, corpus.labels, loaded, batches[0], precision)
    if asked not in (None, recipe.train.warmup):
        on_event(Note(f"warm-up of {recipe.train.warmup} steps: {asked} would be the whole run"))
    write_text(folder / RECIPE, recipe.to_toml())
    write_text(folder / FINGERPRINT, corpus.fingerprint)
    return _assemble(recipe, task, corpus, loaded, batches, folder, on_event)


def restore(folder: Path, checkpoint: Path, on_event: OnEvent) -> TrainingRun:
    """Prepare a run again as it was at a checkpoint."""
    recipe = read_recipe(folder / RECIPE)
    corpus, name = open_examples(recipe.data)
    task = task_named(name)
    fingerprint = folder / FINGERPRINT
    refuse(
        fingerprint.is_file() and fingerprint.read_text() != corpus.fingerprint,
        f"the data of {folder} has changed since the run began: put the old files back, or begin a new run",
        TrainingError,
    )
    loaded = load(checkpoint, dtype=torch.float32)
    batches = encode_batches(recipe, task, corpus, loaded, folder, lambda event: None)
    run = _assemble(recipe, task, corpus, loaded, batches, folder, on_event)
    tensors, run.state = load_checkpoint(checkpoint)
    _check_unchanged(run, tensors)
    weights, averages = (_named(tensors, f"{kind}/") for kind in ("weights", "ema"))
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    restore_optimizer(run.optimizer, run.model, tensors)
    if run.ema is not None:
        run.ema.restore(averages)
    on_event(Note(f"resuming from step {run.state.step}"))
    return run


def _check_unchanged(run: TrainingRun, tensors: Mapping[str, Tensor]) -> None:
    """Raise if the checkpoint does not fit the recipe, which lies beside it and may have been edited."""
    weights, parameters = _named(tensors, "weights/"), dict(run.model.named_parameters())
    moments = {name.rpartition("/")[2] for name in _named(tensors, "optimizer/")}
    adamw = isinstance(run.optimizer, torch.optim.AdamW)
    fits = {
        "lora": all(weights.get(name, one).shape == one.shape for name, one in parameters.items()),
        "optimizer": not moments or ("exp_avg" in moments) == adamw,
        "metric": all(run.metric in row for row in run.state.validations),
    }
    for key, fitting in fits.items():
        if not fitting:
            ways_out = f"put it back in {RECIPE}, or begin a new run"
            raise CheckpointError(f"train.{key} has changed since {run.folder} began: {ways_out}")


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def _assemble(
    recipe: Recipe,
    task: TaskSpec,
    corpus: Corpus,
    loaded: Model,
    batches: tuple[Batches, Batches],
    folder: Path,
    on_event: OnEvent,
) -> TrainingRun:
    """Put a run together around its model: precision, low-rank updates, optimizer, averages, fast parts."""
    plan, device = recipe.train, best_device(recipe.train.device)
    assert plan.steps is not None and plan.metric is not None, "the recipe is not settled"
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    precision = choose_precision(plan, device, settled=True)
    on_event(Note(precision.sentence))
    if plan.lora:
        torch.manual_seed(plan.seed)  # the updates begin at random
        also = () if isinstance(loaded.model.head, LanguageHead) else ("head.*",)
        add_lora(loaded.model, plan.lora, plan.lora_alpha, plan.lora_targets, also)
    loaded.model.to(device)
    optimizer = make_optimizer(loaded.model, plan, device)
    join_projections(loaded.model)
    if plan.checkpointing:
        recompute(loaded.model)
    flops = (
        cost(loaded.config, length=loaded.max_length).flops.training_per_token
        if task.tokens is not None
        else 0.0
    )
    run = TrainingRun(
        folder=folder,
        task=task,
        plan=plan,
        steps=plan.steps,
        metric=plan.metric,
        loaded=loaded,
        train=batches[0],
        validation=batches[1],
        optimizer=optimizer,
        precision=precision,
        device=device,
        attention=quick_attention(task, recipe.data, device),
        ema=Ema(loaded.model, plan.ema) if plan.ema else None,
        samples=sampler(task, corpus, recipe.generate, plan.samples, plan.seed),
        flops_per_token=flops,
    )
    wanted = plan.compile if plan.compile is not None else pays(task, recipe.data, plan, device)
    if not (wanted and _compile(run, on_event)) and narrow(device):
        suit_narrow(loaded.model)
    return run


def _compile(run: TrainingRun, on_event: OnEvent) -> bool:
    """Compile the model and try one batch; on failure, report it and continue uncompiled."""
    on_event(Note("compiling the model, which takes a moment"))
    run.compiled = like(run.model.train(), type(run.model))
    run.compiled.compile()
    try:
        run.loss(run.batches(1)[0]).backward()  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        run.compiled = None
        why = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        on_event(Note(f"not compiled, and slower for it: {why}"))
        return False
    finally:
        run.model.zero_grad(set_to_none=True)
    return True


# The recipe ------------------------------------------------------------------------------------------


def run_name(plan: DataPlan) -> str:
    """Name a run for its first file or folder; for a glob, name it for the folder that is searched."""
    first = Path(plan.paths[0]).absolute() if plan.paths else Path("model")
    named = next((path for path in (first, *first.parents) if not glob.has_magic(path.name)), first)
    return named.name.split(".")[0] or "model"


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Make the paths of a recipe absolute; the name of a corpus or a preset stays as it is."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute()) if Path(path).exists() or "/" in path else path

    def data_path(path: str) -> str:
        is_prefix = path not in CORPORA and any(glob.iglob(f"{path}*"))  # `train` for train.en and train.de
        return str(Path(path).absolute()) if is_prefix else absolute(path)

    paths = {name: tuple(map(data_path, getattr(recipe.data, name))) for name in ("paths", "validation")}
    recipe = recipe.replace("data", **paths)
    for section, key, path in (
        ("tokens", "model", recipe.tokens.model),
        ("model", BASE, recipe.model.get(BASE)),
    ):
        if path is not None:
            recipe = recipe.replace(section, **{key: absolute(path)})
    return recipe


def settled(
    recipe: Recipe, task: TaskSpec, labels: tuple[str, ...], loaded: Model, train: Batches, precision: str
) -> Recipe:
    """Fill in everything the recipe leaves open: this is `train.toml`, which a resumed run reads."""
    plan = recipe.train
    steps = _steps(plan, train)
    every = plan.validate_every or max(1, steps // 20)
    recipe = recipe.replace(
        "train",
        steps=steps,
        epochs=None,
        validate_every=every,
        save_every=plan.save_every or every,
        metric=plan.metric or task.default_metric(labels),
        warmup=_warmup(plan, steps),
        precision=precision,
    )
    if BASE in recipe.model and recipe.model[BASE] not in PRESETS:
        return recipe  # the rest of the model is described by that directory
    return recipe.replace("model", **loaded.config.to_dict())


def _steps(plan: TrainPlan, train: Batches) -> int:
    """Return the number of steps: as given, by the epochs, or ten epochs within 1,000 to 5,000 steps."""
    if plan.steps is not None:
        return plan.steps
    # The last batch of even rows is filled up from the next epoch.
    batches = train.n_rows / train.rows if isinstance(train, EvenRows) else train.per_epoch
    per_epoch = batches / plan.accumulate
    if plan.epochs is not None:
        return max(1, round(plan.epochs * per_epoch))
    return min(5000, max(1000, round(10 * per_epoch)))


def _warmup(plan: TrainPlan, steps: int) -> int:
    warmup = warmup_steps(plan, steps)
    if plan.warmup is None:
        warmup = max(1, warmup)
    if warmup >= steps and plan.schedule != "original":
        return max(1, steps // 10)  # with none, a single step would already have the last rate
    return warmup


def without_effect(recipe: Recipe, task: TaskSpec, loaded: Model, base: Model | None) -> Iterator[str]:
    """Yield a sentence for each setting that the data, the model or its base overrides."""
    longest, asked = loaded.max_length, recipe.data.max_length
    if asked is not None and asked > longest and task.tokens is not None:
        yield (
            f"rows have {longest} tokens at most: the model takes no more, "
            f"and data.max_length is {asked}; set model.max_positions"
        )
    for name in ("vocab_size", "head", "n_classes"):
        value, made = recipe.model.get(name), getattr(loaded.config, name)
        if value not in (None, made):
            yield f"model.{name} is {made}, by the data, not {value}"
    if base is not None and recipe.tokens.kind is not None and recipe.tokens.model is None:
        yield f"tokens are those of {base.folder}: tokens.kind {recipe.tokens.kind} has no effect"
