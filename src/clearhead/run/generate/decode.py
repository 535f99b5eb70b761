"""The decode loop: prefill the prompts, then one token at a time with the cache, each row until it ends.

Prompts of unequal length are padded on the left; a row that has ended leaves the batch. A row of a batch
comes out as it would alone. Only rotary scalings that depend on length (dynamic, longrope) look at the
longest row of a call. Where longrope changes its divisors, at the trained length, all is prefilled anew with
the new ones; so are the last tokens of a text that slides, for each token past the model's positions. Dynamic
scaling changes with every token: cached keys keep the angles of their time, as in transformers, so that
generation goes its own way from a forward pass over the whole text.

Shapes: B rows still running, S source length, T prompt length, V vocabulary, D model.
"""

from collections import abc
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.learn.batches.ragged import padded, real_tokens
from clearhead.run.generate.checks import (
    check_request,
    is_stretched,
    slides,
    steps_back,
    stream_room,
    streams,
)
from clearhead.run.generate.exits import ExitStep
from clearhead.run.generate.request import Request
from clearhead.run.generate.sampling import NOT_NUMBERS, adjust_by, best_of
from clearhead.run.generate.sequence import LENGTH_ALONE, Ends, Prompts, Sampler, Sequence
from clearhead.run.generate.steps import CompiledStep, OnHost, Running, Steps, warn_uncompiled
from clearhead.run.kernels.fixed_cache import NOTHING, FixedCache
from clearhead.run.quant.cache import int8_cache
from clearhead.variants.caches import StreamCache, WindowCache
from clearhead.variants.cuda_attention import without_cudnn

RESERVE = 8192  # tokens that a cache makes room for beforehand at most; beyond, it grows as they come
PREFILL_CHUNK = 1024  # longer prompts are read in pieces, so that scores of a long prompt never exist at once
STEPS_PER_SYNC = 16  # greedy tokens made between two looks at them
# One more token for every row: chosen [B] and the cache -> logits [B, V].
Step = Callable[[Tensor, Cache], Tensor]


@torch.inference_mode()
@without_cudnn()  # which makes a plan for every new length: texts that grow have many
def decode(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    ends: Ends = LENGTH_ALONE,
    cache: Cache | None = None,
    step: Step | None = None,
    steps: Steps | None = None,
) -> list[Sequence]:
    """Continue each prompt by up to `request.max_new_tokens`.

    Args:
        model: a decoder, or an encoder and decoder with a source.
        request: how tokens are chosen, and what is reported of them.
        prompts: what the model reads.
        ends: what ends a row before that.
        cache: of a single prompt, one that holds the first of its tokens already.
        step: what runs the model on one token; None: the model itself.
        steps: compiled or captured steps, of which one is taken where its size is there or can be made.
    """
    check_request(model, request, prompts, ends)
    sampler = Sampler(model, request, ends)
    rows = running = sampler.begin(prompts)
    compiled = None if steps is None else _compiled(steps, model, request, prompts, cache)
    if compiled is not None:
        logits = prefill_fixed(model, prompts, compiled.cache)
        watched = ends.on_token is not None or ends.cancel is not None or ends.rule is not None
        if sampler.plain_greedy and not (watched or request.reports):
            _decode_ahead(compiled, best_of(adjust_by(logits, request), request), sampler, rows)
            return rows
        cache, step = Running(len(rows), compiled.ids.device), compiled
    else:
        if cache is None and streams(model, request, prompts):
            cache = StreamCache(model.config, *stream_room(model, request))
        elif cache is None:
            cache = cache_for(model, prompts.longest + request.max_new_tokens, request.cache)
        if request.early_exit is not None:
            step = ExitStep(model, request)
        logits = prefill(model, [row.prompt[cache.length :] for row in rows], cache, *prompts.sources)
    stretched = is_stretched(model, prompts.longest)
    window = model.config.max_positions if slides(model, request, prompts) else None
    for count in range(1, request.max_new_tokens + 1):
        chosen = sampler.choose(logits, running)
        if isinstance(step, ExitStep):
            for row, used in zip(running, step.layers):
                row.layers.append(used)
        reason = ends.reason()
        tokens = zip(running, chosen.tolist())
        kept = [place for place, (row, token) in enumerate(tokens) if row.add(token, count, reason)]
        if count == request.max_new_tokens or not kept:
            break
        if len(kept) < len(running):
            index = torch.tensor(kept, device=chosen.device)
            cache.reorder(index)
            running, chosen = [running[place] for place in kept], chosen[index]
        length = max(len(row.tokens) for row in running)
        over = window is not None and length > window
        if over or stretched != is_stretched(model, length):
            stretched = is_stretched(model, length)
            texts = [row.tokens[-(window or length) :] for row in running]
            cache = cache_for(model, window or prompts.longest + request.max_new_tokens, request.cache)
            logits = prefill(model, texts, cache, *prompts.rows([row.number for row in running]).sources)
        elif step is not None:
            logits = step(chosen, cache)
        else:
            logits = model(chosen[:, None], cache=cache, logits="last").logits[:, -1]
    return rows


def _compiled(
    steps: Steps, model: Transformer, request: Request, prompts: Prompts, cache: Cache | None
) -> CompiledStep | None:
    """Return the step of this size, where there is one, or one can be made; warn if it was asked for."""
    streaming = streams(model, request, prompts)
    if request.compile and steps.unfit is not None:
        warn_uncompiled(steps.unfit)
    if request.compile and streaming:
        warn_uncompiled("a text that streams turns its first keys anew for each token")
    plain = cache is None and request.early_exit is None and request.cache is None
    if not plain or streaming or slides(model, request, prompts):
        return None
    source = 0 if prompts.source is None else model.config.stacks[0].n_tokens(prompts.source.shape[1])
    sizes = (len(prompts.ids), prompts.longest + request.max_new_tokens, source)
    return steps.find(*sizes, compiles=bool(request.compile))


def _decode_ahead(step: CompiledStep, first: Tensor, sampler: Sampler, rows: list[Sequence]) -> None:
    """Carry on greedy rows from their first token [B]; the host reads tokens some steps later."""
    most, ends = sampler.request.max_new_tokens, sampler.ends
    running, launched, seen, unread = rows, 1, 0, [OnHost(first[:, None])]
    step.ids[: len(rows), 0] = first
    while unread and running:
        if launched < most:
            count = min(STEPS_PER_SYNC, most - launched)
            unread.append(OnHost(step.run(count)[: len(rows)]))
            launched += count
        for tokens in zip(*unread.pop(0).tolist()):
            refuse(any(tokens[row.number] == NOTHING for row in running), NOT_NUMBERS)
            seen, reason = seen + 1, ends.reason()
            running = [row for row in running if row.add(tokens[row.number], seen, reason)]


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
) -> Tensor:
    """Read the prompts, left-padded, long ones in pieces; return the logits of the next token [B, V]."""
    device = next(model.parameters()).device
    ids = padded(prompts, device=device, left=True)
    longest = ids.shape[1]
    unequal = any(len(prompt) < longest for prompt in prompts)
    mask = real_tokens(prompts, device, left=True) if unequal else None
    # Each token of a piece has sinks of its own.
    chunk = longest if model.config.rotates_by_length else PREFILL_CHUNK // max(1, cache.n_sink_tokens)
    for start in range(0, longest, chunk):
        piece = slice(start, start + chunk)
        part, given = None if mask is None else mask[:, piece], (source, source_mask) if start == 0 else ()
        wanted = "last" if piece.stop >= longest else "none"
        out = model(ids[:, piece], part, *given, cache=cache, logits=wanted)
    return cast(Tensor, out.logits[:, -1])


def greedy(
    model: Transformer,
    ids: Tensor,
    max_new_tokens: int,
    mask: Tensor | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    stop: int | None = None,
) -> Tensor:
    """Return the most probable tokens [B, N] after prompts [B, T]; ended rows are filled up with `stop`."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    prompts = Prompts([row[kept].tolist() for row, kept in zip(ids, real)], source, source_mask)
    ends = Ends(frozenset(() if stop is None else (stop,)))
    rows = decode(model, Request(max_new_tokens=max_new_tokens), prompts, ends)
    length = max(len(row.ids) + (row.stop_reason == "eos") for row in rows)
    return torch.tensor([row.ids + [stop or 0] * (length - len(row.ids)) for row in rows], device=ids.device)


TOGETHER = 8192  # tokens of prompts, padding included, that keep a GPU busy; more rows only add padding


def prefill_fixed(model: Transformer, prompts: Prompts, fixed: FixedCache) -> Tensor:
    """Prefill a fixed cache, prompts of like length together, which keeps padding small: logits [B, V]."""
    fixed.begin_at(prompts.longest)
    device, groups, logits = fixed.cursor.device, length_buckets([len(row) for row in prompts.ids]), []
    # A state would take up padding that comes last.
    right = prompts.source is None and model.main.spec.causal and steps_back(model)
    for numbers in groups:
        cache, rows, some = Cache(), torch.tensor(numbers, device=device), prompts.rows(numbers)
        if right and len({len(row) for row in some.ids}) > 1:
            logits.append(prefill_right(model, some.ids, cache))
            fixed.adopt_rows(cache, rows, torch.tensor([len(row) for row in some.ids], device=device))
        else:
            logits.append(prefill(model, some.ids, cache, *some.sources))
            fixed.adopt_rows(cache, rows)
    places = torch.tensor([number for numbers in groups for number in numbers], device=device)
    return torch.cat(logits)[places.argsort()]


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
