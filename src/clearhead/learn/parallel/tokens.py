"""The tokens of each row, shared out among processes that each have equally many.

In a decoder a later token has more to attend to. So each of N processes has two of 2N chunks, the n-th and
the n-th from the end: together they cost everyone the same. In an encoder each has one of N chunks. Rows of
other lengths are padded at their end, with tokens that nobody sees and nothing counts.

Shapes: B batch (1 where all rows are alike), T tokens of a row, N processes, t tokens of each of them.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.core.masks import Tokens

TILES = 1024  # of a row, at most


@dataclass(frozen=True)
class RowShares:
    """Which tokens of a row each process has."""

    length: int  # T
    processes: int  # N
    zigzag: bool  # two chunks each, of the beginning and of the end

    @property
    def tile(self) -> int:
        """Number of tokens that are sent, or skipped, together: a power of two."""
        return 1 << (math.ceil(self.length / TILES) - 1).bit_length()

    @property
    def chunk(self) -> int:
        """Number of tokens that follow each other: whole tiles."""
        return math.ceil(self.length / (self.processes * self.chunks * self.tile)) * self.tile

    @property
    def chunks(self) -> int:
        """Number of chunks of each process."""
        return 2 if self.zigzag else 1

    @property
    def each(self) -> int:
        """Number of tokens of each process, t."""
        return self.chunks * self.chunk

    def slots(self, place: int | None = None, device: torch.device | None = None) -> Tensor:
        """Return the slots of one process [t], or of all, one after the other [N·t]; from T on: padding."""
        order = torch.arange(self.processes * self.each, device=device).view(-1, self.chunk)
        if self.zigzag:
            order = torch.stack([order[: self.processes], order[self.processes :].flip(0)], 1)
        order = order.reshape(self.processes, -1)
        return order.flatten() if place is None else order[place]

    def pick(self, x: Tensor, place: int | None = None, fill: float | None = None) -> Tensor:
        """Return the tokens of one process or of all: [B, T, ...] -> [B, t or N·t, ...].

        Padding is a copy of the last token or, of [B, T], `fill`.
        """
        slots = self.slots(place, x.device)
        found = x[:, slots.clamp(max=self.length - 1)]
        return found if fill is None else found.masked_fill(slots >= self.length, fill)

    def joined(self, x: Tensor) -> Tensor:
        """Return rows in their own order from those of all processes: [B, N·t, ...] -> [B, T, ...]."""
        return x[:, self.slots(None, x.device).argsort()[: self.length]]

    def spread(self, tokens: Tokens) -> Tokens:
        """Return the tokens of all processes, one after the other; padding is spelled out."""
        padded = self.processes * self.each > self.length
        real = None if tokens.real is None and not padded else self.pick(tokens.real_mask(), fill=False)
        return replace(tokens.map(self.pick), real=real, plain=False)


@dataclass(frozen=True, kw_only=True)
class OwnTokens(Tokens):
    """The tokens of one process, and the rows that they are of."""

    whole: Tokens
    layout: RowShares


def own_tokens(whole: Tokens, layout: RowShares, place: int) -> OwnTokens:
    """Return the tokens of one process."""
    own = part(layout.spread(whole), place * layout.each, layout.each)
    return OwnTokens(
        own.order, own.positions, own.real, own.documents, plain=False, whole=whole, layout=layout
    )


def part(tokens: Tokens, start: int, count: int) -> Tokens:
    """Return `count` tokens from one on."""
    return tokens.map(lambda x: x[:, start : start + count])
