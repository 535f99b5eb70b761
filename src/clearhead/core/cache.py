"""The key/value cache: the keys and values of earlier tokens, handed in with each call and extended by it.

A `Cache` counts tokens; each layer keeps keys or a state in the way that `Cache.policy` chooses from its kind
of attention. `Cache` grows as needed, or reserves room at first and allocates nothing more. Other forms have
other policies: `WindowCache` keeps at most a window of keys in the layers that have one, `StreamCache` the
first tokens and the last ones (`variants.caches`), and `FixedCache` has buffers of one size, for compiled
steps. The model calls `begin` before its first layer and `advance` after its last.

Keys are written in place: a cache is for inference, and gradients do not flow through it.

Shapes: B batch, K key/value heads, T new tokens, S all tokens, E head width.
"""

from typing import Any, cast

import torch
from torch import Tensor

from clearhead.core.config.kinds import Kind
from clearhead.core.config.registry import Registry
from clearhead.core.masks import TokenInfo, join
from clearhead.errors import InputError, refuse


class LayerKV:
    """Keys and values of one attention in one layer, each [B, K, S, E], in buffers with room to spare.

    Those of a source, which cross-attention reads, are computed by the first call and read by later ones.
    """

    k: Tensor | None = None  # None before the first call
    v: Tensor | None = None
    source_cached = False  # whether those of a source are here already, so that attention computes none
    steps_back = True  # whether the last tokens can be forgotten again
    fixed_size = False  # whether it keeps no more for a longer sequence

    def __init__(self, cache: "Cache", of_source: bool = False) -> None:
        self.cache, self.of_source = cache, of_source

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of new tokens; return those of all the tokens that attention may see."""
        if self.of_source:
            self.k, self.v, self.source_cached = k, v, True
            return k, v
        start, stop = self.cache.length, self.cache.length + k.shape[2]
        room = max(stop, self.cache.reserve)
        self.k, self.v = with_room(self.k, k, start, room), with_room(self.v, v, start, room)
        self.k.narrow(2, start, stop - start).copy_(k.detach() if k.requires_grad else k)
        self.v.narrow(2, start, stop - start).copy_(v.detach() if v.requires_grad else v)
        return self.k.narrow(2, 0, stop), self.v.narrow(2, 0, stop)

    def buffers(self) -> tuple[Tensor, Tensor]:
        """Return the buffers of keys and of values."""
        if self.k is None or self.v is None:
            raise InputError("this layer of the cache is empty: run the model with the cache first")
        return self.k, self.v

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that is kept."""
        return () if self.k is None or self.v is None else (self.k, self.v)

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]

    def follow(self, tokens: TokenInfo | None) -> None:
        """Forget all but `tokens`, those that a cropped cache still has; slots past them are overwritten."""


# For layers that keep a state, or the latest keys, in place of all keys; or a state next to them.
AT = "clearhead.variants.caches"
STATES: Registry[Any] = Registry(
    {"state": f"{AT}:LayerState", "latest": f"{AT}:latest", "both": f"{AT}:both"}
)


class Cache:
    """The growing form. `reserve` makes room for that many tokens at once; past it, room doubles."""

    n_sink_tokens = 0  # how many of the first tokens stay, and move with the last ones (StreamCache)
    _visible: TokenInfo  # those of the cache and of the call in progress

    def __init__(self, reserve: int = 0, keys: type[LayerKV] = LayerKV) -> None:
        """Make an empty cache; `keys` is how layers that keep keys store them."""
        wrong = not isinstance(reserve, int) or reserve < 0
        refuse(wrong, f"reserve {reserve!r:.40} is no number of tokens: use Cache(), or Cache(512)")
        self.reserve, self.keys = reserve, keys
        self.length = 0  # slots filled, padding included
        self.tokens: TokenInfo | None = None  # the tokens in them
        self.packed = False  # whether the tokens belong to several documents
        self.source: TokenInfo | None = None  # the tokens that cross-attention reads
        self.rings: dict[Kind, TokenInfo] = {}  # the tokens in the ring of each kind, where layers have one
        self.layers: dict[int, LayerKV] = {}  # the state that layer n keeps next to its keys is at ~n
        self.cross: dict[int, LayerKV] = {}
        self._count = torch.empty(0, dtype=torch.long)

    @property
    def rows(self) -> int | None:
        """Number of rows; None before the first call."""
        return next((keys.k.shape[0] for keys in self.layers.values() if keys.k is not None), None)

    @property
    def gone(self) -> int:
        """Number of first slots that `tokens` no longer describes: windows and states do without them."""
        return 0 if self.tokens is None else max(0, self.length - self.tokens.length)

    def layer(self, index: int, kind: Kind) -> LayerKV:
        """Return the self-attention keys of one layer."""
        if index not in self.layers:
            self.layers[index] = self.policy(index, kind)
        if kind.masked and kind.stateful:
            return cast(LayerKV, STATES["both"](self, index))
        return self.layers[index]

    def policy(self, index: int, kind: Kind) -> LayerKV:
        """Choose how a layer of this kind keeps what it has read."""
        return cast(LayerKV, self.keys(self) if kind.masked else STATES["state"]())

    def cross_layer(self, index: int) -> LayerKV:
        """Return the cross-attention keys of one layer."""
        return self.cross.setdefault(index, LayerKV(self, of_source=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the self-attention buffers of all layers, with room to spare."""
        return sum(x.nbytes for keys in self.layers.values() for x in keys.tensors())

    def begin(self, tokens: TokenInfo) -> None:
        """Prepare for new tokens, before the first layer."""
        self.packed = self.packed or tokens.documents is not None
        self._visible = tokens if self.tokens is None else self._join(self.tokens, tokens)

    def _join(self, before: TokenInfo, tokens: TokenInfo) -> TokenInfo:
        if not (before.plain and tokens.plain):
            return join(before, tokens)
        total, device = self.length + tokens.length, tokens.order.device
        # Count further than needed, so that most steps allocate nothing.
        if self._count.shape[0] < total or self._count.device != device:
            self._count = torch.arange(max(2 * total, self.reserve), device=device)
        count = self._count[None, :total]
        return TokenInfo(count, count, None, None, plain=True)

    def visible(self, kind: Kind) -> TokenInfo:
        """Return the tokens whose keys `LayerKV.update` returns in a layer of this kind."""
        return self._visible

    def aligned(self, bias: Tensor, kind: Kind) -> Tensor:
        """Lay out a bias over all tokens so far, [B|1, H|1, T, S], as the keys that `visible` describes."""
        return bias

    def advance(self) -> None:
        """Count the new tokens as read, after the last layer."""
        # The new tokens: those visible now that were not there before the call.
        self.length += self._visible.length - (0 if self.tokens is None else self.tokens.length)
        self.tokens = self._visible
        # Where every layer forgets, descriptions of old tokens may go, too; plain ones are only counted.
        if not self.tokens.plain and all(keys.fixed_size for keys in self.layers.values()):
            self.tokens = STATES["latest"](self.tokens, max((kind.slots for kind in self.rings), default=1))

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """Replace row i by row `rows[i]` in every layer; `rows` [B'] may have any length.

        `cross=False` leaves the cross-attention keys alone, for rows that move among copies of one source.
        """
        for keys in self.layers.values():
            keys.reorder(rows)
        self.tokens = None if self.tokens is None else self.tokens.of_rows(rows)
        if cross:
            self.reorder_sources(rows)

    def reorder_sources(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]` in the cross-attention keys."""
        for keys in self.cross.values():
            keys.reorder(rows)
        self.source = None if self.source is None else self.source.of_rows(rows)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` slots."""
        refuse(
            not 0 <= length <= self.length,
            f"cannot crop a cache of {self.length} tokens to {length}: choose 0 to {self.length}",
        )
        if length == self.length:
            return
        refuse(
            length > 0 and not all(keys.steps_back for keys in self.layers.values()),
            f"a layer of this model keeps a state, not keys, and cannot step back to {length} of "
            f"{self.length} tokens: read them anew",
        )
        refuse(
            0 < length <= self.gone,
            f"this cache has forgotten the first {self.gone} slots, and cannot step back to {length}: "
            "use Cache() to step back",
        )
        kept = length - self.gone
        self.tokens = self.tokens.map(lambda x: x[:, :kept]) if self.tokens is not None and length else None
        self.length, self.packed = length, self.packed and length > 0
        for keys in self.layers.values():
            keys.follow(self.tokens)


def with_room(buffer: Tensor | None, new: Tensor, filled: int, room: int) -> Tensor:
    """Return `buffer` if it has `room` slots, else a copy with at least twice as many: [B, K, room, E]."""
    slots = 0 if buffer is None else buffer.shape[2]
    if buffer is not None and slots >= room:
        return buffer
    B, K, _, E = new.shape
    larger = new.new_empty(B, K, max(room, 2 * slots), E)
    if buffer is not None:
        larger[:, :, :filled] = buffer[:, :, :filled]
    return larger
