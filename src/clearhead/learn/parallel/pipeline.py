"""Pipeline parallelism: the layers are shared out over processes, and micro-batches go through them by 1F1B.

A stage is the same Transformer with its own layers alone: a layer of another stage passes the stream on, and
the embedding of a later stage returns what was received. So the forward pass is that of `core/`. To send and
to receive are autograd functions: the backward pass takes gradients the other way.
docs/decisions/torch-pipelining.md says why it is not `torch.distributed.pipelining`.

Shapes: B rows, T length, D model, X experts.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from clearhead.core.config import BIASES, ModelConfig
from clearhead.core.embedding import Embedding
from clearhead.core.heads import Head, LanguageHead
from clearhead.core.stack import Stack
from clearhead.core.transformer import Output, Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.learn.batches.batch import Batch
from clearhead.learn.parallel import shards
from clearhead.learn.parallel.world import World
from clearhead.run.kernels.parts import like
from clearhead.variants.routing import BALANCE, counts_of, imbalance, tally

Shape = tuple[torch.Size, torch.dtype]
CPU = torch.device("cpu")


class StageLinks:
    """Sends tensors to the other stages of the same rows, and receives them.

    Forward and backward have a group each, so that neither waits for the other.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self.stage, self.rank, self.device = world.place("pipeline"), world.rank, device
        self.stride = world.size // world.extent("pipeline")  # of the ranks of two stages
        pipelines = [list(range(first, world.size, self.stride)) for first in range(self.stride)]
        wait = timedelta(seconds=world.plan.timeout)
        new: Any = dist.new_subgroups_by_enumeration
        self.forward_group, self.backward_group = (
            new(pipelines, timeout=wait)[0] for _ in ("forward", "backward")
        )
        self.shapes: dict[object, list[Shape]] = {}  # of what is received, by what it depends on
        self.announced: set[object] = set()  # keys whose shapes were sent
        self.in_flight: dict[int, list[tuple[Any, Tensor]]] = {}  # to each stage, not known to have arrived

    def send_forward(self, key: object, tensors: Sequence[Tensor]) -> list[Shape]:
        """Send tensors to the next stage, preceded by their shapes if the key is new; return the shapes."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if key not in self.announced:
            self.announced.add(key)
            dist.send_object_list([shapes], self._rank(self.stage + 1), self.forward_group, CPU)
        self.send(tensors, self.stage + 1)
        return shapes

    def receive_forward(self, key: object) -> list[Tensor]:
        """Return what the stage before sends by `send_forward`."""
        if key not in self.shapes:
            shapes: list[Any] = [None]
            dist.recv_object_list(shapes, self._rank(self.stage - 1), self.forward_group, CPU)
            self.shapes[key] = shapes[0]
        return self.receive(self.shapes[key], self.stage - 1)

    def send(self, tensors: Sequence[Tensor], stage: int) -> None:
        """Send tensors to a stage once the last ones have arrived; do not wait for these."""
        self.wait(stage)
        group = self.forward_group if stage > self.stage else self.backward_group
        kept = [tensor.detach().contiguous() for tensor in tensors]
        self.in_flight[stage] = [(dist.isend(tensor, self._rank(stage), group), tensor) for tensor in kept]

    def receive(
        self, shapes: Sequence[Shape], stage: int, device: torch.device | None = None
    ) -> list[Tensor]:
        """Return tensors that a stage has sent, on a device; None: that of the model."""
        group = self.forward_group if stage < self.stage else self.backward_group
        tensors = [torch.empty(shape, dtype=dtype, device=device or self.device) for shape, dtype in shapes]
        for work in [dist.irecv(tensor, self._rank(stage), group) for tensor in tensors]:
            cast(Any, work).wait()
        return tensors

    def wait(self, stage: int | None = None) -> None:
        """Wait until what was sent to a stage, or to any, has arrived."""
        for target in list(self.in_flight) if stage is None else [stage]:
            for work, _ in self.in_flight.pop(target, ()):
                work.wait()

    def _rank(self, stage: int) -> int:
        return self.rank + (stage - self.stage) * self.stride


# What a pipeline refuses ----------------------------------------------------------------------------------


def check(config: ModelConfig, stages: int, scaled: bool) -> None:
    """Refuse what stages cannot share out; `scaled`: the loss is, for float16."""
    axis, layers = f"parallel.pipeline {stages}", sum(stack.n_layers for stack in config.stacks)
    scaling = config.rope_scaling and config.rope_scaling.kind
    for wrong, why in (
        (stages > layers, f"is more than the {layers} layers: choose {layers} or less"),
        (
            any(len(set(stack.block_of)) < stack.n_layers for stack in config.stacks),
            f"shares out layers, and here they share weights (model.layer_groups {config.layer_groups}): "
            "use data or shard",
        ),
        (
            any(share < 1 for stack in config.stacks for share in stack.capacities),
            f"takes every token through every layer, and model.depth_capacity is {config.depth_capacity}: "
            "use data or shard",
        ),
        (
            config.rotates_by_length,
            f"makes micro-batches, and rope scaling {scaling} goes by the longest row of a batch: "
            "use data, shard or tensor",
        ),
        (
            config.positions in ("learned+relative", "disentangled"),
            f"shares out vectors or biases of positions, and {config.positions} are more: use data or shard",
        ),
        (scaled, "has no scaled loss (train.precision float16): use bfloat16 or float32"),
    ):
        refuse(stages > 1 and wrong, f"{axis} {why}", ConfigError)


# The parts of a stage ---------------------------------------------------------------------------------------


class AbsentLayer(nn.Module):
    """Stands for a layer of another stage."""

    router = None

    def forward(self, x: Tensor, *more: object) -> Tensor:
        """Return the stream [B, T, D] as it came."""
        return x


class StageInput(Embedding):
    """The embedding of a stage after the first: it returns what the stage before has sent."""

    received: Tensor | None

    def forward(self, *inputs: Any) -> Tensor:
        """Return the stream [B, T, D]; None in a stack whose turn comes later."""
        return cast(Tensor, self.received)


class StageStack(Stack):
    """A stack of which this stage has some layers, or none."""

    idle: bool

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """See `Stack.forward`; without a layer, return what was received."""
        return cast(StageInput, self.embedding)() if self.idle else super().forward(*inputs, **named)


def layers_of(stage: int, stages: int, layers: int) -> range:
    """Return the layers of a stage; those of an encoder come first. Early stages have one more, if any."""
    return range(math.ceil(layers * stage / stages), math.ceil(layers * (stage + 1) / stages))


def stage_of(model: Transformer, stage: int, stages: int) -> "StageTransformer":
    """Return one stage of a model, which stays as it is; both share the parameters, under the same names."""
    stacks = {name: part for name, part in model.named_children() if isinstance(part, Stack)}
    own = layers_of(stage, stages, sum(stack.spec.n_layers for stack in stacks.values()))
    first = 0  # layer of a stack, among all
    mine: dict[str, list[int]] = {}
    for name, stack in stacks.items():
        mine[name] = [layer for layer in range(stack.spec.n_layers) if first + layer in own]
        first += stack.spec.n_layers
    needed = [stacks[name].embedding.front for name, layers in mine.items() if 0 in layers]
    last = stage == stages - 1
    if last and isinstance(model.head, LanguageHead) and model.config.tie_embeddings:
        needed.append(model.main.embedding.front)
    parts: dict[str, nn.Module] = {name: _part(stack, mine[name], needed) for name, stack in stacks.items()}
    parts["head"] = model.head if last else Head(model.config.readout)
    before = model.config.stacks[0].n_layers if len(stacks) == 2 else 0
    streams = tuple(2 if 0 < before < cut else 1 for cut in (own.start, own.stop))
    return like(
        model, StageTransformer, **parts, stage=stage, stages=stages, streams=streams, tallies=deque()
    )


def _part(stack: Stack, layers: Sequence[int], fronts: Sequence[nn.Module]) -> StageStack:
    """Return a stack with some of its layers, and its front where that is one of `fronts`."""
    spec, embedding, positions = stack.spec, stack.embedding, stack.positions
    if 0 not in layers:
        front = embedding.front if any(embedding.front is own for own in fronts) else None
        gone = dict.fromkeys(("types", "norm", "project", "received"))
        embedding = like(embedding, StageInput, front=front, **gone)
        if not layers or spec.positions not in BIASES:
            positions = like(positions, type(positions), **dict.fromkeys(positions._modules))
    blocks = [block if layer in layers else AbsentLayer() for layer, block in enumerate(stack.blocks)]
    return like(
        stack,
        StageStack,
        embedding=embedding,
        positions=positions,
        blocks=nn.ModuleList(blocks),
        norm=stack.norm if spec.n_layers - 1 in layers else None,
        idle=not layers,
    )


# A stage ----------------------------------------------------------------------------------------------------


class StageTransformer(Transformer):
    """One stage: some layers of a Transformer, between the stages before and after it."""

    stage: int
    stages: int
    streams: tuple[int, int]  # how many come in and go out: after an encoder its own, and a decoder's
    links: StageLinks
    shared: Mapping[str, Sequence[int]]  # weights of this stage that others hold too, and the stages that do
    tallies: deque[Tensor]  # of the last stage: router choices of each micro-batch before its backward pass
    counts: Tensor  # of the batch whose backward pass has begun

    def forward(self, *inputs: Any, **named: Any) -> Output:
        """Take what is received through the layers here, and send it on; see `Transformer.forward`.

        After the streams goes what routers chose in all layers so far: [stacks, 2X + 1], see `tally`.
        Where it is not the last stage, the logits are 0 [], and their gradient is what comes back.
        """
        sizes = (tuple(value.shape) for value in (*inputs, *named.values()) if isinstance(value, Tensor))
        key = (torch.is_grad_enabled(), self.training, *sizes)
        received: tuple[Tensor, ...] = ()
        anchor = torch.zeros((), device=self.links.device, requires_grad=True)
        if self.stage:
            received = _Receive.apply(anchor, self.links, key)  # type: ignore[no-untyped-call]
        stacks = [part for part in self.children() if isinstance(part, Stack)]
        inputs_of = [cast(StageInput, stack.embedding) for stack in stacks]
        for stage_input, x in zip(inputs_of, received[: self.streams[0]]):
            stage_input.received = x
        out = super().forward(*inputs, **named)
        for stage_input, _ in zip(inputs_of, received[: self.streams[0]]):
            stage_input.received = None  # kept no longer than it is needed
        sent = [out.hidden] if len(stacks) == 1 else [cast(Tensor, out.memory), out.hidden]
        sent = sent[: self.streams[1]]
        if torch.is_grad_enabled() and self.training and self.config.n_experts:
            masks = (named.get(name) for name in ("source_mask", "mask")[-len(stacks) :])
            none = torch.zeros(2 * self.config.n_experts + 1, device=self.links.device)
            chosen = [tally(stack, stack.worked_on(mask)) for stack, mask in zip(stacks, masks)]
            sent.append(torch.stack([none if choices is None else choices for choices in chosen]))
            if received:
                sent[-1] = sent[-1] + received[-1]
            if self.stage == self.stages - 1:
                self.tallies.append(sent[-1])
        if self.stage < self.stages - 1:
            out.logits = _Send.apply(anchor, self.links, key, *sent)  # type: ignore[no-untyped-call]
        return out

    def ready(
        self, loss: Tensor, number: int, batches: Sequence[Batch], cuts: Sequence[int], world: World
    ) -> Tensor:
        """Prepare the backward pass of a micro-batch; return its loss [], in the last stage with routers'.

        `fully_shard` reduces gradients with the final micro-batch alone, and keeps the head until then.
        """
        final, sharded, batch = number == len(batches) - 1, cast(Any, self), batches[number]
        sharded.set_is_last_backward(final)
        sharded.set_requires_gradient_sync(final)
        sharded.set_reshard_after_backward(final, recurse=False)
        if not self.tallies:
            return loss
        begins = dict(zip(itertools.accumulate(cuts, initial=0), cuts))  # the first micro-batch of each batch
        if number in begins:
            whole = [counts_of(choices) for choices in itertools.islice(self.tallies, begins[number])]
            self.counts = world.sum(torch.stack(whole).sum(0) * bool(batch.n_rows))  # stacks, X + 1
        uneven = imbalance(self.tallies.popleft(), self.counts).mean()
        return loss + BALANCE * batch.n_shared * uneven * bool(batch.n_rows)

    def complete(self) -> None:
        """Sum the gradients of weights that other stages hold too, in the same order in all of them."""
        named = dict(self.named_parameters())
        for name, stages in self.shared.items():
            parameter = named[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = shards.local(parameter.grad)
            parts = {self.stage: own.clone()}
            others = [stage for stage in stages if stage != self.stage]
            for stage in others:
                self.links.send([parts[self.stage]], stage)
            for stage in others:
                [parts[stage]] = self.links.receive([(own.shape, own.dtype)], stage, own.device)
            own.copy_(torch.stack([parts[stage] for stage in stages]).sum(0))
        self.links.wait()

    def counted(self) -> list[nn.Parameter]:
        """Return the parameters that no stage before holds."""
        mine = {name for name, stages in self.shared.items() if stages[0] < self.stage}
        return [parameter for name, parameter in self.named_parameters() if name not in mine]


class _Receive(torch.autograd.Function):
    """What the stage before sends; the gradient goes back to it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, links: StageLinks, key: object) -> tuple[Tensor, ...]:
        ctx.links = links
        return tuple(links.receive_forward(key))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, None, None]:
        """Send the gradients."""
        ctx.links.send(upstream, ctx.links.stage - 1)
        return None, None, None


class _Send(torch.autograd.Function):
    """0 [], having sent tensors to the next stage; their gradients come from there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, links: StageLinks, key: object, *sent: Tensor) -> Tensor:
        ctx.links, ctx.shapes = links, links.send_forward(key, sent)
        return torch.zeros_like(anchor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """Receive the gradients; that of the 0 itself is the same in every stage."""
        return None, None, None, *ctx.links.receive(ctx.shapes, ctx.links.stage + 1)


# Into stages ------------------------------------------------------------------------------------------------


def staged(model: Transformer, world: World, device: torch.device) -> StageTransformer:
    """Return the stage of this process, joined to the others; see `stage_of`."""
    stages, place = world.extent("pipeline"), world.place("pipeline")
    holders: dict[str, list[int]] = {}
    for stage in range(stages):
        named = dict(stage_of(model, stage, stages).named_parameters())
        refuse(
            not any(parameter.requires_grad for parameter in named.values()),
            f"train.freeze leaves nothing to train in stage {stage + 1} of parallel.pipeline {stages}: "
            "freeze less, or use fewer stages",
            ConfigError,
        )
        for name in named:
            holders.setdefault(name, []).append(stage)
    stage_here = stage_of(model, place, stages)
    stage_here.links = StageLinks(world, device)
    stage_here.shared = {name: held for name, held in holders.items() if place in held and len(held) > 1}
    return stage_here


# The schedule ---------------------------------------------------------------------------------------------

PER_STAGE = 4  # micro-batches of a step, if there are as many rows: a fifth of the time is then the bubble


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of a step: rows of this process, and the counts of all processes together.

    Without a pipeline, each batch is one micro-batch.
    """

    batches: list[Batch]
    cuts: list[int]  # micro-batches of each batch
    targets: int
    tokens: int


def micro_batches(whole: Sequence[Batch], world: World, device: torch.device) -> MicroBatches:
    """Return this process's rows of the batches of a step, as micro-batches."""
    counts = sum(batch.n_targets for batch in whole), sum(batch.n_tokens for batch in whole)
    each = [cut(batch, world, len(whole)) for batch in whole]
    return MicroBatches([micro.to(device) for some in each for micro in some], [*map(len, each)], *counts)


def cut(batch: Batch, world: World, batches: int) -> list[Batch]:
    """Cut this process's share of a batch into micro-batches, as many as every other share has."""
    own, stages = world.rows(batch), world.extent("pipeline")
    wanted = math.ceil(PER_STAGE * stages / batches) if stages > 1 else 1
    count = max(1, min(wanted, len(batch) // world.shares))
    if count == 1:
        return [own]
    ends = [len(own) * number // count for number in range(count + 1)]
    micro = [own.rows(slice(begin, end)) for begin, end in itertools.pairwise(ends)]
    for batch in micro:
        batch.__dict__["n_shared"] = own.n_shared
    return micro


def schedule_1f1b(world: World, cuts: Sequence[int], grouped: bool = False) -> Iterator[tuple[bool, int]]:
    """Yield (whether it is a forward pass, number of the micro-batch) in the order of a stage.

    Each stage takes as many micro-batches forward as there are later stages, then one backward for each one
    forward. `grouped`: all micro-batches of a batch go forward before the first one goes backward.
    """
    count, later = sum(cuts), world.extent("pipeline") - world.place("pipeline") - 1
    warmup = min(count, later + (max(cuts) - 1 if grouped else 0))
    yield from ((True, number) for number in range(warmup))
    for number in range(count):
        if number + warmup < count:
            yield True, number + warmup
        yield False, number


def gradients(
    model: Transformer,
    work: MicroBatches,
    world: World,
    loss_of: Callable[[Batch], Tensor],
    backward: Callable[[Tensor], None],
) -> Tensor:
    """Add up the gradients of a step; return its loss [], summed over the targets of this process.

    The balance of experts is over a batch, so its micro-batches stay together.
    """
    stage = model if isinstance(model, StageTransformer) else None
    total, losses = torch.zeros((), device=work.batches[0].ids.device), {}
    for forward, number in schedule_1f1b(world, work.cuts, grouped=bool(model.config.n_experts)):
        if forward:
            losses[number] = loss_of(work.batches[number])
            continue
        loss = losses.pop(number)
        if stage is not None:
            loss = stage.ready(loss, number, work.batches, work.cuts, world)
        backward(loss / max(1, work.targets))
        total += loss.detach()
    if stage is not None:
        stage.complete()
    return total
