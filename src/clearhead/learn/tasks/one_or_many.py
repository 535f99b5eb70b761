"""One input or a list: what a method of `Model` was given, and what it gives back."""

from collections.abc import Sequence
from typing import Any, TypeVar

from clearhead.learn.tasks.results import Generation

Result = TypeVar("Result")


def as_prompts(given: Any) -> tuple[bool, list[Any]]:
    """Return whether one prompt was given, and a list of all; tensors and arrays of ids count as lists."""
    given = given.tolist() if hasattr(given, "tolist") else given
    # What is no list of anything is one prompt, which will be refused.
    first = given[0] if isinstance(given, Sequence) and given else None
    several = isinstance(first, Sequence) or getattr(first, "ndim", 0) > 0
    single = isinstance(given, str) or not isinstance(given, Sequence) or (len(given) > 0 and not several)
    return single, [given] if single else list(given)


def best_of_each(
    made: list[list[Generation]], num_return: int, single: bool
) -> Generation | list[Generation] | list[list[Generation]]:
    """Return one generation of each prompt, or a list where several were asked for."""
    kept: list[Any] = made if num_return > 1 else [row[0] for row in made]
    return kept[0] if single else kept


def unwrapped(made: list[Result], single: bool) -> Result | list[Result]:
    """Return the only result of one input, or the list of several."""
    return made[0] if single else made
