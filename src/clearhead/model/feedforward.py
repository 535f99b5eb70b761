"""The feed-forward part: widen, activate, narrow, for each token by itself.

Shapes: B batch, T length, D model, F feed-forward width.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.config import StackSpec
from clearhead.model.steps import Pass, Step, linear_step
from clearhead.model.taps import SILENT, Tap


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU by its tanh approximation."""
    return nnf.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """Compute ReLU, squared."""
    return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nnf.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": nnf.silu,
    "relu2": relu2,
}


class FeedForward(nn.Module):
    """down(activation(up(x))) or, if gated, down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.dropout = spec.feedforward_dropout
        self.gate = nn.Linear(spec.d_model, spec.d_ff, bias=spec.feedforward_bias) if spec.gated else None
        self.up = nn.Linear(spec.d_model, spec.d_ff, bias=spec.feedforward_bias)
        self.down = nn.Linear(spec.d_ff, spec.d_model, bias=spec.feedforward_bias)

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        pre, up = self.project(x)
        pre = tap("pre", tap.step("up" if up is None else "gate", pre))  # B T F
        post = tap.step("activated", self.activation(pre))
        if up is not None:
            post = tap.step("gated", post * tap.step("up", up))
        post = tap("post", post)
        if self.training:
            post = nnf.dropout(post, self.dropout)
        return tap("out", tap.step("down", self.down(post)))  # B T D

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input of the activation and, if gated, its factor: [B, T, D] -> [B, T, F]."""
        return (self.up(x), None) if self.gate is None else (self.gate(x), self.up(x))


def feedforward_steps(
    spec: StackSpec, run: Pass, name: str, rows: int, copies: int = 1, idle: int = 0
) -> Iterator[Step]:
    """Yield the steps of a feed-forward, or of `copies` experts of which a token skips `idle`, on `rows`."""
    D, F, bias = spec.d_model, spec.d_ff, spec.feedforward_bias
    wide_values = rows * F * run.size
    keeps_input = spec.activation != "relu"  # the backward pass of relu needs its output alone

    def experts(step: Step) -> Step:
        return dataclasses.replace(step, parameters=copies * step.parameters, idle=idle * step.parameters)

    for projection in ("gate", "up") if spec.gated else ("up",):
        read = keeps_input and (projection == "gate" or not spec.gated)
        kept = wide_values * (2 if read else 1)
        yield experts(linear_step(f"{name}.{projection}", "feedforward", rows, D, F, bias, kept=kept))
    if spec.feedforward_dropout:
        yield Step(f"{name}.dropout", "feedforward", kept=rows * F)
    kept = wide_values if spec.gated or spec.feedforward_dropout else 0
    yield experts(linear_step(f"{name}.down", "feedforward", rows, F, D, bias, kept=kept))
