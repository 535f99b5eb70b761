"""Speculation: guess tokens cheaply, let the model read all guesses in one run, and keep those that stand.

The result is what plain decoding gives. Guesses from the row's own text (`Lookup`) are not drawn, so the
model draws as it always would, by the same seed, and goes on for as long as it draws what was guessed: the
tokens themselves are the same. Guesses of a second model (`Draft`) are drawn from its distribution q; each is
kept with probability min(1, p/q), and the first that is not is replaced by a draw from max(p - q, 0): the
distribution is the same.

Rows take turns, each with a cache of its own, which forgets what was guessed wrong.

Shapes: B rows, S source length, V vocabulary, N guesses.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import TABLES
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.run.generate.decode import (
    LENGTH_ALONE,
    RESERVE,
    Chooser,
    Continuation,
    Ends,
    Prompts,
    agreed,
    check_request,
    prefill,
    report,
    slides,
    steps_back,
    streams,
    turns_by_length,
)
from clearhead.run.generate.request import FILTERS, Request
from clearhead.run.generate.sampling import adjust_by, distribution, draw

MATCHED = (3, 2)  # how many of the last tokens must have stood together before; one alone says too little
Roll = Callable[[], Tensor]  # the next uniform number of the row: [1]


class Guess(NamedTuple):
    """Tokens that may come next."""

    tokens: list[int]
    drawn_from: list[Tensor] | None = None  # of each, its distribution q [1, V]; None: they were not drawn


class Guesser(Protocol):
    """Where guesses for one row come from."""

    def guess(self, tokens: list[int], most: int, roll: Roll) -> Guess:
        """Return up to `most` tokens that may follow `tokens`, which only grow from call to call."""


class Lookup:
    """Guesses that the row goes on as it did after the same tokens; `before` is other text to look in."""

    def __init__(self, count: int, before: Sequence[int] = ()) -> None:
        self.count, self.start = count, len(before)
        self.text: list[int] = []
        self.next: dict[tuple[int, ...], int] = {}  # where the text last went on after these tokens
        self._read(before)

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for n in MATCHED:
                if len(self.text) >= n:
                    self.next[tuple(self.text[-n:])] = len(self.text)
            self.text.append(token)

    def guess(self, tokens: list[int], most: int, roll: Roll) -> Guess:
        """See `Guesser`."""
        self._read(tokens[len(self.text) - self.start :])
        at = next((self.next[last] for n in MATCHED if (last := tuple(self.text[-n:])) in self.next), None)
        if at is None:
            return Guess([])
        count = min(self.count, most)
        # Past its end the text goes on with what is guessed.
        return Guess(list(itertools.islice(itertools.cycle(self.text[at : at + count]), count)))


class Draft:
    """Guesses of a second, smaller model."""

    def __init__(self, model: Transformer, count: int, sampling: Request, prompts: Prompts) -> None:
        self.model, self.count, self.sources = model, count, prompts.sources
        # Rules that look back are left to the other model: any q gives the right result.
        shared = ("temperature", *FILTERS, "allowed", "banned")
        self.sampling = Request(**{name: getattr(sampling, name) for name in shared})
        self.cache = Cache()
        self.length = 0  # tokens given at the last call
        self.guessed: list[int] = []  # and what it guessed

    def guess(self, tokens: list[int], most: int, roll: Roll) -> Guess:
        """See `Guesser`."""
        config, count = self.model.config, min(self.count, most)
        if config.positions in TABLES:
            count = min(count, config.max_positions - len(tokens) + 1)
        kept = self.length + agreed(self.guessed, tokens[self.length :])  # the last guesses that came true
        self.cache.crop(min(self.cache.length, kept))
        self.length, self.guessed, drawn_from = len(tokens), [], []
        while len(self.guessed) < count:
            unread = tokens[self.cache.length :] if not self.guessed else self.guessed[-1:]
            logits = prefill(self.model, [unread], self.cache, *self.sources)
            q = distribution(adjust_by(logits, self.sampling), self.sampling)
            drawn_from.append(q)
            self.guessed.append(int(draw(q, roll())))
        return Guess(self.guessed, drawn_from if self.sampling.temperature > 0 else None)


def accept(p: Tensor, q: Tensor, guessed: Tensor, uniform: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens drawn from p, made of guesses drawn from q, and which guesses were kept.

    Args:
        p: [B, V] the wanted distribution.
        q: [B, V] the one that `guessed` [B] was drawn from.
        guessed: [B].
        uniform: [B] in [0, 1): decides whether a guess is kept.
        spare: [B] in [0, 1), independent of it: draws in place of one that is not.
    """
    at = guessed[:, None]
    kept = uniform.to(p) * q.gather(-1, at)[:, 0] < p.gather(-1, at)[:, 0]
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # p equals q but for rounding: p itself
    return torch.where(kept, guessed, draw(rest, spare)), kept


class _Speaker:
    """One row, its cache and its guesser."""

    def __init__(
        self, number: int, row: Continuation, prompts: Prompts, cache: Cache, guesser: Guesser
    ) -> None:
        self.number, self.row, self.cache, self.guesser = number, row, cache, guesser
        self.sources, self.tokens = prompts.sources, list(row.prompt)

    def turn(self, model: Transformer, most: int, chooser: Chooser, ends: Ends) -> bool:
        """Add a token or more in one run of the model; return False when the row has ended or has `most`."""
        guess = self.guesser.guess(
            self.tokens, most - len(self.row.ids) - 1, lambda: chooser.roll([self.number])
        )
        fed = torch.tensor(
            [self.tokens[self.cache.length :] + guess.tokens], device=next(model.parameters()).device
        )
        logits = model(fed, None, *self.sources, cache=self.cache).logits[0]  # N+1 V
        reason, goes_on, steps = ends.reason(), True, self.row.steps + 1
        for place in range(len(guess.tokens) + 1):
            here = logits[place, None]
            chosen, as_guessed = self._choose(here, guess, place, chooser)
            if chooser.request.reports:
                report(here, chosen, [self.row], chooser.request.alternatives)
            goes_on = ends.go_on(self.number, self.row, int(chosen), steps, reason)
            self.tokens += self.row.ids[len(self.tokens) - len(self.row.prompt) :]  # nothing, if it is a stop
            if not (goes_on and as_guessed):
                break
        self.cache.crop(min(self.cache.length, len(self.tokens) - 1))
        return goes_on and len(self.row.ids) < most

    def _choose(self, logits: Tensor, guess: Guess, place: int, chooser: Chooser) -> tuple[Tensor, bool]:
        """Choose the token after logits [1, V]; return it [1], and whether it is the one guessed."""
        guessed = guess.tokens[place] if place < len(guess.tokens) else None
        if guessed is None or guess.drawn_from is None:
            chosen = chooser.choose(logits, [self.number])
            return chosen, int(chosen) == guessed
        p = distribution(chooser.adjusted(logits, [self.number]), chooser.request)
        uniform, spare = chooser.roll([self.number]), chooser.roll([self.number])
        chosen, kept = accept(
            p, guess.drawn_from[place].to(p), torch.tensor([guessed], device=p.device), uniform, spare
        )
        return chosen.to(logits.device), bool(kept)


def guessers_for(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    texts: Sequence[Sequence[int]],
    draft: Transformer | None,
) -> list[Guesser]:
    """Make a guesser for each row, or none. `texts` are the ids given: with an encoder, the sources."""
    config, rows = model.config, range(len(prompts.ids))
    if draft is None:
        looked_into = prompts.source is not None and config.source_vocab_size == config.vocab_size
        return [Lookup(request.lookup, texts[row] if looked_into else ()) for row in rows if request.lookup]
    for name in ("family", "head", "vocab_size", "source_vocab_size"):
        mine, theirs = getattr(config, name), getattr(draft.config, name)
        refuse(
            mine != theirs,
            f"the draft's {name} is {theirs} and the model's {mine}: "
            "choose a draft with the same vocabulary and family",
        )
    return [Draft(draft, request.draft_tokens, request, prompts.rows([row])) for row in rows]


@torch.inference_mode()
def speculate(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    ends: Ends = LENGTH_ALONE,
    cache: Cache | None = None,
    *,
    guessers: Sequence[Guesser],
) -> list[Continuation]:
    """Decode with one guesser for each row; the result is that of `decode`."""
    check_request(model, request, prompts, ends)
    models = [model, *(guesser.model for guesser in guessers if isinstance(guesser, Draft))]
    refuse(
        not all(map(steps_back, models)),
        "a layer of the model, or of its draft, keeps a state that cannot take a wrong guess back: "
        "leave lookup and draft out",
    )
    refuse(
        turns_by_length(model) or slides(model, request, prompts) or streams(model, request, prompts),
        "this text is read anew, or forgotten, as it grows past a length: leave lookup and draft out",
    )
    rows = [Continuation(list(prompt)) for prompt in prompts.ids]
    chooser = Chooser(model, request, prompts, ends, rows)
    most, running = request.max_new_tokens, []
    for number, row in enumerate(rows):
        own = cache or Cache(min(len(row.prompt) + most, RESERVE))
        running.append(_Speaker(number, row, prompts.rows([number]), own, guessers[number]))
        unread = row.prompt[own.length : -1]  # the last token is read with the first guesses
        if unread:
            prefill(model, [unread], own, *running[-1].sources)
    while running:
        running = [speaker for speaker in running if speaker.turn(model, most, chooser, ends)]
    return rows
