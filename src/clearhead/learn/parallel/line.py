"""What goes on and what comes back between the stages of a pipeline."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.learn.parallel.world import World

Form = tuple[torch.Size, torch.dtype]
CPU = torch.device("cpu")


class Line:
    """The processes that hold the other stages for the same rows: what goes on and what comes back.

    Each way has its own group, so that neither waits for the other.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.stage, self.rank, self.device = world.place("pipeline"), world.rank, device
        self.apart = world.size // world.extent("pipeline")  # of the ranks of two stages
        lines = [list(range(first, world.size, self.apart)) for first in range(self.apart)]
        wait = timedelta(seconds=world.plan.timeout)
        new: Any = dist.new_subgroups_by_enumeration
        self.on, self.back = (new(lines, timeout=wait)[0] for _ in ("on", "back"))
        self.forms: dict[object, list[Form]] = {}  # of what comes, by what it depends on
        self.told: set[object] = set()
        self.posted: dict[int, list[tuple[Any, Tensor]]] = {}  # to each stage: what may not yet have arrived

    def depart(self, key: object, tensors: Sequence[Tensor]) -> list[Form]:
        """Send tensors to the stage behind; of a new key, their forms first. Return these."""
        forms = [(one.shape, one.dtype) for one in tensors]
        if key not in self.told:
            self.told.add(key)
            dist.send_object_list([forms], self._rank(self.stage + 1), self.on, CPU)
        self.post(tensors, self.stage + 1)
        return forms

    def arrive(self, key: object) -> list[Tensor]:
        """Return what departs from the stage before."""
        if key not in self.forms:
            found: list[Any] = [None]
            dist.recv_object_list(found, self._rank(self.stage - 1), self.on, CPU)
            self.forms[key] = found[0]
        return self.receive(self.forms[key], self.stage - 1)

    def post(self, tensors: Sequence[Tensor], stage: int) -> None:
        """Send tensors to a stage, when the last ones have arrived; do not wait for these."""
        self.settle(stage)
        group = self.on if stage > self.stage else self.back
        held = [one.detach().contiguous() for one in tensors]
        self.posted[stage] = [(dist.isend(one, self._rank(stage), group), one) for one in held]

    def receive(self, forms: Sequence[Form], stage: int, device: torch.device | None = None) -> list[Tensor]:
        """Return tensors that a stage has posted, on a device; None: that of the model."""
        group = self.on if stage < self.stage else self.back
        made = [torch.empty(shape, dtype=dtype, device=device or self.device) for shape, dtype in forms]
        for work in [dist.irecv(one, self._rank(stage), group) for one in made]:
            cast(Any, work).wait()
        return made

    def settle(self, stage: int | None = None) -> None:
        """Wait until what was sent to a stage, or to any, has arrived."""
        for one in list(self.posted) if stage is None else [stage]:
            for work, _ in self.posted.pop(one, ()):
                work.wait()

    def _rank(self, stage: int) -> int:
        return self.rank + (stage - self.stage) * self.apart
