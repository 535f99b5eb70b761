"""What happens in a run, as data: whoever calls `train` decides what to show of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Said:
    """Something that was guessed, chosen or fallen back to."""

    line: str


@dataclass(frozen=True)
class Started:
    """The first step is about to be taken."""

    folder: Path
    task: str
    parameters: int
    trainable: int
    steps: int
    step: int  # already taken
    device: str


@dataclass(frozen=True)
class Stepped:
    """Some steps have been taken; the figures are those of the last one, the speed is that since the last report."""

    step: int
    steps: int
    loss: float
    rate: float
    norm: float  # of the gradient, before clipping
    tokens_per_second: float
    seconds: float  # since the first step
    left: float  # seconds, by the speed so far
    memory: int  # bytes, at most so far: of the device, or resident
    mfu: float | None = None  # share of the device's peak, where that is known


@dataclass(frozen=True)
class Validated:
    """The whole validation set has been judged."""

    step: int
    metrics: dict[str, float]
    best: bool
    samples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Saved:
    """A checkpoint has been written."""

    step: int
    folder: Path


@dataclass(frozen=True)
class Finished:
    """The run is over, or was asked to stop."""

    folder: Path
    step: int
    seconds: float
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str = "done"  # done, patience or stopped


Event: TypeAlias = Said | Started | Stepped | Validated | Saved | Finished
OnEvent = Callable[[Event], None]
