"""The events of a training run, as data: the caller of `train` decides which of them to show."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

Reason: TypeAlias = Literal["done", "patience", "stopped"]  # why a run ended


@dataclass(frozen=True)
class Note:
    """A guess, a choice or a fallback, in a sentence."""

    line: str


@dataclass(frozen=True)
class Started:
    """The run is ready for its first step."""

    folder: Path
    task: str
    parameters: int
    trainable: int
    steps: int
    step: int  # taken before, where the run is resumed
    device: str


@dataclass(frozen=True)
class Stepped:
    """Steps were taken: figures of the last one, and the speed since the last report."""

    step: int
    steps: int
    loss: float
    rate: float
    norm: float  # of the gradient, before clipping
    tokens_per_second: float
    seconds: float  # since the first step
    left: float  # seconds to the end, by the speed so far
    memory: int  # the most bytes used so far: on the device, or resident
    mfu: float | None = None  # share of the device's peak, where that is known


@dataclass(frozen=True)
class Validated:
    """The model was validated on the whole validation set."""

    step: int
    metrics: dict[str, float]
    best: bool
    samples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    step: int
    folder: Path


@dataclass(frozen=True)
class Finished:
    """The run ended, or was asked to stop."""

    folder: Path
    step: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    reason: Reason = "done"


Said = Note  # the name of `Note` until version 0.1; it stays for one release
Event: TypeAlias = Note | Started | Stepped | Validated | Saved | Finished
OnEvent = Callable[[Event], None]
