"""Regression: one number for a text, or for a pair of texts.

The model is a classifier with one output, as transformers has it under `problem_type: "regression"`. It
learns by squared error. Data are rows of text and label whose label is a number; as the same rows could be
classes, the task is never guessed: ask for it with `data.task=regress`.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.training import READER
from clearhead.learn.batches.batch import Batch
from clearhead.learn.batches.batching import Batching
from clearhead.learn.batches.bucketed import LabelBatches
from clearhead.learn.batches.encoding import Columns, Encoder, characters, encode_texts, groups
from clearhead.learn.data.examples import LABELS, Labelled
from clearhead.learn.data.tables import Record
from clearhead.learn.evaluation.judgement import Judgement
from clearhead.learn.evaluation.metrics import Counts, Metric
from clearhead.learn.losses import Answered, Objective
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.spec import ENCODER, Answers, TaskSpec, sampled
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
    given: Any = texts
    made: Any = loaded.classify(given, batch_size=batch_size)
    return [float(one.probability) for one in made] if isinstance(made, list) else float(made.probability)


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


def _encode(rows: Iterable[Rated], encoder: Encoder) -> Iterator[Columns]:
    for group in groups(rows, characters):
        numbers = np.array([float(row.label) for row in group], dtype=np.float32)
        yield {**encode_texts(group, encoder), "labels": numbers}


def _squared_error(logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    return (wide(logits)[:, 0] - batch.targets).square().sum()


def _numbers(logits: Tensor, batch: Batch) -> Answered:
    return logits[:, :1].tolist(), batch.targets[:, None].tolist()


def _predicted(loaded: Model, row: Rated, plan: GeneratePlan, seed: int) -> str:
    number = predict(loaded, row.text if row.pair is None else (row.text, row.pair))
    return sampled(row.text, f"{number:.4g}", row.label)


def _moments(predicted: Answers, wanted: Answers, ranked: bool = False) -> Counts:
    """Return of each example what a correlation is made of: 1, x, y, x², y², x · y, of numbers or ranks."""
    pairs = np.array([predicted, wanted], dtype=np.float64)[..., 0]  # 2 N
    x, y = (_ranks(side) if ranked else side for side in pairs)
    return np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], 1)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value, centred; equal values share their mean rank."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[which] - (len(values) - 1) / 2


def _correlation(sums: Counts) -> float:
    """Return Pearson's correlation from summed moments; 0 where a side does not vary."""
    n, x, y, xx, yy, xy = sums
    spread = max(n * xx - x * x, 0.0) * max(n * yy - y * y, 0.0)
    return float((n * xy - x * y) / math.sqrt(spread)) if spread > 0 else 0.0


CORRELATIONS = {
    "pearson": Metric(_moments, _correlation, bounds=(-1.0, 1.0)),
    "spearman": Metric(functools.partial(_moments, ranked=True), _correlation, bounds=(-1.0, 1.0)),
}


def _scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    return {name: metric(predicted, wanted) for name, metric in CORRELATIONS.items()}


def _figures(judgement: Judgement) -> list[str]:
    """Add mean squared error, Pearson's and Spearman's correlation."""
    judgement.figures.derive("mse", "loss", float)
    for name, metric in CORRELATIONS.items():
        judgement.figures.add(name, judgement.said, judgement.meant, metric)
    return [f"{number:.6g}" for (number,) in judgement.said]


TASKS = (
    TaskSpec(
        name="regress",
        batching=Batching("regress", replace(LABELS, name="numbers", row=Rated), _encode, LabelBatches),
        tokens=READER,
        guessed=False,
        head="classifier",
        usual=ENCODER,
        families=("decoder",),
        outputs=1,
        stated=STATED,
        objective=Objective(_squared_error, _numbers),
        metrics=("loss", "pearson", "spearman"),
        scores=_scores,
        pretrain=True,
        command="predict {folder} TEXT",
        sample=_predicted,
        figures=_figures,
    ),
)
