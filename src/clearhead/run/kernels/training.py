"""Replacements within a model that is to be trained. Parameters, their names and results stay the same.

Shapes: D width in, N width out.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from clearhead.core import dtypes, feedforward, stack
from clearhead.core.attention import Attention
from clearhead.core.transformer import Transformer
from clearhead.run.kernels.parts import bias_of, like, original
from clearhead.variants.routing import Experts, Router

Activation = Callable[[Tensor], Tensor]

MANY = 512  # rows from which a matmul gains more than a transposed copy of its weight costs


def join_projections(model: Transformer) -> None:
    """Compute the three projections of each attention as one matmul, where all are plain linear layers."""
    for name, part in list(model.named_modules()):
        if type(part) is Attention and all(type(layer) is nn.Linear for layer in (part.q, part.k, part.v)):
            model.set_submodule(name, like(part, JoinedAttention))


@contextmanager
def unjoined(model: nn.Module) -> Iterator[None]:
    """Compute the projections one by one for the length of a `with` block, so that hooks on each run."""
    joined = {name: part for name, part in model.named_modules() if isinstance(part, JoinedAttention)}
    try:
        for name, part in joined.items():
            model.set_submodule(name, like(part, Attention))
        yield
    finally:
        for name, part in joined.items():
            model.set_submodule(name, part)


class JoinedAttention(Attention):
    """Attention for training: three weights with a gradient each, concatenated in each forward pass."""

    stands_for = Attention

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention.project`."""
        if source is not x:
            return super().project(x, source)
        layers = (self.q, self.k, self.v)
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if self.q.bias is None else torch.cat([bias_of(layer) for layer in layers])
        linear = getattr(self.q, "matmul", nnf.linear)
        q, k, v = torch.split(linear(x, weight, bias), [layer.out_features for layer in layers], dim=-1)
        return q, k, v


def recompute(model: Transformer) -> None:
    """Keep only the input of each block, and run the block again in the backward pass."""
    for name, part in list(model.named_modules()):
        if type(part) is stack.Block:
            model.set_submodule(name, like(part, RecomputedBlock))


class TrainedLinear(nn.Linear):
    """A linear layer for training whose matmul is another function of x, weight and bias."""

    stands_for = nn.Linear
    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        return self.matmul(x, self.weight, self.bias)


class RecomputedBlock(stack.Block):
    """A block whose activations are computed again in the backward pass."""

    stands_for = stack.Block

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """See `Block.forward`."""
        return cast(Tensor, checkpoint(super().forward, *inputs, use_reentrant=False, **named))


def block_linears(model: Transformer) -> dict[str, nn.Linear]:
    """Return the linear layers of blocks by their names, without routers, which are small and decide much."""
    mixtures = [part for part in model.modules() if isinstance(part, Experts)]
    routers: set[nn.Module | None] = {layer for part in mixtures for layer in (part.router, part.shared_gate)}
    routers |= {part.score for part in model.modules() if isinstance(part, Router)}
    return {
        name: cast(nn.Linear, part)
        for name, part in model.named_modules()
        if original(part) is nn.Linear and part not in routers and ".blocks." in f".{name}"
    }


# Compiled code ------------------------------------------------------------------------------------------


def suit_compiled(model: Transformer) -> None:
    """Let activations be computed in the ways that are fast in compiled code."""
    for part in model.modules():
        if isinstance(part, feedforward.FeedForward):
            part.activation = COMPILED_ACTIVATIONS.get(part.activation, part.activation)


def sigmoid_gelu(x: Tensor) -> Tensor:
    """Compute GELU of x [...] by its tanh formula: (1 + tanh(u)) / 2 is the sigmoid of 2u, and costs less."""
    wide = dtypes.wide(x)
    steep = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide * torch.sigmoid(steep)).to(x.dtype)


COMPILED_ACTIVATIONS: dict[Activation, Activation] = {feedforward.gelu_tanh: sigmoid_gelu}

# CPUs with narrow vectors -------------------------------------------------------------------------------


def suit_narrow(model: Transformer) -> None:
    """Let linear layers and GELUs compute in the ways that are fast on CPUs with narrow vectors."""
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear:
            model.set_submodule(name, like(part, TrainedLinear, matmul=narrow_linear))
        elif isinstance(part, feedforward.FeedForward):
            part.activation = NARROW_ACTIVATIONS.get(part.activation, part.activation)


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `nnf.linear` of x [..., D], weight [N, D] and bias [N].

    With many rows and a gradient to come, it multiplies with a transposed copy of the weight.
    """
    plain = x.dtype.itemsize < 4 or torch.is_autocast_enabled("cpu") or not x.requires_grad
    if plain or x.numel() < MANY * x.shape[-1]:
        return nnf.linear(x, weight, bias)
    return cast(Tensor, _NarrowProduct.apply(x, weight, bias))  # type: ignore[no-untyped-call]


class _NarrowProduct(torch.autograd.Function):
    """Matmuls in which neither matrix is transposed; the gradient of a bias is a matmul too, not a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows, transposed = x.reshape(-1, x.shape[-1]), weight.t().contiguous()
        y = rows @ transposed if bias is None else torch.addmm(bias, rows, transposed)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, None for those that are frozen."""
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = upstream.reshape(-1, upstream.shape[-1])
        return (
            (rows @ weight).view_as(x) if for_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if for_weight else None,
            rows.new_ones(rows.shape[0]) @ rows if for_bias else None,
        )


def narrow_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute GELU of x [...], exact or by the "tanh" formula."""
    if x.dtype.itemsize < 4 or not x.requires_grad:
        return nnf.gelu(x, approximate=approximate)
    return cast(Tensor, _NarrowGelu.apply(x, approximate))  # type: ignore[no-untyped-call]


class _NarrowGelu(torch.autograd.Function):
    """GELU whose slope is computed from its value y: y / x already holds the erf or tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        y = nnf.gelu(x, approximate=approximate)
        ctx.save_for_backward(x, y)
        ctx.approximate = approximate
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """With s = y / x: s + x · density(x), or by the tanh formula s + 2a · y · (1 - s) · (1 + 3b · x²)."""
        x, y = ctx.saved_tensors
        s = (y / x).nan_to_num_(0.5)
        if ctx.approximate == "tanh":
            a, b = math.sqrt(2 / math.pi), 0.044715
            steepness = torch.addcmul(x.new_tensor(2 * a), x, x, value=6 * a * b)
            slope = torch.addcmul(s, torch.addcmul(y, y, s, value=-1), steepness)
        else:
            slope = torch.addcmul(s, x, x.square().mul_(-0.5).exp_(), value=1 / math.sqrt(2 * math.pi))
        return slope.mul_(upstream), None


NARROW_ACTIVATIONS: dict[Activation, Activation] = {
    nnf.gelu: narrow_gelu,
    feedforward.gelu_tanh: functools.partial(narrow_gelu, approximate="tanh"),
}
# Which activation of a model each of these stands for.
OF_TRAINING = {new: old for ways in (COMPILED_ACTIVATIONS, NARROW_ACTIVATIONS) for old, new in ways.items()}
