"""The key/value cache: the keys and values of earlier tokens, handed in with each call and extended by it.

Three forms share one interface. `Cache` grows as needed, or reserves room at first and allocates nothing
more. `FixedCache` has buffers of one size, for compiled steps. `WindowCache` keeps at most a window of keys
in the layers that have one. The model calls `begin` before its first layer and `advance` after its last.

Keys are written in place: a cache is for inference, and gradients do not flow through it.

Shapes: B batch, K key/value heads, T new tokens, S all tokens, E head width.
"""

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.model.masks import Tokens, join, no_tokens


class LayerKeys:
    """The keys and values of one attention, each [B, K, S, E], or None before the first call."""

    k: Tensor | None = None
    v: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of T new tokens; return those of all the tokens that `Cache.visible` describes."""
        raise NotImplementedError

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the buffers of keys and of values."""
        if self.k is None or self.v is None:
            raise InputError("this layer of the cache is empty: run the model with the cache first")
        return self.k, self.v

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]


class CrossKeys(LayerKeys):
    """The keys and values of one layer's cross-attention: computed by the first call, read by later ones."""

    @property
    def filled(self) -> bool:
        """Whether the first call has been made."""
        return self.k is not None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep what the first call computed."""
        self.k, self.v = k, v
        return k, v


class Cache:
    """The growing form. `reserve` makes room for that many tokens at once; past it, room doubles."""

    def __init__(self, reserve: int = 0) -> None:
        self.reserve = reserve
        self.length = 0  # slots filled, padding included
        self.tokens: Tokens | None = None  # the tokens in them
        self.packed = False  # whether the tokens belong to several documents
        self.source: Tokens | None = None  # the tokens that cross-attention reads
        self.layers: dict[int, LayerKeys] = {}
        self.cross: dict[int, CrossKeys] = {}
        self._visible = no_tokens()  # those of the cache and of the call in progress
        self._count = torch.empty(0, dtype=torch.long)

    @property
    def rows(self) -> int | None:
        """Number of rows; None before the first call."""
        return next((keys.k.shape[0] for keys in self.layers.values() if keys.k is not None), None)

    def layer(self, index: int, window: int | None) -> LayerKeys:
        """Return the self-attention keys of one layer."""
        if index not in self.layers:
            self.layers[index] = self._new_layer(window)
        return self.layers[index]

    def cross_layer(self, index: int) -> CrossKeys:
        """Return the cross-attention keys of one layer."""
        return self.cross.setdefault(index, CrossKeys())

    def _new_layer(self, window: int | None) -> LayerKeys:
        return GrowingKeys(self)

    def begin(self, tokens: Tokens) -> None:
        """Prepare for new tokens, before the first layer."""
        self.packed = self.packed or tokens.documents is not None
        self._visible = tokens if self.tokens is None else self._join(self.tokens, tokens)

    def _join(self, before: Tokens, tokens: Tokens) -> Tokens:
        if not (before.plain and tokens.plain):
            return join(before, tokens)
        total, device = self.length + tokens.length, tokens.order.device
        # Count ahead, so that most steps allocate nothing.
        if self._count.shape[0] < total or self._count.device != device:
            self._count = torch.arange(max(2 * total, self.reserve), device=device)
        count = self._count[None, :total]
        return Tokens(count, count, None, None, plain=True)

    def visible(self, window: int | None) -> Tokens:
        """Return the tokens whose keys `LayerKeys.update` returns in a layer with this window."""
        return self._visible

    def aligned(self, bias: Tensor, window: int | None) -> Tensor:
        """Lay out a bias over all tokens so far, [B|1, H|1, T, S], as the keys that `visible` describes."""
        return bias

    def advance(self) -> None:
        """Count the new tokens as read, after the last layer."""
        self.tokens, self.length = self._visible, self._visible.length

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """Replace row i by row `rows[i]` in every layer; `rows` [B'] may have any length.

        `cross=False` leaves the cross-attention keys alone, for rows that move among copies of one source.
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
        self._check_crop(length)
        self.length, self.packed = length, self.packed and length > 0
        kept = self.tokens.map(lambda x: x[:, :length]) if self.tokens is not None else None
        self.tokens = kept if length else None

    def _check_crop(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise InputError(
                f"cannot crop a cache of {self.length} tokens to {length}: choose 0 to {self.length}"
            )


class GrowingKeys(LayerKeys):
    """Keys in a buffer with room to spare."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values; return views of the buffers."""
        start, stop = self.cache.length, self.cache.length + k.shape[2]
        room = max(stop, self.cache.reserve)
        self.k, self.v = _with_room(self.k, k, start, room), _with_room(self.v, v, start, room)
        self.k.narrow(2, start, stop - start).copy_(k.detach())
        self.v.narrow(2, start, stop - start).copy_(v.detach())
        return self.k.narrow(2, 0, stop), self.v.narrow(2, 0, stop)


def _with_room(buffer: Tensor | None, new: Tensor, filled: int, room: int) -> Tensor:
    """Return `buffer` if it has `room` slots, else a copy with at least twice as many: [B, K, room, E]."""
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
    """Return the tokens of some rows; where all rows are alike, nothing changes."""
    return None if tokens is None else tokens.of_rows(rows)
