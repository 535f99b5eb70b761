"""What is done for the machine's sake: compiling where it pays, quick kernels, recomputing where memory is short."""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from clearhead.data.plan import DataPlan, Task
from clearhead.model.attention import Attention
from clearhead.model.transformer import Transformer
from clearhead.train.plan import TrainPlan

WORTH = 500  # steps below which compiling takes longer than it saves


def pays(task: Task, data: DataPlan, plan: TrainPlan, device: torch.device) -> bool:
    """Is compiling the model worth it? On a GPU, for many steps, with batches that all have one shape."""
    return device.type == "cuda" and one_shape(task, data) and (plan.steps or 0) >= WORTH


def one_shape(task: Task, data: DataPlan) -> bool:
    """Have all batches the same shape, and no padding?"""
    return task == "image" or (task == "lm" and data.packing == "stream")


def quick_attention(task: Task, data: DataPlan, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Contexts in which attention is quickest.

    From Hopper on, cuDNN's kernel is faster than the one PyTorch takes by itself; but it is planned anew for each shape.
    """
    if device.type != "cuda" or not one_shape(task, data) or torch.cuda.get_device_capability(device) < (9, 0):
        return nullcontext
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
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
        q, k, v = torch.split(nnf.linear(x, weight, bias), [part.out_features for part in parts], dim=-1)
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
