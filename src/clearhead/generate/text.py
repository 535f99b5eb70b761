"""Text in, text out: prompts to generations, and the score of a given text.

Shapes: B rows, S source length, T length, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.errors import InputError
from clearhead.generate.decode import Row, decode
from clearhead.generate.sampling import Sampling
from clearhead.generate.stream import TextStream
from clearhead.model.inputs import check_stack_input
from clearhead.model.transformer import Transformer

# Called with the row's number and the text that is new and sure.
OnText = Callable[[int, str], None]


@dataclass(frozen=True)
class Generation:
    """What came of one prompt."""

    text: str | None  # None where the model has no tokenizer
    ids: list[int]  # the new tokens; a token that ends the text is not among them
    stop_reason: str  # eos, stop, length, time
    logprobs: list[float] | None = None  # of each token, under the model's own distribution
    alternatives: list[list[tuple[int, float]]] | None = None  # the best tokens at each step, with their log-probabilities


@dataclass(frozen=True)
class Score:
    """How probable a model finds a text."""

    ids: list[int]
    logprobs: list[float | None]  # of each token given those before it; None for the first, which nothing precedes

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
) -> list[Generation]:
    """Continue each prompt; with an encoder, prompts are what it reads and `start` is what the decoder begins with."""
    if (stop or on_text) and tokenizer is None:
        raise InputError("stop strings and streaming need text, and the model has no tokenizer: leave them out")
    source = source_mask = None
    fed = [list(prompt) for prompt in prompts]
    if model.encoder is not None and model.decoder is not None:
        source, source_mask = _padded(fed, next(model.parameters()).device)
        fed = [list(start) for _ in prompts]
    before = fed if source is None else [[] for _ in fed]  # text that the new text goes on from
    streams = [TextStream(tokenizer, prompt, stop) for prompt in before] if tokenizer is not None else []

    def on_token(number: int, row: Row) -> str | None:
        stream = streams[number]
        new = stream.push(row.ids[-1])
        if on_text is not None and new:
            on_text(number, new)
        return "stop" if stream.stopped_by is not None else None

    rows = decode(
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
        on_token=on_token if stop or on_text else None,
        deadline=None if seconds is None else time.monotonic() + seconds,
    )
    made = []
    for number, row in enumerate(rows):
        text = None
        if tokenizer is not None:
            stream = streams[number]
            stream.ids = list(row.ids)
            text = stream.text
            rest = stream.finish()
            if on_text is not None and rest:
                on_text(number, rest)
        shown = row.logprobs if logprobs or alternatives else None
        made.append(Generation(text, row.ids, row.stop_reason, shown, row.alternatives if alternatives else None))
    return made


@torch.inference_mode()
def score(model: Transformer, ids: Sequence[int], source: Sequence[int] | None = None, start: Sequence[int] = ()) -> Score:
    """Log-probability of each token given those before it (and `source`, where there is an encoder)."""
    if model.config.head != "lm":
        raise InputError(f"this model's head is {model.config.head}: only a language model (head lm) scores a text")
    device = next(model.parameters()).device
    fed = [*start, *ids]
    if len(fed) < 2:
        raise InputError("a score needs two tokens at least: the first has nothing before it")
    row = torch.tensor([fed], device=device)
    check_stack_input(row, model.main.plan, model.config, "ids")  # the last id is asked about, and not fed
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
    return ids, torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows], device=device)
