"""One tag for each word of a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.batches.batching import Batching
from clearhead.batches.bucketed import TagBatches
from clearhead.batches.encoding import encode_tagged
from clearhead.bundle import Model
from clearhead.data.examples import TAGS, Tagged
from clearhead.evaluation import metrics
from clearhead.evaluation.judgement import Judgement
from clearhead.tasks import tag_all
from clearhead.tasks.spec import ENCODER, Answers, TaskSpec
from clearhead.tokens.training import READER
from clearhead.training.losses import TAGGED
from clearhead.training.plan import GeneratePlan


def _tagged(loaded: Model, row: Tagged, plan: GeneratePlan, seed: int) -> str:
    made: Any = loaded.tag(list(row.words))
    named = [f"{word}/{found.label}" for word, found in zip(row.words, made.words)]
    return f"{' '.join(named)}  ({' '.join(row.tags)})"


def _metric(labels: Sequence[str]) -> str:
    spans = all(tag == "O" or tag[:2] in ("B-", "I-") for tag in labels)
    return "span_f1" if spans else "accuracy"


def _scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    flat = [[answer for row in rows for answer in row] for rows in (predicted, wanted)]
    named = [[[labels[index] for index in row] for row in rows] for rows in (predicted, wanted)]
    return {"accuracy": metrics.accuracy(*flat), "span_f1": metrics.span_f1(*named).f1}


def _figures(judgement: Judgement) -> list[str]:
    """Add accuracy and, for B- and I- tags, F1 of whole spans; words that were cut off count too."""
    found = tag_all(judgement.loaded, [row.words for row in judgement.rows])
    tags = [[word.label for word in one.words] for one in found]
    judgement.figures.tags(tags, [row.tags for row in judgement.rows])
    return [" ".join(row) for row in tags]


TASKS = (
    TaskSpec(
        name="tag",
        batching=Batching("tag", TAGS, encode_tagged, TagBatches),
        tokens=READER,
        head="tagger",
        usual=ENCODER,
        classes=True,
        pooled=False,
        objective=TAGGED,
        metrics=("loss", "accuracy", "span_f1"),
        metric=_metric,
        scores=_scores,
        pretrain=True,
        command="tag {folder} TEXT",
        sample=_tagged,
        figures=_figures,
    ),
)
