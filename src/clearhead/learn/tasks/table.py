"""`TASKS`: the table of tasks, one entry each.

The entries are the `TASKS` of the modules in `tasks/entries`: a new module there is a new task. From outside
the package, `TASKS[spec.name] = spec` adds one.
"""

import importlib
import pkgutil

from clearhead.errors import ConfigError, nearest, refuse
from clearhead.learn.data.examples import Shape
from clearhead.learn.tasks import entries
from clearhead.learn.tasks.spec import TaskSpec

TASKS: dict[str, TaskSpec] = {
    spec.name: spec
    for module in pkgutil.iter_modules(entries.__path__)
    for spec in importlib.import_module(f"{entries.__name__}.{module.name}").TASKS
}


def task_named(name: str) -> TaskSpec:
    """Return the task of this name."""
    refuse(
        name not in TASKS,
        f"task {name!r} is not allowed: it must be one of {', '.join(TASKS)}{nearest(name, TASKS)}",
        ConfigError,
    )
    return TASKS[name]


def task_for_shape(shape: str) -> TaskSpec:
    """Return the task that data of this shape is taken for."""
    return next(spec for spec in TASKS.values() if spec.guessed and spec.shape.name == shape)


def shape_of(task: str | None) -> Shape | None:
    """Return the shape of rows that a task needs; None where no task is named."""
    return None if task is None else task_named(task).shape
