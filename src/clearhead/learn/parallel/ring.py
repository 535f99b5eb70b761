"""Ring attention: the tokens of each row shared out, keys and values sent from process to process.

In round s a process receives from the one s places before it, while it works on what came in the round
before. It never holds more than its own keys and those of two others. Answers to the keys of each process are
merged by their log-sum-exp. The backward pass sends keys and values again, and their gradients back.

Shapes: B batch, T queries of a process, H heads, K key/value heads, S keys, E and Ev width of a key and of a
value, t and s queries and keys of a meeting.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.core.attention import Attention
from clearhead.core.cache import LayerKeys
from clearhead.core.dtypes import uncast, wide
from clearhead.core.masks import View
from clearhead.core.taps import Tap
from clearhead.learn.parallel.rounds import Meeting, Ring, RingView, Round


class RingAttention(Attention):
    """Attention of the queries of this process to the keys of all."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, view: View, cache: LayerKeys | None, tap: Tap, x: Tensor
    ) -> Tensor:
        """See `Attention.attend`."""
        if not isinstance(view, RingView):
            return super().attend(q, k, v, view, cache, tap, x)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        heads = list(self.heads) if self.pruned else None
        dropout = self.dropout if self.training else 0.0
        return attend_ring(q, k, v, view, scale, self.softcap, self.sinks(), dropout, heads)


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

    def rounds(self, own: Tensor) -> Iterator[tuple[int, Round, Tensor]]:
        """Yield each round with its keys and values [B, K, s, E+Ev], while the next are under way."""
        ring, rounds = self.view.ring, self.view.rounds
        coming: list[tuple[Tensor, Callable[[], None]]] = [(own, lambda: None)]
        for step, here in enumerate(rounds):
            if step + 1 < len(rounds):
                after = rounds[step + 1]
                sent = own.index_select(2, after.given) if len(after.given) else None
                room = own.new_empty(*own.shape[:2], after.received, own.shape[3])
                place = ring.place + step + 1, ring.place - step - 1
                coming.append((room, ring.swap(sent, place[0], room if after.received else None, place[1])))
            keys, wait = coming.pop(0)
            wait()
            yield step, here, keys

    def scores(self, at: Meeting, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scores of a meeting [B, H, t, s], and of a soft cap the slope."""
        scores = wide(_by_key_head(q, k) @ k.transpose(-2, -1)).view(*q.shape[:3], -1) * self.scale
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * bent, 1 - bent.square()
        bias, mask = self.view.added(at, self.heads), self.view.seen(at)
        scores = scores if bias is None else scores + bias
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf), slope

    def kept(self, at: Meeting, pattern: Tensor) -> Tensor | float:
        """Return the factors of dropout [B, H, t, s], the same in both passes."""
        if not self.dropout:
            return 1.0
        generator = torch.Generator(pattern.device).manual_seed(self.seed + at.number)
        drawn = torch.rand(pattern.shape, generator=generator, device=pattern.device)
        return (drawn >= self.dropout) / (1 - self.dropout)


class _Attended(torch.autograd.Function):
    """softmax(q kᵀ · scale + bias, where seen) v, over the keys and values of all processes."""

    @staticmethod
    def forward(
        ctx: Any, call: RingCall, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *weights: Tensor
    ) -> Tensor:
        """Merge the answers to the keys of each process."""
        E = k.shape[-1]
        answer = wide(q).new_zeros(*q.shape[:3], v.shape[-1])
        total = wide(q).new_full(q.shape[:3], -torch.inf)  # log-sum-exp of all scores so far
        for _, here, keys in call.rounds(torch.cat([k, v], -1)):
            for at in here.meetings:
                met = keys if at.keys is None else keys.index_select(2, at.keys)
                scores, _ = call.scores(at, q[:, :, at.queries], met[..., :E])
                before = total[:, :, at.queries]
                merged = torch.logaddexp(before, scores.logsumexp(-1))
                finite = merged.masked_fill(merged == -torch.inf, 0.0)  # a query that sees nothing
                pattern = (scores - finite[..., None]).exp_()
                pattern = (pattern * call.kept(at, pattern)).to(v.dtype)
                found = (_by_key_head(pattern, met) @ met[..., E:]).view(*pattern.shape[:3], -1)
                answer[:, :, at.queries] *= (before - finite).exp()[..., None]
                answer[:, :, at.queries] += found
                total[:, :, at.queries] = merged
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
        """Send keys and values round again, and the gradients of each back to where it came from."""
        call, ring = ctx.call, ctx.call.view.ring
        q, k, v, answer, total, sink = ctx.saved_tensors
        weights = call.view.weights()
        E, of_weights = k.shape[-1], [torch.zeros_like(weight) for weight in weights]
        total = total.masked_fill(total == -torch.inf, 0.0)[..., None]
        # What each score is weighed against: the mean of the slopes of all scores of a query.
        mean = (wide(upstream) * wide(answer)).sum(-1, keepdim=True)
        for_q, own = torch.zeros_like(wide(q)), torch.cat([k, v], -1)
        for_own, returned = torch.zeros_like(wide(own)), _nothing
        for step, here, keys in call.rounds(own):
            slopes = for_own if step == 0 else torch.zeros_like(wide(keys))
            for at in here.meetings:
                span, met = at.queries, keys if at.keys is None else keys.index_select(2, at.keys)
                queries, wanted = q[:, :, span], upstream[:, :, span]
                scores, slope = call.scores(at, queries, met[..., :E])
                pattern = (scores - total[:, :, span]).exp_()
                kept = call.kept(at, pattern)
                of_pattern = wide(_by_key_head(wanted, met) @ met[..., E:].transpose(-2, -1)).view_as(pattern)
                of_scores = pattern * (of_pattern * kept - mean[:, :, span])
                for so_far, more in zip(of_weights, _of_bias(call, at, weights, of_scores)):
                    so_far += more
                of_scores = (of_scores if slope is None else of_scores * slope) * call.scale
                grouped = _by_key_head(of_scores.to(q.dtype), met)  # B K H/K·t s
                for_q[:, :, span] += (grouped @ met[..., :E]).view_as(queries)
                for_k = grouped.transpose(-2, -1) @ _by_key_head(queries, met)
                given = _by_key_head((pattern * kept).to(v.dtype), met)
                for_v = given.transpose(-2, -1) @ _by_key_head(wanted, met)
                both = wide(torch.cat([for_k, for_v], -1))
                slopes.add_(both) if at.keys is None else slopes.index_add_(2, at.keys, both)
            returned()
            returned = _return(ring, step, here, slopes, for_own) if step else _nothing
        returned()
        of_sink = None if sink is None else -((wide(sink)[:, None, None] - total).exp() * mean).sum((0, 2, 3))
        of_sink = None if of_sink is None else of_sink.to(sink.dtype)
        for_k, for_v = (x.to(k.dtype) for x in (for_own[..., :E], for_own[..., E:]))
        return None, for_q.to(q.dtype), for_k, for_v, of_sink, *of_weights


def _nothing() -> None:
    """Wait for nothing."""


def _return(ring: Ring, step: int, here: Round, slopes: Tensor, own: Tensor) -> Callable[[], None]:
    """Send gradients of keys and values back; return what adds those of the own ones, once they are here."""
    room = own.new_empty(*own.shape[:2], len(here.given), own.shape[3])
    sent, received = slopes if here.received else None, room if len(here.given) else None
    wait = ring.swap(sent, ring.place - step, received, ring.place + step)

    def add() -> None:
        wait()
        own.index_add_(2, here.given, room)

    return add


def _of_bias(call: RingCall, at: Meeting, weights: list[Tensor], slopes: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the weights of a bias."""
    if not weights:
        return ()
    with torch.enable_grad():
        bias = call.view.added(at, call.heads)
    assert bias is not None
    return torch.autograd.grad(bias, weights, slopes.sum_to_size(bias.shape).to(bias.dtype))


def _by_key_head(x: Tensor, keys: Tensor) -> Tensor:
    """Make the heads of a group more queries of their key head: [B, H, t, E] -> [B, K, H/K·t, E]."""
    return x.reshape(x.shape[0], keys.shape[1], -1, x.shape[-1])
