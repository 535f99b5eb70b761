"""The steps of a trace, and the recorder that writes them down while the model runs.

    recorder = Recorder(config, facts)
    with listening(Listener(model, {}, recorder.hear)):
        model(ids)

The recorder hears every value that the model shows to its taps. A value with a name that `record` knows belongs to the
step that made it. The experts of a mixture work on a run of rows each: their values are joined into one step.

Shapes: see `words.LEGEND`.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.inside.trace.words import INPUTS, words_of
from clearhead.model.dtypes import wide
from clearhead.model.steps import Step

FIRST = 5  # values shown of each result
RECENT = 12  # steps among which the one that made a value is looked for
_EXPERT = re.compile(r"\.experts\.\d+\.")


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


class Recorder:
    """Writes down the steps of one forward pass; `facts` fill in formulas and symbols."""

    def __init__(
        self, config: ModelConfig, facts: Mapping[str, Any], keep_values: bool | Collection[str] = True
    ) -> None:
        self.steps: list[TraceStep] = []
        self.config, self.facts, self.keep_values = config, dict(facts), keep_values
        self._recent: deque[tuple[int, Tensor]] = deque(maxlen=RECENT)  # number of a step, and its value
        self._experts: dict[
            str, tuple[list[Tensor], float]
        ] = {}  # pieces of one step, and the time they took
        self._clock = time.perf_counter()

    def hear(self, name: str, x: Tensor, public: bool) -> None:
        """Take down a value that the model shows; `public`: `record` knows it by this name."""
        seconds = self._elapsed(x)
        if _EXPERT.search(name):
            if not public:
                joined = _EXPERT.sub(".experts.", name)
                pieces, before = self._experts.get(joined, ([], 0.0))
                self._experts[joined] = ([*pieces, x], before + seconds)
        else:
            self._join_experts()
            made = self._made(x) if public else None
            if made is not None:
                self.steps[made] = replace(self.steps[made], taps=(*self.steps[made].taps, name))
            elif all(step.name != name for step in self.steps):
                self.note(name, x, seconds, taps=(name,) if public else ())
        self._clock = time.perf_counter()

    def timed(
        self, name: str, compute: Callable[[], Tensor], sample: tuple[str, ...] = (), **facts: Any
    ) -> Tensor:
        """Run `compute`, append its result as a step, and return it."""
        self._clock = time.perf_counter()
        x = compute()
        self.note(name, x, self._elapsed(x), sample, **facts)
        return x

    def note(
        self,
        name: str,
        x: Tensor,
        seconds: float,
        sample: tuple[str, ...] = (),
        taps: tuple[str, ...] = (),
        **facts: Any,
    ) -> None:
        """Append a step."""
        words, known = (
            words_of(name, tuple(x.shape)),
            {**self.facts, **stack_facts(self.config, name, x), **facts},
        )
        keeps = self.keep_values if isinstance(self.keep_values, bool) else name in self.keep_values
        self._recent.append((len(self.steps), x))
        self.steps.append(
            TraceStep(
                name,
                words.title,
                path_of(self.config, name),
                words.symbols.format_map(known),
                tuple(x.shape),
                str(x.dtype).removeprefix("torch."),
                _peek(x),
                seconds,
                x.numel() * x.element_size(),
                words.formula.format_map(known),
                words.why,
                wide(x.detach()).cpu() if keeps else None,
                sample,
                taps,
            )
        )

    def _elapsed(self, x: Tensor) -> float:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        return time.perf_counter() - self._clock

    def _made(self, x: Tensor) -> int | None:
        """The latest step whose value is this very tensor."""
        return next((number for number, value in reversed(self._recent) if value is x), None)

    def _join_experts(self) -> None:
        for name, (pieces, seconds) in self._experts.items():
            self.note(name, torch.cat(pieces), seconds)
        self._experts.clear()


def priced(steps: Sequence[TraceStep], costs: Iterable[Step]) -> tuple[TraceStep, ...]:
    """Give each step the figures of its costs; one that has no step of its own goes to the last step of its part."""
    places = {step.name: number for number, step in enumerate(steps)}
    taken: dict[int, list[Step]] = {}
    for cost in costs:
        part = cost.name
        while part and part not in places and not any(name.startswith(f"{part}.") for name in places):
            part = part.rpartition(".")[0]
        own = [number for name, number in places.items() if name == part or name.startswith(f"{part}.")]
        taken.setdefault(places.get(cost.name, max(own, default=len(steps) - 1)), []).append(cost)
    return tuple(
        replace(
            step,
            costs=tuple(cost.name for cost in taken.get(number, ())),
            parameters=sum(cost.parameters for cost in taken.get(number, ())),
            flops=sum(cost.forward for cost in taken.get(number, ())),
        )
        for number, step in enumerate(steps)
    )


def path_of(config: ModelConfig, name: str) -> tuple[str, ...]:
    """The groups that a step of this name stands in: stack, block, sublayer."""
    if name.startswith("head."):
        return ("head",)
    at = "encoder." if name.startswith("encoder.") else ""
    stack = "encoder" if at or config.decoder is None else "decoder"
    part, *rest = name.removeprefix(at).split(".")
    if part == "blocks":
        layer, sublayer, *step = rest
        block = f"{at}blocks.{layer}"
        joins = sublayer.endswith("_residual") and config.parallel and step != ["before"]
        return (stack, block, f"{block}.{'residual' if joins else sublayer.removesuffix('_residual')}")
    if part in INPUTS:
        return (stack, f"{at}input")
    if part == "mask" or (part == "positions" and rest[0] in ("rotary", "bias")):
        return (stack, f"{at}view")
    return (stack,) if part == "norm" else (stack, f"{at}embedding")


def stack_facts(config: ModelConfig, name: str, x: Tensor) -> dict[str, Any]:
    """What formulas and symbols of a step are filled in with, from the stack that it belongs to."""
    spec = config.stacks[0] if name.startswith("encoder.") else config.main
    window = name.rpartition("mask.")[2] if "mask." in name else spec.windows[0]
    nearer = "" if window in (None, "full") else f", nearer than {window}"
    hides = x.is_floating_point() and x.numel() and bool((x == torch.finfo(x.dtype).min).any())
    return {
        "W": "D" if spec.d_embedding == spec.d_model else "W",
        "N": "N" if spec.input == "patches" else "T",
        "Ev": "E" if spec.d_value == spec.d_head else "Ev",
        "Tin": "Tin" if spec.input == "frames" else "T",
        "rows": "B·T·A" if spec.n_experts else "B T",
        "q_normed": "B T H·E" if spec.qk_norm == "full" else "B H T E",
        "k_normed": "B S K·E" if spec.qk_norm == "full" else "B K S E",
        "bias": "−slope · distance" if spec.positions == "alibi" else "table[bucket of distance]",
        "mask": ("earlier" if spec.causal else "all") + nearer,
        "scale": f"{spec.attention_scale:.4g}",
        "hidden": "lowest number where hidden" if hides else "nothing is hidden",
    }


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
