"""Length buckets: examples of similar length share a batch, as wide as its longest row.

Shapes: N examples, B rows, T tokens of a row.
"""

from abc import abstractmethod
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from clearhead.learn.batches.batch import Batch, Batches
from clearhead.learn.batches.encoding import Setting
from clearhead.learn.batches.ragged import Ints
from clearhead.learn.batches.windows import ORDER, generator


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
        return self._build(examples[self.buckets.cuts[batch] : self.buckets.cuts[batch + 1]])

    @abstractmethod
    def _build(self, numbers: Ints) -> Batch:
        """Make the batch of the examples with these numbers."""


def cut_note(longer: NDArray[np.bool_], what: str, length: int, more: str = "") -> tuple[str, ...]:
    """Return a note on how many examples were cut, if any."""
    count = int(longer.sum())
    note = f"{count:,} of {len(longer):,} {what} are longer than {length:,} tokens and were cut{more}"
    return (note,) if count else ()
