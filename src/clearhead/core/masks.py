"""Masks: who may attend to whom, composed once per forward pass from a few predicates. True = may attend.

`TokenInfo` holds what the predicates need to know of each slot of a row: not the token itself. Causality goes
by `order`, a slot's index among real tokens, and windows go by `positions`. So padding on either side, gaps,
packed documents and caches of any form need no rules of their own.

Shapes: B batch (1 where all rows are alike), T query length, S key length.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from clearhead.core.config.kinds import FULL, Kind, Rule
from clearhead.core.config.registry import Registry
from clearhead.core.positions import Relative, Rotary
from clearhead.errors import refuse


@dataclass(frozen=True)
class TokenInfo:
    """What masks and positions know of each slot of a row: nothing of which tokens stand there.

    For a row of three tokens after one of padding:

        real        False  True  True  True
        order       0      0     1     2         after five tokens in a cache: 4, 5, 6, 7
        positions   0      0     1     2         where a call does not give others
    """

    order: Tensor  # B|1 T: index among real tokens; padding repeats that of the last real one, or 0
    positions: Tensor  # B|1 T
    real: Tensor | None  # B|1 T: False for padding; None: all real
    documents: Tensor | None  # B|1 T: tokens of different documents do not see each other; None: one document
    plain: bool  # all real, one document, order and positions both 0, 1, 2, ... from some start
    totals: Tensor | None = None  # B|1 T: tokens of its document, where a kind of attention asks for that
    globals: Tensor | None = None  # B|1 T: which see all and are seen by all, where a kind has such tokens
    until: Tensor | None = None  # B|1 T: queries of this order and later do not see it; None: all may
    axes: Tensor | None = None  # B|1 T A: position on each axis that rotates; None: `positions` on all

    @property
    def length(self) -> int:
        """Number of slots, padding included."""
        return self.order.shape[1]

    def real_mask(self) -> Tensor:
        """Return `real`, spelled out where all tokens are real."""
        return torch.ones_like(self.order, dtype=torch.bool) if self.real is None else self.real

    def document_ids(self) -> Tensor:
        """Return `documents`, spelled out where there is one document."""
        return torch.zeros_like(self.order) if self.documents is None else self.documents

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return order, positions, real and documents, all spelled out."""
        return self.order, self.positions, self.real_mask(), self.document_ids()

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return these tokens with `change` applied to each tensor."""
        names = ("order", "positions", "real", "documents", "totals", "globals", "until", "axes")
        given = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {name: change(x) for name, x in given.items() if x is not None}
        return replace(self, **changed)

    def of_rows(self, rows: Tensor) -> Self:
        """Return the tokens of some rows; where all rows are alike, nothing changes."""
        return self if self.plain else self.map(lambda x: x if x.shape[0] == 1 else x[rows])


def tokens_from(
    batch: int,
    length: int,
    device: torch.device,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    before: TokenInfo | None = None,
    axes: Tensor | None = None,
) -> TokenInfo:
    """Describe the tokens of one forward pass; `before` are the tokens that the cache already holds."""
    if mask is positions is documents is axes is None and (before is None or before.plain):
        start = before.length if before is not None else 0
        count = torch.arange(start, start + length, device=device)[None]
        return TokenInfo(count, count, None, None, plain=True)

    real = torch.ones(batch, length, dtype=torch.bool, device=device) if mask is None else mask
    order = (next_order(before, batch, device) + real.cumsum(1) - 1).clamp(min=0)
    if documents is not None:
        documents = of_real(documents.long().expand(real.shape[0], -1), real)
    if positions is None and documents is not None:
        packed = before is not None and before.length and before.documents is not None
        earlier = (before.document_ids(), before.positions, before.real_mask()) if before and packed else None
        positions = positions_in_documents(documents, real, earlier)
    positions = order if positions is None else positions
    if axes is None and before is not None and before.axes is not None:
        axes = AXES["continued"](before, order)
    return TokenInfo(order, positions.long(), real, documents, plain=False, axes=axes)


def of_real(ids: Tensor, real: Tensor) -> Tensor:
    """Give padding the id of the last real token before it, or of the first one: [B, T], [B, T] -> [B, T]."""
    slots = torch.arange(real.shape[1], device=real.device)
    last = torch.where(real, slots, -1).cummax(1).values
    return ids.gather(1, torch.where(last < 0, real.long().argmax(1, keepdim=True), last))


def positions_in_documents(
    documents: Tensor, real: Tensor, before: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    """Count positions from 0 in each packed document, a run of equal ids: [B, T], [B, T] -> [B, T].

    `before` are documents, positions and `real` of the tokens in a cache: a run that began there goes on.
    """
    count = (real.cumsum(1) - 1).clamp(min=0)  # real tokens before this one; padding repeats the last
    starts = torch.ones_like(real)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    positions = count - torch.where(starts, count, 0).cummax(1).values  # from the start of the run
    if before is None:
        return positions
    earlier, at, there = before
    same = there & (earlier == documents[:, :1])
    carried = torch.where(same, at + 1, 0).amax(1, keepdim=True)
    return positions + torch.where(starts.long().cumsum(1) == 1, carried, 0)  # in the first run


def next_order(before: TokenInfo | None, batch: int, device: torch.device) -> Tensor:
    """Count the real tokens that each row already has: [B, 1]."""
    if before is None or before.real is None or not before.length:
        return torch.full((batch, 1), 0 if before is None else before.length, dtype=torch.long, device=device)
    return (torch.where(before.real, before.order, -1).amax(1, keepdim=True) + 1).expand(batch, 1)


def join(a: TokenInfo, b: TokenInfo) -> TokenInfo:
    """Return the tokens of `a` followed by those of `b`, without what `Kind.describe` adds for one kind."""
    batch = max(a.order.shape[0], b.order.shape[0])

    def cat(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.expand(batch, -1), y.expand(batch, -1)], dim=1)

    return TokenInfo(
        cat(a.order, b.order),
        cat(a.positions, b.positions),
        None if a.real is None and b.real is None else cat(a.real_mask(), b.real_mask()),
        None if a.documents is None and b.documents is None else cat(a.document_ids(), b.document_ids()),
        plain=a.plain and b.plain,
        axes=None if a.axes is b.axes else AXES["joined"](a, b, batch),
    )


class Plan(Protocol):
    """A way to attend without a mask over all pairs, for long rows of kinds that see few keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **formula: Any) -> Tensor:
        """Map q [B,H,T,E], k [B,K,S,E], v [B,K,S,Ev] -> [B,H,T,Ev]."""


# What plans the rows of kinds that have a `block_size`.
PLANS: Registry[Callable[..., Any]] = Registry({"blocks": "clearhead.variants.blocks:plan_for"})
AXES: Registry[Any] = Registry({n: f"clearhead.variants.positions:{n}" for n in ("continued", "joined")})


@dataclass(frozen=True)
class View:
    """What the attention of one layer may see: mask, bias and rotation, made by the stack."""

    routed: ClassVar[bool] = False  # whether a router sends only some tokens through the layer
    mask: Tensor | None = None  # B|1 1 T S, True = may attend; None: all may, or see `causal`
    causal: bool = False  # the mask is exactly "key slot <= query slot", and `mask` is None
    bias: Tensor | None = None  # B|1 H|1 T S, added to the scores
    rotary: Rotary | None = None
    relative: Relative | None = None
    tokens: TokenInfo | None = None  # the queries, for kinds of attention that ask for more than a mask
    blocks: Plan | None = None  # stands for mask and bias, which `dense` spells out
    dense: Callable[[], "View"] | None = None
    values: Callable[[Tensor], Tensor] | None = None  # changes the values [B, K, T, E] of new tokens

    def attended(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, keys: Any, tap: Any, x: Tensor
    ) -> Tensor:
        """Call `attend` once; a ragged view (served chunks, packed documents) calls it for each sequence."""
        return attend(q, k, v, self, keys, tap, x)

    def described(self) -> TokenInfo:
        """Return the tokens, which the stack gives to every kind that asks for them."""
        assert self.tokens is not None
        return self.tokens

    def unrotated(self) -> "View":
        """Return the same view without rotation."""
        return replace(self, rotary=None)

    def spelled_out(self) -> "View":
        """Return the same view with a dense mask and bias, also where it was planned by blocks."""
        return self if self.dense is None else replace(self.dense(), rotary=self.rotary)


def compose(
    queries: TokenInfo,
    keys: TokenInfo,
    *,
    causal: bool = False,
    kind: Kind = FULL,
    prefix: Tensor | None = None,
) -> tuple[Tensor | None, bool]:
    """Return the mask [B|1, 1, T, S], or None, and whether None stands for "key slot <= query slot".

    None and False: every query may see every key.

    `prefix` [B] counts the leading positions of each row that every query may see, even if `causal`.
    """
    if queries.plain and keys.plain and prefix is None and kind.sees_all(keys.length):
        if not causal or queries.length == 1:
            return None, False
        if queries.length == keys.length:
            return None, True

    rule = kind.rule(causal)
    allowed = rules(
        queries, keys, causal, rule, lambda x: x[:, :, None], lambda x: x[:, None, :], prefix
    )  # each B|1 T|1 S
    if not allowed:
        return None, False
    mask = functools.reduce(torch.logical_and, allowed)
    return mask.expand(-1, queries.length, -1)[:, None], False


def rules(
    queries: TokenInfo,
    keys: TokenInfo,
    causal: bool,
    rule: Rule | None,
    of_query: Callable[[Tensor], Tensor],
    of_key: Callable[[Tensor], Tensor],
    prefix: Tensor | None = None,
) -> list[Tensor]:
    """Return all that must hold of a query and a key, for the queries and keys that two functions pick."""
    allowed: list[Tensor] = []
    if keys.real is not None:
        allowed.append(of_key(keys.real))
    if queries.documents is not None and keys.documents is not None:
        allowed.append(of_query(queries.documents) == of_key(keys.documents))
    if causal:
        earlier = of_key(keys.order) <= of_query(queries.order)
        if prefix is not None:
            earlier = earlier | of_key(keys.positions < prefix[:, None])
        allowed.append(earlier)
    if keys.until is not None:
        refuse(prefix is not None, "prefix came with a cache that forgets it: use Cache()")
        allowed.append(of_query(queries.order) < of_key(keys.until))
    if rule is not None:
        totals = None if queries.totals is None else of_query(queries.totals)
        seen = rule(of_query(queries.positions), of_key(keys.positions), totals)
        if queries.globals is not None and keys.globals is not None:
            seen = seen | of_query(queries.globals) | of_key(keys.globals)
        allowed.append(seen)
    return allowed


def spelled_out(mask: Tensor | None, causal: bool, queries: TokenInfo, keys: TokenInfo) -> Tensor:
    """Return the answer of `compose` as a mask [B|1, 1, T, S], also where it is None."""
    if mask is not None:
        return mask
    everything = torch.ones(1, 1, queries.length, keys.length, dtype=torch.bool, device=queries.order.device)
    return everything.tril() if causal else everything
