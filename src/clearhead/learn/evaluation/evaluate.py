"""`evaluate`: judge a model on every example of some files, each figure with its confidence interval."""

import itertools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from clearhead.core import heads, transformer
from clearhead.errors import InputError, hints_of, nearest, refuse
from clearhead.hub.tokenizer import truncation_side
from clearhead.hub.tokens.text import Merges
from clearhead.learn import losses
from clearhead.learn.batches.batch import IGNORE, Batches
from clearhead.learn.batches.encoding import BpeDropout, Encoded
from clearhead.learn.data import files, formats
from clearhead.learn.data.corpus import place_of
from clearhead.learn.data.examples import Chunk, Corpus, Example, Images, Picture, Tagged
from clearhead.learn.data.given import Given, given_or_paths
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.data.tables import counted, listed
from clearhead.learn.evaluation.baseline import Baseline, linear_answers, ngram_baseline, right_answers
from clearhead.learn.evaluation.metrics import (
    METRICS,
    ClassCounts,
    Counts,
    Figures,
    Judged,
    OnProgress,
    perplexity,
    sacrebleu_metric,
)
from clearhead.learn.parallel import TOKENS
from clearhead.learn.parallel.world import ALONE, World
from clearhead.learn.recipe import GeneratePlan, Settings, read_recipe
from clearhead.learn.tasks import reading, table
from clearhead.learn.tasks.generation import chat_template
from clearhead.learn.tasks.table import open_examples, row_of
from clearhead.learn.tasks.task import Side, Task
from clearhead.run.api import Model
from clearhead.variants import contexts

# What a run's own recipe says of reading and laying out data, which holds for other files too.
READING = (
    *("task", "format", "columns", "header", "encoding", "pattern", "texts_only", "lowercase"),
    *("max_length", "packing", "mask_share", "span_length", "stride"),
)
BATCH_TOKENS = 16_384  # of a batch, padding included, where no number of rows is asked for
PICTURES = 64  # at a time
WINDOW = 2048  # tokens of a window over text, of a model that takes more
LABEL = re.compile(r"LABEL_\d+")
WRITTEN = ("exact", "bleu", "chrf")  # metrics that need text the model generates
Autocast = Callable[[], AbstractContextManager[object]]  # makes the context in which a loss is computed


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on some data."""

    task: str
    examples: int  # windows of text, sources, sentences, questions, pictures
    targets: int  # tokens, classes or tags that the loss is a mean over
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]  # of 95 %
    signatures: dict[str, str]  # sacreBLEU's
    notes: tuple[str, ...]  # what was guessed, cut or mapped, a short sentence each
    outputs: tuple[str, ...]  # what the model answered for each example, in their order; none for text
    classes: ClassCounts | None = None  # of a classifier: figures of each class, and the confusion matrix
    baseline: Baseline | None = None  # what a simple model makes of the same examples


def evaluate(
    loaded: Model,
    data: Any = (),
    plan: DataPlan | None = None,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    baseline: bool = False,
    on_progress: OnProgress = lambda stage, done, total: None,
    **generation: Any,
) -> Evaluation:
    """Judge a model on every example of some files, on the device that it is on.

    The model's head decides what is measured: for text, loss, perplexity and bits per byte; for pairs also
    exact match, edits per token, BLEU and chrF of what the model writes; for classes, tags and answers,
    accuracy and F1. Rows with the same source, or the same question and context, are one example with several
    right answers.

    Args:
        loaded: the model.
        data: files, folders, globs, or the name of an embedded corpus; none: the plan's. Or rows in memory,
            as `train` takes them: of a data set in parts, those to validate on.
        plan: how to read them; None: as the run that made the model read its own, else as they look.
        seed: of the masks of mlm and denoise, and of the groups of examples that intervals come from.
        batch_size: rows at a time; None: by their length.
        tokenize: sacreBLEU's tokenizer for BLEU; None: 13a.
        lowercase: give BLEU without regard to case as well.
        baseline: judge a simple model too, fitted on the data that the model was trained on: a linear model
            for classes, tags and numbers, an n-gram model in as much memory for text.
        on_progress: told what is being done, and how much of how much is.
        generation: of pairs: options of `translate`, such as num_beams; else the model's own.
    """
    source = given_or_paths(data)
    if isinstance(source, Given):
        plan = replace(data_plan(loaded.folder) if plan is None else plan, format=None, pattern=None)
        rows = source.paths if source.validation is None else source.validation
        options: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "tokenize": tokenize}
        with tempfile.TemporaryDirectory() as folder:
            paths = Given(rows).write(Path(folder))["paths"]
            options |= {
                "lowercase": lowercase,
                "baseline": baseline,
                "on_progress": on_progress,
                **generation,
            }
            result = evaluate(loaded, paths, plan, **options)
        return replace(result, notes=(*source.notes, *result.notes))
    refuse(batch_size is not None and batch_size < 1, f"batch_size {batch_size} must be 1 or more")
    plan = judged_plan(loaded, plan, source, batch_size)
    task = table.task_named(str(plan.task))
    refuse(
        generation and not task.writes,
        f"{next(iter(generation), '')} is for models that write, and this one is judged by {task.name}: "
        "leave it out",
    )
    if task.writes:
        _check_tokenize(tokenize)
    refuse(seed < 0, f"seed {seed} must be 0 or more")
    known = generation.keys() & hints_of(GeneratePlan)
    GeneratePlan(**{name: generation[name] for name in known if generation[name] is not None})  # or refuses
    corpus, _ = open_examples(plan, split=False)
    notes = [*corpus.notes, *task.remarks(corpus)]
    if task.classes:
        corpus = renamed(corpus, loaded, plan, notes)
    judged = Judged(
        seed, notes=notes, loaded=loaded, plan=plan, rows=corpus.validation, tokenize=tokenize,
        lowercase=lowercase, generation=generation, on_progress=on_progress,
    )  # fmt: skip
    result = _evaluation(judged, task, corpus)
    simple = _baseline(judged, task, corpus, result.metrics) if baseline else None
    if simple is not None and (line := simple.ahead(result.metrics)):
        judged.notes.append(line)
    return replace(result, baseline=simple, notes=tuple(judged.notes))


def judged_plan(
    loaded: Model, plan: DataPlan | None, data: Sequence[str | Path], batch_size: int | None
) -> DataPlan:
    """Return how all examples of some files are read, for the task that the model is judged by."""
    plan = data_plan(loaded.folder, data) if plan is None else plan
    return replace(
        plan,
        task=task_for(loaded, plan.task),
        paths=tuple(map(str, data)) or plan.paths,
        validation=(),
        batch_size=batch_size or PICTURES,
        batch_tokens=None if batch_size else BATCH_TOKENS,
    )


def data_plan(
    folder: Path | None,
    data: Sequence[str | Path] = (),
    recipe: str | Path | None = None,
    settings: Settings = (),
) -> DataPlan:
    """Return how data is read: by a recipe, else by that of the run in this folder, else by its looks.

    `settings` change it. Parallel files are read in the direction of the recipe's.
    """
    settings = settings if isinstance(settings, Mapping) else list(settings)
    recipe = run_recipe(folder) if recipe is None else recipe
    stated, settled = read_recipe(recipe, settings).data, read_recipe(None, settings).data
    changes = {name: getattr(stated, name) for name in READING}
    if changes["format"] == "corpus" and settled.format is None:
        changes["format"] = None  # the run learned from an embedded corpus: this is other data
    changes["columns"] = changes["columns"] or formats.way_for(
        [Path(path).expanduser() for path in data], list(map(Path, stated.paths))
    )
    return replace(settled, **changes)


def run_recipe(folder: Path | None) -> Path | None:
    """Return the recipe of the run in this folder, or of the run that a checkpoint is of, if any."""
    paths = () if folder is None else (folder / files.RECIPE, folder.resolve().parent.parent / files.RECIPE)
    return next((place for place in paths if place.is_file()), None)


def task_for(loaded: Model, wanted: str | None) -> str:
    """Return the task that a model is judged by: its head decides; an encoder-decoder may also mend text."""
    table.row_of(wanted)  # refuses a task that does not exist
    config = loaded.config
    theirs = loaded.description.theirs if loaded.description is not None else {}
    problem = theirs.get("problem_type") if config.head == "classifier" else None
    refuse(
        not any(
            task.head == config.head and config.family in task.fitting_families
            for task in table.TASKS.values()
        ),
        f"a model of family {config.family} with head {config.head} cannot be judged on data: "
        f"{reading.fitting(loaded)}",
    )
    # Of several that fit, the one that data is taken for, and plain text before conversations.
    usual_first = sorted(table.TASKS.values(), key=lambda task: (not task.guessed, task.chats))
    names = [task.name for task in usual_first if task.judges(config, problem)]
    refuse(
        wanted is not None and names and wanted not in names,
        f"task {wanted} does not fit a model of family {config.family} with head {config.head}, "
        f"which is judged by {' or '.join(names)}",
    )
    refuse(
        not names,
        f"no task judges a classifier with {config.n_classes} outputs and problem_type {problem}: "
        "only models that choose one of several classes, or give one number, are judged",
    )
    return wanted or names[0]


def _check_tokenize(tokenize: str | None) -> None:
    """Refuse a wrong tokenizer of sacreBLEU's now, before hours of generation."""
    try:
        sacrebleu_metric("BLEU", tokenize=tokenize)(["a"], ["a"])
    except ImportError:
        return  # a note says so later, in place of BLEU
    except Exception as error:
        from sacrebleu.metrics.bleu import BLEU

        known = tokenize in BLEU.TOKENIZERS
        why = str(error).splitlines()[0] if known else f"choose from {', '.join(map(str, BLEU.TOKENIZERS))}"
        raise InputError(f"tokenize {tokenize!r} cannot be used: {why}") from None


def judged_batches(
    loaded: Model, task: str, plan: DataPlan, corpus: Corpus, folder: str, seed: int, notes: list[str]
) -> tuple[Batches, int, int]:
    """Return every example to validate on once, in one order; the number of tokens, and how many are unknown.

    `folder` holds the ids while they are read.
    """
    spec = table.task_named(task)
    direct = spec.direct_batches(loaded, corpus, "validation", plan, seed, training=False)
    if direct is not None:
        return direct, 0, 0
    rows = encoded_for(loaded, spec, corpus, "validation", loaded.class_names, folder)
    tokens, length = rows.n_tokens, loaded.max_length
    if spec.row is Chunk and plan.max_length is None and length > WINDOW:
        notes.append(f"windows of {WINDOW:,} tokens: the model takes {length:,}, and data.max_length chooses")
        length = WINDOW
    if spec.one_shape and plan.packing == "stream":
        rows = led(rows, "ids", rows.frame.special[0])
    batches = batches_for(loaded, spec, rows, plan, length, seed, training=False)
    notes.extend(batches.notes)
    return batches, tokens, rows.n_unknown


def _evaluation(judged: Judged, task: Task, corpus: Corpus) -> Evaluation:
    """Measure the loss, then what the task is about."""
    loaded, rows = judged.loaded, judged.rows
    questions: dict[tuple[str, ...], int] = {}
    if task.row.ASKED:
        questions, judged.references = examples(rows)
        judged.asked = list(questions)
    with tempfile.TemporaryDirectory() as folder:
        batches, judged.tokens, judged.unknown = judged_batches(
            loaded, task.name, judged.plan, corpus, folder, judged.seed, judged.notes
        )
        losses = _examined(judged, task, batches)
    if questions:
        example = np.arange(len(losses)) if batches.example is None else batches.example
        example_of = np.array([questions[row.asked()] for row in rows])[example]  # the example of each row
        losses = np.stack([np.bincount(example_of, column, len(questions)) for column in losses.T], 1)
    judged.add("loss", *losses.T)
    if task.reads == "vocabulary":
        judged.derive("perplexity", "loss", perplexity)
    outputs = tuple(task.judge(judged))
    return Evaluation(
        task=task.name,
        examples=len(losses),
        targets=int(losses[:, 1].sum()),
        metrics=judged.metrics,
        intervals=judged.intervals,
        signatures=judged.signatures,
        notes=tuple(judged.notes),
        outputs=outputs,
        classes=judged.classes,
    )


def _baseline(judged: Judged, task: Task, corpus: Corpus, metrics: Mapping[str, float]) -> Baseline | None:
    """Return the figures of a simple model that learns from the training data of the run, if it has one."""
    loaded, recipe = judged.loaded, run_recipe(judged.loaded.folder)
    if recipe is None or not (task.name == "lm" or task.classes or task.outputs):
        return None
    judged.on_progress("baseline", 0, 1)
    try:
        trained, _ = open_examples(replace(read_recipe(recipe).data, task=task.name))
        if task.name == "lm":
            with tempfile.TemporaryDirectory() as folder:
                known = np.array(encoded_for(loaded, task, trained, "train", (), folder)["ids"])
                held_out = np.array(encoded_for(loaded, task, corpus, "validation", (), folder)["ids"])
            memory = sum(weight.nbytes for weight in loaded.model.parameters())
            return ngram_baseline(known, held_out, loaded.config.vocab_size, memory, metrics)
        names: Sequence[str] = loaded.class_names
        rows = cast(Any, corpus.validation)
        if task.head == "tagger":  # tags that the model does not have count as missed
            names = [*names, *sorted({tag for row in rows for tag in row.tags}.difference(names))]
        done = linear_answers(trained.train, rows, names)
    except (InputError, ImportError) as error:
        judged.notes.append(f"no baseline: {str(error).splitlines()[0]}")
        return None
    if done is None:
        return None
    name, fitted_on, answers = done
    figures = Figures(judged.seed)
    for metric, (of, predicted, wanted) in task.score(answers, right_answers(rows, names), names).items():
        figures.add(metric, predicted, wanted, of)
    return Baseline(name, fitted_on, figures.metrics, figures.intervals)


def _examined(judged: Judged, task: Task, batches: Batches) -> Counts:
    """Return loss and number of targets of every row in the order of the data.

    What the model answered for each row is kept in `judged`.
    """
    model, seen = judged.loaded.engine.reader(), []
    device = next(model.parameters()).device
    for done, part in enumerate(examine(model, batches, device, task), start=1):
        seen.append(part)
        judged.on_progress("reading", done, batches.per_epoch)
    order = np.argsort(np.concatenate([part.numbers for part in seen]), kind="stable")
    predicted, expected = (
        [row for part in seen for row in getattr(part, name)] for name in ("predicted", "expected")
    )
    if predicted:
        judged.predicted = [predicted[number] for number in order]
        judged.expected = [expected[number] for number in order]
    return np.concatenate([np.stack([part.losses, part.counts], 1) for part in seen])[order]


# Examples as a model knows them -----------------------------------------------------------------------------


def led(encoded: Encoded, name: str, lead: Sequence[int]) -> Encoded:
    """Return the same rows of ids, each with a prefix; a text is one row."""
    if not lead:
        return encoded
    ids, offsets = encoded[name], encoded[f"{name}_offsets"]
    if name == "ids":
        changed = {name: np.concatenate([np.array(lead, ids.dtype), ids])}
    else:
        prefixes = np.tile(np.array(lead, ids.dtype), len(offsets) - 1)
        changed = {
            name: np.insert(ids, np.repeat(offsets[:-1], len(lead)), prefixes),
            f"{name}_offsets": offsets + len(lead) * np.arange(len(offsets)),
        }
    return replace(encoded, arrays={**encoded.arrays, **changed})


def encoded_for(
    loaded: Model, task: Task, corpus: Corpus, side: Side, labels: Sequence[str], folder: str | Path
) -> Encoded:
    """Tokenize the examples of one split by the model's tokenizer and chat template."""
    tokenizer = None if task.tokens is None else loaded.text_tokenizer
    template = chat_template(loaded) if task.chats else None
    return task.encode_corpus(
        corpus, side, tokenizer, labels, folder, special=loaded.special, template=template
    )


def batches_for(
    loaded: Model, task: Task, rows: Encoded, plan: DataPlan, length: int, seed: int, training: bool
) -> Batches:
    """Return encoded examples as batches for the model.

    A decoder with an encoder begins as in generation: `bos` is its first input.
    """
    special = loaded.special
    if loaded.config.family == "encoder-decoder":
        start, *forced = loaded.start_ids
        special = {**special, "bos": start}
        if "target" in rows.arrays:
            rows = led(rows, "target", forced or rows.frame.special[0])
    return task.make_batches(
        rows, plan, special=special, length=length, seed=seed, training=training,
        cut_left=truncation_side(loaded.settings) == "left",
    )  # fmt: skip


def redrawing(
    loaded: Model, task: Task, corpus: Corpus, rows: Encoded, plan: DataPlan, seed: int
) -> Callable[[int], Batches]:
    """Return what makes the training batches of an epoch, whose tokens are drawn for it (BPE dropout)."""
    tokenizer = loaded.text_tokenizer
    merges = Merges(tokenizer)

    def draw(epoch: int) -> Batches:
        dropout = BpeDropout(merges, plan.bpe_dropout, seed, epoch)
        drawn = task.redrawn(rows, corpus, tokenizer, loaded.labels, loaded.special, dropout)
        return batches_for(loaded, task, drawn, plan, loaded.max_length, seed, training=True)

    return draw


def examples(rows: Sequence[Example]) -> tuple[dict[tuple[str, ...], int], list[list[str]]]:
    """Return the distinct questions with their numbers, and all right answers to each."""
    references: dict[tuple[str, ...], dict[str, None]] = {}
    for row in rows:
        references.setdefault(row.asked(), {})[row.answered()] = None
    numbers = {question: place for place, question in enumerate(references)}
    return numbers, [list(answers) for answers in references.values()]


def renamed(corpus: Corpus, loaded: Model, plan: DataPlan, notes: list[str]) -> Corpus:
    """Return the examples with the model's labels.

    Numbers stand for classes that the model has no names for. Tags that it does not have stay, to be counted
    as missed, unless it has none of them.
    """
    labels = loaded.class_names
    theirs = {label: label for label in labels}
    if all(LABEL.fullmatch(label) for label in labels):
        theirs |= {str(number): label for number, label in enumerate(labels)}
        if any(name in theirs and name not in labels for name in corpus.labels):
            notes.append(
                "the model's classes have no names: "
                f"labels 0 to {len(labels) - 1} of the data are their numbers"
            )
    others = [name for name in corpus.labels if name not in theirs]
    tagged = corpus.shape == Tagged.PLURAL and any(name in theirs for name in corpus.labels if name != "O")
    if tagged and others:
        rows = cast(Sequence[Example], corpus.validation)
        words = sum(name in others for row in rows for name in row.names())
        notes.append(
            f"{listed(others)}: not among the model's tags, so {counted(words, 'word')} count as missed "
            "and are no part of the loss"
        )
        theirs |= {name: name for name in others}
    unknown = None if tagged else next(iter(others), None)
    if unknown is not None:
        place = place_of(plan, row_of(plan.task), unknown)
        shown = ", ".join(labels[:12]) + (" and more" if len(labels) > 12 else "")
        raise InputError(
            f"{place}{': ' if place else ''}the {'tag' if corpus.shape == Tagged.PLURAL else 'label'} "
            f"{unknown!r} "
            f"is none of the model's{nearest(unknown, theirs)}: {shown}"
        )
    if isinstance(corpus.validation, Images):
        numbers = np.array([labels.index(theirs[name]) for name in corpus.labels])
        labels_of_model = numbers[corpus.validation.labels]
        return replace(corpus, validation=replace(corpus.validation, labels=labels_of_model))
    rows = cast(Sequence[Example], corpus.validation)
    return replace(corpus, validation=[row.renamed(theirs) for row in rows])


# Judged --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Examined:
    """A batch, judged row by row."""

    numbers: NDArray[np.int64]  # B, of the examples
    losses: Counts  # B, each the sum over the row's targets
    counts: Counts  # B, how many targets that are
    predicted: list[list[Any]]  # of each row, for a head without a vocabulary: see `Task.answers`
    expected: list[list[Any]]


@torch.no_grad()
def examine(
    model: transformer.Transformer,
    batches: Batches,
    device: torch.device,
    task: Task,
    autocast: Autocast = nullcontext,
    world: World = ALONE,
) -> Iterator[Examined]:
    """Judge every batch of one epoch, each process its share."""
    for each in batches.all():
        batch = world.rows(each, TOKENS).to(device)
        arguments = losses.arguments_for(model, batch)
        answers: losses.Answered = ([], [])
        with contexts.evaluating(model), autocast():
            if not world.last:  # the last stage judges
                model(**arguments, logits="none")
                loss = torch.zeros(len(batch))
            elif task.reads == "vocabulary":
                hidden = model(**arguments, logits="none").hidden  # B T D
                assert isinstance(model.head, heads.LanguageHead)
                chunk = losses.default_chunk(model.config.vocab_size, device)
                loss = losses.vocabulary_losses(model.head, hidden, batch.targets, chunk)
            else:
                outputs = task.outputs_of(model, batch)
                loss, answers = task.row_losses(outputs, batch), task.answers(outputs, batch)
        counts = (batch.targets.reshape(len(batch), -1) != IGNORE).sum(1)
        if batch.one_each:
            counts = torch.ones(len(batch))
        numbers = torch.arange(len(batch)) if batch.numbers is None else batch.numbers
        sums, of_rows = (values.cpu().double().numpy() for values in (loss, counts))
        judged: list[Any] = [numbers.numpy(), sums, of_rows, *answers]
        yield from world.gathered(Examined(*(column[: batch.n_rows] for column in judged)))


@torch.no_grad()
def validate(
    loaded: Model,
    task: Task,
    batches: Batches,
    autocast: Autocast,
    device: torch.device,
    world: World = ALONE,
) -> tuple[dict[str, float], str]:
    """Return the mean loss over all targets, perplexity for a vocabulary, and the metrics of the task.

    And a sentence on what the model never predicts, or "".
    """
    model: Any = task.module(loaded)
    seen = list(examine(model, batches, device, task, autocast, world))
    count = sum(float(part.counts.sum()) for part in seen)
    refuse(
        not count,
        "the validation data has no targets: every token is unknown to the tokenizer; "
        "validate on more of it, or on other files",
    )
    metrics = {"loss": sum(float(part.losses.sum()) for part in seen) / count}
    if task.reads != "vocabulary":
        predicted, expected = (
            [row for part in seen for row in getattr(part, side)] for side in ("predicted", "expected")
        )
        scores = task.score(predicted, expected, loaded.labels)
        metrics |= {name: metric(predicted, wanted) for name, (metric, predicted, wanted) in scores.items()}
        return metrics, task.missing(predicted, expected, loaded.labels)
    return metrics | {"perplexity": math.exp(min(metrics["loss"], 700))}, ""


@torch.no_grad()
def written_scores(loaded: Model, task: Task, batches: Batches, metric: str) -> dict[str, float]:
    """Return the scores of what a model writes, where `metric` is one of these."""
    if not (task.writes and metric in WRITTEN):
        return {}
    with contexts.evaluating(loaded.model):
        outputs, references = written(loaded, batches)
    return {name: METRICS[name](outputs, references) for name in ("exact", metric)}


def written(loaded: Model, batches: Batches) -> tuple[list[str], list[str]]:
    """Return greedy outputs for every validation source, and the texts of the targets."""
    outputs: list[str] = []
    references: list[str] = []
    for batch in batches.all():
        assert batch.source is not None
        real = torch.ones_like(batch.source).bool() if batch.source_mask is None else batch.source_mask
        sources = [row[where].tolist() for row, where in zip(batch.source, real)]
        targets = [[token for token in row if token != IGNORE] for row in batch.targets.tolist()]
        room = min(max(map(len, targets)) * 2 + 10, loaded.config.max_positions - 1)
        generations: Any = loaded.generate(sources, max_new_tokens=room, num_beams=1)
        outputs += [output.text or "" for output in generations]
        references += loaded.text_tokenizer.decode_batch(targets)
    return outputs, references


def sampler(
    task: Task, corpus: Corpus, plan: GeneratePlan, count: int, seed: int
) -> Callable[[Model], tuple[str, ...]]:
    """Return a function from a model to what it says of some validation examples, the same each time."""
    validation: Any = corpus.validation
    if isinstance(validation, Images):
        validation = map(Picture, itertools.count(), validation.pixels, validation.labels.tolist())
    rows = list(itertools.islice(validation, count))

    def sample(loaded: Model, place: int) -> str:
        try:
            return task.sample(loaded, rows[place], plan, seed + place)
        except InputError as error:  # no run ends for something that is only shown
            return f"({error})"

    return lambda loaded: tuple(sample(loaded, place) for place in range(len(rows)))
