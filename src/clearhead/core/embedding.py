"""Embedding: a front turns ids, patches, vectors or frames into vectors; types and positions are added.

Shapes: B batch, T length, D model.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.config.registry import Registry
from clearhead.core.norms import make_norm
from clearhead.core.steps import INDEX, Pass, Step, linear_step, norm_step
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

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, length: int) -> Iterator[Step]:
        """Yield the table, and what widens it."""
        V, width, rows = spec.vocab_size, spec.d_embedding, run.batch * length
        yield Step(f"{name}.tokens", "embedding", V * width, kept=rows * INDEX)
        if spec.project_tokens:
            kept = rows * width * run.size
            yield linear_step(f"{name}.project", "embedding", rows, width, spec.d_model, False, kept=kept)


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
        self.project = nn.Linear(width, spec.d_model) if spec.embedding_projection else None
        self.dropout = spec.embedding_dropout

    def forward(
        self,
        inputs: Tensor,
        types: Tensor | None,
        position_vectors: Callable[[], Tensor | None],
        real: Tensor | None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Embed the inputs as [B, T, D]; `position_vectors` returns [B|1, T, width]."""
        x = cast(Tensor, self.front(inputs, real, tap.part("front")))
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


def embedding_steps(
    spec: StackSpec, run: Pass, length: int, positions: Iterator[Step], shared: bool
) -> Iterator[Step]:
    """Yield the steps of embedding `length` inputs; a `shared` front has its weights counted elsewhere."""
    name, D, width = f"{spec.prefix}embedding", spec.d_model, spec.d_summed
    rows = run.batch * spec.n_tokens(length)
    for step in FRONTS[spec.input].steps(spec, run, f"{name}.front", length):
        yield step.reused() if shared else step
    if spec.n_types:
        yield Step(f"{name}.types", "embedding", spec.n_types * width)
    yield from positions
    if spec.embedding_norm:
        yield norm_step(f"{name}.norm", spec.norm, run, rows, width)
    if spec.embedding_projection:
        yield linear_step(
            f"{name}.project", "embedding", rows, width, D, bias=True, kept=rows * width * run.size
        )
    if spec.embedding_dropout:
        yield Step(f"{name}.dropout", "embedding", kept=rows * D)
