"""The rounds of a ring: which keys each process sends to which, planned from masks that all of them know.

Every process knows masks and positions of whole rows, so it knows without asking which keys each of the
others needs: a window asks for those in its reach, a causal layer for earlier ones.

Shapes: B batch, T queries of a process, H heads, N processes, t and s queries and keys of a meeting.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.masks import Tokens, View, compose
from clearhead.core.positions import Rotary
from clearhead.learn.parallel.tokens import RowShares, part
from clearhead.variants.blocks import Bias, meeting

AT_ONCE = 1 << 25  # scores of a meeting, at most


class Ring:
    """The processes that share out the tokens of a row."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.place = group, dist.get_world_size(group), dist.get_rank(group)
        dist.barrier(group)  # NCCL: all meet before some of them send to each other

    def gathered(self, x: Tensor) -> Tensor:
        """Return what each process has, [...] -> [N, ...]; gradients are summed over those of all."""
        return cast(Tensor, _Gathered.apply(x, self.group))  # type: ignore[no-untyped-call]

    def swap(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> Callable[[], None]:
        """Begin to send to one process and to receive from one; return what waits until both are done."""
        wanted = ((dist.isend, sent, to), (dist.irecv, received, source))
        operations = [
            dist.P2POp(way, tensor, group=self.group, group_peer=peer % self.size)
            for way, tensor, peer in wanted
            if tensor is not None
        ]
        under_way = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in under_way:
                work.wait()
            operations.clear()  # they keep what is sent

        return wait


class _Gathered(torch.autograd.Function):
    """What each process of a group has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[...] -> [N, ...]."""
        ctx.group = group
        found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, x.contiguous(), group=group)
        return torch.stack(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """Sum what all have for this process."""
        total = upstream.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


# Who meets whom ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """Queries that meet keys."""

    number: int  # among all meetings of a process
    queries: slice
    keys: Tensor | None  # s: which of those that a process has sent; None: all
    slots: Tensor  # s: where they stand among the keys of all processes


@dataclass(frozen=True)
class Round:
    """What comes and goes at once."""

    received: int  # number of keys that come
    given: Tensor  # which of the own keys go
    meetings: list[Meeting]


@dataclass(frozen=True, kw_only=True)
class RingView(View):
    """What the attention of one layer may see, of the keys of all processes."""

    ring: Ring
    tokens: Tokens  # the queries of this process
    keys: Tokens  # of all processes, one after the other
    rounds: list[Round]  # the first is with the own keys
    kind: Kind
    causal_keys: bool
    bias_of: Bias
    weights: Callable[[], list[Tensor]]  # that the bias is made of, and that are trained

    def seen(self, at: Meeting) -> Tensor | None:
        """Return the mask of a meeting [B|1, 1, t, s]; None: all of it."""
        queries, keys = self._tokens(at)
        return compose(queries, keys, causal=self.causal_keys, kind=self.kind)[0]

    def added(self, at: Meeting, heads: list[int] | None) -> Tensor | None:
        """Return the bias of a meeting [B|1, 1|H, t, s], for some of the heads."""
        bias = self.bias_of(*self._tokens(at))
        return bias if bias is None or heads is None or bias.shape[1] == 1 else bias[:, heads]

    def _tokens(self, at: Meeting) -> tuple[Tokens, Tokens]:
        return self.tokens.map(lambda x: x[:, at.queries]), self.keys.map(lambda x: x[:, at.slots])


def ring_view(
    ring: Ring,
    queries: tuple[Tokens, RowShares],
    keys: tuple[Tokens, RowShares],
    kind: Kind = FULL,
    causal: bool = False,
    *,
    width: int,
    bias_of: Bias = lambda queries, keys: None,
    weights: Callable[[], list[Tensor]] = list,
    rotary: Rotary | None = None,
) -> RingView:
    """Plan who sends what to whom; tokens are whole rows, `width` is rows times heads."""
    (asking, of_queries), (asked, of_keys) = queries, keys
    asking, asked = of_queries.spread(asking), of_keys.spread(asked)
    size, N, device = min(of_queries.tile, of_keys.tile), ring.size, asked.order.device
    met = meeting(asking, asked, kind, causal, size).cpu().view(N, of_queries.each // size, N, -1)
    tokens_of = torch.arange(of_keys.each).view(-1, size)  # of each tile
    most = max(1, AT_ONCE // (width * of_keys.each * size)) * size
    chunk = of_queries.chunk
    spans = [
        slice(start, min(start + most, end))
        for end in range(chunk, of_queries.each + 1, chunk)
        for start in range(end - chunk, end, most)
    ]
    rounds, count = [], 0
    for step in range(N):
        owner, asker = (ring.place - step) % N, (ring.place + step) % N
        wanted, given = (
            met[who, :, whose].any(0) if step else torch.ones(met.shape[3], dtype=torch.bool)
            for who, whose in ((ring.place, owner), (asker, ring.place))
        )
        meetings = []
        for span in spans:
            some = met[ring.place, span.start // size : span.stop // size, owner].any(0)
            if some.any():
                index = None if bool((some == wanted).all()) else _places(some[wanted], size).to(device)
                slots = tokens_of[some].flatten().to(device) + owner * of_keys.each
                meetings.append(Meeting(count, span, index, slots))
                count += 1
        rounds.append(Round(int(wanted.sum()) * size, tokens_of[given].flatten().to(device), meetings))
    return RingView(
        ring=ring,
        tokens=part(asking, ring.place * of_queries.each, of_queries.each),
        keys=asked,
        rounds=rounds,
        kind=kind,
        causal_keys=causal,
        bias_of=bias_of,
        weights=weights,
        rotary=rotary,
    )


def _places(chosen: Tensor, size: int) -> Tensor:
    """Return the tokens of the tiles that are chosen [tiles]."""
    return torch.arange(len(chosen) * size).view(-1, size)[chosen].flatten()
