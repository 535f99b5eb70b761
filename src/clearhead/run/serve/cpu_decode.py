"""Decode steps on a CPU: each row is one token of a sequence, as a rule its last; one call of C a block.

The keys of all rows lie in the pool, and a table says which blocks of it each row reads. `step.c` reads them
where they are. Where `alike`, a row is summed in the same order whatever the number of rows, so that its bits
do not depend on who else is in the step.

Shapes: B rows, S slots that the longest row reads, D model.
"""

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.cache import Cache, CrossKeys, LayerKeys
from clearhead.core.config.kinds import Full, Kind, Windowed
from clearhead.core.transformer import Transformer
from clearhead.run.kernels.library import VIEW, library
from clearhead.run.kernels.native import MOST_ROWS, NativeBlock, NativeLinear
from clearhead.run.kernels.parts import like
from clearhead.run.kernels.prepare import prepared
from clearhead.run.serve.kv_cache import Chunk, Group, Pool, group_of

HEAD_ROWS = 2  # beyond them packed weights are quicker for the head


class DecodeCache(Cache):
    """The cache of one step: of each row its one new token, and the blocks of the pool that it reads."""

    def __init__(self, pool: Pool, chunks: Sequence[Chunk], sources: Sequence[int] = ()) -> None:
        """Prepare a step of chunks of one token each; `sources` are the lengths of their sources."""
        super().__init__()
        self.pool, self.chunks = pool, chunks
        self.positions = torch.tensor([[chunk.start] for chunk in chunks])  # B 1
        before = self.positions - 1
        self.tokens = masks.Tokens(before, before, torch.ones_like(before, dtype=torch.bool), None, False)
        self._read: dict[Group, tuple[masks.Tokens, Tensor, Tensor]] = {}
        if sources:
            self.source = self.read(None, [length - 1 for length in sources])[0]

    def read(self, group: Group, last: Sequence[int]) -> tuple[masks.Tokens, Tensor, Tensor]:
        """Return the tokens [B, S] in a group's blocks up to position `last` of each row, table, new slots.

        The table [B, S / size] has the numbers of blocks, and the slots [B] are those of the new tokens.
        """
        if group not in self._read:
            size, rows, new = self.pool.size, [], []
            for chunk, position in zip(self.chunks, last):
                ids = chunk.tables[group].ids[: position // size + 1]
                rows.append([(number, block) for number, block in enumerate(ids) if block is not None])
                new.append(rows[-1][-1][1] * size + position % size)
            longest, beyond = max(map(len, rows)), max(last) // size + 1
            padded = torch.tensor([row + [(beyond, 0)] * (longest - len(row)) for row in rows])  # B S/size 2
            positions = (padded[:, :, :1] * size + torch.arange(size)).flatten(1)  # B S
            real = positions <= torch.tensor(last)[:, None]
            tokens = masks.Tokens(positions, positions, real, None, False)
            self._read[group] = tokens, padded[:, :, 1].contiguous(), torch.tensor(new)
        return self._read[group]

    def visible(self, kind: Kind) -> masks.Tokens:
        """Return the tokens in the blocks that layers of this kind read."""
        return self.read(group_of(kind), [chunk.start for chunk in self.chunks])[0]

    def layer(self, index: int, kind: Kind) -> LayerKeys:
        """Return the keys of one layer."""
        _, table, new = self._read[group_of(kind)]
        return RowKeys(self.pool.layers[index], table, new)

    def cross_layer(self, index: int) -> CrossKeys:
        """Return the keys of the sources."""
        _, table, new = self._read[None]
        return RowSources(self.pool.cross[index], table, new)

    def begin(self, tokens: masks.Tokens) -> None:
        """Prepare nothing: the chunks describe the tokens."""

    def advance(self) -> None:
        """Count nothing: the engine counts for each request."""


class RowKeys(LayerKeys):
    """The keys of one layer in the pool, with the table of the rows of a step."""

    def __init__(self, room: tuple[Tensor, Tensor], table: Tensor, new: Tensor) -> None:
        self.k, self.v = room
        self.table, self.new = table, new


class RowSources(RowKeys, CrossKeys):
    """The same of the sources' keys."""


class DecodeBlock(NativeBlock):
    """A block that takes the rows of a step through `step.c`."""

    most_rows = sys.maxsize

    def _own(self, view: masks.View, keys: LayerKeys | None, rows: int) -> tuple[Any, ...] | None:
        if not isinstance(keys, RowKeys):
            return super()._own(view, keys, rows)
        return _paged(view, keys), 0, keys.new.data_ptr(), 1

    def _source(self, view: masks.View | None, keys: CrossKeys | None, rows: int) -> Any:
        paged = view is not None and isinstance(keys, RowSources)
        return _paged(view, keys) if paged else super()._source(view, keys, rows)


def _paged(view: masks.View | None, keys: Any) -> Any:
    """Describe keys in a pool, with mask, bias and table, as `step.c` reads them."""
    assert view is not None and view.mask is not None
    k, v, mask, bias, table = keys.k, keys.v, view.mask, view.bias, keys.table
    added: tuple[int | None, ...] = (None, 0, 0, 0)
    if bias is not None:
        added = (bias.data_ptr(), *(bias.stride(axis) if bias.shape[axis] > 1 else 0 for axis in (0, 1, 3)))
    seen = (mask.data_ptr(), mask.stride(0), mask.stride(3))
    strides = (0, k.stride(1), k.stride(2), 0, v.stride(1), v.stride(2))
    rows = (table.data_ptr(), table.stride(0), mask.shape[3] // table.shape[1])
    return VIEW(k.data_ptr(), v.data_ptr(), *strides, 1, mask.shape[3], *seen, *added, *rows)


class DecodeRunner:
    """An inference model that takes one token of each of several sequences further."""

    in_order = True  # keys of all rows are written before one is read: a sequence may have several rows

    def __init__(self, model: Transformer, alike: bool) -> None:
        """Prepare the copy; `alike`: the bits of a row do not depend on the number of rows."""
        self.alike, self.most = alike, sys.maxsize if alike else MOST_ROWS
        self.head_rows = 0 if alike else HEAD_ROWS  # beyond them the packed head, whose rows are alike

        def part_of(part: nn.Module) -> nn.Module:
            if isinstance(part, NativeBlock):
                part = like(part, DecodeBlock)
            if alike and isinstance(part, NativeBlock | NativeLinear):
                part.alike = True
            return part

        self.model = prepared(model, then=part_of)

    @staticmethod
    def make(model: Transformer, alike: bool) -> "DecodeRunner | None":
        """Return a runner; None where `step.c` does not compute all that the model's blocks do."""
        weight, spec = next(model.parameters()), model.main.spec
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or library() is None:
            return None
        if not all(isinstance(kind, Full | Windowed) for kind in spec.kinds):
            return None
        made = DecodeRunner(model, alike)
        blocks = cast(Sequence[Any], made.model.main.blocks)
        plain = all(isinstance(block, DecodeBlock) and not block.attention.pruned for block in blocks)
        return made if plain and isinstance(made.model.head.out, NativeLinear) else None

    def __call__(
        self, pool: Pool, chunks: Sequence[Chunk], tokens: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """Run one token of each chunk; return its hidden state [B, D]."""
        cache = DecodeCache(pool, chunks, sources)
        given = torch.tensor(tokens)[:, None]
        hidden: Tensor = self.model(given, positions=cache.positions, cache=cache, logits="none").hidden
        return hidden[:, 0]
