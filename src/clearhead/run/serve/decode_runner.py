"""Decode steps: each row is one token of a sequence, as a rule its last, with keys in the pool of blocks.

On a CPU, one call of C a block reads the keys of all rows where they lie; a table says which blocks each row
reads. Where `alike`, a row is summed in the same order whatever the number of rows, so that its bits do not
depend on who else is in the step.

On a GPU, a CUDA graph is captured for a few sizes, which double, for rows and for blocks. A step reads its
rows from one table on the GPU: of each row its token, its position, and the blocks of the pool that hold its
text. So one copy from the host says all that a step must know. Rows that fill a size up write to a block of
the pool that nobody reads.

Shapes: B rows, M blocks of the longest row, D model.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.cache import LayerKV
from clearhead.core.config.fields import BIASES
from clearhead.core.config.kinds import Full, Windowed
from clearhead.core.transformer import Transformer
from clearhead.run.kernels.cuda_graph import captured
from clearhead.run.kernels.fixed_cache import FixedKV
from clearhead.run.kernels.kernels import available, paged_attend
from clearhead.run.kernels.library import VIEW, library
from clearhead.run.kernels.native import MOST_ROWS, NativeBlock, NativeLinear
from clearhead.run.kernels.parts import like
from clearhead.run.kernels.prepare import StepBlock, prepared
from clearhead.run.serve.kv_cache import Chunk, PagedCache, Pool, group_of

HEAD_ROWS = 2  # beyond them packed weights are quicker for the head
FEWEST_BLOCKS = 8
SMALLEST_BLOCK = 16  # slots of a block that a kernel takes at least


class CpuBlock(NativeBlock):
    """A block that takes the rows of a step through `step.c`."""

    most_rows = sys.maxsize

    def _own(self, view: masks.View, keys: LayerKV | None, rows: int) -> tuple[Any, ...] | None:
        if not isinstance(keys, FixedKV):
            return super()._own(view, keys, rows)
        return _paged(view, keys), 0, keys.cache.rows_of(group_of(keys.kind)).new.data_ptr(), 1

    def _source(self, view: masks.View | None, keys: LayerKV | None, rows: int) -> Any:
        paged = view is not None and isinstance(keys, FixedKV)
        return _paged(view, keys) if paged else super()._source(view, keys, rows)


def _paged(view: masks.View | None, keys: Any) -> Any:
    """Describe keys in a pool, with mask, bias and table, as `step.c` reads them."""
    assert view is not None and view.mask is not None
    k, v, mask, bias = keys.k, keys.v, view.mask, view.bias
    table = keys.cache.rows_of(group_of(keys.kind)).table
    added: tuple[int | None, ...] = (None, 0, 0, 0)
    if bias is not None:
        added = (bias.data_ptr(), *(bias.stride(axis) if bias.shape[axis] > 1 else 0 for axis in (0, 1, 3)))
    seen = (mask.data_ptr(), mask.stride(0), mask.stride(3))
    strides = (0, k.stride(1), k.stride(2), 0, v.stride(1), v.stride(2))
    rows = (table.data_ptr(), table.stride(0), mask.shape[3] // table.shape[1])
    return VIEW(k.data_ptr(), v.data_ptr(), *strides, 1, mask.shape[3], *seen, *added, *rows)


class CpuRunner:
    """An inference model that takes one token of each of several sequences further."""

    in_order = True  # keys of all rows are written before one is read: a sequence may have several rows

    def __init__(self, model: Transformer, alike: bool) -> None:
        """Prepare the copy; `alike`: the bits of a row do not depend on the number of rows."""
        self.alike, self.most = alike, sys.maxsize if alike else MOST_ROWS
        self.head_rows = 0 if alike else HEAD_ROWS  # beyond them the packed head, whose rows are alike

        def part_of(part: nn.Module) -> nn.Module:
            if isinstance(part, NativeBlock):
                part = like(part, CpuBlock)
            if alike and isinstance(part, NativeBlock | NativeLinear):
                part.alike = True
            return part

        self.model = prepared(model, then=part_of)

    @staticmethod
    def make(model: Transformer, alike: bool) -> "CpuRunner | None":
        """Return a runner; None where `step.c` does not compute all that the model's blocks do."""
        weight, spec = next(model.parameters()), model.main.spec
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or library() is None:
            return None
        if not all(isinstance(kind, Full | Windowed) for kind in spec.kinds):
            return None
        made = CpuRunner(model, alike)
        blocks = cast(Sequence[Any], made.model.main.blocks)
        plain = all(isinstance(block, CpuBlock) and not block.attention.pruned for block in blocks)
        return made if plain and isinstance(made.model.head.out, NativeLinear) else None

    def __call__(
        self, pool: Pool, chunks: Sequence[Chunk[Any]], tokens: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """Run one token of each chunk; return its hidden state [B, D]."""
        cache, ids = PagedCache(pool, chunks, sources, by_rows=True), torch.tensor(tokens)[:, None]
        positions = torch.tensor([[chunk.start] for chunk in chunks])
        hidden: Tensor = self.model(ids, positions=positions, cache=cache, logits="none").hidden
        return hidden[:, 0]


class GraphBlock(StepBlock):
    """A block that takes one token of each row through the kernels, with keys in a pool."""

    def attended(self, x: Tensor, view: masks.View, keys: LayerKV | None) -> Tensor | None:
        """Attend with one token of each row [B, 1, D] -> [B, 1, H·E]."""
        if not isinstance(keys, FixedKV) or keys.kind is None or not isinstance(keys.cache, PagedCache):
            return super().attended(x, view, keys)
        given, size, reach = cast(Tensor, keys.cache.given), keys.cache.pool.size, keys.kind.reach or 0
        where = (given[:, 2:], given[:, 1], size, reach)
        return paged_attend(self.projected(x), keys.k, keys.v, *where, self.formula(view))


class CudaGraphRunner:
    """An inference model that takes one token of each of several sequences further, by CUDA graphs."""

    alike = False
    in_order = False  # a row reads while others write their keys

    def __init__(self, model: Transformer, most: int) -> None:
        """Prepare the copy for up to `most` rows."""

        def part_of(part: nn.Module) -> nn.Module:
            return like(part, GraphBlock) if isinstance(part, StepBlock) else part

        self.most = self.head_rows = most
        self.model = prepared(model, kernels=True, then=part_of)
        self.steps: dict[tuple[int, int], tuple[Tensor, Callable[[], object], list[Tensor]]] = {}

    @staticmethod
    def make(model: Transformer, most: int, size: int) -> "CudaGraphRunner | None":
        """Return a runner; None where the kernels do not compute all that the model's blocks do.

        Nor do they read blocks of every `size`: it must be a power of two.
        """
        weight, spec = next(model.parameters()), model.main.spec
        reads = all(isinstance(kind, Full | Windowed) and not kind.kept_first for kind in spec.kinds)
        alike = len({group_of(kind) for kind in spec.kinds}) == 1  # one table serves all layers
        fits = size >= SMALLEST_BLOCK and size.bit_count() == 1
        if not (available(weight) and reads and alike and fits) or spec.cross or spec.positions in BIASES:
            return None
        made = CudaGraphRunner(model, most)
        blocks = cast(Sequence[Any], made.model.main.blocks)
        plain = all(isinstance(block, GraphBlock) and not block.attention.pruned for block in blocks)
        return made if plain else None

    def __call__(
        self, pool: Pool, chunks: Sequence[Chunk[Any]], tokens: Sequence[int], sources: Sequence[int] = ()
    ) -> Tensor:
        """Run one token of each chunk; return its hidden state [B, D], which the next call overwrites."""
        (group,) = {group_of(kind) for kind in self.model.main.spec.kinds}
        rows = [chunk.seq.tables[group].ids for chunk in chunks]
        longest = max(FEWEST_BLOCKS, *(chunk.start // pool.size + 1 for chunk in chunks))
        size = (1 << (len(chunks) - 1).bit_length(), 1 << (longest - 1).bit_length())
        table = np.full((size[0], 2 + size[1]), pool.spare, np.int64)
        table[:, :2] = 0
        for line, chunk, token, ids in zip(table, chunks, tokens, rows):
            count = chunk.start // pool.size + 1
            line[0], line[1] = token, chunk.start
            line[2 : 2 + count] = [pool.spare if block is None else block for block in ids[:count]]
        if size not in self.steps:
            self.steps[size] = self._step(pool, *size)
        given, replay, hidden = self.steps[size]
        given.copy_(torch.from_numpy(table), non_blocking=True)
        replay()
        return hidden[0][: len(chunks)]

    def _step(self, pool: Pool, rows: int, blocks: int) -> tuple[Tensor, Callable[[], object], list[Tensor]]:
        """Make the step of a size; on a GPU, capture it."""
        given = torch.full((rows, 2 + blocks), pool.spare, dtype=torch.long, device=pool.device)
        given[:, :2] = 0
        cache, found = PagedCache(pool, given=given), list[Tensor]()

        def run() -> None:
            cache.count_from(given[:, 1:2])
            hidden = self.model(given[:, :1], cache=cache, logits="none").hidden[:, 0]
            if found:
                found[0].copy_(hidden)
            else:
                found.append(hidden.clone())

        run()
        return given, captured(run) if pool.device.type == "cuda" else run, found
