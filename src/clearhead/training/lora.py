"""Low-rank updates: train two thin matrices beside a frozen one, y = W x + alpha / rank · B A x."""

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.errors import nearest, refuse
from clearhead.model.dtypes import wide


class LoraLinear(nn.Module):
    """A frozen linear layer with a low-rank update, which is zero at first."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, math.sqrt(5))  # the default of linear layers
        self.scale = alpha / rank

    @property
    def weight(self) -> Tensor:
        """The merged weight [out, in]."""
        return (wide(self.base.weight) + self.scale * (wide(self.b) @ wide(self.a))).to(
            self.base.weight.dtype
        )

    @property
    def bias(self) -> Tensor | None:
        """The bias of the frozen layer."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        update: Tensor = nnf.linear(nnf.linear(x, self.a), self.b)
        return self.base(x) + self.scale * update  # type: ignore[no-any-return]


def add_lora(
    model: nn.Module, rank: int, alpha: float, targets: Sequence[str], also: Sequence[str] = ()
) -> list[str]:
    """Freeze `model` and add low-rank updates to the linear layers of its blocks named by `targets`.

    Parameters whose names match a pattern in `also`, such as "head.*" for a new head, are trained as well.
    Returns the names of the layers that were changed.
    """
    layers = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and ".blocks." in f".{name}"
    }
    last_names = sorted({name.rpartition(".")[2] for name in layers})
    for target in targets:
        refuse(
            target not in last_names,
            f'train.lora_targets "{target}" names no linear layer{nearest(target, last_names)}: '
            f"choose from {', '.join(last_names)}",
        )
    refuse(not targets, f"train.lora_targets is empty: choose from {', '.join(last_names)}")
    chosen = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in targets}
    largest = min(min(layer.in_features, layer.out_features) for layer in chosen.values())
    refuse(
        not 1 <= rank <= largest,
        f"train.lora {rank} is not a possible rank: choose 1 to {largest}, the narrowest layer's width",
    )
    model.requires_grad_(False)
    for name, layer in chosen.items():
        model.set_submodule(name, LoraLinear(layer, rank, alpha))
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in also):
            parameter.requires_grad_(True)
    return list(chosen)


def merge(model: nn.Module) -> dict[str, LoraLinear]:
    """Replace each updated layer by one plain linear layer; return the updated layers by name, for `unmerge`.

    Modules and parameters then have the names they had before `add_lora`, so the model saves like any other.
    """
    updated = {name: part for name, part in model.named_modules() if isinstance(part, LoraLinear)}
    for name, part in updated.items():
        plain = nn.Linear(part.in_features, part.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(part.weight.detach(), requires_grad=False)
        plain.bias = part.base.bias
        model.set_submodule(name, plain.train(part.training))
    return updated


def unmerge(model: nn.Module, updated: Mapping[str, LoraLinear]) -> None:
    """Undo `merge` exactly: put the frozen layers and their updates back."""
    for name, part in updated.items():
        model.set_submodule(name, part)


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """Merge the updates within a `with` block: to save, or to generate."""
    updated = merge(model)
    try:
        yield
    finally:
        unmerge(model, updated)
