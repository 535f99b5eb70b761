"""The key/value cache: what earlier tokens left behind, handed in as a value and carried on from call to call.

Three forms, one interface. `Cache` grows as needed (or is given room beforehand and then allocates nothing more);
`FixedCache` has buffers of one size for ever, for compiled steps; `WindowCache` keeps no more than a window of keys in
the layers that have one. The model calls `begin` before its first layer and `advance` after its last.

Keys are written in place: a cache is for inference, and gradients do not flow through it.

Shapes: B batch, K key/value heads, T new tokens, S all tokens, E head width.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.errors import InputError
from clearhead.model.masks import Tokens, join


class LayerKeys(Protocol):
    """The keys and values of one layer's self-attention."""

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
        self.source: Tokens | None = None  # what cross-attention reads
        self.layers: dict[int, LayerKeys] = {}
        self.cross: dict[int, CrossKeys] = {}
        self._visible: Tokens | None = None
        self._count = torch.empty(0, dtype=torch.long)

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
        self._visible = tokens if self.tokens is None else self._join(self.tokens, tokens)

    def _join(self, before: Tokens, tokens: Tokens) -> Tokens:
        if not (before.plain and tokens.plain):
            return join(before, tokens)
        total = self.length + tokens.length
        if self._count.shape[0] < total or self._count.device != tokens.order.device:  # counted ahead, so that a step allocates nothing
            self._count = torch.arange(max(2 * total, self.reserve), device=tokens.order.device)
        count = self._count[None, :total]
        return Tokens(count, count, None, None, plain=True)

    def visible(self, window: int | None) -> Tokens:
        """The tokens whose keys `LayerKeys.update` returns in a layer with this window."""
        assert self._visible is not None
        return self._visible

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
        self.tokens = _rows(self.tokens, rows)
        if cross:
            for crossed in self.cross.values():
                crossed.reorder(rows)
            self.source = _rows(self.source, rows)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` slots."""
        if not 0 <= length <= self.length:
            raise InputError(f"cannot crop a cache of {self.length} tokens to {length}: choose 0 to {self.length}")
        self.length = length
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
        self.k[:, :, start:stop], self.v[:, :, start:stop] = k.detach(), v.detach()
        return self.k[:, :, :stop], self.v[:, :, :stop]

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


class FixedCache(Cache):
    """Buffers for `capacity` tokens whose addresses and shapes never change, written at a cursor that is a tensor."""

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(capacity)
        plan = config.decoder
        if plan is None:
            raise InputError("a model without a decoder has nothing to cache: call it without cache")
        assert config.d_head and config.d_value
        self.capacity = capacity
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        count = torch.zeros(batch, capacity, dtype=torch.long, device=device)
        self.tokens = Tokens(count, count.clone(), torch.zeros_like(count, dtype=torch.bool), count.clone(), plain=False)
        for layer in range(plan.n_layers):
            heads = len(config.kept_heads(f"{plan.prefix}blocks.{layer}.attention", plan.n_heads)) * plan.n_kv_heads // plan.n_heads
            k = torch.zeros(batch, heads, capacity, config.d_head, dtype=dtype, device=device)
            v = torch.zeros(batch, heads, capacity, config.d_value, dtype=dtype, device=device)
            self.layers[layer] = FixedKeys(self, k, v)

    def begin(self, tokens: Tokens) -> None:
        """Write what the new tokens are into the buffers."""
        slots = self.tokens
        assert slots is not None and slots.real is not None and slots.documents is not None
        if not torch.compiler.is_compiling() and self.length + tokens.length > self.capacity:
            raise InputError(
                f"the fixed cache holds {self.capacity} tokens, has {self.length} and was given {tokens.length} more: make a larger one"
            )
        batch = slots.order.shape[0]
        self.index = self.cursor + torch.arange(tokens.length, device=self.cursor.device)
        real = torch.ones_like(tokens.order, dtype=torch.bool) if tokens.real is None else tokens.real
        documents = torch.zeros_like(tokens.order) if tokens.documents is None else tokens.documents
        slots.order.index_copy_(1, self.index, tokens.order.expand(batch, -1))
        slots.positions.index_copy_(1, self.index, tokens.positions.expand(batch, -1))
        slots.real.index_copy_(1, self.index, real.expand(batch, -1))
        slots.documents.index_copy_(1, self.index, documents.expand(batch, -1))

    def visible(self, window: int | None) -> Tokens:
        """Every slot; those not yet filled are not real."""
        assert self.tokens is not None
        return self.tokens

    def advance(self) -> None:
        """Move the cursor."""
        self.cursor.add_(self.index.shape[0])
        if not torch.compiler.is_compiling():
            self.length += self.index.shape[0]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` slots."""
        if not 0 <= length <= self.length:
            raise InputError(f"cannot crop a cache of {self.length} tokens to {length}: choose 0 to {self.length}")
        assert self.tokens is not None and self.tokens.real is not None
        self.tokens.real[:, length:] = False
        self.cursor.fill_(length)
        self.length = length

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """As in `Cache`, in place: the number of rows must stay."""
        tokens = self.tokens
        assert tokens is not None and tokens.real is not None and tokens.documents is not None
        for buffer in (tokens.order, tokens.positions, tokens.real, tokens.documents):
            buffer.copy_(buffer[rows])
        super().reorder(rows, cross)
        self.tokens = tokens


class FixedKeys:
    """Keys in a buffer that is never replaced."""

    def __init__(self, cache: FixedCache, k: Tensor, v: Tensor) -> None:
        self.cache, self.k, self.v = cache, k, v

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write at the cursor; the result is the whole buffer."""
        self.k.index_copy_(2, self.cache.index, k.detach().to(self.k.dtype))
        self.v.index_copy_(2, self.cache.index, v.detach().to(self.v.dtype))
        return self.k, self.v

    def reorder(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]` was, in place."""
        self.k.copy_(self.k[rows])
        self.v.copy_(self.v[rows])


class WindowCache(Cache):
    """Layers with a window keep that many keys and no more, each row by its own count of real tokens; others grow."""

    def __init__(self, reserve: int = 0) -> None:
        super().__init__(reserve)
        self.rings: dict[int, Tokens] = {}  # by window: what stands in its slots, and in one more that takes the refuse
        self.slots: dict[int, Tensor] = {}  # by window: where each new token goes, B T
        self._before: dict[int, Tokens] = {}
        self._new: Tokens | None = None

    def _new_layer(self, window: int | None) -> LayerKeys:
        return GrowingKeys(self) if window is None else RingKeys(self, window)

    def begin(self, tokens: Tokens) -> None:
        """Make ready for new tokens; rings are turned when a layer with that window asks."""
        super().begin(tokens)
        self._new = tokens
        self.slots.clear()

    def visible(self, window: int | None) -> Tokens:
        """A ring with the new token in it, or, for several tokens, the ring as it was and then they."""
        if window is None:
            return super().visible(None)
        assert self._new is not None
        if window not in self.slots:
            self._turn(window, self._new)
        return self.rings[window] if self._new.length == 1 else join(self._before[window], self._new)

    def _turn(self, window: int, tokens: Tokens) -> None:
        """Write the new tokens into the ring of this window: those still within it at the end, the others to the last slot."""
        order = tokens.order
        real = torch.ones_like(order, dtype=torch.bool) if tokens.real is None else tokens.real
        batch = order.shape[0]
        old = self.rings.get(window)
        if old is None:
            empty = torch.zeros(batch, window + 1, dtype=torch.long, device=order.device)
            old = Tokens(empty, empty, empty.bool(), empty, plain=False)
        elif old.order.shape[0] != batch:  # rows alike until now, or alike from now on
            batch = max(batch, old.order.shape[0])
        last = torch.where(real, order, -1).amax(1, keepdim=True)
        slot = torch.where(real & (order > last - window), order % window, window).expand(batch, -1)

        def written(ring: Tensor, new: Tensor) -> Tensor:
            return ring.expand(batch, -1).scatter(1, slot, new.expand(batch, -1))

        assert old.real is not None and old.documents is not None
        documents = torch.zeros_like(order) if tokens.documents is None else tokens.documents
        ring_real = written(old.real, real)
        ring_real[:, window] = False
        self._before[window] = old
        self.slots[window] = slot
        self.rings[window] = Tokens(
            written(old.order, order), written(old.positions, tokens.positions), ring_real, written(old.documents, documents), plain=False
        )

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """As in `Cache`."""
        super().reorder(rows, cross)
        self.rings = {window: ring for window, old in self.rings.items() if (ring := _rows(old, rows)) is not None}

    def crop(self, length: int) -> None:
        """As in `Cache`, as long as no window has begun to forget."""
        for window in self.rings:
            if self.length > window and length < self.length:
                raise InputError(f"a window cache of {window} has forgotten what a crop to {length} needs: use Cache() to step back")
        super().crop(length)
        for window, ring in self.rings.items():
            assert ring.real is not None
            kept = Tokens(ring.order, ring.positions, ring.real & (ring.order < self._kept(length)), ring.documents, plain=False)
            self.rings[window] = kept

    def _kept(self, length: int) -> Tensor:
        """How many real tokens each row has left: [B|1, 1]."""
        if self.tokens is None:
            return torch.zeros(1, 1, dtype=torch.long)
        if self.tokens.real is None:
            return torch.full((1, 1), length, device=self.tokens.order.device)
        return self.tokens.real.sum(1, keepdim=True)


class RingKeys:
    """Keys of the last `window` real tokens of each row, and one slot for what is not kept."""

    def __init__(self, cache: WindowCache, window: int) -> None:
        self.cache, self.window = cache, window
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """One token: turn the ring, return it. Several: return the ring and them, then turn it."""
        B, K, T, _ = k.shape
        if self.k is None or self.v is None:
            self.k = k.new_zeros(B, K, self.window + 1, k.shape[3])
            self.v = v.new_zeros(B, K, self.window + 1, v.shape[3])
        slot = self.cache.slots[self.window].expand(B, T)[:, None, :, None]
        k, v = k.detach(), v.detach()
        whole = None if T == 1 else (torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2))
        self.k.scatter_(2, slot.expand(-1, K, -1, k.shape[3]), k)
        self.v.scatter_(2, slot.expand(-1, K, -1, v.shape[3]), v)
        return whole or (self.k, self.v)

    def reorder(self, rows: Tensor) -> None:
        """Let row i be what row `rows[i]` was."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]


def _rows(tokens: Tokens | None, rows: Tensor) -> Tokens | None:
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

    return Tokens(tokens.order[:, :length], tokens.positions[:, :length], cut(tokens.real), cut(tokens.documents), tokens.plain)
