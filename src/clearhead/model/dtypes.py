"""Precision: the dtype in which sums and statistics are taken."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in float32 at least: half-precision tensors are widened, float64 stays."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def precise(x: Tensor) -> Tensor:
    """`x` in float64; on the CPU where its own device has no such numbers."""
    return x.cpu().double() if x.device.type == "mps" else x.double()
