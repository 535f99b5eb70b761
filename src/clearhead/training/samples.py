"""What a model says of a few validation examples, shown at each validation."""

import itertools
from collections.abc import Callable
from typing import Any

from clearhead.api import Model
from clearhead.data.examples import Corpus, Images
from clearhead.errors import InputError
from clearhead.tasks.spec import TaskSpec
from clearhead.training.plan import GeneratePlan


def sampler(
    task: TaskSpec, corpus: Corpus, plan: GeneratePlan, count: int, seed: int
) -> Callable[[Model], tuple[str, ...]]:
    """Return a function from a model to what it says of some validation examples, the same each time."""
    given: Any = corpus.validation
    if isinstance(given, Images):
        given = zip(itertools.count(), given.pixels, given.labels.tolist())
    rows = list(itertools.islice(given, count))

    def samples(loaded: Model) -> tuple[str, ...]:
        made = []
        for place, row in enumerate(rows):
            try:
                made.append(task.sample(loaded, row, plan, seed + place))
            except InputError as error:  # no run ends for something that is only shown
                made.append(f"({error})")
        return tuple(made)

    return samples
