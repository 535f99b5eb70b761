"""What is done for the machine's sake: compiling where it pays, quick kernels, recomputing where memory is short."""

from __future__ import annotations

import functools
import math
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from clearhead.data.plan import DataPlan
from clearhead.model.attention import Attention
from clearhead.model.feedforward import FeedForward, gelu_tanh
from clearhead.model.transformer import Transformer
from clearhead.tasks.spec import TaskSpec
from clearhead.training.plan import TrainPlan

WORTH = 500  # steps below which compiling takes longer than it saves
MANY = 512  # rows from which on a product gains more than it costs to lay out its weight anew


def pays(task: TaskSpec, data: DataPlan, plan: TrainPlan, device: torch.device) -> bool:
    """Is compiling the model worth it? On a GPU, for many steps, with batches that all have one shape."""
    return device.type == "cuda" and one_shape(task, data) and (plan.steps or 0) >= WORTH


def one_shape(task: TaskSpec, data: DataPlan) -> bool:
    """Return True if all batches have the same shape, and no padding."""
    return task.one_shape and data.packing == "stream"


def quick_attention(
    task: TaskSpec, data: DataPlan, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """Contexts in which attention is quickest.

    From Hopper on, cuDNN's kernel is faster than the one PyTorch takes by itself; but it is planned anew for each shape.
    """
    if (
        device.type != "cuda"
        or not one_shape(task, data)
        or torch.cuda.get_device_capability(device) < (9, 0)
    ):
        return nullcontext
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return functools.partial(sdpa_kernel, order, set_priority=True)


class JoinedAttention(Attention):
    """Self-attention that makes queries, keys and values in one product. The weights stay three, and so do their gradients."""

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention.project`."""
        if source is not x:
            return super().project(x, source)
        parts = (self.q, self.k, self.v)
        weight = torch.cat([part.weight for part in parts])
        bias = None if self.q.bias is None else torch.cat([part.bias for part in parts])
        linear = narrow_linear if isinstance(self.q, NarrowLinear) else nnf.linear
        q, k, v = torch.split(linear(x, weight, bias), [part.out_features for part in parts], dim=-1)
        return q, k, v


def join_projections(model: Transformer) -> None:
    """Let every attention of a model make its three projections at once, where they are plain ones: one large product is quicker."""
    for part in model.modules():
        if type(part) is Attention and all(type(one) is nn.Linear for one in (part.q, part.k, part.v)):
            part.__class__ = JoinedAttention


@contextmanager
def parted(model: nn.Module) -> Iterator[None]:
    """The projections one by one again, for whoever looks at them."""
    joined: list[nn.Module] = [part for part in model.modules() if type(part) is JoinedAttention]
    for part in joined:
        part.__class__ = Attention
    try:
        yield
    finally:
        for part in joined:
            part.__class__ = JoinedAttention


# CPUs with narrow vectors -----------------------------------------------------------------------------------------------


def narrow(device: torch.device) -> bool:
    """Is this a CPU that PyTorch has no wide vectors for? Some of its own ways are slow there, and these below are quicker."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "DEFAULT"


def suit_narrow(model: Transformer) -> None:
    """Let a model's linear layers and GELUs go the ways that are quick on CPUs with narrow vectors; their results are the same."""
    for part in model.modules():
        if type(part) is nn.Linear:
            part.__class__ = NarrowLinear
        elif isinstance(part, FeedForward):
            part.activation = _GELUS.get(part.activation, part.activation)


class NarrowLinear(nn.Linear):
    """A linear layer by `narrow_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        return narrow_linear(x, self.weight, self.bias)


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`nnf.linear` of x [..., D], weight [N, D] and bias [N]; for many rows to learn from, by a copy of the weight laid the other way."""
    plain = x.dtype.itemsize < 4 or torch.is_autocast_enabled("cpu") or not x.requires_grad
    if plain or x.numel() < MANY * x.shape[-1]:
        return nnf.linear(x, weight, bias)
    return cast(Tensor, _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """Both products as the library does them best, with neither matrix transposed; a bias learns by a product too, not by a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `narrow_linear`."""
        ctx.save_for_backward(x, weight)
        rows, turned = x.reshape(-1, x.shape[-1]), weight.t().contiguous()
        y = rows @ turned if bias is None else torch.addmm(bias, rows, turned)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of what is trained of x, weight and bias."""
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = upstream.reshape(-1, upstream.shape[-1])
        return (
            (rows @ weight).view_as(x) if for_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if for_weight else None,
            rows.new_ones(rows.shape[0]) @ rows if for_bias else None,
        )


def narrow_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of x [...], exact or by the "tanh" formula."""
    if x.dtype.itemsize < 4 or not x.requires_grad:
        return nnf.gelu(x, approximate=approximate)
    return cast(Tensor, _Gelu.apply(x, approximate))  # type: ignore[no-untyped-call]


class _Gelu(torch.autograd.Function):
    """GELU whose slope is made from its own value: what passes of x is y / x, so that no second erf or tanh is taken."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        """See `narrow_gelu`."""
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


_GELUS: dict[object, Callable[[Tensor], Tensor]] = {
    nnf.gelu: narrow_gelu,
    gelu_tanh: functools.partial(narrow_gelu, approximate="tanh"),
}


# Memory -----------------------------------------------------------------------------------------------------------------


def recompute(model: Transformer) -> None:
    """Keep only what enters each block, and run the block again in the backward pass."""
    for stack in (model.encoder, model.decoder):
        for block in stack.blocks if stack is not None else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def memory(device: torch.device) -> int:
    """The most bytes held so far, on the device or, on a CPU, resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
