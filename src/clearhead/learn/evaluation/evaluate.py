"""`evaluate`: judge a model on every example of some files, each figure with its confidence interval."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clearhead.core.config.typed import hints_of
from clearhead.errors import InputError, refuse
from clearhead.hub.tokenizer import truncation_side
from clearhead.learn.batches.batch import Batches
from clearhead.learn.data import files, formats
from clearhead.learn.data.examples import TEXT, Corpus
from clearhead.learn.data.given import Given, given_or_paths
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.evaluation.examples import begun, examine, examples, led, renamed
from clearhead.learn.evaluation.metrics import (
    ClassCounts,
    Counts,
    Judged,
    OnProgress,
    perplexity,
    sacrebleu_metric,
)
from clearhead.learn.recipe import GeneratePlan, Settings, read_recipe
from clearhead.learn.tasks import reading, table
from clearhead.learn.tasks.chat import chat_template
from clearhead.learn.tasks.table import open_examples
from clearhead.learn.tasks.task import Task
from clearhead.run.api import Model

# What a run's own recipe says of reading and laying out data, which holds for other files too.
READING = (
    *("task", "format", "columns", "header", "encoding", "pattern", "texts_only", "lowercase"),
    *("max_length", "packing", "mask_share", "span_length", "stride"),
)
BATCH_TOKENS = 16_384  # of a batch, padding included, where no number of rows is asked for
PICTURES = 64  # at a time
WINDOW = 2048  # tokens of a window over text, of a model that takes more


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
    outputs: tuple[str, ...]  # what the model said of each example, in their order; none for text
    classes: ClassCounts | None = None  # of a classifier: figures of each class, and the confusion matrix


def evaluate(
    loaded: Model,
    data: Any = (),
    plan: DataPlan | None = None,
    *,
    seed: int = 0,
    batch_size: int | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
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
        on_progress: told what is being done, and how much of how much is.
        generation: of pairs: options of `translate`, such as num_beams; else the model's own.
    """
    given = given_or_paths(data)
    if isinstance(given, Given):
        plan = replace(data_plan(loaded.folder) if plan is None else plan, format=None, pattern=None)
        rows = given if given.validation is None else replace(given, paths=given.validation, validation=None)
        with tempfile.TemporaryDirectory() as folder:
            found = evaluate(
                loaded, rows.write(Path(folder))["paths"], plan, seed=seed, batch_size=batch_size,
                tokenize=tokenize, lowercase=lowercase, on_progress=on_progress, **generation,
            )  # fmt: skip
        return replace(found, notes=(*given.notes, *found.notes))
    plan = data_plan(loaded.folder, given) if plan is None else plan
    task = table.task_named(task_for(loaded, plan.task))
    refuse(
        generation and not task.writes,
        f"{next(iter(generation), '')} is for models that write, and this one is judged by {task.name}: "
        "leave it out",
    )
    if task.writes:
        _check_tokenize(tokenize)
    refuse(batch_size is not None and batch_size < 1, f"batch_size {batch_size} must be 1 or more")
    refuse(seed < 0, f"seed {seed} must be 0 or more")
    known = generation.keys() & hints_of(GeneratePlan)
    GeneratePlan(**{name: generation[name] for name in known if generation[name] is not None})  # or refuses
    plan = replace(
        plan,
        task=task.name,
        paths=tuple(map(str, given)) or plan.paths,
        validation=(),
        batch_size=batch_size or PICTURES,
        batch_tokens=None if batch_size else BATCH_TOKENS,
    )
    corpus, _ = open_examples(plan, split=False)
    notes = [*corpus.notes, *task.remarks(corpus)]
    if task.classes:
        corpus = renamed(corpus, loaded, plan, notes)
    judged = Judged(
        seed, notes=notes, loaded=loaded, plan=plan, rows=corpus.validation, tokenize=tokenize,
        lowercase=lowercase, generation=generation, on_progress=on_progress,
    )  # fmt: skip
    return _evaluation(judged, task, corpus)


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
    stated, asked = read_recipe(recipe, settings).data, read_recipe(None, settings).data
    changes = {name: getattr(stated, name) for name in READING}
    if changes["format"] == "corpus" and asked.format is None:
        changes["format"] = None  # the run learned from an embedded corpus: this is other data
    changes["columns"] = changes["columns"] or formats.way_for(
        [Path(path).expanduser() for path in data], list(map(Path, stated.paths))
    )
    return replace(asked, **changes)


def run_recipe(folder: Path | None) -> Path | None:
    """Return the recipe of the run in this folder, or of the run that a checkpoint is of, if any."""
    places = () if folder is None else (folder / files.RECIPE, folder.resolve().parent.parent / files.RECIPE)
    return next((place for place in places if place.is_file()), None)


def task_for(loaded: Model, wanted: str | None) -> str:
    """Return the task that a model is judged by: its head decides; an encoder-decoder may also mend text."""
    table.shape_of(wanted)  # refuses a task that does not exist
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
    prepared = spec.judged_batches(loaded, corpus, plan)
    if prepared is not None:
        return prepared, 0, 0
    rows = spec.encode_corpus(
        corpus,
        "validation",
        loaded.text_tokenizer,
        loaded.class_names,
        folder,
        special=loaded.special,
        template=chat_template(loaded) if spec.chats else None,
    )
    tokens, length = rows.n_tokens, min(loaded.max_length, plan.max_length or loaded.max_length)
    if spec.shape is TEXT and plan.max_length is None and length > WINDOW:
        notes.append(f"windows of {WINDOW:,} tokens: the model takes {length:,}, and data.max_length chooses")
        length = WINDOW
    if spec.one_shape and plan.packing == "stream":
        rows = led(rows, "ids", rows.frame.special[0])
    rows, special = begun(rows, loaded)
    cut_left = truncation_side(loaded.settings) == "left"
    batches = spec.make_batches(
        rows, plan, special=special, length=length, seed=seed, training=False, cut_left=cut_left
    )
    notes.extend(batches.notes)
    return batches, tokens, rows.n_unknown


def _evaluation(judged: Judged, task: Task, corpus: Corpus) -> Evaluation:
    """Measure the loss, then what the task is about."""
    loaded, rows = judged.loaded, judged.rows
    questions: dict[tuple[str, ...], int] = {}
    if task.shape.row is not None and task.shape.row.ASKED:
        questions, judged.references = examples(rows)
        judged.asked = list(questions)
    with tempfile.TemporaryDirectory() as folder:
        batches, judged.tokens, judged.unknown = judged_batches(
            loaded, task.name, judged.plan, corpus, folder, judged.seed, judged.notes
        )
        losses = _examined(judged, task, batches)
    if questions:
        example = np.arange(len(losses)) if batches.example is None else batches.example
        asked = np.array([questions[row.asked()] for row in rows])[example]  # the example of each row
        losses = np.stack([np.bincount(asked, column, len(questions)) for column in losses.T], 1)
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


def _examined(judged: Judged, task: Task, batches: Batches) -> Counts:
    """Return loss and number of targets of every row in the order of the data.

    What the model said of each row is kept in `judged`.
    """
    model, seen = judged.loaded.engine.reader(), []
    device = next(model.parameters()).device
    for done, part in enumerate(examine(model, batches, device, task), start=1):
        seen.append(part)
        judged.on_progress("reading", done, batches.per_epoch)
    order = np.argsort(np.concatenate([part.numbers for part in seen]), kind="stable")
    said, meant = ([row for part in seen for row in getattr(part, name)] for name in ("said", "meant"))
    if said:
        judged.said, judged.meant = ([rows[number] for number in order] for rows in (said, meant))
    return np.concatenate([np.stack([part.losses, part.counts], 1) for part in seen])[order]
