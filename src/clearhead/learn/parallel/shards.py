"""Weights of which a process holds a shard: the shard it holds, the shard of a whole, the whole.

A shard is a DTensor. It is known by its method `to_local`, so that one process never imports what splits.
`Exchange` brings shards in main memory to one process, a tensor at a time. It touches neither a device nor
the groups that training uses, so it may go on while training does.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError, refuse
from clearhead.hub.checkpoint import Unread
from clearhead.hub.weights import cast as narrowed

Place = tuple[tuple[int, int], ...]  # begin and length along each dimension


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory."""
    return cast(Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; all processes must ask for it together."""
    return cast(Tensor, tensor.full_tensor()) if hasattr(tensor, "full_tensor") else tensor


def is_split(model: nn.Module) -> bool:
    """Return True for a model of which each process holds a part."""
    own = (part._parameters.values() for part in model.modules())  # each call to `generate` asks: be quick
    return any(hasattr(parameter, "device_mesh") for some in own for parameter in some)


def place_of(held: Any) -> Place:
    """Return where in the whole tensor the part lies that this process holds."""
    spans = [(0, size) for size in held.shape]
    if hasattr(held, "device_mesh"):
        mesh = held.device_mesh
        axes = zip(mesh.shape, mesh.get_coordinate(), held.placements)
        for size, index, placement in reversed(list(axes)):  # the innermost axis is split first
            if hasattr(placement, "dim"):
                begin, length = spans[placement.dim]
                step = math.ceil(length / size)
                start, end = (min(step * number, length) for number in (index, index + 1))
                spans[placement.dim] = begin + start, end - start
    return tuple(spans)


def part_like(full: Tensor, held: Any) -> Tensor:
    """Return of a whole tensor the part that `held`, of the same shape, is of its own whole."""
    if hasattr(held, "device_mesh"):
        for dim, (begin, length) in enumerate(place_of(held)):
            full = full.narrow(dim, begin, length)
    return full


def parted(full: Tensor, held: Any) -> Tensor:
    """Return a copy of a whole tensor, placed as `held`: its device, and for a DTensor this rank's shard."""
    whole = not hasattr(held, "device_mesh") or full.shape != held.shape
    part = (full if whole else part_like(full, held)).to(local(held).device, copy=True)
    if whole:
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.contiguous(),
        held.device_mesh,
        held.placements,
        run_check=False,
        shape=held.shape,
        stride=held.stride(),
    )


@torch.no_grad()
def put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Set parameters by name, each to a value of which the same part is held here."""
    for name, value in values.items():
        local(parameters[name]).copy_(local(value))


@torch.no_grad()
def materialise(model: Transformer, device: torch.device, unread: Unread) -> None:
    """Give memory to the parameters of a model that are on the meta device, and read the parts held here."""
    model.to_empty(device=device)
    model.tie()
    named = dict(model.named_parameters())
    for name, value in unread.each(named):
        if name in named:
            own = local(named[name])
            narrowed(part_like(value, named[name]), own.dtype, name, into=own)


def wholes(tensors: Mapping[str, Tensor], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by name, on the CPU, one at a time; not `keep`: only help to gather them.

    The first process keeps them. One that it has no part of comes from the first process that has one.
    """
    everyone: list[dict[str, Any]] = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    ]
    if dist.is_initialized():
        own, everyone = everyone[0], [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    for name in dict.fromkeys(name for names in everyone for name in names):
        source = next(rank for rank, names in enumerate(everyone) if name in names)
        tensor = whole(tensors[name].detach()).cpu() if name in tensors else None
        if keep and tensor is None:
            shape, dtype = everyone[source][name]
            tensor = torch.empty(shape, dtype=dtype)
            dist.recv(tensor, source)
        elif tensor is not None and source and source == dist.get_rank():
            dist.send(tensor.contiguous(), 0)
        if keep and tensor is not None:
            yield name, tensor


def rest(model: nn.Module) -> None:
    """Let go of the parts of others that the last pass of a model that is split has gathered."""
    for part in model.modules():
        if callable(reshard := getattr(part, "reshard", None)):
            reshard()


def emptied(model: Transformer) -> Transformer:
    """Return a copy of a model whose parameters are on the meta device."""
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


def assembled(empty: Transformer, weights: Mapping[str, Tensor]) -> Transformer:
    """Return a plain model with whole weights by name."""
    model = emptied(empty)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie()
    return model


def norm_of(tensors: Sequence[Tensor], processes: int, experts: int, device: torch.device) -> Tensor:
    """Return the norm [] of all tensors together, on a device; each part counts once among all processes.

    `processes`: how many hold a part of the same tensors; `experts`: how many hold experts of their own.
    """
    squares = [
        local(tensor).detach().float().square().sum() / copies_of(tensor, processes, experts)
        for tensor in tensors
    ]
    total = torch.stack([torch.zeros((), device=device), *squares]).sum()
    dist.all_reduce(total)
    return total.sqrt()


def copies_of(tensor: Any, processes: int, experts: int) -> int:
    """Return how many processes hold the same part of a tensor.

    Its mesh may be one of an earlier run that looks the same, with another mesh around it.
    """
    mesh = tensor.device_mesh
    parts = math.prod(size for size, place in zip(mesh.shape, tensor.placements) if hasattr(place, "dim"))
    if "expert_held" in mesh.mesh_dim_names:  # others along the expert axis hold other experts
        parts *= experts
    return processes // int(parts)


# Checkpoints ----------------------------------------------------------------------------------------------

Made = TypeVar("Made")
Form = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


@dataclass(frozen=True)
class Part:
    """What a process holds of a tensor."""

    shape: tuple[int, ...]  # of the whole
    place: Place
    values: Tensor


def part_of(tensor: Tensor) -> Part:
    """Return a CPU copy of this rank's shard of a tensor."""
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
            count = sum(math.prod(length for _, length in place) for place in self.holders.get(name, ()))
            refuse(
                count != math.prod(shape),
                f"processes hold {count:,} numbers of {name}, which has shape {shape}: it cannot be saved",
                CheckpointError,
            )

    def gathered(self, own: Made) -> list[Made]:
        """Return what each process has, in order."""
        parts: list[Any] = [own] * self.processes
        if self.group is not None:
            dist.all_gather_object(parts, own, group=self.group)
        return parts

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
