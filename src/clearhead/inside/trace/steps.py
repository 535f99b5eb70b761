"""The steps of a trace, and the notebook in which a walk through the model writes them down.

    note = Notebook(cost(config, length).steps, facts)
    with note.group("decoder"):
        q = note("blocks.0.attention.q", "B T H·E", attention.q, x)      # runs attention.q(x), times it, keeps it

Each step takes its parameters and FLOPs from the steps of the cost model, by name, and no two take the same.

Shapes: see `trace_words.LEGEND`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.inside.trace.words import WORDS, kind_of
from clearhead.model.dtypes import wide
from clearhead.steps import Step

FIRST = 5  # values shown of each result


@dataclass(frozen=True)
class Peek:
    """A look at the values of a result; what a mask has hidden counts neither for mean and spread nor for the least value."""

    first: tuple[float, ...]
    mean: float | None = None  # of floating-point values; None where there is none
    std: float | None = None
    min: float | None = None
    max: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite becomes None."""
        values = {"mean": self.mean, "std": self.std, "min": self.min, "max": self.max}
        return {
            "first": [_finite(value) for value in self.first],
            **{name: _finite(value) for name, value in values.items()},
        }


@dataclass(frozen=True)
class TraceStep:
    """One step of a forward pass."""

    name: str  # stable: "blocks.3.attention.scores", "encoder.norm", "head.out"
    title: str  # in a word: "scores"
    path: tuple[str, ...]  # the groups it stands in: stack, block, sublayer
    symbols: str  # its shape in the letters of the legend: "B H T S"
    shape: tuple[int, ...]
    dtype: str
    peek: Peek
    seconds: float
    bytes: int  # of the result
    formula: str
    why: str
    value: Tensor | None = field(
        repr=False, compare=False, default=None
    )  # on the CPU, float32 at least; None where not kept
    sample: tuple[str, ...] = ()  # the result in words, where it has them: tokens
    taps: tuple[str, ...] = ()  # names under which `record` and `edit` know this very value
    costs: tuple[str, ...] = ()  # names of the cost model's steps whose figures it has
    parameters: int = 0  # used here for the first time: tied and shared weights count once
    flops: int = 0

    @property
    def level(self) -> int:
        """How deep it stands: the pass is 0, a stack 1, a block 2, a sublayer 3, its steps 4."""
        return len(self.path) + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the value itself is left out."""
        plain = (
            "name",
            "title",
            "level",
            "symbols",
            "dtype",
            "formula",
            "why",
            "parameters",
            "flops",
            "bytes",
            "seconds",
        )
        lists = ("path", "shape", "sample", "taps", "costs")
        values: dict[str, Any] = {name: getattr(self, name) for name in plain}
        return {**values, **{name: list(getattr(self, name)) for name in lists}, "peek": self.peek.to_dict()}


class Notebook:
    """Runs a forward pass one step at a time, and writes down what it sees."""

    def __init__(
        self, prices: Iterable[Step], facts: Mapping[str, Any], keep_values: bool | Collection[str] = True
    ) -> None:
        self.steps: list[TraceStep] = []
        self.unpaid = {step.name: step for step in prices}  # of the cost model, not yet taken by a step
        self.facts, self.keep_values = dict(facts), keep_values
        self._path: tuple[str, ...] = ()
        self._at: dict[str, int] = {}

    @contextmanager
    def group(self, name: str) -> Iterator[None]:
        """Steps noted inside belong to `name`, within the groups around it."""
        before, self._path = self._path, (*self._path, name)
        try:
            yield
        finally:
            self._path = before

    def __call__(
        self,
        name: str,
        symbols: str,
        compute: Callable[..., Tensor],
        *inputs: Any,
        sample: tuple[str, ...] = (),
        **facts: Any,
    ) -> Tensor:
        """Run `compute(*inputs)`, write it down under `name`, hand on what came out. `facts` go into the formula."""
        begun = time.perf_counter()
        result = compute(*inputs)
        if result.is_cuda:
            torch.cuda.synchronize(result.device)
        seconds = time.perf_counter() - begun
        words = WORDS[kind_of(name)]
        step = TraceStep(
            name,
            words.title,
            self._path,
            symbols,
            tuple(result.shape),
            str(result.dtype).removeprefix("torch."),
            _peek(result),
            seconds,
            result.numel() * result.element_size(),
            words.formula.format_map(self.facts | facts),
            words.why,
            wide(result.detach()).cpu() if self._keeps(name) else None,
            sample,
        )
        self._at[name] = len(self.steps)
        self.steps.append(step)
        self.also(name)
        return result

    def _keeps(self, name: str) -> bool:
        return self.keep_values if isinstance(self.keep_values, bool) else name in self.keep_values

    def also(self, *costs: str) -> None:
        """The latest step has these steps of the cost model too, where they are there and not taken yet."""
        taken = [self.unpaid.pop(name) for name in costs if name in self.unpaid]
        last = self.steps[-1]
        self.steps[-1] = replace(
            last,
            costs=(*last.costs, *(step.name for step in taken)),
            parameters=last.parameters + sum(step.parameters for step in taken),
            flops=last.flops + sum(step.forward for step in taken),
        )

    def tap(self, *taps: str, step: str | None = None) -> None:
        """The latest step, or the one called `step`, is what these taps show."""
        at = len(self.steps) - 1 if step is None else self._at[step]
        self.steps[at] = replace(self.steps[at], taps=(*self.steps[at].taps, *taps))


def _peek(x: Tensor) -> Peek:
    """[...] -> its first values, and figures over all of them."""
    first = tuple(x.flatten()[:FIRST].tolist())
    if not x.is_floating_point():
        return Peek(first, min=float(x.min()), max=float(x.max())) if x.numel() else Peek(first)
    seen = x[x > torch.finfo(x.dtype).min] if bool((x == torch.finfo(x.dtype).min).any()) else x
    if not seen.numel():
        return Peek(first)
    seen = wide(seen)
    return Peek(
        first, float(seen.mean()), float(seen.std(correction=0)), float(seen.min()), float(seen.max())
    )


def _finite(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None
