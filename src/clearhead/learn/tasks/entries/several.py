"""Multi-label classification: any number of classes for a text, or for a pair of texts, each on its own.

The model is a classifier, as transformers has it under `problem_type: "multi_label_classification"`, and
learns by the cross-entropy of each class. Labels are a list, or a text with | or ; between them. As such rows
could also be single classes, the task is never guessed: ask for it with `data.task=multilabel`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.errors import InputError
from clearhead.hub.tokens.training import READER
from clearhead.learn.batches.batch import Batch
from clearhead.learn.batches.batching import Batching
from clearhead.learn.batches.bucketed import LabelBatches
from clearhead.learn.batches.encoding import Columns, Encoder, characters, encode_texts, groups
from clearhead.learn.data.examples import LABELS, Labelled
from clearhead.learn.data.tables import Record, shorten
from clearhead.learn.evaluation.judgement import Judgement
from clearhead.learn.evaluation.metrics import Counts, Metric, each, ratio_of
from clearhead.learn.losses import Answered, Objective
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.spec import ENCODER, Answers, TaskSpec, sampled
from clearhead.run.api import Model

STATED = {"problem_type": "multi_label_classification"}


@dataclass(frozen=True, slots=True)
class Several(Labelled):
    """A text, or two texts that are read together, and its classes, written as one label."""

    NAMED = "classes"
    classes: tuple[str, ...] = ()

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`. Labels are a list of texts or numbers, or a text with | or ; between them."""
        text = record.text(roles["text"]).strip()
        pair = record.text(roles["pair"]).strip() if "pair" in roles else None
        value = record.value(roles["label"])
        found = re.split(r"[|;]", value) if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(one, str | int) for one in found):
            raise InputError(
                f"{record.place}: the labels in `{roles['label']}` must be a list, or a text with | or ; "
                f"between them, not {shorten(str(value))}"
            )
        classes = tuple(dict.fromkeys(name for name in (str(one).strip() for one in found) if name))
        return cls(text, "|".join(classes), pair, classes) if text else None


def _encode(rows: Iterable[Several], encoder: Encoder) -> Iterator[Columns]:
    for group in groups(rows, characters):
        wanted = np.zeros((len(group), len(encoder.numbers)), dtype=np.float32)
        for place, row in enumerate(group):
            for name in row.classes:
                wanted[place, encoder.number(name, "label")] = 1
        yield {**encode_texts(group, encoder), "labels": wanted}


def _loss(logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the mean over the classes of their cross-entropies, summed over the rows: [B, C] -> []."""
    wanted = batch.targets * (1 - smoothing) + smoothing / 2
    return nnf.binary_cross_entropy_with_logits(wide(logits), wanted, reduction="none").mean(1).sum()


def _chosen(logits: Tensor, batch: Batch) -> Answered:
    return (logits > 0).int().tolist(), batch.targets.int().tolist()


def _macro_counts(said: Answers, meant: Answers) -> Counts:
    guess, truth = np.array(said, dtype=np.float64), np.array(meant, dtype=np.float64)
    return np.concatenate([guess * truth, guess + truth], 1)


def _macro_of(sums: Counts) -> float:
    """Return the mean F1 of the classes that are predicted or wanted at all."""
    hits, both = np.split(sums, 2)
    return float((2 * hits[both > 0] / both[both > 0]).mean()) if (both > 0).any() else 0.0


_hits = each(lambda guess, truth: (sum(a and b for a, b in zip(guess, truth)), sum(guess) + sum(truth)))
FIGURES = {
    "micro_f1": Metric(_hits, lambda sums: ratio_of(np.array([2 * sums[0], sums[1]]))),
    "macro_f1": Metric(_macro_counts, _macro_of),
    "exact": Metric(each(lambda guess, truth: (list(guess) == list(truth), 1))),
}


def _scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    return {name: metric(predicted, wanted) for name, metric in FIGURES.items()}


def _figures(judgement: Judgement) -> list[str]:
    """Add F1 over all decisions, the mean F1 of the classes, and the share of rows with every class right."""
    for name, metric in FIGURES.items():
        judgement.figures.add(name, judgement.said, judgement.meant, metric)
    names = judgement.loaded.class_names
    return ["|".join(name for name, on in zip(names, row) if on) for row in judgement.said]


def _seen(loaded: Model, row: Several, plan: GeneratePlan, seed: int) -> str:
    made: Any = loaded.classify(row.text if row.pair is None else (row.text, row.pair))
    found = "|".join(name for name, value in made.scores.items() if value > 0.5)
    return sampled(row.text, found or "none", row.label or "none")


TASKS = (
    TaskSpec(
        name="multilabel",
        batching=Batching(
            "multilabel", replace(LABELS, name="sets of labels", row=Several), _encode, LabelBatches
        ),
        tokens=READER,
        guessed=False,
        head="classifier",
        usual=ENCODER,
        families=("decoder",),
        classes=True,
        stated=STATED,
        objective=Objective(_loss, _chosen),
        metrics=("loss", "micro_f1", "macro_f1", "exact"),
        metric="micro_f1",
        scores=_scores,
        pretrain=True,
        command="classify {folder} TEXT",
        sample=_seen,
        figures=_figures,
    ),
)
