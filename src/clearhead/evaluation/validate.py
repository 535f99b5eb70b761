"""Validation: judge a model on every validation example, from batches alone, and show what it says of a few.

Shapes: B batch, T length, C classes.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead import losses
from clearhead.api import Model
from clearhead.batches.batch import IGNORE, Batches
from clearhead.data.examples import Corpus, Images
from clearhead.errors import InputError, refuse
from clearhead.evaluation.metrics import METRICS, Counts
from clearhead.model.dtypes import wide
from clearhead.model.heads import LanguageHead
from clearhead.model.transformer import Transformer, evaluating
from clearhead.recipe import GeneratePlan
from clearhead.tasks.spec import TaskSpec

WRITTEN = ("exact", "bleu", "chrf")  # metrics that need text the model generates
Autocast = Callable[[], AbstractContextManager[object]]  # makes the context in which a loss is computed


@dataclass(frozen=True)
class Examined:
    """A batch, judged row by row."""

    numbers: NDArray[np.int64]  # B, of the examples
    losses: Counts  # B, each the sum over the row's targets
    counts: Counts  # B, how many targets that are
    said: list[list[Any]]  # of each row, for a head without a vocabulary: see `Objective.answers`
    meant: list[list[Any]]


@torch.no_grad()
def examine(
    model: Transformer,
    batches: Batches,
    device: torch.device,
    autocast: Autocast = nullcontext,
    objective: losses.Objective | None = None,
) -> Iterator[Examined]:
    """Judge every batch of one epoch; `objective` None: the usual one of the head."""
    for batch in batches.all():
        batch = batch.to(device)
        arguments = losses.arguments_for(model, batch)
        answers: losses.Answered = ([], [])
        with evaluating(model), autocast():
            if isinstance(model.head, LanguageHead):
                hidden = model(**arguments, logits="none").hidden  # B T D
                chunk = losses.default_chunk(model.config.vocab_size, device)
                found = vocabulary_losses(model.head, hidden, batch.targets, chunk)
            else:
                own = objective or losses.objective_of(model.config.head)
                logits = model(**arguments).logits
                rows = [slice(row, row + 1) for row in range(len(batch))]
                found = torch.stack([own.loss(logits[row], batch.rows(row), 0.0) for row in rows])
                answers = own.answers(logits, batch)
        single = batch.is_span or batch.targets.is_floating_point()
        asked = (batch.targets.reshape(len(batch), -1) != IGNORE).sum(1)
        counts = torch.ones(len(batch)) if single else asked
        numbers = torch.arange(len(batch)) if batch.numbers is None else batch.numbers
        sums, of_rows = (values.cpu().double().numpy() for values in (found, counts))
        yield Examined(numbers.numpy(), sums, of_rows, *answers)


@torch.no_grad()
def validate(
    loaded: Model,
    task: TaskSpec,
    batches: Batches,
    autocast: Autocast,
    device: torch.device,
    metric: str = "loss",
) -> dict[str, float]:
    """Return the mean loss over all targets, perplexity for a vocabulary, and the metrics of the task."""
    seen = list(examine(loaded.model, batches, device, autocast, task.objective))
    count = sum(float(part.counts.sum()) for part in seen)
    refuse(
        not count,
        "the validation data has no targets: every token is unknown to the tokenizer; "
        "validate on more of it, or on other files",
    )
    found = {"loss": sum(float(part.losses.sum()) for part in seen) / count}
    if not isinstance(loaded.model.head, LanguageHead):
        predicted, wanted = (
            [row for part in seen for row in getattr(part, side)] for side in ("said", "meant")
        )
        return found | task.scores(predicted, wanted, loaded.labels)
    found["perplexity"] = math.exp(min(found["loss"], 700))
    if task.writes and metric in WRITTEN:
        with evaluating(loaded.model):
            outputs, references = written(loaded, batches)
        found |= {name: METRICS[name](outputs, references) for name in ("exact", metric)}
    return found


def vocabulary_losses(head: LanguageHead, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the cross-entropy of each row: states [B, T, D], targets [B, T] -> [B], by `chunk` positions."""
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    asked = (flat != IGNORE).nonzero()[:, 0]
    found = torch.zeros(
        flat.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device
    )
    for start in range(0, len(asked), chunk):
        some = asked[start : start + chunk]
        found[some] = nnf.cross_entropy(wide(head(rows[some], None)), flat[some], reduction="none")
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
        made: Any = loaded.generate(sources, max_new_tokens=room)
        outputs += [one.text or "" for one in made]
        references += loaded.text_tokenizer.decode_batch(targets)
    return outputs, references


def sampler(
    task: TaskSpec, corpus: Corpus, plan: GeneratePlan, count: int, seed: int
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
