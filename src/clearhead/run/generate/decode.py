"""The decode loop: prefill the prompts, then one token at a time with the cache, each row until it ends.

Prompts of unequal length are padded on the left; a row that has ended leaves the batch. A row of a batch
comes out as it would alone. Only rotary scalings that depend on length (dynamic, longrope) look at the
longest row of a call. Where longrope changes its divisors, at the trained length, all is prefilled anew with
the new ones; so are the last tokens of a text that slides, for each token past the model's positions. Dynamic
scaling changes with every token: cached keys keep the angles of their time, as in transformers, so that
generation goes its own way from a forward pass over the whole text.

Shapes: B rows still running, S source length, T prompt length, V vocabulary, D model.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import TABLES
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.learn.batches.padding import padded, real_tokens
from clearhead.run.generate.exits import ExitStep
from clearhead.run.generate.grammar import Grammars, GrammarState
from clearhead.run.generate.request import REMOVED, SINKS, Request
from clearhead.run.generate.sampling import (
    Dice,
    History,
    Standing,
    adjust_by,
    best_of,
    distribution,
    draw,
)
from clearhead.run.kernels.fixed_cache import FixedCache
from clearhead.run.kernels.kernels import without_plans
from clearhead.run.quant.cache import int8_cache
from clearhead.variants.caches import StreamCache, WindowCache, check_stream


@dataclass(frozen=True)
class Prompts:
    """What a generation reads: of each row the ids it goes on from, and, with an encoder, a source."""

    ids: Sequence[Sequence[int]]  # one token at least in each
    source: Tensor | None = None  # B S: what the encoder reads
    source_mask: Tensor | None = None  # B S: True for real tokens
    seeds: Sequence[int] | None = None  # of each row; None: the request's

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.ids))

    @property
    def sources(self) -> tuple[Tensor | None, Tensor | None]:
        """The source and its mask."""
        return self.source, self.source_mask

    @property
    def texts(self) -> list[list[int]]:
        """Of each row the ids of its source; without an encoder, of its prompt."""
        if self.source is None:
            return [list(row) for row in self.ids]
        real = (
            torch.ones_like(self.source, dtype=torch.bool) if self.source_mask is None else self.source_mask
        )
        return [row[kept].tolist() for row, kept in zip(self.source, real)]

    def rows(self, numbers: list[int]) -> "Prompts":
        """Return some rows alone; columns of the source that are padding in all of them are left out."""
        ids = [self.ids[number] for number in numbers]
        if self.source is None or self.source_mask is None:
            return Prompts(ids, None if self.source is None else self.source[numbers])
        columns = self.source_mask[numbers].any(0)
        source, mask = self.source[numbers][:, columns], self.source_mask[numbers][:, columns]
        return Prompts(ids, source, None if bool(mask.all()) else mask)


def steps_back(model: Transformer) -> bool:
    """Return True if a cache of the model can forget its last tokens: it holds keys alone, and no state."""
    return all(kind.chooses for kind in model.config.main.kinds)


def turns_by_length(model: Transformer) -> bool:
    """Return True where rotary angles depend on the length of the whole call, so on what is read together."""
    scaling = model.config.rope_scaling
    return scaling is not None and scaling.kind in ("dynamic", "longrope")


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


RESERVE = 8192  # tokens that a cache makes room for beforehand at most; beyond, it grows as they come
PREFILL_CHUNK = 1024  # longer prompts are read in pieces, so that scores of a long prompt never exist at once


@dataclass
class Continuation:
    """One row as it is generated."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)  # the new tokens
    stop_reason: str = "length"  # eos, stop, length, time or cancelled
    logprobs: list[float] = field(default_factory=list)  # of each new token, by the model's own distribution
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)  # the best tokens at each step
    steps: int = 0  # runs of the model that tokens were chosen from; fewer than tokens with speculation
    layers: list[int] = field(default_factory=list)  # of early exit: how many each new token came from


# Called with the row's number and the row after each new token; a stop reason ends the row.
OnToken = Callable[[int, Continuation], str | None]
# Changes logits [B, V], after the request's own rules, by the new tokens of each row.
Rule = Callable[[Tensor, Sequence[Sequence[int]]], Tensor]
# One more token for every row: chosen [B] and the cache -> logits [B, V].
Step = Callable[[Tensor, Cache], Tensor]


@dataclass(frozen=True)
class Ends:
    """What ends a row before its length does."""

    stop_ids: frozenset[int] = frozenset()  # tokens that end a row; the token is not part of the result
    on_token: OnToken | None = None
    cancel: Callable[[], bool] | None = None  # asked after each token; True ends every row
    deadline: float | None = None  # a `time.monotonic()` at which every row ends
    grammars: Grammars | None = None  # of a request with a constraint, which says where a row may end
    rule: Rule | None = None  # of a task, such as the order of timestamps

    def reason(self) -> str | None:
        """Return why every row must end now; None: it need not."""
        if self.cancel is not None and self.cancel():
            return "cancelled"
        return "time" if self.deadline is not None and time.monotonic() >= self.deadline else None

    def go_on(self, number: int, row: Continuation, token: int, steps: int, reason: str | None) -> bool:
        """Add a token, chosen after `steps` runs of the model; return False when the row has ended."""
        row.steps = steps
        if token in self.stop_ids:
            row.stop_reason = "eos"
            del row.logprobs[len(row.ids) :], row.alternatives[len(row.ids) :], row.layers[len(row.ids) :]
            return False
        row.ids.append(token)
        reason = (self.on_token(number, row) if self.on_token is not None else None) or reason
        row.stop_reason = reason or row.stop_reason
        return reason is None


LENGTH_ALONE = Ends()


@torch.inference_mode()
@without_plans()
def decode(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    ends: Ends = LENGTH_ALONE,
    cache: Cache | None = None,
    step: Step | None = None,
    read: Callable[[], Tensor] | None = None,
) -> list[Continuation]:
    """Continue each prompt by up to `request.max_new_tokens`.

    Args:
        model: a decoder, or an encoder and decoder with a source.
        request: how tokens are chosen, and what is reported of them.
        prompts: what the model reads.
        ends: what ends a row before that.
        cache: of a single prompt, one that holds the first of its tokens already.
        step: what runs the model on one token; None: the model itself.
        read: what reads the prompts and returns the next logits [B, V]; None: the model, into `cache`.
    """
    check_request(model, request, prompts, ends)
    rows = [Continuation(list(prompt)) for prompt in prompts.ids]
    running = list(range(len(rows)))
    chooser = Chooser(model, request, prompts, ends, rows)
    if cache is None:
        cache = cache_for(model, prompts.longest + request.max_new_tokens, request.cache)
        if streams(model, request, prompts):
            cache = StreamCache(model.config, *stream_room(model, request))
    if request.early_exit is not None:
        step = ExitStep(model, request)
    if read is not None:
        logits = read()
    else:
        logits = prefill(model, [row.prompt[cache.length :] for row in rows], cache, *prompts.sources)
    stretched = is_stretched(model, prompts.longest)
    window = model.config.max_positions if slides(model, request, prompts) else None
    for count in range(1, request.max_new_tokens + 1):
        chosen = chooser.choose(logits, running)
        tokens = chosen.tolist()
        if request.reports:
            report(logits, chosen, [rows[i] for i in running], request.alternatives)
        if isinstance(step, ExitStep):
            for i, used in zip(running, step.used.tolist() if count > 1 else itertools.repeat(step.n_layers)):
                rows[i].layers.append(used)
        reason = ends.reason()
        kept = [
            place for place, i in enumerate(running) if ends.go_on(i, rows[i], tokens[place], count, reason)
        ]
        if count == request.max_new_tokens or not kept:
            break
        if len(kept) < len(running):
            index = torch.tensor(kept, device=chosen.device)
            cache.reorder(index)
            running, chosen = [running[place] for place in kept], chosen[index]
        length = max(len(rows[i].prompt) + len(rows[i].ids) for i in running)
        over = window is not None and length > window
        if over or stretched != is_stretched(model, length):
            stretched = is_stretched(model, length)
            texts = [(rows[i].prompt + rows[i].ids)[-(window or length) :] for i in running]
            cache = cache_for(model, window or prompts.longest + request.max_new_tokens, request.cache)
            logits = prefill(model, texts, cache, *prompts.rows(running).sources)
        elif step is not None:
            logits = step(chosen, cache)
        else:
            logits = model(chosen[:, None], cache=cache, logits="last").logits[:, -1]
    return rows


def cache_for(model: Transformer, room: int, dtype: str | None = None) -> Cache:
    """Make a cache for `room` tokens; layers with a window keep rings where that halves it at least."""
    if dtype == "int8":
        return int8_cache(model.config, min(room, RESERVE))
    reaches = (kind.reach for kind in model.main.spec.kinds)
    smallest = min((reach for reach in reaches if reach is not None), default=room)
    return (WindowCache if room > 2 * smallest else Cache)(min(room, RESERVE))


def prefill(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
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
    chunk = longest if turns_by_length(model) else PREFILL_CHUNK // max(1, cache.sinks)
    for start in range(0, longest, chunk):
        piece = slice(start, start + chunk)
        part, given = None if mask is None else mask[:, piece], (source, source_mask) if start == 0 else ()
        wanted = "last" if piece.stop >= longest else "none"
        out = model(ids[:, piece], part, *given, cache=cache, logits=wanted)
    return cast(Tensor, out.logits[:, -1])


def agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens at the beginning of both are the same."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


class Chooser:
    """The next token of each row, drawn by the row's own seed."""

    def __init__(
        self,
        model: Transformer,
        request: Request,
        prompts: Prompts,
        ends: Ends,
        rows: list[Continuation],
    ) -> None:
        self.request, self.stops, self.rows, self.rule = request, ends.stop_ids, rows, ends.rule
        seeds = [request.seed] * len(rows) if prompts.seeds is None else prompts.seeds
        self.dice = Dice(seeds) if request.temperature > 0 else None
        size, device = model.config.vocab_size, next(model.parameters()).device
        self.histories: list[History] = []
        if request.looks_back:
            texts = prompts.texts if request.no_repeat_source_ngram else [()] * len(rows)
            self.histories = [
                History(row.prompt, request, size, device, source=text) for row, text in zip(rows, texts)
            ]
        self.grammars: list[GrammarState] = []
        if request.constraint is not None and ends.grammars is not None:
            self.grammars = [ends.grammars.begin(request.constraint, ends.stop_ids) for _ in rows]

    def adjusted(self, logits: Tensor, running: list[int]) -> Tensor:
        """Return the logits of these rows, equally far, after penalties and bans: [B, V] -> [B, V]."""
        histories = [self.histories[i] for i in running] if self.histories else []
        for i, history in zip(running, histories):
            history.follow(self.rows[i].ids)
        if self.grammars:
            allowed = torch.from_numpy(np.stack([self._allowed(i) for i in running])).to(logits.device)  # B V
            logits = logits.masked_fill(~allowed, REMOVED)
        written, lengths = len(self.rows[running[0]].ids), [len(self.rows[i].prompt) for i in running]
        standing = Standing(written, self.request.max_new_tokens - written, lengths, self.stops)
        logits = adjust_by(logits, self.request, histories, standing)
        return logits if self.rule is None else self.rule(logits, [self.rows[i].ids for i in running])

    def _allowed(self, number: int) -> NDArray[np.bool_]:
        row = self.rows[number]
        forced = self.request.forced_first is not None and len(row.prompt) == 1  # it is not in the grammar
        return self.grammars[number].allowed(row.ids[forced:])

    def roll(self, running: list[int]) -> Tensor:
        """Return the next uniform number of each of these rows [B]; zeros where nothing is drawn."""
        return self.dice.roll(running) if self.dice is not None else torch.zeros(len(running))

    def choose(self, logits: Tensor, running: list[int]) -> Tensor:
        """Choose the next token of these rows: [B, V] -> [B]."""
        adjusted = self.adjusted(logits, running)
        if self.dice is None:
            return best_of(adjusted, self.request)
        return draw(distribution(adjusted, self.request), self.roll(running)).to(logits.device)


def report(logits: Tensor, chosen: Tensor, rows: list[Continuation], alternatives: int) -> None:
    """Add log-probabilities under the model's own distribution, before any sampling rule."""
    values = logits.float().log_softmax(-1)
    of_chosen = values.gather(-1, chosen[:, None])[:, 0].tolist()
    best = values.topk(alternatives, dim=-1) if alternatives else None
    for place, row in enumerate(rows):
        row.logprobs.append(of_chosen[place])
        if best is not None:
            row.alternatives.append(list(zip(best.indices[place].tolist(), best.values[place].tolist())))


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
        config.head != "lm",
        f"this model's head is {config.head}: only a language model (head lm) generates",
    )
    if request.overflow == "stream":
        check_stream(config, *stream_room(model, request))
    named = {
        "allowed": request.allowed or (),
        "banned": request.banned,
        "banned_first": request.banned_first,
        "banned_sequences": [token for ids in request.banned_sequences for token in ids],
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


def prefill_right(model: Transformer, prompts: Sequence[Sequence[int]], cache: Cache) -> Tensor:
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
