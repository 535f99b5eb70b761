"""How the kernels of a step follow one another on a GPU. Imported only where Triton is.

From compute capability 9 on, a kernel may start while the one before it still runs. At level 1 it is launched
then and waits; at level 2 it also lets the next one start. All kernels that are launched so wait for the one
before them: by that, what came earlier has ended as well.

Before it waits, a kernel may read what no kernel of the step writes: weights, what earlier steps have kept,
and what came before the first kernel that lets others start, such as positions and masks.
"""

# mypy: ignore-errors
# Triton reads these functions as a language of its own, whose types are not Python's.

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def lets_next(AHEAD: tl.constexpr):
    """Let the next kernel start."""
    if AHEAD > 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def waits(AHEAD: tl.constexpr):
    """Wait until the kernel before has ended."""
    if AHEAD > 0:
        tl.extra.cuda.gdc_wait()


@triton.jit
def follow(AHEAD: tl.constexpr):
    """Let the next kernel start, and wait until the one before has ended."""
    lets_next(AHEAD)
    waits(AHEAD)


@functools.cache
def _ahead(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launched(x: Tensor, level: int = 1) -> dict[str, int | bool]:
    """Return what a kernel on this tensor's device is launched with."""
    ahead = level if x.is_cuda and _ahead(x.device.index) else 0
    return {"AHEAD": ahead, "launch_pdl": True} if ahead else {"AHEAD": 0}


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Return zeros in which programs of one kernel count who is last; that one sets its own back to zero."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many processors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
