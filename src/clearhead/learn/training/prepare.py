"""A new run made ready: recipe, data, tokenizer, model, batches, optimizer."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from clearhead.core.config.kinds import FULL
from clearhead.core.heads import LanguageHead
from clearhead.errors import CheckpointError, ConfigError, TrainingError, refuse
from clearhead.hub.checkpoint import Unread
from clearhead.hub.files import write_text
from clearhead.hub.gguf import is_gguf
from clearhead.hub.tokenizer import load_tokenizer, read_settings, special_ids
from clearhead.hub.tokens.training import SPELLS_ALL, choose, train_tokenizer
from clearhead.learn.batches.batch import Batch, Batches, FixedRows, Redrawn
from clearhead.learn.data.examples import Corpus, Images
from clearhead.learn.data.files import RECIPE
from clearhead.learn.evaluation.evaluate import batches_for, encoded_for, redrawing, sampler
from clearhead.learn.losses import default_chunk
from clearhead.learn.parallel.division import whole_refusal
from clearhead.learn.parallel.pipeline import check as check_stages
from clearhead.learn.parallel.pipeline import staged
from clearhead.learn.parallel.shards import emptied, materialise
from clearhead.learn.parallel.world import ALONE, World
from clearhead.learn.recipe import BASE, Recipe, TrainPlan
from clearhead.learn.tasks import table
from clearhead.learn.tasks.entries.chats import PreferenceBatches
from clearhead.learn.tasks.generation import template_for
from clearhead.learn.tasks.table import Texts, open_examples
from clearhead.learn.tasks.task import DECODER, ENCODER, ENCODER_DECODER, ClassTask, Side, Task
from clearhead.learn.training import build, machine, optim, weights
from clearhead.learn.training.captured import can_capture, capture_steps
from clearhead.learn.training.events import Note, OnEvent
from clearhead.learn.training.fit import fitted
from clearhead.learn.training.folder import first_example
from clearhead.learn.training.loop import TrainingRun
from clearhead.learn.training.state import CACHE
from clearhead.run.api import Model
from clearhead.run.bundle import best_device
from clearhead.run.kernels.lora import add_lora
from clearhead.run.kernels.parts import like
from clearhead.run.kernels.training import join_projections, recompute, suit_compiled, suit_narrow
from clearhead.run.quant.apply import NAMES, QuantPlan, quantize_model
from clearhead.run.quant.layers import few_bits
from clearhead.variants.contexts import evaluating
from clearhead.variants.costs import cost

FINGERPRINT = f"{CACHE}/fingerprint"  # of the data a run began with
APART = 50  # steps between validations, at least, where the recipe does not say
SIDES: tuple[Side, ...] = ("train", "validation")
# How far two computations of one log-probability may be apart, as a share of it: padding differs.
ALIKE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-3, "float8": 1e-1}


@dataclass(frozen=True)
class Job:
    """One call of `train`: the folder that a run is written to, its processes, and whom it reports to."""

    folder: Path
    on_event: OnEvent = lambda event: None
    world: World = ALONE
    stop: Callable[[], bool] = lambda: False  # called after each step; True: save and end
    keep: Callable[[], None] = lambda: None  # called at the first checkpoint: the folder is the new run's
    given: Set[str] | None = None  # the keys that were set without a recipe; None: the recipe has all

    def note(self, line: str) -> None:
        """Report a sentence."""
        self.on_event(Note(line))


def prepare(recipe: Recipe, job: Job) -> TrainingRun:
    """Prepare a new run; what the recipe leaves open is chosen, reported, and written to `train.toml`."""
    recipe, folder, world = build.sized(recipe), job.folder, job.world
    corpus, name = open_examples(recipe.data)
    task = table.task_named(name).planned(recipe)
    task.check_metric(recipe.train.metric)
    for line in (*corpus.notes, *task.remarks(corpus)):
        job.note(line)
    device = best_device(recipe.train.device)
    recipe, line = fitted(recipe, job.given, name, corpus, device.type == "cuda")
    if line:
        job.note(line)
    base = build.base_of(recipe)
    precision = machine.choose_precision(recipe.train, device)
    world.agree({**facts(corpus), "precision": precision.name})
    loaded = task.model_for(recipe, corpus, base)
    if loaded is None:
        tokenizer, special = world.once(lambda: find_tokenizer(recipe, task, corpus, base, job))
        image = corpus.train.shape if isinstance(corpus.train, Images) else None
        loaded = build.build(
            recipe, name, tokenizer, special, corpus.labels, image, base, large=device.type != "cpu"
        )
    if line := task.ready(loaded, recipe, corpus):
        job.note(line)
    recipe = recipe.replace("data", task=name)
    batches = encode_batches(recipe, task, corpus, loaded, job)
    for line in remarks(recipe, task, loaded, base):
        job.note(line)
    warmup = recipe.train.warmup
    recipe = settled(recipe, task, corpus.labels, loaded, batches[0], precision.name)
    if warmup not in (None, recipe.train.warmup):
        job.note(f"warm-up of {recipe.train.warmup} steps: {warmup} would be the whole run")
    if world.first:
        write_text(folder / RECIPE, recipe.to_toml())
        write_text(folder / FINGERPRINT, corpus.fingerprint)
    run = assemble(job, recipe, task, corpus, loaded, batches, precision)
    keep_reference(run, job)
    return run


def facts(corpus: Corpus) -> dict[str, str]:
    """Return what must be the same in every process of a run."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        code.update(path.read_bytes())
    return {"data": corpus.fingerprint, "code": code.hexdigest()[:16], "torch": torch.__version__}


def assemble(
    job: Job,
    recipe: Recipe,
    task: Task,
    corpus: Corpus,
    loaded: Model,
    batches: tuple[Batches, Batches],
    precision: machine.Precision,
    unread: Unread | None = None,
    began: Mapping[str, Any] = MappingProxyType({}),
) -> TrainingRun:
    """Put a run together around its model: low-rank updates, optimizer, averages, fast parts.

    `unread`: the weights of a model that has none yet, of which each process reads its part. `began`: the
    choices of a run that goes on, see `State`.
    """
    plan, device, world = recipe.train, precision.device, job.world
    task = task.settled(plan, loaded, corpus)
    module, joined = task.module(loaded), loaded.towers is not None
    refuse(
        joined and world.size > 1,
        "two towers are trained in one process: start it without torchrun",
        ConfigError,
    )
    began = began if began.get("device") == device.type else {}  # on another one, all is chosen anew
    threads = _set_threads(plan, began, job)
    if plan.loss_chunk is None and isinstance(loaded.model.head, LanguageHead):
        usual_chunk = default_chunk(loaded.config.vocab_size, device)  # on a GPU by its memory
        plan = replace(plan, loss_chunk=began.get("loss_chunk", usual_chunk))
    assert plan.steps is not None and plan.metric is not None, "the recipe is not settled"
    refuse(
        plan.offload and precision.scaled,
        "train.offload does not work with float16, whose gradients are scaled: "
        "set train.precision to bfloat16 or float32",
        ConfigError,
    )
    job.note(precision.sentence)
    refuse(
        plan.widths and task.name != "embed",
        f"train.widths is for embed, and this is {task.name}: leave it out",
        ConfigError,
    )
    if plan.quantize is not None:
        unfit = plan.compile or plan.precision == "float8" or world.size > 1
        refuse(
            unfit or joined or loaded.config.head != "lm",
            f"train.quantize {plan.quantize} is for language models in one process, and neither for "
            "train.compile nor float8: leave one of them out",
            ConfigError,
        )
        rounding = QuantPlan(NAMES[plan.quantize], method="hqq" if plan.quantize == "int4" else "rtn")
        loaded.model = quantize_model(loaded.model, rounding).model
        job.note(f"frozen weights{few_bits(loaded.model).replace(';', ':', 1)}")
    if plan.lora:
        torch.manual_seed(plan.seed)  # the updates begin at random
        also = () if isinstance(loaded.model.head, LanguageHead) else ("head.*",)
        update = plan.lora, plan.lora_alpha, plan.lora_targets
        adapted = add_lora(loaded.model, *update, also=also)
        job.note(weights.adapted_note(adapted, plan.lora))
    optim.freeze(module, plan.freeze)
    check_stages(loaded.config, recipe.parallel.pipeline, precision.scaled)
    has_room = functools.partial(machine.fits, recipe, loaded.config, precision)
    world = world.arranged(recipe.parallel, device.type, has_room, always=plan.offload)
    for mistake in mistakes_of(plan, task, loaded, world):
        raise ConfigError(mistake)
    whole = world.plan.tensor * world.plan.context == 1  # a split layer has its own ways
    empty = emptied(loaded.model) if world.mesh is not None else None
    if world.mesh is None:  # what is split goes to the device in parts
        module.to(device)
    if world.plan.pipeline > 1:
        loaded.model = staged(loaded.model, world, device)
    if whole and not joined:
        join_projections(loaded.model)
    if precision.float8:
        job.note(machine.suit_float8(loaded.model, world.mesh is not None))
    if plan.checkpointing:
        recompute(loaded.model)
    per_token = 0.0
    if task.tokens is not None and not joined:
        figures = cost(loaded.config, length=loaded.max_length, mtp=plan.mtp_weight > 0)
        per_token = plan.passes * figures.flops.training_per_token
    least = None
    if precision.peak is not None:
        least = machine.least_seconds(per_token, batches[0].at(0), plan, precision)
    pays = world.plan.context == 1 and not task.sampled and plan.quantize is None
    usual = pays and machine.pays(task, recipe.data, plan, device, least)
    wanted = bool(began.get("compiled", usual) if plan.compile is None else plan.compile)
    partial: Sequence[nn.Parameter] = ()
    if world.mesh is not None:
        from clearhead.learn.parallel.split import split  # takes seconds to import

        if world.size > 1:
            job.note(f"{world.size} processes: {world.plan}")
        if machine.narrow(device) and whole and not wanted:
            suit_narrow(loaded.model)
        partial = split(loaded.model, world, wanted, plan.offload)
        if unread is not None:
            materialise(loaded.model, torch.device("cpu") if plan.offload else device, unread)
    optimizer = optim.make_optimizer(task.module(loaded), replace(plan, freeze=()), device)  # frozen before
    run = TrainingRun(
        folder=job.folder,
        task=task,
        plan=plan,
        steps=plan.steps,
        metric=plan.metric,
        loaded=loaded,
        train=batches[0],
        validation=batches[1],
        optimizer=optimizer,
        precision=precision,
        attention=machine.quick_attention(task, recipe.data, device),
        ema=weights.Ema(task.module(loaded), plan.ema) if plan.ema else None,
        samples=sampler(task, corpus, recipe.generate, plan.samples, plan.seed),
        example=first_example(corpus),
        flops_per_token=per_token,
        world=world,
        empty=empty,
        partial=partial,
    )
    task.begin(run, recipe)
    compiled = world.mesh is None and wanted and _compile(run, job)
    refuse(
        bool(began.get("compiled")) and wanted and not compiled and world.mesh is None,
        f"{job.folder} was begun compiled, and a run goes on as it began: mend what is reported above, or "
        "set train.compile=false, which changes the last digits of all numbers",
        ConfigError,
    )
    if world.mesh is None and not compiled and not joined and machine.narrow(device):
        suit_narrow(loaded.model)
    bound = began.get("recorded", machine.host_bound(loaded.config, least))
    recorded = not compiled and bound and can_capture(run)
    if recorded:
        capture_steps(run)
    run.state.choices = {
        **machine.place(device),
        "threads": threads,
        "loss_chunk": plan.loss_chunk,
        "compiled": compiled if world.mesh is None else wanted,
        "recorded": recorded,
    }
    return run


def _set_threads(plan: TrainPlan, began: Mapping[str, Any], job: Job) -> int | None:
    """Set how many threads a CPU computes with, which decides the order of sums; None: not a run's choice.

    A run goes on with as many as it began with, so that its bits are the same.
    """
    alone = job.world.size == 1
    wanted = plan.threads or (began.get("threads") if alone else None)
    if wanted is not None and wanted != torch.get_num_threads():
        if plan.threads is None:
            job.note(f"{wanted} threads, as the run began with; train.threads changes that")
        torch.set_num_threads(wanted)
    return torch.get_num_threads() if alone else None


def mistakes_of(plan: TrainPlan, task: Task, loaded: Model, world: World) -> Iterator[str]:
    """Yield what terms of the loss and schedules ask of a task, a model or a mesh that it has not."""
    own, config, mesh = f"the loss of {task.name} is its own", loaded.config, world.plan
    vocabulary = task.reads == "vocabulary" and not task.sampled
    for name in ("z_loss", "future_tokens"):
        if getattr(plan, name) and not vocabulary:
            yield f"train.{name} is for tasks that predict tokens, and {own}: leave it out"
    if plan.standardise and task.name != "regress":
        yield f"train.standardise is for numbers (regress), and this is {task.name}: leave it out"
    if plan.future_tokens and config.head != "lm":
        yield f"train.future_tokens looks ahead, and {task.name} fills in on both sides: leave it out"
    if plan.future_tokens and mesh.context > 1:
        yield "train.future_tokens needs whole rows: leave parallel.context at 1"
    if plan.mtp_weight and not (vocabulary and config.n_mtp_layers):
        yield (
            f"train.mtp_weight {plan.mtp_weight} is for models with MTP layers that learn the next token: "
            "set model.n_mtp_layers, or leave it out"
        )
    if line := whole_refusal(config, mesh):
        yield f"model.{line}"
    if plan.r_drop:
        if not (vocabulary or isinstance(task, ClassTask)):
            yield f"train.r_drop is for tasks that predict tokens or classes, and {own}: leave it out"
        rates = (
            config.dropout,
            config.attention_dropout,
            config.embedding_dropout,
            config.feedforward_dropout,
        )
        if not any((*rates, config.layer_drop)):
            yield "train.r_drop compares two passes with other dropout, and there is none: set model.dropout"
        if mesh.pipeline > 1:
            yield "train.r_drop runs the model twice: leave parallel.pipeline at 1"
    if plan.accumulate_schedule and task.sampled:
        yield f"train.accumulate_schedule is not for {task.name}, which samples its batches: leave it out"
    if plan.window_schedule:
        if not config.main.causal or FULL not in config.main.kinds or config.main.cross:
            yield "train.window_schedule is for decoders with layers of full attention: leave it out"
        if config.rope_local_base is not None:
            yield (
                "train.window_schedule: layers with a window have rotary angles of their own "
                f"(model.rope_local_base {config.rope_local_base}): leave one of them out"
            )
        if task.sampled or task.reads == "answers":
            yield (
                f"train.window_schedule is not for {task.name}, whose samples or reference come from whole "
                "attention: leave it out"
            )
        if mesh.pipeline * mesh.context > 1:
            yield "train.window_schedule needs whole models: leave parallel.context and pipeline at 1"


def _compile(run: TrainingRun, job: Job) -> bool:
    """Compile the model and try one batch; on failure, report it and continue uncompiled."""
    job.note("compiling the model, which takes a moment")
    suit_compiled(run.model)
    run.compiled = like(run.model.train(), type(run.model))
    run.compiled.compile()
    try:
        run.backward(run.loss(run.batches(1).batches[0]))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        run.compiled = None
        why = f"not compiled, and slower for it: {type(error).__name__}: {error}"
        job.note(why.splitlines()[0])
        return False
    finally:
        run.model.zero_grad(set_to_none=True)
    return True


# Tokenizer and batches --------------------------------------------------------------------------------------


def find_tokenizer(
    recipe: Recipe, task: Task, corpus: Corpus, base: Model | None, job: Job
) -> tuple[Tokenizer | None, dict[str, int]]:
    """Return tokenizer and special ids: of a directory, of the base model, or trained on this data."""
    if task.tokens is None:
        return None, {}
    plan = recipe.tokens
    if plan.model is not None:
        folder = Path(plan.model)
        tokenizer = load_tokenizer(folder) if folder.is_dir() or is_gguf(folder) else None
        refuse(tokenizer is None, f'[tokens] model "{plan.model}" is no directory with a tokenizer')
        return tokenizer, special_ids(tokenizer, read_settings(folder), {}, {})
    if base is not None:
        refuse(base.tokenizer is None, f"{base.folder} has no tokenizer: add tokenizer.json to it")
        return base.tokenizer, base.special
    chosen, sentence = choose(plan, task.tokens, corpus.size)
    assert chosen.kind is not None
    gguf = task.usual is DECODER and "window" not in recipe.model  # else GGUF has no name for the model
    elsewhere = plan.kind is None and gguf and chosen.kind not in SPELLS_ALL
    job.note(sentence + (f"; for GGUF, set tokens.kind={' or '.join(SPELLS_ALL)}" if elsewhere else ""))
    texts = Texts(corpus.train)
    specials = task.tokens
    if task.chats:  # the model reads what the template writes, and a turn ends with one token
        template = template_for(plan.template, specials)
        specials = replace(specials, sentinels=template.markers)
        texts = Texts(corpus.train, template, specials.all(chosen.kind))
    tokenizer = train_tokenizer(texts, plan, specials, corpus.size, clamp=True)
    reached = tokenizer.get_vocab_size()
    if plan.vocab_size is not None and reached < plan.vocab_size:
        job.note(f"{reached:,} tokens: tokens.vocab_size {plan.vocab_size:,} is more than the text has")
    named = {role: tokenizer.token_to_id(token) for role, token in task.tokens.roles(chosen.kind).items()}
    special = {role: index for role, index in named.items() if index is not None}
    if task.usual is ENCODER_DECODER:
        special["decoder_start"] = special["bos"]
    return tokenizer, special


def encode_batches(
    recipe: Recipe, task: Task, corpus: Corpus, loaded: Model, job: Job
) -> tuple[Batches, Batches]:
    """Encode and cache the examples; return the batches to train and to validate on."""
    hides = task.pretrain or (task.name == "lm" and recipe.data.packing == "stream")
    refuse(
        recipe.data.token_dropout > 0 and not hides,
        "data.token_dropout is for texts with a label, for tags and for lm in a stream, and this is "
        f"{task.name}{' of documents apart' * (task.name == 'lm')}: leave it out",
        ConfigError,
    )
    refuse(
        recipe.data.bpe_dropout > 0 and not task.redraws,
        "data.bpe_dropout is for language models, texts with a label, tags and pairs, and this is "
        f"{task.name}: leave it out",
        ConfigError,
    )
    cache = Path(recipe.data.cache) if recipe.data.cache is not None else job.folder / CACHE
    sides = []
    for side in SIDES:
        direct = task.direct_batches(loaded, corpus, side, recipe.data, recipe.train.seed)
        if direct is not None:
            sides.append(direct)
            continue
        with job.world.led():
            rows = encoded_for(loaded, task, corpus, side, loaded.labels, cache)
        seed, training = recipe.train.seed, side == "train"
        if training and recipe.data.bpe_dropout:
            batches: Batches = Redrawn(redrawing(loaded, task, corpus, rows, recipe.data, seed))
        else:
            batches = batches_for(loaded, task, rows, recipe.data, loaded.max_length, seed, training)
        for line in batches.notes:
            job.note(f"{side}: {line}")
        sides.append(batches)
        if isinstance(corpus.train, Images) and side == "train":
            mean, deviation = (rows.arrays[name].tolist() for name in ("mean", "std"))
            loaded.images = build.processor(mean, deviation, loaded.config, corpus.train.cropped)
    train, validation = sides
    if train.waste:
        count = "1 batch" if train.per_epoch == 1 else f"{train.per_epoch:,} batches"
        job.note(f"{count} in an epoch; {train.waste:.1%} of their tokens are padding")
    return train, validation


# What the recipe leaves open --------------------------------------------------------------------------------


def settled(
    recipe: Recipe, task: Task, labels: tuple[str, ...], loaded: Model, train: Batches, precision: str
) -> Recipe:
    """Fill in everything the recipe leaves open: this is `train.toml`, which a resumed run reads."""
    plan = recipe.train
    steps = _steps(plan, train)
    every = plan.validate_every or max(min(APART, steps), steps // 20)
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
    if is_based(recipe) or loaded.towers is not None:
        return recipe  # the rest of the model is described by that directory
    return recipe.replace("model", **loaded.config.to_dict())


def is_based(recipe: Recipe) -> bool:
    """Return True if a run starts from the weights of a model."""
    return BASE in recipe.model and recipe.model[BASE] not in build.NAMED


def _steps(plan: TrainPlan, train: Batches) -> int:
    """Return the number of steps: as given, by the epochs, or ten epochs within 1,000 to 5,000 steps."""
    if plan.steps is not None:
        return plan.steps
    # The last batch of rows of one length is filled up from the next epoch.
    batches = train.uses * train.n_rows / train.rows if isinstance(train, FixedRows) else train.per_epoch
    per_epoch = batches * len(plan.accumulates) / sum(plan.accumulates)
    if plan.epochs is not None:
        return max(1, round(plan.epochs * per_epoch))
    return min(5000, max(1000, round(10 * per_epoch)))


def _warmup(plan: TrainPlan, steps: int) -> int:
    warmup = max(1 if plan.warmup is None else 0, optim.warmup_steps(plan, steps))
    too_long = warmup >= steps and plan.schedule != "original"
    return max(1, steps // 10) if too_long else warmup  # with 0, a single step would have the last rate


def remarks(recipe: Recipe, task: Task, loaded: Model, base: Model | None) -> Iterator[str]:
    """Yield a sentence for random weights and each setting that the data, the model or its base overrides."""
    if base is None and task.usual is ENCODER and task.head != "mlm":
        yield "training starts from random weights: set model.base=DIR to start from a trained model"
    longest, wanted = loaded.max_length, recipe.data.max_length
    if wanted is not None and wanted > longest and task.tokens is not None:
        yield (
            f"rows have {longest} tokens at most: the model takes no more, "
            f"and data.max_length is {wanted}; set model.max_positions"
        )
    if loaded.config.n_mtp_layers and not recipe.train.mtp_weight:
        yield "MTP layers are not trained: train.mtp_weight is 0, and 0.3 in the paper"
    for name in ("vocab_size", "head", "n_classes"):
        value, decided = recipe.model.get(name), getattr(loaded.config, name)
        if value not in (None, decided):
            yield f"model.{name} is {decided}, by the data, not {value}"
    if base is not None and recipe.tokens.kind is not None and recipe.tokens.model is None:
        yield f"tokens are those of {base.folder}: tokens.kind {recipe.tokens.kind} has no effect"


# The reference of preference tuning -------------------------------------------------------------------------


def keep_reference(run: TrainingRun, job: Job) -> None:
    """Compute the reference of a new run of pairs, write it to its folder, and check it."""
    for side, batches in _sides(run).items():
        plan = run.world.plan
        refuse(
            plan.pipeline * plan.tensor * plan.context > 1,
            "preference tuning splits no model: leave parallel.pipeline, tensor and context at 1",
            ConfigError,
        )
        for batch in batches.all():
            assert batch.numbers is not None
            batches.reference[batch.numbers.numpy()] = logprobs(run, batch).cpu().numpy()
        if run.world.first:
            np.save(run.folder / CACHE / f"reference-{side}.npy", batches.reference, allow_pickle=False)
        if side == "train":
            job.note(f"reference: the model itself before its first step; off by {_check(run):.1e}")


def read_reference(run: TrainingRun) -> None:
    """Read the stored reference of a run that is resumed."""
    for side, batches in _sides(run).items():
        path = run.folder / CACHE / f"reference-{side}.npy"
        try:
            reference = np.load(path, allow_pickle=False)
        except (OSError, ValueError):
            raise CheckpointError(
                f"{path} is missing or damaged, and the model it was computed with is gone: begin a new run"
            ) from None
        refuse(
            reference.shape != batches.reference.shape,
            f"{path} holds other pairs than the data: begin a new run",
            CheckpointError,
        )
        batches.reference[:] = reference


@torch.no_grad()
def logprobs(run: TrainingRun, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities of the two answers of each row, [B, 2], as the run computes them."""
    moved = batch.to(run.precision.device)
    with evaluating(run.model), run.precision.autocast():
        return run.task.outputs_of(run.model, moved, run.plan.loss_chunk).float()


def _check(run: TrainingRun) -> float:
    """Refuse a model that differs from its reference before the first step; return the share it is off by."""
    first = run.train.at(0)
    assert first.reference is not None
    here = logprobs(run, first).cpu()
    apart = float(((here - first.reference).abs() / first.reference.abs().clamp(min=1)).max())
    refuse(
        not apart <= ALIKE[run.precision.name],
        f"the model differs from its reference by {apart:.1e} before the first step: "
        "this is a fault of the precision or the kernels; set train.precision=float32",
        TrainingError,
    )
    return apart


def _sides(run: TrainingRun) -> dict[str, PreferenceBatches]:
    both = {"validation": run.validation, "train": run.train}
    return {side: batches for side, batches in both.items() if isinstance(batches, PreferenceBatches)}
