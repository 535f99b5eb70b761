"""`Batch`: the tensors of one forward pass and its targets; `Batches`: a data set as a numbered sequence of
them, in rows of one length (`FixedRows`) or by length (`Bucketed`).

Shapes: N examples, B rows, T tokens of a row, S tokens of the source.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.learn.batches.encoding import Setting
from clearhead.learn.batches.ragged import Ints, blank, tensor

IGNORE = -100  # a position without a target: cross-entropy's own default
ORDER, OFFSET, BATCH, LEVEL, HIDDEN = range(
    5
)  # what random numbers are drawn for: no two purposes share theirs
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
    # Log-probabilities under the model before training: B 2, of pairs of answers; B T, of sampled tokens
    reference: Tensor | None = None
    vectors: Tensor | None = None  # B T D of images; NaN where the token table's stand
    axes: Tensor | None = None  # B T A, position of each token on each axis, where images have several
    sampled: Tensor | None = None  # B T, log-probabilities of sampled tokens when they were sampled
    advantages: Tensor | None = None  # B, of sampled answers; in validation their rewards
    scores: Tensor | None = None  # B, of texts to be embedded: how alike they are
    noise: Tensor | None = None  # B 2 T, of diffusion: uniform numbers that decide which tokens are masked
    numbers: Tensor | None = None  # B, the numbers of the examples, for logs and errors; stays on the CPU

    COUNTS: ClassVar[tuple[str, ...]] = ("n_targets", "n_shared", "n_tokens", "n_rows", "n_scored")

    @classmethod
    def of(cls, **arrays: NDArray[Any] | None) -> Batch:
        """Return the batch of some arrays, by name."""
        return cls(**{name: tensor(array) for name, array in arrays.items() if array is not None})

    @property
    def is_span(self) -> bool:
        """Return True if the targets of a row are its answer's first and last token, which count as one."""
        whole = not self.targets.is_floating_point()
        return whole and self.targets.ndim == 2 and self.targets.shape != self.ids.shape[:2]

    @property
    def one_each(self) -> bool:
        """Return True if a row counts as one target: an answer, a share of classes, a number, a pair."""
        paired = self.reference is not None or self.scores is not None or self.advantages is not None
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

    def twice(self) -> Batch:
        """Return every row twice, [2·B, ...]: two passes at once, each with dropout of its own."""
        return replace(self, **{name: torch.cat([value, value]) for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device; to a GPU it is copied asynchronously from pinned memory."""
        device = torch.device(device)
        copied = device.type == "cuda" and self.ids.device.type == "cpu"
        moved = replace(
            self,
            **{
                name: (value.pin_memory() if copied else value).to(device, non_blocking=copied)
                for name, value in self.tensors().items()
            },
        )
        # Counted here: on a device, counting would wait for it.
        moved.__dict__.update({name: getattr(self, name) for name in self.COUNTS})
        return moved

    def tensors(self) -> dict[str, Tensor]:
        """Return what a step reads, by name: what the model takes, and what the loss does."""
        names = ("targets", "reference", "vectors", "sampled", "advantages", "scores", "noise")
        others = {name: getattr(self, name) for name in names}
        return {**self.arguments(), **{name: tensor for name, tensor in others.items() if tensor is not None}}

    def arguments(self) -> dict[str, Tensor]:
        """Return what `model(**arguments)` takes."""
        names = ("ids", "mask", "source", "source_mask", "documents", "types", "axes")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Batches(ABC):
    """A data set as numbered batches.

    `at(7)` is always the same, so a run can be stopped and resumed anywhere.
    """

    per_epoch: int  # batches in which every example comes once
    waste: float = 0.0  # share of padding in an epoch
    notes: tuple[str, ...] = ()  # one sentence for each kind of example that was cut
    example: NDArray[np.int64] | None = None  # of each row, by number: its example; None: each row is one
    ragged: bool = False  # whether batches differ in length

    @abstractmethod
    def at(self, index: int) -> Batch:
        """Return batch 0, 1, 2, ... without end: epochs follow one another, each in its own order."""

    def all(self) -> Iterator[Batch]:
        """Yield one epoch; a validation set in a fixed order, every example exactly once."""
        return (self.at(index) for index in range(self.per_epoch))


def _real(ids: Tensor, mask: Tensor | None) -> int:
    """Return the number of tokens that are not padding; of pixels, the rows."""
    if ids.ndim != 2:
        return ids.shape[0]
    return ids.numel() if mask is None else int(mask.sum())


def generator(seed: int, purpose: int, number: int) -> np.random.Generator:
    """Return a generator that follows from the seed, its purpose, and the number of the epoch or batch."""
    return np.random.default_rng((seed % 2**64, purpose, number))


class FixedRows(Batches):
    """Rows of one length.

    Training batches all have the same size: one that begins at the end of an epoch continues into the next.
    """

    uses = 1  # steps that each batch is used for

    def __init__(self, n_rows: int, rows: int, seed: int, training: bool) -> None:
        self.n_rows, self.rows = n_rows, min(rows, n_rows)
        self.per_epoch = math.ceil(n_rows / self.rows)
        self.seed, self.training = seed, training
        self.order = lru_cache(maxsize=2)(self._order)  # a batch may need two epochs

    def _order(self, epoch: int) -> Ints:
        return generator(self.seed, ORDER, epoch).permutation(self.n_rows)

    def at(self, index: int) -> Batch:
        """See `Batches.at`."""
        random = generator(self.seed, BATCH, index)
        if not self.training:
            start = index % self.per_epoch * self.rows
            numbers = np.arange(start, min(start + self.rows, self.n_rows))
            return self._build(self.positions(0, numbers), random)
        epoch, start = divmod(index * self.rows, self.n_rows)
        positions = self.positions(epoch, self.order(epoch)[start : start + self.rows])
        if missing := self.rows - len(positions):
            positions = np.append(positions, self.positions(epoch + 1, self.order(epoch + 1)[:missing]))
        return self._build(positions, random)

    def positions(self, epoch: int, numbers: Ints) -> Ints:
        """Return where the rows with these numbers are in this epoch."""
        return numbers

    @abstractmethod
    def _build(self, positions: Ints, random: np.random.Generator) -> Batch:
        """Make the batch of the rows at these positions."""


class Redrawn(Batches):
    """Batches whose examples have other tokens in each epoch.

    Where the number of batches goes by tokens, it differs a little from epoch to epoch. Then an epoch ends
    where the first one did: a few batches come twice, or not at all.
    """

    def __init__(self, draw: Callable[[int], Batches]) -> None:
        """Take the batches of each epoch from `draw`, which makes them by the number of the epoch."""
        self.draw = lru_cache(maxsize=1)(draw)
        first = self.draw(0)
        self.per_epoch, self.waste, self.notes = first.per_epoch, first.waste, first.notes
        self.ragged = first.ragged

    def at(self, index: int) -> Batch:
        """See `Batches.at`."""
        epoch, number = divmod(index, self.per_epoch)
        batches = self.draw(epoch)
        return batches.at(epoch * batches.per_epoch + number % batches.per_epoch)


# Length buckets: examples of similar length share a batch, as wide as its longest row -----------------------


def rounded(lengths: Ints) -> Ints:
    """Round lengths up by an eighth at most: 1 to 16 stay, then 18, 20, ..., 32, 36, 40, ..."""
    exponent = np.frexp(np.maximum(lengths, 1) - 0.5)[1]  # 2**(exponent - 1) < length <= 2**exponent
    step = 2 ** np.maximum(exponent - 4, 0)
    return np.asarray((lengths + step - 1) // step * step, dtype=np.int64)


class Buckets:
    """Examples of similar length grouped into batches.

    Examples whose rounded lengths agree form a class. Batches are cut from the sorted classes, so each epoch
    has the same number of batches of the same size. Where an example stands in its class and the order of
    the batches are drawn for each epoch.
    """

    def __init__(self, sizes: Ints, rows: int, tokens: int | None) -> None:
        """Group examples of `sizes` [N, sides] tokens by `rows` to a batch, or by `tokens` with padding."""
        self.sizes = sizes
        bounds = rounded(sizes)
        # The key orders by the first side, then by the second.
        key = np.ravel_multi_index(tuple(bounds.T), tuple(bounds.max(0) + 1))
        _, first, self.class_of, counts = np.unique(
            key, return_index=True, return_inverse=True, return_counts=True
        )
        self.cuts = _cut(bounds[first], counts, rows, tokens)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    def order(self, random: np.random.Generator | None) -> tuple[Ints, Ints]:
        """Return the examples in the order of their batches, and the order of the batches.

        Both are shuffled by `random`, where it is given.
        """
        # Noise below 1 moves an example within its class, never out of it.
        noise = 0 if random is None else random.random(len(self.class_of))
        batches = np.arange(len(self)) if random is None else random.permutation(len(self))
        return np.argsort(self.class_of + noise, kind="stable"), batches

    def waste(self, order: Ints) -> float:
        """Return the share of padding in the batches of one epoch."""
        widest = np.maximum.reduceat(self.sizes[order], self.cuts[:-1], axis=0).sum(1)  # batches
        return 1 - float(self.sizes.sum()) / float((widest * np.diff(self.cuts)).sum())


def _cut(bounds: Ints, counts: Ints, rows: int, tokens: int | None) -> Ints:
    """Return where batches begin among examples sorted by class, and where the last one ends.

    `bounds` [classes, sides] are the padded lengths of each class.
    """
    if tokens is None:
        return np.append(np.arange(0, counts.sum(), rows), counts.sum())
    cuts, at, widest = [0], 0, [0] * bounds.shape[1]
    for bound, count in zip(bounds.tolist(), counts.tolist()):
        while count:
            wider = [max(pair) for pair in zip(widest, bound)]
            room = tokens // sum(wider) - (at - cuts[-1])
            if room < 1 and at > cuts[-1]:
                cuts.append(at)
                widest = [0] * len(wider)
                continue
            taken = min(count, max(1, room))  # an example that is too long has a batch to itself
            at, count, widest = at + taken, count - taken, wider
    return np.array([*cuts, at])


class Bucketed(Batches):
    """Examples of similar length in one batch; each example exactly once an epoch."""

    side = 0  # of the two sizes of an example: the one of `Batch.ids`
    ragged = True

    def __init__(self, setting: Setting, *sizes: Ints) -> None:
        """Group examples by `sizes`: their tokens [N] on each side, as they will be in a row."""
        self.setting, self.sizes, plan = setting, sizes, setting.plan
        self.buckets = Buckets(np.stack(sizes, axis=1), plan.batch_size, plan.batch_tokens)
        self.per_epoch = len(self.buckets)
        self.order = lru_cache(maxsize=1)(self._order)
        self.waste = self.buckets.waste(self.order(0)[0])

    def _order(self, epoch: int) -> tuple[Ints, Ints]:
        training, seed = self.setting.training, self.setting.seed
        return self.buckets.order(generator(seed, ORDER, epoch) if training else None)

    def at(self, index: int) -> Batch:
        """See `Batches.at`."""
        epoch, number = divmod(index, self.per_epoch)
        examples, batches = self.order(epoch if self.setting.training else 0)
        batch = batches[number]
        built = self._build(examples[self.buckets.cuts[batch] : self.buckets.cuts[batch + 1]])
        setting = self.setting
        if not (setting.training and setting.plan.token_dropout):
            return built
        random = generator(setting.seed, HIDDEN, index)
        chosen = random.random(built.ids.shape) < setting.plan.token_dropout
        chosen &= ~np.isin(built.ids.numpy(), list(setting.special.values()))
        unknown = setting.need("unk", "data.token_dropout")
        return replace(built, ids=built.ids.masked_fill(torch.from_numpy(chosen), unknown))

    def _build(self, numbers: Ints) -> Batch:
        """Make the batch of the examples with these numbers."""
        ids, mask = blank(self.sizes[self.side][numbers], self.setting.pad)
        return Batch.of(ids=ids, mask=mask, **{"numbers": numbers, **self._fill(ids, numbers)})

    @abstractmethod
    def _fill(self, ids: Ints, numbers: Ints) -> Mapping[str, NDArray[Any] | None]:
        """Write examples into padded rows [B, T]; return the targets and what else a `Batch` has, by name."""


def cut_note(longer: NDArray[np.bool_], what: str, length: int, more: str = "") -> tuple[str, ...]:
    """Return a note on how many examples were cut, if any."""
    count = int(longer.sum())
    note = f"{count:,} of {len(longer):,} {what} are longer than {length:,} tokens and were cut{more}"
    return (note,) if count else ()


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
    rows, tensors = size_above(len(batch)), dict[str, Tensor]()
    for name, mask_name in (("ids", "mask"), ("source", "source_mask")):
        ids, mask = getattr(batch, name), getattr(batch, mask_name)
        if ids is None:
            continue
        length = max(ids.shape[1], min(size_above(ids.shape[1]), longest))
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        tensors[name], wide = _pad(ids, rows, length, 0), _pad(real, rows, length, False)
        wide[len(batch) :, 0] = True
        tensors[mask_name] = wide
        if name == "ids" and batch.types is not None:
            tensors["types"] = _pad(batch.types, rows, length, 0)
        if name == "ids":
            tensors["targets"] = _pad(batch.targets, rows, length, IGNORE)
    if batch.numbers is not None:
        tensors["numbers"] = torch.cat([batch.numbers, batch.numbers[-1:].expand(rows - len(batch))])
    return _counted(replace(batch, **tensors), batch)


def scored_up(batch: Batch) -> Batch:
    """Fix how many positions are scored: all of them, or the next size above the number of targets."""
    if batch.targets.ndim < 2:
        return batch
    every = batch.targets.numel()
    fixed = _counted(replace(batch), batch)
    fixed.__dict__["n_scored"] = every if 2 * batch.n_targets > every else size_above(max(1, batch.n_targets))
    return fixed


def _counted(batch: Batch, of: Batch) -> Batch:
    batch.__dict__.update({name: getattr(of, name) for name in Batch.COUNTS})
    return batch


def _pad(values: Tensor, rows: int, length: int, value: int | bool) -> Tensor:
    """Pad [B, ...] to `rows`, and its second axis, where there is one, to `length`."""
    missing = rows - values.shape[0]
    ends = (0, missing) if values.ndim == 1 else (0, length - values.shape[1], 0, missing)
    return nnf.pad(values, ends, value=value)
