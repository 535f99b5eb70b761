"""Validation: a model judged on every validation example, from batches alone.

Shapes: B batch, T length, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.batches.batch import IGNORE, Batch
from clearhead.batches.make import Batches
from clearhead.bundle import Model
from clearhead.data.plan import Task
from clearhead.errors import InputError
from clearhead.evaluation.metrics import METRICS, Counts
from clearhead.model.dtypes import wide
from clearhead.model.heads import LanguageHead
from clearhead.model.transformer import Transformer, evaluating
from clearhead.training.losses import arguments_for, default_chunk, span_loss, summed
from clearhead.training.precision import Precision

WRITTEN = ("exact", "bleu", "chrf")  # metrics that need the model's own words


@dataclass(frozen=True)
class Examined:
    """A batch, judged row by row."""

    numbers: NDArray[np.int64]  # B, of the examples
    losses: Counts  # B, each the sum over the row's targets
    counts: Counts  # B, how many targets that are
    said: list[list[int]]  # of each row, for a head without a vocabulary: see `answers`
    meant: list[list[int]]


@torch.no_grad()
def examine(
    model: Transformer, batches: Batches, device: torch.device, precision: Precision | None = None
) -> Iterator[Examined]:
    """Every batch of one epoch, judged."""
    for batch in batches.all():
        batch = batch.to(device)
        arguments = arguments_for(model, batch)
        with evaluating(model), nullcontext() if precision is None else precision.autocast():
            said: list[list[int]] = []
            meant: list[list[int]] = []
            if isinstance(model.head, LanguageHead):
                hidden = model(**arguments, logits="none").hidden  # B T D
                losses = vocabulary_losses(
                    model.head, hidden, batch.targets, default_chunk(model.config.vocab_size, device)
                )
            else:
                logits = model(**arguments).logits
                losses = torch.stack([_loss(logits[row : row + 1], batch, row) for row in range(len(batch))])
                said, meant = answers(logits, batch)
        asked = batch.targets.reshape(len(batch), -1) != IGNORE
        counts = asked[:, 0] if batch.is_span else asked.sum(1)
        numbers = torch.arange(len(batch)) if batch.numbers is None else batch.numbers
        yield Examined(
            numbers.numpy(), losses.cpu().double().numpy(), counts.cpu().double().numpy(), said, meant
        )


@torch.no_grad()
def validate(
    loaded: Model,
    task: Task,
    batches: Batches,
    precision: Precision,
    device: torch.device,
    metric: str = "loss",
) -> dict[str, float]:
    """The mean loss over all targets, what follows from it, and the metrics of the task."""
    total, count = 0.0, 0.0
    predicted: list[list[int]] = []
    wanted: list[list[int]] = []
    for seen in examine(loaded.model, batches, device, precision):
        total, count = total + float(seen.losses.sum()), count + float(seen.counts.sum())
        predicted += seen.said
        wanted += seen.meant
    if not count:
        raise InputError(
            "the validation data asks for nothing, as when every word of it is unknown: validate on more of it, or on other files"
        )
    found = {"loss": total / count}
    if not isinstance(loaded.model.head, LanguageHead):
        return found | judged(task, predicted, wanted, loaded.labels)
    found["perplexity"] = math.exp(min(found["loss"], 700))
    if task == "seq2seq" and metric in WRITTEN:
        with evaluating(loaded.model):
            outputs, references = written(loaded, batches)
        found |= {name: METRICS[name](outputs, references) for name in ("exact", metric)}
    return found


def vocabulary_losses(head: LanguageHead, hidden: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Cross-entropy over the vocabulary, summed over each row: [B, T, D] and targets [B, T] -> [B]; `chunk` positions at a time."""
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    asked = (flat != IGNORE).nonzero()[:, 0]
    found = torch.zeros(
        flat.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device
    )
    for start in range(0, len(asked), chunk):
        some = asked[start : start + chunk]
        found[some] = nnf.cross_entropy(wide(head(rows[some], None)), flat[some], reduction="none")
    return found.view(targets.shape).sum(1)


def _loss(logits: Tensor, batch: Batch, row: int) -> Tensor:
    """Of one row, under a head that has no vocabulary."""
    targets = batch.targets[row : row + 1]
    if batch.is_span:
        return span_loss(logits, targets, None if batch.mask is None else batch.mask[row : row + 1])
    return summed(logits, targets)


def answers(logits: Tensor, batch: Batch) -> tuple[list[list[int]], list[list[int]]]:
    """What a row says and what it should say: one class, a class per word, or the two ends of a span."""
    targets = batch.targets
    if targets.ndim == 1:
        return [[said] for said in logits.argmax(-1).tolist()], [[meant] for meant in targets.tolist()]
    if batch.is_span:
        scores = logits if batch.mask is None else logits.masked_fill(~batch.mask[..., None], -torch.inf)
        return scores.argmax(1).tolist(), targets.tolist()
    asked = targets != IGNORE
    said = logits.argmax(-1)
    return [row[where].tolist() for row, where in zip(said, asked)], [
        row[where].tolist() for row, where in zip(targets, asked)
    ]


def judged(
    task: Task, predicted: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], labels: Sequence[str]
) -> dict[str, float]:
    """The metrics of a task whose answers are classes or places."""
    if task == "answer":
        return {"exact": METRICS["accuracy"](predicted, wanted)}
    flat = [said for row in predicted for said in row], [meant for row in wanted for meant in row]
    found = {"accuracy": METRICS["accuracy"](*flat)}
    if task == "tag":
        named = [[[labels[index] for index in row] for row in rows] for rows in (predicted, wanted)]
        return found | {"span_f1": METRICS["span_f1"](*named)}
    return found | {"macro_f1": METRICS["macro_f1"](*flat)}


def written(loaded: Model, batches: Batches) -> tuple[list[str], list[str]]:
    """Greedy answers to every validation source, and the texts of the targets."""
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
            sources, max_new_tokens=min(longest * 2 + 10, loaded.config.max_positions - 1)
        )
        outputs += [one.text or "" for one in made]
        references += loaded.tokenizer.decode_batch(targets)
    return outputs, references
