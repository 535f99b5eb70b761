"""Copying a matrix that lies the other way round: PyTorch moves its numbers one by one."""

import torch
from torch import Tensor

from clearhead.run.kernels.library import compiled_before


def copied(tensor: Tensor, into: Tensor) -> Tensor:
    """Copy a tensor to where `into` lies, and return it; a turned matrix goes through `turn.h` if it can."""
    found = compiled_before() if _is_turned(tensor, into) else None
    if found is None:
        return into.copy_(tensor)
    columns, rows = tensor.shape
    found.clearhead_turn(tensor.data_ptr(), tensor.stride(1), rows, columns, into.data_ptr(), into.stride(0))
    return into


def _is_turned(tensor: Tensor, into: Tensor) -> bool:
    """Return True if both are float32 matrices of one shape whose numbers lie in columns and in rows."""
    return (
        tensor.dtype == into.dtype == torch.float32
        and tensor.device.type == into.device.type == "cpu"
        and tensor.ndim == 2
        and tensor.shape == into.shape
        and tensor.stride(0) == 1
        and into.stride(1) == 1
    )
