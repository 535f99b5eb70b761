"""Five ways to choose the codes of a weight: to the nearest, HQQ, by an importance matrix, GPTQ, AWQ.

The last three know what the layer reads: `moment` [D, D] is the mean of x xᵀ over the inputs of a data set.
With it the mean squared error of the layer's outputs is the trace of Δ · moment · Δᵀ, Δ the error of the
weight.

Shapes: N width out, D width in, G groups of a row.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.run.quant.gptq import gptq_codes
from clearhead.run.quant.grid import Grid, Quantized, bf16, fitted, nearest_codes, stored

NORM, BETA, GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20  # of HQQ: the norm, and how hard its steps pull
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


def imatrix(grid: Grid, weight: Tensor, moment: Tensor | None) -> Rounding:
    """Fit each group's grid by least squares, each column by the mean square of its inputs.

    Of the moment, only the diagonal counts: [D, D], or the diagonal itself [D].
    """
    assert moment is not None
    groups, sizes = grid.split(weight), moment if moment.dim() == 1 else moment.diagonal()
    scales, offsets = fitted(grid, groups, grid.split(sizes[None])[0])
    codes = grid.round(groups, scales, offsets).flatten(1)
    return Rounding(stored(grid, weight.shape[1], codes, scales, offsets))


def gptq(grid: Grid, weight: Tensor, moment: Tensor | None) -> Rounding:
    """Choose codes that make up for each other's errors, on grids fitted to the outputs."""
    assert moment is not None
    return Rounding(gptq_codes(grid, weight, moment))


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
METHODS: dict[str, Method] = {"rtn": rtn, "hqq": hqq, "imatrix": imatrix, "gptq": gptq, "awq": awq}
CALIBRATED = ("gptq", "awq")  # methods that need data
