"""A stack that takes one token of each row through all its blocks in one call of `step.c`.

Shapes: B rows, D model.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.core import masks
from clearhead.core.cache import Cache
from clearhead.core.stack import Block, Memory, Stack
from clearhead.core.taps import SILENT, Tap
from clearhead.run.kernels.native import NativeBlock, plain, run
from clearhead.run.kernels.parts import Direct

TOGETHER = 256  # tokens of a source that keep a product busy
WORTH = 0.9  # rows of a source are read in groups where so much of what padding makes of them is left


class NativeStack(Direct, Stack):
    """A stack of blocks that `suits_native`: one call takes a step through all of them."""

    def forward(
        self,
        inputs: Tensor,
        tokens: masks.Tokens,
        memory: Memory | None = None,
        cache: Cache | None = None,
        types: Tensor | None = None,
        prefix: Tensor | None = None,
        bias: Tensor | None = None,
        input_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map the inputs, described by `tokens`, to hidden states [B, T, D]."""
        blocks = self.layers()
        native = all(isinstance(block, NativeBlock) and not block.attention.pruned for block in blocks)
        more = (types, prefix, bias, input_mask, global_mask, tap)
        bare = cache is None and memory is None and all(given is None or given is SILENT for given in more)
        if bare and native and (groups := self.groups(inputs, tokens)):
            return self._by_groups(inputs, tokens, groups)
        if cache is None or tokens.length != 1 or tap is not SILENT or not native:
            return super().forward(inputs, tokens, memory, cache, *more)

        def place() -> Tensor | None:
            return self.positions.embed(tokens.positions, self.dtype)

        x: Tensor = self.embedding(inputs, types, place, input_mask)  # B 1 D
        cache.begin(tokens)
        given = (prefix, bias, x.dtype, tap, inputs, global_mask)
        views = self._views(self.spec.whole_kinds, tokens, cache, *given)
        cross_view = None if memory is None else self.cross_view(tokens, memory.tokens, x.shape[0])
        steps = []
        for layer, kind in enumerate(self.spec.kinds):
            view = views[kind].unrotated() if layer in self.spec.rope_skips else views[kind]
            cross_keys = None if memory is None else cache.cross_layer(layer)
            steps.append((view, cross_view, cache.layer(layer, kind), cross_keys))
        found = through(x, blocks, steps) if plain(x) else None
        if found is None:
            found = x
            for block, (view, other, keys, cross_keys) in zip(blocks, steps):
                found = block(found, view, memory and memory.hidden, other, keys, cross_keys)
        cache.advance()
        return found if self.norm is None else self.norm(found)

    def groups(self, inputs: Tensor, tokens: masks.Tokens) -> list[tuple[Tensor, int]]:
        """Return rows of a source [B, T] by like length: their places and the longest's length.

        For rows that end in padding, of a stack whose states there nobody reads; none where it saves little.
        """
        real, scaling = tokens.real, self.spec.rope_scaling
        turns = scaling is not None and scaling.kind in ("dynamic", "longrope")  # by the length of a call
        if not self.spec.prefix or turns or real is None or real.shape != inputs.shape:
            return []
        if tokens.documents is not None or torch.compiler.is_compiling():
            return []
        if not bool(real[:, 0].all()) or bool((real[:, 1:] > real[:, :-1]).any()):
            return []
        lengths = real.sum(1)
        at_once = max(1, TOGETHER * len(lengths) // int(lengths.sum()))
        found = [(rows, int(lengths[rows[-1]])) for rows in torch.split(lengths.argsort(), at_once)]
        return found if sum(len(rows) * most for rows, most in found) <= WORTH * inputs.numel() else []

    def _by_groups(self, inputs: Tensor, tokens: masks.Tokens, groups: list[tuple[Tensor, int]]) -> Tensor:
        """Map rows of like length together: [B, T] -> [B, T, D], zeros where padding is left out."""
        hidden = torch.zeros(*inputs.shape, self.spec.d_model, dtype=self.dtype)
        for rows, most in groups:

            def cut(x: Tensor, rows: Tensor = rows, most: int = most) -> Tensor:
                return x[rows, :most] if len(x) > 1 else x[:, :most]

            hidden[rows, :most] = super().forward(cut(inputs), tokens.map(cut))
        return hidden


def through(x: Tensor, blocks: list[Block], steps: list[Any]) -> Tensor | None:
    """Take rows through blocks [B, 1, D] -> [B, 1, D]; None where `step.c` does not suit all of them.

    Each step is (view, cross view, keys, cross keys). Layers of one view share the description of it, if
    their keys lie alike.
    """
    calls: dict[Any, Any] = {}
    layers = []
    for block, (view, cross_view, keys, cross_keys) in zip(blocks, steps):
        assert isinstance(block, NativeBlock)
        if keys.k is None or keys.v is None:
            return None
        lie = (id(view), type(keys), keys.k.shape, keys.k.stride(), keys.v.stride())
        if lie not in calls:
            calls[lie] = block.call(x, view, cross_view, keys, cross_keys)
        if calls[lie] is None:
            return None
        layers.append(block.layer(calls[lie], keys, cross_keys))
    return run(x, calls[next(iter(calls))], layers)
