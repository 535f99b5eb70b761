"""How a model is split over a mesh: a plan as data, applied late, to a model that knows nothing of it.

`SPLITS` says by which axis the weights of each part may be split, as `division.TENSOR` has it: columns of a
linear layer are its outputs, rows its inputs. What is not named is whole in every process. Tensor parallelism
comes first. Then `fully_shard` makes every parameter a DTensor, of which each process owns a part.

Shapes: B batch, T length, H heads, K key/value heads, E head width.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from clearhead.core.attention import Attention
from clearhead.core.cache import LayerKeys
from clearhead.core.embedding import TokenFront
from clearhead.core.feedforward import FeedForward
from clearhead.core.heads import LanguageHead
from clearhead.core.masks import View
from clearhead.core.positions import RopePositions, Rotary
from clearhead.core.stack import Stack
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.learn.parallel.context import share_tokens
from clearhead.learn.parallel.division import TENSOR
from clearhead.learn.parallel.experts import split_experts
from clearhead.learn.parallel.rounds import Ring
from clearhead.learn.parallel.sums import shared, split_lora
from clearhead.learn.parallel.world import World
from clearhead.run.kernels.lora import LoraLinear
from clearhead.run.kernels.parts import like
from clearhead.variants.gated_delta import DeltaLayer
from clearhead.variants.linear import LinearAttention, LowRankAttention
from clearhead.variants.positions import RelativePositions
from clearhead.variants.routing import BY_LENGTH

STYLES = {"columns": ColwiseParallel(), "rows": RowwiseParallel()}
PARTS: Mapping[type[nn.Module], tuple[str, ...]] = {
    Attention: ("q", "k", "v", "gate", "out"),
    DeltaLayer: ("q", "k", "v", "gate", "beta", "decay", "out"),
    FeedForward: ("gate", "up", "down"),
}
SPLITS: Mapping[type[nn.Module], Mapping[str, ParallelStyle]] = {
    **{part: {name: STYLES[TENSOR[name][0]] for name in names} for part, names in PARTS.items()},
    TokenFront: {"tokens": RowwiseParallel(input_layouts=Replicate())},  # by the vocabulary
    LanguageHead: {"out": ColwiseParallel(output_layouts=Replicate())},  # by the vocabulary
}
SHARED = ("q_norm", "k_norm", "sink", "k_mix", "v_mix")  # of attention: they serve the heads of every process
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
    partial = split_tensors(model, world.mesh["tensor"]) if world.plan.tensor > 1 else []
    experts = split_experts(model, world.mesh["expert"]) if world.plan.expert > 1 else []
    if world.plan.context > 1:
        way_out = "set train.compile to false, or leave it out"
        refuse(compiled, f"parallel.context {world.plan.context} trains uncompiled: {way_out}", ConfigError)
        share_tokens(model, Ring(world.mesh["context"].get_group()))
    if world.shares > 1:
        share_lengths(model, world)
    sharding: dict[str, Any] = {"mesh": world.held}
    if offload:
        sharding["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for own in experts:
        fully_shard(own, **{**sharding, "mesh": world.expert_held})
    for stack in (part for part in model.children() if isinstance(part, Stack)):
        for block in (one for one in stack.blocks if next(one.parameters(), None) is not None):
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


class JointRope(RopePositions):
    """Rotary positions that are scaled by the longest row of a batch, of which this process has some rows."""

    group: dist.ProcessGroup  # the processes that have the others

    def rotary(self, positions: Tensor, window: int | None, tap: Tap = SILENT) -> Rotary:
        """See `RopePositions.rotary`."""
        last = positions.amax()
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=self.group)
        reached = torch.cat([positions, last.expand(positions.shape[0], 1)], 1)
        return Rotary(*(turn[:, :, :-1] for turn in super().rotary(reached, window, tap)))


def share_lengths(model: Transformer, world: World) -> None:
    """Let rotary positions that are scaled by the longest row know that of the whole batch."""
    for stack in (part for part in model.children() if isinstance(part, Stack)):
        scaling = stack.spec.rope_scaling
        if isinstance(stack.positions, RopePositions) and scaling is not None and scaling.kind in BY_LENGTH:
            stack.positions = like(stack.positions, JointRope, group=world.together)


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
        source = shared(source, self.group)
        return self.q(x), self.k(source), self.v(source)

    def split(self, name: str, x: Tensor, n_heads: int, norm: nn.Module | None, tap: Tap) -> Tensor:
        """See `Attention.split`: a norm over all heads takes all of them."""
        if norm is None or self.norm_over != "full" or (name == "k" and self.keys is not None):
            return super().split(name, x, n_heads, norm, tap)
        whole = all_gather_tensor(x, 2, self.group)  # B T all·E
        x = norm(whole).narrow(-1, dist.get_rank(self.group) * x.shape[-1], x.shape[-1])
        return super().split(name, x, n_heads, None, tap)

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


class SplitLinear(SplitAttention, LinearAttention):
    """Linear attention with some of the heads."""


class SplitLowRank(SplitAttention, LowRankAttention):
    """Low-rank attention with some of the heads; the mixtures serve those of every process."""


class SplitDelta(DeltaLayer):
    """A layer of the gated delta rule with some of the heads.

    What is no matrix is whole in every process, which has a part of its gradient.
    """

    channels: list[int]  # of the convolution, those that are here
    own: list[int]  # the value heads that are here

    def per_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `GatedDelta.per_head`."""
        conv, bias, rate = super().per_head()
        return conv[self.channels], bias[self.own], rate[self.own]


KINDS: Mapping[type[nn.Module], type[SplitAttention]] = {
    Attention: SplitAttention,
    LinearAttention: SplitLinear,
    LowRankAttention: SplitLowRank,
}


def split_tensors(model: Transformer, mesh: DeviceMesh) -> list[str]:
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
            several = (*SHARED, *(("k", "v") if part.keys is not None else ()))
            partial += [
                f"{name}.{own}" for own, _ in part.named_parameters() if own.partition(".")[0] in several
            ]
        elif isinstance(part, DeltaLayer):
            part = _own_memories(part, mesh)
            model.set_submodule(name, part)
            partial += [f"{name}.{own}" for own in ("conv", "decay_bias", "log_rate", "norm.weight")]
        elif isinstance(part, RelativePositions):
            partial += [f"{name}.table.weight"]
        there = {key: style for key, style in plan.items() if getattr(part, key) is not None}
        for key, style in list(there.items()):
            if isinstance(layer := getattr(part, key), LoraLinear):
                columns = isinstance(style, ColwiseParallel)
                model.set_submodule(f"{name}.{key}", split_lora(layer, mesh, columns))
                there[f"{key}.base"] = there.pop(key)
                partial += [f"{name}.{key}.a"] if columns else []
        if not isinstance(part, TokenFront | LanguageHead) or _enough(model.config.vocab_size, size):
            parallelize_module(part, mesh, there)
    model.tie()
    return partial


def _enough(rows: int, size: int) -> bool:
    """Return True if every process gets a row where each but the last ones gets equally many, rounded up.

    A small vocabulary on many processes leaves the last ones none: then it is whole in every one.
    """
    return math.ceil(rows / size) * (size - 1) < rows


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
    return like(part, KINDS[type(part)], **changes)


def _own_memories(part: DeltaLayer, mesh: DeviceMesh) -> SplitDelta:
    """Return the layer of the gated delta rule with the heads of this process."""
    size, rank = mesh.size(), mesh.get_local_rank()
    keys, heads, width = part.n_key_heads // size, part.n_value_heads // size, part.conv.shape[0]
    parts = torch.arange(width).tensor_split(part.borders)  # the channels of queries, keys and values
    channels = torch.cat([of.chunk(size)[rank] for of in parts]).tolist()
    borders = tuple(border // size for border in part.borders)
    changes = {"n_key_heads": keys, "n_value_heads": heads, "borders": borders, "channels": channels}
    return like(part, SplitDelta, **changes, own=list(range(rank * heads, (rank + 1) * heads)))


def _check(name: str, part: nn.Module, size: int) -> None:
    """Refuse what the tensor axis cannot split."""
    axis = f"parallel.tensor {size}"
    for key in next((plan for kind, plan in SPLITS.items() if isinstance(part, kind)), {}):
        layer = getattr(part, key)
        refuse(
            not isinstance(layer, nn.Linear | nn.Embedding | LoraLinear | None),
            f"{axis} cannot split {name}.{key}, a {type(layer).__name__}: use data or shard",
            ConfigError,
        )
    if isinstance(part, Attention):
        refuse(
            type(part) not in KINDS,
            f"{axis} splits attention by heads, and {name} is {type(part).__name__}: use data or shard",
            ConfigError,
        )
        refuse(
            part.n_heads % size != 0,
            f"{axis} does not divide the {part.n_heads} heads of {name}: choose a divisor",
            ConfigError,
        )
    if isinstance(part, DeltaLayer):
        count = part.n_key_heads
        refuse(
            count % size != 0,
            f"{axis} does not divide the {count} key heads of {name}: choose a divisor",
            ConfigError,
        )
    if isinstance(part, FeedForward):
        width = part.up.out_features
        refuse(
            width % size != 0,
            f"{axis} does not divide the width {width} of {name} (d_ff, d_expert or d_shared_expert): "
            "choose a divisor",
            ConfigError,
        )
