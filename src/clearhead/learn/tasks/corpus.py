"""Open data for a task: the edge at which the name of a task in a recipe becomes the shape of its rows."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.errors import refuse
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.learn.data.corpus import open_corpus
from clearhead.learn.data.examples import Chunk, Corpus, Images, Rows
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import shape_of, task_for_shape, task_named


def open_data(plan: DataPlan, split: bool = True) -> Corpus:
    """Open the data that a plan names; without `split`, all examples are to validate on."""
    return open_corpus(plan, shape_of(plan.task), split)


def task_of(plan: DataPlan, corpus: Corpus) -> str:
    """Return the task that the plan names, else the one that goes with the shape of the examples."""
    spec = task_for_shape(corpus.shape) if plan.task is None else task_named(plan.task)
    needed = spec.shape.name
    refuse(needed != corpus.shape, f"task {plan.task} needs {needed}, and the data holds {corpus.shape}")
    return plan.task or spec.name


@dataclass(frozen=True)
class Texts:
    """Every text of some examples, read again at each iteration."""

    rows: Rows

    def __iter__(self) -> Iterator[str]:
        rows: Any = self.rows
        return (text for row in rows for text in row.texts())


@dataclass(frozen=True)
class RenderedChats:
    """Conversations as their template writes them, without the special tokens in them."""

    rows: Rows
    template: ChatTemplate
    special: Sequence[str]

    def __iter__(self) -> Iterator[str]:
        rows: Any = self.rows
        between = re.compile("|".join(map(re.escape, self.special)))
        return (
            piece for row in rows for text in row.rendered(self.template) for piece in between.split(text)
        )


def open_examples(plan: DataPlan, split: bool = True) -> tuple[Corpus, str]:
    """Open the data that a plan names -> the examples and the task.

    `texts_only` turns rows into plain text.
    """
    opened = dataclasses.replace(plan, task=None, texts_only=False) if plan.texts_only else plan
    corpus = open_data(opened, split)
    if plan.texts_only and not isinstance(corpus.train, Images) and corpus.shape != "text":
        train, validation = (
            [Chunk(text, True) for text in Texts(rows)] for rows in (corpus.train, corpus.validation)
        )
        corpus = dataclasses.replace(corpus, shape="text", labels=(), train=train, validation=validation)
    return corpus, plan.task if plan.texts_only and plan.task else task_of(plan, corpus)
