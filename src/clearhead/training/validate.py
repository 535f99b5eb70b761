"""Validation: judge a model on every validation example, from batches alone.

Shapes: B batch, T length, C classes.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.api import Model
from clearhead.batches.batch import IGNORE, Batches
from clearhead.errors import refuse
from clearhead.evaluation.metrics import METRICS, Counts
from clearhead.model.dtypes import wide
from clearhead.model.heads import LanguageHead
from clearhead.model.transformer import Transformer, evaluating
from clearhead.tasks.spec import TaskSpec
from clearhead.training.losses import Objective, arguments_for, default_chunk, objective_of
from clearhead.training.precision import Precision

WRITTEN = ("exact", "bleu", "chrf")  # metrics that need text the model generates


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
    precision: Precision | None = None,
    objective: Objective | None = None,
) -> Iterator[Examined]:
    """Judge every batch of one epoch; `objective` None: the usual one of the head."""
    for batch in batches.all():
        batch = batch.to(device)
        arguments = arguments_for(model, batch)
        said: list[list[Any]] = []
        meant: list[list[Any]] = []
        with evaluating(model), nullcontext() if precision is None else precision.autocast():
            if isinstance(model.head, LanguageHead):
                hidden = model(**arguments, logits="none").hidden  # B T D
                chunk = default_chunk(model.config.vocab_size, device)
                losses = vocabulary_losses(model.head, hidden, batch.targets, chunk)
            else:
                own = objective or objective_of(model.config.head)
                logits = model(**arguments).logits
                rows = [slice(row, row + 1) for row in range(len(batch))]
                losses = torch.stack([own.loss(logits[row], batch.rows(row), 0.0) for row in rows])
                said, meant = own.answers(logits, batch)
        single = batch.is_span or batch.targets.is_floating_point()
        counts = (batch.targets.reshape(len(batch), -1) != IGNORE).sum(1)
        counts = torch.ones(len(batch)) if single else counts
        numbers = torch.arange(len(batch)) if batch.numbers is None else batch.numbers
        found, of_rows = (values.cpu().double().numpy() for values in (losses, counts))
        yield Examined(numbers.numpy(), found, of_rows, said, meant)


@torch.no_grad()
def validate(
    loaded: Model,
    task: TaskSpec,
    batches: Batches,
    precision: Precision,
    device: torch.device,
    metric: str = "loss",
) -> dict[str, float]:
    """Return the mean loss over all targets, perplexity for a vocabulary, and the metrics of the task."""
    total, count = 0.0, 0.0
    predicted: list[list[Any]] = []
    wanted: list[list[Any]] = []
    for seen in examine(loaded.model, batches, device, precision, task.objective):
        total, count = total + float(seen.losses.sum()), count + float(seen.counts.sum())
        predicted += seen.said
        wanted += seen.meant
    refuse(
        not count,
        "the validation data has no targets: every token is unknown to the tokenizer; "
        "validate on more of it, or on other files",
    )
    found = {"loss": total / count}
    if not isinstance(loaded.model.head, LanguageHead):
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
    assert loaded.tokenizer is not None
    outputs: list[str] = []
    references: list[str] = []
    for batch in batches.all():
        assert batch.source is not None
        real = (
            torch.ones_like(batch.source, dtype=torch.bool)
            if batch.source_mask is None
            else batch.source_mask
        )
        sources = [row[where].tolist() for row, where in zip(batch.source, real)]
        targets = [[token for token in row if token != IGNORE] for row in batch.targets.tolist()]
        longest = max(map(len, targets))
        made: Any = loaded.generate(
            sources, max_new_tokens=min(longest * 2 + 10, loaded.config.max_positions - 1), num_beams=1
        )
        outputs += [one.text or "" for one in made]
        references += loaded.tokenizer.decode_batch(targets)
    return outputs, references
