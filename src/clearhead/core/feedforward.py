"""The feed-forward part: widen, activate, narrow, for each token by itself.

A mixture of experts may take its place: see `variants.routing`.

Shapes: B batch, T length, D model, F feed-forward width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.config.registry import Registry
from clearhead.core.taps import SILENT, Tap


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU by its tanh approximation."""
    return nnf.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Compute GELU by its sigmoid approximation."""
    return x * torch.sigmoid(1.702 * x)


def relu2(x: Tensor) -> Tensor:
    """Compute ReLU, squared."""
    return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nnf.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": nnf.silu,
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """down(activation(up(x))) or, if gated, down(activation(gate(x)) * up(x)).

    A clamp bounds gate and up; a shift is added to up.
    """

    def __init__(self, spec: StackSpec, width: int | None = None) -> None:
        super().__init__()
        width = width or spec.d_ff
        self.activation = ACTIVATIONS[spec.activation]
        self.clamp, self.shift = spec.gated_clamp, spec.gated_shift or None
        self.dropout = spec.feedforward_dropout
        self.gate = nn.Linear(spec.d_model, width, bias=spec.feedforward_bias) if spec.gated else None
        self.up = nn.Linear(spec.d_model, width, bias=spec.feedforward_bias)
        self.down = nn.Linear(width, spec.d_model, bias=spec.feedforward_bias)

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        pre, factor = self.project(x)
        pre = tap.step("up" if factor is None else "gate", pre)  # B T F
        if self.clamp is not None:
            pre = tap.step("gate_clamped", pre.clamp(max=self.clamp))
        post = tap.step("activated", self.activation(tap("pre", pre)))
        if factor is not None:
            post = tap.step("gated", post * self._clamped(tap.step("up", factor), tap))
        post = tap("post", post)
        if self.training:
            post = nnf.dropout(post, self.dropout)
        return tap("out", tap.step("down", self.down(post)))  # B T D

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the activation and, if gated, its factor: [B, T, D] -> [B, T, F]."""
        return (self.up(x), None) if self.gate is None else (self.gate(x), self.up(x))

    def _clamped(self, up: Tensor, tap: Tap) -> Tensor:
        """Clamp and shift what the gate multiplies: [B, T, F] -> [B, T, F]."""
        if self.clamp is not None:
            up = tap.step("up_clamped", up.clamp(-self.clamp, self.clamp))
        return up if self.shift is None else tap.step("up_shifted", up + self.shift)


AT = "clearhead.variants"
# What stands in a block after attention: one feed-forward, several and a router, or nothing.
FEEDFORWARDS: Registry[Any] = Registry(
    {
        **{"feedforward": FeedForward, "scaled": f"{AT}.halves:ScaledFeedForward"},
        **{"experts": f"{AT}.routing:Experts", "none": f"{AT}.halves:NoFeedForward"},
    }
)


def feedforward_class(spec: StackSpec, layer: int) -> Any:
    """Return the class of the feed-forward part of a layer."""
    names, plain = spec.feedforwards(layer), spec.gate_scale == spec.up_scale == 1
    one = ("feedforward" if plain else "scaled") if "feedforward" in names else "experts"
    return FEEDFORWARDS[one if names else "none"]
