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


def positions_in_documents(
    documents: Tensor, real: Tensor, before: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    """Count positions from 0 in each document, a run of equal ids: [B, T], [B, T] -> [B, T].

    `before` are documents, positions and reality of the tokens in a cache: a run that began there goes on.
    """
    count = real.cumsum(1) - real.long()  # real tokens before this slot, in this pass
    starts = torch.ones_like(real)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    positions = count - torch.where(starts, count, 0).cummax(1).values  # from the start of the run
    if before is None:
        return positions
    held, places, there = before
    same = there & (held == documents[:, :1])
    carried = torch.where(same, places + 1, 0).amax(1, keepdim=True)
    return positions + torch.where(starts.long().cumsum(1) == 1, carried, 0)  # in the first run


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
