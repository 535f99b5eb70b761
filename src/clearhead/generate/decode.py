"""The decode loop: prompts in one pass, then one token at a time with the cache, each row until it ends.

Prompts of unequal length are padded on the left; a row that has ended leaves the batch. What comes out of a batch is
what each row gives alone; only rotary scalings that go by length (dynamic, longrope) look at the longest row of a call.

Shapes: B rows still running, T prompt length, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.generate.sampling import Dice, History, Sampling, adjust_by, distribution, draw
from clearhead.model.cache import Cache
from clearhead.model.transformer import Transformer
from clearhead.model.window_cache import WindowCache

RESERVE = 8192  # tokens that a cache makes room for beforehand at most; beyond, it grows as they come
PREFILL_CHUNK = 1024  # longer prompts are read in pieces, so that scores of a long prompt never exist at once


@dataclass
class Row:
    """One sequence as it is generated."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)  # the new tokens
    stop_reason: str = "length"  # eos, stop, length, time or cancelled
    logprobs: list[float] = field(
        default_factory=list
    )  # of each new token, under the model's own distribution
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)  # the best tokens at each step
    steps: int = (
        0  # runs of the model that tokens were chosen from; fewer than tokens where speculation gains
    )


# Called with the row's number and the row after each new token; a stop reason ends the row.
OnToken = Callable[[int, Row], str | None]
# One more token for every row: chosen [B] and the cache -> logits [B, V].
Step = Callable[[Tensor, Cache], Tensor]


@torch.inference_mode()
def decode(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    alternatives: int = 0,
    logprobs: bool = False,
    on_token: OnToken | None = None,
    deadline: float | None = None,
    cancel: Callable[[], bool] | None = None,
    cache: Cache | None = None,
    step: Step | None = None,
) -> list[Row]:
    """Continue each prompt by up to `max_new_tokens`.

    Args:
        model: a decoder, or an encoder and decoder with `source` [B, S].
        prompts: ids of each row, one at least.
        max_new_tokens: where every row ends at the latest.
        sampling: how tokens are chosen; None: greedy.
        stop_ids: tokens that end a row; the token itself is not part of the result.
        seeds: one per row, where sampling draws.
        source: what the encoder reads.
        source_mask: [B, S] boolean.
        alternatives: how many of the best tokens to report at each step.
        logprobs: report log-probabilities.
        on_token: see `OnToken`.
        deadline: a `time.monotonic()` at which to stop.
        cancel: asked after each token; True ends every row.
        cache: of a single prompt, one that holds the first of its tokens already.
        step: what runs the model on one token; None: the model itself.
    """
    sampling = sampling or Sampling()
    check_request(model, prompts, max_new_tokens, sampling, alternatives, stop_ids)
    rows = [Row(list(prompt)) for prompt in prompts]
    running = list(range(len(rows)))
    chooser = Chooser(sampling, rows, seeds, model)
    ends = Ends(frozenset(stop_ids), on_token, deadline, cancel)
    if cache is None:
        cache = cache_for(model, max(map(len, prompts)) + max_new_tokens)
    step = step or _stepping(model)
    unread = [row.prompt[cache.length :] for row in rows]
    logits = prefill(model, unread, cache, source, source_mask)
    for count in range(1, max_new_tokens + 1):
        chosen = chooser.choose(logits, running)
        tokens = chosen.tolist()
        if logprobs or alternatives:
            report(logits, chosen, [rows[i] for i in running], alternatives)
        reason = ends.reason()
        kept = [
            place for place, i in enumerate(running) if ends.go_on(i, rows[i], tokens[place], count, reason)
        ]
        if count == max_new_tokens or not kept:
            break
        if len(kept) < len(running):
            index = torch.tensor(kept, device=chosen.device)
            cache.reorder(index)
            running, chosen = [running[place] for place in kept], chosen[index]
        logits = step(chosen, cache)
    return rows


def _stepping(model: Transformer) -> Step:
    """The model itself, one token at a time."""

    def step(chosen: Tensor, cache: Cache) -> Tensor:
        logits: Tensor = model(chosen[:, None], cache=cache, logits="last").logits[:, -1]
        return logits

    return step


def cache_for(model: Transformer, room: int) -> Cache:
    """A cache for rows of up to `room` tokens: rings in layers with a window, where that at least halves what they keep."""
    windows = [window for window in model.main.spec.windows if window is not None]
    kind = WindowCache if windows and room > 2 * min(windows) else Cache
    return kind(min(room, RESERVE))


def prefill(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
) -> Tensor:
    """Read the prompts, padded on the left, in pieces where they are long: the logits of what comes next, [B, V]."""
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = None
    if any(len(prompt) < longest for prompt in prompts):
        starts = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        mask = torch.arange(longest, device=device) >= starts[:, None]
    chunk = longest if turns_by_length(model) else PREFILL_CHUNK
    out = None
    for start in range(0, longest, chunk):
        piece = slice(start, start + chunk)
        given = (source, source_mask) if start == 0 else (None, None)
        wanted = "last" if piece.stop >= longest else "none"
        out = model(
            ids[:, piece], None if mask is None else mask[:, piece], *given, cache=cache, logits=wanted
        )
    assert out is not None
    return out.logits[:, -1]  # type: ignore[no-any-return]


def turns_by_length(model: Transformer) -> bool:
    """Do rotary angles depend on the length of the whole call? Then it matters which tokens are read together."""
    scaling = model.config.rope_scaling
    return scaling is not None and scaling.kind in ("dynamic", "longrope")


class Chooser:
    """The next token of each row, drawn by the row's own seed."""

    def __init__(
        self, sampling: Sampling, rows: list[Row], seeds: Sequence[int] | None, model: Transformer
    ) -> None:
        self.sampling, self.rows = sampling, rows
        self.dice = (
            Dice(seeds if seeds is not None else [0] * len(rows)) if sampling.temperature > 0 else None
        )
        size, device = model.config.vocab_size, next(model.parameters()).device
        self.histories = (
            [History(row.prompt, sampling, size, device) for row in rows] if sampling.looks_back else []
        )

    def adjusted(self, logits: Tensor, running: list[int]) -> Tensor:
        """Logits of these rows after penalties and bans: [B, V] -> [B, V]."""
        histories = [self.histories[i] for i in running] if self.histories else []
        for i, history in zip(running, histories):
            history.follow(self.rows[i].ids)
        return adjust_by(logits, self.sampling, histories)

    def roll(self, running: list[int]) -> Tensor:
        """The next uniform number of each of these rows, [B]; zeros where nothing is drawn."""
        return self.dice.roll(running) if self.dice is not None else torch.zeros(len(running))

    def choose(self, logits: Tensor, running: list[int]) -> Tensor:
        """[B, V] -> [B]."""
        adjusted = self.adjusted(logits, running)
        if self.dice is None:
            return adjusted.argmax(-1)
        return draw(distribution(adjusted, self.sampling), self.roll(running)).to(logits.device)


def report(logits: Tensor, chosen: Tensor, rows: list[Row], alternatives: int) -> None:
    """Log-probabilities under the model's own distribution, whatever the sampling made of it."""
    values = logits.float().log_softmax(-1)
    of_chosen = values.gather(-1, chosen[:, None])[:, 0].tolist()
    best = values.topk(alternatives, dim=-1) if alternatives else None
    for place, row in enumerate(rows):
        row.logprobs.append(of_chosen[place])
        if best is not None:
            row.alternatives.append(list(zip(best.indices[place].tolist(), best.values[place].tolist())))


@dataclass(frozen=True)
class Ends:
    """What ends a row before its length does."""

    stop_ids: frozenset[int]
    on_token: OnToken | None
    deadline: float | None
    cancel: Callable[[], bool] | None

    def reason(self) -> str | None:
        """Why every row must end now, if it must."""
        if self.cancel is not None and self.cancel():
            return "cancelled"
        return "time" if self.deadline is not None and time.monotonic() >= self.deadline else None

    def go_on(self, number: int, row: Row, token: int, steps: int, reason: str | None) -> bool:
        """Add a token, which `steps` runs of the model led to; False when the row has ended, by it or for `reason`."""
        row.steps = steps
        if token in self.stop_ids:
            row.stop_reason = "eos"
            del row.logprobs[len(row.ids) :], row.alternatives[len(row.ids) :]
            return False
        row.ids.append(token)
        reason = (self.on_token(number, row) if self.on_token is not None else None) or reason
        if reason is not None:
            row.stop_reason = reason
        return reason is None


def check_request(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    alternatives: int = 0,
    stop_ids: Sequence[int] = (),
) -> None:
    """Raise `InputError` where the model cannot do what is asked."""
    if model.config.head != "lm":
        raise InputError(
            f"this model's head is {model.config.head}: only a language model (head lm) generates"
        )
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens!r} must be a whole number, 1 or more")
    vocabulary = model.config.vocab_size
    for name, tokens in (
        ("allowed", sampling.allowed or ()),
        ("banned", sampling.banned),
        ("stop_ids", stop_ids),
    ):
        if any(not 0 <= token < vocabulary for token in tokens):
            raise InputError(
                f"{name} names a token outside the vocabulary: ids go from 0 to {vocabulary - 1}"
            )
    if not 0 <= alternatives <= vocabulary:
        raise InputError(f"alternatives {alternatives} must lie between 0 and vocab_size {vocabulary}")
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise InputError("a prompt is empty: give one token at least, such as the beginning-of-text token")
    longest = max(map(len, prompts))
    room = model.config.max_positions
    if model.config.positions == "learned" and longest + max_new_tokens - 1 > room:
        raise InputError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones need {longest + max_new_tokens - 1} positions and the model has "
            f'{room}: shorten one of them, or keep the last tokens that fit with overflow="window"'
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
    """The most probable tokens: prompts [B, T] (`mask` False: padding) -> new ids [B, N], ended rows filled up with `stop`."""
    prompts = [
        row[real].tolist()
        for row, real in zip(ids, mask if mask is not None else torch.ones_like(ids, dtype=torch.bool))
    ]
    rows = decode(
        model,
        prompts,
        max_new_tokens,
        stop_ids=() if stop is None else (stop,),
        source=source,
        source_mask=source_mask,
    )
    length = max(len(row.ids) + (row.stop_reason == "eos") for row in rows)
    fill = 0 if stop is None else stop
    return torch.tensor([row.ids + [fill] * (length - len(row.ids)) for row in rows], device=ids.device)
