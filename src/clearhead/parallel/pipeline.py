"""The pipeline axis: layers shared out over processes, one behind the other.

A stage is the same Transformer with its own layers alone: a layer that is elsewhere passes the stream on, and
the embedding of a stage behind the first gives what was received. So the forward pass is that of `model/`.
Batches are cut into pieces, and each stage takes turns: as many passes forward as there are stages behind it,
then one backward for each forward (1F1B). docs/decisions/pipeline.md says why the schedule is our own.

Shapes: B rows, T length, D model, X experts.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from clearhead.batches.batch import Batch
from clearhead.config import BIASES, ModelConfig
from clearhead.errors import ConfigError, refuse
from clearhead.fast.parts import like
from clearhead.model.feedforward import BALANCE, counts_of, imbalance, tally
from clearhead.model.fronts import Embedding
from clearhead.model.heads import Head, LanguageHead
from clearhead.model.stack import Stack
from clearhead.model.transformer import Output, Transformer
from clearhead.parallel import shards
from clearhead.parallel.line import Line
from clearhead.parallel.world import World

PIECES = (
    4  # of the batches of a step for each stage, where they have the rows: a fifth of the time is waiting
)


def check(config: ModelConfig, stages: int, scaled: bool) -> None:
    """Refuse what stages cannot share out; `scaled`: the loss is, for float16."""
    axis, layers = f"parallel.pipeline {stages}", sum(stack.n_layers for stack in config.stacks)
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
        (scaled, "has no scaled loss (train.precision float16): use bfloat16 or float32"),
    ):
        refuse(stages > 1 and wrong, f"{axis} {why}", ConfigError)


# The parts of a stage ---------------------------------------------------------------------------------------


class Elsewhere(nn.Module):
    """A layer of another stage."""

    router = None

    def forward(self, x: Tensor, *more: object) -> Tensor:
        """Return the stream [B, T, D] as it came."""
        return x


class Inlet(Embedding):
    """The embedding of a stage behind the first: it gives what the stage before has sent."""

    received: Tensor | None

    def forward(self, *inputs: Any) -> Tensor:
        """Return the stream [B, T, D]; None in a stack whose turn comes later."""
        return cast(Tensor, self.received)


class PartStack(Stack):
    """A stack of which some layers are here, or none."""

    idle: bool

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """See `Stack.forward`; without a layer, return what was received."""
        return cast(Inlet, self.embedding)() if self.idle else super().forward(*inputs, **named)


def layers_of(stage: int, stages: int, layers: int) -> range:
    """Return the layers of a stage; those of an encoder come first. Early stages have one more, if any."""
    return range(-(-layers * stage // stages), -(-layers * (stage + 1) // stages))


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
        model, StageTransformer, **parts, stage=stage, stages=stages, streams=streams, flights=deque()
    )


def _part(stack: Stack, layers: Sequence[int], fronts: Sequence[nn.Module]) -> PartStack:
    """Return a stack with some of its layers, and its front where that is one of `fronts`."""
    spec, embedding, positions = stack.spec, stack.embedding, stack.positions
    if 0 not in layers:
        front = embedding.front if any(embedding.front is one for one in fronts) else None
        gone = dict.fromkeys(("types", "norm", "project", "received"))
        embedding = like(embedding, Inlet, front=front, **gone)
        if not layers or spec.positions not in BIASES:
            positions = like(positions, type(positions), **dict.fromkeys(positions._modules))
    blocks = [block if layer in layers else Elsewhere() for layer, block in enumerate(stack.blocks)]
    return like(
        stack,
        PartStack,
        embedding=embedding,
        positions=positions,
        blocks=nn.ModuleList(blocks),
        norm=stack.norm if spec.n_layers - 1 in layers else None,
        idle=not layers,
    )


# Turns ------------------------------------------------------------------------------------------------------


def turns(stage: int, stages: int, count: int, ahead: int = 0) -> Iterator[tuple[bool, int]]:
    """Yield the turns of a stage on `count` pieces: whether it goes forward, and the number of the piece.

    `ahead`: how many passes forward more than needed go before the first one backward.
    """
    warm = min(count, stages - stage - 1 + ahead)
    yield from ((True, number) for number in range(warm))
    for number in range(count):
        if number + warm < count:
            yield True, number + warm
        yield False, number


def pieces(batch: Batch, world: World, accumulate: int) -> list[Batch]:
    """Cut this process's share of a batch into pieces, as many in each share."""
    own, stages = world.rows(batch), world.extent("pipeline")
    wanted = -(-PIECES * stages // accumulate) if stages > 1 else 1
    count = max(1, min(wanted, len(batch) // world.shares))
    if count == 1:
        return [own]
    ends = [len(own) * number // count for number in range(count + 1)]
    made = [own.rows(slice(begin, end)) for begin, end in itertools.pairwise(ends)]
    for piece in made:
        piece.__dict__["n_shared"] = own.n_shared
    return made


@dataclass
class Flight:
    """A piece that has gone forward through a stage, and not yet back."""

    received: list[Tensor]
    sent: list[Tensor]


class StageTransformer(Transformer):
    """A stage: some layers of a Transformer, between a stage before and one behind."""

    stage: int
    stages: int
    streams: tuple[int, int]  # how many come in and go out: behind an encoder its own, and a decoder's
    line: Line
    shared: Mapping[str, Sequence[int]]  # weights of this stage that others hold too, and the stages that do
    flights: deque[Flight]

    @property
    def last(self) -> bool:
        """True if the head is here."""
        return self.stage == self.stages - 1

    def forward(self, *inputs: Any, **named: Any) -> Output:
        """Take what is received through the layers here, and send it on; see `Transformer.forward`.

        Behind the streams goes what routers chose in all layers so far: [stacks, 2X + 1], see `tally`.
        """
        graded = torch.is_grad_enabled()
        sizes = (tuple(value.shape) for value in (*inputs, *named.values()) if isinstance(value, Tensor))
        key = (graded, self.training, *sizes)
        received = [x.requires_grad_(graded) for x in self.line.receive(key)] if self.stage else []
        stacks = [part for part in self.children() if isinstance(part, Stack)]
        for stack, x in zip(stacks, received[: self.streams[0]]):
            cast(Inlet, stack.embedding).received = x
        out = super().forward(*inputs, **named)
        sent: list[Any] = [out.hidden] if len(stacks) == 1 else [out.memory, out.hidden]
        sent = [] if self.last else sent[: self.streams[1]]
        if graded and self.training and self.config.n_experts:
            masks = (named.get(name) for name in ("source_mask", "mask")[-len(stacks) :])
            chosen = [tally(stack, mask) for stack, mask in zip(stacks, masks)]
            none = torch.zeros(2 * self.config.n_experts + 1, device=out.hidden.device)
            total = torch.stack([none if one is None else one for one in chosen])
            sent.append(total + received[-1] if received else total)
        if not self.last:
            self.line.send(key, sent)
        if graded:
            self.flights.append(Flight(received, sent))
        return out

    def backward(self, loss: Tensor, final: bool) -> None:
        """Take the oldest piece back: on the last stage from its loss [], elsewhere from what comes back.

        `fully_shard` reduces gradients with the `final` piece alone, and keeps the head until then.
        """
        flight, sharded = self.flights.popleft(), cast(Any, self)
        sharded.set_is_last_backward(final)
        sharded.set_requires_gradient_sync(final)
        sharded.set_reshard_after_backward(final, recurse=False)
        if self.last:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            behind = self.line.receive_like(flight.sent, self.stage + 1)
            pairs = [(x, upstream) for x, upstream in zip(flight.sent, behind) if x.requires_grad]
            if pairs:  # else everything up to here is frozen
                torch.autograd.backward([x for x, _ in pairs], [upstream for _, upstream in pairs])
        if self.stage:
            grads = (torch.zeros_like(x) if x.grad is None else x.grad for x in flight.received)
            self.line.post(list(grads), self.stage - 1)

    def complete(self) -> None:
        """Sum the gradients of weights that other stages hold too, in the same order everywhere."""
        named = dict(self.named_parameters())
        for name, stages in self.shared.items():
            parameter = named[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own = shards.local(parameter.grad)
            others = [stage for stage in stages if stage != self.stage]
            for stage in others:
                self.line.post([own.clone()], stage)
            parts = {stage: self.line.receive_like([own], stage)[0] for stage in others}
            parts[self.stage] = own
            own.copy_(torch.stack([parts[stage] for stage in stages]).sum(0))
        self.line.settle()

    def counted(self) -> list[nn.Parameter]:
        """Return the parameters that no stage before holds."""
        return [
            one
            for name, one in self.named_parameters()
            if self.shared.get(name, [self.stage])[0] == self.stage
        ]


def gradients(
    stage: StageTransformer,
    world: World,
    batches: Sequence[Batch],
    cuts: Sequence[int],
    loss_of: Callable[[Batch], Tensor],
    targets: int,
) -> Tensor:
    """Take the pieces of a step through a stage and back; return their loss [], 0 but on the last stage.

    The balance of experts is over a batch: all of its pieces go forward before the first one goes back.

    Args:
        stage: of this process.
        world: its place.
        batches: the pieces.
        cuts: how many pieces each batch was cut into.
        loss_of: passes a piece forward; on the last stage, returns its loss without that of experts.
        targets: of the whole step, by which the loss is divided.
    """
    mixed = bool(stage.config.n_experts)
    begins = dict(zip(itertools.accumulate(cuts, initial=0), cuts))  # the first piece of each batch
    losses, counts, total = {}, torch.zeros(()), torch.zeros((), device=stage.line.device)
    for forward, number in turns(stage.stage, stage.stages, len(batches), max(cuts) - 1 if mixed else 0):
        batch = batches[number]
        if forward:
            losses[number] = loss_of(batch)
            continue
        loss = losses.pop(number)
        if mixed and stage.last:
            if number in begins:
                found = [counts_of(flight.sent[0]) for flight in stage.flights]  # stacks, X + 1
                counts = torch.stack(found[: begins[number]]).sum(0) * bool(batch.n_rows)
                counts = world.sum(counts)
            uneven = imbalance(stage.flights[0].sent[0], counts).mean()
            loss = loss + BALANCE * batch.n_shared * uneven * bool(batch.n_rows)
        stage.backward(loss / targets, final=number == len(batches) - 1)
        total += loss.detach()
    stage.complete()
    return total


def staged(model: Transformer, world: World, device: torch.device) -> StageTransformer:
    """Return the stage of this process, joined to the others; see `stage_of`."""
    stages, place = world.extent("pipeline"), world.place("pipeline")
    holders: dict[str, list[int]] = {}
    for stage in range(stages):
        named = dict(stage_of(model, stage, stages).named_parameters())
        refuse(
            not any(one.requires_grad for one in named.values()),
            f"train.freeze leaves nothing to train in stage {stage + 1} of parallel.pipeline {stages}: "
            "freeze less, or use fewer stages",
            ConfigError,
        )
        for name in named:
            holders.setdefault(name, []).append(stage)
    made = stage_of(model, place, stages)
    made.line = Line(world, device)
    made.shared = {name: held for name, held in holders.items() if place in held and len(held) > 1}
    return made
