"""What training decides by the machine: device, precision, compiling, kernels; and the memory in use."""

import functools
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.batches.batch import Batch
from clearhead.config import ModelConfig
from clearhead.costs import cost
from clearhead.data.plan import DataPlan
from clearhead.errors import ConfigError, refuse
from clearhead.fast import float8
from clearhead.model.transformer import Transformer
from clearhead.parallel import planner
from clearhead.parallel.hardware import find_device
from clearhead.parallel.launch import processes_here
from clearhead.parallel.plan import ParallelPlan
from clearhead.parallel.stages import Checkpointing, Work
from clearhead.recipe import Recipe, TrainPlan
from clearhead.tasks.spec import TaskSpec
from clearhead.training.state import State

KERNEL_ORDER = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]
WORTH = 500  # steps below which compiling takes longer than it saves
COMPILING = 30.0  # seconds that compiling takes, about
# Seconds of a step for each layer, at the peak: where it takes less, handing it over takes longer.
LAYER = 1e-3
FLOAT8 = (8, 9)  # the first compute capability with products in float8
HOPELESS = 20  # times as slow as float32: beyond any error of measurement


@dataclass(frozen=True)
class Precision:
    """The dtype that matrix products are computed in; weights stay in float32."""

    device: torch.device
    dtype: torch.dtype | None  # of autocast; None: everything in float32
    sentence: str  # for the user, one line
    peak: float | None = None  # operations per second in `dtype`, where known
    float8: bool = False  # products of blocks are in float8; see `fast.float8`

    @property
    def name(self) -> str:
        """The name in a recipe."""
        return "float8" if self.float8 else str(self.dtype or torch.float32).removeprefix("torch.")

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
    if kind == "cpu" and wanted in ("float16", "float8"):
        return Precision(device, None, f"float32 on cpu: {wanted} is for GPUs")
    if kind == "cpu" and not cpu_has_bfloat16(HOPELESS if settled else 1.0):
        return Precision(device, None, "float32 on cpu: this one is slower with bfloat16")
    name = torch.cuda.get_device_name(device) if kind == "cuda" else ""
    known = find_device(name)
    peak = None if known is None else known.peak
    has_bfloat16 = kind != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "float8" and kind == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8:
        said = f"products of blocks in float8, others in bfloat16, weights in float32, on {name}"
        return Precision(device, torch.bfloat16, said, peak, float8=True)
    why = ", which has no float8" if wanted == "float8" else ""
    if wanted != "float16" and has_bfloat16:
        said = f"products in bfloat16, weights in float32, on {name or kind}{why}"
        return Precision(device, torch.bfloat16, said, peak)
    why = "" if has_bfloat16 else f", which has no {'float8 and no ' if why else ''}bfloat16"
    said = f"products in float16 with a scaled loss, weights in float32, on {name or kind}{why}"
    return Precision(device, torch.float16, said, peak)


def changes(asked: TrainPlan, plan: TrainPlan, precision: Precision) -> Iterator[str]:
    """Yield what a settled plan has other than was asked for, a line each."""
    if asked.warmup not in (None, plan.warmup):
        yield f"warm-up of {plan.warmup} steps: {asked.warmup} would be the whole run"
    if asked.precision not in ("auto", plan.precision):
        yield f"train.precision {asked.precision} is not to be had here: {precision.sentence}"


@functools.cache
def cpu_has_bfloat16(allowed: float = 1.0) -> bool:
    """Return True if a bfloat16 product takes at most `allowed` times as long as one in float32 on this CPU.

    Emulated, it is far slower.
    """
    exact = torch.ones(256, 256)
    rounded = exact.bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns at length that it has no kernel
        if _seconds(rounded) > HOPELESS * _seconds(exact):
            return False  # beyond doubt, and each further measurement takes long
        return min(_seconds(rounded) for _ in range(5)) <= allowed * min(_seconds(exact) for _ in range(5))


def _seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    matrix @ matrix
    return time.perf_counter() - start


def least_seconds(per_token: float, batch: Batch, plan: TrainPlan, precision: Precision) -> float | None:
    """Return what a step of such batches takes at the peak of the device, where both are known.

    `per_token`: operations for a token of training; 0: not known.
    """
    known = per_token and precision.peak
    return per_token * batch.n_tokens * plan.accumulate / precision.peak if known and precision.peak else None


def pays(
    task: TaskSpec, data: DataPlan, plan: TrainPlan, device: torch.device, least: float | None = None
) -> bool:
    """Is compiling the model worth it? On a GPU, with batches of one shape, for many steps or long ones.

    `least`: see `least_seconds`. Of a step, compiling saves about as much.
    """
    steps = plan.steps or 0
    saved = math.inf if least is None else steps * least
    return device.type == "cuda" and one_shape(task, data) and steps >= WORTH and saved >= COMPILING


def host_bound(config: ModelConfig, least: float | None) -> bool:
    """Return True if handing over a step takes longer than the step; `least`: see `least_seconds`."""
    layers = sum(stack.n_layers for stack in config.stacks)
    return least is None or least < LAYER * layers


def one_shape(task: TaskSpec, data: DataPlan) -> bool:
    """Return True if all batches have the same shape, and no padding."""
    return task.one_shape and data.packing == "stream"


def quick_attention(
    task: TaskSpec, data: DataPlan, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """Return a maker of contexts in which attention is fastest.

    From Hopper on, cuDNN's kernel is faster than PyTorch's own choice. It is planned anew for each shape,
    so it is used only where all batches have one.
    """
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    quick = functools.partial(sdpa_kernel, KERNEL_ORDER, set_priority=True)
    return quick if hopper and one_shape(task, data) else nullcontext


def suit_float8(model: Transformer, split: bool) -> str:
    """Let a model multiply in float8, in place; refuse one that is split or cannot. Return how much of it."""
    way_out = "set train.precision to bfloat16"
    refuse(
        split,
        "train.precision float8 is for one device, and several processes or train.offload split the weights: "
        + way_out,
        ConfigError,
    )
    fitting, layers = float8.suit(model)
    refuse(
        not fitting,
        f"train.precision float8: no linear layer of the blocks can multiply in it, which takes widths that "
        f"are multiples of {float8.UNIT} and no low-rank updates: {way_out}",
        ConfigError,
    )
    return f"{fitting} of {layers} linear layers of blocks multiply in float8"


def narrow(device: torch.device) -> bool:
    """Return True on a CPU without vector code in PyTorch, where `fast.training.suit_narrow` pays."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "DEFAULT"


def room(device: torch.device) -> int:
    """Return the bytes of memory that the device has."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fits(recipe: Recipe, config: ModelConfig, precision: Precision, mesh: ParallelPlan) -> bool:
    """Return True if a batch fits the device on a mesh; the processes of a CPU share its memory."""
    data, plan, device = recipe.data, recipe.train, precision.device
    longest = cost(config).length
    length = min(data.max_length or longest, longest)
    rows = data.batch_tokens // length if data.batch_tokens else data.batch_size
    again: Checkpointing = "full" if plan.checkpointing else "none"
    work = Work(config, length, max(1, rows), precision.name, again, plan.optimizer)
    return planner.fits(work, mesh, room(device) / (processes_here() if device.type == "cpu" else 1))


def memory(device: torch.device) -> int:
    """Return the most bytes in use so far: on a GPU allocated, on a CPU resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
