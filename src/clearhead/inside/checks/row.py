"""One row of the equality suite, before it is run (`Comparison`) and after (`Check`)."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.model.dtypes import precise

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
LARGE = 500_000_000  # parameters above which rows that copy the whole model are left out, unless asked for

Verdict = Literal["equal", "differs", "error", "skipped"]


@dataclass(frozen=True)
class Comparison:
    """A comparison that can be made: `run` returns the largest difference."""

    name: str
    compared: str  # what with what, in words
    run: Callable[[], float]
    tolerance: float
    copies: bool = False  # does it make a copy of the whole model?
    fits: bool = True  # does it make sense for this model?


@dataclass(frozen=True)
class Check:
    """A comparison that was made, or was left out."""

    name: str
    compared: str  # what with what, in words
    difference: float | None  # the largest, relative to the largest value above 1; None: nothing was compared
    tolerance: float
    seconds: float
    note: str = ""  # why it was left out, or what went wrong
    skipped: bool = False

    @property
    def verdict(self) -> Verdict:
        """Return "equal" within the tolerance, else "differs", as for NaN; without a difference, why."""
        if self.difference is None:
            return "skipped" if self.skipped else "error"
        return "equal" if self.difference <= self.tolerance else "differs"

    @property
    def passed(self) -> bool:
        """Return whether no fault was found; a row that was skipped found none: see `verdict`."""
        return self.verdict in ("equal", "skipped")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON, in which a difference that is not finite is null."""
        values = asdict(self) | {"verdict": self.verdict, "passed": self.passed}
        del values["skipped"]  # the verdict says it
        if self.difference is not None and not math.isfinite(self.difference):
            values["difference"] = None
        return values


def gap(ours: Tensor, theirs: Tensor, least: float = 1.0) -> float:
    """Return the largest difference, relative to the largest of `theirs` where that is above `least`."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = precise(ours.detach()).cpu(), precise(theirs.detach()).cpu()
    largest = float(theirs.abs().max())
    return float((ours - theirs).abs().max()) / (max(least, largest) or 1.0)
