"""`TASKS`: the table of tasks; data is opened here, where the name of a task becomes the task.

The tasks are the classes with a `name` in the modules of `tasks/entries`: a new module there is a new task.
From outside the package, `TASKS["stars"] = Stars()` adds one.
"""

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from clearhead.errors import ConfigError, nearest, refuse
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.learn.data.corpus import open_corpus
from clearhead.learn.data.examples import Chunk, Corpus, Images, Rows, RowType
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks import entries
from clearhead.learn.tasks.task import Task


def _found() -> Iterator[Task]:
    for entry in pkgutil.iter_modules(entries.__path__):
        module = importlib.import_module(f"{entries.__name__}.{entry.name}")
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__ == module.__name__
            if own and issubclass(value, Task) and "name" in vars(value):
                yield value()


TASKS: dict[str, Task] = {task.name: task for task in _found()}


def task_named(name: str) -> Task:
    """Return the task of this name."""
    refuse(
        name not in TASKS,
        f"task {name!r} is not allowed: it must be one of {', '.join(TASKS)}{nearest(name, TASKS)}",
        ConfigError,
    )
    return TASKS[name]


def row_of(task: str | None) -> RowType | None:
    """Return the class of rows that a task needs; None where no task is named."""
    return None if task is None else task_named(task).row


def open_data(plan: DataPlan, split: bool = True) -> Corpus:
    """Open the data that a plan names; without `split`, all examples are to validate on."""
    return open_corpus(plan, None, split) if plan.task is None else task_named(plan.task).read(plan, split)


def task_of(plan: DataPlan, corpus: Corpus) -> str:
    """Return the task that the plan names, else the one that such examples are taken for."""
    if plan.task is None:
        return next(task.name for task in TASKS.values() if task.guessed and corpus.shape == task.row.PLURAL)
    needed = task_named(plan.task).row.PLURAL
    refuse(needed != corpus.shape, f"task {plan.task} needs {needed}, and the data holds {corpus.shape}")
    return plan.task


@dataclass(frozen=True)
class Texts:
    """Every text of some examples, read again at each iteration.

    With a `template`, conversations are as it writes them, without the `special` tokens in them.
    """

    rows: Rows
    template: ChatTemplate | None = None
    special: Sequence[str] = ()

    def __iter__(self) -> Iterator[str]:
        rows: Any = self.rows
        if self.template is None:
            return (text for row in rows for text in row.texts())
        rendered = (text for row in rows for text in row.rendered(self.template))
        between = re.compile("|".join(map(re.escape, self.special)))
        return (chunk for text in rendered for chunk in between.split(text))


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
