"""The feed-forward part: widen, bend, narrow. Each token by itself.

Shapes: B batch, T length, D model, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.config import ModelConfig
from clearhead.model.taps import SILENT, Tap


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh formula, as in the first GPT models."""
    return nnf.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """ReLU, squared."""
    return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nnf.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": nnf.silu,
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """down(activation(up x)), or, gated, down(activation(gate x) * up x)."""

    def __init__(self, config: ModelConfig, d_ff: int) -> None:
        super().__init__()
        bias = bool(config.feedforward_bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = config.feedforward_dropout
        self.gate = nn.Linear(config.d_model, d_ff, bias=bias) if config.gated else None
        self.up = nn.Linear(config.d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, config.d_model, bias=bias)

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        pre = tap("pre", self.up(x) if self.gate is None else self.gate(x))  # B T F
        post = self.activation(pre)
        if self.gate is not None:
            post = post * self.up(x)
        post = tap("post", post)
        if self.training:
            post = nnf.dropout(post, self.dropout)
        return tap("out", self.down(post))  # B T D
