"""Tasks whose targets are labels: classes of texts and pictures, tags of words, the place of an answer."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from clearhead.hub.tokens.training import READER
from clearhead.learn.batches import bucketed, encoding, pictures
from clearhead.learn.batches.batching import Batching
from clearhead.learn.data.examples import IMAGES, LABELS, QUESTIONS, TAGS, Corpus, Labelled, Question, Tagged
from clearhead.learn.data.tables import listed
from clearhead.learn.data.tagging import by_labels, recognise
from clearhead.learn.evaluation.judgement import Judgement, count_classes
from clearhead.learn.evaluation.metrics import METRICS, span_counts
from clearhead.learn.losses import CLASSES, SPANS, TAGGED, class_answers, class_weighted, tag_answers
from clearhead.learn.recipe import GeneratePlan
from clearhead.learn.tasks.reading import tag
from clearhead.learn.tasks.spec import ENCODER, VISION, Answers, TaskSpec, sampled
from clearhead.run.api import Model


def _classified(loaded: Model, row: Labelled, plan: GeneratePlan, seed: int) -> str:
    made: Any = loaded.classify(row.text if row.pair is None else (row.text, row.pair))
    return sampled(row.text, f"{made.label} {made.probability:.0%}", row.label)


def _seen(loaded: Model, row: tuple[int, Any, int], plan: GeneratePlan, seed: int) -> str:
    number, pixels, label = row
    made: Any = loaded.classify(pixels)
    return sampled(f"image {number}", f"{made.label} {made.probability:.0%}", loaded.labels[label])


def _class_scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    flat = [[answer for row in rows for answer in row] for rows in (predicted, wanted)]
    return {name: METRICS[name](*flat) for name in ("accuracy", "macro_f1")}


def _missing_classes(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> str:
    """Return a sentence on the classes that occur and are never predicted."""
    said, meant = (Counter(answer for row in rows for answer in row) for rows in (predicted, wanted))
    missing = [label for number, label in enumerate(labels) if meant[number] and not said[number]]
    if not missing:
        return ""
    count = sum(meant[number] for number, label in enumerate(labels) if label in missing)
    return (
        f"never predicted: {listed(missing)}, {count:,} of {meant.total():,} validation examples; "
        "train.class_weights=balanced may help"
    )


def _class_figures(judgement: Judgement) -> list[str]:
    """Add accuracy, the mean F1 of the classes, and how often each class was taken for each."""
    said, meant = ([answer for (answer,) in rows] for rows in (judgement.said, judgement.meant))
    for name in ("accuracy", "macro_f1"):
        judgement.figures.add(name, said, meant)
    judgement.figures.classes = count_classes(said, meant, judgement.loaded.class_names)
    return [judgement.loaded.class_names[place] for place in said]


def _tagged(loaded: Model, row: Tagged, plan: GeneratePlan, seed: int) -> str:
    made: Any = loaded.tag(list(row.words))
    named = [f"{word}/{found.label}" for word, found in zip(row.words, made.words)]
    return f"{' '.join(named)}  ({' '.join(row.tags)})"


def _tag_metric(labels: Sequence[str]) -> str:
    tagging = by_labels(labels)
    return "span_f1" if all(tagging.split(tag)[0] for tag in labels) else "accuracy"


def _scheme(corpus: Corpus) -> list[str]:
    """Return a sentence on how the tags of the validation data spell spans, if they do."""
    rows = cast(Sequence[Tagged], corpus.validation)
    scheme = recognise([row.tags for row in rows]).scheme
    return [f"the tags follow {scheme}: span_f1 counts spans strictly by it"] if scheme else []


def _tag_scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    flat = [[answer for row in rows for answer in row] for rows in (predicted, wanted)]
    named = [[[labels[index] for index in row] for row in rows] for rows in (predicted, wanted)]
    return {"accuracy": METRICS["accuracy"](*flat), "span_f1": METRICS["span_f1"](*named)}


def _no_spans(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> str:
    """Return a sentence where the data has spans and no sentence is given one."""
    named = [[[labels[index] for index in row] for row in rows] for rows in (predicted, wanted)]
    _, said, meant = span_counts(*named).sum(0)
    if said or not meant:
        return ""
    return f"no span is predicted, and {meant:,.0f} are wanted: train longer, or set train.class_weights"


def _tag_figures(judgement: Judgement) -> list[str]:
    """Add accuracy and, for tags with prefixes, F1 of whole spans; words that were cut off count too."""
    found = tag(judgement.loaded, [row.words for row in judgement.rows])
    tags = [[word.label for word in one.words] for one in found]
    wanted = [row.tags for row in judgement.rows]
    judgement.figures.add("accuracy", tags, wanted, "word_accuracy")
    if recognise(wanted).scheme:
        for name in ("span_f1", "span_precision", "span_recall"):
            judgement.figures.add(name, tags, wanted)
    return [" ".join(row) for row in tags]


def _answered(loaded: Model, row: Question, plan: GeneratePlan, seed: int) -> str:
    made: Any = loaded.answer(row.question, row.context)
    return sampled(row.question, made.text, row.answer)


def _answer_scores(predicted: Answers, wanted: Answers, labels: Sequence[str]) -> dict[str, float]:
    return {"exact": METRICS["accuracy"](predicted, wanted)}


def _answer_figures(judgement: Judgement) -> list[str]:
    """Add exact match and F1 over words.

    The model may find no answer where that is right for some questions.
    """
    questions, contexts = zip(*judgement.asked)
    none = any("" in given for given in judgement.references)
    made: Any = judgement.loaded.answer(list(questions), list(contexts), none=none)
    found = [one.text for one in made]
    judgement.figures.spans(found, judgement.references)
    return found


_TEXTS = TaskSpec(
    name="classify",
    batching=Batching("classify", LABELS, encoding.encode_labelled, bucketed.LabelBatches),
    tokens=READER,
    head="classifier",
    usual=ENCODER,
    families=("decoder",),
    classes=True,
    objective=CLASSES,
    metrics=("loss", "accuracy", "macro_f1"),
    metric="accuracy",
    scores=_class_scores,
    missing=_missing_classes,
    weighted=functools.partial(class_weighted, class_answers),
    pretrain=True,
    command="classify {folder} TEXT",
    sample=_classified,
    figures=_class_figures,
)
_PICTURES = replace(
    _TEXTS,
    name="image",
    batching=Batching("image", IMAGES, None, pictures.PictureBatches),
    tokens=None,
    usual=VISION,
    families=(),
    pretrain=False,
    one_shape=True,
    command="classify {folder} IMAGE",
    sample=_seen,
)
TASKS = (
    _TEXTS,
    _PICTURES,
    TaskSpec(
        name="tag",
        batching=Batching("tag", TAGS, encoding.encode_tagged, bucketed.TagBatches),
        tokens=READER,
        head="tagger",
        usual=ENCODER,
        classes=True,
        pooled=False,
        objective=TAGGED,
        metrics=("loss", "accuracy", "span_f1"),
        metric=_tag_metric,
        remarks=_scheme,
        scores=_tag_scores,
        missing=_no_spans,
        weighted=functools.partial(class_weighted, tag_answers),
        pretrain=True,
        command="tag {folder} TEXT",
        sample=_tagged,
        figures=_tag_figures,
    ),
    TaskSpec(
        name="answer",
        batching=Batching("answer", QUESTIONS, encoding.encode_questions, bucketed.AnswerBatches),
        tokens=READER,
        head="span",
        usual=ENCODER,
        pooled=False,
        objective=SPANS,
        metrics=("loss", "exact"),
        metric="exact",
        scores=_answer_scores,
        command="answer {folder} QUESTION CONTEXT",
        sample=_answered,
        figures=_answer_figures,
    ),
)
