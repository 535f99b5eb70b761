"""The numbers that a weight of 8 or 4 bits can be: w = scale · code + offset, each group with its own.

A group is a run of columns of one row, that is, inputs of one output. Codes are whole numbers, from -127 to
127 or from -8 to 7. Scales and offsets are bfloat16, and codes are chosen after these were rounded. Without
an offset a grid is symmetric.

Weights lie as matmuls read them, four rows of four columns to a tile, so that 16 numbers meet four inputs:
rows are filled up to a multiple of 4 and columns to one of 32, with code 0. Four bits are kept two in a byte:
of 32 columns, tile j of the first 16 is in the lower halves and tile j of the last 16 in the upper halves,
each 8 more than the code. The scales of four rows lie side by side too.

Shapes: N width out, D width in, G groups of a row, R = N/4 and K = D/32, rounded up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import refuse

BLOCK = 32  # columns that kernels take at a time: groups are multiples of it
TILE = 4  # rows, and columns, of a tile
BITS = (4, 8)
GROUPS = (32, 64, 128, 256)
WIDTHS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of grids that are tried, besides the one that spans a group
FITS = 3  # times that each is measured, and fitted between


@dataclass(frozen=True)
class Grid:
    """How weights are kept: `bits` for each, `group` columns to a scale, `symmetric` without an offset."""

    bits: int = 4
    group: int = 32
    symmetric: bool = True

    def __post_init__(self) -> None:
        refuse(self.bits not in BITS, f"bits {self.bits!r} is not known: choose from {_listed(BITS)}")
        refuse(self.group not in GROUPS, f"group {self.group!r} is not known: choose from {_listed(GROUPS)}")

    @property
    def least(self) -> int:
        """The smallest code."""
        return -127 if self.bits == 8 else -8

    @property
    def most(self) -> int:
        """The largest code."""
        return 127 if self.bits == 8 else 7

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight, with its share of scale and offset."""
        return self.bits + 16 * (1 if self.symmetric else 2) / self.group

    def groups(self, columns: int) -> int:
        """Return the number of groups of a row."""
        return math.ceil(columns / self.group)

    def split(self, weight: Tensor) -> Tensor:
        """Cut rows into groups, the last filled up with its own last number: [N, D] -> [N, G, group]."""
        more = self.groups(weight.shape[1]) * self.group - weight.shape[1]
        filled = torch.cat([weight, weight[:, -1:].expand(-1, more)], dim=1) if more else weight
        return filled.reshape(weight.shape[0], -1, self.group)

    def round(self, groups: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
        """Return the nearest codes: [N, G, group] with scales and offsets [N, G] -> [N, G, group]."""
        shifted = groups if offsets is None else groups - offsets.to(groups.dtype)[..., None]
        divisor = scales.to(groups.dtype)[..., None]
        codes = shifted / torch.where(divisor == 0, 1.0, divisor)
        return codes.round().clamp(self.least, self.most)

    def fit(self, groups: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scales and offsets that span the numbers of each group: [N, G, group] -> [N, G] twice."""
        if not self.symmetric:
            low, high = groups.amin(-1), groups.amax(-1)
            scales = bf16((high - low) / (self.most - self.least), up=True)
            middle = scales.to(groups.dtype) * (self.most + self.least) / 2
            return scales, bf16((high + low) / 2 - middle)
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        # Four bits have one code more below zero: the largest number takes it, by a scale of either sign.
        divisor = self.least if self.bits == 4 else self.most
        return bf16(largest / divisor if self.bits == 4 else largest.abs() / divisor, up=True), None


class Quantized(NamedTuple):
    """A weight [N, D] on a grid."""

    grid: Grid
    rows: int  # N
    columns: int  # D
    codes: Tensor  # R K·128 of int8, or R K·64 of uint8 with two in each
    scales: Tensor  # R G 4, bfloat16
    offsets: Tensor | None  # R G 4, bfloat16

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantized weight: [N, D]."""
        offsets = None if self.offsets is None else self.by_row(self.offsets)
        return self._numbers(self.integers(), self.by_row(self.scales), offsets, dtype)

    def integers(self) -> Tensor:
        """Return the codes by row: int8 [N, 32·K]."""
        return (unpack(self.codes) if self.grid.bits == 4 else _unlaid(self.codes))[: self.rows]

    def by_row(self, scales: Tensor) -> Tensor:
        """Take scales or offsets out of their tiles: [R, G, 4] -> [N, G]."""
        return scales.transpose(1, 2).flatten(0, 1)[: self.rows]

    def of_rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return some rows of the weight: [n] -> [n, D]."""
        codes = self.codes[rows // TILE]
        wide = unpack(codes) if self.grid.bits == 4 else _unlaid(codes)  # 4n C
        chosen = torch.arange(len(rows), device=rows.device) * TILE + rows % TILE
        scales = self.scales[rows // TILE, :, rows % TILE]
        offsets = None if self.offsets is None else self.offsets[rows // TILE, :, rows % TILE]
        return self._numbers(wide[chosen], scales, offsets, dtype)

    def _numbers(self, codes: Tensor, scales: Tensor, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Dequantize codes [n, C] with scales [n, G]: [n, D]."""
        wide = torch.promote_types(dtype, torch.float32)
        groups = self.grid.split(codes[:, : self.columns].to(wide)) * scales.to(wide)[..., None]
        if offsets is not None:
            groups = groups + offsets.to(wide)[..., None]
        return groups.flatten(1)[:, : self.columns].to(dtype).contiguous()


def stored(grid: Grid, columns: int, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Quantized:
    """Return codes [N, D or more] with their scales and offsets [N, G] as they are kept."""
    rows = len(codes)
    room, more = math.ceil(columns / BLOCK) * BLOCK, -rows % TILE
    whole = nnf.pad(codes[:, :columns], (0, room - columns, 0, more)).to(torch.int8)
    kept = pack(whole) if grid.bits == 4 else _laid(whole)
    laid = [
        nnf.pad(part, (0, 0, 0, more)).view(-1, TILE, part.shape[1]).transpose(1, 2).contiguous()
        for part in (scales, offsets)
        if part is not None
    ]
    return Quantized(grid, rows, columns, kept, laid[0], None if offsets is None else laid[1])


def nearest_codes(grid: Grid, weight: Tensor) -> Quantized:
    """Round each weight to the nearest number of its group's grid: [N, D]."""
    groups = grid.split(weight)
    scales, offsets = grid.fit(groups)
    return stored(grid, weight.shape[1], grid.round(groups, scales, offsets).flatten(1), scales, offsets)


def fitted(grid: Grid, groups: Tensor, importance: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return scales and offsets of least squared error, each column of a group by its importance.

    Grids of several widths are tried, and each is fitted to the codes that it gives by least squares. Eight
    bits are fine enough to span a group. [N, G, group] with [G, group] -> [N, G] twice.
    """
    spanning, middle = grid.fit(groups)
    if grid.bits == 8:
        return spanning, middle
    importance = importance.clamp(min=float(importance.mean()) * 1e-6 + 1e-30)
    least, best, best_offsets = torch.full_like(spanning, torch.inf, dtype=torch.float32), spanning, middle
    for width in WIDTHS:
        scales, offsets = bf16(spanning.float() * width), middle
        for _ in range(FITS):
            codes = grid.round(groups, scales, offsets)
            error = ((groups - _grown(codes, scales, offsets)).square() * importance).sum(-1)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, scales, best)
            if offsets is not None and best_offsets is not None:
                best_offsets = torch.where(better, offsets, best_offsets)
            scales, offsets = _least_squares(groups, codes, importance, scales, offsets)
    return best, best_offsets


def _least_squares(
    groups: Tensor, codes: Tensor, importance: Tensor, scales: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Fit scales and offsets to codes: [N, G, group] twice, [G, group], [N, G] twice -> [N, G] twice."""
    centre = mean = torch.zeros(())
    if offsets is not None:
        total = importance.sum(-1)
        centre, mean = ((x * importance).sum(-1) / total for x in (codes, groups))
        codes, groups = codes - centre[..., None], groups - mean[..., None]
    weighed = codes * importance
    size = (weighed * codes).sum(-1)
    scales = bf16(torch.where(size > 0, (weighed * groups).sum(-1) / size.clamp(min=1e-30), scales.float()))
    return scales, None if offsets is None else bf16(mean - scales.float() * centre)


def _grown(codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Dequantize codes: [N, G, group]."""
    made = codes * scales.float()[..., None]
    return made if offsets is None else made + offsets.float()[..., None]


def numbers(grid: Grid, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Dequantize codes [N, D], before they are packed into tiles: [N, D]."""
    return _grown(grid.split(codes), scales, offsets).flatten(1)[:, : codes.shape[1]]


def _laid(codes: Tensor) -> Tensor:
    """Lay rows out in tiles: [4R, C] -> [R, 4C]."""
    tiles = codes.view(len(codes) // TILE, TILE, -1, TILE)  # R 4 C/4 4
    return tiles.transpose(1, 2).flatten(1).contiguous()


def _unlaid(laid: Tensor) -> Tensor:
    """Take rows out of their tiles: [R, 4C] -> [4R, C]."""
    return laid.view(len(laid), -1, TILE, TILE).transpose(1, 2).flatten(2).flatten(0, 1)


def pack(codes: Tensor) -> Tensor:
    """Lay rows of codes from -8 to 7 out in tiles, two in each byte: int8 [4R, C] -> uint8 [R, 2C]."""
    halves = (_laid(codes) + 8).to(torch.uint8).view(len(codes) // TILE, -1, 2, BLOCK * TILE // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)


def unpack(packed: Tensor) -> Tensor:
    """Take codes out of bytes and tiles: uint8 [R, 2C] -> int8 [4R, C]."""
    pairs = packed.view(len(packed), -1, 1, BLOCK * TILE // 2)
    return _unlaid(torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1).to(torch.int8) - 8)


def bf16(x: Tensor, up: bool = False) -> Tensor:
    """Round to bfloat16; `up`: away from zero, so that a grid reaches as far as it should."""
    rounded = x.to(torch.bfloat16)
    if not up:
        return rounded
    short = rounded.to(x.dtype).abs() < x.abs()
    return torch.where(short, (x * (1 + 2**-8)).to(torch.bfloat16), rounded)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


# The same for the kernels of a GPU --------------------------------------------------------------------------
#
# There a row lies in one block, in words of 32 bits. Four words are a unit of 32 columns of 4 bits, or of 16
# of 8 bits. Its columns are dealt out to the words in pairs: word 0 has columns 0, 1, 8 and 9 in its bytes,
# word 1 has 2, 3, 10 and 11. Of 4 bits, these are in the lower halves of bytes, and those 16 columns further
# in the upper ones. Codes are 8, or 128, more than what they stand for. So a thread that has a unit
# multiplies four bytes at a time, and reads their inputs in order.
#
# Every run of 32 columns has a scale of its own, also where a group is several runs.
#
# Shapes: N width out, D width in, W words of a row, R runs of a row.


class Codes(NamedTuple):
    """A weight [N, D] for a GPU: rows of words, and of scales and offsets by run."""

    bits: int
    columns: int  # D
    words: Tensor  # N W of int32
    scales: Tensor  # N R, bfloat16
    offsets: Tensor | None  # N R, bfloat16

    def weight(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantized weight: [N, D]."""
        codes = self.words.view(torch.uint8).view(len(self.words), -1, 1, 4, 2, 2)  # unit, half, word, pair
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=2)
        codes = codes.transpose(3, 4).flatten(1)
        wide = codes[:, : self.columns].int() - (1 << (self.bits - 1))
        scales, offsets = (
            None if part is None else part.float().repeat_interleave(BLOCK, 1)[:, : self.columns]
            for part in (self.scales, self.offsets)
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
