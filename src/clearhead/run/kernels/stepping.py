"""A decoder that takes one token of each row of a fixed cache further with few small kernels.

The model's own way writes down order, positions and padding of the new token, and computes masks and angles,
in some forty operations, whatever the number of rows. Where each takes a kernel, that is a tenth of a step.

Shapes: B rows, S slots, R rotated columns, D model, V vocabulary.
"""

from typing import Any, Literal, cast

import torch
from torch import Tensor

from clearhead.core.config.kinds import Full, Windowed
from clearhead.core.heads import LanguageHead
from clearhead.core.masks import View
from clearhead.core.positions import Rotary
from clearhead.core.taps import SILENT, tap_for
from clearhead.core.transformer import Output, Transformer
from clearhead.run.kernels.fixed_cache import FixedCache
from clearhead.run.kernels.kernels import available
from clearhead.run.kernels.parts import Direct


class StepModel(Direct, Transformer):
    """A model whose steps with a fixed cache do their bookkeeping in one kernel, where that suits."""

    def forward(
        self,
        ids: Tensor,
        *more: Any,
        cache: Any = None,
        logits: Literal["all", "last", "none"] = "all",
        **named: Any,
    ) -> Output:
        """Run the model; see `Transformer.forward`."""
        if more or named or not self._suits(ids, cache):
            named |= {"logits": logits} if cache is None else {"logits": logits, "cache": cache}
            return super().forward(ids, *more, **named)
        stack, spec = self.main, self.main.spec
        cache.room_for(1)
        x = stack.embedding(ids, None, lambda: None, None, SILENT)  # B 1 D
        views = {}
        for kind in spec.whole_kinds:
            views[kind] = marked(cache, self._angles(cache, kind.reach), kind.reach or 0)
        for layer, (block, kind) in enumerate(zip(stack.layers(), spec.kinds)):
            view = views[kind]
            turned = view.unrotated() if layer in spec.rope_skips else view
            x = block(x, turned, keys=cache.layer(layer, kind))
        cache.advance()
        hidden = x if stack.norm is None else stack.norm(x)
        return Output(None if logits == "none" else self.head(hidden, None), hidden)

    def _suits(self, ids: Tensor, cache: object) -> bool:
        """Return True if one kernel computes what the model's own bookkeeping would."""
        if torch.compiler.is_compiling() or not isinstance(cache, FixedCache) or self.encoder is not None:
            return False
        spec, kinds = self.main.spec, self.main.spec.whole_kinds
        plain = all(isinstance(kind, Full | Windowed) and not kind.kept_first for kind in kinds)
        return (
            ids.shape[1] == 1
            and spec.input == "tokens"
            and spec.positions == "rope"
            and plain
            and len(kinds) == 1
            and all(block.router is None for block in self.main.layers())
            and isinstance(self.head, LanguageHead)
            and not cache.packed
            and available(next(self.parameters()))
            and tap_for(self) is SILENT
        )

    def _angles(self, cache: FixedCache, reach: int | None) -> Rotary:
        """Return the rotation of every position that the cache has room for, computed once."""
        if reach not in cache.angles:
            every = torch.arange(cache.capacity, device=cache.cursor.device)[None]
            found = cast(Rotary, self.main.positions.rotary(every, reach))
            cache.angles[reach] = Rotary(found.cos.contiguous(), found.sin.contiguous())
        return cache.angles[reach]


def marked(cache: FixedCache, angles: Rotary, reach: int) -> View:
    """Put one more token into the slots of each row; return what it sees and how it is turned."""
    from clearhead.run.kernels import triton_marks

    mask, rotary = triton_marks.mark(cache, angles, reach)
    return View(mask=mask, rotary=rotary)
