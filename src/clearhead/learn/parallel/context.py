"""Context parallelism: stacks that work on some of the tokens of each row, with ring attention.

In step s of the ring a process receives from the one s before it, while it works on what came in the step
before. It never holds more than its own keys and those of two others. Answers to the keys of each process are
merged by their log-sum-exp. The backward pass sends keys and values again, and their gradients back.

docs/decisions/torch-pipelining.md says why it is not PyTorch's `context_parallel`.

Norms, feed-forwards and the loss of each token are local. The states of the last layer stay shared out for a
language head, and are gathered for heads that read whole rows. Outside of training every process reads whole
rows.

Shapes: B batch, T tokens of a row (in ring attention: queries of a process), t those of this process, D
model, H heads, K key/value heads, S keys, E and Ev width of a key and of a value; of a block of scores, t
queries and s keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.core.cache import Cache
from clearhead.core.config.kinds import Kind
from clearhead.core.dtypes import uncast, wide
from clearhead.core.heads import Head, LanguageHead
from clearhead.core.masks import TokenInfo, View
from clearhead.core.positions import Rotary
from clearhead.core.stack import Inputs, Memory, Stack, StackCall
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Transformer
from clearhead.errors import ConfigError, refuse
from clearhead.learn.parallel.pipeline import StageStack
from clearhead.learn.parallel.ring_schedule import (
    LocalTokens,
    Ring,
    RingStep,
    RingView,
    ScoreBlock,
    TokenShards,
    local_tokens,
    ring_view,
)
from clearhead.run.kernels.parts import like
from clearhead.variants.fronts import PatchFront
from clearhead.variants.positions import RelativePositions


@dataclass(frozen=True)
class RingPlan:
    """How queries of this process attend to the keys of all; a `Plan` of `masks`."""

    view: RingView

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **formula: Any) -> Tensor:
        """Map q [B,H,T,E], k [B,K,S,E], v [B,K,S,Ev] -> [B,H,T,Ev]."""
        scale = formula.pop("scale")
        return attend_ring(q, k, v, self.view, q.shape[-1] ** -0.5 if scale is None else scale, **formula)


def attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: RingView,
    scale: float,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
    heads: list[int] | None = None,
) -> Tensor:
    """Attend as `model.attend` does, q [B,H,T,E], k [B,K,S,E] and v [B,K,S,Ev] being those of this process.

    `heads` are the heads that are here, where the bias has more.
    """
    seed = int(torch.randint(1 << 62, ())) if dropout else 0
    call = RingCall(view, scale, softcap, dropout, seed, heads)
    if torch.is_autocast_enabled(q.device.type):  # as PyTorch's own kernel does
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    apply: Any = _Attended.apply
    with uncast(q):
        return cast(Tensor, apply(call, q, k, v, sink, *view.weights()))


@dataclass(frozen=True)
class RingCall:
    """One attention over the ring."""

    view: RingView
    scale: float
    softcap: float | None
    dropout: float
    seed: int  # of dropout
    heads: list[int] | None

    def steps(self, own: Tensor) -> Iterator[tuple[int, RingStep, Tensor]]:
        """Yield each step with its keys and values [B, K, s, E+Ev], while the next are under way."""
        ring, steps = self.view.ring, self.view.steps
        coming: list[tuple[Tensor, Callable[[], None]]] = [(own, lambda: None)]
        for number, step in enumerate(steps):
            if number + 1 < len(steps):
                after = steps[number + 1]
                sent = own.index_select(2, after.sent) if len(after.sent) else None
                room = own.new_empty(*own.shape[:2], after.received, own.shape[3])
                to, source = ring.rank + number + 1, ring.rank - number - 1
                coming.append((room, ring.swap(sent, to, room if after.received else None, source)))
            keys, wait = coming.pop(0)
            wait()
            yield number, step, keys

    def scores(self, block: ScoreBlock, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of a block [B, H, t, s], and of a soft cap the slope."""
        scores = wide(_by_key_head(q, k) @ k.transpose(-2, -1)).view(*q.shape[:3], -1) * self.scale
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * bent, 1 - bent.square()
        bias, mask = self.view.added(block, self.heads), self.view.seen(block)
        scores = scores if bias is None else scores + bias
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf), slope

    def kept(self, block: ScoreBlock, pattern: Tensor) -> Tensor | float:
        """Return the factors of dropout [B, H, t, s], the same in both passes."""
        if not self.dropout:
            return 1.0
        generator = torch.Generator(pattern.device).manual_seed(self.seed + block.number)
        drawn = torch.rand(pattern.shape, generator=generator, device=pattern.device)
        return (drawn >= self.dropout) / (1 - self.dropout)


class _Attended(torch.autograd.Function):
    """softmax(q kᵀ · scale + bias, where seen) v, over the keys and values of all processes."""

    @staticmethod
    def forward(
        ctx: Any, call: RingCall, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *weights: Tensor
    ) -> Tensor:
        """Attend to the keys of each process in turn, and merge by log-sum-exp."""
        E = k.shape[-1]
        answer = wide(q).new_zeros(*q.shape[:3], v.shape[-1])
        total = wide(q).new_full(q.shape[:3], -torch.inf)  # log-sum-exp of all scores so far
        for _, step, keys in call.steps(torch.cat([k, v], -1)):
            for block in step.blocks:
                met = keys if block.keys is None else keys.index_select(2, block.keys)
                scores, _ = call.scores(block, q[:, :, block.queries], met[..., :E])
                before = total[:, :, block.queries]
                merged = torch.logaddexp(before, scores.logsumexp(-1))
                finite = merged.masked_fill(merged == -torch.inf, 0.0)  # a query that sees nothing
                pattern = (scores - finite[..., None]).exp_()
                pattern = (pattern * call.kept(block, pattern)).to(v.dtype)
                part = (_by_key_head(pattern, met) @ met[..., E:]).view(*pattern.shape[:3], -1)
                answer[:, :, block.queries] *= (before - finite).exp()[..., None]
                answer[:, :, block.queries] += part
                total[:, :, block.queries] = merged
        if sink is not None:
            merged = torch.logaddexp(total, sink.to(total.dtype)[:, None])
            answer, total = answer * (total - merged).exp()[..., None], merged
        answer = answer.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, answer, total, sink)
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Send keys and values round the ring again, and their gradients back to their owners."""
        call, ring = ctx.call, ctx.call.view.ring
        q, k, v, answer, total, sink = ctx.saved_tensors
        weights = call.view.weights()
        E, of_weights = k.shape[-1], [torch.zeros_like(weight) for weight in weights]
        total = total.masked_fill(total == -torch.inf, 0.0)[..., None]
        # What each score is weighed against: the mean of the slopes of all scores of a query.
        mean = (wide(upstream) * wide(answer)).sum(-1, keepdim=True)
        for_q, own = torch.zeros_like(wide(q)), torch.cat([k, v], -1)
        for_own, returned = torch.zeros_like(wide(own)), _nothing
        for number, step, keys in call.steps(own):
            slopes = for_own if number == 0 else torch.zeros_like(wide(keys))
            for block in step.blocks:
                span, met = block.queries, keys if block.keys is None else keys.index_select(2, block.keys)
                queries, wanted = q[:, :, span], upstream[:, :, span]
                scores, slope = call.scores(block, queries, met[..., :E])
                pattern = (scores - total[:, :, span]).exp_()
                kept = call.kept(block, pattern)
                of_pattern = wide(_by_key_head(wanted, met) @ met[..., E:].transpose(-2, -1)).view_as(pattern)
                of_scores = pattern * (of_pattern * kept - mean[:, :, span])
                for so_far, more in zip(of_weights, _of_bias(call, block, weights, of_scores)):
                    so_far += more
                of_scores = (of_scores if slope is None else of_scores * slope) * call.scale
                grouped = _by_key_head(of_scores.to(q.dtype), met)  # B K H/K·t s
                for_q[:, :, span] += (grouped @ met[..., :E]).view_as(queries)
                for_k = grouped.transpose(-2, -1) @ _by_key_head(queries, met)
                weights_of_values = _by_key_head((pattern * kept).to(v.dtype), met)
                for_v = weights_of_values.transpose(-2, -1) @ _by_key_head(wanted, met)
                both = wide(torch.cat([for_k, for_v], -1))
                slopes.add_(both) if block.keys is None else slopes.index_add_(2, block.keys, both)
            returned()
            returned = _return(ring, number, step, slopes, for_own) if number else _nothing
        returned()
        of_sink = None if sink is None else -((wide(sink)[:, None, None] - total).exp() * mean).sum((0, 2, 3))
        of_sink = None if of_sink is None else of_sink.to(sink.dtype)
        for_k, for_v = (x.to(k.dtype) for x in (for_own[..., :E], for_own[..., E:]))
        return None, for_q.to(q.dtype), for_k, for_v, of_sink, *of_weights


def _nothing() -> None:
    """Wait for nothing."""


def _return(ring: Ring, number: int, step: RingStep, slopes: Tensor, own: Tensor) -> Callable[[], None]:
    """Send gradients of keys and values back; return what adds those of the own ones, once they are here."""
    room = own.new_empty(*own.shape[:2], len(step.sent), own.shape[3])
    sent, received = slopes if step.received else None, room if len(step.sent) else None
    wait = ring.swap(sent, ring.rank - number, received, ring.rank + number)

    def add() -> None:
        wait()
        own.index_add_(2, step.sent, room)

    return add


def _of_bias(call: RingCall, block: ScoreBlock, weights: list[Tensor], slopes: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the weights of a bias."""
    if not weights:
        return ()
    with torch.enable_grad():
        bias = call.view.added(block, call.heads)
    assert bias is not None
    return torch.autograd.grad(bias, weights, slopes.sum_to_size(bias.shape).to(bias.dtype))


def _by_key_head(x: Tensor, keys: Tensor) -> Tensor:
    """Make the heads of a group more queries of their key head: [B, H, t, E] -> [B, K, H/K·t, E]."""
    return x.reshape(x.shape[0], keys.shape[1], -1, x.shape[-1])


# Stacks ---------------------------------------------------------------------------------------------------


def share_tokens(model: Transformer, ring: Ring) -> None:
    """Let a model, in training, work on the tokens of this process; the others of the ring have the rest."""
    for name, stack in [(name, part) for name, part in model.named_children() if isinstance(part, Stack)]:
        _check(stack, ring.size)
        for inner, part in list(stack.named_modules()):
            if isinstance(part, PatchFront):
                stack.set_submodule(inner, like(part, OwnPatches, rank=ring.rank, processes=ring.size))
        # A head of its own kind reads whole rows; a stage of a pipeline that passes states on has none.
        gathers = stack is model.main and type(model.head) is not Head
        gathers = gathers and not isinstance(model.head, LanguageHead)
        kind = RingStage if isinstance(stack, StageStack) else RingStack
        model.set_submodule(name, like(stack, kind, ring=ring, gathers=gathers, real=None))


def _check(stack: Stack, size: int) -> None:
    """Refuse what the context axis cannot share out."""
    spec, axis = stack.spec, f"parallel.context {size}"
    for layer, kind in enumerate(spec.kinds):
        refuse(
            not (kind.masked and kind.shares),
            f"{axis} shares out layers of full, window, dilated, strided and blocks attention, and layer "
            f"{layer} is {kind}: use data, shard or tensor",
            ConfigError,
        )
    for refused, what in (
        (min(spec.capacities) < 1, "depth_capacity, which ranks the tokens of whole rows"),
        (spec.layer_drop > 0, f"layer_drop {spec.layer_drop}, which draws for whole rows"),
        (spec.positions == "disentangled", "positions disentangled, whose scores are made in each layer"),
        (spec.input == "frames", 'input "frames", whose convolutions reach over the ends of chunks'),
    ):
        refuse(
            refused, f"{axis} cannot share out a model with {what}: use data, shard or tensor", ConfigError
        )


class OwnPatches(PatchFront):
    """Patches of which this process has some, in training."""

    rank: int
    processes: int

    def forward(self, pixels: Tensor, real: Tensor | None = None, tap: Tap = SILENT) -> Tensor:
        """Map [B, C, height, width] -> [B, t, D]; outside of training, see `PatchFront`."""
        vectors = super().forward(pixels, real, tap)
        if not self.training:
            return vectors
        return TokenShards(vectors.shape[1], self.processes, zigzag=False).pick(vectors, self.rank)


class RingStack(Stack):
    """A stack that, in training, works on the tokens of this process."""

    ring: Ring
    gathers: bool  # the states of whole rows
    real: Tensor | None  # B t, of the latest pass; None: all

    @property
    def copies(self) -> int:  # type: ignore[override]
        """Number of processes that return the same states in training."""
        return self.ring.size if self.gathers else 1

    def layout(self, length: int) -> TokenShards:
        """Return how rows of some length are shared out."""
        return TokenShards(length, self.ring.size, self.spec.causal)

    def own(self, x: Tensor, fill: float) -> Tensor:
        """See `Stack.own`."""
        return self.layout(x.shape[1]).pick(x, self.ring.rank, fill) if self.training else x

    def worked_on(self, mask: Tensor | None) -> Tensor | None:
        """See `Stack.worked_on`."""
        return self.real

    def forward(
        self,
        inputs: Inputs,
        tokens: TokenInfo,
        memory: Memory | None = None,
        cache: Cache | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map the inputs of whole rows to the states of the tokens here [B, t, D], or of all of them."""
        if not self.training:
            return super().forward(inputs, tokens, memory, cache, tap)
        refuse(
            any(extra is not None for extra in (cache, inputs.prefix, inputs.bias)),
            "cache, prefix and bias are not shared out: call model.eval() first, or train without context",
        )
        layout, rank = self.layout(tokens.length), self.ring.rank
        own = local_tokens(tokens, layout, rank)
        ids, types = inputs.ids, inputs.types
        self.real = None if own.real is None else own.real.expand(ids.shape[0], -1)
        if self.spec.input != "patches":
            ids = layout.pick(ids, rank)
        types = None if types is None else layout.pick(types.expand(ids.shape[0], -1), rank)
        hidden = super().forward(Inputs(ids, types=types), own, memory, tap=tap)
        if not self.gathers:
            return hidden
        # Each process computes the whole loss and counts one of `copies` shares of it.
        return layout.joined(self.ring.gathered(hidden).transpose(0, 1).flatten(1, 2))

    def views(self, kinds: tuple[Kind, ...], call: StackCall) -> dict[Kind, View]:
        """Return views of the keys of all processes; outside of training, see `Stack`."""
        inputs, tokens, dtype = call.inputs, call.tokens, call.dtype
        if not isinstance(tokens, LocalTokens):
            return super().views(kinds, call)
        scheme, causal = self.positions, self.spec.causal
        # Some scalings of rotation go by the last position of the row.
        last = tokens.whole.positions.amax().expand(tokens.positions.shape[0], 1)
        reached, views = torch.cat([tokens.positions, last], 1), {}
        for kind in kinds:
            rotations = scheme.rotary(reached, kind.reach)
            whole = kind.describe(tokens.whole, causal, inputs.ids, None)

            def biased(queries: TokenInfo, keys: TokenInfo, kind: Kind = kind) -> Tensor | None:
                total = scheme.bias(queries.positions, keys.positions, dtype)
                return cast(Tensor | None, kind.with_counts(total, queries, keys, dtype))

            view = ring_view(
                self.ring,
                (whole, tokens.layout),
                (whole, tokens.layout),
                kind,
                causal,
                width=inputs.ids.shape[0] * self.spec.n_heads,
                bias_of=biased,
                weights=self.of_bias,
                rotary=None if rotations is None else Rotary(*(turn[:, :, :-1] for turn in rotations)),
            )
            views[kind] = replace(view, blocks=RingPlan(view))
        return cast(dict[Kind, View], views)

    def of_bias(self) -> list[Tensor]:
        """Return the weights that the bias of scores is made of, if they are trained."""
        made_of = self.positions.table.parameters() if isinstance(self.positions, RelativePositions) else ()
        return [weight for weight in made_of if weight.requires_grad]

    def cross_view(self, tokens: TokenInfo, source: TokenInfo, batch: int) -> View:
        """See `Stack.cross_view`; the source is shared out as the tokens of an encoder are."""
        if not isinstance(tokens, LocalTokens):
            return super().cross_view(tokens, source, batch)
        there = TokenShards(source.length, self.ring.size, zigzag=False)
        view = ring_view(
            self.ring, (tokens.whole, tokens.layout), (source, there), width=batch * self.spec.n_heads
        )
        return replace(view, blocks=RingPlan(view))


class RingStage(StageStack, RingStack):
    """A stage of a pipeline that, in training, works on the tokens of this process."""
