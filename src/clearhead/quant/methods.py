"""Four ways to choose the codes of a weight: to the nearest, HQQ, GPTQ, AWQ.

The last two know what the layer reads: `moment` [D, D] is the mean of x xᵀ over the inputs of a data set.
With it the mean squared error of the layer's outputs is the trace of Δ · moment · Δᵀ, Δ the error of the
weight.

Shapes: N width out, D width in, G groups of a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.quant.grid import Grid, Quantized, bf16, nearest_codes, stored

NORM, BETA, GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20  # of HQQ: the norm, and how hard its steps pull
DAMPING = 0.01  # of GPTQ: added to the diagonal of the moment, as a share of its mean
POWERS = 20  # of AWQ: exponents that are tried, from 0 to 1


class Rounding(NamedTuple):
    """A weight on a grid, and what its inputs are multiplied by before it."""

    made: Quantized
    smooth: Tensor | None = None  # D

    @property
    def weight(self) -> Tensor:
        """The weight that the layer computes with: [N, D]."""
        weight = self.made.weight()
        return weight if self.smooth is None else weight * self.smooth


def rtn(grid: Grid, weight: Tensor, moment: Tensor | None) -> Rounding:
    """Round to the nearest number."""
    return Rounding(nearest_codes(grid, weight))


def hqq(grid: Grid, weight: Tensor, moment: Tensor | None) -> Rounding:
    """Move the grid of each group so that few weights have large errors (half-quadratic quantization).

    The error's 0.7-norm is what falls: in turn, codes are rounded, the errors shrunk towards zero, and
    offsets, or scales where the grid is symmetric, fitted to what is left. A group keeps the grid of its
    least error, and is left alone once its grid no longer moves.
    """
    groups = grid.split(weight)
    shape, groups = groups.shape[:2], groups.flatten(0, 1)  # n group
    scales, offsets = grid.fit(groups)
    spread = groups.abs().mean(-1, keepdim=True).clamp(min=1e-12)  # the pull is relative to the weights
    best, best_offsets = scales.clone(), None if offsets is None else offsets.clone()
    least = torch.full(scales.shape, torch.inf, device=weight.device)
    moving, beta = torch.arange(len(groups), device=weight.device), BETA
    for _ in range(ROUNDS):
        wanted, unit = groups[moving], spread[moving]
        codes = grid.round(wanted, scales, offsets)
        grown = codes * scales.float()[..., None]
        error = wanted - (grown if offsets is None else grown + offsets.float()[..., None])
        size = error.abs() / unit
        pull = (size + 1e-6).pow(NORM - 1)
        loss = (size * pull).sum(-1)
        better = loss < least[moving]
        least[moving[better]], best[moving[better]] = loss[better], scales[better]
        target = wanted - error.sign() * (size - pull / beta).clamp(min=0) * unit
        if offsets is None or best_offsets is None:
            fitted = bf16((codes * target).sum(-1) / codes.square().sum(-1).clamp(min=1e-12))
            moved = (fitted != scales) & (codes.abs().amax(-1) > 0)
            scales = fitted[moved]
        else:
            best_offsets[moving[better]] = offsets[better]
            fitted = bf16((target - grown).mean(-1))
            moved = fitted != offsets
            scales, offsets = scales[moved], fitted[moved]
        moving = moving[moved]
        beta *= GROWTH
    best, best_offsets = best.view(shape), None if best_offsets is None else best_offsets.view(shape)
    codes = grid.round(grid.split(weight), best, best_offsets)
    return Rounding(stored(grid, weight.shape[1], codes.flatten(1), best, best_offsets))


def gptq(grid: Grid, weight: Tensor, moment: Tensor | None) -> Rounding:
    """Round column by column, and let the columns to come make up for the error of each."""
    assert moment is not None
    N, D = weight.shape
    left, inverse = weight.clone(), _inverse_root(moment)
    codes = torch.zeros(N, D, device=weight.device)
    scales: list[Tensor] = []
    offsets: list[Tensor] = []
    for start in range(0, D, grid.group):
        stop = min(start + grid.group, D)
        scale, offset = _searched(grid, left[:, start:stop], moment.diagonal()[start:stop])
        scales.append(scale)
        offsets += [] if offset is None else [offset]
        errors = torch.zeros(N, stop - start, device=weight.device)
        for column in range(start, stop):
            numbers = left[:, column : column + 1, None]
            code = grid.round(numbers, scale, offset)[:, 0, 0]
            made = code * scale[:, 0].float() + (0 if offset is None else offset[:, 0].float())
            codes[:, column] = code
            error = (left[:, column] - made) / inverse[column, column]
            errors[:, column - start] = error
            left[:, column + 1 : stop] -= error[:, None] * inverse[column, None, column + 1 : stop]
        left[:, stop:] -= errors @ inverse[start:stop, stop:]
    return Rounding(stored(grid, D, codes, torch.cat(scales, 1), torch.cat(offsets, 1) if offsets else None))


def _inverse_root(moment: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a damped moment: [D, D]."""
    mean = moment.diagonal().mean().clamp(min=1e-12)
    damping = DAMPING * float(mean)
    identity = torch.eye(len(moment), device=moment.device, dtype=torch.float64)
    while True:
        factor, failed = torch.linalg.cholesky_ex(moment.double() + damping * identity)
        if not failed:
            root: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
            return root.float()
        damping *= 10


def _searched(grid: Grid, weight: Tensor, importance: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the grid of one group, narrowed where that lowers its error: [N, group] -> [N, 1] twice."""
    groups = weight[:, None]  # N 1 group
    scales, offsets = grid.fit(groups)
    best, found = torch.full_like(scales, torch.inf, dtype=torch.float32), (scales, offsets)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        scale = bf16(scales.float() * share)
        codes = grid.round(groups, scale, offsets)
        made = codes * scale.float()[..., None] + (0 if offsets is None else offsets.float()[..., None])
        error = ((groups - made).square() * importance).sum(-1)
        best, found = (
            torch.minimum(best, error),
            (torch.where(error < best, scale, found[0]), offsets),
        )
    return found


def awq(grid: Grid, weight: Tensor, moment: Tensor | None) -> Rounding:
    """Give columns that read large inputs more of the grid: the weight is multiplied, the inputs divided.

    The factor of a column is the size of its inputs to the power that gives the least error.
    """
    assert moment is not None
    sizes = moment.diagonal().clamp(min=0).sqrt()
    sizes = sizes.clamp(min=float(sizes.max()) * 1e-4 + 1e-12)
    best, found = torch.inf, rtn(grid, weight, None)
    for step in range(POWERS + 1):
        factor = sizes.pow(step / POWERS)
        factor = factor / (factor.max() * factor.min()).sqrt()
        choice = Rounding(nearest_codes(grid, weight * factor), 1 / factor)
        error = output_error(weight - choice.weight, moment)
        if error < best:
            best, found = error, choice
    return found


def output_error(difference: Tensor, moment: Tensor) -> float:
    """Return the mean squared error of outputs, summed over them: [N, D] with [D, D] -> one number."""
    return float(((difference @ moment) * difference).sum())


Method = Callable[[Grid, Tensor, Tensor | None], Rounding]
METHODS: dict[str, Method] = {"rtn": rtn, "hqq": hqq, "gptq": gptq, "awq": awq}
CALIBRATED = ("gptq", "awq")  # methods that need data
