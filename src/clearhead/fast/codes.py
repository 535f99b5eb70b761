"""Weights of few bits, laid out for the kernels of a GPU.

On disk they lie in tiles for a CPU (`quant.grid`). Here a row lies in one piece, in words of 32 bits. A block
of 32 words has 8 runs of 32 columns of 4 bits, or 4 runs of 8 bits: word j has column j of each run, that of
the first in its lowest bits, each 8, or 128, more than the code. So all words of a block meet a run at once.

Every run has a scale of its own, also where a group is several runs: a thread of a kernel that has four words
of a block reads the scales of all their codes at once.

Shapes: N width out, D width in, W words of a row, R runs of a row.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.quant.grid import BLOCK, Quantized


class Codes(NamedTuple):
    """A weight [N, D] for a GPU: rows of words, and of scales and offsets by run."""

    bits: int
    columns: int  # D
    words: Tensor  # N W of int32
    scales: Tensor  # N R, bfloat16
    offsets: Tensor | None  # N R, bfloat16

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers that the codes stand for: [N, D]."""
        runs = [self.words >> (self.bits * number) for number in range(32 // self.bits)]
        codes = torch.stack([run.view(len(run), -1, BLOCK) for run in runs], dim=2).flatten(1)  # N C
        codes = (codes & ((1 << self.bits) - 1)) - (1 << (self.bits - 1))
        scales, offsets = (
            None if one is None else one.float().repeat_interleave(BLOCK, 1)[:, : self.columns]
            for one in (self.scales, self.offsets)
        )
        assert scales is not None
        made = codes[:, : self.columns] * scales
        return (made if offsets is None else made + offsets).to(dtype)


def laid(parts: Sequence[Quantized]) -> Codes:
    """Return weights of one grid and width, one below the other."""
    grid, columns = parts[0].grid, parts[0].columns
    block = BLOCK * 32 // grid.bits
    room = math.ceil(columns / block) * block
    codes = torch.cat([_padded(part.integers(), room) for part in parts]).int() + (1 << (grid.bits - 1))
    words = torch.zeros(1, dtype=torch.int32, device=codes.device)
    for number, run in enumerate(codes.view(len(codes), -1, 32 // grid.bits, BLOCK).unbind(2)):
        words = words | run << (number * grid.bits)
    words = words.flatten(1).contiguous()
    scales = torch.cat([part.by_row(part.scales) for part in parts])
    offsets = [part.by_row(part.offsets) for part in parts if part.offsets is not None]
    runs, times = room // BLOCK, grid.group // BLOCK
    return Codes(
        grid.bits,
        columns,
        words,
        _padded(scales.repeat_interleave(times, 1), runs),
        _padded(torch.cat(offsets).repeat_interleave(times, 1), runs) if offsets else None,
    )


def _padded(rows: Tensor, columns: int) -> Tensor:
    """Return rows of so many columns: [N, D] -> [N, columns], cut or filled up with zeros."""
    return nnf.pad(rows, (0, columns - rows.shape[1]))
