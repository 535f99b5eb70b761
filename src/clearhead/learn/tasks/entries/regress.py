"""Regression: one number for a text, or for a pair of texts.

The model is a classifier with one output, as transformers has it under `problem_type: "regression"`. It
learns by squared error. Data are rows of text and label whose label is a number; as the same rows could be
classes, the task is never guessed: ask for it with `data.task=regress`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.errors import InputError, refuse
from clearhead.learn.batches.batch import Batch
from clearhead.learn.batches.encoding import Encoder
from clearhead.learn.data.examples import LABELS, Labelled
from clearhead.learn.data.tables import Record
from clearhead.learn.evaluation.metrics import METRICS, Judged
from clearhead.learn.losses import Answered
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.entries.classify import LabelTask
from clearhead.learn.tasks.task import Answers, Scored, sampled
from clearhead.run.api import Model

STATED = {"problem_type": "regression"}


def predict(
    loaded: Model, texts: str | tuple[str, str] | Sequence[Any], batch_size: int = 32
) -> float | list[float]:
    """Return the number that a model gives to a text or a pair of texts; a list gives a list."""
    theirs = loaded.description.theirs if loaded.description is not None else {}
    refuse(
        loaded.config.n_classes != 1 or not STATED.items() <= theirs.items(),
        "predict needs a model that gives a number, with one output and problem_type regression in "
        "config.json: train one with --set data.task=regress",
    )
    inputs: Any = texts
    made: Any = loaded.classify(inputs, batch_size=batch_size)
    return [float(row.probability) for row in made] if isinstance(made, list) else float(made.probability)


@dataclass(frozen=True, slots=True)
class Rated(Labelled):
    """A text, or two texts that are read together, and a number written as its label."""

    NAMED = ""  # a number is not the name of a class

    @classmethod
    def read(cls, record: Record, roles: Mapping[str, str]) -> Self | None:
        """See `Example.read`."""
        row, column = Labelled.read(record, roles), roles["label"]
        if row is None:
            return None
        try:
            finite = math.isfinite(float(row.label))
        except ValueError:
            finite = False
        if not finite:
            raise InputError(f"{record.place}: the label in `{column}` must be a number, not {row.label:.40}")
        return cls(row.text, row.label, row.pair)


class Regress(LabelTask):
    """A number for a text or a pair of texts."""

    name = "regress"
    shape = replace(LABELS, name="numbers", row=Rated)
    guessed = False  # rows of text and number could also be classes
    outputs = 1
    stated = STATED  # in config.json, so that transformers knows it too
    metrics = ("loss", "pearson", "spearman")
    command = "predict {folder} TEXT"

    def targets(self, rows: Sequence[Rated], encoder: Encoder) -> NDArray[Any]:
        """Return the number of each row."""
        return np.array([float(row.label) for row in rows], dtype=np.float32)

    def loss(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the summed squared error: [B, 1] -> []."""
        return (wide(outputs)[:, 0] - batch.targets).square().sum()

    def answers(self, outputs: Tensor, batch: Batch) -> Answered:
        """Return the number of each row, and the right one."""
        return outputs[:, :1].tolist(), batch.targets[:, None].tolist()

    def score(self, said: Answers, meant: Answers, labels: Sequence[str]) -> dict[str, Scored]:
        """Measure Pearson's and Spearman's correlation."""
        return {name: (METRICS[name], said, meant) for name in ("pearson", "spearman")}

    def judge(self, judged: Judged) -> list[str]:
        """Add also the mean squared error."""
        judged.derive("mse", "loss", float)
        super().judge(judged)
        return [f"{number:.6g}" for (number,) in judged.said]

    def sample(self, loaded: Model, row: Rated, plan: GeneratePlan, seed: int) -> str:
        """Return the predicted number."""
        number = predict(loaded, row.text if row.pair is None else (row.text, row.pair))
        return sampled(row.text, f"{number:.4g}", row.label)
