"""A decoder on the CPU whose steps keep what describes them to `step.c` from one token to the next.

What a model writes down anew for each token (masks, angles, where the keys of each layer lie) takes a small
one longer than a third of its blocks.

Shapes: B rows, D model, S slots, R rotated columns of a head.
"""

from array import array
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from clearhead.core import masks
from clearhead.core.cache import Cache, LayerKV
from clearhead.core.config.kinds import Full
from clearhead.core.heads import LanguageHead
from clearhead.core.positions import Rotary
from clearhead.core.stack import LayerInputs
from clearhead.run.kernels.native import NativeBlock, NativeStack, run
from clearhead.run.kernels.parts import DecodeModel
from clearhead.variants import inputs


class KeptStep(NamedTuple):
    """What a step with one cache is described by, for as long as its keys lie where they lie."""

    call: Any
    layers: "array[int]"
    keys: list[Tensor]  # and values, of each layer, then of its source; not the cache, which forgets this one
    angles: Rotary | None  # of every slot: 1 1 S R
    source: masks.TokenInfo | None
    source_view: masks.View | None

    def suits(self, cache: Cache, rows: int) -> bool:
        """Return True if the keys of the cache are still those that are described, with room for a token."""
        if (
            rows != self.call.batch
            or cache.length >= self.keys[0].shape[2]
            or cache.source is not self.source
        ):
            return False
        return all(map(is_, keys_of(cache), self.keys))


def keys_of(cache: Cache) -> list[Tensor]:
    """Return the keys and values of each layer, then of the source."""
    layers = (*cache.layers.values(), *cache.cross.values())
    return [x for layer in layers for x in (layer.k, layer.v) if x is not None]


class NativeModel(DecodeModel):
    """A model whose steps with a plain cache are kept, if its decoder sees all its tokens."""

    kept: "WeakKeyDictionary[Cache, KeptStep] | None" = None

    def decoded(self, ids: Tensor, cache: Any) -> Tensor | None:
        """Return the hidden states [B, 1, D] of one token of each row; None where `step.c` does not suit."""
        step = self._step(ids, cache)
        if step is None:
            return None
        stack, slot = cast(NativeStack, self.main), cache.length
        inputs.check_stack_input(ids, stack.spec, "ids")
        tokens = masks.tokens_from(len(ids), 1, ids.device, before=cache.tokens)
        inputs.check_length(tokens, cache, stack.spec, "ids")
        place = partial(stack.positions.embed, tokens.positions, torch.float32)
        x = stack.embedding(ids, None, place, None)  # B 1 D
        cache.begin(tokens)
        step.call.slot, step.call.own.slots, step.call.threads = slot, slot + 1, torch.get_num_threads()
        if step.angles is not None:
            start = slot * step.angles.cos.shape[-1] * 4  # bytes
            step.call.cos, step.call.sin = (part.data_ptr() + start for part in step.angles)
        hidden = run(x, step.call, step.layers, stack.fields())
        cache.advance()
        return hidden

    def _step(self, ids: Tensor, cache: Any) -> KeptStep | None:
        """Return what describes one token of each row; None where the model's own way is taken."""
        if self.kept is None:
            self.kept = WeakKeyDictionary()
        if type(cache) is not Cache or cache.keys is not LayerKV:
            return None
        if cache.tokens is None or not cache.tokens.plain or cache.packed or cache.rows != len(ids):
            return None
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        step = self.kept.get(cache)
        if step is not None and step.suits(cache, len(ids)):
            return step
        step = self._described(cache, len(ids)) if self._simple() else None
        if step is not None:
            self.kept[cache] = step
        return step

    def _simple(self) -> bool:
        """Return True if every layer sees all tokens, and rotary angles do not depend on the length."""
        stack = self.main
        spec = stack.spec
        return (
            self.decoder is not None
            and isinstance(stack, NativeStack)
            and isinstance(self.head, LanguageHead)
            and spec.causal
            and spec.input == "tokens"
            and all(type(kind) is Full for kind in spec.kinds)
            and not spec.rope_skips
            and spec.positions in ("none", "learned", "sinusoidal", "rope")
            and not spec.rotates_by_length
            and all(isinstance(block, NativeBlock) and not block.attention.pruned for block in stack.layers())
        )

    def _described(self, cache: Cache, rows: int) -> KeptStep | None:
        """Describe a step with this cache; None where its layers differ, or `step.c` does not suit."""
        blocks, spec = cast(list[NativeBlock], self.main.layers()), self.main.spec
        layers = [cache.layer(layer, kind) for layer, kind in enumerate(spec.kinds)]
        others = [cache.cross_layer(layer) if spec.cross else None for layer in range(len(layers))]
        keys = keys_of(cache)
        lie = {(x.shape, x.stride()) for x in keys[: 2 * len(layers)]}
        if len(keys) != 2 * len(layers) * (1 + spec.cross) or len(lie) != 1 or rows > blocks[0].most_rows:
            return None
        if cache.length >= keys[0].shape[2]:  # no room for a token: the model's own way makes some
            return None
        angles = self.main.positions.rotary(torch.arange(keys[0].shape[2])[None], None)
        angles = None if angles is None else Rotary(*(part.contiguous() for part in angles))
        source = None
        if spec.cross and cache.tokens is not None and cache.source is not None:
            source = self.main.cross_view(cache.tokens.map(lambda x: x[:, :1]), cache.source, rows)
        x = keys[0].new_empty(rows, 1, 0)
        call = blocks[0].call(x, LayerInputs(masks.View(rotary=angles), layers[0], None, source, others[0]))
        if call is None:
            return None
        call.rotary_row = 0  # all rows are equally far
        fields = (block.layer(call, *both) for block, *both in zip(blocks, layers, others))
        return KeptStep(call, array("Q", chain.from_iterable(fields)), keys, angles, cache.source, source)
