"""Training and inference in several processes, and what `torchrun` tells each of them by its environment."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

from clearhead.errors import ConfigError, check_types, check_values, refuse


def started() -> bool:
    """Return True in a process that `torchrun` has started with others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def processes_here() -> int:
    """Return how many processes `torchrun` has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restarts() -> int:
    """Return how often `torchrun` has started the processes again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch() -> str | None:
    """Return a name of the launch that started these processes; it stays when they are restarted."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')} {os.getppid()}" if started() else None


def first_here() -> bool:
    """Return True in the process that reports, before and after it has joined the others."""
    return os.environ.get("RANK", "0") == "0" or not started()


# [parallel] of a recipe -------------------------------------------------------------------------------------


AXES = ("pipeline", "data", "shard", "context", "expert", "tensor")  # from the slowest link to the fastest
ROWS = ("data", "shard", "expert")  # processes along them have different rows of a batch
TOKENS = ("data", "shard", "context", "expert")  # different rows, or different tokens of them
HELD = ("shard", "context", "expert")  # processes along them each hold a part of every weight
EXPERT_HELD = ("shard", "context")  # processes along them each hold a part of the weights of an expert


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The mesh of processes that `torchrun` starts; one process needs none of it."""

    data: int | None = None  # copies of the model, each with its share of the rows; None: what is left
    shard: int | None = None  # processes that share out weights, gradients and moments; None: by memory
    tensor: int = 1  # processes that share out the heads and the width of each layer
    pipeline: int = 1  # processes that share out the layers, one after the other
    context: int = 1  # processes that share out the tokens of each row
    expert: int = 1  # processes that share out the experts of a mixture
    timeout: int = 600  # seconds that a process waits for another before the run is given up

    def __post_init__(self) -> None:
        check_types(self)
        sizes = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        check_values(self, sizes, lambda value: value >= 1, "must be 1 or more")

    def settled(self, processes: int, fits: Callable[[Self], bool] = lambda plan: True) -> Self:
        """Return the plan with every size chosen; `fits`: a step of such a plan fits one device.

        Processes that no size accounts for hold copies of the model, each shared out among as few of them as
        fit. Those are neighbours, whose links are the fastest. Where nothing fits, all of them share it out.
        """
        free = [name for name in ("data", "shard") if getattr(self, name) is None]
        named = math.prod(getattr(self, name) or 1 for name in AXES)
        refuse(
            processes % named != 0 or (not free and named != processes),
            f"[parallel] asks for {named} processes ({self}), and {processes} were started: "
            "start that many with torchrun --nproc-per-node, or change a size",
            ConfigError,
        )
        left = processes // named
        if len(free) == 1:
            return replace(self, **{free[0]: left})
        tried = (replace(self, data=left // n, shard=n) for n in range(1, left) if left % n == 0 and free)
        last = replace(self, data=1, shard=left) if free else self
        return next((plan for plan in tried if fits(plan)), last)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name in AXES if (size := getattr(self, name)) is not None)
