"""Steps: the cost of each part, stated beside the code of its forward pass.

Each part has a function that yields a `Step` for whatever owns weights, multiplies matrices or keeps bytes
for the backward pass. `costs` adds them up without building a model.

Shapes: B batch, T query length, S key length, D model.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from clearhead.core.config import NormSpec

Part = Literal["embedding", "positions", "attention", "cross", "feedforward", "norms", "head"]
INDEX = 8  # bytes of one id


@dataclass(frozen=True)
class Step:
    """One step of the forward pass; a product is `count` times [m, k] @ [k, n]."""

    name: str  # as taps name it: "blocks.3.attention.q", "encoder.norm", "head.out"
    part: Part
    parameters: int = 0  # without those that an earlier step has counted
    idle: int = 0  # the part of them in experts that a token does not visit
    m: int = 0
    n: int = 0
    k: int = 0
    count: int = 1
    gradients: int = 2  # products in the backward pass: one for each factor that has a gradient
    kept: int = 0  # bytes held for the backward pass
    weights: int = 0  # of its matrix, without those that an earlier step has counted
    joined: bool = False  # training concatenates its matrix with others, anew in each pass

    @property
    def forward(self) -> int:
        """FLOPs of the forward pass."""
        return 2 * self.m * self.n * self.k * self.count

    @property
    def backward(self) -> int:
        """FLOPs of the backward pass."""
        return self.gradients * self.forward

    def reused(self) -> Self:
        """Return the same step without weights, which an earlier step has counted."""
        return dataclasses.replace(self, parameters=0, idle=0, weights=self.weights if self.joined else 0)


class Pass(NamedTuple):
    """The size of one forward pass. In half precision its weights are float32, under autocast."""

    batch: int  # rows
    size: int  # bytes of one value of a product
    autocast: bool = True  # else weights and the residual stream are of this size too

    @property
    def wide(self) -> int:
        """Bytes of one value of a weight, of the residual stream, and where half precision is widened."""
        return max(self.size, 4) if self.autocast else self.size

    @property
    def half(self) -> bool:
        """Return True where products read copies of their inputs and of their weights."""
        return self.size < self.wide


def linear_step(
    name: str, part: Part, rows: int, d_in: int, d_out: int, bias: bool, joined: bool = False, **more: int
) -> Step:
    """Return the step of a linear layer on `rows` vectors."""
    parameters, weights = (d_in + bias) * d_out, d_in * d_out
    return Step(name, part, parameters, m=rows, n=d_out, k=d_in, weights=weights, joined=joined, **more)


def norm_step(
    name: str, norm: NormSpec, run: Pass, rows: int, width: int, groups: int = 1, input_kept: bool = False
) -> Step:
    """Return the step of `groups` norms of `width` in each row; an earlier step may have kept the input.

    The input is float32 at least: the residual stream, or a copy of what a product returned.
    """
    parameters, values = width * (1 + norm.bias), rows * groups * width
    inputs = 0 if input_kept else values
    if norm.kind == "layernorm":
        return Step(name, "norms", parameters, kept=inputs * run.wide + 2 * rows * groups * 4)
    return Step(name, "norms", parameters, kept=(values + inputs + rows * groups) * run.wide)
