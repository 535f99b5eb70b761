"""Weights other than those in training: averages, and low-rank updates.

A moving average along the run, and the mean of several checkpoints, often score better than the weights of
the last step. Low-rank updates (LoRA) train two thin matrices next to a frozen one,
y = W x + alpha / rank · B A x.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from clearhead.core.dtypes import wide
from clearhead.core.transformer import Transformer
from clearhead.errors import CheckpointError, refuse
from clearhead.hub.checkpoint import Description, outgoing
from clearhead.hub.weights import Outgoing
from clearhead.learn.parallel.shards import local, part_like, put
from clearhead.run.kernels.lora import LoraLinear, merged


class Ema:
    """An exponential moving average of a model's trainable parameters, in float32 at least.

    The n-th update has decay min(decay, n / (n + 9)): otherwise the average of a short run would mostly be
    its first weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.weights = {
            name: wide(parameter.detach()).clone() for name, parameter in _trainable(model).items()
        }

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the weights of `model`; call it once after each step."""
        self.updates += 1
        share = 1 - min(self.decay, self.updates / (self.updates + 9))
        named = _trainable(model)
        torch._foreach_lerp_(
            [local(weight) for weight in self.weights.values()],
            [wide(local(named[name].detach())) for name in self.weights],
            share,
        )

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Give `model` the averaged weights within a `with` block; its own come back bit for bit."""
        named = _trainable(model)
        own = {name: parameter.detach().clone() for name, parameter in named.items()}
        try:
            put(named, self.weights)
            yield
        finally:
            put(named, own)

    def state(self, whole: bool = True) -> dict[str, Tensor]:
        """Return the average as tensors, for a checkpoint; not `whole`: where its model has the weights."""
        return {"updates": torch.tensor(self.updates), **(self.weights if whole else {})}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load the average from what `state` returned; if it has no weights, keep the initial ones."""
        self.updates = int(state.get("updates", 0))
        if state.keys() == {"updates"}:
            return
        differing = sorted(state.keys() ^ {"updates", *self.weights})
        refuse(
            differing,
            f"the moving average of the checkpoint differs in {', '.join(differing[:1])}: "
            "the recipe was changed",
            CheckpointError,
        )
        for name, weight in self.weights.items():
            local(weight).copy_(part_like(state[name], weight))


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def average(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of state dicts, read one by one and summed in float64; integers come from the last."""
    sums: dict[str, Tensor] = {}
    state: Mapping[str, Tensor] = {}
    count = 0
    for count, state in enumerate(states, start=1):
        if count == 1:
            sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in state.items()}
        first, here = ({name: tuple(tensor.shape) for name, tensor in some.items()} for some in (sums, state))
        differing = sorted(name for name, _ in first.items() ^ here.items())
        if differing:
            shapes = f"has shapes {first.get(differing[0])} and {here.get(differing[0])}"
            what = shapes if differing[0] in first.keys() & here.keys() else "is not in all of them"
            raise CheckpointError(f"checkpoints differ: {differing[0]} {what}: average those of one run")
        values = {name: tensor.detach().cpu() for name, tensor in state.items()}
        sums = {
            name: sums[name] + tensor if tensor.is_floating_point() else tensor
            for name, tensor in values.items()
        }
    refuse(not count, "there is no checkpoint to average: give one at least", CheckpointError)
    return {
        name: (total / count).to(state[name].dtype) if state[name].is_floating_point() else total
        for name, total in sums.items()
    }


# Low-rank updates -------------------------------------------------------------------------------------------


def adapted_note(layers: Sequence[str], rank: int) -> str:
    """Return a sentence on which layers have low-rank updates; those of all blocks go by one name."""
    names = dict.fromkeys(re.sub(r"^.*?blocks\.\d+\.|(?<=\.)\d+\.", "", name) for name in layers)
    return f"low-rank updates of rank {rank} in {len(layers):,} layers: {', '.join(names)}"


def merged_tensors(model: Transformer, described: Description) -> dict[str, Outgoing]:
    """Return the tensors that a model is written as once its updates are merged, made of those it has now."""
    layers = {name: part for name, part in model.named_modules() if isinstance(part, LoraLinear)}
    with merged(model):
        tensors = outgoing(model, described)

    def made(tensor: Outgoing) -> Outgoing:
        owners = [name.rpartition(".") for name in tensor.sources]
        names = [
            (f"{owner}.base.weight", f"{owner}.a", f"{owner}.b")
            if owner in layers and kind == "weight"
            else (f"{owner}.base.{kind}" if owner in layers else f"{owner}{dot}{kind}",)
            for owner, dot, kind in owners
        ]

        def make(sources: list[Tensor]) -> Tensor:
            rest = iter(sources)
            groups = [[next(rest) for _ in some] for some in names]
            ours = [
                layers[owner].merged(*some) if len(some) > 1 else some[0]
                for (owner, _, _), some in zip(owners, groups)
            ]
            return tensor.make(ours)

        return replace(tensor, sources=tuple(itertools.chain(*names)), make=make)

    return {name: made(tensor) for name, tensor in tensors.items()}
