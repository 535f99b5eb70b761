"""One row of the equality suite: what is compared with what, before it is run (`Row`) and after (`Check`)."""

from __future__ import annotations

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
class Row:
    """A comparison that can be made: `run` gives the largest difference."""

    name: str
    compared: str  # what with what, in words
    run: Callable[[], float]
    tolerance: float
    copies: bool = False  # does it make a copy of the whole model?


@dataclass(frozen=True)
class Check:
    """A comparison that was made, or was left out."""

    name: str
    compared: str  # what with what, in words
    difference: (
        float | None
    )  # the largest, relative to the largest value where that is above 1; None: nothing was compared
    tolerance: float
    seconds: float
    note: str = ""  # why it was left out, or what went wrong
    skipped: bool = False

    @property
    def verdict(self) -> Verdict:
        """Equal within the tolerance, or not; NaN is not. A row that could not be run is an error, unless it was left out."""
        if self.difference is None:
            return "skipped" if self.skipped else "error"
        return "equal" if self.difference <= self.tolerance else "differs"

    @property
    def passed(self) -> bool:
        """Was nothing found? A row that was left out found nothing: see `verdict`."""
        return self.verdict in ("equal", "skipped")

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no word for a difference that is not finite."""
        finite = self.difference is not None and math.isfinite(self.difference)
        values = {
            **asdict(self),
            "difference": self.difference if finite else None,
            "verdict": self.verdict,
            "passed": self.passed,
        }
        del values["skipped"]  # the verdict says it
        return values


def gap(ours: Tensor, theirs: Tensor, least: float = 1.0) -> float:
    """The largest difference; relative to the largest of `theirs` where that is above `least`."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = precise(ours.detach()).cpu(), precise(theirs.detach()).cpu()
    largest = float(theirs.abs().max())
    return float((ours - theirs).abs().max()) / (max(least, largest) or 1.0)
