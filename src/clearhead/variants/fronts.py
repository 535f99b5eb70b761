"""Fronts other than a token table: image patches, vectors, frames.

Shapes: B batch, T length, D model, C channels.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.steps import Pass, Step, linear_step


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
        self.project = nn.Linear(spec.d_input, spec.d_model, bias=spec.patch_bias)

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
        """Yield each convolution as a matmul; it keeps its own input and that of gelu."""
        D, kernel = spec.d_model, spec.conv_kernel
        before, after = run.batch * length, run.batch * spec.n_tokens(length)
        first, second = before * (spec.d_input + D) * run.size, (before + after) * D * run.size  # bytes kept
        yield linear_step(
            f"{name}.first", "embedding", before, spec.d_input * kernel, D, True, gradients=1, kept=first
        )
        yield linear_step(f"{name}.second", "embedding", after, D * kernel, D, True, kept=second)
