"""The part of a context that answers a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.batches.batching import Batching
from clearhead.batches.bucketed import AnswerBatches
from clearhead.batches.encoding import encode_questions
from clearhead.bundle import Model
from clearhead.data.examples import QUESTIONS, Question
from clearhead.evaluation import metrics
from clearhead.evaluation.judgement import Judgement
from clearhead.tasks.spec import ENCODER, Answers, TaskSpec
from clearhead.tokens.training import READER
from clearhead.training.losses import SPANS
from clearhead.training.plan import GeneratePlan


def _answered(loaded: Model, row: Question, plan: GeneratePlan, seed: int) -> str:
    made: Any = loaded.answer(row.question, row.context)
    return f"{row.question} -> {made.text}  ({row.answer})"


def _scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    return {"exact": metrics.accuracy([tuple(row) for row in predicted], [tuple(row) for row in wanted])}


def _figures(judgement: Judgement) -> list[str]:
    """Add exact match and F1 over words.

    The model may find no answer where that is right for some questions.
    """
    questions, contexts = zip(*judgement.asked)
    none = any("" in given for given in judgement.references)
    made: Any = judgement.loaded.answer(list(questions), list(contexts), none=none)
    found = [one.text for one in made]
    judgement.figures.spans(found, judgement.references)
    return found


TASKS = (
    TaskSpec(
        name="answer",
        batching=Batching("answer", QUESTIONS, encode_questions, AnswerBatches),
        tokens=READER,
        head="span",
        usual=ENCODER,
        pooled=False,
        objective=SPANS,
        metrics=("loss", "exact"),
        metric="exact",
        scores=_scores,
        command="answer {folder} QUESTION CONTEXT",
        sample=_answered,
        figures=_figures,
    ),
)
