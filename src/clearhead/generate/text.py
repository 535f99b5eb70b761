"""Text in, text out: prompts to generations, and the score of a given text.

Shapes: B rows, S source length, T length, V vocabulary.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.errors import InputError
from clearhead.generate.beam import Beams, beam_search
from clearhead.generate.compiled import Steps, decode_compiled
from clearhead.generate.decode import Row, decode
from clearhead.generate.prefix import Prefix
from clearhead.generate.sampling import Sampling
from clearhead.generate.speculate import guessers_for, speculate
from clearhead.generate.stream import TextStream
from clearhead.model.checks import check_stack_input
from clearhead.model.transformer import Transformer

# Called with the row's number and the text that is new and sure.
OnText = Callable[[int, str], None]


@dataclass(frozen=True)
class Generation:
    """What came of one prompt."""

    text: str | None  # None where the model has no tokenizer
    ids: list[int]  # the new tokens; a token that ends the text is not among them
    stop_reason: str  # eos, stop, length, time, cancelled
    logprobs: list[float] | None = None  # of each token, under the model's own distribution
    alternatives: list[list[tuple[int, float]]] | None = (
        None  # the best tokens at each step, with their log-probabilities
    )
    score: float | None = None  # of a beam search: the sum of log-probabilities over length ** length_penalty
    steps: int | None = (
        None  # runs of the model that tokens were chosen from; fewer than tokens where guesses came true
    )


@dataclass(frozen=True)
class Score:
    """How probable a model finds a text."""

    ids: list[int]
    logprobs: list[
        float | None
    ]  # of each token given those before it; None for the first, which nothing precedes

    @property
    def total(self) -> float:
        """Log-probability of all tokens that have one."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability per token."""
        scored = [value for value in self.logprobs if value is not None]
        return math.exp(-math.fsum(scored) / len(scored)) if scored else math.nan


def generate(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    stop_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    start: Sequence[int] = (),
    alternatives: int = 0,
    logprobs: bool = False,
    on_text: OnText | None = None,
    seconds: float | None = None,
    cancel: Callable[[], bool] | None = None,
    lookup: int = 0,
    draft: Transformer | None = None,
    draft_tokens: int = 4,
    prefix: Prefix | None = None,
    steps: Steps | None = None,
    compile: bool | None = None,
) -> list[Generation]:
    """Continue each prompt; with an encoder, prompts are what it reads and `start` is what the decoder begins with."""
    if (stop or on_text) and tokenizer is None:
        raise InputError(
            "stop strings and streaming need text, and the model has no tokenizer: leave them out"
        )
    fed, source, source_mask = _fed(model, prompts, start)
    before = fed if source is None else [[] for _ in fed]  # text that the new text goes on from
    streams = [TextStream(tokenizer, prompt, stop) for prompt in before] if tokenizer is not None else []
    watched = bool(stop) or on_text is not None

    def on_token(number: int, row: Row) -> str | None:
        stream = streams[number]
        new = stream.push(row.ids[-1])
        if on_text is not None and new:
            on_text(number, new)
        return "stop" if stream.stopped_by is not None else None

    guessers = guessers_for(model, prompts, sampling, source, source_mask, lookup, draft, draft_tokens)
    run = (
        functools.partial(decode_compiled, steps=steps, asked=bool(compile)) if steps is not None else decode
    )
    run = functools.partial(speculate, guessers=guessers) if guessers else run
    rows = run(
        model,
        fed,
        max_new_tokens,
        sampling,
        stop_ids,
        seeds,
        source,
        source_mask,
        alternatives,
        logprobs,
        on_token=on_token if watched else None,
        deadline=None if seconds is None else time.monotonic() + seconds,
        cancel=cancel,
        cache=None if prefix is None else prefix.begin(fed[0], len(fed[0]) + max_new_tokens),
    )
    if prefix is not None:
        prefix.end(rows[0])
    made = []
    for number, row in enumerate(rows):
        text = None
        if tokenizer is not None:
            stream = streams[number]
            if not watched:
                stream.add(row.ids)
            rest = stream.finish()
            if on_text is not None and rest:
                on_text(number, rest)
            text = stream.text
        shown = row.logprobs if logprobs or alternatives else None
        made.append(
            Generation(
                text,
                row.ids,
                row.stop_reason,
                shown,
                row.alternatives if alternatives else None,
                steps=row.steps,
            )
        )
    return made


def search(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    beams: Beams,
    *,
    stop_ids: Sequence[int] = (),
    start: Sequence[int] = (),
    seconds: float | None = None,
) -> list[list[Generation]]:
    """The best continuations of each prompt that a beam search finds, best first; `start` as in `generate`."""
    fed, source, source_mask = _fed(model, prompts, start)
    deadline = None if seconds is None else time.monotonic() + seconds
    rows = beam_search(model, fed, max_new_tokens, beams, sampling, stop_ids, source, source_mask, deadline)
    made = []
    for prompt, found in zip(fed, rows):
        before = prompt if source is None else []
        texts = [None if tokenizer is None else _text(tokenizer, before, one.ids) for one in found]
        made.append(
            [Generation(text, one.ids, one.stop_reason, score=one.score) for text, one in zip(texts, found)]
        )
    return made


def _text(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """What `ids` add to the text of those before them."""
    stream = TextStream(tokenizer, before)
    stream.add(ids)
    return stream.text


def _fed(
    model: Transformer, prompts: Sequence[Sequence[int]], start: Sequence[int]
) -> tuple[list[list[int]], Tensor | None, Tensor | None]:
    """What the decoder reads, and, with an encoder, what that reads with its mask [B, S]."""
    fed = [list(prompt) for prompt in prompts]
    if model.encoder is None or model.decoder is None:
        return fed, None, None
    return [list(start) for _ in prompts], *_padded(fed, next(model.parameters()).device)


@torch.inference_mode()
def score(
    model: Transformer, ids: Sequence[int], source: Sequence[int] | None = None, start: Sequence[int] = ()
) -> Score:
    """Log-probability of each token given those before it (and `source`, where there is an encoder)."""
    if model.config.head != "lm":
        raise InputError(
            f"this model's head is {model.config.head}: only a language model (head lm) scores a text"
        )
    device = next(model.parameters()).device
    fed = [*start, *ids]
    if len(fed) < 2:
        raise InputError("a score needs two tokens at least: the first has nothing before it")
    row = torch.tensor([fed], device=device)
    check_stack_input(row, model.main.spec, "ids")  # the last id is asked about, and not fed
    more = {} if source is None else {"source": torch.tensor([list(source)], device=device)}
    logits = model(row[:, :-1], **more).logits[0].float()  # T-1 V
    values = logits.log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0].tolist()
    return Score(list(ids), values[len(start) - 1 :] if start else [None, *values])


def _padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of unequal length as ids and mask [B, S], padded on the right."""
    longest = max(map(len, rows), default=0)
    if not longest or any(not row for row in rows):
        raise InputError("a prompt is empty: give one token at least")
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    if all(len(row) == longest for row in rows):
        return ids, None
    return ids, torch.tensor(
        [[True] * len(row) + [False] * (longest - len(row)) for row in rows], device=device
    )
