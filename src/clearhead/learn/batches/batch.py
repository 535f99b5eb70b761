"""`Batch`: the tensors of one forward pass and its targets; `Batches`: a data set as a numbered sequence of
them.

Shapes: B rows, T tokens of a row, S tokens of the source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

IGNORE = -100  # a position without a target: cross-entropy's own default
STEP = 8  # between two sizes, at least: attention masks are read in blocks of so many keys


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of examples."""

    ids: Tensor  # B T; images: pixels B C H W, float32
    # B T with IGNORE where there is no target; classes B, or shares of classes B C; numbers B, as floats;
    # first and
    # last token of an answer B 2
    targets: Tensor
    mask: Tensor | None = None  # B T, True = real; None: no padding
    source: Tensor | None = None  # B S, what the encoder reads
    source_mask: Tensor | None = None  # B S
    documents: Tensor | None = None  # B T, which document each token belongs to
    types: Tensor | None = None  # B T, which of two texts each token belongs to
    # B 2, of pairs of answers: their log-probabilities under the model before training
    reference: Tensor | None = None
    scores: Tensor | None = None  # B, of texts to be embedded: how alike they are
    numbers: Tensor | None = None  # B, the numbers of the examples, for logs and errors; stays on the CPU

    COUNTS: ClassVar[tuple[str, ...]] = ("n_targets", "n_shared", "n_tokens", "n_rows", "n_scored")

    @property
    def is_span(self) -> bool:
        """Return True if the targets of a row are its answer's first and last token, which count as one."""
        whole = not self.targets.is_floating_point()
        return whole and self.targets.ndim == 2 and self.targets.shape != self.ids.shape[:2]

    @property
    def one_each(self) -> bool:
        """Return True if a row counts as one target: an answer, a share of classes, a number, a pair."""
        paired = self.reference is not None or self.scores is not None
        return paired or self.is_span or self.targets.is_floating_point()

    @cached_property
    def n_targets(self) -> int:
        """Return the number of targets; an answer, a share of classes, a number or a pair counts as one."""
        return len(self) if self.one_each else int((self.targets != IGNORE).sum())

    @cached_property
    def n_rows(self) -> int:
        """Return the number of rows that count: 0 where a row stands in for none."""
        return len(self)

    @cached_property
    def n_shared(self) -> int:
        """Return the number of targets of the batch that these rows are a share of."""
        return self.n_targets

    @cached_property
    def n_tokens(self) -> int:
        """Return the number of real tokens on both sides; of images, the rows."""
        sides = ((self.ids, self.mask), (self.source, self.source_mask))
        return sum(_real(ids, mask) for ids, mask in sides if ids is not None)

    @cached_property
    def n_scored(self) -> int | None:
        """Return how many positions are scored, where that is fixed; None: those that have a target."""
        return None

    def __len__(self) -> int:
        return self.ids.shape[0]

    def rows(self, chosen: slice) -> Batch:
        """Return some of the rows."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[chosen] for name, value in values.items() if value is not None})

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; to a GPU it is copied from pinned memory while the CPU goes on."""
        device = torch.device(device)
        copied = device.type == "cuda" and self.ids.device.type == "cpu"
        made = replace(
            self,
            **{
                name: (value.pin_memory() if copied else value).to(device, non_blocking=copied)
                for name, value in self.tensors().items()
            },
        )
        # Counted here: on a device, counting would wait for it.
        made.__dict__.update({name: getattr(self, name) for name in self.COUNTS})
        return made

    def tensors(self) -> dict[str, Tensor]:
        """Return what a step reads, by name: what the model takes, and what the loss does."""
        others = {"targets": self.targets, "reference": self.reference, "scores": self.scores}
        return {**self.arguments(), **{name: one for name, one in others.items() if one is not None}}

    def arguments(self) -> dict[str, Tensor]:
        """Return what `model(**arguments)` takes."""
        names = ("ids", "mask", "source", "source_mask", "documents", "types")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Batches(ABC):
    """A data set as numbered batches.

    `at(7)` is always the same, so a run can be stopped and resumed anywhere.
    """

    per_epoch: int  # batches in which every example comes once
    waste: float = 0.0  # share of padding in an epoch
    notes: tuple[str, ...] = ()  # one sentence for each kind of example that was cut
    example: NDArray[np.int64] | None = None  # of each row, by number: its example; None: each row is one

    @abstractmethod
    def at(self, index: int) -> Batch:
        """Return batch 0, 1, 2, ... without end: epochs follow one another, each in its own order."""

    def all(self) -> Iterator[Batch]:
        """Yield one epoch; of a validation set every example exactly once, in the same order each time."""
        return (self.at(index) for index in range(self.per_epoch))


def _real(ids: Tensor, mask: Tensor | None) -> int:
    """Return the number of tokens that are not padding; of pixels, the rows."""
    if ids.ndim != 2:
        return ids.shape[0]
    return ids.numel() if mask is None else int(mask.sum())


# A few sizes, so that a step captured for one of them serves many batches -----------------------------------


def size_above(count: int) -> int:
    """Round up to 1, 2, 4, 8, then in steps of 8, from 128 on in steps of an eighth at most."""
    if count <= STEP:
        return 1 << (count - 1).bit_length()
    step = max(STEP, 1 << (count - 1).bit_length() >> 4)
    return -(-count // step) * step


def padded_up(batch: Batch, longest: int) -> Batch:
    """Pad rows and lengths up to the next size, `longest` tokens at most; nothing that is added counts.

    A row that is added has one token to attend to, and no target.
    """
    rows, made = size_above(len(batch)), dict[str, Tensor]()
    for name, mask_name in (("ids", "mask"), ("source", "source_mask")):
        ids, mask = getattr(batch, name), getattr(batch, mask_name)
        if ids is None:
            continue
        length = max(ids.shape[1], min(size_above(ids.shape[1]), longest))
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        made[name], wide = _pad(ids, rows, length, 0), _pad(real, rows, length, False)
        wide[len(batch) :, 0] = True
        made[mask_name] = wide
        if name == "ids" and batch.types is not None:
            made["types"] = _pad(batch.types, rows, length, 0)
        if name == "ids":
            made["targets"] = _pad(batch.targets, rows, length, IGNORE)
    if batch.numbers is not None:
        made["numbers"] = torch.cat([batch.numbers, batch.numbers[-1:].expand(rows - len(batch))])
    return _counted(replace(batch, **made), batch)


def scored_up(batch: Batch) -> Batch:
    """Fix how many positions are scored: all of them, or the next size above the number of targets."""
    if batch.targets.ndim < 2:
        return batch
    every = batch.targets.numel()
    made = _counted(replace(batch), batch)
    made.__dict__["n_scored"] = every if 2 * batch.n_targets > every else size_above(max(1, batch.n_targets))
    return made


def _counted(made: Batch, of: Batch) -> Batch:
    made.__dict__.update({name: getattr(of, name) for name in Batch.COUNTS})
    return made


def _pad(values: Tensor, rows: int, length: int, value: int | bool) -> Tensor:
    """Pad [B, ...] to `rows`, and its second axis, where there is one, to `length`."""
    missing = rows - values.shape[0]
    ends = (0, missing) if values.ndim == 1 else (0, length - values.shape[1], 0, missing)
    return nnf.pad(values, ends, value=value)
