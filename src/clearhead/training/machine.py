"""What training decides by the machine: whether compiling pays, which kernels to use, memory in use."""

import functools
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.data.plan import DataPlan
from clearhead.tasks.spec import TaskSpec
from clearhead.training.plan import TrainPlan

WORTH = 500  # steps below which compiling takes longer than it saves


def pays(task: TaskSpec, data: DataPlan, plan: TrainPlan, device: torch.device) -> bool:
    """Is compiling the model worth it? On a GPU, for many steps, with batches that all have one shape."""
    return device.type == "cuda" and one_shape(task, data) and (plan.steps or 0) >= WORTH


def one_shape(task: TaskSpec, data: DataPlan) -> bool:
    """Return True if all batches have the same shape, and no padding."""
    return task.one_shape and data.packing == "stream"


def quick_attention(
    task: TaskSpec, data: DataPlan, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """Return a maker of contexts in which attention is fastest.

    From Hopper on, cuDNN's kernel is faster than PyTorch's own choice. It is planned anew for each shape,
    so it is used only where all batches have one.
    """
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if not (hopper and one_shape(task, data)):
        return nullcontext
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    return functools.partial(sdpa_kernel, order, set_priority=True)


def narrow(device: torch.device) -> bool:
    """Return True on a CPU without vector code in PyTorch, where `fast.training.suit_narrow` pays."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "DEFAULT"


def memory(device: torch.device) -> int:
    """Return the most bytes in use so far: on a GPU allocated, on a CPU resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
