"""How time and memory of a forward pass grow with its length: measured, beside what `cost` computes.

The pass reads one row of T random tokens, without gradients and without the head. Memory is that of tensors
which live at once, weights excluded: PyTorch's own count on a GPU; elsewhere the storages that its operations
return, without what a kernel uses inside.
"""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clearhead.core.transformer import Transformer, evaluating
from clearhead.inside.inputs import device_of
from clearhead.inside.long.positions import OnProgress
from clearhead.inside.results import Result
from clearhead.variants.costs import cost

POINTS, SHORTEST = 5, 16  # lengths, each half of the next; tokens of the first at least
REPEATS = 3  # passes, after one to warm up; the quickest counts: a busy machine only ever adds


@dataclass(frozen=True)
class GrowthPoint(Result):
    """One forward pass of `length` tokens."""

    length: int
    seconds: float  # measured
    peak: int  # bytes, measured
    flops: int  # computed
    activations: int  # bytes that training keeps, computed


@dataclass(frozen=True)
class Growth(Result):
    """Passes of several lengths, shortest first."""

    json_names = ("points", "slopes")

    points: tuple[GrowthPoint, ...]

    @property
    def slopes(self) -> dict[str, float]:
        """The slope of log quantity against log length, over all points: 1 is linear, 2 quadratic."""
        lengths = [point.length for point in self.points]
        names = ("seconds", "peak", "flops", "activations")
        return {name: slope(lengths, [getattr(point, name) for point in self.points]) for name in names}


def slope(lengths: Sequence[float], values: Sequence[float]) -> float:
    """Return the least-squares slope of log value against log length; NaN where there is none."""
    if len(lengths) < 2 or min(values) <= 0:
        return math.nan
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


@torch.no_grad()
def measure_growth(model: Transformer, longest: int, seed: int, on_progress: OnProgress) -> Growth:
    """Measure passes of `longest` tokens, half as many, and so on."""
    weight, config = next(model.parameters()), model.config
    device, dtype = weight.device, str(weight.dtype).removeprefix("torch.")
    halves = [longest >> power for power in range(POINTS)]
    lengths = sorted({length for length in halves if length >= min(SHORTEST, longest)})
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (1, longest), generator=random).to(device)
    points = []
    with evaluating(model):
        for done, length in enumerate(lengths, start=1):

            def run(given: Tensor = ids[:, :length]) -> None:
                model(given, logits="none")

            figures = cost(config, length=length, dtype=dtype)
            flops, kept = figures.flops.forward, figures.memory.activations
            peak = peak_bytes(model, run)
            points.append(
                GrowthPoint(
                    length, _seconds(run, device), peak, flops.total - flops.head, kept.total - kept.head
                )
            )
            on_progress("cost", done, len(lengths))
    return Growth(tuple(points))


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def peak_bytes(model: Transformer, run: Callable[[], None]) -> int:
    """Return the most bytes that live at once while `run` calls the model, beside what lived before."""
    device = device_of(model)
    if device.type != "cuda":
        with _Living([*model.parameters()]) as living:
            run()
        return int(living.most)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return int(torch.cuda.max_memory_allocated(device)) - before


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count the bytes of the storages that operations return, for as long as each lives."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.seen = {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        before = {one.untyped_storage().data_ptr() for one in given}
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._count(one.untyped_storage(), before)
        return made

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        """Add a storage that is new; what is a view of another, or was there before, is not."""
        place, size = storage.data_ptr(), storage.nbytes()
        if not size or place in self.seen or place in before:
            return
        self.seen.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, place, size)

    def _free(self, place: int, size: int) -> None:
        self.seen.discard(place)
        self.now -= size
