"""A sequence as it is generated: its prompt and new tokens, how the next one is chosen, and what ends it.

`decode` carries on several sequences of one request together, `speculate` and the server one at a time; all
of them choose by a `Sampler` and add the token to the `Sequence`, which ends by its `Ends`.

Shapes: B rows, S source length, V vocabulary.
"""

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.run.generate.grammar import Grammars, GrammarState
from clearhead.run.generate.request import REMOVED, Request
from clearhead.run.generate.sampling import (
    Dice,
    History,
    Standing,
    adjust_by,
    best_of,
    distribution,
    draw,
    logprobs_of,
)
from clearhead.run.generate.stream import TextStream


@dataclass(frozen=True)
class Prompts:
    """The inputs of a generation: prompt ids for each row, and with an encoder a source."""

    ids: abc.Sequence[abc.Sequence[int]]  # one token at least in each
    source: Tensor | None = None  # B S: what the encoder reads
    source_mask: Tensor | None = None  # B S: True for real tokens
    seeds: abc.Sequence[int] | None = None  # of each row; None: the request's

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.ids))

    @property
    def sources(self) -> tuple[Tensor | None, Tensor | None]:
        """The source and its mask."""
        return self.source, self.source_mask

    def text(self, number: int) -> list[int]:
        """Return the ids of a row's source; without an encoder, of its prompt."""
        if self.source is None:
            return list(self.ids[number])
        source = self.source[number]
        return (source if self.source_mask is None else source[self.source_mask[number]]).tolist()

    def rows(self, numbers: list[int]) -> "Prompts":
        """Return some rows alone; columns of the source that are padding in all of them are left out."""
        ids = [self.ids[number] for number in numbers]
        if self.source is None or self.source_mask is None:
            return Prompts(ids, None if self.source is None else self.source[numbers])
        columns = self.source_mask[numbers].any(0)
        source, mask = self.source[numbers][:, columns], self.source_mask[numbers][:, columns]
        return Prompts(ids, source, None if bool(mask.all()) else mask)


# Called with the row's number and the row after each new token; a stop reason ends the row.
OnToken = Callable[[int, "Sequence"], str | None]
# Changes logits [B, V], after the request's own rules, by the new tokens of each row.
Rule = Callable[[Tensor, abc.Sequence[abc.Sequence[int]]], Tensor]


@dataclass(frozen=True)
class Ends:
    """What ends a row before its length does."""

    stop_ids: frozenset[int] = frozenset()  # tokens that end a row; the token is not part of the result
    on_token: OnToken | None = None
    stream: Callable[[int], TextStream | None] | None = None  # makes the text of a row that is watched
    cancel: Callable[[], bool] | None = None  # asked after each token; True ends every row
    deadline: float | None = None  # a `time.monotonic()` at which every row ends
    grammars: Grammars | None = None  # of a request with a constraint, which says where a row may end
    rule: Rule | None = None  # of a task, such as the order of timestamps

    def reason(self) -> str | None:
        """Return why every row must end now; None: it need not."""
        if self.cancel is not None and self.cancel():
            return "cancelled"
        return "time" if self.deadline is not None and time.monotonic() >= self.deadline else None


LENGTH_ALONE = Ends()


class Sequence:
    """One row as it is generated."""

    def __init__(self, sampler: "Sampler", prompts: Prompts, number: int = 0) -> None:
        """Begin after prompt `number` of the batch."""
        request, self.number, self.ends = sampler.request, number, sampler.ends
        self.prompt = list(prompts.ids[number])
        self.tokens = list(self.prompt)  # the prompt, and the new ones
        self.ids: list[int] = []  # the new tokens
        self.stop_reason = "length"  # eos, stop, length, time or cancelled
        self.logprobs: list[float] = []  # of each new token, by the model's own distribution
        self.alternatives: list[list[tuple[int, float]]] = []  # the best tokens at each step
        self.steps = 0  # runs of the model that tokens were chosen from; fewer than tokens with draft tokens
        self.layers: list[int] = []  # of early exit: how many each new token came from
        self.stream = None if self.ends.stream is None else self.ends.stream(number)
        self.new = ""  # the text that is final with the last token
        # What its choices depend on.
        seed = request.seed if prompts.seeds is None else prompts.seeds[number]
        self.dice = Dice(seed) if request.temperature > 0 else None
        self.history: History | None = None
        if request.looks_back:
            source = prompts.text(number) if request.no_repeat_source_ngram else ()
            self.history = History(self.prompt, request, *sampler.size, source=source)
        self.grammar: GrammarState | None = None
        if request.constraint is not None and self.ends.grammars is not None:
            self.grammar = self.ends.grammars.begin(request.constraint, self.ends.stop_ids)

    def add(self, token: int, steps: int, reason: str | None = None) -> bool:
        """Add a token, chosen after `steps` runs of the model; return False when the row has ended.

        `reason`: why every row must end now.
        """
        self.steps = steps
        if token in self.ends.stop_ids:
            self.stop_reason, length = "eos", len(self.ids)
            del self.logprobs[length:], self.alternatives[length:], self.layers[length:]
            return False
        self.ids.append(token)
        self.tokens.append(token)
        if self.stream is not None:
            self.new = self.stream.push(token)
            reason = reason if self.stream.stopped_by is None else "stop"
        reason = (self.ends.on_token(self.number, self) if self.ends.on_token is not None else None) or reason
        self.stop_reason = reason or self.stop_reason
        return reason is None


class Sampler:
    """Chooses the next token of sequences of one request, each drawn by its own seed."""

    def __init__(self, model: Transformer, request: Request, ends: Ends) -> None:
        self.request, self.ends, self.plain_greedy = request, ends, request.plain_greedy
        self.size = model.config.vocab_size, next(model.parameters()).device

    def begin(self, prompts: Prompts) -> list[Sequence]:
        """Return a sequence for each prompt."""
        return [Sequence(self, prompts, number) for number in range(len(prompts.ids))]

    def adjusted(self, logits: Tensor, rows: abc.Sequence[Sequence]) -> Tensor:
        """Return the logits of rows that are equally far, after penalties and bans: [B, V] -> [B, V]."""
        histories = [row.history for row in rows if row.history is not None]
        for row, history in zip(rows, histories):
            history.follow(row.ids)
        forced = self.request.forced_first is not None  # after a prompt of one token; no grammar has it
        masks = [
            row.grammar.allowed(row.ids[forced and len(row.prompt) == 1 :])
            for row in rows
            if row.grammar is not None
        ]
        if masks:
            allowed = torch.from_numpy(np.stack(masks)).to(logits.device)  # B V
            logits = logits.masked_fill(~allowed, REMOVED)
        written, lengths = len(rows[0].ids), [len(row.prompt) for row in rows]
        standing = Standing(written, self.request.max_new_tokens - written, lengths, self.ends.stop_ids)
        logits = adjust_by(logits, self.request, histories, standing)
        return logits if self.ends.rule is None else self.ends.rule(logits, [row.ids for row in rows])

    def roll(self, rows: abc.Sequence[Sequence]) -> Tensor:
        """Return the next uniform number of each of these rows [B]; zeros where nothing is drawn."""
        rolled = [0.0 if row.dice is None else row.dice.roll() for row in rows]
        return torch.tensor(rolled, dtype=torch.float64)

    def choose(self, logits: Tensor, rows: abc.Sequence[Sequence], best: Tensor | None = None) -> Tensor:
        """Choose the next token of these rows, [B, V] -> [B], and report it; `best`: it is known already."""
        if best is None:
            adjusted = self.adjusted(logits, rows)
            if self.request.temperature > 0:
                best = draw(distribution(adjusted, self.request), self.roll(rows)).to(logits.device)
            else:
                best = best_of(adjusted, self.request)
        self.report(logits, best, rows)
        return best

    def report(self, logits: Tensor, chosen: Tensor, rows: abc.Sequence[Sequence]) -> None:
        """Note log-probabilities by the model's own distribution, before any rule, if they are asked for."""
        if self.request.reports:
            values, best = logprobs_of(logits, chosen, self.request.alternatives)
            for row, value, others in zip(rows, values, best):
                row.logprobs.append(value)
                row.alternatives.append(others)
