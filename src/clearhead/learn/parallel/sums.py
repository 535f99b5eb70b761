"""Sums over the processes of a group, in one direction of a pass, and low-rank updates that need them.

Shapes: D width in, N width out, R rank.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from clearhead.core.dtypes import wide
from clearhead.learn.parallel.shards import parted, whole
from clearhead.run.kernels.lora import LoraLinear
from clearhead.run.kernels.parts import like


def shared(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that every process of a group has; its gradient is the sum of theirs."""
    return cast(Tensor, _Shared.apply(x, group))  # type: ignore[no-untyped-call]


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the processes of a group, all of which go on with it alike."""
    return cast(Tensor, _Summed.apply(x, group))  # type: ignore[no-untyped-call]


def _all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _Shared(torch.autograd.Function):
    """The same tensor; the gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """Sum the gradient."""
        return _all(upstream, ctx.group), None


class _Summed(torch.autograd.Function):
    """The sum; the gradient is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient on."""
        return upstream, None


class SplitLora(LoraLinear):
    """A low-rank update of some columns or rows of a layer: B is split as columns are, A as rows are.

    Of columns each process has a part of A's gradient.
    """

    group: dist.ProcessGroup  # the processes that have the rest
    columns: bool

    @property
    def weight(self) -> Tensor:
        """The part of the merged weight [N, D] that this process holds."""
        base = cast(Tensor, self.base.weight)
        update = self.scale * (wide(whole(self.b)) @ wide(whole(self.a)))
        return (wide(base) + parted(update, base)).to(base.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]; of rows, x is the part of this process."""
        held = cast(DTensor, self.b if self.columns else self.a).to_local()
        if self.columns:
            update = nnf.linear(nnf.linear(shared(x, self.group), self.a), held)
        else:
            update = nnf.linear(summed(nnf.linear(x, held), self.group), self.b)
        return self.base(x) + self.scale * update  # type: ignore[no-any-return]


def split_lora(layer: LoraLinear, mesh: DeviceMesh, columns: bool) -> SplitLora:
    """Return a layer of which this process has some columns or rows; its base is yet to be split."""
    name, placement = ("b", Shard(0)) if columns else ("a", Shard(1))
    part = nn.Parameter(distribute_tensor(getattr(layer, name), mesh, [placement]))
    return like(layer, SplitLora, **{name: part}, group=mesh.get_group(), columns=columns)
