"""A linear layer with a low-rank update (LoRA): y = W x + alpha / rank · B A x."""

import math

import torch.nn.functional as nnf
from torch import Tensor, nn

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
        return self.merged(self.base.weight, self.a, self.b)

    def merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return a weight [out, in] with the update of a [rank, in] and b [out, rank]."""
        return (wide(weight) + self.scale * (wide(b) @ wide(a))).to(weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the frozen layer."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        update: Tensor = nnf.linear(nnf.linear(x, self.a), self.b)
        return self.base(x) + self.scale * update  # type: ignore[no-any-return]
