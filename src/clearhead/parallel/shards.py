"""Weights of which a process holds a part: the part it holds, the part of a whole, the whole.

A part is a DTensor. It is known by its method `to_local`, so that one process never imports what splits.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.model.transformer import Transformer


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, sharing its memory."""
    return cast(Tensor, tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; all processes must ask for it together."""
    return cast(Tensor, tensor.full_tensor()) if hasattr(tensor, "full_tensor") else tensor


def part_like(full: Tensor, held: Any) -> Tensor:
    """Return of a whole tensor the part that `held`, of the same shape, is of its own whole."""
    if not hasattr(held, "device_mesh"):
        return full
    mesh = held.device_mesh
    places = zip(mesh.shape, mesh.get_coordinate(), held.placements)
    for size, index, placement in reversed(list(places)):  # the innermost axis is split first
        if hasattr(placement, "dim"):
            step = math.ceil(full.shape[placement.dim] / size)
            begin, end = (min(step * number, full.shape[placement.dim]) for number in (index, index + 1))
            full = full.narrow(placement.dim, begin, end - begin)
    return full


def parted(full: Tensor, held: Any) -> Tensor:
    """Return a whole tensor as `held` is, of the same shape: of a DTensor, the part of this process."""
    if not hasattr(held, "device_mesh") or full.shape != held.shape:
        return full
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part_like(full, held).contiguous(),
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


def wholes(tensors: Mapping[str, Tensor], keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by name, on the CPU, one at a time; not `keep`: only help to gather them."""
    for name, tensor in tensors.items():
        found = whole(tensor.detach())
        if keep:
            yield name, found.cpu()


def rest(model: nn.Module) -> None:
    """Let go of the parts of others that the last pass of a model that is split has gathered."""
    for part in model.modules():
        if callable(reshard := getattr(part, "reshard", None)):
            reshard()


def emptied(model: Transformer) -> Transformer:
    """Return a copy of a model whose parameters are on the meta device."""
    memo: dict[int, object] = {
        id(one): nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad)
        for one in model.parameters()
    }
    return copy.deepcopy(model, memo)


def assembled(empty: Transformer, found: Mapping[str, Tensor]) -> Transformer:
    """Return a plain model with whole weights by name."""
    made = emptied(empty)
    made.load_state_dict(found, strict=False, assign=True)
    made.tie()
    return made


def norm_of(tensors: Sequence[Tensor], processes: int, device: torch.device) -> Tensor:
    """Return the norm [] of all tensors together, on a device; each part counts once among all processes.

    `processes`: how many hold a part of the same tensors.
    """
    squares = [local(one).detach().float().square().sum() / _copies(one, processes) for one in tensors]
    total = torch.stack([torch.zeros((), device=device), *squares]).sum()
    dist.all_reduce(total)
    return total.sqrt()


def _copies(tensor: Any, processes: int) -> int:
    """Return how many processes hold the same part of a tensor."""
    places = zip(tensor.device_mesh.shape, tensor.placements)
    return processes // int(math.prod(size for size, place in places if hasattr(place, "dim")))
