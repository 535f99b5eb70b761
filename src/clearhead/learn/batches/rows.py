"""Rows of unequal length: padded, framed by special tokens, grouped by length, packed; always as whole
arrays.

Shapes: N examples, B rows of a batch, T tokens of a row.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Stretches(NamedTuple):
    """Rows of unequal length: a stretch of a flat array for each."""

    values: NDArray[Any]  # flat, as on disk
    starts: Ints  # B
    lengths: Ints  # B

    def take(self, numbers: Ints) -> Self:
        """Return the rows with these numbers."""
        return self._replace(starts=self.starts[numbers], lengths=self.lengths[numbers])

    def cut(self, longest: Ints | int) -> Self:
        """Return the beginning of each row: `longest` tokens of it at most."""
        return self._replace(lengths=np.minimum(self.lengths, longest))


class Frame(NamedTuple):
    """The special tokens that a tokenizer puts around one text or two, and the segment ids of all tokens."""

    special: Sequence[Sequence[int]] = ((), ())  # before the first text, between two, after the last
    special_types: Sequence[Sequence[int]] = ((), ())
    text_types: Sequence[int] = (0,)  # of each text

    @property
    def size(self) -> int:
        """Return how many tokens it adds."""
        return sum(map(len, self.special))

    @property
    def typed(self) -> bool:
        """Return True if any token has another segment id than 0."""
        return any(chain(*self.special_types, self.text_types))


BARE = Frame()


def ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """Return, for each token of rows of the given lengths, its row and its place in the row."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def lay(out: NDArray[Any], at: Ints | int, part: Stretches, rows: Ints | None = None) -> None:
    """Copy each row of `part` into its row of `out` [B, T], or into `rows`, from column `at` [B] on."""
    which, within = ragged(part.lengths)
    columns = np.broadcast_to(at, part.lengths.shape)[which] + within
    out[which if rows is None else rows[which], columns] = part.values[part.starts[which] + within]


def frame_rows(
    frame: Frame,
    parts: list[Stretches],
    ids: NDArray[Any],
    types: NDArray[Any] | None = None,
    rows: Ints | None = None,
) -> Ints:
    """Write one text or two, framed, into `ids` [B, T] and their segment ids into `types` [B, T].

    Returns the column at which each text begins: [texts, B].
    """
    rows = np.arange(len(ids)) if rows is None else rows
    at, begins = np.zeros(len(rows), dtype=np.int64), []
    for number, (fixed, kinds) in enumerate(zip(frame.special, frame.special_types)):
        columns = at[:, None] + np.arange(len(fixed))
        ids[rows[:, None], columns] = np.array(fixed, dtype=ids.dtype)
        if types is not None and fixed:
            types[rows[:, None], columns] = kinds
        at = at + len(fixed)
        if number < len(parts):
            begins.append(at)
            lay(ids, at, parts[number], rows)
            if types is not None and frame.text_types[number]:
                which, within = ragged(parts[number].lengths)
                types[rows[which], at[which] + within] = frame.text_types[number]
            at = at + parts[number].lengths
    return np.stack(begins)


def share_room(first: Ints, second: Ints, room: int) -> tuple[Ints, Ints]:
    """Cut the lengths of two texts so that both fit into `room` tokens: the longer one is cut first."""
    cut = np.minimum(first, np.maximum(room - second, room - room // 2))
    return cut, np.minimum(second, room - cut)


# Length buckets --------------------------------------------------------------------------------------------


def rounded(lengths: Ints) -> Ints:
    """Round lengths up by an eighth at most: 1 to 16 stay, then 18, 20, ..., 32, 36, 40, ..."""
    exponent = np.frexp(np.maximum(lengths, 1) - 0.5)[1]  # 2**(exponent - 1) < length <= 2**exponent
    step = 2 ** np.maximum(exponent - 4, 0)
    return np.asarray((lengths + step - 1) // step * step, dtype=np.int64)


class Buckets:
    """Examples of similar length grouped into batches.

    Examples whose rounded lengths agree form a class. Batches are cut from the sorted classes, so each epoch
    has the same number of batches of the same size. The place of an example in its class and the order of the
    batches are drawn for each epoch.
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


# Packing ---------------------------------------------------------------------------------------------------


def pack(lengths: Ints, room: int) -> tuple[Ints, int]:
    """Pack pieces of the given lengths, none above `room`, into few rows of `room` tokens.

    Returns the row of each piece and the number of rows. The longest come first, each into the fullest row
    that still has room for it (best fit, decreasing).
    """
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]  # by the room they have left
    open_rooms = 0  # bit r is set when some row has r tokens left
    row_of, n_rows = np.empty(len(lengths), dtype=np.int64), 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = open_rooms >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                open_rooms ^= 1 << left
        else:
            left, row, n_rows = room, n_rows, n_rows + 1
        row_of[piece] = row
        rows_with[left - length].append(row)
        open_rooms |= 1 << (left - length)
    return row_of, n_rows
