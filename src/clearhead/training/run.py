"""`train`: from files to a model directory, in the order in which things happen."""

from __future__ import annotations

import dataclasses
import glob
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from clearhead.batches.batch import Batches
from clearhead.batches.batching import make_batches
from clearhead.batches.encoded import encode_corpus
from clearhead.batches.even import EvenRows
from clearhead.bundle import Model, load
from clearhead.config import ModelConfig
from clearhead.costs import cost
from clearhead.data.corpora import CORPORA
from clearhead.data.examples import Corpus, Images
from clearhead.data.files import RECIPE
from clearhead.data.plan import DataPlan
from clearhead.errors import CheckpointError, InputError, TrainingError
from clearhead.evaluation.examples import begun
from clearhead.hub.files import write_text
from clearhead.hub.tokenizer import load_tokenizer, read_settings, special_ids
from clearhead.model.heads import LanguageHead
from clearhead.presets import PRESETS
from clearhead.tasks.corpus import Texts, open_examples
from clearhead.tasks.spec import ENCODER, ENCODER_DECODER, TaskSpec
from clearhead.tasks.table import TASKS, shape_of, task_named
from clearhead.tokens.training import choose, train_tokenizer
from clearhead.training.averaging import Ema, average
from clearhead.training.build import base_of, build
from clearhead.training.events import Event, Finished, OnEvent, Said, Started
from clearhead.training.log import Log
from clearhead.training.loop import Run, averaged, learn, save
from clearhead.training.lora import add_lora
from clearhead.training.losses import batch_loss
from clearhead.training.machine import join_projections, narrow, pays, quick_attention, recompute, suit_narrow
from clearhead.training.optim import make_optimizer
from clearhead.training.precision import best_device, choose_precision
from clearhead.training.recipe import BASE, Recipe, read_recipe
from clearhead.training.room import CACHE, PRETRAIN, resumable, room
from clearhead.training.samples import sampler
from clearhead.training.state import BEST, CHECKPOINTS, LAST, load_checkpoint, newest, restore_optimizer
from clearhead.training.validate import validate
from clearhead.typed import plain


@dataclass(frozen=True)
class Trained:
    """What a run gave."""

    model: Model  # the best weights by the run's metric
    folder: Path
    step: int
    metrics: dict[str, Any]  # of the best validation
    reason: str  # done, patience or stopped


def train(
    data: str | Path | Sequence[str | Path] = (),
    *,
    recipe: str | Path | Recipe | None = None,
    out: str | Path | None = None,
    settings: Iterable[str] = (),
    resume: str | Path | None = None,
    overwrite: bool = False,
    on_event: OnEvent = lambda event: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Train a model from files and write it to a folder; what `clearhead train` does.

    Args:
        data: files, folders, globs, or the name of an embedded corpus; none: what the recipe says.
        recipe: a recipe, its name, or its file; None: chosen by the data.
        out: the folder to write; None: `runs/` and the name of the data.
        settings: changes of the recipe, such as `train.steps=2000`.
        resume: a folder to go on in; it holds its own recipe, so `data`, `recipe` and `settings` stay out.
        overwrite: remove an earlier run in `out`.
        on_event: told what happens.
        stop: asked after each step; True saves and ends the run, to be resumed later.
    """
    if resume is not None:
        if data or recipe is not None or list(settings) or out is not None or overwrite:
            raise InputError(
                "resume goes on with the run's own recipe and folder: leave data, recipe, settings, out and overwrite out"
            )
        return _resume(Path(resume), on_event, stop)
    paths = [data] if isinstance(data, str | Path) else list(data)
    plan = recipe if isinstance(recipe, Recipe) else read_recipe(recipe, settings)
    shape_of(plan.data.task)  # refuses a task that does not exist
    if paths:
        plan = plan.replace("data", paths=tuple(map(str, paths)))
    folder = Path(out) if out is not None else Path("runs") / _name(plan.data)
    plan = _located(plan)
    needed = (*plan.data.paths, *plan.data.validation, plan.tokens.model, plan.model.get(BASE))
    with room(folder, overwrite, [Path(path) for path in needed if path is not None]) as keep:
        return _begin(plan, folder, on_event, stop, keep)


def _begin(
    recipe: Recipe,
    folder: Path,
    on_event: OnEvent,
    stop: Callable[[], bool],
    keep: Callable[[], None] = lambda: None,
) -> Trained:
    """The first stage where there are two, then the run itself; `keep` is called when there is a checkpoint."""
    write_text(folder / RECIPE, recipe.to_toml())
    if recipe.train.pretrain:
        first = _pretrained(recipe, folder / PRETRAIN, on_event, stop, keep)
        if first.reason == "stopped":
            return dataclasses.replace(first, folder=folder)
        recipe = (
            recipe.replace("model", base=str(first.folder.absolute()))
            .replace("train", pretrain=0)
            .replace("tokens", kind=None)
        )
    run = _prepare(recipe, folder, on_event)
    save(run)
    keep()
    return _finish(run, on_event, stop)


def _pretrained(
    recipe: Recipe, folder: Path, on_event: OnEvent, stop: Callable[[], bool], keep: Callable[[], None]
) -> Trained:
    """Masked language modelling on the same texts, in a folder of its own, begun or gone on with."""
    if newest(folder) is not None:
        return _resume(folder, on_event, stop)
    _, task = open_examples(recipe.data)
    if not TASKS[task].pretrain:
        fits = " and ".join(sorted(name for name, spec in TASKS.items() if spec.pretrain))
        raise InputError(f"train.pretrain is for {fits}, and this is {task}: set it to 0")
    TASKS[task].check_metric(recipe.train.metric)
    whole: dict[str, Any] = {"lora": 0, "freeze": (), "layer_decay": 1.0}  # nothing to hold on to yet
    plan = dataclasses.replace(
        recipe.train,
        steps=recipe.train.pretrain,
        epochs=None,
        pretrain=0,
        metric=None,
        patience=None,
        average=0,
        **whole,
    )
    on_event(Said(f"first {recipe.train.pretrain:,} steps of guessing masked words"))
    return _begin(
        dataclasses.replace(recipe.replace("data", task="mlm", texts_only=True), train=plan),
        folder,
        on_event,
        stop,
        keep,
    )


def _name(plan: DataPlan) -> str:
    """What to call a run: as its first file or folder; of a glob, as the folder it looks in."""
    first = Path(plan.paths[0]).absolute() if plan.paths else Path("model")
    named = next((path for path in (first, *first.parents) if not glob.has_magic(path.name)), first)
    return named.name.split(".")[0] or "model"


def _located(recipe: Recipe) -> Recipe:
    """The recipe with paths by which the run can be resumed from anywhere; the name of a corpus or a preset stays a name."""

    def located(path: str) -> str:
        return str(Path(path).absolute()) if Path(path).exists() or "/" in path else path

    def data(path: str) -> str:
        begins = path not in CORPORA and any(glob.iglob(f"{path}*"))  # `train` for train.en and train.de
        return str(Path(path).absolute()) if begins else located(path)

    recipe = recipe.replace(
        "data", paths=tuple(map(data, recipe.data.paths)), validation=tuple(map(data, recipe.data.validation))
    )
    if recipe.tokens.model is not None:
        recipe = recipe.replace("tokens", model=located(recipe.tokens.model))
    return (
        recipe
        if recipe.model.get(BASE) is None
        else recipe.replace("model", base=located(recipe.model[BASE]))
    )


# Preparing ------------------------------------------------------------------------------------------------------------


def _prepare(recipe: Recipe, folder: Path, on_event: OnEvent) -> Run:
    """Data, tokenizer, model, batches: whatever the recipe leaves open is chosen here, said, and written down."""
    corpus, name = open_examples(recipe.data)
    task = task_named(name)
    task.check_metric(recipe.train.metric)
    for line in corpus.notes:
        on_event(Said(line))
    base = base_of(recipe)
    tokenizer, special = _tokens(recipe, task, corpus, base, on_event)
    device = best_device(recipe.train.device)
    image = corpus.train.pixels.shape[1:] if isinstance(corpus.train, Images) else None
    loaded = build(recipe, name, tokenizer, special, corpus.labels, image, base, large=device.type != "cpu")
    recipe = recipe.replace("data", task=name)
    train, validation = _batches(recipe, task, corpus, loaded, folder, on_event)
    if base is None and task.usual is ENCODER and task.head != "mlm":
        on_event(Said("the model begins from nothing: with model.base=DIR it would begin from a trained one"))
    for line in _without_effect(recipe, task, loaded, base):
        on_event(Said(line))
    asked = recipe.train.warmup
    recipe = _settle(recipe, task, corpus, loaded, train, choose_precision(recipe.train, device).name)
    if asked not in (None, recipe.train.warmup):
        on_event(Said(f"warm-up of {recipe.train.warmup} steps: {asked} would be the whole run"))
    write_text(folder / RECIPE, recipe.to_toml())
    write_text(folder / CACHE / "fingerprint", corpus.fingerprint)
    return _assemble(recipe, task, corpus, loaded, train, validation, folder, device, on_event)


def _without_effect(recipe: Recipe, task: TaskSpec, loaded: Model, base: Model | None) -> Iterator[str]:
    """Settings that something else decides, a sentence each."""
    longest, asked = loaded.max_length, recipe.data.max_length
    if asked is not None and asked > longest and task.tokens is not None:
        yield f"rows have {longest} tokens at most: the model takes no more, and data.max_length is {asked}; set model.max_positions"
    for name in ("vocab_size", "head", "n_classes"):
        value, made = recipe.model.get(name), getattr(loaded.config, name)
        if value not in (None, made):
            yield f"model.{name} is {made}, by the data, not {value}"
    if base is not None and recipe.tokens.kind is not None and recipe.tokens.model is None:
        yield f"tokens are those of {base.folder}: tokens.kind {recipe.tokens.kind} has no effect"


def _tokens(
    recipe: Recipe, task: TaskSpec, corpus: Corpus, base: Model | None, on_event: OnEvent
) -> tuple[Tokenizer | None, dict[str, int]]:
    """The tokenizer: the base model's, another directory's, or one trained on this data."""
    plan = recipe.tokens
    if task.tokens is None:
        return None, {}
    if plan.model is not None:
        folder = Path(plan.model)
        tokenizer = load_tokenizer(folder) if folder.is_dir() else None
        if tokenizer is None:
            raise InputError(f'[tokens] model "{plan.model}" is no directory with a tokenizer')
        return tokenizer, special_ids(tokenizer, read_settings(folder), {}, {})
    if base is not None:
        if base.tokenizer is None:
            raise InputError(f"{base.folder} has no tokenizer: add tokenizer.json to it")
        return base.tokenizer, base.special
    chosen, sentence = choose(plan, task.tokens, corpus.size)
    on_event(Said(sentence))
    assert chosen.kind is not None
    tokenizer = train_tokenizer(Texts(corpus.train), plan, task.tokens, corpus.size)
    named = {role: tokenizer.token_to_id(token) for role, token in task.tokens.roles(chosen.kind).items()}
    special = {role: index for role, index in named.items() if index is not None}
    if task.usual is ENCODER_DECODER:
        special["decoder_start"] = special["bos"]
    return tokenizer, special


def _batches(
    recipe: Recipe, task: TaskSpec, corpus: Corpus, loaded: Model, folder: Path, on_event: OnEvent
) -> tuple[Batches, Batches]:
    """Encoded examples, kept beside the run, and the batches made of them."""
    length = min(recipe.data.max_length or loaded.max_length, loaded.max_length)
    cache = Path(recipe.data.cache) if recipe.data.cache is not None else folder / CACHE
    made = []
    sides: tuple[Literal["train", "validation"], ...] = ("train", "validation")
    for side in sides:
        encoded = encode_corpus(
            corpus, side, task.batching, loaded.tokenizer, loaded.labels, cache, special=loaded.special
        )
        encoded, special = begun(encoded, loaded)
        batches = make_batches(
            task.batching,
            encoded,
            recipe.data,
            special=special,
            length=length,
            seed=recipe.train.seed,
            training=side == "train",
        )
        for line in batches.notes:
            on_event(Said(f"{side}: {line}"))
        made.append(batches)
        if task.tokens is None and side == "train":
            loaded.images = processor(
                encoded.arrays["mean"].tolist(), encoded.arrays["std"].tolist(), loaded.config
            )
    train, validation = made
    if train.waste:
        count = "1 batch" if train.per_epoch == 1 else f"{train.per_epoch:,} batches"
        on_event(Said(f"{count} in a pass; {train.waste:.1%} of their tokens are padding"))
    return train, validation


def processor(mean: list[float], deviation: list[float], config: ModelConfig) -> dict[str, Any]:
    """preprocessor_config.json: what is done to a picture before the model reads it."""
    assert config.image_size is not None
    height, width = config.image_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": deviation,
    }


def _settle(
    recipe: Recipe, task: TaskSpec, corpus: Corpus, loaded: Model, train: Batches, precision: str
) -> Recipe:
    """The recipe with nothing left to choose: this is what `train.toml` says and what a resumed run reads."""
    plan = recipe.train
    batches = (
        train.n_rows / train.rows if isinstance(train, EvenRows) else train.per_epoch
    )  # of even rows the last runs into the next pass
    in_pass = batches / plan.accumulate
    steps = plan.steps or (
        max(1, round(plan.epochs * in_pass))
        if plan.epochs is not None
        else min(5000, max(1000, round(10 * in_pass)))
    )
    every = plan.validate_every or max(1, steps // 20)
    metric = plan.metric or task.default_metric(corpus.labels)
    warmup = (
        plan.warmup
        if plan.warmup is not None
        else 4000
        if plan.schedule == "original"
        else max(1, steps // 20)
    )
    if warmup >= steps and plan.schedule != "original":
        warmup = max(1, steps // 10)  # with none, a single step would already have the last rate
    changed = {
        "steps": steps,
        "epochs": None,
        "validate_every": every,
        "save_every": plan.save_every or every,
    }
    recipe = recipe.replace("train", **changed, metric=metric, warmup=warmup, precision=precision)
    if BASE in recipe.model and recipe.model[BASE] not in PRESETS:
        return recipe  # the directory says what else the model is
    fields = {entry.name: getattr(loaded.config, entry.name) for entry in dataclasses.fields(loaded.config)}
    return recipe.replace(
        "model", **{name: plain(value) for name, value in fields.items() if value is not None}
    )


def _assemble(
    recipe: Recipe,
    task: TaskSpec,
    corpus: Corpus,
    loaded: Model,
    train: Batches,
    validation: Batches,
    folder: Path,
    device: torch.device,
    on_event: OnEvent,
) -> Run:
    """Everything around the model: precision, optimizer, averages."""
    plan = recipe.train
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    precision = choose_precision(plan, device, settled=True)
    on_event(Said(precision.sentence))
    if plan.lora:
        torch.manual_seed(plan.seed)  # the updates begin at random
        add_lora(
            loaded.model,
            plan.lora,
            plan.lora_alpha,
            plan.lora_targets,
            () if isinstance(loaded.model.head, LanguageHead) else ("head.*",),
        )
    loaded.model.to(device)
    optimizer = make_optimizer(loaded.model, plan, device)
    join_projections(loaded.model)
    if plan.checkpointing:
        recompute(loaded.model)
    per_token = (
        cost(loaded.config, length=loaded.max_length).flops.training_per_token if task.tokens is not None else 0.0
    )
    run = Run(
        folder=folder,
        task=task,
        plan=plan,
        loaded=loaded,
        train=train,
        validation=validation,
        optimizer=optimizer,
        precision=precision,
        device=device,
        attention=quick_attention(task, recipe.data, device),
        ema=Ema(loaded.model, plan.ema) if plan.ema else None,
        samples=sampler(task, corpus, recipe.generate, plan.samples, plan.seed),
        flops_per_token=per_token,
    )
    wanted = plan.compile if plan.compile is not None else pays(task, recipe.data, plan, device)
    if not (wanted and _compiled(run, on_event)) and narrow(device):
        suit_narrow(loaded.model)
    return run


def _compiled(run: Run, on_event: OnEvent) -> bool:
    """Compile the model, if it learns from a batch so; it stays as it is where the machine lacks what compiling takes."""
    on_event(Said("compiling the model, which takes a moment"))
    run.model.train().compile()
    try:
        with run.precision.autocast(), run.attention():
            loss, _ = batch_loss(run.model, run.batches(1)[0], run.plan.label_smoothing, run.plan.loss_chunk, objective=run.task.objective)
        loss.backward()  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        run.model._compiled_call_impl = None
        on_event(
            Said(
                f"not compiled, and slower for it: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            )
        )
        return False
    finally:
        run.model.zero_grad(set_to_none=True)
    return True


def _resume(folder: Path, on_event: OnEvent, stop: Callable[[], bool]) -> Trained:
    """Go on where the last checkpoint stands."""
    found = newest(folder)
    if not (folder / RECIPE).is_file() or not resumable(folder):
        raise CheckpointError(
            f"{folder} holds no run that can be resumed: it needs {RECIPE} and a checkpoint"
        )
    if found is None:
        return _begin(read_recipe(folder / RECIPE), folder, on_event, stop)
    for debris in (folder / CHECKPOINTS).glob(".step-*"):
        shutil.rmtree(debris, ignore_errors=True)
    recipe = read_recipe(folder / RECIPE)
    corpus, name = open_examples(recipe.data)
    task = task_named(name)
    fingerprint = folder / CACHE / "fingerprint"
    if fingerprint.is_file() and fingerprint.read_text() != corpus.fingerprint:
        raise TrainingError(
            f"the data of {folder} has changed since the run began: put the old files back, or begin a new run"
        )
    device = best_device(recipe.train.device)
    loaded = load(found, dtype=torch.float32)
    train, validation = _batches(recipe, task, corpus, loaded, folder, lambda event: None)
    run = _assemble(recipe, task, corpus, loaded, train, validation, folder, device, on_event)
    tensors, run.state = load_checkpoint(found)
    _check_unchanged(run, tensors)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if f"weights/{name}" in tensors:
                parameter.copy_(tensors[f"weights/{name}"])
    restore_optimizer(run.optimizer, run.model, tensors)
    if run.ema is not None:
        run.ema.restore(
            {name.removeprefix("ema/"): tensor for name, tensor in tensors.items() if name.startswith("ema/")}
        )
    on_event(Said(f"going on from step {run.state.step}"))
    return _finish(run, on_event, stop)


def _check_unchanged(run: Run, tensors: Mapping[str, torch.Tensor]) -> None:
    """Does the checkpoint fit the recipe, which lies open beside it?"""
    changed = None
    if any(run.metric not in row for row in run.state.validations):
        changed = "metric"
    kept = {name.rpartition("/")[2] for name in tensors if name.startswith("optimizer/")}
    if kept and ("exp_avg" in kept) != isinstance(run.optimizer, torch.optim.AdamW):
        changed = "optimizer"
    weights = {
        name: tensors.get(f"weights/{name}", parameter) for name, parameter in run.model.named_parameters()
    }
    if any(weights[name].shape != parameter.shape for name, parameter in run.model.named_parameters()):
        changed = "lora"
    if changed is not None:
        raise CheckpointError(
            f"train.{changed} is another than when {run.folder} began: put it back in {RECIPE}, or begin a new run"
        )


# Finishing ------------------------------------------------------------------------------------------------------------


def _finish(run: Run, on_event: OnEvent, stop: Callable[[], bool]) -> Trained:
    """Train, choose the weights to keep, write them to the folder itself."""
    state = run.state
    with Log(run.folder, state.step, run.plan.tensorboard) as log:

        def tell(event: Event) -> None:
            log.write(event)
            on_event(event)

        parameters = list(run.model.parameters())
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        tell(
            Started(
                run.folder,
                run.task.name,
                sum(p.numel() for p in parameters),
                trainable,
                run.steps,
                state.step,
                str(run.device),
            )
        )
        reason = learn(run, tell, stop)
        chosen, metrics = _chosen(run, reason)
        if reason != "stopped":
            chosen.save(run.folder)
        tell(Finished(run.folder, state.step, state.seconds, metrics, reason))
    return Trained(chosen, run.folder, state.step, metrics, reason)


def _chosen(run: Run, reason: str) -> tuple[Model, dict[str, Any]]:
    """The best checkpoint and its figures; or the average of the last ones and what it scores."""
    best = run.folder / BEST
    found = (best if best.exists() else run.folder / LAST).resolve()
    loaded = load(found)
    steps = averaged(run)  # none, where patience ended the run before the first of them
    if len(steps) > 1 and reason != "stopped":
        states = (load(run.folder / CHECKPOINTS / f"step-{step}").model.state_dict() for step in steps)
        loaded.model.load_state_dict(average(states))
        loaded.model.to(run.device)
        metrics = validate(loaded, run.task, run.validation, run.precision, run.device, run.metric)
        loaded.model.to("cpu")
        return loaded, {"step": run.state.step, **metrics}
    step = int(found.name.removeprefix("step-"))
    return loaded, next((row for row in run.state.validations if row["step"] == step), {})
