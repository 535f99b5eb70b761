"""Fronts turn ids, image patches, vectors or frames into vectors; the embedding adds types and positions.

Shapes: B batch, T length, D model, C channels.
"""

from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import StackSpec
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


class PatchFront(nn.Module):
    """Squares of an image, each flattened and projected; a class token may stand before them."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.patch = spec.patch_size
        self.project = nn.Linear(spec.n_channels * self.patch**2, spec.d_model, bias=spec.patch_bias)
        self.class_token = nn.Parameter(torch.zeros(spec.d_model)) if spec.class_token else None

    def forward(self, pixels: Tensor, real: Tensor | None = None, tap: Tap = SILENT) -> Tensor:
        """Map [B, C, height, width] -> [B, patches (+ 1), D]."""
        patches = nnf.unfold(pixels, self.patch, stride=self.patch).transpose(1, 2)  # B T C·patch²
        vectors = tap.step("project", self.project(tap.step("patches", patches)))
        if self.class_token is None:
            return vectors
        first = self.class_token.expand(vectors.shape[0], 1, -1)
        return tap.step("class_token", torch.cat([first, vectors], dim=1))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, length: int) -> Iterator[Step]:
        """Yield the projection of every patch, and the class token."""
        yield _projection(spec, run, name, spec.n_patches, spec.n_channels * spec.patch_size**2)
        if spec.class_token:
            yield Step(f"{name}.class_token", "embedding", spec.d_model)


class VectorFront(nn.Module):
    """A linear layer on given vectors: features, time series, embeddings of another model."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.project = nn.Linear(spec.d_input, spec.d_model)

    def forward(self, vectors: Tensor, real: Tensor | None = None, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, d_input] -> [B, T, D]."""
        return tap.step("project", self.project(vectors))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, length: int) -> Iterator[Step]:
        """Yield the projection."""
        yield _projection(spec, run, name, length, spec.d_input)


def _projection(spec: StackSpec, run: Pass, name: str, length: int, width: int) -> Step:
    """Return the step that projects rows of `length` inputs of this width; no gradient goes back to them."""
    rows, name = run.batch * length, f"{name}.project"
    kept = rows * width * run.size
    return linear_step(name, "embedding", rows, width, spec.d_model, spec.patch_bias, gradients=1, kept=kept)


class FrameFront(nn.Module):
    """Two convolutions over time, the second with a stride: for sound and other dense series."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        D, kernel, stride = spec.d_model, spec.conv_kernel, spec.conv_stride
        self.first = nn.Conv1d(spec.d_input, D, kernel, padding=kernel // 2)
        self.second = nn.Conv1d(D, D, kernel, stride=stride, padding=kernel // 2)

    def forward(self, frames: Tensor, real: Tensor | None = None, tap: Tap = SILENT) -> Tensor:
        """Map [B, time, d_input] -> [B, time / stride, D]; frames not `real` [B, time] become zeros."""
        mask = 1 if real is None else real[:, None, :].to(frames.dtype)
        x = tap.step("first_bent", nnf.gelu(tap.step("first", self.first(frames.transpose(1, 2) * mask))))
        x = tap.step("second", self.second(x * mask))
        return tap.step("second_bent", nnf.gelu(x).transpose(1, 2))

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, length: int) -> Iterator[Step]:
        """Yield each convolution as a matrix product; it keeps its own input and that of gelu."""
        D, kernel = spec.d_model, spec.conv_kernel
        before, after = run.batch * length, run.batch * spec.n_tokens(length)
        first, second = before * (spec.d_input + D) * run.size, (before + after) * D * run.size  # bytes kept
        yield linear_step(
            f"{name}.first", "embedding", before, spec.d_input * kernel, D, True, gradients=1, kept=first
        )
        yield linear_step(f"{name}.second", "embedding", after, D * kernel, D, True, kept=second)


FRONTS: dict[str, type[TokenFront] | type[PatchFront] | type[VectorFront] | type[FrameFront]] = {
    "tokens": TokenFront,
    "patches": PatchFront,
    "vectors": VectorFront,
    "frames": FrameFront,
}


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
        place: Callable[[], Tensor | None],
        real: Tensor | None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Embed the inputs as [B, T, D]; `place` returns position vectors [B|1, T, width]."""
        x = cast(Tensor, self.front(inputs, real, tap.part("front")))
        if self.types is not None:
            segment = self.types.weight[0].expand_as(x) if types is None else self.types(types.long())
            x = tap.step("typed", x + tap.step("types", segment))
        where = place()
        if where is not None:
            x = tap.step("placed", x + where)
        if self.norm is not None:
            x = tap.step("norm", self.norm(x))
        if self.project is not None:
            x = tap.step("project", self.project(x))
        return nnf.dropout(x, self.dropout, self.training)


def embedding_steps(
    spec: StackSpec, run: Pass, length: int, places: Iterator[Step], shared: bool
) -> Iterator[Step]:
    """Yield the steps of embedding `length` inputs; a `shared` front has its weights counted elsewhere."""
    name, D, width = f"{spec.prefix}embedding", spec.d_model, spec.d_summed
    rows = run.batch * spec.n_tokens(length)
    for step in FRONTS[spec.input].steps(spec, run, f"{name}.front", length):
        yield step.reused() if shared else step
    if spec.n_types:
        yield Step(f"{name}.types", "embedding", spec.n_types * width)
    yield from places
    if spec.embedding_norm:
        yield norm_step(f"{name}.norm", spec.norm, run, rows, width)
    if spec.embedding_projection:
        yield linear_step(
            f"{name}.project", "embedding", rows, width, D, bias=True, kept=rows * width * run.size
        )
    if spec.embedding_dropout:
        yield Step(f"{name}.dropout", "embedding", kept=rows * D)
