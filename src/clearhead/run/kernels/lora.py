"""A linear layer with a low-rank update (LoRA): y = W x + alpha / rank · B A x."""

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.dtypes import wide
from clearhead.errors import nearest, refuse
from clearhead.run.quant.layers import QuantizedLinear

ALL = "all-linear"
DECIDING = ("router", "score", "shared_gate", "beta", "decay")  # too narrow for a rank, and better left alone


class LoraLinear(nn.Module):
    """A frozen linear layer with a low-rank update, which is zero at first."""

    base: nn.Module  # a linear layer, or one that has an update already

    def __init__(self, base: nn.Linear | QuantizedLinear, rank: int, alpha: float) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base = base.requires_grad_(False)
        weight = base.weight
        self.a = nn.Parameter(weight.new_empty(rank, base.in_features))
        self.b = nn.Parameter(weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, math.sqrt(5))  # the default of linear layers
        self.scale = alpha / rank

    @classmethod
    def of(cls, base: nn.Module, a: Tensor, b: Tensor, scale: float) -> Self:
        """Return a layer, which may itself have an update, with the update of a [rank, in] and b [out, rank].

        The update is no parameter that is trained, and is computed in its own dtype.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = a.shape[1], b.shape[0]
        made.base, made.scale = base, scale
        made.a, made.b = nn.Parameter(a, requires_grad=False), nn.Parameter(b, requires_grad=False)
        return made

    @property
    def weight(self) -> Tensor:
        """The merged weight [out, in]."""
        return self.merged(cast(Tensor, self.base.weight), self.a, self.b)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return a weight [out, in] with the update of a [rank, in] and b [out, rank]."""
        return (wide(weight) + self.scale * (wide(b) @ wide(a))).to(weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the frozen layer."""
        return cast(Tensor | None, self.base.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y: Tensor = self.base(x)
        same = x.dtype == self.a.dtype or torch.is_autocast_enabled(x.device.type)
        update: Tensor = nnf.linear(nnf.linear(x if same else x.to(self.a.dtype), self.a), self.b)
        return y + self.scale * update if same else (y + self.scale * update).to(y.dtype)


def add_lora(
    model: nn.Module, rank: int, alpha: float, targets: Sequence[str], also: Sequence[str] = ()
) -> list[str]:
    """Freeze `model` and add low-rank updates to the linear layers of its blocks named by `targets`.

    PEFT's word "all-linear" stands for all of them, but for those with a few outputs that decide or weigh.
    Parameters whose names match a pattern in `also`, such as "head.*" for a new head, are trained as well.
    MTP layers are frozen without updates. Returns the names of the layers that were changed.
    """
    layers = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear | QuantizedLinear)
        and ".blocks." in f".{name}"
        and not name.startswith("mtp.")
    }
    last_names = sorted({name.rpartition(".")[2] for name in layers})
    for target in targets:
        refuse(
            target not in (*last_names, ALL),
            f'train.lora_targets "{target}" names no linear layer{nearest(target, last_names)}: '
            f"choose from {', '.join(last_names)}, or {ALL}",
        )
    if ALL in targets:
        targets = [name for name in last_names if name not in DECIDING]
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

    Modules and parameters then have the names they had before the updates, so the model saves like any other.
    """
    found = {name: part for name, part in model.named_modules() if isinstance(part, LoraLinear)}
    updated = {name: part for name, part in found.items() if name.rpartition(".")[0] not in found}
    for name, part in updated.items():
        plain = nn.Linear(part.in_features, part.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(part.weight.detach(), requires_grad=False)
        plain.bias = part.bias  # type: ignore[assignment]
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
