"""Faults as ports of models really have them, each planted by one function.

Those of `code` take pytest's monkeypatch before a model is built; those of `weights` take the model too, once
it is there.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch.nn.functional as nnf
from torch import nn

from clearhead.core import (
    attention,
    cache,
    embedding,
    feedforward,
    heads,
    masks,
    norms,
    positions,
    stack,
    transformer,
)
from clearhead.core.attention import KERNELS
from clearhead.core.config.kinds import FULL, Windowed
from clearhead.inside.checks import rows as check_rows
from clearhead.variants import caches
from clearhead.variants import positions as relative
from clearhead.variants.routing import Experts

PLANTS: dict[str, tuple[Callable, bool]] = {}  # by name: the plant, and whether it wants the model


def code(plant: Callable) -> Callable:
    """A fault of the program."""
    PLANTS[plant.__name__] = (plant, False)
    return plant


def weights(plant: Callable) -> Callable:
    """A fault of one model."""
    PLANTS[plant.__name__] = (plant, True)
    return plant


def built_with(monkeypatch, kind: type, change: Callable) -> None:
    """Let `change` have its way with every new part of this kind."""
    right = kind.__init__

    def build(self, *given, **options):
        right(self, *given, **options)
        change(self)

    monkeypatch.setattr(kind, "__init__", build)


# The seven --------------------------------------------------------------------------------------------------


@code
def rope_layout(monkeypatch):
    """Pairs (2i, 2i + 1) where the weights expect (i, i + E/2)."""
    right = positions.rotate

    def other(x, rotary, layout):
        half = rotary.cos.shape[-1] // 2
        turned = positions.Rotary(*(angles[..., :half].repeat_interleave(2, -1) for angles in rotary))
        return right(x, turned, "interleaved")

    monkeypatch.setattr(positions, "rotate", other)


def _shifted(monkeypatch, applies, shift):
    right = masks.compose

    def compose(queries, keys, *, causal=False, kind=FULL, prefix=None):
        if not causal or not applies(queries, keys):
            return right(queries, keys, causal=causal, kind=kind, prefix=prefix)
        mask, _ = right(queries, keys, kind=kind)
        here, there = queries.order[:, :, None], keys.order[:, None, :]
        # Otherwise the first token would see nothing.
        seen = ((there <= here + shift) | ((here == 0) & (there == 0)))[:, None]
        return (seen if mask is None else seen & mask), False

    monkeypatch.setattr(masks, "compose", compose)


@code
def sees_the_next(monkeypatch):
    """The causal mask lets a token see the one after it."""
    _shifted(monkeypatch, lambda queries, keys: True, 1)


@code
def misses_itself(monkeypatch):
    """The causal mask hides a token from itself."""
    _shifted(monkeypatch, lambda queries, keys: True, -1)


@code
def misses_itself_in_a_cache(monkeypatch):
    """The same, but only where a cache holds earlier tokens."""
    _shifted(monkeypatch, lambda queries, keys: keys.length > queries.length, -1)


@code
def cache_order(monkeypatch):
    """New keys stand before the old ones, new values after them."""
    right = cache.LayerKV.update

    def update(self, k, v):
        new = k.shape[2]
        k, v = right(self, k, v)
        return k.roll(new, 2), v

    monkeypatch.setattr(cache.LayerKV, "update", update)


@code
def cache_rows(monkeypatch):
    """Beams change places; their keys do, their values do not."""
    monkeypatch.setattr(cache.LayerKV, "reorder", lambda self, rows: setattr(self, "k", self.k[rows]))


@code
def norm_eps(monkeypatch):
    """A tenth of the eps that the config names."""
    for kind in (norms.LayerNorm, norms.RMSNorm):
        built_with(monkeypatch, kind, lambda part: setattr(part, "eps", part.eps / 10))


@weights
def untied(monkeypatch, model):
    """The output layer has a table of its own where the config says it has not."""
    model.head.out.weight = nn.Parameter(model.head.out.weight.detach() + 0.01)


@weights
def untied_copy(monkeypatch, model):
    """The same, and both tables are equal as yet: only training will drive them apart."""
    model.head.out.weight = nn.Parameter(model.head.out.weight.detach().clone())


@weights
def tied(monkeypatch, model):
    """The output layer is the token table where the config says it is not."""
    model.head.out.weight = model.decoder.embedding.front.tokens.weight


@weights
def untied_when_loaded(monkeypatch, model):
    """A model that is read back from disk has a copy of the table, not the table."""
    right = transformer.Transformer.tie

    def tie(self):
        right(self)
        if not self.head.out.weight.is_meta:
            self.head.out.weight = nn.Parameter(self.head.out.weight.detach().clone())

    monkeypatch.setattr(transformer.Transformer, "tie", tie)


@code
def dropout(monkeypatch):
    """Dropout on what a sublayer adds, in evaluation too."""
    right = stack.Residual.add
    monkeypatch.setattr(
        stack.Residual, "add", lambda self, x, y, tap: right(self, x, nnf.dropout(y, 0.1), tap)
    )


@code
def head_repeat(monkeypatch):
    """Key/value heads repeated as 0 1 0 1 where queries expect 0 0 1 1."""

    def wrong(kernel, q, k, v, mask=None, bias=None, scale=None, **options):
        groups = q.shape[1] // k.shape[1]
        return kernel(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), mask, bias, scale, **options)

    for name, kernel in list(KERNELS.items()):
        monkeypatch.setitem(KERNELS, name, functools.partial(wrong, kernel))


# Others of the model ----------------------------------------------------------------------------------------


@code
def activation(monkeypatch):
    """GELU by its tanh formula in place of the exact one."""
    monkeypatch.setitem(feedforward.ACTIVATIONS, "gelu", feedforward.gelu_tanh)


@code
def no_embedding_scale(monkeypatch):
    """Embeddings are not multiplied by the root of d_model."""
    built_with(monkeypatch, embedding.TokenFront, lambda part: setattr(part, "scale", 1.0))


@code
def position_offset(monkeypatch):
    """Learned positions begin one row late; the last, for want of a row, at the first."""
    right = positions.LearnedPositions.embed
    monkeypatch.setattr(
        positions.LearnedPositions,
        "embed",
        lambda self, where, dtype, tap: right(self, (where + 1) % self.spec.max_positions, dtype, tap),
    )


@code
def window(monkeypatch):
    """A window that holds one key too many."""
    right = masks.compose

    def compose(queries, keys, *, kind=FULL, **options):
        wider = Windowed(kind.size + 1) if isinstance(kind, Windowed) else kind
        return right(queries, keys, kind=wider, **options)

    monkeypatch.setattr(masks, "compose", compose)


@code
def queries_for_keys(monkeypatch):
    """Queries and keys change places."""
    right = attention.Attention.project

    def project(self, x, source):
        q, k, v = right(self, x, source)
        return k, q, v

    monkeypatch.setattr(attention.Attention, "project", project)


@code
def post_for_pre(monkeypatch):
    """The norm stands after the sum in place of before the sublayer."""
    monkeypatch.setattr(stack.Residual, "norm_input", lambda self, x, tap: x)
    monkeypatch.setattr(stack.Residual, "add", lambda self, x, y, tap: self.before(x + y))


@code
def softmax_scale(monkeypatch):
    """Scores divided by the root of d_model, not of a head's width."""
    built_with(
        monkeypatch, attention.Attention, lambda part: setattr(part, "scale", part.q.in_features**-0.5)
    )


@code
def mean_subtracted(monkeypatch):
    """RMSNorm that takes the mean away, as LayerNorm does."""
    right = norms.RMSNorm.forward
    monkeypatch.setattr(norms.RMSNorm, "forward", lambda self, x: right(self, x - x.mean(-1, keepdim=True)))


@code
def bucket_sides(monkeypatch):
    """Relative positions of an encoder sorted into buckets as a decoder's are: what stands right is lost."""
    right = relative.relative_bucket
    monkeypatch.setattr(
        relative, "relative_bucket", lambda distance, both, *sizes: right(distance, False, *sizes)
    )


@code
def padding_in_the_source(monkeypatch):
    """Cross-attention reads the padding of the source."""
    right = masks.compose

    def compose(queries, keys, **options):
        return right(queries, keys, **options) if options else (None, False)

    monkeypatch.setattr(masks, "compose", compose)


@code
def router_order(monkeypatch):
    """Weights of the experts from a softmax over all of them, not over those chosen."""

    def change(part):
        part.order, part.renormalise = "softmax_topk", False

    built_with(monkeypatch, Experts, change)


@code
def gates_unclamped(monkeypatch):
    """A limit so high that no fresh model reaches it is forgotten."""
    built_with(monkeypatch, feedforward.FeedForward, lambda part: setattr(part, "clamp", None))


@code
def mean_over_padding(monkeypatch):
    """The mean over all tokens, padding too."""
    right = heads.pool
    monkeypatch.setattr(heads, "pool", lambda hidden, real, how: right(hidden, None, how))


@code
def ring_forgets(monkeypatch):
    """A windowed cache that loses the value in its first slot."""
    right = caches.RingKV.update

    def update(self, k, v):
        k, v = right(self, k, v)
        v = v.clone()
        v[:, :, 0] = 0
        return k, v

    monkeypatch.setattr(caches.RingKV, "update", update)


@code
def sinks_stand_still(monkeypatch):
    """A stream whose first tokens stay where they stood, ever farther from the last ones."""
    monkeypatch.setattr(caches, "rotate", lambda x, rotary, layout: x)


# Of what is done with a model -------------------------------------------------------------------------------


@code
def forgotten_optimizer(monkeypatch):
    """A run is resumed without what its optimizer remembers."""
    monkeypatch.setattr(check_rows, "restore_optimizer", lambda optimizer, model, tensors: None)


@code
def mean_of_means(monkeypatch):
    """Each part of a batch weighs the same, whatever the number of its targets."""
    right = check_rows.batch_loss

    def batch_loss(model, batch, **options):
        loss, count = right(model, batch, **options)
        return loss * 10 / count, count

    monkeypatch.setattr(check_rows, "batch_loss", batch_loss)


@code
def lens_without_norm(monkeypatch):
    """The lens leaves the last norm out."""
    right = check_rows.stopped_at

    def stopped_at(model, state):
        bare = copy.copy(model)
        bare._modules = {**model._modules, "decoder": copy.copy(model.decoder)}
        bare.decoder._modules = {**model.decoder._modules, "norm": None}
        return right(bare, state)

    monkeypatch.setattr(check_rows, "stopped_at", stopped_at)


@code
def another_head_pruned(monkeypatch):
    """Pruning takes the neighbour of the head away."""
    right = check_rows.prune

    def prune(model, chosen):
        return right(model, [type(head)(head.kind, head.layer, head.number + 1) for head in chosen])

    monkeypatch.setattr(check_rows, "prune", prune)
