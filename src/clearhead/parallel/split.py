"""How a model is split over a mesh: a plan as data, applied late, to a model that knows nothing of it.

`SPLITS` says by which axis the weights of each part may be split: columns of a linear layer are its outputs,
rows its inputs. What is not named is whole in every process. Tensor parallelism comes first. Then
`fully_shard` makes every parameter a DTensor, of which each process owns a part.

Shapes: B batch, T length, H heads, K key/value heads, E head width.
"""

import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from clearhead.errors import ConfigError, refuse
from clearhead.fast.parts import like
from clearhead.model.attention import Attention
from clearhead.model.cache import LayerKeys
from clearhead.model.feedforward import FeedForward
from clearhead.model.fronts import TokenFront
from clearhead.model.heads import LanguageHead
from clearhead.model.masks import View
from clearhead.model.positions import RelativePositions
from clearhead.model.stack import Stack
from clearhead.model.taps import Tap
from clearhead.model.transformer import Transformer
from clearhead.parallel.context import share_tokens
from clearhead.parallel.rounds import Ring
from clearhead.parallel.world import World

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
SPLITS: Mapping[type[nn.Module], Mapping[str, ParallelStyle]] = {
    Attention: {"q": COLUMNS, "k": COLUMNS, "v": COLUMNS, "gate": COLUMNS, "out": ROWS},
    FeedForward: {"gate": COLUMNS, "up": COLUMNS, "down": ROWS},
    TokenFront: {"tokens": RowwiseParallel(input_layouts=Replicate())},  # by the vocabulary
    LanguageHead: {"out": ColwiseParallel(output_layouts=Replicate())},  # by the vocabulary
}
# Gathering a part that two axes split takes two steps, which PyTorch remarks on at each of them.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def split(
    model: Transformer, world: World, compiled: bool = False, offload: bool = False
) -> list[nn.Parameter]:
    """Split a model over the mesh of a world, in place; parameters keep their names and become DTensors.

    The model comes from main memory; each block visits the device of the mesh to be split.

    Args:
        compiled: compile each block.
        offload: keep the parts in main memory; a block visits the device to compute.

    Returns: the parameters whose gradients are to be summed over the tensor axis, see `SplitAttention`.
    """
    assert world.mesh is not None
    partial = _split_tensors(model, world.mesh["tensor"]) if world.plan.tensor > 1 else []
    if world.plan.context > 1:
        share_tokens(model, Ring(world.mesh["context"].get_group()))
    sharding: dict[str, Any] = {"mesh": world.held}
    if offload:
        sharding["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for stack in (part for part in model.children() if isinstance(part, Stack)):
        for block in stack.blocks:
            if compiled:
                block.compile()
            fully_shard(block, **sharding)
    fully_shard(model, **sharding)
    for part in model.modules():
        if isinstance(part, FSDPModule):  # the loss is divided by the targets of all shares: sum, not mean
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    named = dict(model.named_parameters())
    return [named[name] for name in partial]


class SplitAttention(Attention):
    """Attention with some of the heads; where they share key heads with other processes, it picks its own.

    Norms of heads, sinks and shared key/value heads serve the heads of every process: each has a part of
    their gradients.
    """

    group: dist.ProcessGroup  # the processes that have the other heads
    own: list[int]  # the heads that are here, of all
    keys: list[int] | None  # of all key/value heads, those that the queries here attend to; None: all here

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention.project`."""
        if self.keys is None:
            return super().project(x, source)
        shared = cast(Tensor, _Shared.apply(source, self.group))  # type: ignore[no-untyped-call]
        return self.q(x), self.k(shared), self.v(shared)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: View, cache: LayerKeys | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """See `Attention.attend`."""
        if self.keys is not None:
            k, v = k[:, self.keys], v[:, self.keys]
        return super().attend(q, k, v, view, cache, tap, x)

    def sinks(self) -> Tensor | None:
        """See `Attention.sinks`."""
        return None if self.sink is None else self.sink[self.own]


class _Shared(torch.autograd.Function):
    """The same tensor; its gradient is the sum of what the processes of a group have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """Sum the gradient."""
        upstream = upstream.contiguous().clone()
        dist.all_reduce(upstream, group=ctx.group)
        return upstream, None


def _split_tensors(model: Transformer, mesh: DeviceMesh) -> list[str]:
    """Split heads, widths and vocabulary; return the names of parameters with partial gradients."""
    size, partial = mesh.size(), []
    for name, part in list(model.named_modules()):
        _check(name, part, size)
        plan = dict(next((plan for kind, plan in SPLITS.items() if isinstance(part, kind)), {}))
        if isinstance(part, Attention):
            part = _own_heads(part, mesh)
            model.set_submodule(name, part)
            if part.keys is not None:
                del plan["k"], plan["v"]
            shared = ("q_norm", "k_norm", "sink", *(("k", "v") if part.keys is not None else ()))
            partial += [
                f"{name}.{own}" for own, _ in part.named_parameters() if own.partition(".")[0] in shared
            ]
        elif isinstance(part, RelativePositions):
            partial += [f"{name}.{own}" for own, _ in part.named_parameters()]
        there = {key: style for key, style in plan.items() if getattr(part, key) is not None}
        parallelize_module(part, mesh, there)
    model.tie()
    return partial


def _own_heads(part: Attention, mesh: DeviceMesh) -> SplitAttention:
    """Return the attention with the heads of this process."""
    size, rank = mesh.size(), mesh.get_local_rank()
    count, group = part.n_heads // size, part.n_heads // part.n_kv_heads
    own = list(range(rank * count, (rank + 1) * count))
    shared = part.n_kv_heads % size != 0
    each = [head // group for head in own]  # the key/value head of each query head
    keys = sorted(set(each)) if count % len(set(each)) == 0 and len(set(map(each.count, each))) == 1 else each
    heads = tuple(part.heads[head] for head in own)
    changes: dict[str, object] = {"n_heads": count, "heads": heads, "pruned": True, "own": own}
    changes |= {"keys": keys if shared else None, "group": mesh.get_group()}
    if not shared:
        changes["n_kv_heads"] = part.n_kv_heads // size
    return like(part, SplitAttention, **changes)


def _check(name: str, part: nn.Module, size: int) -> None:
    """Refuse what the tensor axis cannot split."""
    axis = f"parallel.tensor {size}"
    for key in next((plan for kind, plan in SPLITS.items() if isinstance(part, kind)), {}):
        layer = getattr(part, key)
        refuse(
            not isinstance(layer, nn.Linear | nn.Embedding | None),
            f"{axis} cannot split {name}.{key}, a {type(layer).__name__}: use data or shard",
            ConfigError,
        )
    if isinstance(part, Attention):
        refuse(
            type(part) is not Attention,
            f"{axis} splits attention by heads, and {name} is {type(part).__name__}: use data or shard",
            ConfigError,
        )
        refuse(
            part.n_heads % size != 0,
            f"{axis} does not divide the {part.n_heads} heads of {name}: choose a divisor",
            ConfigError,
        )
        refuse(
            part.norm_over == "full",
            f"{axis} cannot split {name}, whose norm is over all heads: use data or shard",
            ConfigError,
        )
    if isinstance(part, FeedForward):
        width = part.up.out_features
        refuse(width % size != 0, f"{axis} does not divide d_ff {width}: choose a divisor", ConfigError)
