"""`[parallel]` of a recipe: into how many processes each axis of the work is split."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

from clearhead.core.config.typed import check_types, check_values
from clearhead.errors import ConfigError, refuse

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
    pipeline: int = 1  # processes that share out the layers, one behind the other
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
        given = math.prod(getattr(self, name) or 1 for name in AXES)
        refuse(
            processes % given != 0 or (not free and given != processes),
            f"[parallel] asks for {given} processes ({self}), and {processes} were started: "
            "start that many with torchrun --nproc-per-node, or change a size",
            ConfigError,
        )
        left = processes // given
        if len(free) == 1:
            return replace(self, **{free[0]: left})
        tried = (replace(self, data=left // n, shard=n) for n in range(1, left) if left % n == 0 and free)
        last = replace(self, data=1, shard=left) if free else self
        return next((plan for plan in tried if fits(plan)), last)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name in AXES if (size := getattr(self, name)) is not None)
