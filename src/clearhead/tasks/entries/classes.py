"""One class for a text, for a pair of texts, or for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clearhead.batches.batching import Batching
from clearhead.batches.bucketed import LabelBatches
from clearhead.batches.encoding import encode_labelled
from clearhead.batches.pictures import PictureBatches
from clearhead.bundle import Model
from clearhead.data.examples import IMAGES, LABELS, Labelled
from clearhead.evaluation import metrics
from clearhead.evaluation.judgement import Judgement
from clearhead.tasks.spec import ENCODER, VISION, Answers, TaskSpec
from clearhead.tokens.training import READER
from clearhead.training.losses import CLASSES
from clearhead.training.plan import GeneratePlan


def _classified(loaded: Model, row: Labelled, plan: GeneratePlan, seed: int) -> str:
    made: Any = loaded.classify(row.text if row.pair is None else (row.text, row.pair))
    return f"{row.text} -> {made.label} {made.probability:.0%}  ({row.label})"


def _seen(loaded: Model, row: tuple[int, Any, int], plan: GeneratePlan, seed: int) -> str:
    number, pixels, label = row
    made: Any = loaded.classify(pixels)
    return f"image {number} -> {made.label} {made.probability:.0%}  ({loaded.labels[label]})"


def _scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    flat = [[answer for row in rows for answer in row] for rows in (predicted, wanted)]
    return {"accuracy": metrics.accuracy(*flat), "macro_f1": metrics.macro_f1(*flat)}


def _figures(judgement: Judgement) -> list[str]:
    """Add accuracy and the mean F1 of the classes."""
    said, meant = ([answer for (answer,) in rows] for rows in (judgement.said, judgement.meant))
    judgement.figures.classes(said, meant, judgement.loaded.config.n_classes)
    return [judgement.labels[place] for place in said]


_TEXTS = TaskSpec(
    name="classify",
    batching=Batching("classify", LABELS, encode_labelled, LabelBatches),
    tokens=READER,
    head="classifier",
    usual=ENCODER,
    families=("decoder",),
    classes=True,
    objective=CLASSES,
    metrics=("loss", "accuracy", "macro_f1"),
    metric="accuracy",
    scores=_scores,
    pretrain=True,
    command="classify {folder} TEXT",
    sample=_classified,
    figures=_figures,
)
_PICTURES = replace(
    _TEXTS,
    name="image",
    batching=Batching("image", IMAGES, None, PictureBatches),
    tokens=None,
    usual=VISION,
    families=(),
    pretrain=False,
    one_shape=True,
    command="classify {folder} IMAGE",
    sample=_seen,
)
TASKS = (_TEXTS, _PICTURES)
