"""The fixed-size form of the cache: buffers that never move, for steps that are compiled or recorded.

Shapes: B batch, K key/value heads, T new tokens, S slots, E head width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core.cache import Cache, LayerKV
from clearhead.core.config import ModelConfig
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.masks import TokenInfo
from clearhead.core.positions import Rotary
from clearhead.errors import InputError, refuse
from clearhead.variants.caches import LayerState, Slots, empty_slots
from clearhead.variants.shortcuts import last_shape


class FixedCache(Cache):
    """Buffers for `capacity` tokens whose addresses and shapes never change, written at a cursor."""

    tokens: Slots

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        source: int = 0,
    ) -> None:
        """Allocate the buffers; `source` reserves as many slots for the source that `adopt` brings."""
        super().__init__(capacity)
        spec = config.decoder
        if spec is None:
            raise InputError("a model without a decoder has nothing to cache: call it without cache")
        self.capacity = capacity
        # A tensor, so that a compiled or captured step moves it.
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.index = torch.zeros(1, dtype=torch.long, device=device)  # slots of the call in progress
        self.tokens = empty_slots(batch, capacity, device)
        self.angles: dict[int | None, Rotary] = {}  # by reach: the rotation of every position, where used

        wide = torch.promote_types(dtype, torch.float32)  # of states

        def room(attention: str, kind: Kind, slots: int) -> list[Tensor]:
            heads, *widths = kind.kept(spec, attention)
            return [torch.zeros(batch, heads, slots, E, dtype=dtype, device=device) for E in widths]

        for layer, kind in enumerate(spec.kinds):
            block = f"{spec.prefix}blocks.{layer}"
            if kind.masked:
                self.layers[layer] = FixedKV(self, kind, room(f"{block}.attention", kind, capacity))
            if kind.stateful:
                shapes = [(batch, *shape) for shape in spec.state_shapes(layer)]
                begins = kind.state_begins or (0.0,) * len(shapes)
                states = [torch.full(*each, dtype=wide, device=device) for each in zip(shapes, begins)]
                self.layers[~layer if kind.masked else layer] = LayerState(states, begins)
            if source and spec.cross:
                self.cross_layer(layer).update(*room(f"{block}.cross", FULL, source))
        if spec.recalls:
            last = torch.zeros(batch, *last_shape(spec), dtype=wide, device=device)
            self.layers[spec.n_layers] = LayerState([last], (0.0,))
        if source and spec.cross:
            count = torch.arange(source, device=device)[None]
            self.source = TokenInfo(count, count, empty_slots(batch, source, device).real, None, plain=False)

    def adopt(self, cache: Cache) -> None:
        """Copy a growing cache into the first rows of this one; the other rows stay empty."""
        self.begin_at(cache.length)
        self.adopt_rows(cache, torch.arange(cache.rows or 0, device=self.cursor.device))

    def begin_at(self, length: int) -> None:
        """Forget all tokens; whatever is adopted ends before slot `length`, where the next token goes."""
        self.tokens.real.zero_()
        if self.source is not None and self.source.real is not None:
            self.source.real.zero_()
        self.cursor.fill_(length)
        self.length = length

    def adopt_rows(self, cache: Cache, rows: Tensor, lengths: Tensor | None = None) -> None:
        """Copy a growing cache into these rows [B], up to the cursor.

        `lengths` [B]: how many tokens each row has, in a cache whose padding is on the right.
        """
        if cache.tokens is None:
            raise InputError("the cache to adopt is empty: run the model with it first")
        slots, order, positions, real, documents = (
            slice(self.length - cache.length, self.length),
            *(given.expand(len(rows), -1) for given in cache.tokens.tensors()),
        )
        index = None  # B T: where each slot's token is in the cache
        if lengths is not None:
            index = torch.arange(cache.length, device=rows.device) - (cache.length - lengths)[:, None]
            real, index = index >= 0, index.clamp(min=0)
            order, positions, documents = (
                given.take_along_dim(index, 1) for given in (order, positions, documents)
            )
        for layer, mine in self.layers.items():
            theirs = cache.layers[layer]
            if isinstance(mine, LayerState) and isinstance(theirs, LayerState):
                for buffer, given in zip(mine.state, theirs.state):
                    buffer[rows] = given
                continue
            refuse(
                type(theirs) is not LayerKV,
                "a window cache has forgotten what a fixed cache keeps: adopt a Cache()",
            )
            for buffer, given in zip(mine.buffers(), theirs.buffers()):
                given = given[:, :, : cache.length]
                buffer[rows, :, slots] = (
                    given if index is None else given.take_along_dim(index[:, None, :, None], 2)
                )
        told = slice(self.length - order.shape[1], self.length)  # a cache of states alone tells the last ones
        for buffer, given in zip(self.tokens.tensors(), (order, positions, real, documents)):
            buffer[rows, told] = given
        if cache.source is None:
            return
        if self.source is None or self.source.real is None:
            raise InputError("this fixed cache has no room for a source: make it with source=its length")
        length = cache.source.length
        self.source.real[rows, :length] = cache.source.real_mask().expand(len(rows), -1)
        for layer, crossed in self.cross.items():
            for buffer, given in zip(crossed.buffers(), cache.cross[layer].buffers()):
                buffer[rows, :, :length] = given

    def begin(self, tokens: TokenInfo) -> None:
        """Write order, positions, padding and documents of the new tokens into the buffers."""
        self.packed = self.packed or tokens.documents is not None
        states = any(isinstance(keys, LayerState) for keys in self.layers.values())
        refuse(self.packed and states, "a fixed cache keeps no states of packed documents: use Cache()")
        if not torch.compiler.is_compiling():
            self.room_for(tokens.length)
        self.index = self.cursor + torch.arange(tokens.length, device=self.cursor.device)
        for buffer, values in zip(self.tokens.tensors(), tokens.tensors()):
            buffer.index_copy_(1, self.index, values.expand(buffer.shape[0], -1))

    def new_slots(self, kind: Kind | None, count: int) -> Tensor:
        """Return the slots of the `count` tokens of the call in progress."""
        return self.index

    def room_for(self, count: int) -> None:
        """Refuse to take more tokens than there are slots for."""
        refuse(
            self.length + count > self.capacity,
            f"the fixed cache holds {self.capacity} tokens, has {self.length} and was given {count} more: "
            "make a larger one",
        )

    def visible(self, kind: Kind) -> TokenInfo:
        """Return every slot; those not yet filled are not real."""
        return self.tokens

    def aligned(self, bias: Tensor, kind: Kind) -> Tensor:
        """Pad a bias over all tokens so far with 0 for the slots not yet filled."""
        return nnf.pad(bias, (0, self.capacity - bias.shape[-1]))

    def advance(self) -> None:
        """Move the cursor past the new tokens."""
        self.cursor.add_(self.index.shape[0])
        if not torch.compiler.is_compiling():
            self.length += self.index.shape[0]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` slots."""
        slots = self.tokens
        super().crop(length)
        self.tokens = slots  # the buffers, not a part of them
        slots.real[:, length:] = False
        self.cursor.fill_(length)

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """Replace row i by row `rows[i]` in every layer, in place; the number of rows must stay."""
        slots = self.tokens
        for buffer in slots.tensors():
            buffer.copy_(buffer[rows])
        super().reorder(rows, cross)
        self.tokens = slots  # the buffers, not the copies that a growing cache makes


class FixedKV(LayerKV):
    """Keys in buffers that never move, written to the slots that the cache names for each call."""

    cache: Any  # a `FixedCache`, or one over a pool
    k: Tensor
    v: Tensor

    def __init__(
        self, cache: Any, kind: Kind | None, buffers: Sequence[Tensor], source_cached: bool = False
    ) -> None:
        """Keep keys of a layer of this kind; None: of a source."""
        super().__init__(cache, of_source=kind is None)
        self.kind, (self.k, self.v), self.source_cached = kind, buffers, source_cached

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys; return the whole buffers, or of a source its own keys."""
        slots = self.cache.new_slots(self.kind, k.shape[2])
        self.k.index_copy_(2, slots, k.detach().to(self.k.dtype))
        self.v.index_copy_(2, slots, v.detach().to(self.v.dtype))
        return (k, v) if self.of_source else (self.k, self.v)

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`, in place."""
        self.k.copy_(self.k[rows])
        self.v.copy_(self.v[rows])


# Arguments and results of kernels ---------------------------------------------------------------------------

NOTHING = -1  # in place of a token: the logits are not numbers


class MatmulConfig(NamedTuple):
    """What is fused into a matmul: a norm before it; bias, gate and residual after it."""

    bias: Tensor | None = None  # N
    scale: Tensor | None = None  # D: of the RMS norm; None: no norm
    eps: float = 0.0
    unit_offset: bool = False
    # An activation: the first half of the weight's rows is the gate, and the result has N/2 columns.
    gate: str | None = None
    add: Tensor | None = None  # B 1 N: what is added to the result


class HeadConfig(NamedTuple):
    """How heads attend: rotation, scale, soft-cap, and the norm of each head's queries and keys.

    `cos` and `sin` are [B|1, 1, 1, R], for the first R columns of a head; `layout` says how they pair.
    `q_norm` and `k_norm` [E] scale an RMS norm, where there is one.
    """

    cos: Tensor | None
    sin: Tensor | None
    layout: str
    n_heads: int
    scale: float
    softcap: float | None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    unit_offset: bool = False
