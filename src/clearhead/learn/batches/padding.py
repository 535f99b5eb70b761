"""Rows of unequal length: padded into one tensor, and grouped so that little of it is padding.

Shapes: B rows, T length.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rows = Sequence[Sequence[int]]
# Tokens that each thread of a CPU reads together. Of more, what is between two products leaves its cache, and
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
    """Group the places of rows of like length, shortest first.

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
    """Group the places of rows as a device reads them fastest, `batch_size` together at most.

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
