"""What training decides by the machine: device, precision, compiling, kernels; and the memory in use."""

import functools
import math
import os
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.core.config import ModelConfig
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.learn.batches.batch import Batch
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.parallel import ParallelPlan, planner, processes_here
from clearhead.learn.parallel.division import Checkpointing, Work
from clearhead.learn.parallel.estimate import find_device
from clearhead.learn.recipe import Recipe, TrainPlan
from clearhead.learn.tasks.task import Task
from clearhead.learn.training.state import State
from clearhead.run.kernels import float8
from clearhead.variants.costs import cost

KERNEL_ORDER = [
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
]
WORTH = 500  # steps below which compiling takes longer than it saves
COMPILING = 30.0  # seconds that compiling takes, about
# Seconds of a step for each layer, at the peak: where it takes less, handing it over takes longer.
LAYER = 1e-3
FLOAT8 = (8, 9)  # the first compute capability with matmuls in float8


@dataclass(frozen=True)
class Precision:
    """The dtype that matmuls are computed in; weights stay in float32."""

    device: torch.device
    dtype: torch.dtype | None  # of autocast; None: everything in float32
    sentence: str  # for the user, one line
    peak: float | None = None  # operations per second in `dtype`, where known
    float8: bool = False  # matmuls of blocks are in float8; see `run.kernels.float8`

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
            own = {"scale": state.scale, "_growth_tracker": state.scale_age}
            scaler.load_state_dict(scaler.state_dict() | own)
        return scaler


def choose_precision(plan: TrainPlan, device: torch.device) -> Precision:
    """Choose the precision of `plan`, by what the device has and never by a clock; refuse what it has not.

    `auto` is bfloat16 on a GPU that has it, else float16 there, and float32 everywhere else.
    """
    kind, on_gpu = device.type, device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else kind
    has_bfloat16 = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
    wanted = plan.precision
    if wanted == "auto":
        wanted = "float32" if not on_gpu else "bfloat16" if has_bfloat16 else "float16"
    lacks = (
        (wanted == "bfloat16" and not has_bfloat16)
        or (wanted == "float16" and kind == "cpu")
        or (wanted == "float8" and not (on_gpu and torch.cuda.get_device_capability(device) >= FLOAT8))
    )
    usual = "float32 or bfloat16" if kind == "cpu" else "auto"
    refuse(
        lacks,
        f"train.precision {wanted} is not to be had on {name}: set train.precision to {usual}",
        ConfigError,
    )
    known = find_device(name) if on_gpu else None
    peak = None if known is None else known.peak
    if wanted == "float32":
        return Precision(device, None, f"float32 on {kind}")
    if wanted == "float8":
        sentence = f"mixed precision on {name}: float8 matmuls in blocks, bfloat16 elsewhere, float32 weights"
        return Precision(device, torch.bfloat16, sentence, peak, float8=True)
    if wanted == "float16":
        why = "" if has_bfloat16 else ", which has no bfloat16"
        sentence = f"mixed precision on {name}{why}: float16 matmuls, float32 weights, a scaled loss"
        return Precision(device, torch.float16, sentence, peak)
    slow = kind == "cpu" and cpu_has_bfloat16() is False
    why = ", which has no instructions for bfloat16 (float32 is faster)" if slow else ""
    sentence = f"mixed precision on {name}{why}: bfloat16 matmuls, float32 weights"
    return Precision(device, torch.bfloat16, sentence, peak)


@functools.cache
def cpu_has_bfloat16() -> bool | None:
    """Return True if the CPU has instructions for matmuls in bfloat16, as Linux tells; None: not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    listing = [line for line in lines if line.lower().startswith(("flags", "features"))]
    features = {word for line in listing for word in line.split()}
    return not features.isdisjoint(("avx512_bf16", "amx_bf16", "bf16")) if features else None


def least_seconds(per_token: float, batch: Batch, plan: TrainPlan, precision: Precision) -> float | None:
    """Return what the shortest step of such batches takes at the peak of the device, where both are known.

    `per_token`: operations for a token of training; 0: not known.
    """
    if not per_token or not precision.peak:
        return None
    return per_token * batch.n_tokens * min(plan.accumulates) / precision.peak


def pays(
    task: Task, data: DataPlan, plan: TrainPlan, device: torch.device, least: float | None = None
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


def one_shape(task: Task, data: DataPlan) -> bool:
    """Return True if all batches have the same shape, and no padding."""
    return task.one_shape and data.packing == "stream"


def quick_attention(
    task: Task, data: DataPlan, device: torch.device
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


def place(device: torch.device) -> dict[str, str]:
    """Return what else the last digits of all numbers depend on: device, its kind, and PyTorch's version."""
    on_cpu = f"a CPU ({torch.backends.cpu.get_cpu_capability()})"
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    return {"device": device.type, "processor": kind, "torch": torch.__version__}


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
    loss: Any = {"passes": plan.passes, "mtp": plan.mtp_weight > 0}
    work = Work(config, length, max(1, rows), precision.name, again, plan.optimizer, **loss)
    return planner.fits(work, mesh, room(device) / (processes_here() if device.type == "cpu" else 1))


def memory(device: torch.device) -> int:
    """Return the most bytes in use so far: on a GPU allocated, on a CPU resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
