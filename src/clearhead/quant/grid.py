"""The numbers that a weight of 8 or 4 bits can be: w = scale · code + offset, each group with its own.

A group is a run of columns of one row, that is, inputs of one output. Codes are whole numbers, from -127 to
127 or from -8 to 7. Scales and offsets are bfloat16, and codes are chosen after these were rounded. Without
an offset a grid is symmetric.

Four bits are kept two in a byte: byte j of 32 columns has column j in its lower half and column 16 + j in its
upper half, each 8 more than the code. Rows are filled up to a multiple of 32 columns with code 0.

Shapes: N width out, D width in, C columns with those that fill up, G groups of a row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.errors import refuse

BLOCK = 32  # columns that kernels take at a time: groups are multiples of it
BITS = (4, 8)
GROUPS = (32, 64, 128, 256)


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
        return -(-columns // self.group)

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
    columns: int  # D
    codes: Tensor  # N C of int8, or N C/2 of uint8 with two in each
    scales: Tensor  # N G, bfloat16
    offsets: Tensor | None  # N G, bfloat16

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers that the codes stand for: [N, D]."""
        wide = torch.promote_types(dtype, torch.float32)
        codes = unpack(self.codes) if self.grid.bits == 4 else self.codes
        groups = self.grid.split(codes[:, : self.columns].to(wide))
        groups = groups * self.scales.to(wide)[..., None]
        if self.offsets is not None:
            groups = groups + self.offsets.to(wide)[..., None]
        return groups.flatten(1)[:, : self.columns].to(dtype).contiguous()


def stored(grid: Grid, columns: int, codes: Tensor, scales: Tensor, offsets: Tensor | None) -> Quantized:
    """Return codes [N, D or more] as they are kept, with their scales and offsets [N, G]."""
    room = -(-columns // BLOCK) * BLOCK
    whole = nnf.pad(codes[:, :columns], (0, room - columns)).to(torch.int8)
    return Quantized(grid, columns, pack(whole) if grid.bits == 4 else whole.contiguous(), scales, offsets)


def nearest_codes(grid: Grid, weight: Tensor) -> Quantized:
    """Round each weight to the nearest number of its group's grid: [N, D]."""
    groups = grid.split(weight)
    scales, offsets = grid.fit(groups)
    return stored(grid, weight.shape[1], grid.round(groups, scales, offsets).flatten(1), scales, offsets)


def pack(codes: Tensor) -> Tensor:
    """Put two codes from -8 to 7 in each byte: int8 [N, C] -> uint8 [N, C/2]."""
    halves = (codes + 8).to(torch.uint8).view(codes.shape[0], -1, 2, BLOCK // 2)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)


def unpack(packed: Tensor) -> Tensor:
    """Take two codes from each byte: uint8 [N, C/2] -> int8 [N, C]."""
    pairs = packed.view(packed.shape[0], -1, 1, BLOCK // 2)
    return torch.cat([pairs & 15, pairs >> 4], dim=2).flatten(1).to(torch.int8) - 8


def bf16(x: Tensor, up: bool = False) -> Tensor:
    """Round to bfloat16; `up`: away from zero, so that a grid reaches as far as it should."""
    rounded = x.to(torch.bfloat16)
    if not up:
        return rounded
    short = rounded.to(x.dtype).abs() < x.abs()
    return torch.where(short, (x * (1 + 2**-8)).to(torch.bfloat16), rounded)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
