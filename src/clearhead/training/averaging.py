"""Averages of weights: a moving one along the run, and a plain one of several checkpoints. Both often score better than the last step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clearhead.errors import CheckpointError
from clearhead.model.dtypes import wide


class Ema:
    """An exponential moving average of a model's trainable parameters, in float32 at least.

    The n-th update has decay min(decay, n / (n + 9)): a short run would otherwise mostly average the weights it began with.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.weights = {name: wide(parameter.detach()).clone() for name, parameter in _trainable(model)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards the weights of `model`: once after each step."""
        self.updates += 1
        share = 1 - min(self.decay, self.updates / (self.updates + 9))
        named = dict(_trainable(model))
        torch._foreach_lerp_(
            list(self.weights.values()), [wide(named[name].detach()) for name in self.weights], share
        )

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Let `model` have the averaged weights for the length of a `with` block; its own come back bit for bit."""
        named = dict(_trainable(model))
        own = {name: named[name].detach().clone() for name in self.weights}
        try:
            _put(named, self.weights)
            yield
        finally:
            _put(named, own)

    def state(self) -> dict[str, Tensor]:
        """All there is to it, as tensors, for a checkpoint."""
        return {"updates": torch.tensor(self.updates), **self.weights}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        differing = sorted(state.keys() ^ {"updates", *self.weights})
        if differing:
            raise CheckpointError(
                f"the moving average of the checkpoint and of the model differ in {differing[0]}: the recipe was changed"
            )
        self.updates = int(state["updates"])
        for name, weight in self.weights.items():
            weight.copy_(state[name])


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


@torch.no_grad()
def _put(named: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        named[name].copy_(weight)


def average(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of state dicts, read one after the other and summed in float64; what is not floating point comes from the last."""
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for state in states:
        if count and state.keys() != sums.keys():
            raise CheckpointError(
                f"checkpoints differ: {sorted(state.keys() ^ sums.keys())[0]} is not in all of them: average those of one run"
            )
        for name, tensor in state.items():
            if count and tensor.shape != sums[name].shape:
                shapes = f"{tuple(sums[name].shape)} and {tuple(tensor.shape)}"
                raise CheckpointError(
                    f"checkpoints differ: {name} has shapes {shapes}: average those of one run"
                )
            value = tensor.detach().cpu()
            dtypes[name] = tensor.dtype
            if not count or not tensor.is_floating_point():
                sums[name] = value.to(torch.float64, copy=True) if tensor.is_floating_point() else value
            else:
                sums[name] += value
        count += 1
    if not count:
        raise CheckpointError("there is no checkpoint to average: give one at least")
    return {
        name: (total / count).to(dtypes[name]) if dtypes[name].is_floating_point else total
        for name, total in sums.items()
    }
