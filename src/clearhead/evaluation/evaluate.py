"""`evaluate`: a model judged on every example of some files, each figure with its interval."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from clearhead.batches.bucketed import Answers
from clearhead.batches.encoded import encode_corpus
from clearhead.batches.make import Batches, make_batches
from clearhead.bundle import Model
from clearhead.data.examples import Chunk, Corpus, Images
from clearhead.data.files import RECIPE
from clearhead.data.guess import way_for
from clearhead.data.plan import DataPlan, Task
from clearhead.errors import InputError
from clearhead.evaluation.examples import (
    SeenPictures,
    begun,
    examples,
    key,
    led,
    names_in,
    renamed,
    summed_by,
)
from clearhead.evaluation.figures import Figures
from clearhead.evaluation.metrics import Counts, sacrebleu_metric
from clearhead.tasks import tag_all
from clearhead.tasks.run import fitting
from clearhead.training.data import open_examples
from clearhead.training.plan import GeneratePlan
from clearhead.training.recipe import Settings, read_recipe
from clearhead.training.validate import examine
from clearhead.typed import hints_of

OnProgress = Callable[[str, int, int], None]
# What a run's own recipe says of reading and laying out data, which holds for other files too.
READING = (
    *("task", "format", "columns", "header", "pattern", "texts_only", "lowercase"),
    *("max_length", "packing", "mask_share", "span_length", "stride"),
)
BATCH_TOKENS = 16_384  # of a batch, padding included, where no number of rows is asked for
PICTURES, SOURCES = 64, 32  # pictures, and sources to be answered, at a time
WINDOW = 2048  # tokens of a window over text, of a model that takes more


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on some data."""

    task: Task
    examples: int  # windows of text, sources, sentences, questions, pictures
    targets: int  # tokens, classes or tags that the loss is a mean over
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]  # of 95 %, by resampling the examples
    signatures: dict[str, str]  # sacreBLEU's
    said: tuple[str, ...]  # what was guessed, cut or mapped, a short sentence each
    outputs: tuple[str, ...]  # what the model said of each example, in their order; none for text


def evaluate(
    loaded: Model,
    data: str | Path | Sequence[str | Path] = (),
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

    What is measured follows from the model's head: of text, loss, perplexity and bits per byte; of pairs also exact
    match, edits per token, BLEU and chrF of what the model writes; of classes, tags and answers their shares and F1.
    Rows with the same source, or the same question and context, are one example with several right answers.

    Args:
        loaded: the model.
        data: files, folders, globs, or the name of an embedded corpus; none: the plan's.
        plan: how to read them; None: as the run that made the model read its own, else as they look.
        seed: of resampling, and of the masks of mlm and denoise.
        batch_size: rows at a time; None: by their length.
        tokenize: sacreBLEU's tokenizer for BLEU; None: 13a.
        lowercase: give BLEU without regard to case as well.
        on_progress: told what is being done, and how much of how much is.
        generation: of pairs: options of `translate`, such as num_beams; else the model's own.
    """
    given = [data] if isinstance(data, str | Path) else list(data)
    plan = data_plan(loaded.folder, given) if plan is None else plan
    task = task_for(loaded, plan.task)
    if generation and task != "seq2seq":
        raise InputError(
            f"{next(iter(generation))} is for models that write, and this one is judged by {task}: leave it out"
        )
    if task == "seq2seq":
        _check_tokenize(tokenize)
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size {batch_size} must be 1 or more")
    if seed < 0:
        raise InputError(f"seed {seed} must be 0 or more")
    known = hints_of(GeneratePlan)
    GeneratePlan(
        **{name: value for name, value in generation.items() if name in known and value is not None}
    )  # refuses wrong values
    sizes: dict[str, Any] = {
        "batch_size": batch_size or PICTURES,
        "batch_tokens": None if batch_size else BATCH_TOKENS,
    }
    plan = dataclasses.replace(
        plan, task=task, paths=tuple(map(str, given)) or plan.paths, validation=(), **sizes
    )
    corpus, _ = open_examples(plan, split=False)
    return _Judge(loaded, task, plan, corpus, Figures(seed, notes=list(corpus.said)), on_progress).evaluation(
        tokenize, lowercase, generation
    )


def data_plan(
    folder: Path | None,
    data: Sequence[str | Path] = (),
    recipe: str | Path | None = None,
    settings: Settings = (),
) -> DataPlan:
    """How data is to be read: by a recipe, else by that of the run whose folder this is, else by its looks; settings change it.

    Parallel files are read from the language that those of the recipe are from.
    """
    settings = settings if isinstance(settings, Mapping) else list(settings)
    if recipe is None and folder is not None:
        places = (
            folder / RECIPE,
            folder.resolve().parent.parent / RECIPE,
        )  # of a run, and of one of its checkpoints
        recipe = next((place for place in places if place.is_file()), None)
    stated, asked = read_recipe(recipe, settings).data, read_recipe(None, settings).data
    changes = {name: getattr(stated, name) for name in READING}
    if changes["format"] == "corpus" and asked.format is None:
        changes["format"] = None  # the run learned from an embedded corpus: these are other data
    changes["columns"] = changes["columns"] or way_for(
        [Path(path).expanduser() for path in data], list(map(Path, stated.paths))
    )
    return dataclasses.replace(asked, **changes)


def task_for(loaded: Model, wanted: Task | None) -> Task:
    """What the model can be judged by: its head leaves no choice, but that an encoder-decoder may be to mend text."""
    config = loaded.config
    both, head = config.family == "encoder-decoder", config.head
    fits: dict[str | None, tuple[Task, ...]] = {
        "lm": ("seq2seq", "denoise") if both else ("lm",),
        "mlm": ("mlm",),
        "classifier": ("image",) if config.input == "patches" else ("classify",),
        "tagger": ("tag",),
        "span": ("answer",),
    }
    if head not in fits or (both and head != "lm"):
        raise InputError(
            f"a model of family {config.family} with head {head} cannot be judged on data: {fitting(loaded)}"
        )
    if wanted is not None and wanted not in fits[head]:
        raise InputError(
            f"task {wanted} does not fit a model of family {config.family} with head {head}, which is judged by {' or '.join(fits[head])}"
        )
    kind = loaded.description.theirs.get("problem_type") if loaded.description is not None else None
    if head == "classifier" and (
        config.n_classes < 2 or kind in ("regression", "multi_label_classification")
    ):
        raise InputError(
            "this model gives a number, or several labels at once: only models that choose one of several classes are judged"
        )
    return wanted or fits[head][0]


def _check_tokenize(tokenize: str | None) -> None:
    """Say now what would be wrong after all has been written."""
    if tokenize is None:
        return
    try:
        sacrebleu_metric("BLEU", tokenize=tokenize)(["a"], ["a"])
    except ImportError:
        return  # said later, in place of BLEU
    except Exception as error:
        from sacrebleu.metrics.bleu import BLEU

        known = ", ".join(str(name) for name in BLEU.TOKENIZERS)
        why = f": {str(error).splitlines()[0]}" if tokenize in BLEU.TOKENIZERS else f": choose from {known}"
        raise InputError(f"tokenize {tokenize!r} cannot be used{why}") from None


def judged_batches(
    loaded: Model, task: Task, plan: DataPlan, corpus: Corpus, folder: str, seed: int, said: list[str]
) -> tuple[Batches, int, int]:
    """Every example to validate on once, in one order; how many tokens the text has, and how many of those are unknown.

    `folder` holds the ids while they are read.
    """
    if task == "image":
        return SeenPictures(loaded, cast(Images, corpus.validation), plan.batch_size), 0, 0
    encoded = encode_corpus(
        corpus, "validation", task, loaded.text_tokenizer, names_in(loaded), folder, special=loaded.special
    )
    tokens, length = encoded.n_tokens, min(loaded.max_length, plan.max_length or loaded.max_length)
    if corpus.shape == "text" and plan.max_length is None and length > WINDOW:
        said.append(f"windows of {WINDOW:,} tokens: the model takes {length:,}, and data.max_length chooses")
        length = WINDOW
    if task == "lm" and plan.packing == "stream":
        encoded = led(encoded, "ids", encoded.frame.before)
    encoded, special = begun(encoded, task, loaded)
    batches = make_batches(encoded, task, plan, special=special, length=length, seed=seed, training=False)
    said.extend(batches.said)
    return batches, tokens, encoded.n_unknown


@dataclass
class _Judge:
    """One evaluation."""

    loaded: Model
    task: Task
    plan: DataPlan
    corpus: Corpus
    figures: Figures
    on_progress: OnProgress

    def evaluation(self, tokenize: str | None, lowercase: bool, generation: dict[str, Any]) -> Evaluation:
        """Loss, then what the task is about."""
        figures, outputs = self.figures, []
        if self.task in ("classify", "tag", "image"):
            self.corpus = renamed(self.corpus, self.loaded, self.plan, figures.notes)
        rows: Any = self.corpus.validation
        units, references = examples(rows) if self.task in ("seq2seq", "answer") else ({}, [])
        if self.task == "seq2seq":
            outputs = self._written(list(units), generation)
        with tempfile.TemporaryDirectory() as folder:
            batches, tokens, unknown = self._batches(folder)
            losses, said, meant = self._examined(batches)
        if units:
            of_rows = batches.example if isinstance(batches, Answers) else np.arange(len(losses))
            places = np.array([units[key(row)] for row in rows])
            losses = summed_by(losses, places[of_rows], len(units))
        figures.loss(losses, with_perplexity=self.task in ("lm", "mlm", "denoise", "seq2seq"))
        match self.task:
            case "lm" if unknown:
                figures.notes.append(
                    f"no bits per byte: {unknown:,} of {tokens:,} tokens are unknown, so the text itself was not predicted"
                )
            case "lm":
                sizes = [
                    (len(chunk.text.encode("utf-8", "replace")), len(chunk.text))
                    for chunk in cast(Iterable[Chunk], rows)
                ]
                figures.bits(tokens, *np.sum(sizes, 0).tolist())
            case "seq2seq":
                figures.texts(outputs, references, tokenize, lowercase)
            case "classify" | "image":
                figures.classes(said, meant)
                outputs = [self._labels[place] for place in said]
            case "tag":
                tags = [
                    [word.label for word in one.words]
                    for one in tag_all(self.loaded, [row.words for row in rows])
                ]
                figures.tags(tags, [row.tags for row in rows])
                outputs = [" ".join(row) for row in tags]
            case "answer":
                outputs = self._answers(list(units), references)
                figures.spans(outputs, references)
        targets = int(losses[:, 1].sum())
        shown = (figures.metrics, figures.intervals, figures.signatures)
        return Evaluation(self.task, len(losses), targets, *shown, tuple(figures.notes), tuple(outputs))

    @property
    def _labels(self) -> tuple[str, ...]:
        return names_in(self.loaded)

    def _examined(self, batches: Batches) -> tuple[Counts, list[int], list[int]]:
        """Loss and targets of every row in the order of the data; of a classifier, what it said and what was meant."""
        device = next(self.loaded.model.parameters()).device
        seen = []
        for done, part in enumerate(examine(self.loaded.model, batches, device), start=1):
            seen.append(part)
            self.on_progress("reading", done, batches.per_epoch)
        order = np.argsort(np.concatenate([part.numbers for part in seen]), kind="stable")
        losses = np.stack(
            [np.concatenate([getattr(part, name) for part in seen]) for name in ("losses", "counts")], 1
        )[order]
        if self.task not in ("classify", "image"):
            return losses, [], []
        said, meant = (
            np.concatenate([getattr(part, name) for part in seen])[order, 0].tolist()
            for name in ("said", "meant")
        )
        return losses, said, meant

    def _batches(self, folder: str) -> tuple[Batches, int, int]:
        """See `judged_batches`."""
        return judged_batches(
            self.loaded, self.task, self.plan, self.corpus, folder, self.figures.seed, self.figures.notes
        )

    # What a model writes ----------------------------------------------------------------------------------------------

    def _written(self, sources: Sequence[tuple[str, ...]], options: dict[str, Any]) -> list[str]:
        """What the model makes of each source; those of like length are read together."""
        loaded, made = self.loaded, [""] * len(sources)
        ids = loaded.encode([source for (source,) in sources], self.loaded.max_length)
        if options.get("max_new_tokens") is None:
            stated, room = loaded.generation, loaded.config.max_positions - len(loaded._start())
            limit = stated.get("max_new_tokens") or stated.get("max_length", 257) - 1
            options = {**options, "max_new_tokens": max(1, min(limit, room))}
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        size = self.plan.batch_size if self.plan.batch_tokens is None else SOURCES
        for start in range(0, len(order), size):
            some = order[start : start + size]
            given: Any = [ids[place] for place in some]
            for place, one in zip(some, loaded.translate(given, **options)):
                made[place] = one.text or ""
            self.on_progress("writing", min(start + size, len(order)), len(order))
        return made

    def _answers(self, asked: Sequence[tuple[str, ...]], references: Sequence[Sequence[str]]) -> list[str]:
        """What the model finds for each question; it may find nothing where that is right for some."""
        questions, contexts = zip(*asked)
        none = any("" in given for given in references)
        found: Any = self.loaded.answer(list(questions), list(contexts), none=none)
        return [one.text for one in found]
