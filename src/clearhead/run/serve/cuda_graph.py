"""Decode steps on a GPU: each row is one token of a sequence; a CUDA graph is captured for a few sizes.

A step reads its rows from one table on the GPU: of each row its token, its position, and the blocks of
the pool that hold its text. So one copy from the host says all that a step must know. Rows that fill a size
up write to a block of the pool that nobody reads. Sizes double, for rows and for blocks.

Shapes: B rows, M blocks of the longest row, D model.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.cache import Cache, LayerKeys
from clearhead.core.config.fields import BIASES
from clearhead.core.config.kinds import Full, Kind, Windowed
from clearhead.core.transformer import Transformer
from clearhead.run.generate.steps import captured
from clearhead.run.kernels.kernels import available, paged_attend
from clearhead.run.kernels.parts import like
from clearhead.run.kernels.prepare import StepBlock, prepared
from clearhead.run.serve.kv_cache import Chunk, Pool, group_of

FEWEST_BLOCKS = 8
SMALLEST_BLOCK = 16  # slots of a block that a kernel takes at least


class GraphCache(Cache):
    """The cache of a captured step: `given` [B, 2 + M] has of each row token, position and blocks."""

    def __init__(self, pool: Pool, given: Tensor) -> None:
        super().__init__()
        self.pool, self.given = pool, given

    def begin(self, tokens: masks.Tokens) -> None:
        """Keep the new tokens: a kernel that knows their positions sees what is before them by itself."""
        self.new = tokens

    def follow(self) -> None:
        """Let the next call count its tokens from the positions."""
        before = self.given[:, 1:2] - 1
        self.tokens = masks.Tokens(before, before, torch.ones_like(before, dtype=torch.bool), None, False)

    def visible(self, kind: Kind) -> masks.Tokens:
        """Return the new tokens."""
        return self.new

    def layer(self, index: int, kind: Kind) -> LayerKeys:
        """Return the keys of one layer."""
        return GraphKeys(self, self.pool.layers[index], kind.reach or 0)

    def advance(self) -> None:
        """Count nothing: the engine counts for each request."""


class GraphKeys(LayerKeys):
    """The keys of one layer in the pool, of which rows see those within `reach`; 0: all."""

    def __init__(self, cache: GraphCache, room: tuple[Tensor, Tensor], reach: int) -> None:
        self.k, self.v = room
        self.cache, self.reach = cache, reach


class GraphBlock(StepBlock):
    """A block that takes one token of each row through the kernels, with keys in a pool."""

    def attended(self, x: Tensor, view: masks.View, keys: LayerKeys | None) -> Tensor | None:
        """Attend with one token of each row [B, 1, D] -> [B, 1, H·E]."""
        if not isinstance(keys, GraphKeys):
            return super().attended(x, view, keys)
        given, (k, v) = keys.cache.given, keys.read()
        where = (given[:, 2:], given[:, 1], keys.cache.pool.size, keys.reach)
        return paged_attend(self.projected(x), k, v, *where, self.formula(view))


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
        self, pool: Pool, chunks: Sequence[Chunk], tokens: Sequence[int], sources: Sequence[int] = ()
    ) -> Tensor:
        """Run one token of each chunk; return its hidden state [B, D], which the next call overwrites."""
        (group,) = {group_of(kind) for kind in self.model.main.spec.kinds}
        rows = [chunk.tables[group].ids for chunk in chunks]
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
        cache, found = GraphCache(pool, given), list[Tensor]()

        def run() -> None:
            cache.follow()
            hidden = self.model(given[:, :1], cache=cache, logits="none").hidden[:, 0]
            if found:
                found[0].copy_(hidden)
            else:
                found.append(hidden.clone())

        run()
        return given, captured(run) if pool.device.type == "cuda" else run, found
