"""Prefill: run prompts through the model, so that a cache holds all that decoding goes on from.

Prompts of unequal length are padded on the left, and long ones are read in chunks. For a cache of fixed size
prompts of like length are read together, where it can be with padding on the right, which takes no mask.

Shapes: B rows, N tokens of a chunk, V vocabulary, D model.
"""

from collections import abc
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.transformer import Transformer
from clearhead.learn.batches.ragged import padded, real_tokens
from clearhead.run.generate.sequence import Prompts
from clearhead.run.generate.vectors import PromptVectors, Span, embedded
from clearhead.run.kernels.fixed_cache import FixedCache
from clearhead.run.quant.cache import int8_cache
from clearhead.variants.caches import WindowCache

RESERVE = 8192  # tokens that a cache makes room for beforehand at most; beyond, it grows as they come
PREFILL_CHUNK = 1024  # longer prompts are read in chunks, so that scores of a long prompt never exist at once
TOGETHER = 8192  # tokens of prompts, padding included, that keep a GPU busy; more rows only add padding


def cache_for(model: Transformer, room: int, dtype: str | None = None) -> Cache:
    """Make a cache for `room` tokens; layers with a window keep rings where that halves it at least."""
    if dtype == "int8":
        return int8_cache(model.config, min(room, RESERVE))
    reaches = (kind.reach for kind in model.main.spec.kinds)
    smallest = min((reach for reach in reaches if reach is not None), default=room)
    return (WindowCache if room > 2 * smallest else Cache)(min(room, RESERVE))


def prefill(
    model: Transformer,
    prompts: abc.Sequence[abc.Sequence[int]],
    cache: Cache,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    vectors: abc.Sequence[PromptVectors | None] | None = None,
    seen: Callable[[int, Tensor], None] = lambda start, states: None,
) -> Tensor:
    """Read the prompts, left-padded, long ones in chunks; return the logits of the next token [B, V].

    `vectors`: those of each prompt, which begins before what the cache holds of it already.
    `seen` is told of the states [B, N, D] of each chunk, and of the slot where it begins.
    """
    device = next(model.parameters()).device
    ids = padded(prompts, device=device, left=True)
    longest = ids.shape[1]
    unequal = any(len(prompt) < longest for prompt in prompts)
    mask = real_tokens(prompts, device, left=True) if unequal else None
    first, spans = cache.length, zip(prompts, vectors or ())
    x = embedded(
        model,
        ids,
        (Span(own, first, first + len(p), longest - len(p), row) for row, (p, own) in enumerate(spans)),
    )
    # Each token of a chunk has sinks of its own.
    size = longest if model.config.rotates_by_length else PREFILL_CHUNK // max(1, cache.n_sink_tokens)
    for start in range(0, longest, size):
        chunk = slice(start, start + size)
        part, given = None if mask is None else mask[:, chunk], (source, source_mask) if start == 0 else ()
        wanted = "last" if chunk.stop >= longest else "none"
        more = {} if x is None else {"vectors": x[:, chunk]}
        before = cache.length
        out = model(ids[:, chunk], part, *given, cache=cache, logits=wanted, **more)
        seen(before, out.hidden)
    return cast(Tensor, out.logits[:, -1])


def prefill_fixed(model: Transformer, prompts: Prompts, fixed: FixedCache) -> Tensor:
    """Prefill a fixed cache, prompts of like length together, which keeps padding small: logits [B, V]."""
    fixed.begin_at(prompts.longest)
    device, groups, logits = fixed.cursor.device, length_buckets([len(row) for row in prompts.ids]), []
    # A state would take up padding that comes last.
    right = (
        prompts.source is None and prompts.vectors is None and model.main.spec.causal and steps_back(model)
    )
    for numbers in groups:
        cache, rows, some = Cache(), torch.tensor(numbers, device=device), prompts.rows(numbers)
        if right and len({len(row) for row in some.ids}) > 1:
            logits.append(prefill_right(model, some.ids, cache))
            fixed.adopt_rows(cache, rows, torch.tensor([len(row) for row in some.ids], device=device))
        else:
            logits.append(prefill(model, some.ids, cache, *some.sources, vectors=some.vectors))
            fixed.adopt_rows(cache, rows)
    order = torch.tensor([number for numbers in groups for number in numbers], device=device)
    return torch.cat(logits)[order.argsort()]


def length_buckets(lengths: list[int]) -> list[list[int]]:
    """Return the numbers of the rows in groups, each of `TOGETHER` tokens at least with its padding."""
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (lengths[number] == longest or longest * len(groups[-1]) < TOGETHER):
            groups[-1].append(number)
        else:
            groups.append([number])
    return [sorted(group) for group in groups]


def prefill_right(model: Transformer, prompts: abc.Sequence[abc.Sequence[int]], cache: Cache) -> Tensor:
    """`prefill` with padding on the right, which no token before it sees: it takes no mask."""
    chunk = PREFILL_CHUNK
    ids = padded(prompts, device=next(model.parameters()).device)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=ids.device)
    rows = torch.arange(len(prompts), device=ids.device)
    states = torch.empty(0)
    for start in range(0, ids.shape[1], chunk):
        hidden = model(ids[:, start : start + chunk], cache=cache, logits="none").hidden
        found = hidden[rows, (last - start).clamp(0, hidden.shape[1] - 1)]  # B D
        states = found if start == 0 else torch.where((last >= start)[:, None], found, states)
    return cast(Tensor, model.head(states[:, None], None)[:, -1])


def steps_back(model: Transformer) -> bool:
    """Return True if a cache of the model can forget its last tokens: it holds keys alone, and no state."""
    return not any(kind.stateful for kind in model.config.main.kinds)
