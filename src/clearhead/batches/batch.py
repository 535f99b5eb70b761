"""`Batch`: the tensors that one forward pass reads and is judged by; `Batches`: a data set as a numbered row of them.

Shapes: B rows, T tokens of a row, S tokens of the source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

IGNORE = -100  # a target that nothing is asked of: cross-entropy's own default


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of examples."""

    ids: Tensor  # B T; images: pixels B C H W, float32
    # B T with IGNORE where nothing is asked; labels B (classify, image) or shares of classes B C; first and last token B 2 (answer)
    targets: Tensor
    mask: Tensor | None = None  # B T, True = real; None: no padding
    source: Tensor | None = None  # B S, what the encoder reads
    source_mask: Tensor | None = None  # B S
    documents: Tensor | None = None  # B T, which document each token belongs to
    types: Tensor | None = None  # B T, which of two texts each token belongs to
    numbers: Tensor | None = (
        None  # B, the numbers of the examples, for logs and reports of faults; stays on the CPU
    )

    @property
    def is_span(self) -> bool:
        """Are the targets of a row its answer's first and last token, which count as one?"""
        return (
            self.targets.ndim == 2
            and self.targets.shape != self.ids.shape[:2]
            and not self.targets.is_floating_point()
        )

    @cached_property
    def n_targets(self) -> int:
        """How many targets are not IGNORE; answers and shares of classes: rows."""
        if self.is_span or self.targets.is_floating_point():
            return len(self)
        return int((self.targets != IGNORE).sum())

    @cached_property
    def n_tokens(self) -> int:
        """How many real tokens are read, both sides; images: rows."""
        return _real(self.ids, self.mask) + _real(self.source, self.source_mask)

    def __len__(self) -> int:
        return self.ids.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device. To a GPU it is copied from pinned memory while the CPU goes on."""
        device = torch.device(device)

        def move(tensor: Tensor) -> Tensor:
            if device.type == "cuda" and tensor.device.type == "cpu":
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "numbers"}
        moved = replace(
            self, **{name: move(value) for name, value in values.items() if isinstance(value, Tensor)}
        )
        moved.__dict__.update(
            n_targets=self.n_targets, n_tokens=self.n_tokens
        )  # counted here: a device would have to be waited for
        return moved

    def arguments(self) -> dict[str, Tensor]:
        """What `model(**arguments)` takes."""
        names = ("ids", "mask", "source", "source_mask", "documents", "types")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Batches(ABC):
    """A data set as numbered batches: `at(7)` is always the same, so a run can be stopped and gone on with anywhere."""

    per_epoch: int  # batches in which every example comes once
    waste: float = 0.0  # share of padding in an epoch
    said: tuple[str, ...] = ()  # what was cut, a short sentence each

    @abstractmethod
    def at(self, index: int) -> Batch:
        """Batch 0, 1, 2, ... without end: epochs follow one another, each in an order of its own."""

    def all(self) -> Iterator[Batch]:
        """One epoch; of a validation set every example exactly once, in the same order each time."""
        return (self.at(index) for index in range(self.per_epoch))


def _real(ids: Tensor | None, mask: Tensor | None) -> int:
    """How many tokens are not padding; of pixels, the rows."""
    if ids is None:
        return 0
    if ids.ndim != 2:
        return ids.shape[0]
    return ids.numel() if mask is None else int(mask.sum())
