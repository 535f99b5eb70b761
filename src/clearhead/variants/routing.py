"""Routers: mixture of experts, and mixture of depths.

In a mixture of experts a router sends each token to a few of many feed-forwards. Nothing is dropped or
padded. Tokens are sorted by expert, each expert works on its own run of rows, and the outputs are added back
to their tokens. The only Python loop is over experts.

In a mixture of depths a router sends some tokens of each row through a layer, and the others pass it by. It
gives each token a score s = w · x. Tokens that go through attend among themselves, and become
x + s (block(x) - x); the others stay as they are (Raposo et al. 2024). Who goes through is decided in one of
two ways:

    by rank     the best share of the real tokens of each document: in training, and always in an encoder
    by score    those with s > 0: in a decoder that is not in training, with a cache or without

A rank depends on later tokens, a score does not: so decoding, one pass over all tokens and any split agree.
`router_loss` teaches scores which side of 0 their rank is on.

Tokens that go through are gathered, so that the others cost nothing, and a cache holds their keys alone.
While somebody listens to taps, every token is computed, under a mask, and shown at its own position.

Shapes: B batch, T length, D model, N tokens (of all rows; or of one, those that go through a layer),
X experts, A active experts per token.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.cache import Cache, LayerKV
from clearhead.core.config import BIASES, StackSpec
from clearhead.core.config.fields import Fields, passing
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.dtypes import wide
from clearhead.core.feedforward import FeedForward
from clearhead.core.masks import TokenInfo
from clearhead.core.stack import LayerInputs, StackCall
from clearhead.core.taps import SILENT, LiveTap, Tap
from clearhead.errors import InputError, refuse
from clearhead.variants.caches import WindowCache
from clearhead.variants.steps import INDEX, Pass, Step, feedforward_steps, linear_step

BALANCE = 0.01  # weight of the loss of the routers of experts
LEVELLED = 0.001  # how far a batch moves the correction of an expert


class Experts(nn.Module):
    """X feed-forwards and the router that chooses among them; perhaps one more that every token visits.

    Groups of experts (DeepSeek): the best of a group count for it, one of a softmax and two of a sigmoid.
    """

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.n_active = spec.n_active_experts
        self.order, self.renormalise = spec.router_order, spec.router_renormalise
        self.groups, self.n_active_groups, self.scale = (
            *(spec.router_groups, spec.n_active_groups),
            spec.router_scale,
        )
        self.router = nn.Linear(spec.d_model, spec.n_experts, bias=spec.router_bias)
        corrected = spec.router_correction  # which has no gradient: see `level`
        self.correction = nn.Parameter(torch.zeros(spec.n_experts), False) if corrected else None
        self.experts = nn.ModuleList(FeedForward(spec, spec.d_expert) for _ in range(spec.n_experts))
        self.shared = FeedForward(spec, spec.d_shared_expert) if spec.d_shared_expert else None
        gated = self.shared is not None and spec.shared_expert_gate
        self.shared_gate = nn.Linear(spec.d_model, 1, bias=False) if gated else None
        self.routed: Tensor | None = None  # router logits of the latest pass in training, for `balance_loss`

    def __getstate__(self) -> dict[str, object]:
        """Leave the latest router logits out of copies."""
        return {**self.__dict__, "routed": None}

    def forward(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        rows = x.reshape(-1, x.shape[-1])  # N D
        logits = tap("router", self.router(x)).view(rows.shape[0], -1)  # N X
        self.routed = logits if self.training else None
        weights, chosen = self.choose(logits)  # N A
        chosen, weights = tap.step("chosen", chosen), tap.step("weights", weights)

        order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs, sorted by expert
        counts = chosen.flatten().bincount(minlength=logits.shape[-1])
        token = order // self.n_active  # which row each pair belongs to
        answers = self.answer(tap.step("sorted", rows[token]), counts, tap)  # N·A D
        answer = (answers * weights.flatten()[order, None]).to(rows.dtype)
        # The answers to each token, in the order of their experts: sums have the same bits in every run.
        pairs = order.argsort().view(-1, self.n_active).sort(-1).values
        answers_of = answer.index_select(0, pairs.flatten()).view(*pairs.shape, -1)  # N A D
        mixed = tap.step("mixed", answers_of.sum(1).view_as(x))
        if self.shared is not None:
            shared = self.shared(x, tap.part("shared"))
            if self.shared_gate is not None:
                shared = tap.step("shared_gate", self.shared_gate(x)).sigmoid() * shared  # B T D
            mixed = tap.step("with_shared", mixed + shared)
        return tap("out", mixed)

    def answer(self, rows: Tensor, counts: Tensor, tap: Tap) -> Tensor:
        """Map rows [N·A, D], sorted by expert, of which each expert has `counts` [X] -> [N·A, D]."""
        runs = enumerate(torch.split(rows, counts.tolist()))
        return torch.cat([self.experts[number](run, tap.part(f"experts.{number}")) for number, run in runs])

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the experts of each token: [N, X] -> [N, A] twice."""
        sigmoid, scores = self.order == "sigmoid_topk", wide(logits)
        if self.order != "topk_softmax":
            scores = scores.sigmoid() if sigmoid else scores.softmax(-1)
        counted = scores.detach()
        if self.correction is not None:
            counted = counted + self.correction.to(scores.dtype)
        if self.groups > 1:
            of_groups = counted.view(*counted.shape[:-1], self.groups, -1)  # N G X/G
            best = of_groups.topk(min(1 + sigmoid, of_groups.shape[-1]), dim=-1).values.sum(-1)  # N G
            left = torch.ones_like(best, dtype=torch.bool)
            left = left.scatter(-1, best.topk(self.n_active_groups, dim=-1).indices, False)
            counted = of_groups.masked_fill(left[..., None], -torch.inf).flatten(-2)
        chosen = counted.topk(self.n_active, dim=-1).indices
        top = scores.gather(-1, chosen)
        if self.order == "topk_softmax":
            top = top.softmax(-1)
        elif self.renormalise:
            top = top / (top.sum(-1, keepdim=True) + 1e-20)
        return (top if self.scale == 1 else top * self.scale).to(logits.dtype), chosen

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, rows: int) -> Iterator[Step]:
        """Yield the steps of a mixture on `rows` tokens."""
        X, A, D = spec.n_experts, spec.n_active_experts, spec.d_model
        # Softmax over the chosen; or over all, then the chosen and their sum. Weights and indices on top.
        softmax = A if spec.router_order == "topk_softmax" else X + A + 1
        each = softmax * run.wide + A * (run.size + 4 * INDEX)
        yield linear_step(f"{name}.router", "feedforward", rows, D, X, spec.router_bias, kept=rows * each)
        if spec.router_correction:
            yield Step(f"{name}.correction", "feedforward", X)
        # Inputs of the experts, one for each matmul in half precision, and outputs.
        each = (3 if run.half and spec.gated else 2) * run.size
        yield Step(f"{name}.sorted", "feedforward", kept=rows * A * D * each)
        yield from feedforward_steps(spec, run, f"{name}.experts", rows * A, spec.d_expert, X, idle=X - A)
        if spec.d_shared_expert:
            yield from feedforward_steps(spec, run, f"{name}.shared", rows, spec.d_shared_expert)
            weighed = spec.shared_expert_gate
            copied = 1 + weighed + spec.gated if run.half else 0  # inputs, of each matmul in half precision
            kept = rows * (D * (weighed + copied) + weighed) * run.size
            if weighed:
                yield linear_step(f"{name}.shared_gate", "feedforward", rows, D, 1, bias=False, kept=kept)
            else:
                yield Step(f"{name}.with_shared", "feedforward", kept=kept)


def tally(model: nn.Module, mask: Tensor | None = None) -> Tensor | None:
    """Add up what the routers of the latest pass in training chose; None: nothing was routed.

    `mask` [B, T] leaves padding out.

    Returns: [2X + 1]: choices of each expert, number of tokens, probabilities of each expert. Only the last
        X have a gradient.
    """
    mixtures = [part for part in model.modules() if isinstance(part, Experts)]
    routed = [part.routed for part in mixtures if part.routed is not None]
    if not routed:
        return None
    logits = torch.cat([logits if mask is None else logits[mask.flatten()] for logits in routed])
    probability = wide(logits).softmax(-1)
    chosen = probability.topk(mixtures[0].n_active, dim=-1).indices
    counts = torch.zeros_like(probability).scatter(1, chosen, 1.0).sum(0)
    return torch.cat([counts, counts.new_tensor([len(logits)]), probability.sum(0)])


@torch.no_grad()
def level(
    model: nn.Module, mask: Tensor | None = None, total: Callable[[Tensor], Tensor] = lambda x: x
) -> None:
    """Move the correction of each expert against its load in the latest pass in training (DeepSeek-V3).

    An expert that more tokens chose than the mean is chosen a little less by the next pass, and the others a
    little more. `mask` [B, T] leaves padding out; where rows are shared out, `total` sums counts.
    """
    for part in model.modules():
        if isinstance(part, Experts) and part.correction is not None and part.routed is not None:
            refuse(
                hasattr(part.correction, "device_mesh"),
                "router_correction moves by counts of each step, and is not divided: train without shard",
            )
            logits = part.routed if mask is None else part.routed[mask.flatten()]
            chosen = part.choose(logits)[1]
            counts = total(torch.zeros_like(wide(logits)).scatter(1, chosen, 1.0).sum(0))
            part.correction.add_(LEVELLED * (counts.mean() - counts).sign().to(part.correction))


def counts_of(tally: Tensor) -> Tensor:
    """Return choices of each expert and the number of tokens: [..., 2X + 1] -> [..., X + 1]."""
    return tally[..., : tally.shape[-1] // 2 + 1].detach()


def imbalance(tally: Tensor, counts: Tensor) -> Tensor:
    """Compute X · Σ (share of choices) · (mean probability): [..., 2X + 1] -> [...].

    Of a tally that is a part of another one, the part of its loss; `counts` [..., X + 1] are of the other.
    """
    X, number = counts.shape[-1] - 1, counts[..., -1:].clamp(min=1)
    return X * (counts[..., :-1] / number * tally[..., X + 1 :] / number).sum(-1)


def expert_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Iterator[str]:
    """Yield what is wrong with a mixture of experts."""
    active, experts = config.n_active_experts, config.n_experts
    if not 1 <= active <= experts:
        yield f"n_active_experts {active} must lie between 1 and n_experts {experts}"
    groups, chosen, order = config.router_groups, config.n_active_groups, config.router_order
    if experts % groups:
        yield f"router_groups {groups} does not divide n_experts {experts}"
    if chosen > groups:
        yield f"n_active_groups {chosen} must lie between 1 and router_groups {groups}"
    if active > chosen * experts // groups:
        yield (
            f"n_active_experts {active} is more than the {chosen * experts // groups} experts of "
            f"{chosen} of {groups} groups: raise n_active_groups"
        )
    if groups > 1 and order == "topk_softmax":
        yield f"router_groups {groups} needs scores: choose router_order softmax_topk or sigmoid_topk"
    if config.router_correction and order != "sigmoid_topk":
        yield f"router_correction belongs to router_order sigmoid_topk, and this is {order}: leave it out"
    if not config.shared_expert_gate and not config.d_shared_expert:
        yield "shared_expert_gate needs a shared expert: set d_shared_expert, or leave it out"
    for stack in stacks:
        dense, last = {*stack.dense_layers}, stack.n_layers - 1
        for layer in dense:
            if not 0 <= layer <= last:
                yield f"dense_layers names layer {layer}, and there are layers 0 to {last}"
        mixed = [layer for layer in range(stack.n_layers) if layer not in dense]
        if not mixed:
            yield "dense_layers leaves no layer to the experts: set n_experts 0, or name fewer layers"
        whole = {stack.block_of[layer] for layer in dense}
        for layer in mixed:
            if stack.block_of[layer] in whole:
                shares = "shares its weights by layer_groups with one of the dense_layers"
                yield f"layer {layer} {shares}: name both"


# Mixture of depths --------------------------------------------------------------------------------------

Views = Callable[[tuple[Kind, ...], StackCall], dict[Kind, masks.View]]  # of a stack: the view of each kind


@dataclass(frozen=True, kw_only=True)
class PartView(masks.View):
    """What a layer with a router sees: all tokens, and what makes the view of those that go through."""

    routed = True
    tokens: TokenInfo
    kind: Kind
    call: StackCall
    views: Views
    rotated: bool = True

    def unrotated(self) -> "PartView":
        """Return the same without rotation."""
        return replace(self, rotated=False)

    def of(self, tokens: TokenInfo, cache: Cache | None, tap: Tap) -> masks.View:
        """Return the view of those that go through."""
        view = self.views((self.kind,), self.call._replace(tokens=tokens, cache=cache, tap=tap))[self.kind]
        return view if self.rotated else view.unrotated()


class WithinRouter(LiveTap):
    """The tap of a layer inside its router, which shows the stream before and after itself."""

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """Show `x`, unless it is the stream."""
        return x if name in ("resid_pre", "resid_post") else super().__call__(name, x)


class PartKV(LayerKV):
    """The keys of the tokens that went through a layer: a cache of its own, in which each row has others."""

    @property
    def steps_back(self) -> bool:  # type: ignore[override]
        """Whether the layer keeps keys."""
        return all(keys.steps_back for keys in self.cache.layers.values())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all that is kept."""
        return tuple(x for keys in self.cache.layers.values() for x in keys.tensors())

    def reorder(self, rows: Tensor) -> None:
        """Replace row i by row `rows[i]`."""
        self.cache.reorder(rows)

    def follow(self, tokens: TokenInfo | None) -> None:
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
        self, layer: int, kind: Kind, call: StackCall, views: Views
    ) -> tuple[masks.View, LayerKV | None]:
        """Return what the layer sees, and the keys that it keeps."""
        refuse(
            call.inputs.bias is not None,
            "bias is over all tokens, and some pass a layer by (depth_capacity): leave it out",
        )
        view, cache = PartView(tokens=call.tokens, kind=kind, call=call, views=views), call.cache
        if cache is None:
            return view, None
        kept = cache.layers.get(layer)
        if kept is None:
            own = WindowCache() if isinstance(cache, WindowCache) else Cache()
            kept = cache.layers[layer] = PartKV(own)
        if not isinstance(kept, PartKV):
            raise InputError(
                f"a fixed cache has a slot for every token, and layer {layer} keeps some of them "
                "(depth_capacity): use Cache()"
            )
        return view, kept

    def forward(
        self,
        x: Tensor,
        view: PartView,
        keys: LayerKV | None,
        compute: Callable[..., Tensor],
        tap: Tap = SILENT,
    ) -> Tensor:
        """Send some tokens of x [B, T, D] through `compute`, the layer -> [B, T, D]."""
        (B, T, D), tokens, kind = x.shape, view.tokens, view.kind
        cache, x = keys.cache if isinstance(keys, PartKV) else None, tap("resid_pre", x)
        scores = tap("router", wide(self.score(x))[..., 0])  # B T
        passed = tap("passed", self.choose(scores.detach(), tokens))  # B T
        self.routed = (scores, passed, tokens.real) if self.training else None
        fixed = self.by_rank and tokens.documents is None  # how many go through is known beforehand
        if tap is not SILENT or (torch.compiler.is_compiling() and not fixed):
            N, index = T, torch.arange(T, device=x.device).expand(B, T)
        else:
            N = passing(self.share, T) if fixed else int(passed.sum(1).max())
            index = passed.int().argsort(dim=1, descending=True, stable=True)[:, :N].contiguous()  # B N
        if not N:
            return tap("resid_post", x)
        some = tokens.map(lambda part: part.expand(B, T).gather(1, index))
        real = passed.gather(1, index)
        if fixed and N < T and tokens.real is None:  # no slot is padding
            some = replace(some, plain=tokens.plain and kind == FULL and cache is None)
        else:
            some = replace(some, real=real, plain=False)
        if cache is not None:
            cache.begin(some)
        inner = view.of(some, cache, tap)
        if tap is not SILENT and cache is None and kind.masked:  # who passes by looks at nothing
            inner = inner.spelled_out()
            allowed = masks.spelled_out(inner.mask, inner.causal, some, some)
            inner = replace(inner, mask=allowed & real[:, None, :, None], causal=False)
        rows = (index + T * torch.arange(B, device=x.device)[:, None]).flatten()  # B·N
        read = x.reshape(B * T, D).index_select(0, rows).view(B, N, D)
        kept = None if cache is None else cache.layer(0, kind)
        within = WithinRouter(tap.listeners, tap.prefix) if isinstance(tap, LiveTap) else tap
        answer = compute(read, LayerInputs(inner, kept), within)
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

    def choose(self, scores: Tensor, tokens: TokenInfo) -> Tensor:
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

    @staticmethod
    def steps(spec: StackSpec, run: Pass, name: str, layer: int, tokens: int) -> Iterator[Step]:
        """Yield the steps of the router of a layer on rows of `tokens`."""
        B, D, chosen = run.batch, spec.d_model, passing(spec.capacities[layer], tokens)
        yield linear_step(
            f"{name}.router.score",
            "feedforward",
            B * tokens,
            D,
            1,
            bias=False,
            kept=B * tokens * D * run.size,
        )
        # Indices, flags and scores of the chosen, and what the layer adds to each. Rows have angles and
        # masks of their own.
        each = 2 * INDEX + 1 + run.wide + D * run.wide
        angles = 2 * spec.d_rotary * 4 if spec.positions == "rope" and layer not in spec.rope_skips else 0
        heads = spec.n_heads if spec.positions in BIASES else 1 if spec.kinds[layer] != FULL else 0
        masks_kept = (B - 1) * heads * chosen**2 * run.size
        yield Step(f"{name}.mixed", "feedforward", kept=B * chosen * (each + angles) + masks_kept)


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


def depth_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Iterator[str]:
    """Yield what is wrong with a mixture of depths: shares that are none, routers without a meaning."""
    capacity = config.depth_capacity
    shares = capacity if isinstance(capacity, tuple) else (capacity,)
    for share in shares:
        if not 0 < share <= 1:
            yield f"depth_capacity {share} is no share of the tokens: choose above 0, up to 1 (all of them)"
    if all(share == 1 for share in shares):
        return
    scaling, name = config.rope_scaling, f"depth_capacity {capacity}"
    if capacity is not shares and config.n_layers == 1:
        yield f"{name} is for every second layer, and there is one: give a tuple, or more layers"
    if config.family == "encoder-decoder":
        needs = "which every token needs: choose family decoder or encoder"
        yield f"{name} has no place for cross-attention, {needs}"
    if config.norm_position == "post":
        yield (
            f"{name} scales what a layer adds to the stream, and a post-norm layer replaces it: "
            "choose norm_position pre, sandwich or output"
        )
    if "global" in str(config.attention):
        yield (
            f"{name} may leave out tokens that attention global gives to all: "
            "choose another kind, or no routers"
        )
    if config.n_experts:
        yield f"{name} and n_experts are two routers in one layer: leave one of them out"
    if config.layer_groups not in (None, config.n_layers) or config.loop is not None:
        sharing = "loop" if config.loop else "layer_groups"
        yield f"{name} needs a router for each layer, and {sharing} shares them: leave one of them out"
    if scaling is not None and config.rotates_by_length:
        rotates = f"rope scaling {scaling.kind}, which rotates keys by the longest row"
        yield f"{name} and {rotates}: leave one of them out"
