"""A sequence as it is generated: its prompt and new tokens, how the next one is chosen, and what ends it.

`decode` carries on several sequences of one request together, `speculate` and the server one at a time; all
of them choose by a `Sampler` and add the token to the `Sequence`, which ends by its `Ends`.

Sampling goes from logits to the next token by pure functions, applied in one fixed order:

    0  logit bias
    1  repetition, presence and frequency penalties      look back at the row's own tokens
    2  no-repeat n-grams, banned sequences
    3  least length, allowed, forced and banned tokens    before all: tokens that a grammar does not allow
    4  temperature                                        0 means greedy
    5  top-k, top-p, min-p, typical                       each keeps a set of tokens; the rest is renormalised

What is removed is set to -inf. The filters of step 5 stand with their options, in request.py.

Shapes: B rows, S source length, V vocabulary, N tokens so far.
"""

import functools
import time
from collections import abc
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.core.dtypes import precise, wide
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.run.generate.grammar import Grammars, GrammarState
from clearhead.run.generate.request import DEFAULTS, FILTERS, REMOVED, Request
from clearhead.run.generate.stream import TextStream
from clearhead.run.generate.vectors import PromptVectors

NOT_NUMBERS = (
    "the model's logits are not numbers (NaN): its weights are damaged, or too large for their dtype"
)
GREEDY = 1e-6  # below this temperature the best token has all the probability that float64 can tell


class Standing(NamedTuple):
    """How far rows are that go on together."""

    written: int  # new tokens of each row
    left: int  # new tokens that may still come, the next one included
    prompts: abc.Sequence[int]  # tokens of each row's prompt
    stops: Collection[int] = ()  # ids that end a row


def adjust(
    logits: Tensor,
    options: Request,
    seen: abc.Sequence[abc.Sequence[int]] = (),
    prompt_lengths: abc.Sequence[int] = (),
    sources: abc.Sequence[abc.Sequence[int]] = (),
    standing: Standing | None = None,
) -> Tensor:
    """Apply steps 0 to 3 and check what is left: [B, V] -> [B, V].

    `seen` has each row's tokens; the first are its prompt.
    """
    histories = [
        History(tokens[:length], options, logits.shape[-1], logits.device, tokens[length:], source)
        for tokens, length, source in zip(seen, prompt_lengths, sources or [()] * len(seen))
    ]
    adjusted = adjust_by(logits, options, histories, standing)
    check_best(adjusted.amax(-1), options)
    return adjusted


def adjust_by(
    logits: Tensor,
    options: Request,
    histories: abc.Sequence["History"] = (),
    standing: Standing | None = None,
) -> Tensor:
    """Apply steps 0 to 3 to rows whose tokens are counted already: [B, V] -> [B, V]."""
    logits = biased(wide(logits), options.logit_bias)
    if options.looks_back:
        logits = logits.clone()
        for row, history in zip(logits, histories):
            history.penalise(row)
    alone = [ids[0] for ids in options.banned_sequences if len(ids) == 1]
    logits = without(logits, alone)
    if options.allowed is not None:
        logits = only(logits, options.allowed)
    if standing is not None:
        logits = constrain(logits, options, standing)
    return without(logits, options.banned)


def check_best(best: Tensor, options: Request) -> None:
    """Raise `InputError` where the best of a row's logits, [B], is no number or was removed."""
    worst = best.min()  # not a number where any is not
    refuse(bool(worst.isnan()), NOT_NUMBERS)
    refuse(
        options.restricts and bool(worst == REMOVED),
        "no token is left to choose from: loosen allowed, banned, forced_first, forced_last, "
        "min_new_tokens, no_repeat_ngram or the grammar",
    )


def argmax(logits: Tensor) -> Tensor:
    """Return the place of the largest number of each row, the first of equal ones: [B, V] -> [B].

    On a CPU by NumPy, which looks at several numbers at a time, as PyTorch does not: in a tenth of the time.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or torch.compiler.is_compiling():
        return logits.argmax(-1)
    return torch.from_numpy(logits.detach().numpy().argmax(-1))


def best_of(logits: Tensor, options: Request) -> Tensor:
    """Return the best token of each row, after `check_best`: [B, V] -> [B]."""
    best = argmax(logits)  # a logit that is no number counts as the largest
    check_best(logits.gather(-1, best[:, None]), options)
    return best


def constrain(logits: Tensor, options: Request, standing: Standing) -> Tensor:
    """Apply the rules about the beginning and the end of a text: [B, V] -> [B, V]."""
    written, left, prompts, stops = standing
    least = [options.min_new_tokens or options.min_length - length for length in prompts]
    short = [row for row, count in enumerate(least) if written < count]
    if short and stops:
        logits = logits.clone()
        logits[torch.tensor(short)[:, None], torch.tensor([*stops])] = REMOVED
    alone = [length == 1 and options.forced_first is not None for length in prompts]
    if written == 0 and any(alone) and options.forced_first is not None:
        forced = only(torch.zeros_like(logits), [options.forced_first])
        logits = torch.where(torch.tensor(alone, device=logits.device)[:, None], forced, logits)
    if left == 1 and options.forced_last:
        logits = only(torch.zeros_like(logits), options.forced_last)
    first = [written == forced for forced in alone]  # what is forced comes before the beginning
    if any(first) and options.banned_first:
        begun = without(logits, options.banned_first)
        logits = torch.where(torch.tensor(first, device=logits.device)[:, None], begun, logits)
    return logits


class History:
    """The tokens of one row, each counted once, so that a step costs no more in a long row."""

    def __init__(
        self,
        prompt: abc.Sequence[int],
        options: Request,
        vocabulary: int,
        device: torch.device,
        new: abc.Sequence[int] = (),
        source: abc.Sequence[int] = (),
    ) -> None:
        self.options = options
        self.length = 0  # new tokens counted
        self.present = torch.zeros(vocabulary, dtype=torch.bool, device=device)  # V: in prompt or answer
        self.counts = torch.zeros(vocabulary, device=device)  # V: how often in the answer
        # What must not come after some tokens: tables of the row itself, of its source, of the request.
        n = options.no_repeat_ngram
        self.after: dict[tuple[int, ...], set[int]] = {}
        self.tables = [({n - 1}, self.after)] if n else []
        if options.no_repeat_source_ngram:
            self.tables.append(_ngrams(tuple(source), options.no_repeat_source_ngram))
        if options.banned_sequences:
            self.tables.append(_endings(options.banned_sequences))
        self.keeps = max((size for sizes, _ in self.tables for size in sizes), default=0)
        self.tail: tuple[int, ...] = ()  # the last tokens, as many as a table looks at
        self._learn(prompt)
        self.follow(new)

    def follow(self, new: abc.Sequence[int]) -> None:
        """Count the row's new tokens, as far as they are not counted yet."""
        fresh = new[self.length :]
        if fresh:
            self.length += len(fresh)
            self.counts.index_add_(0, self._learn(fresh), torch.ones(len(fresh), device=self.counts.device))

    def _learn(self, tokens: abc.Sequence[int]) -> Tensor:
        n = self.options.no_repeat_ngram
        for token in tokens if self.tables else ():
            if n and len(self.tail) >= n - 1:
                self.after.setdefault(self.tail[len(self.tail) - n + 1 :], set()).add(token)
            self.tail = (*self.tail, token)[-self.keeps :] if self.keeps else ()
        index = torch.tensor(list(tokens), dtype=torch.long, device=self.present.device)
        self.present[index] = True
        return index

    def penalise(self, logits: Tensor) -> None:
        """Apply steps 1 and 2 to the row's logits [V], in place."""
        options, penalty = self.options, self.options.repetition_penalty
        if penalty != 1:
            weaker = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where(self.present, weaker, logits))
        if options.presence_penalty or options.frequency_penalty:
            logits -= options.presence_penalty * (self.counts > 0) + options.frequency_penalty * self.counts
        for sizes, after in self.tables:
            for size in sizes:
                if size <= len(self.tail):
                    logits[list(after.get(self.tail[len(self.tail) - size :], ()))] = REMOVED


Table = tuple[set[int], dict[tuple[int, ...], set[int]]]  # lengths of its keys; what must not follow each


@functools.lru_cache(maxsize=1024)
def _ngrams(tokens: tuple[int, ...], n: int) -> Table:
    """Return what follows each n - 1 tokens of a text."""
    return _endings(tuple(tokens[start : start + n] for start in range(len(tokens) - n + 1)))


@functools.lru_cache(maxsize=1024)
def _endings(sequences: tuple[tuple[int, ...], ...]) -> Table:
    """Return the last token of each sequence by the tokens before it."""
    after: dict[tuple[int, ...], set[int]] = {}
    for *before, last in sequences:
        after.setdefault(tuple(before), set()).add(last)
    return set(map(len, after)), after


def biased(logits: Tensor, biases: abc.Sequence[tuple[int, float]]) -> Tensor:
    """Add to the logits of some tokens: [B, V] -> [B, V]."""
    if not biases:
        return logits
    tokens, values = zip(*dict(biases).items())
    added = torch.tensor(values, dtype=logits.dtype, device=logits.device).expand(*logits.shape[:-1], -1)
    return logits.index_add(-1, torch.tensor(tokens, device=logits.device), added)


def without(logits: Tensor, tokens: abc.Sequence[int]) -> Tensor:
    """Remove these tokens: [B, V] -> [B, V]."""
    return logits.index_fill(-1, torch.tensor(tokens, device=logits.device), REMOVED) if tokens else logits


def only(logits: Tensor, tokens: abc.Sequence[int]) -> Tensor:
    """Remove all but these tokens: [B, V] -> [B, V]."""
    index = torch.tensor(list(tokens), device=logits.device)
    return torch.full_like(logits, REMOVED).index_copy(-1, index, logits[..., index])


def distribution(logits: Tensor, options: Request) -> Tensor:
    """Apply steps 4 and 5: adjusted logits [B, V] -> probabilities [B, V] in float64."""
    best = best_of(logits, options)
    if options.temperature < GREEDY:
        return torch.zeros_like(logits, dtype=torch.float64).scatter(-1, best[:, None], 1.0)
    logits = precise(logits) / options.temperature
    for name, keep in FILTERS.items():
        if (value := getattr(options, name)) != DEFAULTS[name]:
            logits = keep(logits, value)
    return logits.softmax(-1)


def draw(probability: Tensor, uniform: Tensor) -> Tensor:
    """Draw the token at which the running sum passes a uniform number: [B, V], [B] -> [B].

    One number decides, so a row's choice does not depend on what else is in the batch.
    """
    running = probability.cumsum(-1)
    goal = uniform.to(running).unsqueeze(-1) * running[..., -1:]
    last = (running >= running[..., -1:]).int().argmax(-1)  # the last token that has any probability
    return torch.searchsorted(running, goal, right=True).squeeze(-1).minimum(last)


class Dice:
    """A stream of uniform numbers from a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def roll(self) -> float:
        """Return the next number, in float64."""
        return float(torch.rand((), generator=self.generator, dtype=torch.float64).item())

    def copy(self) -> "Dice":
        """Return another one that gives the same numbers from here on."""
        other = Dice(0)
        other.generator.set_state(self.generator.get_state())
        return other


def logprobs_of(
    logits: Tensor, tokens: Tensor, alternatives: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Return the log-probability of a token of each row, [B, V] and [B], and the best tokens with theirs."""
    values = logits.float().log_softmax(-1)
    best = values.topk(alternatives, dim=-1)
    others = zip(best.indices.tolist(), best.values.tolist())
    chosen = values.gather(-1, tokens.to(values.device)[:, None])  # greedy tokens are on the host already
    return chosen[:, 0].tolist(), [list(zip(*pair)) for pair in others]


@dataclass(frozen=True)
class Prompts:
    """The inputs of a generation: prompt ids for each row, and with an encoder a source."""

    ids: abc.Sequence[abc.Sequence[int]]  # one token at least in each
    source: Tensor | None = None  # B S: what the encoder reads
    source_mask: Tensor | None = None  # B S: True for real tokens
    seeds: abc.Sequence[int] | None = None  # of each row; None: the request's
    vectors: abc.Sequence[PromptVectors | None] | None = None  # of each row, where one has images

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.ids))

    @property
    def sources(self) -> tuple[Tensor | None, Tensor | None]:
        """The source and its mask."""
        return self.source, self.source_mask

    def vectors_of(self, number: int) -> PromptVectors | None:
        """Return the vectors of a row's images, where it has any."""
        return None if self.vectors is None else self.vectors[number]

    def keys(self, number: int) -> abc.Sequence[int]:
        """Return a row's ids, with digests in place of those of its images: equal keys are equal prompts."""
        own = self.vectors_of(number)
        return self.ids[number] if own is None else own.keys

    def text(self, number: int) -> list[int]:
        """Return the ids of a row's source; without an encoder, of its prompt."""
        if self.source is None:
            return list(self.ids[number])
        source = self.source[number]
        return (source if self.source_mask is None else source[self.source_mask[number]]).tolist()

    def rows(self, numbers: list[int]) -> "Prompts":
        """Return some rows alone; columns of the source that are padding in all of them are left out."""
        ids = [self.ids[number] for number in numbers]
        vectors = None if self.vectors is None else [self.vectors[number] for number in numbers]
        if self.source is None or self.source_mask is None:
            return Prompts(ids, None if self.source is None else self.source[numbers], vectors=vectors)
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
        self.prompt, self.vectors = list(prompts.ids[number]), prompts.vectors_of(number)
        self._keys = prompts.keys(number)
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

    @property
    def keys(self) -> list[int]:
        """The tokens, with digests in place of those of images."""
        return [*self._keys, *self.tokens[len(self.prompt) :]]

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


# Draft tokens ---------------------------------------------------------------------------------------------

Roll = Callable[[], Tensor]  # the next uniform number of the row: [1]


class Proposal(NamedTuple):
    """Draft tokens."""

    tokens: list[int]
    drawn_from: list[Tensor] | None = None  # of each, its distribution q [1, V]; None: they were not drawn


class Drafter:
    """Where the draft tokens of one row come from."""

    model: Transformer | None = None  # that it runs, where it runs one

    def propose(self, tokens: list[int], most: int, roll: Roll) -> Proposal:
        """Return up to `most` tokens that may follow `tokens`, which only grow from call to call."""
        raise NotImplementedError

    def observe(self, start: int, states: Tensor) -> None:
        """See the states [1, N, D] that the model gave tokens from position `start` on."""

    def unread(self, tokens: list[int]) -> list[int]:
        """Return those tokens that it has to read before it drafts; none, where it runs no model."""
        return []


def accept(p: Tensor, q: Tensor, drafted: Tensor, uniform: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens drawn from p, made of draft tokens drawn from q, and which of these were accepted.

    Args:
        p: [B, V] the wanted distribution.
        q: [B, V] the one that `drafted` [B] was drawn from.
        drafted: [B].
        uniform: [B] in [0, 1): decides whether a proposal is kept.
        spare: [B] in [0, 1), independent of it: draws in place of one that is not.
    """
    at = drafted[:, None]
    kept = uniform.to(p) * q.gather(-1, at)[:, 0] < p.gather(-1, at)[:, 0]
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # p equals q but for rounding: p itself
    return torch.where(kept, drafted, draw(rest, spare)), kept


def verify(
    sampler: Sampler, row: Sequence, logits: Iterable[tuple[Tensor, Tensor | None]], proposal: Proposal
) -> bool:
    """Add the next token, and one after each draft token that was right; return False at the row's end.

    Args:
        logits: after the row's last token and after each draft token, [1, V]; with each the greedy choice
            [1], where it is known already.
    """
    goes_on, steps = False, row.steps + 1
    for place, (here, known) in enumerate(logits):
        drafted = proposal.tokens[place] if place < len(proposal.tokens) else None
        if drafted is None or proposal.drawn_from is None:
            chosen = sampler.choose(here, [row], known)
            right = int(chosen) == drafted
        else:
            p, q = distribution(sampler.adjusted(here, [row]), sampler.request), proposal.drawn_from[place]
            uniform, spare = sampler.roll([row]), sampler.roll([row])
            at = torch.tensor([drafted], device=p.device)
            chosen, kept = accept(p, q.to(p), at, uniform, spare)
            chosen, right = chosen.to(here.device), bool(kept)
            sampler.report(here, chosen, [row])
        goes_on = row.add(int(chosen), steps, sampler.ends.reason())
        if not (goes_on and right):
            break
    return goes_on and len(row.ids) < sampler.request.max_new_tokens
