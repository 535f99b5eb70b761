"""The fixed-size form of the cache: buffers that never move, for steps that are compiled or recorded.

Shapes: B batch, K key/value heads, T new tokens, S slots, E head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.config import ModelConfig
from clearhead.errors import InputError
from clearhead.model.cache import Cache, GrowingKeys
from clearhead.model.masks import Tokens


class FixedCache(Cache):
    """Buffers for `capacity` tokens whose addresses and shapes never change, written at a cursor that is a tensor."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        source: int = 0,
    ) -> None:
        """`source`: room for what cross-attention reads, where `adopt` is to bring it."""
        super().__init__(capacity)
        spec = config.decoder
        if spec is None:
            raise InputError("a model without a decoder has nothing to cache: call it without cache")
        self.capacity = capacity
        self.cursor = torch.zeros((), dtype=torch.long, device=device)
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        count = torch.zeros(batch, capacity, dtype=torch.long, device=device)
        self.tokens = Tokens(
            count, count.clone(), torch.zeros_like(count, dtype=torch.bool), count.clone(), plain=False
        )

        def room(attention: str, slots: int) -> tuple[Tensor, Tensor]:
            shape = (batch, spec.kv_heads_of(attention), slots)
            return (
                torch.zeros(*shape, spec.d_head, dtype=dtype, device=device),
                torch.zeros(*shape, spec.d_value, dtype=dtype, device=device),
            )

        for layer in range(spec.n_layers):
            block = f"{spec.prefix}blocks.{layer}"
            self.layers[layer] = FixedKeys(self, *room(f"{block}.attention", capacity))
            if source and spec.cross:
                self.cross_layer(layer).update(*room(f"{block}.cross", source))
        if source and spec.cross:
            count = torch.arange(source, device=device)[None]
            self.source = Tokens(
                count, count, torch.zeros(batch, source, dtype=torch.bool, device=device), None, plain=False
            )

    def adopt(self, cache: Cache) -> None:
        """Become what a growing cache is: its rows are the first rows here, and the others have read nothing."""
        slots, tokens, rows, filled = self.tokens, cache.tokens, cache.rows, cache.length
        assert slots is not None and slots.real is not None and tokens is not None and rows is not None
        slots.real.zero_()
        slots.real[:rows, :filled] = True if tokens.real is None else tokens.real
        slots.order[:rows, :filled], slots.positions[:rows, :filled] = tokens.order, tokens.positions
        for layer, mine in self.layers.items():
            theirs = cache.layers[layer]
            assert (
                isinstance(mine, FixedKeys)
                and isinstance(theirs, GrowingKeys)
                and theirs.k is not None
                and theirs.v is not None
            )
            mine.k[:rows, :, :filled], mine.v[:rows, :, :filled] = (
                theirs.k[:, :, :filled],
                theirs.v[:, :, :filled],
            )
        if cache.source is not None:
            assert self.source is not None and self.source.real is not None
            length = cache.source.length
            self.source.real.zero_()
            self.source.real[:rows, :length] = True if cache.source.real is None else cache.source.real
            for layer, crossed in self.cross.items():
                for buffer, given in zip(crossed.read(), cache.cross[layer].read()):
                    buffer[:rows, :, :length] = given
        self.cursor.fill_(filled)
        self.length = filled

    def begin(self, tokens: Tokens) -> None:
        """Write what the new tokens are into the buffers."""
        slots, self.packed = self.tokens, self.packed or tokens.documents is not None
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

    def aligned(self, bias: Tensor, window: int | None) -> Tensor:
        """As in `Cache`, with 0 for the slots not yet filled."""
        return nnf.pad(bias, (0, self.capacity - bias.shape[-1]))

    def advance(self) -> None:
        """Move the cursor."""
        self.cursor.add_(self.index.shape[0])
        if not torch.compiler.is_compiling():
            self.length += self.index.shape[0]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` slots."""
        if not 0 <= length <= self.length:
            raise InputError(
                f"cannot crop a cache of {self.length} tokens to {length}: choose 0 to {self.length}"
            )
        assert self.tokens is not None and self.tokens.real is not None
        self.tokens.real[:, length:] = False
        self.cursor.fill_(length)
        self.length, self.packed = length, self.packed and length > 0

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
