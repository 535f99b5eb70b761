"""Muon: momentum made orthogonal, for the matrices of hidden layers; AdamW for everything else.

Jordan et al. 2024 orthogonalise the momentum of a matrix by a Newton-Schulz iteration. Its update then has
the same size in every direction. Liu et al. 2025 scale it to the size of AdamW's, so that one learning rate
and one weight decay serve both.

Shapes: N rows and D columns of a matrix.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.learn.parallel.shards import local, part_like, whole

MOMENTUM = 0.95
ROUNDS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)  # singular values end between about 0.7 and 1.2
LIKE_ADAMW = 0.2  # the root mean square of a usual update of AdamW


class Muon(torch.optim.AdamW):
    """Muon for groups that are `orthogonal`, AdamW for the others.

    A matrix of which this process holds a part is gathered, and each of its processes orthogonalises it.
    """

    def __init__(
        self, groups: list[dict[str, Any]], device: torch.device, dtype: torch.dtype, **settings: Any
    ) -> None:
        super().__init__(groups, **settings)
        self.device, self.dtype = device, dtype  # of the products; weights may be in main memory

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take a step; gradients of matrices are used up."""
        for group in self.param_groups:
            for parameter in group["params"] if group["orthogonal"] else ():
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["weight_decay"])
                    parameter.grad = None  # so that AdamW passes it over
        return super().step(closure)

    @torch.no_grad()
    def _move(self, parameter: Tensor, rate: float, decay: float) -> None:
        gradient, kept = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not kept:
            kept["momentum"] = torch.zeros_like(gradient)
        local(kept["momentum"]).lerp_(local(gradient), 1 - MOMENTUM)
        local(gradient).lerp_(local(kept["momentum"]), MOMENTUM)  # Nesterov's
        update = part_like(orthogonal(whole(gradient).to(self.device, self.dtype)), parameter)
        here, size = local(parameter), LIKE_ADAMW * math.sqrt(max(parameter.shape))
        here.mul_(1 - rate * decay).add_(update.to(here.device), alpha=-rate * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix [N, D] with the same singular vectors, and singular values near 1."""
    x: Tensor = matrix / torch.linalg.matrix_norm(matrix).clamp(min=1e-7)
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    a, b, c = COEFFICIENTS
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x
