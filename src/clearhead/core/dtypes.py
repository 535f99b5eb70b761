"""Precision: the dtype of sums, and the devices that have autocast, which a compiled step cannot ask."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

AUTOCAST = {*filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps", "xpu", "mtia", "hpu"))}


def wide(x: Tensor) -> Tensor:
    """Cast half precision to float32; leave other dtypes alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def precise(x: Tensor) -> Tensor:
    """Cast to float64, on the CPU where the device of `x` has no float64."""
    return x.cpu().double() if x.device.type == "mps" else x.double()


def uncast(x: Tensor) -> AbstractContextManager[object]:
    """Return a `with` block in which autocast leaves matmuls of tensors like `x` in their own dtype."""
    return torch.autocast(x.device.type, enabled=False) if x.device.type in AUTOCAST else nullcontext()
