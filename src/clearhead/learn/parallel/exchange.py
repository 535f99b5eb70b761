"""Tensors of which processes hold parts, in main memory: one at a time, each is brought to one process.

Nothing here touches a device or the groups that training uses, so it may go on beside training.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.errors import CheckpointError, refuse
from clearhead.learn.parallel.shards import Place, local, place_of

Made = TypeVar("Made")
Form = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


@dataclass(frozen=True)
class Part:
    """What a process holds of a tensor."""

    shape: tuple[int, ...]  # of the whole
    place: Place
    values: Tensor


def part_of(tensor: Tensor) -> Part:
    """Return a copy, in main memory, of what this process holds of a tensor."""
    return Part(tuple(tensor.shape), place_of(tensor), local(tensor.detach()).to("cpu", copy=True))


class Exchange:
    """The parts of several processes. All of them ask for the same tensors, in the same order."""

    def __init__(self, parts: Mapping[str, Part], group: dist.ProcessGroup | None = None) -> None:
        self.parts, self.group = parts, group
        self.rank, self.processes = (0, 1) if group is None else (group.rank(), group.size())
        held = {name: ((part.shape, part.values.dtype), part.place) for name, part in parts.items()}
        self.forms: dict[str, Form] = {}  # of every tensor, in an order that all processes agree on
        self.holders: dict[str, dict[Place, list[int]]] = {}
        for rank, theirs in enumerate(self.gathered(held)):
            for name, (form, place) in theirs.items():
                self.forms[name] = form
                if all(length for _, length in place):
                    self.holders.setdefault(name, {}).setdefault(place, []).append(rank)
        for name, (shape, _) in self.forms.items():
            found = sum(math.prod(length for _, length in place) for place in self.holders.get(name, ()))
            refuse(
                found != math.prod(shape),
                f"processes hold {found:,} numbers of {name}, which has shape {shape}: it cannot be saved",
                CheckpointError,
            )

    def gathered(self, own: Made) -> list[Made]:
        """Return what each process has, in order."""
        found: list[Any] = [own] * self.processes
        if self.group is not None:
            dist.all_gather_object(found, own, group=self.group)
        return found

    def fetch(self, name: str, owner: int) -> Tensor | None:
        """Bring a whole tensor to one process; the others send what they have of it, and get None."""
        shape, dtype = self.forms[name]
        holders, here = self.holders.get(name, {}), self.parts.get(name)
        if owner == self.rank and here is not None and here.values.shape == shape:
            return here.values
        whole = torch.empty(shape, dtype=dtype) if owner == self.rank else None
        for place, ranks in holders.items():
            sender = owner if owner in ranks else ranks[0]
            if whole is None:
                if sender == self.rank:
                    assert here is not None
                    dist.send(_bytes(here.values), owner, group=self.group)
                continue
            lengths = [length for _, length in place]
            if sender == self.rank:
                assert here is not None
                values = here.values
            else:
                values = torch.empty(lengths, dtype=dtype)
                dist.recv(_bytes(values), sender, group=self.group)
            whole[tuple(slice(begin, begin + length) for begin, length in place)] = values
        return whole


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, sharing its memory where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
