"""Embedding: a front maps ids, patches, vectors or frames to vectors; types and positions are added.

Shapes: B batch, T length, D model.
"""

from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.config.registry import Registry
from clearhead.core.norms import make_norm
from clearhead.core.taps import SILENT, Tap


class TokenFront(nn.Module):
    """A table of vectors, one per id."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.tokens, self.scale = nn.Embedding(spec.vocab_size, spec.d_embedding), spec.embedding_scale
        self.project = nn.Linear(spec.d_embedding, spec.d_model, bias=False) if spec.project_tokens else None

    def forward(self, ids: Tensor, real: Tensor | None = None, tap: Tap = SILENT) -> Tensor:
        """Map [B, T] -> [B, T, d_summed]."""
        x = tap.step("tokens", self.tokens(ids.long()))
        x = tap.step("scaled", x * self.scale) if self.scale != 1 else x
        return x if self.project is None else tap.step("project", self.project(x))


FRONTS: Registry[Any] = Registry(
    {
        "tokens": TokenFront,
        "patches": "clearhead.variants.fronts:PatchFront",
        "vectors": "clearhead.variants.fronts:VectorFront",
        "frames": "clearhead.variants.fronts:FrameFront",
    }
)


class Embedding(nn.Module):
    """Front, segment and position vectors, added up; then norm, projection and dropout."""

    def __init__(self, spec: StackSpec, front: nn.Module | None = None) -> None:
        super().__init__()
        width = spec.d_summed
        self.front = front if front is not None else FRONTS[spec.input](spec)
        self.types = nn.Embedding(spec.n_types, width) if spec.n_types else None
        self.norm = make_norm(spec.norm, width) if spec.embedding_norm else None
        # After the sum; a front's own `project` widens the token vectors before it.
        self.project = nn.Linear(width, spec.d_model) if spec.embedding_projection else None
        self.dropout = spec.embedding_dropout

    def forward(
        self,
        inputs: Tensor,
        types: Tensor | None,
        position_vectors: Callable[[], Tensor | None],
        real: Tensor | None,
        tap: Tap = SILENT,
        vectors: Tensor | None = None,
    ) -> Tensor:
        """Embed the inputs as [B, T, D]; `position_vectors` returns [B|1, T, width].

        It is called after the front, so that a trace shows the steps in the order of the sum. `vectors`
        [B, T, width] stand in place of what the front makes of the inputs.
        """
        if vectors is None:
            x = cast(Tensor, self.front(inputs, real, tap.part("front")))
        else:
            x = tap.step("vectors", vectors)
        if self.types is not None:
            segment = self.types.weight[0].expand_as(x) if types is None else self.types(types.long())
            x = tap.step("typed", x + tap.step("types", segment))
        added = position_vectors()
        if added is not None:
            x = tap.step("placed", x + added)
        if self.norm is not None:
            x = tap.step("norm", self.norm(x))
        if self.project is not None:
            x = tap.step("project", self.project(x))
        return nnf.dropout(x, self.dropout, self.training)
