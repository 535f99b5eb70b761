"""Multi-label classification: any number of classes for a text, or for a pair of texts, each on its own.

The model is a classifier, as transformers has it under `problem_type: "multi_label_classification"`, and
learns by the cross-entropy of each class. Labels are a list, or a text with | or ; between them. As such rows
could also be single classes, the task is never guessed: ask for it with `data.task=multilabel`.

Shapes: N rows, B batch, C classes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.errors import InputError
from clearhead.learn.batches.batch import Batch
from clearhead.learn.batches.encoding import Encoder
from clearhead.learn.data.examples import Labelled
from clearhead.learn.data.tables import Record, shorten
from clearhead.learn.evaluation.metrics import Counts, Judged, Metric, each, ratio_of
from clearhead.learn.losses import Answered
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.entries.classify import LabelTask
from clearhead.learn.tasks.task import Answers, Scored, sampled
from clearhead.run.api import Model


@dataclass(frozen=True, slots=True)
class Several(Labelled):
    """A text, or two texts that are read together, and its classes, written as one label."""

    PLURAL, NAMED = "sets of labels", "classes"
    classes: tuple[str, ...] = ()

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`. Labels are a list of texts or numbers, or a text with | or ; between them."""
        text, pair = cls._texts(record, roles)
        value = record.value(roles["label"])
        names = re.split(r"[|;]", value) if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
            raise InputError(
                f"{record.place}: the labels in `{roles['label']}` must be a list, or a text with | or ; "
                f"between them, not {shorten(str(value))}"
            )
        classes = tuple(dict.fromkeys(name for name in (str(name).strip() for name in names) if name))
        return cls(text, "|".join(classes), pair, classes) if text else None


def _macro_counts(predicted: Answers, expected: Answers) -> Counts:
    prediction, truth = np.array(predicted, dtype=np.float64), np.array(expected, dtype=np.float64)
    return np.concatenate([prediction * truth, prediction + truth], 1)


def _macro_of(sums: Counts) -> float:
    """Return the mean F1 of the classes that are predicted or wanted at all."""
    hits, both = np.split(sums, 2)
    return float((2 * hits[both > 0] / both[both > 0]).mean()) if (both > 0).any() else 0.0


_hits = each(
    lambda prediction, truth: (sum(a and b for a, b in zip(prediction, truth)), sum(prediction) + sum(truth))
)
# F1 over all decisions, the mean F1 of the classes, and the share of rows with every class right.
MULTILABEL = {
    "micro_f1": Metric(_hits, lambda sums: ratio_of(np.array([2 * sums[0], sums[1]]))),
    "macro_f1": Metric(_macro_counts, _macro_of),
    "exact": Metric(each(lambda prediction, truth: (list(prediction) == list(truth), 1))),
}


class Multilabel(LabelTask):
    """Any number of classes for a text, or for a pair of texts, each on its own."""

    name = "multilabel"
    row = Several
    guessed = False  # such rows could also be single classes
    classes = True
    stated = MappingProxyType({"problem_type": "multi_label_classification"})
    metrics = ("loss", "micro_f1", "macro_f1", "exact")
    metric = "micro_f1"

    def targets(self, rows: Sequence[Several], encoder: Encoder) -> NDArray[Any]:
        """Return 1 for each class of a row, else 0: [N, C]."""
        wanted = np.zeros((len(rows), len(encoder.numbers)), dtype=np.float32)
        for number, row in enumerate(rows):
            for name in row.classes:
                wanted[number, encoder.number(name, "label")] = 1
        return wanted

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the mean over the classes of their cross-entropies, summed over the rows: [B, C] -> []."""
        wanted = batch.targets * (1 - smoothing) + smoothing / 2
        return nnf.binary_cross_entropy_with_logits(wide(outputs), wanted, reduction="none").mean(1).sum()

    def answers(self, outputs: Tensor, batch: Batch) -> Answered:
        """Return whether each class is predicted, and whether it is right."""
        return (outputs > 0).int().tolist(), batch.targets.int().tolist()

    def score(self, predicted: Answers, expected: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """See `MULTILABEL`."""
        return {name: (metric, predicted, expected) for name, metric in MULTILABEL.items()}

    def judge(self, judged: Judged) -> list[str]:
        """See `Task.judge`."""
        super().judge(judged)
        names = judged.loaded.class_names
        return ["|".join(name for name, on in zip(names, row) if on) for row in judged.predicted]

    def sample(self, loaded: Model, row: Labelled, plan: GeneratePlan, seed: int) -> str:
        """Return the classes with a probability above a half."""
        result: Any = loaded.classify(row.input)
        names = "|".join(name for name, value in result.scores.items() if value > 0.5)
        return sampled(row.text, names or "none", row.label or "none")
