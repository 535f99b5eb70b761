"""Examples as a model knows them, and what it says of them: the ground of validation and evaluation.

Shapes: B batch, T length, D model.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core import dtypes, heads, transformer
from clearhead.errors import InputError, nearest, refuse
from clearhead.learn import losses
from clearhead.learn.batches.batch import IGNORE, Batches
from clearhead.learn.batches.encoding import Encoded
from clearhead.learn.data.corpus import place_of
from clearhead.learn.data.examples import TAGS, Corpus, Example, Images
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.data.tables import counted, listed
from clearhead.learn.evaluation.metrics import METRICS, Counts
from clearhead.learn.parallel.plan import TOKENS
from clearhead.learn.parallel.world import ALONE, World
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.table import shape_of
from clearhead.learn.tasks.task import Task
from clearhead.run.api import Model

LABEL = re.compile(r"LABEL_\d+")
WRITTEN = ("exact", "bleu", "chrf")  # metrics that need text the model generates
Autocast = Callable[[], AbstractContextManager[object]]  # makes the context in which a loss is computed


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


def begun(encoded: Encoded, loaded: Model) -> tuple[Encoded, dict[str, int]]:
    """Return rows and special ids so that a decoder begins in training as in generation.

    `bos` is its first input.
    """
    if loaded.config.family != "encoder-decoder":
        return encoded, loaded.special
    start, *forced = loaded.start_ids
    if "target" in encoded.arrays:
        encoded = led(encoded, "target", forced or encoded.frame.special[0])
    return encoded, {**loaded.special, "bos": start}


def examples(rows: Sequence[Example]) -> tuple[dict[tuple[str, ...], int], list[list[str]]]:
    """Return the distinct questions with their places, and all right answers to each."""
    references: dict[tuple[str, ...], dict[str, None]] = {}
    for row in rows:
        references.setdefault(row.asked(), {})[row.answered()] = None
    places = {question: place for place, question in enumerate(references)}
    return places, [list(answers) for answers in references.values()]


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
    tagged = corpus.shape == TAGS.name and any(name in theirs for name in corpus.labels if name != "O")
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
        place = place_of(plan, shape_of(plan.task), unknown)
        shown = ", ".join(labels[:12]) + (" and more" if len(labels) > 12 else "")
        raise InputError(
            f"{place}{': ' if place else ''}the {'tag' if corpus.shape == TAGS.name else 'label'} "
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
    said: list[list[Any]]  # of each row, for a head without a vocabulary: see `Task.answers`
    meant: list[list[Any]]


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
        with transformer.evaluating(model), autocast():
            if not world.last:  # the last stage judges
                model(**arguments, logits="none")
                found = torch.zeros(len(batch))
            elif task.reads == "vocabulary":
                hidden = model(**arguments, logits="none").hidden  # B T D
                assert isinstance(model.head, heads.LanguageHead)
                chunk = losses.default_chunk(model.config.vocab_size, device)
                found = vocabulary_losses(model.head, hidden, batch.targets, chunk)
            else:
                outputs = task.outputs_of(model, batch)
                found, answers = task.row_losses(outputs, batch), task.answers(outputs, batch)
        counts = (batch.targets.reshape(len(batch), -1) != IGNORE).sum(1)
        if batch.one_each:
            counts = torch.ones(len(batch))
        numbers = torch.arange(len(batch)) if batch.numbers is None else batch.numbers
        sums, of_rows = (values.cpu().double().numpy() for values in (found, counts))
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
    found = {"loss": sum(float(part.losses.sum()) for part in seen) / count}
    if task.reads != "vocabulary":
        said, meant = ([row for part in seen for row in getattr(part, side)] for side in ("said", "meant"))
        scores = task.score(said, meant, loaded.labels)
        found |= {name: metric(predicted, wanted) for name, (metric, predicted, wanted) in scores.items()}
        return found, task.missing(said, meant, loaded.labels)
    return found | {"perplexity": math.exp(min(found["loss"], 700))}, ""


@torch.no_grad()
def written_scores(loaded: Model, task: Task, batches: Batches, metric: str) -> dict[str, float]:
    """Return the scores of what a model writes, where `metric` is one of these."""
    if not (task.writes and metric in WRITTEN):
        return {}
    with transformer.evaluating(loaded.model):
        outputs, references = written(loaded, batches)
    return {name: METRICS[name](outputs, references) for name in ("exact", metric)}


def vocabulary_losses(head: heads.LanguageHead, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the cross-entropy of each row: states [B, T, D], targets [B, T] -> [B], by `chunk` positions."""
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    asked = (flat != IGNORE).nonzero()[:, 0]
    found = torch.zeros(
        flat.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device
    )
    for start in range(0, len(asked), chunk):
        some = asked[start : start + chunk]
        found[some] = nnf.cross_entropy(dtypes.wide(head(rows[some], None)), flat[some], reduction="none")
    return found.view(targets.shape).sum(1)


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
        made: Any = loaded.generate(sources, max_new_tokens=room, num_beams=1)
        outputs += [one.text or "" for one in made]
        references += loaded.text_tokenizer.decode_batch(targets)
    return outputs, references


def sampler(
    task: Task, corpus: Corpus, plan: GeneratePlan, count: int, seed: int
) -> Callable[[Model], tuple[str, ...]]:
    """Return a function from a model to what it says of some validation examples, the same each time."""
    given: Any = corpus.validation
    if isinstance(given, Images):
        given = zip(itertools.count(), given.pixels, given.labels.tolist())
    rows = list(itertools.islice(given, count))

    def sample(loaded: Model, place: int) -> str:
        try:
            return task.sample(loaded, rows[place], plan, seed + place)
        except InputError as error:  # no run ends for something that is only shown
            return f"({error})"

    return lambda loaded: tuple(sample(loaded, place) for place in range(len(rows)))
