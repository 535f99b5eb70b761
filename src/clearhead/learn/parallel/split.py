"""How a model is split over a mesh: a plan as data, applied late, to a model that knows nothing of it.

`SPLITS` says by which axis the weights of each part may be split, as `division.TENSOR` has it: columns of a
linear layer are its outputs, rows its inputs. What is not named is whole in every process. Tensor parallelism
comes first. Then `fully_shard` makes every parameter a DTensor, of which each process owns a part.

Expert parallelism: each process has some of the experts of a mixture, rows of its own and a router over all
experts. All-to-all takes each token to the processes of its experts, as many times as it has experts there,
and the answers back to where they are weighted and added. Nothing is dropped or padded: counts are exchanged
first. The gradient takes the same ways.

Shapes: B batch, T length, H heads, K key/value heads, E head width, D model or width in, N width out, R rank.
"""

import atexit
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_gather_tensor, all_to_all_single
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from clearhead.core.attention import Attention
from clearhead.core.dtypes import wide
from clearhead.core.embedding import TokenFront
from clearhead.core.feedforward import FeedForward
from clearhead.core.heads import LanguageHead
from clearhead.core.positions import RopePositions, Rotary
from clearhead.core.stack import Stack
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.hub.checkpoint import Unread
from clearhead.learn.parallel import ParallelPlan
from clearhead.learn.parallel.context import share_tokens
from clearhead.learn.parallel.division import TENSOR
from clearhead.learn.parallel.ring_schedule import Ring
from clearhead.learn.parallel.shards import local, materialise, parted, whole
from clearhead.learn.parallel.world import World, check_gpus, join
from clearhead.run.kernels.lora import LoraLinear
from clearhead.run.kernels.parts import like
from clearhead.variants.gated_delta import DeltaLayer
from clearhead.variants.linear import LinearAttention, LowRankAttention
from clearhead.variants.positions import RelativePositions
from clearhead.variants.recurrent import RecurrentLayer
from clearhead.variants.routing import Experts


def shared(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that every process of a group has; its gradient is the sum of theirs."""
    return cast(Tensor, _SumInOnePass.apply(x, group, False))  # type: ignore[no-untyped-call]


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the processes of a group, all of which go on with it alike."""
    return cast(Tensor, _SumInOnePass.apply(x, group, True))  # type: ignore[no-untyped-call]


def _all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _SumInOnePass(torch.autograd.Function):
    """The sum over a group in the forward pass or in the backward pass; the other one changes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: bool) -> Tensor:
        ctx.group, ctx.later = group, not forward
        return _all(x, group) if forward else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        """Sum the gradient, or pass it on."""
        return _all(upstream, ctx.group) if ctx.later else upstream, None, None


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
        part = cast(DTensor, self.b if self.columns else self.a).to_local()
        if self.columns:
            update = nnf.linear(nnf.linear(shared(x, self.group), self.a), part)
        else:
            update = nnf.linear(summed(nnf.linear(x, part), self.group), self.b)
        return self.base(x) + self.scale * update  # type: ignore[no-any-return]


def split_lora(layer: LoraLinear, mesh: DeviceMesh, columns: bool) -> SplitLora:
    """Return a layer of which this process has some columns or rows; its base is yet to be split."""
    name, placement = ("b", Shard(0)) if columns else ("a", Shard(1))
    part = nn.Parameter(distribute_tensor(getattr(layer, name), mesh, [placement]))
    return like(layer, SplitLora, **{name: part}, group=mesh.get_group(), columns=columns)


# Experts --------------------------------------------------------------------------------------------------


class SplitExperts(Experts):
    """A mixture with some of the experts, by their numbers; the others are with other processes."""

    experts: nn.ModuleDict  # type: ignore[assignment]
    group: dist.ProcessGroup  # the processes that have all experts together
    shares: list[int]  # the number of experts of each

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the counts are not known ahead
    def answer(self, rows: Tensor, counts: Tensor, tap: Tap) -> Tensor:
        """See `Experts.answer`: rows of this process, experts of all."""
        own, processes = len(self.experts), len(self.shares)
        theirs = counts.new_empty(processes * own)
        dist.all_to_all_single(theirs, counts, [own] * processes, self.shares, group=self.group)
        sent, received = counts.tolist(), theirs.tolist()  # [X]; of each process, for each expert here
        ends = [0, *accumulate(self.shares)]
        going = [sum(sent[begin:end]) for begin, end in pairwise(ends)]
        coming = [sum(received[begin : begin + own]) for begin in range(0, len(received), own)]

        here = torch.split(self._travel(rows, going, coming), received)  # by process, then by expert
        each = []
        for number, expert in enumerate(self.experts.values()):
            answer = expert(torch.cat(here[number::own]))
            each.append(torch.split(answer, received[number::own]))
        answers = [part for process in zip(*each) for part in process]
        return self._travel(torch.cat(answers), coming, going)

    def _travel(self, rows: Tensor, going: list[int], coming: list[int]) -> Tensor:
        """Send so many rows [_, D] to each process, and return those that come from each."""
        return all_to_all_single(rows.contiguous(), coming, going, self.group)


def split_experts(model: Transformer, mesh: DeviceMesh) -> list[list[nn.Module]]:
    """Leave each process along the expert axis its share of the experts; return those, layer by layer."""
    size, place = mesh.size(), mesh.get_local_rank()
    mixtures = [(name, part) for name, part in model.named_modules() if isinstance(part, Experts)]
    refuse(
        not model.config.n_experts,  # a stage of a pipeline may have dense layers alone
        f"parallel.expert {size} shares out experts, and the model has none: use data, shard or tensor",
        ConfigError,
    )
    experts: list[list[nn.Module]] = []
    for name, part in mixtures:
        count = len(part.experts)
        refuse(
            size > count,
            f"parallel.expert {size} is more than the {count} experts of {name}: choose {count} or less",
            ConfigError,
        )
        ends = [count * number // size for number in range(size + 1)]
        own = {str(number): part.experts[number] for number in range(ends[place], ends[place + 1])}
        experts.append(list(own.values()))
        shares = [end - begin for begin, end in pairwise(ends)]
        changes = {"experts": nn.ModuleDict(own), "group": mesh.get_group(), "shares": shares}
        model.set_submodule(name, like(part, SplitExperts, **changes))
    return experts


# Tensor parallelism and sharding --------------------------------------------------------------------------

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

    The model comes from main memory; each block visits the device of the mesh to be split. `offload`: the
    parts stay in main memory, and a block visits the device to compute.
    Returns the parameters whose gradients are to be summed over the tensor axis, see `SplitAttention`.
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
        for block in (part for part in stack.blocks if next(part.parameters(), None) is not None):
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
        if isinstance(stack.positions, RopePositions) and stack.spec.rotates_by_length:
            stack.positions = like(stack.positions, JointRope, group=world.together)


class SplitAttention(Attention):
    """Attention with some of the heads; where they share key heads with other processes, it picks its own.

    Norms of heads, sinks and shared key/value heads serve the heads of every process: each has a part of
    their gradients.
    """

    group: dist.ProcessGroup  # the processes that have the other heads
    own: list[int]  # the heads that are here, of all
    keys: list[int] | None  # of all key/value heads, those of the queries here; None: no others are here

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attention.project`."""
        if self.keys is None:
            return super().project(x, source)
        source = shared(source, self.group)
        return self.q(x), self.k(source), self.v(source)

    def split(self, name: str, x: Tensor, n_heads: int, norm: nn.Module | None, tap: Tap) -> Tensor:
        """See `Attention.split`: a norm over all heads takes all of them."""
        if name != "q" and self.keys is not None:
            every = x.shape[-1] // (self.d_head if name == "k" else self.d_value)
            return super().split(name, x, every, norm, tap)[:, self.keys]
        if norm is None or self.norm_over != "full":
            return super().split(name, x, n_heads, norm, tap)
        whole = all_gather_tensor(x, 2, self.group)  # B T all·E
        x = norm(whole).narrow(-1, dist.get_rank(self.group) * x.shape[-1], x.shape[-1])
        return super().split(name, x, n_heads, None, tap)

    def sink_logits(self) -> Tensor | None:
        """See `Attention.sink_logits`."""
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
    changes["n_kv_heads"] = len(keys) if shared else part.n_kv_heads // size
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
            f"{axis} cannot split {name}.{key}, a {type(layer).__name__}: use data or shard in training",
            ConfigError,
        )
    if isinstance(part, Attention):
        refuse(
            type(part) not in KINDS,
            f"{axis} splits attention by heads, and {name} is {type(part).__name__}: use data or shard in "
            "training",
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
    refuse(
        isinstance(part, RecurrentLayer) and not isinstance(part, DeltaLayer),
        f"{axis} splits no {type(part).__name__}, as {name} is: use data or shard in training",
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


# A model for use --------------------------------------------------------------------------------------------


def split_for_use(
    model: Transformer, unread: Unread, sizes: Mapping[str, int], device: torch.device
) -> Transformer:
    """Split a model that has no weights yet, and read this process's parts; the processes stay joined."""
    refuse(
        sizes.keys() != {"tensor"},
        f'parallel {dict(sizes)} is not possible: a model for use is split by heads, as {{"tensor": 2}}',
        ConfigError,
    )
    plan, opened = ParallelPlan(data=1, shard=1, **sizes), dist.is_initialized()
    world = join()
    if not opened and dist.is_initialized():
        atexit.register(_leave)
    plan = plan.settled(world.size)
    if plan.tensor > 1:
        check_gpus(device.type, "use --device cpu")
        mesh = init_device_mesh(device.type, (plan.tensor,), mesh_dim_names=("tensor",))
        try:
            split_tensors(model, mesh)
        except ConfigError as error:
            raise ConfigError(f"{error}, or run the whole model in one process, without torchrun") from None
        multiply_here(model, mesh)
    materialise(model, device, unread)
    return model.eval()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def multiply_here(model: Transformer, mesh: DeviceMesh) -> None:
    """Let split layers compute with plain tensors, in place; parameters stay DTensors."""
    heads = {part.out for part in model.modules() if isinstance(part, LanguageHead)}
    for name, part in list(model.named_modules()):
        if not isinstance(part, nn.Linear | nn.Embedding) or not isinstance(part.weight, DTensor):
            continue
        kind: type[LocalColumns | LocalRows | LocalWords | LocalTable] = LocalTable
        if isinstance(part, nn.Linear):
            by_columns = part.weight.placements[0].is_shard(0)
            kind = LocalWords if part in heads else LocalColumns if by_columns else LocalRows
        own = {"group": mesh.get_group(), "rank": mesh.get_local_rank(), "size": mesh.size()}
        local_part = like(part, kind, **own)
        local_part._forward_hooks, local_part._forward_pre_hooks = OrderedDict(), OrderedDict()  # DTensor's
        model.set_submodule(name, local_part)


def _linear_here(layer: nn.Linear, x: Tensor) -> Tensor:
    return nnf.linear(x, local(layer.weight), None if layer.bias is None else local(layer.bias))


class LocalColumns(nn.Linear):
    """A linear layer with some of the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N here]."""
        return _linear_here(self, x)


class LocalRows(nn.Linear):
    """A linear layer with some of the inputs: what the processes find is added up."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        """[..., D here] -> [..., N]."""
        y = nnf.linear(x, local(self.weight))
        dist.all_reduce(y, group=self.group)
        return y if self.bias is None else y + local(self.bias)


class LocalWords(nn.Linear):
    """An output layer split by vocabulary; logits are gathered from all processes."""

    group: dist.ProcessGroup
    size: int

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        y = _linear_here(self, x)
        width = math.ceil(self.out_features / self.size)  # the last process may have fewer
        y = nnf.pad(y, (0, width - y.shape[-1])).contiguous()
        parts = [torch.empty_like(y) for _ in range(self.size)]
        dist.all_gather(parts, y, group=self.group)
        return torch.cat(parts, -1)[..., : self.out_features]


class LocalTable(nn.Embedding):
    """A token table split by vocabulary; ids of other ranks give zeros before the all-reduce."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, D]."""
        table = local(self.weight)
        own = ids - self.rank * math.ceil(self.num_embeddings / self.size)
        here = (own >= 0) & (own < len(table))
        y = nnf.embedding(own.where(here, 0), table) * here[..., None]
        dist.all_reduce(y, group=self.group)
        return y
