"""The windowed form of the cache: a ring of keys in each layer that has a window.

Shapes: B batch, K key/value heads, T new tokens, E head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.model.cache import Cache, GrowingKeys, LayerKeys, rows_of
from clearhead.model.masks import Tokens, join


class WindowCache(Cache):
    """Layers with a window keep that many keys and no more, each row by its own count of real tokens; others grow."""

    def __init__(self, reserve: int = 0) -> None:
        super().__init__(reserve)
        self.rings: dict[
            int, Tokens
        ] = {}  # by window: what stands in its slots, and in one more that takes the refuse
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

    def aligned(self, bias: Tensor, window: int | None) -> Tensor:
        """As in `Cache`, where nothing is forgotten."""
        if window is not None:
            raise InputError(f"bias speaks of keys that a window cache of {window} forgets: use Cache()")
        return bias

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
            written(old.order, order),
            written(old.positions, tokens.positions),
            ring_real,
            written(old.documents, documents),
            plain=False,
        )

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """As in `Cache`."""
        super().reorder(rows, cross)
        self.rings = {
            window: ring for window, old in self.rings.items() if (ring := rows_of(old, rows)) is not None
        }

    def crop(self, length: int) -> None:
        """As in `Cache`, as long as no window has begun to forget."""
        for window in self.rings:
            if self.length > window and length < self.length:
                raise InputError(
                    f"a window cache of {window} has forgotten what a crop to {length} needs: use Cache() to step back"
                )
        super().crop(length)
        for window, ring in self.rings.items():
            assert ring.real is not None
            real = ring.real & (ring.order < self._kept(length, ring.order.device))
            self.rings[window] = Tokens(ring.order, ring.positions, real, ring.documents, plain=False)

    def _kept(self, length: int, device: torch.device) -> Tensor:
        """How many real tokens each row has left: [B|1, 1]."""
        if self.tokens is None:
            return torch.zeros(1, 1, dtype=torch.long, device=device)
        if self.tokens.real is None:
            return torch.full((1, 1), length, device=device)
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
