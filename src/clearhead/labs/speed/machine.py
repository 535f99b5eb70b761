"""What a machine can do at best, measured: bytes read and floating-point operations computed in a second."""

import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from clearhead.inside.results import Result

# Bytes that are read, more than any cache holds, and the width of the matrices that are multiplied. For a
# smaller model, a matrix of its size is read as often: caches hold of it what they hold of the model.
READ = {"cpu": 2**28, "cuda": 2**31}
WIDTH = {"cpu": 1536, "cuda": 8192}
REPEATS = 5  # the quickest counts: a busy machine only ever adds


@dataclass(frozen=True)
class Machine(Result):
    """A device, with what it reads and computes in a second in a model's dtype."""

    name: str
    threads: int  # of a processor; 0 on a GPU
    dtype: str
    bandwidth: float  # bytes per second, of a matrix times a vector
    arithmetic: float  # operations per second, of a product of two large matrices

    def least(self, read: float, flops: float) -> float:
        """Return the seconds that reading so many bytes and computing so much take at least."""
        return max(read / self.bandwidth, flops / self.arithmetic)

    def best(self, other: "Machine") -> "Machine":
        """Return the better figures of two measurements: a busy machine only ever takes away."""
        bandwidth, arithmetic = max(self.bandwidth, other.bandwidth), max(self.arithmetic, other.arithmetic)
        return replace(self, bandwidth=bandwidth, arithmetic=arithmetic)


@torch.no_grad()
def measure_machine(device: torch.device, dtype: torch.dtype, weights: float = math.inf) -> Machine:
    """Time a matrix times a vector, as large as so many bytes of weights, and a product of two matrices."""
    kind = device.type if device.type in READ else "cpu"
    rows = max(1, int(min(READ[kind], weights)) // (8192 * dtype.itemsize))
    matrix = torch.ones(rows, 8192, dtype=dtype, device=device)
    vector = torch.ones(8192, dtype=dtype, device=device)
    times = max(1, READ[kind] // matrix.nbytes)

    def read_all() -> None:
        for _ in range(times):
            torch.mv(matrix, vector)

    read = quickest(read_all, device)
    left, right = torch.ones(2, WIDTH[kind], WIDTH[kind], dtype=dtype, device=device)
    product = quickest(lambda: left @ right, device)
    on_gpu = device.type == "cuda"
    return Machine(
        torch.cuda.get_device_name(device) if on_gpu else f"CPU {platform.machine()}",
        0 if on_gpu else torch.get_num_threads(),
        str(dtype).removeprefix("torch."),
        times * matrix.nbytes / read,
        2 * WIDTH[kind] ** 3 / product,
    )


def quickest(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the quickest of some runs, after one to warm up."""
    run()
    return min(timed(run, device) for _ in range(REPEATS))


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, until the device has done it."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
