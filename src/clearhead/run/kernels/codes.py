"""Weights of few bits, laid out for the kernels of a GPU.

On disk they lie in tiles for a CPU (`quant.grid`). Here a row lies in one piece, in words of 32 bits. Four
words are a unit of 32 columns of 4 bits, or of 16 of 8 bits. Its columns are dealt out to the words in pairs:
word 0 has columns 0, 1, 8 and 9 in its bytes, word 1 has 2, 3, 10 and 11. Of 4 bits, these are in the lower
halves of bytes, and those 16 columns further in the upper ones. Codes are 8, or 128, more than what they
stand for. So a thread that has a unit multiplies four bytes at a time, and reads their inputs in order.

Every run of 32 columns has a scale of its own, also where a group is several runs.

Shapes: N width out, D width in, W words of a row, R runs of a row.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.run.quant.grid import BLOCK, Quantized


class Codes(NamedTuple):
    """A weight [N, D] for a GPU: rows of words, and of scales and offsets by run."""

    bits: int
    columns: int  # D
    words: Tensor  # N W of int32
    scales: Tensor  # N R, bfloat16
    offsets: Tensor | None  # N R, bfloat16

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers that the codes stand for: [N, D]."""
        codes = self.words.view(torch.uint8).view(len(self.words), -1, 1, 4, 2, 2)  # unit, half, word, pair
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=2)
        codes = codes.transpose(3, 4).flatten(1)
        wide = codes[:, : self.columns].int() - (1 << (self.bits - 1))
        scales, offsets = (
            None if one is None else one.float().repeat_interleave(BLOCK, 1)[:, : self.columns]
            for one in (self.scales, self.offsets)
        )
        assert scales is not None
        made = wide * scales
        return (made if offsets is None else made + offsets).to(dtype)


def laid(parts: Sequence[Quantized]) -> Codes:
    """Return weights of one grid and width, one below the other."""
    grid, columns = parts[0].grid, parts[0].columns
    room = math.ceil(columns / BLOCK) * BLOCK
    codes = torch.cat([_padded(part.integers(), room) for part in parts]).int() + (1 << (grid.bits - 1))
    dealt = codes.view(len(codes), -1, 8 // grid.bits, 2, 4, 2).transpose(3, 4)  # unit, half, word, pair
    whole = dealt[:, :, 0] if grid.bits == 8 else dealt[:, :, 0] | dealt[:, :, 1] << 4
    words = whole.to(torch.uint8).flatten(1).view(torch.int32)
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
