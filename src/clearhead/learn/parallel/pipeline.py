"""The pipeline axis: layers shared out over processes, one behind the other.

A stage is the same Transformer with its own layers alone: a layer that is elsewhere passes the stream on, and
the embedding of a stage behind the first gives what was received. So the forward pass is that of `core/`.
What it receives and sends is part of the graph: the backward pass takes gradients the other way. `turns` has
the order of passes.

Shapes: B rows, T length, D model, X experts.
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
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
from clearhead.learn.parallel.line import Line
from clearhead.learn.parallel.world import World
from clearhead.run.kernels.parts import like
from clearhead.variants.routing import BALANCE, BY_LENGTH, counts_of, imbalance, tally


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
            scaling in BY_LENGTH,
            f"cuts batches into pieces, and rope scaling {scaling} goes by the longest row of a batch: "
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


# A stage ----------------------------------------------------------------------------------------------------


class StageTransformer(Transformer):
    """A stage: some layers of a Transformer, between a stage before and one behind."""

    stage: int
    stages: int
    streams: tuple[int, int]  # how many come in and go out: behind an encoder its own, and a decoder's
    line: Line
    shared: Mapping[str, Sequence[int]]  # weights of this stage that others hold too, and the stages that do
    tallies: deque[Tensor]  # of the last stage: what routers chose for each piece that has not yet gone back
    counts: Tensor  # of the batch that goes back

    def forward(self, *inputs: Any, **named: Any) -> Output:
        """Take what is received through the layers here, and send it on; see `Transformer.forward`.

        Behind the streams goes what routers chose in all layers so far: [stacks, 2X + 1], see `tally`.
        Where it is not the last stage, the logits are 0 [], and their gradient is what comes back.
        """
        sizes = (tuple(value.shape) for value in (*inputs, *named.values()) if isinstance(value, Tensor))
        key = (torch.is_grad_enabled(), self.training, *sizes)
        received: tuple[Tensor, ...] = ()
        anchor = torch.zeros((), device=self.line.device, requires_grad=True)
        if self.stage:
            received = _Arrival.apply(anchor, self.line, key)  # type: ignore[no-untyped-call]
        stacks = [part for part in self.children() if isinstance(part, Stack)]
        inlets = [cast(Inlet, stack.embedding) for stack in stacks]
        for inlet, x in zip(inlets, received[: self.streams[0]]):
            inlet.received = x
        out = super().forward(*inputs, **named)
        for inlet, _ in zip(inlets, received[: self.streams[0]]):
            inlet.received = None  # kept no longer than it is needed
        sent = [out.hidden] if len(stacks) == 1 else [cast(Tensor, out.memory), out.hidden]
        sent = sent[: self.streams[1]]
        if torch.is_grad_enabled() and self.training and self.config.n_experts:
            masks = (named.get(name) for name in ("source_mask", "mask")[-len(stacks) :])
            none = torch.zeros(2 * self.config.n_experts + 1, device=self.line.device)
            chosen = [tally(stack, stack.worked_on(mask)) for stack, mask in zip(stacks, masks)]
            sent.append(torch.stack([none if one is None else one for one in chosen]))
            if received:
                sent[-1] = sent[-1] + received[-1]
            if self.stage == self.stages - 1:
                self.tallies.append(sent[-1])
        if self.stage < self.stages - 1:
            out.logits = _Departure.apply(anchor, self.line, key, *sent)  # type: ignore[no-untyped-call]
        return out

    def ready(
        self, loss: Tensor, number: int, batches: Sequence[Batch], cuts: Sequence[int], world: World
    ) -> Tensor:
        """Prepare piece `number` to go back; return its loss [], in the last stage with that of routers.

        `fully_shard` reduces gradients with the final piece alone, and keeps the head until then.
        """
        final, sharded, batch = number == len(batches) - 1, cast(Any, self), batches[number]
        sharded.set_is_last_backward(final)
        sharded.set_requires_gradient_sync(final)
        sharded.set_reshard_after_backward(final, recurse=False)
        if not self.tallies:
            return loss
        begins = dict(zip(itertools.accumulate(cuts, initial=0), cuts))  # the first piece of each batch
        if number in begins:
            whole = [counts_of(one) for one in itertools.islice(self.tallies, begins[number])]
            self.counts = world.sum(torch.stack(whole).sum(0) * bool(batch.n_rows))  # stacks, X + 1
        uneven = imbalance(self.tallies.popleft(), self.counts).mean()
        return loss + BALANCE * batch.n_shared * uneven * bool(batch.n_rows)

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
            parts = {self.stage: own.clone()}
            others = [stage for stage in stages if stage != self.stage]
            for stage in others:
                self.line.post([parts[self.stage]], stage)
            for stage in others:
                [parts[stage]] = self.line.receive([(own.shape, own.dtype)], stage, own.device)
            own.copy_(torch.stack([parts[stage] for stage in stages]).sum(0))
        self.line.settle()

    def counted(self) -> list[nn.Parameter]:
        """Return the parameters that no stage before holds."""
        mine = {name for name, stages in self.shared.items() if stages[0] < self.stage}
        return [parameter for name, parameter in self.named_parameters() if name not in mine]


class _Arrival(torch.autograd.Function):
    """What the stage before sends; the gradient goes back to it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, line: Line, key: object) -> tuple[Tensor, ...]:
        ctx.line = line
        return tuple(line.arrive(key))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, None, None]:
        """Send the gradients."""
        ctx.line.post(upstream, ctx.line.stage - 1)
        return None, None, None


class _Departure(torch.autograd.Function):
    """0 [], having sent tensors to the stage behind; their gradients come from there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, line: Line, key: object, *sent: Tensor) -> Tensor:
        ctx.line, ctx.forms = line, line.depart(key, sent)
        return torch.zeros_like(anchor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """Receive the gradients; that of the 0 itself is the same in every stage."""
        return None, None, None, *ctx.line.receive(ctx.forms, ctx.line.stage + 1)


# Into stages ------------------------------------------------------------------------------------------------


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
