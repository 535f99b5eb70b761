"""Precision: the dtype in which sums and statistics are taken."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Cast half precision to float32; leave other dtypes alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def precise(x: Tensor) -> Tensor:
    """Cast to float64, on the CPU where the device of `x` has no float64."""
    return x.cpu().double() if x.device.type == "mps" else x.double()
