"""What is done for the machine's sake: compiling where it pays, recomputing where memory is short."""

from __future__ import annotations

import functools
import resource
import sys

import torch
from torch.utils.checkpoint import checkpoint

from clearhead.data.plan import DataPlan, Task
from clearhead.model.transformer import Transformer
from clearhead.train.plan import TrainPlan

WORTH = 500  # steps below which compiling takes longer than it saves


def pays(task: Task, data: DataPlan, plan: TrainPlan, device: torch.device) -> bool:
    """Is compiling the model worth it? On a GPU, for many steps, with batches that all have one shape."""
    one_shape = task == "image" or (task == "lm" and data.packing == "stream")
    return device.type == "cuda" and one_shape and (plan.steps or 0) >= WORTH


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
