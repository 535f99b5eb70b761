"""A linear layer with a low-rank update (LoRA): y = W x + alpha / rank · B A x."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core.dtypes import wide
from clearhead.run.quant.layers import QuantizedLinear


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
