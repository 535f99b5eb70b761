"""Masks: who may attend to whom, composed once per forward pass from a few predicates. True = may attend.

`Tokens` says, for each slot of a row, what the predicates need to know. Causality goes by `order`, the count of real
tokens before a slot, and windows by `positions`; so padding on either side, gaps, packed documents and caches of any
form all follow from the same few lines.

Shapes: B batch (1 where all rows are alike), T query length, S key length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.model.rope import Rotary


@dataclass(frozen=True)
class Tokens:
    """A row of tokens as masks and positions see it."""

    order: Tensor  # B|1 T: how many real tokens stand before this one
    positions: Tensor  # B|1 T
    real: Tensor | None  # B|1 T: False for padding; None: all real
    documents: Tensor | None  # B|1 T: tokens of different documents do not see each other; None: one document
    plain: bool  # all real, one document, order and positions both 0, 1, 2, ... from some start

    @property
    def length(self) -> int:
        """Number of slots, padding included."""
        return self.order.shape[1]


def tokens_from(
    batch: int,
    length: int,
    device: torch.device,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    before: Tokens | None = None,
) -> Tokens:
    """The tokens of one forward pass, given what the caller said and the tokens `before` them in the cache."""
    if mask is None and positions is None and documents is None and (before is None or before.plain):
        start = before.length if before is not None else 0
        count = torch.arange(start, start + length, device=device)[None]
        return Tokens(count, count, None, None, plain=True)

    real = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
    offset = _next_order(before, batch, device)
    order = (offset + real.cumsum(1) - 1).clamp(min=0)
    documents = documents.long() if documents is not None else None
    if positions is None:
        positions = order if documents is None else _positions_in_documents(real, documents, before)
    return Tokens(order, positions.long(), real, documents, plain=False)


def _next_order(before: Tokens | None, batch: int, device: torch.device) -> Tensor:
    """How many real tokens each row already has: [B, 1]."""
    if before is None or not before.length:
        return torch.zeros(batch, 1, dtype=torch.long, device=device)
    if before.real is None:
        return torch.full((batch, 1), before.length, dtype=torch.long, device=device)
    highest = torch.where(before.real, before.order, -1).amax(1, keepdim=True)
    return (highest + 1).expand(batch, 1)


def _positions_in_documents(real: Tensor, documents: Tensor, before: Tokens | None) -> Tensor:
    """Positions that begin again at 0 in each document (a run of equal ids), going on from the cache where the run does."""
    count = real.cumsum(1) - real.long()  # real tokens before this slot, in this pass
    starts = torch.ones_like(real)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    run_start = torch.where(starts, count, 0).cummax(1).values
    positions = count - run_start
    if before is None or not before.length or before.documents is None:
        return positions
    known = before.real if before.real is not None else torch.ones_like(before.documents, dtype=torch.bool)
    same = known & (before.documents == documents[:, :1])
    carried = torch.where(same, before.positions + 1, 0).amax(1, keepdim=True)
    in_first_run = starts.long().cumsum(1) == 1
    return positions + torch.where(in_first_run, carried, 0)


def join(a: Tokens, b: Tokens) -> Tokens:
    """The tokens of `a` followed by those of `b`."""
    plain = a.plain and b.plain
    batch = max(a.order.shape[0], b.order.shape[0])

    def cat(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.expand(batch, -1), y.expand(batch, -1)], dim=1)

    def filled(tokens: Tokens, value: Tensor | None, fill: int | bool) -> Tensor:
        return (
            torch.full_like(tokens.order, fill, dtype=torch.bool if isinstance(fill, bool) else None)
            if value is None
            else value
        )

    real = (
        None if a.real is None and b.real is None else cat(filled(a, a.real, True), filled(b, b.real, True))
    )
    one_document = a.documents is None and b.documents is None
    documents = None if one_document else cat(filled(a, a.documents, 0), filled(b, b.documents, 0))
    if plain:
        batch = 1
    return Tokens(cat(a.order, b.order), cat(a.positions, b.positions), real, documents, plain)


@dataclass(frozen=True)
class View:
    """What the attention of one layer may see, and how: handed down by the stack."""

    mask: Tensor | None = None  # B|1 1 T S, True = may attend; None: everything
    causal: bool = False  # the mask is exactly "key slot <= query slot", and is not spelled out
    bias: Tensor | None = None  # B|1 H|1 T S, added to the scores
    rotary: Rotary | None = None


def compose(
    queries: Tokens,
    keys: Tokens,
    *,
    causal: bool = False,
    window: int | None = None,
    prefix: Tensor | None = None,
) -> tuple[Tensor | None, bool]:
    """Mask [B|1, 1, T, S] (None: everything may be seen) and whether it is plain causal, not spelled out.

    `prefix` [B] counts the leading positions of each row that every query may see, whatever `causal` says.
    """
    if queries.plain and keys.plain and prefix is None and (window is None or keys.length <= window):
        if not causal or queries.length == 1:
            return None, False
        if queries.length == keys.length:
            return None, True

    allowed: list[Tensor] = []  # each B|1 T|1 S
    if keys.real is not None:
        allowed.append(keys.real[:, None, :])
    if queries.documents is not None and keys.documents is not None:
        allowed.append(queries.documents[:, :, None] == keys.documents[:, None, :])
    if causal:
        earlier = keys.order[:, None, :] <= queries.order[:, :, None]
        allowed.append(
            earlier if prefix is None else earlier | (keys.positions < prefix[:, None])[:, None, :]
        )
    if window is not None:
        allowed.append((queries.positions[:, :, None] - keys.positions[:, None, :]).abs() < window)
    if not allowed:
        return None, False
    mask = allowed[0]
    for predicate in allowed[1:]:
        mask = mask & predicate
    return mask.expand(-1, queries.length, -1)[:, None], False


def spelled_out(mask: Tensor | None, causal: bool, queries: Tokens, keys: Tokens) -> Tensor:
    """What `compose` gave as a mask [B|1, 1, T, S] in any case."""
    if mask is not None:
        return mask
    everything = torch.ones(1, 1, queries.length, keys.length, dtype=torch.bool, device=queries.order.device)
    return everything.tril() if causal else everything
