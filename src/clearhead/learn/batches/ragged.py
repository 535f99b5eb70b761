"""Ragged rows: framed by special tokens, laid into padded arrays, packed; always as whole arrays.

Shapes: N examples, B rows of a batch, T tokens of a row.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class Stretches(NamedTuple):
    """Rows of unequal length: a stretch of a flat array for each."""

    values: NDArray[Any]  # flat, as on disk
    starts: Ints  # B
    lengths: Ints  # B

    def take(self, numbers: Ints) -> Self:
        """Return the rows with these numbers."""
        return self._replace(starts=self.starts[numbers], lengths=self.lengths[numbers])

    def cut(self, longest: Ints | int, left: bool = False) -> Self:
        """Return `longest` tokens of each row at most: its beginning or, cut at the `left`, its end."""
        lengths = np.minimum(self.lengths, longest)
        return self._replace(starts=self.starts + (self.lengths - lengths if left else 0), lengths=lengths)


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
    """Return, for each token of rows of the given lengths, its row and its position in the row."""
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


def tensor(array: NDArray[Any]) -> Tensor:
    """Return integers, truth values or numbers as a model takes them."""
    dtype = {"b": np.bool_, "f": np.float32}.get(array.dtype.kind, np.int64)
    return torch.from_numpy(array.astype(dtype))


def blank(lengths: Ints, pad: int) -> tuple[Ints, Tensor | None]:
    """Return padding for rows of the given lengths [B, T], and the mask where some of it will stay."""
    real = np.arange(int(lengths.max())) < lengths[:, None]
    return np.full(real.shape, pad, dtype=np.int64), None if real.all() else tensor(real)


def pack(lengths: Ints, room: int) -> tuple[Ints, int]:
    """Pack chunks of the given lengths, none above `room`, into few rows of `room` tokens.

    Returns the row of each chunk and the number of rows. The longest come first, each into the fullest row
    that still has room for it (best fit, decreasing).
    """
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]  # by the room they have left
    open_rooms = 0  # bit r is set when some row has r tokens left
    row_of, n_rows = np.empty(len(lengths), dtype=np.int64), 0
    for chunk in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[chunk])
        fitting = open_rooms >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                open_rooms ^= 1 << left
        else:
            left, row, n_rows = room, n_rows, n_rows + 1
        row_of[chunk] = row
        rows_with[left - length].append(row)
        open_rooms |= 1 << (left - length)
    return row_of, n_rows
