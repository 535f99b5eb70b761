"""Matrices that lie in columns, as some files hold them: copies in rows, and laying out a model's own."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from clearhead.run.kernels.library import compiled_before

THREADS = min(4, os.cpu_count() or 1)


def is_transposed(tensor: Tensor) -> bool:
    """Return True for a matrix whose columns follow each other in memory, and not its rows."""
    return tensor.ndim == 2 and tensor.stride(0) == 1 and not tensor.is_contiguous()


def row_major(tensor: Tensor) -> Tensor:
    """Return a copy of a matrix that lies in rows."""
    return copied(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device))


def lay_out(parameter: Tensor) -> None:
    """Copy a parameter that lies in columns, and its gradient, into rows."""
    if is_transposed(parameter):
        parameter.data = row_major(parameter.detach())
        parameter.grad = None if parameter.grad is None else parameter.grad.contiguous()


def lay_out_when_trained(parameter: Tensor) -> None:
    """Let a parameter lie in columns until its first gradient comes, before an optimizer keeps anything."""
    parameter.register_post_accumulate_grad_hook(lay_out)  # type: ignore[no-untyped-call]


def lay_out_rows(model: nn.Module) -> bool:
    """Copy the matrices of a model that lie in columns into rows; return False if any has to stay.

    Only those of `lay_out_when_trained` may change: fused optimizers walk through memory, so that what they
    keep of a weight has to lie as the weight does.
    """
    transposed = [parameter for parameter in model.parameters() if is_transposed(parameter)]
    hooks = [getattr(parameter, "_post_accumulate_grad_hooks", None) or {} for parameter in transposed]
    movable = [parameter for parameter, own in zip(transposed, hooks) if lay_out in own.values()]
    compiled_before()  # looked up once, not by every thread at the same time
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lay_out, movable))
    return len(movable) == len(transposed)


def copied(tensor: Tensor, into: Tensor) -> Tensor:
    """Copy a tensor to where `into` lies, and return it; PyTorch alone transposes number by number."""
    suits = (
        tensor.dtype == into.dtype == torch.float32
        and tensor.device.type == into.device.type == "cpu"
        and tensor.ndim == 2
        and tensor.shape == into.shape
        and tensor.stride(0) == 1
        and into.stride(1) == 1
    )
    found = compiled_before() if suits else None
    if found is None:
        return into.copy_(tensor)
    columns, rows = tensor.shape
    pointers = (tensor.data_ptr(), tensor.stride(1), rows, columns, into.data_ptr(), into.stride(0))
    found.clearhead_transpose(*pointers)
    return into
