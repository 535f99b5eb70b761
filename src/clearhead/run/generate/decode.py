"""The decode loop: prefill the prompts, then one token at a time with the cache, each row until it ends.

Prompts of unequal length are padded on the left; a row that has ended leaves the batch. A row of a batch
comes out as it would alone. Only rotary scalings that depend on length (dynamic, longrope) look at the
longest row of a call. Where longrope changes its divisors, at the trained length, all is prefilled anew with
the new ones; so are the last tokens of a text that slides, for each token past the model's positions. Dynamic
scaling changes with every token: cached keys keep the angles of their time, as in transformers, so that
generation goes its own way from a forward pass over the whole text.

On a GPU the step of a token is captured as one CUDA graph, made once for a size of batch and cache. Where
asked, and then on a CPU too, it is compiled first. Sizes go by a few coarse buckets, so that prompts of all
lengths share a handful of steps. A row that has ended runs on unseen.

Shapes: B rows still running, S source length, T prompt length, V vocabulary, D model.
"""

import math
import warnings
from collections import abc
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import TABLES
from clearhead.core.transformer import Transformer
from clearhead.errors import first_line, refuse
from clearhead.learn.batches.ragged import padded, real_tokens
from clearhead.run.generate.exits import ExitStep
from clearhead.run.generate.request import SINKS, Request
from clearhead.run.generate.sequence import (
    LENGTH_ALONE,
    NOT_NUMBERS,
    Ends,
    Prompts,
    Sampler,
    Sequence,
    adjust_by,
    best_of,
)
from clearhead.run.generate.vectors import PromptVectors, Span, embedded
from clearhead.run.kernels.cuda_graph import captured
from clearhead.run.kernels.fixed_cache import NOTHING, FixedCache
from clearhead.run.kernels.kernels import choose
from clearhead.run.quant.cache import int8_cache
from clearhead.variants.caches import StreamCache, WindowCache, check_stream
from clearhead.variants.cuda_attention import without_cudnn

SMALLEST_SLOTS = 512  # slots of the smallest cache; larger ones double
CAPTURED_SHARE = 0.25  # of a GPU's memory, for the keys of captured CUDA graphs that no call uses
# Matmuls with one row become fused reductions, which read weights faster than the library's matmul.
COMPILER_OPTIONS: dict[str, Any] = {"coordinate_descent_tuning": True, "triton.cudagraphs": False}


def rows_bucket(rows: int) -> int:
    """Round up to 1, 2, 4, 8, or a multiple of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else 8 * math.ceil(rows / 8)


def slots_bucket(slots: int, smallest: int = SMALLEST_SLOTS) -> int:
    """Double the smallest size until it is enough."""
    return max(smallest, 1 << (slots - 1).bit_length())


class CompiledStep:
    """One more token for each of `rows` rows, with room for `slots` tokens each.

    With `backend` None the step is not compiled, but captured as it is; this takes a GPU.
    """

    def __init__(
        self, model: Transformer, rows: int, slots: int, source: int = 0, backend: str | None = "inductor"
    ) -> None:
        weight = next(model.parameters())
        device, self.model = weight.device, model
        self.cache = FixedCache(model.config, rows, slots, weight.dtype, device, source)
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)  # what goes in next
        # By slot: the most probable token after it.
        self.made = torch.zeros(rows, slots, dtype=torch.long, device=device)
        self.logits = torch.zeros(rows, model.config.vocab_size, dtype=weight.dtype, device=device)
        self._forward()  # parts of the model make now what they make at first use, before the compiler
        run: Callable[[], object] = self._forward
        if backend is not None:
            options = COMPILER_OPTIONS if backend == "inductor" and device.type == "cuda" else None
            # The compiler keeps what it made by code object, a few for each: a step has one of its own.
            step = FunctionType(CompiledStep._forward.__code__.replace(), globals())
            run = torch.compile(
                MethodType(step, self), fullgraph=True, dynamic=False, backend=backend, options=options
            )
            run()
        self.replay = run if backend is None else self._or_uncompiled(run)
        if device.type == "cuda":
            self.replay = captured(run)

    def _forward(self) -> None:
        logits = self.model(self.ids, cache=self.cache, logits="last").logits[:, -1]
        choose(logits, self.cache.index, self.made, self.ids, self.logits)

    def _or_uncompiled(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return `run` with a way out, for a setting of the process that changes and will not compile."""
        compiler = torch._dynamo.exc

        def attempt() -> None:
            try:
                run()
            except (compiler.TorchDynamoException, compiler.FailOnRecompileLimitHit) as error:
                warn_uncompiled(first_line(error))  # it failed before anything ran
                self.replay = self._forward
                self.replay()

        return attempt

    def __call__(self, chosen: Tensor, cache: Cache) -> Tensor:
        """Run as a `Step` of `decode`, with the rows that are `Running`: chosen [B] -> logits [B, V]."""
        assert isinstance(cache, Running)
        self.ids[cache.row_index, 0] = chosen
        self.run(1)
        return self.logits[cache.row_index]

    def run(self, count: int) -> Tensor:
        """Run `count` times, each time on the most probable token; return those tokens [B, count]."""
        start = self.cache.length
        for _ in range(count):
            self.replay()
        # A step that runs uncompiled, because someone watches, counts by itself.
        self.cache.length = start + count
        return self.made[:, start : start + count]


class OnHost:
    """An asynchronous copy of a tensor to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.copy.copy_(tensor, non_blocking=True)
        self.arrived = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self.arrived is not None:
            self.arrived.record()

    def tolist(self) -> list[list[int]]:
        """Wait for the copy, and return its numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return cast(list[list[int]], self.copy.tolist())


class Running(Cache):
    """The rows of a fixed cache that have not ended."""

    def __init__(self, rows: int, device: torch.device) -> None:
        super().__init__()
        self.row_index = torch.arange(rows, device=device)

    def reorder(self, rows: Tensor, cross: bool = True) -> None:
        """Keep these rows, as in `Cache`; in the fixed cache nothing moves."""
        self.row_index = self.row_index[rows]


class Steps:
    """The steps of one model by size, each made when first needed and kept.

    On a GPU a step is captured as a CUDA graph, which takes a second; one that was compiled, which takes a
    minute, is quicker and is used once it is there.
    """

    def __init__(self, model: Transformer, backend: str = "inductor") -> None:
        self.model, self.backend = model, backend
        self.made: dict[tuple[int, int, int], CompiledStep] = {}
        self.captured: dict[tuple[int, int, int], CompiledStep] = {}  # the one used last comes last
        reasons = {
            "its experts are chosen on the host": model.config.n_experts > 0,
            "its layers take some tokens alone": min(model.config.main.capacities) < 1,
            "its angles depend on the longest row in the batch": model.config.rotates_by_length,
        }
        self.unfit = next(
            (reason for reason, holds in reasons.items() if holds), None
        )  # why none can be made
        self.captures = next(model.parameters()).is_cuda and self.unfit is None

    def find(self, rows: int, slots: int, source: int, compiles: bool) -> CompiledStep | None:
        """Return the step for these sizes, compiled if asked; None where none can be made."""
        size = (rows_bucket(rows), slots_bucket(slots), slots_bucket(source, 64) if source else 0)
        if size not in self.made and compiles and self.unfit is None:
            self.captured.pop(size, None)
            try:
                self.made[size] = CompiledStep(self.model, *size, backend=self.backend)
            except Exception as error:  # compilers fail in many ways, and none is a reason not to generate
                self.unfit = first_line(error)
                warn_uncompiled(self.unfit)
        return self.made.get(size) or self._capture(size)

    def _capture(self, size: tuple[int, int, int]) -> CompiledStep | None:
        """Return the captured step of this size; None where it cannot be captured, or has no room."""
        step = self.captured.pop(size, None)
        if step is None and self.captures:
            try:
                step = CompiledStep(self.model, *size, backend=None)
            except torch.OutOfMemoryError:  # a growing cache needs less
                self.captured.clear()
            except Exception:  # something that a CUDA graph cannot hold, such as a copy to the host
                self.captures = False
        if step is not None:
            self.captured[size] = step
            most = torch.cuda.get_device_properties(step.ids.device).total_memory * CAPTURED_SHARE
            while len(self.captured) > 1 and sum(step.cache.nbytes for step in self.captured.values()) > most:
                self.captured.pop(next(iter(self.captured)))
        return step


def warn_uncompiled(reason: str) -> None:
    """Warn that the step runs uncompiled."""
    warnings.warn(f"the decode step runs uncompiled: {reason}", RuntimeWarning, stacklevel=2)


RESERVE = 8192  # tokens that a cache makes room for beforehand at most; beyond, it grows as they come
PREFILL_CHUNK = 1024  # longer prompts are read in chunks, so that scores of a long prompt never exist at once
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
        unread = [row.prompt[cache.length :] for row in rows]
        logits = prefill(model, unread, cache, *prompts.sources, vectors=prompts.vectors)
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
            some = prompts.rows([row.number for row in running])
            logits = prefill(model, texts, cache, *some.sources, vectors=some.vectors)
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
