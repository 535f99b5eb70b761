"""The windowed form of the cache: a ring of keys in each layer that has a window.

A token is written to slot `order % window` of its row, so each row forgets by its own count of real tokens.
One more slot at the end takes what is not kept: padding, and tokens that leave the window within one call.

Shapes: B batch, K key/value heads, T new tokens, E head width.
"""

from dataclasses import replace

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.model.cache import Cache, GrowingKeys, LayerKeys
from clearhead.model.masks import Slots, Tokens, empty_slots, join, no_tokens


class WindowCache(Cache):
    """Layers with a window keep the keys of the last `window` real tokens of each row; other layers grow."""

    def __init__(self, reserve: int = 0) -> None:
        super().__init__(reserve)
        self.rings: dict[int, Slots] = {}  # by window: the tokens in its ring
        self.slots: dict[int, Tensor] = {}  # by window: the slot of each new token, B T
        self._before: dict[int, Slots] = {}  # by window: the ring before the call in progress
        self._new = no_tokens()

    def _new_layer(self, window: int | None) -> LayerKeys:
        return GrowingKeys(self) if window is None else RingKeys(self, window)

    def begin(self, tokens: Tokens) -> None:
        """Prepare for new tokens; each ring is written when the first layer with its window asks."""
        super().begin(tokens)
        self._new = tokens
        self.slots.clear()

    def visible(self, window: int | None) -> Tokens:
        """Return the ring with one new token in it, or the ring before the call and several new tokens."""
        if window is None:
            return super().visible(None)
        if window not in self.slots:
            self._write(window, self._new)
        return self.rings[window] if self._new.length == 1 else join(self._before[window], self._new)

    def aligned(self, bias: Tensor, window: int | None) -> Tensor:
        """Return the bias in layers without a window; refuse it where a ring lacks some of its keys."""
        if window is not None:
            raise InputError(f"bias speaks of keys that a window cache of {window} forgets: use Cache()")
        return bias

    def _write(self, window: int, tokens: Tokens) -> None:
        """Write the new tokens into the ring of this window."""
        order, real = tokens.order, tokens.real_mask()
        old = self.rings.get(window) or empty_slots(order.shape[0], window + 1, order.device)
        batch = max(order.shape[0], old.order.shape[0])  # 1 on either side where all rows are alike
        last = torch.where(real, order, -1).amax(1, keepdim=True)
        slot = torch.where(real & (order > last - window), order % window, window).expand(batch, -1)

        def written(ring: Tensor, new: Tensor) -> Tensor:
            return ring.expand(batch, -1).scatter(1, slot, new.expand(batch, -1))

        ring_real = written(old.real, real)
        ring_real[:, window] = False
        self._before[window], self.slots[window] = old, slot
        self.rings[window] = Slots(
            written(old.order, order),
            written(old.positions, tokens.positions),
            ring_real,
            written(old.documents, tokens.document_ids()),
        )

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """Replace row i by row `rows[i]` in every layer and ring."""
        super().reorder(rows, cross)
        self.rings = {window: ring.of_rows(rows) for window, ring in self.rings.items()}

    def crop(self, length: int) -> None:
        """Forget all but the first `length` slots, as long as no window has begun to forget."""
        for window in self.rings:
            if self.length > window and length < self.length:
                raise InputError(
                    f"a window cache of {window} has forgotten what a crop to {length} needs: "
                    "use Cache() to step back"
                )
        super().crop(length)
        for window, ring in self.rings.items():
            kept = ring.order < self._real_count(length, ring.order.device)
            self.rings[window] = replace(ring, real=ring.real & kept)

    def _real_count(self, length: int, device: torch.device) -> Tensor:
        """Count the real tokens that each row has left: [B|1, 1]."""
        if self.tokens is None:
            return torch.zeros(1, 1, dtype=torch.long, device=device)
        if self.tokens.real is None:
            return torch.full((1, 1), length, device=device)
        return self.tokens.real.sum(1, keepdim=True)


class RingKeys(LayerKeys):
    """Keys of the last `window` real tokens of each row, and one slot for what is not kept."""

    def __init__(self, cache: WindowCache, window: int) -> None:
        self.cache, self.window = cache, window

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write into the ring; return it, or for several tokens the ring as it was and then the new keys."""
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
