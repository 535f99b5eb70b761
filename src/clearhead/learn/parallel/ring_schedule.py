"""Context parallelism, the schedule: which tokens of a row each process has, and which keys it sends to whom.

In a decoder a later token has more to attend to. So each of N processes has two of 2N chunks, the n-th and
the n-th from the end: together they cost everyone the same. In an encoder each has one of N chunks. Rows of
other lengths are padded at their end, with tokens that nobody sees and nothing counts.

Every process knows masks and positions of whole rows, so it knows without asking which keys each of the
others needs: a window needs those in its reach, a causal layer earlier ones.

Shapes: B batch (1 where all rows are alike), T tokens of a row, N processes, t tokens of each of them; of a
block of scores, t queries and s keys; H heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.masks import TokenInfo, View, compose
from clearhead.core.positions import Rotary
from clearhead.errors import InputError
from clearhead.variants.blocks import Bias, meeting

TILES = 1024  # of a row, at most


@dataclass(frozen=True)
class TokenShards:
    """Which tokens of a row each process has."""

    length: int  # T
    processes: int  # N
    zigzag: bool  # two chunks each, of the beginning and of the end

    @property
    def tile(self) -> int:
        """Number of tokens that are sent, or skipped, together: a power of two."""
        return 1 << (math.ceil(self.length / TILES) - 1).bit_length()

    @property
    def chunk(self) -> int:
        """Number of tokens that follow each other: whole tiles."""
        return math.ceil(self.length / (self.processes * self.chunks * self.tile)) * self.tile

    @property
    def chunks(self) -> int:
        """Number of chunks of each process."""
        return 2 if self.zigzag else 1

    @property
    def each(self) -> int:
        """Number of tokens of each process, t."""
        return self.chunks * self.chunk

    def slots(self, rank: int | None = None, device: torch.device | None = None) -> Tensor:
        """Return the slots of one process [t], or of all, one after the other [N·t]; from T on: padding."""
        order = torch.arange(self.processes * self.each, device=device).view(-1, self.chunk)
        if self.zigzag:
            order = torch.stack([order[: self.processes], order[self.processes :].flip(0)], 1)
        order = order.reshape(self.processes, -1)
        return order.flatten() if rank is None else order[rank]

    def pick(self, x: Tensor, rank: int | None = None, fill: float | None = None) -> Tensor:
        """Return the tokens of one process or of all: [B, T, ...] -> [B, t or N·t, ...].

        Padding is a copy of the last token or, of [B, T], `fill`.
        """
        slots = self.slots(rank, x.device)
        picked = x[:, slots.clamp(max=self.length - 1)]
        return picked if fill is None else picked.masked_fill(slots >= self.length, fill)

    def joined(self, x: Tensor) -> Tensor:
        """Return rows in their own order from those of all processes: [B, N·t, ...] -> [B, T, ...]."""
        return x[:, self.slots(None, x.device).argsort()[: self.length]]

    def spread(self, tokens: TokenInfo) -> TokenInfo:
        """Return the tokens of all processes, one after the other; padding is spelled out."""
        padded = self.processes * self.each > self.length
        real = None if tokens.real is None and not padded else self.pick(tokens.real_mask(), fill=False)
        return replace(tokens.map(self.pick), real=real, plain=False)


@dataclass(frozen=True, kw_only=True)
class LocalTokens(TokenInfo):
    """The tokens of one process, and the rows that they are of."""

    whole: TokenInfo
    layout: TokenShards


def local_tokens(whole: TokenInfo, layout: TokenShards, rank: int) -> LocalTokens:
    """Return the tokens of one process."""
    own = part(layout.spread(whole), rank * layout.each, layout.each)
    return LocalTokens(
        own.order, own.positions, own.real, own.documents, plain=False, whole=whole, layout=layout
    )


def part(tokens: TokenInfo, start: int, count: int) -> TokenInfo:
    """Return `count` tokens from one on."""
    return tokens.map(lambda x: x[:, start : start + count])


# The ring -------------------------------------------------------------------------------------------------

MAX_SCORES = 1 << 25  # scores of a block, at most


class Ring:
    """The processes that share out the tokens of a row."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        dist.barrier(group)  # NCCL: all join before some of them send to each other

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
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """Sum what all have for this process."""
        total = upstream.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


# The schedule ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreBlock:
    """A block of the scores: some queries of this process, some keys of another."""

    number: int  # among all blocks of a process
    queries: slice
    keys: Tensor | None  # s: which of those that a process has sent; None: all
    slots: Tensor  # s: their positions among the keys of all processes


@dataclass(frozen=True)
class RingStep:
    """What is sent and received at one step of the ring, and the scores of what was received."""

    received: int  # number of keys
    sent: Tensor  # which of the own keys
    blocks: list[ScoreBlock]


@dataclass(frozen=True, kw_only=True)
class RingView(View):
    """What the attention of one layer may see, of the keys of all processes."""

    ring: Ring
    tokens: TokenInfo  # the queries of this process
    keys: TokenInfo  # of all processes, one after the other
    steps: list[RingStep]  # the first is with the own keys
    kind: Kind
    causal_keys: bool
    bias_of: Bias
    weights: Callable[[], list[Tensor]]  # that the bias is made of, and that are trained

    def spelled_out(self) -> View:
        """Refuse: no process has the scores of a whole row."""
        raise InputError("attention whose tokens are shared out shows no scores: train without context")

    def seen(self, block: ScoreBlock) -> Tensor | None:
        """Return the mask of a block [B|1, 1, t, s]; None: all of it."""
        queries, keys = self._tokens(block)
        return compose(queries, keys, causal=self.causal_keys, kind=self.kind)[0]

    def added(self, block: ScoreBlock, heads: list[int] | None) -> Tensor | None:
        """Return the bias of a block [B|1, 1|H, t, s], for some of the heads."""
        bias = self.bias_of(*self._tokens(block))
        return bias if bias is None or heads is None or bias.shape[1] == 1 else bias[:, heads]

    def _tokens(self, block: ScoreBlock) -> tuple[TokenInfo, TokenInfo]:
        return self.tokens.map(lambda x: x[:, block.queries]), self.keys.map(lambda x: x[:, block.slots])


def ring_view(
    ring: Ring,
    queries: tuple[TokenInfo, TokenShards],
    keys: tuple[TokenInfo, TokenShards],
    kind: Kind = FULL,
    causal: bool = False,
    *,
    width: int,
    bias_of: Bias = lambda queries, keys: None,
    weights: Callable[[], list[Tensor]] = list,
    rotary: Rotary | None = None,
) -> RingView:
    """Schedule which keys each process sends to which; tokens are whole rows, `width` is rows times heads."""
    (query_tokens, of_queries), (key_tokens, of_keys) = queries, keys
    query_tokens, key_tokens = of_queries.spread(query_tokens), of_keys.spread(key_tokens)
    size, N, device = min(of_queries.tile, of_keys.tile), ring.size, key_tokens.order.device
    seen = meeting(query_tokens, key_tokens, kind, causal, size).cpu().view(N, of_queries.each // size, N, -1)
    tokens_of = torch.arange(of_keys.each).view(-1, size)  # of each tile
    most = max(1, MAX_SCORES // (width * of_keys.each * size)) * size
    chunk = of_queries.chunk
    spans = [
        slice(start, min(start + most, end))
        for end in range(chunk, of_queries.each + 1, chunk)
        for start in range(end - chunk, end, most)
    ]
    steps, count = [], 0
    for step in range(N):
        source, target = (ring.rank - step) % N, (ring.rank + step) % N
        wanted, sent = (
            seen[who, :, whose].any(0) if step else torch.ones(seen.shape[3], dtype=torch.bool)
            for who, whose in ((ring.rank, source), (target, ring.rank))
        )
        blocks = []
        for span in spans:
            some = seen[ring.rank, span.start // size : span.stop // size, source].any(0)
            if some.any():
                index = (
                    None
                    if bool((some == wanted).all())
                    else tokens_of[: int(wanted.sum())][some[wanted]].flatten().to(device)
                )
                slots = tokens_of[some].flatten().to(device) + source * of_keys.each
                blocks.append(ScoreBlock(count, span, index, slots))
                count += 1
        steps.append(RingStep(int(wanted.sum()) * size, tokens_of[sent].flatten().to(device), blocks))
    return RingView(
        ring=ring,
        tokens=part(query_tokens, ring.rank * of_queries.each, of_queries.each),
        keys=key_tokens,
        steps=steps,
        kind=kind,
        causal_keys=causal,
        bias_of=bias_of,
        weights=weights,
        rotary=rotary,
    )
