"""Mixture of depths: a router sends some tokens of each row through a layer, and the others pass it by.

The router gives each token a score s = w · x. Tokens that go through attend among themselves, and become
x + s (block(x) - x); the others stay as they are (Raposo et al. 2024). Who goes through is decided in one of
two ways:

    by rank     the best share of the real tokens of each document: in training, and always in an encoder
    by score    those with s > 0: in a decoder that is not in training, with a cache or without

A rank depends on later tokens, a score does not: so decoding, one pass over all tokens and any split agree.
`router_loss` teaches scores which side of 0 their rank is on.

Tokens that go through are gathered, so that the others cost nothing, and a cache holds their keys alone.
While somebody listens to taps, every token is computed, under a mask, and shown at its own place.

Shapes: B batch, T length, D model, N tokens that go through.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.cache import Cache, LayerKeys, WindowCache
from clearhead.core.config import BIASES, StackSpec
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.dtypes import wide
from clearhead.core.masks import Tokens
from clearhead.core.steps import INDEX, Pass, Step, linear_step
from clearhead.core.taps import SILENT, LiveTap, Tap
from clearhead.errors import InputError, refuse

Views = partial[dict[Kind, masks.View]]  # of kinds, tokens and cache: the view of each kind


def places(share: float, tokens: int) -> int:
    """Return how many of `tokens` go through: one at least, rounded up."""
    return math.ceil(share * tokens - 1e-9)


@dataclass(frozen=True, kw_only=True)
class PartView(masks.View):
    """What a layer with a router sees: all tokens, and what makes the view of those that go through."""

    tokens: Tokens
    kind: Kind
    views: Views
    rotated: bool = True

    def unrotated(self) -> "PartView":
        """Return the same without rotation."""
        return replace(self, rotated=False)

    def of(self, tokens: Tokens, cache: Cache | None, tap: Tap) -> masks.View:
        """Return the view of those that go through."""
        view = self.views([self.kind], tokens, cache, tap=tap)[self.kind]
        return view if self.rotated else view.unrotated()


class WithinRouter(LiveTap):
    """The tap of a layer inside its router, which shows the stream before and after itself."""

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Show `x`, unless it is the stream."""
        return x if name in ("resid_pre", "resid_post") else super().__call__(name, x)


class PartKeys(LayerKeys):
    """The keys of the tokens that went through a layer: a cache of its own, in which each row has others."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    @property
    def steps_back(self) -> bool:  # type: ignore[override]
        """Whether the layer keeps keys."""
        return all(keys.steps_back for keys in self.cache.layers.values())

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self.cache.reorder(rows)

    def follow(self, tokens: Tokens | None) -> None:
        """Forget the tokens that are not among `tokens`, the first ones of each row."""
        mine = self.cache.tokens
        if mine is None:
            return
        kept = mine.real_mask() & (mine.order < masks.next_order(tokens, len(mine.order), mine.order.device))
        used = kept.any(0).nonzero()
        self.cache.tokens = replace(mine, real=kept)
        self.cache.crop(self.cache.gone + int(used.max()) + 1 if used.numel() else 0)


class Router(nn.Module):
    """What decides which tokens go through a layer, and how much of its answer they take."""

    def __init__(self, spec: StackSpec, layer: int) -> None:
        super().__init__()
        self.share, self.causal = spec.capacities[layer], spec.causal
        self.score = nn.Linear(spec.d_model, 1, bias=False)
        # Scores, who went through and who is real, of the latest pass in training, for `router_loss`.
        self.routed: tuple[Tensor, Tensor, Tensor | None] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave the latest scores out of copies."""
        return {**self.__dict__, "routed": None}

    def part(
        self, layer: int, kind: Kind, tokens: Tokens, cache: Cache | None, views: Views
    ) -> tuple[masks.View, LayerKeys | None]:
        """Return what the layer sees, and the keys that it keeps."""
        refuse(
            views.keywords["bias"] is not None,
            "bias is over all tokens, and some pass a layer by (depth_capacity): leave it out",
        )
        view = PartView(tokens=tokens, kind=kind, views=views)
        if cache is None:
            return view, None
        kept = cache.layers.get(layer)
        if kept is None:
            own = WindowCache() if isinstance(cache, WindowCache) else Cache()
            kept = cache.layers[layer] = PartKeys(own)
        if not isinstance(kept, PartKeys):
            raise InputError(
                f"a fixed cache has a slot for every token, and layer {layer} keeps some of them "
                "(depth_capacity): use Cache()"
            )
        return view, kept

    def forward(
        self,
        x: Tensor,
        view: PartView,
        keys: LayerKeys | None,
        compute: Callable[..., Tensor],
        tap: Tap = SILENT,
    ) -> Tensor:
        """Send some tokens of x [B, T, D] through `compute`, the layer -> [B, T, D]."""
        (B, T, D), tokens, kind = x.shape, view.tokens, view.kind
        cache, x = keys.cache if isinstance(keys, PartKeys) else None, tap("resid_pre", x)
        scores = tap("router", wide(self.score(x))[..., 0])  # B T
        passed = tap("passed", self.choose(scores.detach(), tokens))  # B T
        self.routed = (scores, passed, tokens.real) if self.training else None
        fixed = self.by_rank and tokens.documents is None  # the number of places is known beforehand
        if tap is not SILENT or (torch.compiler.is_compiling() and not fixed):
            N, index = T, torch.arange(T, device=x.device).expand(B, T)
        else:
            N = places(self.share, T) if fixed else int(passed.sum(1).max())
            index = passed.int().argsort(dim=1, descending=True, stable=True)[:, :N].contiguous()  # B N
        if not N:
            return tap("resid_post", x)
        some = tokens.map(lambda part: part.expand(B, T).gather(1, index))
        real = passed.gather(1, index)
        if fixed and N < T and tokens.real is None:  # every place is taken
            some = replace(some, plain=tokens.plain and kind == FULL and cache is None)
        else:
            some = replace(some, real=real, plain=False)
        if cache is not None:
            cache.begin(some)
        inner = view.of(some, cache, tap)
        if tap is not SILENT and cache is None and kind.chooses:  # who passes by looks at nothing
            inner = inner.spelled_out()
            allowed = masks.spelled_out(inner.mask, inner.causal, some, some)
            inner = replace(inner, mask=allowed & real[:, None, :, None], causal=False)
        rows = (index + T * torch.arange(B, device=x.device)[:, None]).flatten()  # B·N
        read = x.reshape(B * T, D).index_select(0, rows).view(B, N, D)
        kept = None if cache is None else cache.layer(0, kind)
        within = WithinRouter(tap.listeners, tap.prefix) if isinstance(tap, LiveTap) else tap
        answer = compute(read, inner, keys=kept, tap=within)
        if cache is not None:
            cache.advance()
        gate = scores.flatten().index_select(0, rows).view(B, N, 1)
        added = torch.where(real[..., None], gate * (answer - read), 0.0).to(x.dtype)
        mixed = x.scatter_add(1, index[..., None].expand(-1, -1, D), added)
        return tap("resid_post", tap.step("mixed", mixed))

    @property
    def by_rank(self) -> bool:
        """Whether tokens are chosen by their rank among all, and not each by its own score."""
        return self.training or not self.causal

    def choose(self, scores: Tensor, tokens: Tokens) -> Tensor:
        """Return which tokens go through: scores [B, T] -> [B, T]; padding never does."""
        real = tokens.real_mask().expand_as(scores)
        if not self.by_rank:
            return (scores > 0) & real
        # Sort by document, in each by score. Equal scores: the earlier token.
        by_score = scores.masked_fill(~real, -torch.inf).argsort(dim=1, descending=True, stable=True)
        documents = tokens.document_ids().expand_as(scores).gather(1, by_score)
        of_document = documents.argsort(dim=1, stable=True)
        order, documents = by_score.gather(1, of_document), documents.gather(1, of_document)
        starts = torch.ones_like(real)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        count = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
        rank = count - torch.where(starts, count, 0).cummax(1).values
        run = starts.long().cumsum(1) - 1  # number of each document in its row
        totals = torch.zeros_like(run).scatter_add(1, run, real.gather(1, order).long()).gather(1, run)
        among = rank < (totals.double() * self.share - 1e-9).ceil()
        return torch.zeros_like(real).scatter(1, order, among)


def router_loss(model: nn.Module, total: Callable[[Tensor], Tensor] = lambda value: value) -> Tensor:
    """Compute the cross-entropy between "s > 0" and "among the best", over real tokens of the latest pass.

    It covers the routers of decoders, in training: those of encoders always go by rank. Where rows are shared
    out, `total` sums a count, and losses add up.
    """
    losses = []
    for part in model.modules():
        if isinstance(part, Router) and part.causal and part.routed is not None:
            scores, passed, real = part.routed
            if real is not None:
                scores, passed = scores[real.expand_as(scores)], passed[real.expand_as(passed)]
            wanted, count = passed.to(scores.dtype), total(scores.new_tensor(float(scores.numel())))
            losses.append(nnf.binary_cross_entropy_with_logits(scores, wanted, reduction="sum") / count)
    return torch.stack(losses).mean() if losses else torch.zeros(())


def router_steps(spec: StackSpec, run: Pass, name: str, layer: int, tokens: int) -> Iterator[Step]:
    """Yield the steps of the router of a layer on rows of `tokens`."""
    B, D, chosen = run.batch, spec.d_model, places(spec.capacities[layer], tokens)
    yield linear_step(
        f"{name}.router.score", "feedforward", B * tokens, D, 1, bias=False, kept=B * tokens * D * run.size
    )
    # Places, flags and scores of the chosen, and what the layer adds to each. Rows have angles and masks of
    # their own.
    each = 2 * INDEX + 1 + run.wide + D * run.wide
    turned = 2 * spec.d_rotary * 4 if spec.positions == "rope" and layer not in spec.rope_skips else 0
    heads = spec.n_heads if spec.positions in BIASES else 1 if spec.kinds[layer] != FULL else 0
    masks_kept = (B - 1) * heads * chosen**2 * run.size
    yield Step(f"{name}.mixed", "feedforward", kept=B * chosen * (each + turned) + masks_kept)
