"""Averages of weights: a moving one along the run, and the mean of several checkpoints.

Both often score better than the weights of the last step.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clearhead.errors import CheckpointError, refuse
from clearhead.model.dtypes import wide


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
        now = [wide(named[name].detach()) for name in self.weights]
        torch._foreach_lerp_(list(self.weights.values()), now, share)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Give `model` the averaged weights within a `with` block; its own come back bit for bit."""
        own = {name: parameter.detach().clone() for name, parameter in _trainable(model).items()}
        try:
            model.load_state_dict(self.weights, strict=False)
            yield
        finally:
            model.load_state_dict(own, strict=False)

    def state(self) -> dict[str, Tensor]:
        """Return the average as tensors, for a checkpoint."""
        return {"updates": torch.tensor(self.updates), **self.weights}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Set the average to what `state` returned."""
        differing = sorted(state.keys() ^ {"updates", *self.weights})
        if differing:
            raise CheckpointError(
                f"the moving average of the checkpoint differs in {differing[0]}: the recipe was changed"
            )
        self.updates = int(state["updates"])
        for name, weight in self.weights.items():
            weight.copy_(state[name])


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def average(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of state dicts, read one by one and summed in float64; integers come from the last."""
    sums: dict[str, Tensor] = {}
    state: Mapping[str, Tensor] = {}
    count = 0
    for count, state in enumerate(states, start=1):
        if count == 1:
            sums = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in state.items()}
        first, here = ({name: tuple(one.shape) for name, one in some.items()} for some in (sums, state))
        differing = sorted(name for name, _ in first.items() ^ here.items())
        if differing:
            shapes = f"has shapes {first.get(differing[0])} and {here.get(differing[0])}"
            what = shapes if differing[0] in first.keys() & here.keys() else "is not in all of them"
            raise CheckpointError(f"checkpoints differ: {differing[0]} {what}: average those of one run")
        values = {name: tensor.detach().cpu() for name, tensor in state.items()}
        sums = {name: sums[name] + one if one.is_floating_point() else one for name, one in values.items()}
    refuse(not count, "there is no checkpoint to average: give one at least", CheckpointError)
    return {
        name: (total / count).to(state[name].dtype) if state[name].is_floating_point() else total
        for name, total in sums.items()
    }
