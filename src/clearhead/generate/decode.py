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
from clearhead.generate.sampling import Dice, Sampling, adjust, distribution, draw
from clearhead.model.cache import Cache
from clearhead.model.transformer import Transformer

PREFILL_CHUNK = 1024  # longer prompts are read in pieces, so that scores of a long prompt never exist at once


@dataclass
class Row:
    """One sequence as it is generated."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)  # the new tokens
    stop_reason: str = "length"  # eos, stop, length, time or cancelled
    logprobs: list[float] = field(default_factory=list)  # of each new token, under the model's own distribution
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)  # the best tokens at each step


# Called with the row's number and the row after each new token; a stop reason ends the row.
OnToken = Callable[[int, Row], str | None]


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
    """
    sampling = sampling or Sampling()
    _check(model, prompts, max_new_tokens, sampling, alternatives)
    device = next(model.parameters()).device
    rows = [Row(list(prompt)) for prompt in prompts]
    running = list(range(len(rows)))
    dice = Dice(seeds if seeds is not None else [0] * len(rows)) if sampling.temperature > 0 else None
    longest = max(len(row.prompt) for row in rows)
    cache = Cache(reserve=longest + max_new_tokens)
    logits = prefill(model, [row.prompt for row in rows], cache, source, source_mask)
    stops = set(stop_ids)
    for step in range(max_new_tokens):
        chosen = _choose(logits, sampling, [rows[i] for i in running], dice, running)
        tokens = chosen.tolist()
        if logprobs or alternatives:
            _report(logits, chosen, [rows[i] for i in running], alternatives)
        late = deadline is not None and time.monotonic() >= deadline
        kept = [place for place, i in enumerate(running) if _goes_on(i, rows[i], tokens[place], stops, on_token, late)]
        if step + 1 == max_new_tokens or not kept:
            break
        if len(kept) < len(running):
            index = torch.tensor(kept, device=device)
            cache.reorder(index)
            running, chosen = [running[place] for place in kept], chosen[index]
        logits = model(chosen[:, None], cache=cache, logits="last").logits[:, -1]
    return rows


def prefill(
    model: Transformer, prompts: Sequence[Sequence[int]], cache: Cache, source: Tensor | None = None, source_mask: Tensor | None = None
) -> Tensor:
    """Read the prompts, padded on the left, in pieces where they are long: the logits of what comes next, [B, V]."""
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = None
    if any(len(prompt) < longest for prompt in prompts):
        starts = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        mask = torch.arange(longest, device=device) >= starts[:, None]
    scaling = model.config.rope_scaling
    by_length = scaling is not None and scaling.kind in ("dynamic", "longrope")  # angles depend on the length of the whole call
    chunk = longest if by_length else PREFILL_CHUNK
    out = None
    for start in range(0, longest, chunk):
        piece = slice(start, start + chunk)
        given = (source, source_mask) if start == 0 else (None, None)
        wanted = "last" if piece.stop >= longest else "none"
        out = model(ids[:, piece], None if mask is None else mask[:, piece], *given, cache=cache, logits=wanted)
    assert out is not None
    return out.logits[:, -1]  # type: ignore[no-any-return]


def _choose(logits: Tensor, sampling: Sampling, rows: list[Row], dice: Dice | None, running: list[int]) -> Tensor:
    """The next token of each row: [B, V] -> [B]."""
    if sampling.looks_back:
        adjusted = adjust(logits, sampling, [row.prompt + row.ids for row in rows], [len(row.prompt) for row in rows])
    else:
        adjusted = adjust(logits, sampling)
    if dice is None:
        return adjusted.argmax(-1)
    return draw(distribution(adjusted, sampling), dice.roll(running)).to(logits.device)


def _report(logits: Tensor, chosen: Tensor, rows: list[Row], alternatives: int) -> None:
    """Log-probabilities under the model's own distribution, whatever the sampling made of it."""
    values = logits.float().log_softmax(-1)
    of_chosen = values.gather(-1, chosen[:, None])[:, 0].tolist()
    best = values.topk(alternatives, dim=-1) if alternatives else None
    for place, row in enumerate(rows):
        row.logprobs.append(of_chosen[place])
        if best is not None:
            row.alternatives.append(list(zip(best.indices[place].tolist(), best.values[place].tolist())))


def _goes_on(number: int, row: Row, token: int, stops: set[int], on_token: OnToken | None, late: bool) -> bool:
    """Add a token to a row; False when the row has ended."""
    if token in stops:
        row.stop_reason = "eos"
        del row.logprobs[len(row.ids) :], row.alternatives[len(row.ids) :]
        return False
    row.ids.append(token)
    reason = on_token(number, row) if on_token is not None else None
    if reason is None and late:
        reason = "time"
    if reason is not None:
        row.stop_reason = reason
    return reason is None


def _check(model: Transformer, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, alternatives: int) -> None:
    if model.config.head != "lm":
        raise InputError(f"this model's head is {model.config.head}: only a language model (head lm) generates")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens {max_new_tokens!r} must be a whole number, 1 or more")
    vocabulary = model.config.vocab_size
    for name, tokens in (("allowed", sampling.allowed or ()), ("banned", sampling.banned)):
        if any(not 0 <= token < vocabulary for token in tokens):
            raise InputError(f"{name} names a token outside the vocabulary: ids go from 0 to {vocabulary - 1}")
    if not 0 <= alternatives <= vocabulary:
        raise InputError(f"alternatives {alternatives} must lie between 0 and vocab_size {vocabulary}")
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise InputError("a prompt is empty: give one token at least, such as the beginning-of-text token")
    longest = max(map(len, prompts))
    room = model.config.max_positions
    if model.config.positions == "learned" and longest + max_new_tokens - 1 > room:
        raise InputError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones need {longest + max_new_tokens - 1} positions and the model has "
            f"{room}: shorten one of them"
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
    prompts = [row[real].tolist() for row, real in zip(ids, mask if mask is not None else torch.ones_like(ids, dtype=torch.bool))]
    rows = decode(model, prompts, max_new_tokens, stop_ids=() if stop is None else (stop,), source=source, source_mask=source_mask)
    length = max(len(row.ids) + (row.stop_reason == "eos") for row in rows)
    fill = 0 if stop is None else stop
    return torch.tensor([row.ids + [fill] * (length - len(row.ids)) for row in rows], device=ids.device)
