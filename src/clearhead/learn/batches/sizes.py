"""Batches of a few sizes, so that what is recorded for one of them serves many.

Shapes: B rows, T tokens of a row.
"""

from dataclasses import replace

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.learn.batches.batch import IGNORE, Batch

STEP = 8  # between two sizes, at least: masks of attention are read in pieces of so many keys


def size_above(count: int) -> int:
    """Round up to 1, 2, 4, 8, then in steps of 8, from 128 on in steps of an eighth at most."""
    if count <= STEP:
        return 1 << (count - 1).bit_length()
    step = max(STEP, 1 << (count - 1).bit_length() >> 4)
    return -(-count // step) * step


def padded_up(batch: Batch, longest: int) -> Batch:
    """Pad rows and lengths up to the next size, `longest` tokens at most; nothing that is added counts.

    A row that is added has one token to attend to, and no target.
    """
    rows, made = size_above(len(batch)), dict[str, Tensor]()
    for name, mask_name in (("ids", "mask"), ("source", "source_mask")):
        ids, mask = getattr(batch, name), getattr(batch, mask_name)
        if ids is None:
            continue
        length = max(ids.shape[1], min(size_above(ids.shape[1]), longest))
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        made[name], wide = _pad(ids, rows, length, 0), _pad(real, rows, length, False)
        wide[len(batch) :, 0] = True
        made[mask_name] = wide
        if name == "ids" and batch.types is not None:
            made["types"] = _pad(batch.types, rows, length, 0)
        if name == "ids":
            made["targets"] = _pad(batch.targets, rows, length, IGNORE)
    if batch.numbers is not None:
        made["numbers"] = torch.cat([batch.numbers, batch.numbers[-1:].expand(rows - len(batch))])
    return _counted(replace(batch, **made), batch)


def scored_up(batch: Batch) -> Batch:
    """Fix how many positions are scored: all of them, or the next size above the number of targets."""
    if batch.targets.ndim < 2:
        return batch
    every = batch.targets.numel()
    made = _counted(replace(batch), batch)
    made.__dict__["n_scored"] = every if 2 * batch.n_targets > every else size_above(max(1, batch.n_targets))
    return made


def _counted(made: Batch, of: Batch) -> Batch:
    made.__dict__.update({name: getattr(of, name) for name in Batch.COUNTS})
    return made


def _pad(values: Tensor, rows: int, length: int, value: int | bool) -> Tensor:
    """Pad [B, ...] to `rows`, and its second axis, where there is one, to `length`."""
    missing = rows - values.shape[0]
    ends = (0, missing) if values.ndim == 1 else (0, length - values.shape[1], 0, missing)
    return nnf.pad(values, ends, value=value)
