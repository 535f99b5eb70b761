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

from clearhead.run.quant.grid import Grid, Quantized, bf16, fitted, nearest_codes, numbers, stored

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


# GPTQ -------------------------------------------------------------------------------------------------------
#
# Codes make up for each other's errors, on grids that are fitted to what the layer puts out: everything here
# lowers the trace of Δ · moment · Δᵀ.


DAMPING = 0.03  # added to the diagonal of the moment, as a share of its mean
GPTQ_ROUNDS = 2  # of choosing codes and fitting the grids to them
COLUMNS = 64  # whose errors are passed on together


def gptq(grid: Grid, weight: Tensor, moment: Tensor | None) -> Rounding:
    """Choose codes that make up for each other's errors, in turn with grids fitted to the outputs.

    Columns that read the largest inputs come first, while most others are left to make up for their errors.
    """
    assert moment is not None
    # Added to the diagonal, so that no direction that the texts lack is left to chance.
    mean = moment.diagonal().mean().clamp(min=1e-12)
    moment = moment + DAMPING * mean * torch.eye(len(moment), device=moment.device)
    order = moment.diagonal().argsort(descending=True)
    root = _inverse_root(moment[order][:, order])
    scales, offsets = fitted(grid, grid.split(weight), grid.split(moment.diagonal()[None])[0])
    least, best = torch.inf, None
    for _ in range(GPTQ_ROUNDS if grid.bits == 4 else 1):
        codes = _codes(grid, weight, root, order, scales, offsets)
        if grid.bits == 4:  # the grid of 8 bits is fine enough as it is
            scales, offsets = _refitted(grid, weight, codes, moment, scales, offsets)
        error = output_error(weight - numbers(grid, codes, scales, offsets), moment)
        if best is None or error < least:
            least, best = error, stored(grid, weight.shape[1], codes, scales, offsets)
    assert best is not None
    return Rounding(best)


def _codes(
    grid: Grid, weight: Tensor, root: Tensor, order: Tensor, scales: Tensor, offsets: Tensor | None
) -> Tensor:
    """Round column by column, and let the columns to come make up for the error of each: [N, D]."""
    D, group = len(order), order // grid.group
    left = weight.t()[order].contiguous()  # D N: a column is contiguous
    if offsets is not None:
        left -= offsets.float().t()[group]
    steps = scales.float().t()[group]  # D N
    codes = torch.empty_like(left)
    for start in range(0, D, COLUMNS):
        stop = min(start + COLUMNS, D)
        errors = torch.empty_like(left[start:stop])
        for column in range(start, stop):
            step = steps[column]
            code = (left[column] / torch.where(step == 0, 1.0, step)).round().clamp(grid.least, grid.most)
            codes[column] = code
            error = (left[column] - code * step) / root[column, column]
            errors[column - start] = error
            left[column + 1 : stop] -= root[column, column + 1 : stop, None] * error
        left[stop:] -= root[start:stop, stop:].t() @ errors
    return codes[order.argsort()].t().contiguous()


def _refitted(
    grid: Grid, weight: Tensor, codes: Tensor, moment: Tensor, scales: Tensor, offsets: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Fit the grid of one group after the other to its codes, with the other groups as they are by then.

    Each is a least-squares problem of one or two unknowns for every row: how far to change a scale, and how
    far an offset.
    """
    scales, offsets = scales.clone(), None if offsets is None else offsets.clone()
    left = weight - numbers(grid, codes, scales, offsets)  # N D
    for g in range(scales.shape[1]):
        columns = slice(g * grid.group, min((g + 1) * grid.group, weight.shape[1]))
        of, within = codes[:, columns], moment[columns, columns]
        pull = left @ moment[:, columns]  # N g
        grown = of @ within
        by_scale, by_codes = (pull * of).sum(1), (grown * of).sum(1)
        before = scales[:, g].float()
        if offsets is None:
            scales[:, g] = bf16(before + by_scale / by_codes.clamp(min=1e-30))
            left[:, columns] -= (scales[:, g].float() - before)[:, None] * of
            continue
        ones, mixed, by_offset = within.sum(), grown.sum(1), pull.sum(1)
        spread = (by_codes * ones - mixed.square()).clamp(min=1e-30)
        change = torch.where(
            spread > 1e-6 * by_codes * ones, (by_scale * ones - by_offset * mixed) / spread, 0
        )
        scales[:, g] = bf16(before + change)
        moved = scales[:, g].float() - before
        was = offsets[:, g].float()
        offsets[:, g] = bf16(was + (by_offset - moved * mixed) / ones.clamp(min=1e-30))
        left[:, columns] -= moved[:, None] * of + (offsets[:, g].float() - was)[:, None]
    return scales, offsets


def _inverse_root(moment: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a moment: [D, D]."""
    wide, more = moment.double(), 0.0
    identity = torch.eye(len(moment), device=moment.device, dtype=torch.float64)
    while True:
        factor, failed = torch.linalg.cholesky_ex(wide + more * identity)
        if not failed:
            root: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
            return root.float()
        more = 10 * more or DAMPING * float(wide.diagonal().mean())


Method = Callable[[Grid, Tensor, Tensor | None], Rounding]
METHODS: dict[str, Method] = {"rtn": rtn, "hqq": hqq, "imatrix": imatrix, "gptq": gptq, "awq": awq}
CALIBRATED = ("gptq", "awq")  # methods that need data
