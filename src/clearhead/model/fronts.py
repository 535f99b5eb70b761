"""Fronts: what turns an input into vectors of the model's width. Ids, image patches, vectors or frames.

Shapes: B batch, T length, D model, C channels.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.config import ModelConfig, StackPlan
from clearhead.model.norms import make_norm


class TokenFront(nn.Module):
    """A table of vectors, one per id; narrower tables are projected up."""

    def __init__(self, config: ModelConfig, plan: StackPlan) -> None:
        super().__init__()
        self.tokens = nn.Embedding(plan.vocab_size, plan.d_embedding)
        self.scale = config.embedding_scale

    def forward(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        """[B, T] -> [B, T, d_embedding]."""
        vectors = cast(Tensor, self.tokens(ids.long()))
        return vectors * self.scale if self.scale != 1 else vectors


class PatchFront(nn.Module):
    """Cut an image into squares, flatten each, project it; a class token may stand before them."""

    def __init__(self, config: ModelConfig, plan: StackPlan) -> None:
        super().__init__()
        self.patch = config.patch_size
        self.project = nn.Linear(config.n_channels * self.patch**2, config.d_model)
        self.class_token = nn.Parameter(torch.zeros(config.d_model)) if config.class_token else None

    def forward(self, pixels: Tensor, real: Tensor | None = None) -> Tensor:
        """[B, C, height, width] -> [B, patches (+ 1), D]."""
        patches = nnf.unfold(pixels, self.patch, stride=self.patch).transpose(1, 2)  # B T C·patch²
        vectors = cast(Tensor, self.project(patches))
        if self.class_token is None:
            return vectors
        return torch.cat([self.class_token.expand(vectors.shape[0], 1, -1), vectors], dim=1)


class VectorFront(nn.Module):
    """One linear layer on vectors that are there already: features, series, embeddings of something else."""

    def __init__(self, config: ModelConfig, plan: StackPlan) -> None:
        super().__init__()
        self.project = nn.Linear(config.d_input, config.d_model)

    def forward(self, vectors: Tensor, real: Tensor | None = None) -> Tensor:
        """[B, T, d_input] -> [B, T, D]."""
        return cast(Tensor, self.project(vectors))


class FrameFront(nn.Module):
    """Two convolutions over time, the second with a stride: sound and other dense series."""

    def __init__(self, config: ModelConfig, plan: StackPlan) -> None:
        super().__init__()
        kernel, stride = config.conv_kernel, config.conv_stride
        self.first = nn.Conv1d(config.d_input, config.d_model, kernel, padding=kernel // 2)
        self.second = nn.Conv1d(config.d_model, config.d_model, kernel, stride=stride, padding=kernel // 2)

    def forward(self, frames: Tensor, real: Tensor | None = None) -> Tensor:
        """[B, time, d_input] -> [B, time / stride, D]; what is not `real` [B, time] is silence, before and between."""
        silence = 1 if real is None else real[:, None, :].to(frames.dtype)
        x = nnf.gelu(self.first(frames.transpose(1, 2) * silence))
        return nnf.gelu(self.second(x * silence)).transpose(1, 2)


FRONTS: dict[str, type[nn.Module]] = {
    "tokens": TokenFront,
    "patches": PatchFront,
    "vectors": VectorFront,
    "frames": FrameFront,
}


class Embedding(nn.Module):
    """Front, segment and position vectors added up, then norm, projection and dropout."""

    def __init__(self, config: ModelConfig, plan: StackPlan, front: nn.Module | None = None) -> None:
        super().__init__()
        width = plan.d_embedding
        self.front = front if front is not None else FRONTS[plan.input](config, plan)
        self.types = (
            nn.Embedding(config.n_types, width) if config.n_types and plan.input == "tokens" else None
        )
        self.norm = make_norm(config, width) if config.embedding_norm else None
        self.project = (
            nn.Linear(width, config.d_model)
            if config.embedding_projection and plan.input == "tokens"
            else None
        )
        self.dropout = config.embedding_dropout or 0.0

    def forward(
        self, inputs: Tensor, types: Tensor | None, positions: Tensor | None, real: Tensor | None
    ) -> Tensor:
        """Inputs, position vectors [B|1, T, width] and which inputs are real -> [B, T, D]."""
        x = cast(Tensor, self.front(inputs, real))
        if self.types is not None:
            x = x + (self.types(types.long()) if types is not None else self.types.weight[0])
        if positions is not None:
            x = x + positions
        if self.norm is not None:
            x = self.norm(x)
        if self.project is not None:
            x = self.project(x)
        return nnf.dropout(x, self.dropout, self.training)
