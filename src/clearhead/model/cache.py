"""The key/value cache: what earlier tokens left behind, handed in as a value and carried on from call to call.

Three forms, one interface. `Cache` grows as needed (or is given room beforehand and then allocates nothing more);
`FixedCache` has buffers of one size, for compiled steps. `WindowCache` keeps no more than a window of keys in the
layers that have one. The model calls `begin` before its first layer and `advance` after its last.

Keys are written in place: a cache is for inference, and gradients do not flow through it.

Shapes: B batch, K key/value heads, T new tokens, S all tokens, E head width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.model.masks import Tokens, join


class LayerKeys(Protocol):
    """The keys and values of one layer's self-attention."""

    @property
    def k(self) -> Tensor | None:
        """[B, K, S, E], or None before the first call."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of T new tokens; return those of all the tokens that `Cache.visible` describes."""

    def reorder(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]` was."""


class CrossKeys:
    """The keys and values of one layer's cross-attention: computed at the first call, read ever after."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    @property
    def filled(self) -> bool:
        """Has the first call been made?"""
        return self.k is not None

    def read(self) -> tuple[Tensor, Tensor]:
        """[B, K, S, E] twice."""
        assert self.k is not None and self.v is not None
        return self.k, self.v

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep what the first call computed."""
        self.k, self.v = k, v
        return k, v

    def reorder(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]` was."""
        k, v = self.read()
        self.k, self.v = k[rows], v[rows]


class Cache:
    """The growing form. `reserve` makes room for that many tokens at once; past it, room doubles."""

    def __init__(self, reserve: int = 0) -> None:
        self.reserve = reserve
        self.length = 0  # slots filled, padding included
        self.tokens: Tokens | None = None  # what stands in them
        self.packed = False  # do the tokens belong to several documents?
        self.source: Tokens | None = None  # what cross-attention reads
        self.layers: dict[int, LayerKeys] = {}
        self.cross: dict[int, CrossKeys] = {}
        self._visible: Tokens | None = None
        self._count = torch.empty(0, dtype=torch.long)

    @property
    def rows(self) -> int | None:
        """How many rows it holds; None before the first call."""
        return next((keys.k.shape[0] for keys in self.layers.values() if keys.k is not None), None)

    def layer(self, index: int, window: int | None) -> LayerKeys:
        """The keys of one layer."""
        if index not in self.layers:
            self.layers[index] = self._new_layer(window)
        return self.layers[index]

    def cross_layer(self, index: int) -> CrossKeys:
        """The cross-attention keys of one layer."""
        return self.cross.setdefault(index, CrossKeys())

    def _new_layer(self, window: int | None) -> LayerKeys:
        return GrowingKeys(self)

    def begin(self, tokens: Tokens) -> None:
        """Make ready for new tokens, before any layer has seen them."""
        self.packed = self.packed or tokens.documents is not None
        self._visible = tokens if self.tokens is None else self._join(self.tokens, tokens)

    def _join(self, before: Tokens, tokens: Tokens) -> Tokens:
        if not (before.plain and tokens.plain):
            return join(before, tokens)
        total = self.length + tokens.length
        if (
            self._count.shape[0] < total or self._count.device != tokens.order.device
        ):  # counted ahead, so that a step allocates nothing
            self._count = torch.arange(max(2 * total, self.reserve), device=tokens.order.device)
        count = self._count[None, :total]
        return Tokens(count, count, None, None, plain=True)

    def visible(self, window: int | None) -> Tokens:
        """The tokens whose keys `LayerKeys.update` returns in a layer with this window."""
        assert self._visible is not None
        return self._visible

    def aligned(self, bias: Tensor, window: int | None) -> Tensor:
        """A bias [B|1, H|1, T, S] over all tokens so far, laid out as the keys that `visible` describes."""
        return bias

    def advance(self) -> None:
        """Count the new tokens as read, after the last layer."""
        assert self._visible is not None
        self.tokens, self._visible = self._visible, None
        self.length = self.tokens.length

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """Let row i be what row `rows[i]` was, in every layer: `rows` [B'] of row numbers, B' of any size.

        `cross=False` leaves the cross-attention keys as they are: right where rows move only among copies of one source.
        """
        for keys in self.layers.values():
            keys.reorder(rows)
        self.tokens = rows_of(self.tokens, rows)
        if cross:
            for crossed in self.cross.values():
                crossed.reorder(rows)
            self.source = rows_of(self.source, rows)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` slots."""
        if not 0 <= length <= self.length:
            raise InputError(
                f"cannot crop a cache of {self.length} tokens to {length}: choose 0 to {self.length}"
            )
        self.length, self.packed = length, self.packed and length > 0
        self.tokens = _first(self.tokens, length) if length else None


class GrowingKeys:
    """Keys in a buffer with room to spare."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append; the result is a view of the buffer."""
        start, stop = self.cache.length, self.cache.length + k.shape[2]
        room = max(stop, self.cache.reserve)
        self.k, self.v = _with_room(self.k, k, start, room), _with_room(self.v, v, start, room)
        self.k.narrow(2, start, stop - start).copy_(k.detach())
        self.v.narrow(2, start, stop - start).copy_(v.detach())
        return self.k.narrow(2, 0, stop), self.v.narrow(2, 0, stop)

    def reorder(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]` was."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]


def _with_room(buffer: Tensor | None, new: Tensor, filled: int, room: int) -> Tensor:
    """`buffer`, or a copy of it with `room` or twice its own if it has less: [B, K, room, E]."""
    if buffer is not None and buffer.shape[2] >= room:
        return buffer
    if buffer is not None:
        room = max(room, 2 * buffer.shape[2])
    B, K, _, E = new.shape
    larger = new.new_empty(B, K, room, E)
    if buffer is not None:
        larger[:, :, :filled] = buffer[:, :, :filled]
    return larger


def rows_of(tokens: Tokens | None, rows: Tensor) -> Tokens | None:
    """The tokens of some rows; where all rows are alike nothing changes."""
    if tokens is None or tokens.plain:
        return tokens

    def pick(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[rows]

    order, positions = pick(tokens.order), pick(tokens.positions)
    assert order is not None and positions is not None
    return Tokens(order, positions, pick(tokens.real), pick(tokens.documents), plain=False)


def _first(tokens: Tokens | None, length: int) -> Tokens | None:
    """The tokens of the first slots."""
    if tokens is None:
        return None

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[:, :length]

    return Tokens(
        tokens.order[:, :length],
        tokens.positions[:, :length],
        cut(tokens.real),
        cut(tokens.documents),
        tokens.plain,
    )
