"""Faults that short inputs do not show: each begins at a length, a distance or a position."""

from __future__ import annotations

import functools

import torch

from clearhead.core import cache, masks, positions, transformer
from clearhead.core.attention import KERNELS
from clearhead.core.config.kinds import FULL, Windowed
from clearhead.run.generate import decode
from clearhead.run.kernels import parts
from clearhead.run.kernels.native import MOST_ROWS, NativeLinear
from clearhead.variants import blocks, caches
from clearhead.variants import positions as relative
from tests.faults.plants import code

# Positions --------------------------------------------------------------------------------------------------


def _learned(monkeypatch, change):
    """Let `change` have its way with the positions that a table is asked for."""
    right = positions.LearnedPositions.embed
    monkeypatch.setattr(
        positions.LearnedPositions,
        "embed",
        lambda self, where, dtype, tap: right(self, change(self.spec, where), dtype, tap),
    )


@code
def learned_past_100(monkeypatch):
    """Every position past row 100 of the table takes that row."""
    _learned(monkeypatch, lambda spec, where: where.clamp(max=100))


@code
def last_learned_position(monkeypatch):
    """The last position takes the row before it."""
    _learned(monkeypatch, lambda spec, where: where.clamp(max=spec.max_positions - 2))


@code
def offset_shortens_the_table(monkeypatch):
    """The rows that the offset skips at the start are missing at the end."""
    _learned(monkeypatch, lambda spec, where: where.clamp(max=spec.max_positions - spec.position_offset - 1))


def _buckets(monkeypatch, change):
    """Let `change` have its way with distances and buckets; it takes the right function first."""
    monkeypatch.setattr(relative, "relative_bucket", functools.partial(change, relative.relative_bucket))


@code
def far_buckets_at_half_distance(monkeypatch):
    """Distances past half of the largest are sorted as if that half were the largest."""

    def change(right, distance, both, count, largest):
        far = distance.abs() > largest // 2
        return torch.where(
            far, right(distance, both, count, largest // 2), right(distance, both, count, largest)
        )

    _buckets(monkeypatch, change)


@code
def buckets_begin_again(monkeypatch):
    """Distances past the largest begin again at 0."""

    def change(right, distance, both, count, largest):
        return right(
            torch.where(distance.abs() > largest, distance % largest, distance), both, count, largest
        )

    _buckets(monkeypatch, change)


@code
def longrope_switches_early(monkeypatch):
    """The long divisors are taken at the trained length already, not past it."""
    right = positions.rope_frequencies

    def early(width, base, scaling, max_positions, where):
        return right(width, base, scaling, max_positions, where + (where == scaling.original_positions - 1))

    monkeypatch.setattr(positions, "rope_frequencies", early)


@code
def dynamic_grows_late(monkeypatch):
    """The base grows only from one token past the trained length on."""
    right = positions.rope_frequencies

    def late(width, base, scaling, max_positions, where):
        return right(
            width, base, scaling, max_positions, where - (where == scaling.original_positions).long()
        )

    monkeypatch.setattr(positions, "rope_frequencies", late)


@code
def dynamic_stands_still_alone(monkeypatch):
    """The base does not grow for a token that is read by itself."""
    right = positions.rope_frequencies

    def alone(width, base, scaling, max_positions, where):
        where = where.clamp(max=scaling.original_positions - 1) if where.shape[-1] == 1 else where
        return right(width, base, scaling, max_positions, where)

    monkeypatch.setattr(positions, "rope_frequencies", alone)


@code
def longrope_keeps_what_it_read(monkeypatch):
    """Past the trained length, the keys read within it stay turned by the short divisors."""
    monkeypatch.setattr(decode, "is_stretched", lambda model, length: False)


@code
def longrope_is_read_again_late(monkeypatch):
    """The text is read again one token after the length at which the divisors change."""
    right = decode.is_stretched
    monkeypatch.setattr(decode, "is_stretched", lambda model, length: right(model, length - 1))


@code
def coarse_distances(monkeypatch):
    """ALiBi's distances are rounded to 8 bits, which is exact up to 256."""
    right = positions.AlibiPositions.bias

    def bias(self, queries, keys, dtype, tap):
        near, far = right(self, queries, keys, dtype, tap), right(self, queries, keys, torch.bfloat16, tap)
        apart = (queries[:, None, :, None] - keys[:, None, None, :]).abs()
        return torch.where(apart > 256, far.to(dtype), near)

    monkeypatch.setattr(positions.AlibiPositions, "bias", bias)


@code
def coarse_sinusoids(monkeypatch):
    """Positions are rounded to 8 bits before their sines are taken."""
    right = positions.sinusoid
    monkeypatch.setattr(
        positions, "sinusoid", lambda where, *options: right(where.bfloat16().long(), *options)
    )


# Attention --------------------------------------------------------------------------------------------------


@code
def long_rows_lose_the_window(monkeypatch):
    """Past 512 keys a window is not looked at, in whole rows and in blocks of them."""
    right = masks.compose

    def compose(queries, keys, *, kind=FULL, **options):
        return right(queries, keys, kind=kind if int(keys.order.max()) < 512 else FULL, **options)

    monkeypatch.setattr(masks, "compose", compose)
    monkeypatch.setattr(blocks, "plan_blocks", lambda *given: None)


@code
def blocks_miss_the_farthest(monkeypatch):
    """Where keys are gathered by blocks, each query loses the farthest key of its window."""
    right = blocks.plan_blocks

    def plan(queries, keys, kind, *more):
        shorter = Windowed(kind.size - 1) if isinstance(kind, Windowed) else kind
        return right(queries, keys, shorter, *more)

    monkeypatch.setattr(blocks, "plan_blocks", plan)


@code
def blocks_of_queries(monkeypatch):
    """The fused kernel takes long rows in blocks of 256 queries, each causal from the first key on."""
    right = KERNELS["fused"]

    def blocks(q, k, v, mask=None, bias=None, scale=None, *, causal=False, **options):
        if not causal or q.shape[2] <= 256:
            return right(q, k, v, mask, bias, scale, causal=causal, **options)
        blocks = zip(*(torch.split(x, 256, dim=2) for x in (q, k, v)))
        return torch.cat([right(*block, None, None, scale, causal=True, **options) for block in blocks], 2)

    monkeypatch.setitem(KERNELS, "fused", blocks)


@code
def source_past_512(monkeypatch):
    """Cross-attention does not see the source past its 512th token."""
    right = masks.compose

    def compose(queries, keys, **options):
        mask, causal = right(queries, keys, **options)
        if options:
            return mask, causal
        near = (keys.order < 512)[:, None, None].expand(-1, -1, queries.length, -1)
        return (near if mask is None else mask & near), causal

    monkeypatch.setattr(masks, "compose", compose)


@code
def sink_past_512(monkeypatch):
    """The sink takes no weight from more than 512 keys."""

    def wrong(kernel, q, k, *given, sink=None, **options):
        return kernel(q, k, *given, sink=sink if k.shape[2] <= 512 else None, **options)

    for name, kernel in list(KERNELS.items()):
        monkeypatch.setitem(KERNELS, name, functools.partial(wrong, kernel))


# Prompts and caches -----------------------------------------------------------------------------------------


@code
def prefill_keeps_the_last_1024(monkeypatch):
    """Of a prompt that is read in pieces, only the last 1,024 tokens are read."""
    right = decode.prefill
    monkeypatch.setattr(
        decode,
        "prefill",
        lambda model, prompts, *given: right(model, [row[-1024:] for row in prompts], *given),
    )


@code
def padding_past_the_first_piece(monkeypatch):
    """Of prompts that are read in pieces, only the first piece has a mask."""
    right = transformer.Transformer.forward

    def forward(self, ids, mask=None, *given, cache=None, **options):
        later = cache is not None and cache.length > 0
        return right(self, ids, None if later else mask, *given, cache=cache, **options)

    monkeypatch.setattr(transformer.Transformer, "forward", forward)


@code
def cache_grows_by_half(monkeypatch):
    """A cache that needs more room takes 512 tokens along."""
    right = cache.with_room

    def with_room(buffer, new, filled, room):
        larger = right(buffer, new, min(filled, 512), room)
        if larger is not buffer:
            larger[:, :, 512:] = 0  # new memory may happen to hold what was in the old
        return larger

    monkeypatch.setattr(cache, "with_room", with_room)


@code
def ring_keeps_the_first(monkeypatch):
    """Of a piece longer than the window, the ring keeps the first tokens and not the last."""
    right = caches.RingKV.update

    def update(self, k, v):
        whole, window = right(self, k, v), self.kind.slots - 1
        if k.shape[2] > window:
            self.k[:, :, :window], self.v[:, :, :window] = (x[:, :, :window] for x in (k, v))
        return whole

    monkeypatch.setattr(caches.RingKV, "update", update)


@code
def biases_of_many_rows(monkeypatch):
    """A layer of the fast copy forgets its bias where it takes more rows than its own product pays for."""
    for kind, most in ((parts.PackedLinear, parts.PACKED_ROWS.stop - 1), (NativeLinear, MOST_ROWS)):

        def forward(self, x, right=kind.forward, most=most):
            y = right(self, x)
            many = x.numel() // self.in_features > most
            return y - self.bias if many and self.bias is not None else y

        monkeypatch.setattr(kind, "forward", forward)
