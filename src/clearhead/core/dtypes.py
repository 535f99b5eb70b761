"""Precision: the dtype in which sums and statistics are taken."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Kinds of devices with autocast; a compiled step cannot ask.
AUTOCAST = {
    kind for kind in ("cpu", "cuda", "mps", "xpu", "mtia", "hpu") if torch.amp.is_autocast_available(kind)
}


def wide(x: Tensor) -> Tensor:
    """Cast half precision to float32; leave other dtypes alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def precise(x: Tensor) -> Tensor:
    """Cast to float64, on the CPU where the device of `x` has no float64."""
    return x.cpu().double() if x.device.type == "mps" else x.double()


def uncast(x: Tensor) -> AbstractContextManager[object]:
    """Return a `with` block in which autocast leaves matmuls of tensors like `x` in their own dtype."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if kind in AUTOCAST else nullcontext()
