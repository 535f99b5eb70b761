"""Packed documents: several texts in one row, each a run of tokens with an id of its own.

Shapes: B batch, T length.
"""

import torch
from torch import Tensor

from clearhead.errors import refuse


def of_real(ids: Tensor, real: Tensor) -> Tensor:
    """Give padding the id of the last real token before it, or of the first one: [B, T], [B, T] -> [B, T]."""
    slots = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, slots, -1).cummax(1).values
    return ids.gather(1, torch.where(last < 0, real.long().argmax(1, keepdim=True), last))


def check_runs(*tokens: tuple[Tensor, Tensor]) -> None:
    """Refuse an id that comes back after another one; `tokens` are ids and which are real, [B|1, T] each."""
    batch = max(len(ids) for ids, _ in tokens)
    ids, real = (torch.cat([x.expand(batch, -1) for x in part], dim=1) for part in zip(*tokens))
    ids = of_real(ids, real)
    runs, distinct = ((x[:, 1:] != x[:, :-1]).sum(1) for x in (ids, ids.sort(1).values))
    rows = (runs > distinct).nonzero().flatten().tolist()
    refuse(
        rows,
        f"documents of row {rows and rows[0]} come back to an id after another one: a document is one run of "
        "equal ids, so give each run its own",
    )
