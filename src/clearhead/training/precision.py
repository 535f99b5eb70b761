"""Device and precision of training: what the hardware does well, measured rather than assumed."""

import functools
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from clearhead.errors import InputError, refuse
from clearhead.training.plan import TrainPlan
from clearhead.training.state import State

# Peak half-precision operations per second, by a part of the device's name; the first that fits counts.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


HOPELESS = 20  # times as slow as float32: beyond any error of measurement


@dataclass(frozen=True)
class Precision:
    """The dtype that matrix products are computed in; weights stay in float32."""

    device: torch.device
    dtype: torch.dtype | None  # of autocast; None: everything in float32
    sentence: str  # for the user, one line
    peak: float | None = None  # operations per second, where known

    @property
    def name(self) -> str:
        """The name in a recipe."""
        return str(self.dtype or torch.float32).removeprefix("torch.")

    @property
    def scaled(self) -> bool:
        """True if the loss must be scaled, so that small gradients do not underflow."""
        return self.dtype == torch.float16

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which to compute a loss (not its gradient)."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)

    def scaler(self, state: State | None = None) -> torch.amp.GradScaler:
        """Return a gradient scaler that continues from `state`; without float16 it does nothing."""
        scaler = torch.amp.GradScaler(self.device.type, enabled=self.scaled)
        if self.scaled and state is not None and state.scale is not None:
            scaler.load_state_dict(
                {**scaler.state_dict(), "scale": state.scale, "_growth_tracker": state.scale_age}
            )
        return scaler


def choose_precision(plan: TrainPlan, device: torch.device, settled: bool = False) -> Precision:
    """Choose the precision of `plan`, or float32 if `device` is slow with it; `settled`: measured before."""
    wanted, kind = plan.precision, device.type
    if wanted == "float32" or (wanted == "auto" and kind not in ("cpu", "cuda")):
        return Precision(device, None, f"float32 on {kind}")
    if kind == "cpu" and wanted == "float16":
        return Precision(device, None, "float32 on cpu: float16 is for GPUs")
    if kind == "cpu" and not cpu_has_bfloat16(HOPELESS if settled else 1.0):
        return Precision(device, None, "float32 on cpu: this one is slower with bfloat16")
    name = torch.cuda.get_device_name(device) if kind == "cuda" else ""
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    has_bfloat16 = kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted != "float16" and has_bfloat16:
        return Precision(
            device, torch.bfloat16, f"products in bfloat16, weights in float32, on {name or kind}", peak
        )
    why = "" if has_bfloat16 else ", which has no bfloat16"
    return Precision(
        device,
        torch.float16,
        f"products in float16 with a scaled loss, weights in float32, on {name or kind}{why}",
        peak,
    )


@functools.cache
def cpu_has_bfloat16(allowed: float = 1.0) -> bool:
    """Return True if a bfloat16 product takes at most `allowed` times as long as one in float32 on this CPU.

    Emulated, it is far slower.
    """
    exact = torch.ones(256, 256)
    rounded = exact.bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns at length that it has no kernel
        slow = _seconds(rounded)
        if slow > HOPELESS * _seconds(exact):
            return False  # beyond doubt, and each further measurement takes long
        return min(_seconds(rounded) for _ in range(5)) <= allowed * min(_seconds(exact) for _ in range(5))


def _seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - start


def best_device(name: str = "auto") -> torch.device:
    """Return the device called `name`; "auto": a GPU if there is one, else Apple's, else the CPU."""
    present = {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    if name == "auto":
        return torch.device(next(kind for kind, count in present.items() if count))
    here = ", ".join(kind for kind, count in present.items() if count)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f'device "{name}" is not known: choose auto or one of {here}') from None
    refuse(
        (device.index or 0) >= present.get(device.type, 0),
        f'device "{name}" is not on this machine: choose auto or one of {here}',
    )
    return device
