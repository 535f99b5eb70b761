"""Rows of unequal length: framed by special tokens, laid into padded arrays, packed; always as whole arrays.

Shapes: N examples, B rows of a batch, T tokens of a row.
"""

import math
from collections.abc import Callable, Sequence
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
    at: Ints | int = 0,
) -> Ints:
    """Write one text or two, framed, into `ids` [B, T], and their segment ids into `types` [B, T].

    The frame begins at column `at` [B]. Returns the column at which each text begins: [texts, B].
    """
    rows = np.arange(len(ids)) if rows is None else rows
    at, begins = np.broadcast_to(at, rows.shape), []
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


def blank(lengths: Ints, pad: int) -> tuple[Ints, NDArray[np.bool_] | None]:
    """Return padding for rows of the given lengths [B, T], and the mask where some of it will stay."""
    real = np.arange(int(lengths.max())) < lengths[:, None]
    return np.full(real.shape, pad, dtype=np.int64), None if real.all() else real


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


# Padded into one tensor, and grouped so that little of it is padding ----------------------------------------


Rows = Sequence[Sequence[int]]
# Tokens that each thread of a CPU reads together. Of more, what is between two matmuls leaves its cache, and
# short rows are padded to a longer one. Long rows are mostly of like length: four are read faster than one.
TOGETHER, LONG_TOGETHER, LONG_ROWS = 256, 1024, 4
ROWS = 32  # rows of a batch at most, where nobody says how many
DEVICE_TOGETHER = 16_384  # tokens of a batch on a GPU, padding included


def padded(rows: Rows, pad: int = 0, device: torch.device | None = None, left: bool = False) -> Tensor:
    """Return rows as one tensor [B, T], padded to the longest, and to one token at least."""
    length = _longest(rows)
    gaps = [[pad] * (length - len(row)) for row in rows]
    filled = [[*gap, *row] if left else [*row, *gap] for row, gap in zip(rows, gaps)]
    return torch.tensor(filled, device=device)


def real_tokens(rows: Rows, device: torch.device | None = None, left: bool = False) -> Tensor:
    """Return the mask [B, T] of padded rows, True = real token; an empty row has one."""
    length = _longest(rows)
    counts = torch.tensor([[max(1, len(row))] for row in rows], device=device)  # B 1
    slots = torch.arange(length, device=device)  # T
    return slots >= length - counts if left else slots < counts


def _longest(rows: Rows) -> int:
    return max([1, *map(len, rows)])


def by_length(lengths: Sequence[int], fits: Callable[[int, int], bool]) -> list[list[int]]:
    """Group the numbers of rows of like length, shortest first.

    `fits(rows, longest)` says whether so many rows, the longest of this length, may share a batch.
    """
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and fits(len(groups[-1]) + 1, lengths[place]):
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def for_device(lengths: Sequence[int], batch_size: int | None, device: torch.device) -> list[list[int]]:
    """Group the numbers of rows as a device reads them fastest, `batch_size` together at most.

    None: `ROWS` on a CPU; elsewhere as many as have `DEVICE_TOGETHER` tokens, so that the host, which hands
    over each operation, does not keep the device waiting.
    """
    on_cpu = device.type == "cpu"
    most_rows = batch_size or (ROWS if on_cpu else math.inf)

    def fits(count: int, longest: int) -> bool:
        most: float = math.inf if batch_size else DEVICE_TOGETHER
        if on_cpu:
            each = max(TOGETHER, min(LONG_ROWS * longest, LONG_TOGETHER))
            most = torch.get_num_threads() * each
        return count <= most_rows and count * longest <= most

    return by_length(lengths, fits)
