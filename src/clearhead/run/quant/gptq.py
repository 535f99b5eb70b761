"""GPTQ: codes that make up for each other's errors, on grids that are fitted to what the layer puts out.

`moment` [D, D] is the mean of x xᵀ over what the layer reads. With Δ the error of the weight, the mean
squared error of its outputs is the trace of Δ · moment · Δᵀ: everything here lowers that.

Shapes: N width out, D width in, G groups of a row, g columns of a group.
"""

import torch
from torch import Tensor

from clearhead.run.quant.grid import Grid, Quantized, bf16, fitted, numbers, stored

DAMPING = 0.03  # added to the diagonal of the moment, as a share of its mean
ROUNDS = 2  # of choosing codes and fitting the grids to them
COLUMNS = 64  # whose errors are passed on together


def gptq_codes(grid: Grid, weight: Tensor, moment: Tensor) -> Quantized:
    """Return a weight [N, D] on grids of least error, chosen in turn with the codes.

    Columns that read the largest inputs come first, while most others are left to make up for their errors.
    """
    D = weight.shape[1]
    moment = _damped(moment)
    order = moment.diagonal().argsort(descending=True)
    root = _inverse_root(moment[order][:, order])
    scales, offsets = fitted(grid, grid.split(weight), grid.split(moment.diagonal()[None])[0])
    least, best = torch.inf, None
    for _ in range(ROUNDS if grid.bits == 4 else 1):
        codes = _codes(grid, weight, root, order, scales, offsets)
        if grid.bits == 4:  # the grid of 8 bits is fine enough as it is
            scales, offsets = _refitted(grid, weight, codes, moment, scales, offsets)
        difference = weight - numbers(grid, codes, scales, offsets)
        error = float(((difference @ moment) * difference).sum())
        if best is None or error < least:
            least, best = error, stored(grid, D, codes, scales, offsets)
    assert best is not None
    return best


def _codes(
    grid: Grid, weight: Tensor, root: Tensor, order: Tensor, scales: Tensor, offsets: Tensor | None
) -> Tensor:
    """Round column by column, and let the columns to come make up for the error of each: [N, D]."""
    D, group = len(order), order // grid.group
    left = weight.t()[order].contiguous()  # D N: a column lies in one piece
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


def _damped(moment: Tensor) -> Tensor:
    """Add to the diagonal, so that no direction that the texts lack is left to chance: [D, D]."""
    mean = moment.diagonal().mean().clamp(min=1e-12)
    return moment + DAMPING * mean * torch.eye(len(moment), device=moment.device)


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
