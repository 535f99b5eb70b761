"""The decode loop: prefill the prompts, then one token at a time with the cache, each row until it ends.

`decode` checks a request, begins a `Sequence` for each prompt, and drives a runner until all have ended:

- `GrowingRows` run together, with a cache that grows. A row that has ended leaves the batch. A row comes out
  as it would alone. Only rotary scalings that depend on length (dynamic, longrope) look at the longest row of
  a call. Where longrope changes its divisors, at the trained length, all is prefilled anew with the new ones;
  so are the last tokens of a text that slides, for each token past the model's positions. Dynamic scaling
  changes with every token: cached keys keep the angles of their time, as in transformers, so that generation
  goes its own way from a forward pass over the whole text.
- `FixedRows` run together by a step that was captured as a CUDA graph or compiled, with a cache of fixed
  size. A row that has ended runs on unseen. Where nobody looks at tokens as they come, greedy ones are read
  some steps later.
- A `DraftedRow` runs alone, with draft tokens, of which each run of the model verifies several.

Prompts are prefilled with padding on the left, long ones in chunks. For a cache of fixed size those of like
length are read together, with padding on the right where that can be, which takes no mask.

Shapes: B rows still running, S source length, T prompt length, N tokens of a chunk, V vocabulary, D model.
"""

from collections import abc
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import TABLES
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.learn.batches.ragged import padded, real_tokens
from clearhead.run.generate.exits import ExitStep
from clearhead.run.generate.request import SINKS, Request
from clearhead.run.generate.sequence import (
    LENGTH_ALONE,
    NOT_NUMBERS,
    Drafter,
    Ends,
    Prompts,
    Sampler,
    Sequence,
    adjust_by,
    best_of,
    verify,
)
from clearhead.run.generate.vectors import PromptVectors, Span, axes_of, embedded
from clearhead.run.kernels.fixed_cache import NOTHING, FixedCache
from clearhead.run.kernels.steps import CompiledStep, OnHost, Steps, warn_uncompiled
from clearhead.run.quant.cache import int8_cache
from clearhead.variants.caches import StreamCache, WindowCache, check_stream
from clearhead.variants.cuda_attention import without_cudnn

RESERVE = 8192  # tokens that a cache makes room for beforehand at most; beyond, it grows as they come
PREFILL_CHUNK = 1024  # longer prompts are read in chunks, so that scores of a long prompt never exist at once
TOGETHER = 8192  # tokens of prompts, padding included, that keep a GPU busy; more rows only add padding
STEPS_PER_SYNC = 16  # greedy tokens made between two looks at them


@torch.inference_mode()
@without_cudnn()  # which makes a plan for every new length: texts that grow have many
def decode(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    ends: Ends = LENGTH_ALONE,
    cache: Cache | None = None,
    steps: Steps | None = None,
    drafters: abc.Sequence[Drafter] = (),
) -> list[Sequence]:
    """Continue each prompt by up to `request.max_new_tokens`.

    Args:
        model: a decoder, or an encoder and decoder with a source.
        request: how tokens are chosen, and what is reported of them.
        prompts: what the model reads.
        ends: what ends a row before that.
        cache: of a single prompt, one that holds the first of its tokens already.
        steps: compiled or captured steps, of which one is taken where its size is there or can be made.
        drafters: one for each row, where draft tokens are verified; they take no steps.
    """
    check_request(model, request, prompts, ends)
    check_drafting(model, request, prompts, drafters)
    sampler = Sampler(model, request, ends)
    rows = sampler.begin(prompts)
    if drafters:
        drafted = [DraftedRow(model, sampler, prompts, row, drafters[row.number], cache) for row in rows]
        while drafted:
            drafted = [row for row in drafted if row.step()]
        return rows
    compiled = None if steps is None else _compiled(steps, model, request, prompts, cache)
    if compiled is None:
        _decode_together(GrowingRows(model, request, prompts, cache), sampler, rows)
        return rows
    fixed = FixedRows(model, prompts, compiled)
    watched = ends.on_token is not None or ends.cancel is not None or ends.rule is not None
    if sampler.plain_greedy and not (watched or request.reports):
        _decode_ahead(fixed, sampler, rows)
    else:
        _decode_together(fixed, sampler, rows)
    return rows


class GrowingRows:
    """Runs rows of one request together, with a cache that grows."""

    def __init__(self, model: Transformer, request: Request, prompts: Prompts, cache: Cache | None) -> None:
        self.model, self.request, self.prompts = model, request, prompts
        self.room = prompts.longest + request.max_new_tokens
        self.window = model.config.max_positions if slides(model, request, prompts) else None
        self.exit = None if request.early_exit is None else ExitStep(model, request)
        self.stretched = is_stretched(model, prompts.longest)
        if cache is None and streams(model, request, prompts):
            cache = StreamCache(model.config, *stream_room(model, request))
        self.cache = cache_for(model, self.room, request.cache) if cache is None else cache

    def prefill(self, rows: list[Sequence]) -> Tensor:
        """Run the prompts, but for what the cache holds of them; return the logits after them [B, V]."""
        return self._read([row.prompt[self.cache.length :] for row in rows], self.prompts, rows)

    def step(self, chosen: Tensor, rows: list[Sequence]) -> Tensor:
        """Run the last token of each row: chosen [B] -> logits [B, V]."""
        length = max(len(row.tokens) for row in rows)
        over = self.window is not None and length > self.window
        if over or self.stretched != is_stretched(self.model, length):
            self.stretched = is_stretched(self.model, length)
            self.cache = cache_for(self.model, self.window or self.room, self.request.cache)
            texts = [row.tokens[-(self.window or length) :] for row in rows]
            return self._read(texts, self.prompts.rows([row.number for row in rows]), rows)
        if self.exit is None:
            logits: Tensor = self.model(chosen[:, None], cache=self.cache, logits="last").logits[:, -1]
            return logits
        logits = self.exit(chosen, self.cache)
        for row, used in zip(rows, self.exit.used.tolist()):
            row.layers.append(used)
        return logits

    def keep(self, index: Tensor) -> None:
        """Go on with some of the rows, by their positions among those that run [B]."""
        self.cache.reorder(index)

    def _read(self, texts: list[list[int]], prompts: Prompts, rows: list[Sequence]) -> Tensor:
        if self.exit is not None:
            for row in rows:
                row.layers.append(self.exit.n_layers)
        return prefill(self.model, texts, self.cache, *prompts.sources, vectors=prompts.vectors)


class FixedRows:
    """Runs rows of one request together, by a captured or compiled step with a cache of fixed size."""

    def __init__(self, model: Transformer, prompts: Prompts, compiled: CompiledStep) -> None:
        self.model, self.prompts, self.compiled = model, prompts, compiled
        self.index = torch.arange(len(prompts.ids), device=compiled.ids.device)  # B: rows of the step

    def prefill(self, rows: list[Sequence]) -> Tensor:
        """Run the prompts; return the logits after them [B, V]."""
        return prefill_fixed(self.model, self.prompts, self.compiled.cache)

    def step(self, chosen: Tensor, rows: list[Sequence]) -> Tensor:
        """Run the last token of each row: chosen [B] -> logits [B, V]."""
        return self.compiled(chosen, self.index)

    def keep(self, index: Tensor) -> None:
        """Go on with some of the rows; in the cache nothing moves."""
        self.index = self.index[index]


class DraftedRow:
    """Runs one row, whose drafter proposes tokens that each run of the model verifies."""

    def __init__(
        self,
        model: Transformer,
        sampler: Sampler,
        prompts: Prompts,
        row: Sequence,
        drafter: Drafter,
        cache: Cache | None,
    ) -> None:
        """Run the prompt, all but its last token, which runs with the first draft tokens."""
        self.model, self.sampler, self.row, self.drafter = model, sampler, row, drafter
        self.most, self.source = sampler.request.max_new_tokens, prompts.rows([row.number]).sources
        self.cache = Cache(min(len(row.prompt) + self.most, RESERVE)) if cache is None else cache
        unread = row.prompt[self.cache.length : -1]
        if unread:
            prefill(model, [unread], self.cache, *self.source, vectors=[row.vectors], seen=drafter.observe)

    def step(self) -> bool:
        """Add a token or more in one run of the model; return False when the row has ended."""
        row, cache, start = self.row, self.cache, self.cache.length
        most = self.most - len(row.ids) - 1
        proposal = self.drafter.propose(row.tokens, most, lambda: self.sampler.roll([row]))
        unread = torch.tensor([row.tokens[start:] + proposal.tokens], device=self.sampler.size[1])
        x = embedded(self.model, unread, [Span(row.vectors, start, len(row.prompt))])
        more = {} if x is None else {"vectors": x}
        axes = None if row.vectors is None else row.vectors.axes_at(start, start + unread.shape[1])
        more |= {} if axes is None else {"axes": axes[None].to(unread.device)}
        out = self.model(unread, None, *self.source, cache=cache, **more)
        self.drafter.observe(start, out.hidden)
        logits = out.logits[0]  # N+1 V
        goes_on = verify(self.sampler, row, ((here, None) for here in logits.split(1)), proposal)
        cache.crop(min(cache.length, len(row.tokens) - 1))  # the keys of rejected draft tokens go
        return goes_on


def _decode_together(runner: GrowingRows | FixedRows, sampler: Sampler, running: list[Sequence]) -> None:
    """Take rows a token further at a time, each until it ends."""
    most, ends, logits = sampler.request.max_new_tokens, sampler.ends, runner.prefill(running)
    for count in range(1, most + 1):
        chosen = sampler.choose(logits, running)
        reason = ends.reason()
        tokens = zip(running, chosen.tolist())
        kept = [place for place, (row, token) in enumerate(tokens) if row.add(token, count, reason)]
        if count == most or not kept:
            break
        if len(kept) < len(running):
            index = torch.tensor(kept, device=chosen.device)
            runner.keep(index)
            running, chosen = [running[place] for place in kept], chosen[index]
        logits = runner.step(chosen, running)


def _decode_ahead(fixed: FixedRows, sampler: Sampler, rows: list[Sequence]) -> None:
    """Take greedy rows further on the device; the host reads their tokens some steps later."""
    step, request, ends = fixed.compiled, sampler.request, sampler.ends
    first, most = best_of(adjust_by(fixed.prefill(rows), request), request), request.max_new_tokens
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


def _compiled(
    steps: Steps, model: Transformer, request: Request, prompts: Prompts, cache: Cache | None
) -> CompiledStep | None:
    """Return the step of this size, where there is one, or one can be made; warn if it was asked for."""
    streaming = streams(model, request, prompts)
    counted = any(own is not None and own.axes is not None for own in prompts.vectors or ())
    if request.compile and counted:
        warn_uncompiled("positions on several axes are counted on by a cache that grows")
    if request.compile and steps.unfit is not None:
        warn_uncompiled(steps.unfit)
    if request.compile and streaming:
        warn_uncompiled("a text that streams turns its first keys anew for each token")
    plain = cache is None and request.early_exit is None and request.cache is None
    plain &= not counted
    if not plain or streaming or slides(model, request, prompts):
        return None
    source = 0 if prompts.source is None else model.config.stacks[0].n_tokens(prompts.source.shape[1])
    sizes = (len(prompts.ids), prompts.longest + request.max_new_tokens, source)
    return steps.find(*sizes, compiles=bool(request.compile))


# Prefill --------------------------------------------------------------------------------------------------


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
    first, both = cache.length, enumerate(zip(prompts, vectors or ()))
    spans = [Span(own, first, first + len(p), longest - len(p), row) for row, (p, own) in both]
    x = embedded(model, ids, spans)
    axes = axes_of(spans, first + (torch.ones_like(ids) if mask is None else mask).cumsum(1) - 1)
    # Each token of a chunk has sinks of its own.
    size = longest if model.config.rotates_by_length else PREFILL_CHUNK // max(1, cache.n_sink_tokens)
    for start in range(0, longest, size):
        chunk = slice(start, start + size)
        part, given = None if mask is None else mask[:, chunk], (source, source_mask) if start == 0 else ()
        wanted = "last" if chunk.stop >= longest else "none"
        more = {} if x is None else {"vectors": x[:, chunk]}
        more |= {} if axes is None else {"axes": axes[:, chunk]}
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
    return not model.config.main.stateful


# Checks ---------------------------------------------------------------------------------------------------


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


def slides(model: Transformer, request: Request, prompts: Prompts) -> bool:
    """Return True where a text may pass the model's positions, and its last tokens are to be read alone."""
    longest = prompts.longest + request.max_new_tokens - 1
    return request.overflow == "slide" and prompts.source is None and longest > model.config.max_positions


def stream_room(model: Transformer, request: Request) -> tuple[int, int]:
    """Return how many tokens a text that streams keeps, and how many of them are sinks."""
    sinks = SINKS if request.sinks is None else request.sinks
    return request.stream_window or model.config.max_positions, sinks


def streams(model: Transformer, request: Request, prompts: Prompts) -> bool:
    """Return True where a text may pass what is kept of it, and its first and last tokens are kept alone."""
    longest = prompts.longest + request.max_new_tokens - 1
    return request.overflow == "stream" and longest > stream_room(model, request)[0]


def is_stretched(model: Transformer, length: int) -> bool:
    """Return True where longrope takes its long divisors, which turn even the first tokens otherwise."""
    scaling = model.config.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return False
    return length > (scaling.original_positions or model.config.max_positions)


def check_steps_back(*models: Transformer) -> None:
    """Refuse models that cannot take a rejected token back."""
    refuse(
        not all(map(steps_back, models)),
        "a layer of the model, or of its draft, keeps a state that cannot take a rejected token back: "
        "leave lookup and draft out",
    )


def check_drafting(
    model: Transformer, request: Request, prompts: Prompts, drafters: abc.Sequence[Drafter]
) -> None:
    """Raise `InputError` where a row cannot take rejected draft tokens back."""
    if not drafters:
        return
    check_steps_back(model, *(drafter.model for drafter in drafters if drafter.model is not None))
    refuse(
        model.config.rotates_by_length or slides(model, request, prompts) or streams(model, request, prompts),
        "this text is read anew, or forgotten, as it grows past a length: leave lookup and draft out",
    )


def check_request(model: Transformer, request: Request, prompts: Prompts, ends: Ends) -> None:
    """Raise `InputError` where the model cannot do what is asked."""
    check_options(model, request, ends)
    config = model.config
    refuse(
        not prompts.ids or not all(map(len, prompts.ids)),
        "a prompt is empty: give one token at least, such as the beginning-of-text token",
    )
    sliding = slides(model, request, prompts)
    refuse(
        request.overflow in ("slide", "stream") and any(prompts.vectors or ()),
        f"overflow {request.overflow} with images, whose tokens would be forgotten one by one: leave it out",
    )
    refuse(
        sliding and (request.num_beams > 1 or prompts.longest > config.max_positions),
        f"beams and prompts of more than {config.max_positions} tokens, the model's positions, do not slide: "
        "leave beams out, shorten the prompt, or ask for fewer new tokens",
    )
    refuse(
        sliding and request.early_exit is not None,
        f"early_exit with a text that slides past the model's {config.max_positions} positions, and is read "
        "anew for each token: leave early_exit out, or ask for fewer new tokens",
    )
    needed = prompts.longest + request.max_new_tokens - 1
    refuse(
        config.positions in TABLES and needed > config.max_positions and not sliding,
        f"a prompt of {prompts.longest} tokens and {request.max_new_tokens} new ones need {needed} "
        f"positions and the model has {config.max_positions}: shorten one of them, or choose "
        "overflow slide, which keeps the last tokens of the text as it grows, or window, those of the prompt",
    )


def check_options(model: Transformer, request: Request, ends: Ends) -> None:
    """Raise `InputError` where the model cannot do what is asked, whatever the prompts are."""
    config, size = model.config, model.config.vocab_size
    refuse(
        config.head != "lm", f"this model's head is {config.head}: only a language model (head lm) generates"
    )
    if request.overflow == "stream":
        check_stream(config, *stream_room(model, request))
    named = {
        "allowed": request.allowed or (),
        "banned": request.banned,
        "banned_first": request.banned_first,
        "banned_sequences": [token for ids in request.banned_sequences for token in ids],
        "logit_bias": [token for token, _ in request.logit_bias],
        "forced_first": () if request.forced_first is None else (request.forced_first,),
        "forced_last": request.forced_last,
        "stop_ids": ends.stop_ids,
    }
    for name, tokens in named.items():
        refuse(
            any(not 0 <= token < size for token in tokens),
            f"{name} names a token outside the vocabulary: ids go from 0 to {size - 1}",
        )
    refuse(
        not 0 <= request.alternatives <= size,
        f"alternatives {request.alternatives} must lie between 0 and vocab_size {size}",
    )
