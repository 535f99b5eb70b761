"""Speculative decoding: propose draft tokens cheaply, verify all of them in one run of the model.

The result is what plain decoding gives. Draft tokens from the row's own text (`PromptLookup`) are not drawn,
so the model draws as it always would, by the same seed, and goes on for as long as it draws the draft tokens:
the tokens themselves are the same. Those of a second model (`DraftModel`) are drawn from its distribution q;
each is accepted with probability min(1, p/q), and the first that is not is replaced by a draw from
max(p - q, 0): the distribution is the same.

Rows run one after another, each with a cache of its own, which drops the keys of rejected draft tokens.

Shapes: B rows, S source length, V vocabulary, N draft tokens.
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


class Proposal(NamedTuple):
    """Draft tokens."""

    tokens: list[int]
    drawn_from: list[Tensor] | None = None  # of each, its distribution q [1, V]; None: they were not drawn


class Drafter(Protocol):
    """Where the draft tokens of one row come from."""

    def propose(self, tokens: list[int], most: int, roll: Roll) -> Proposal:
        """Return up to `most` tokens that may follow `tokens`, which only grow from call to call."""


class PromptLookup:
    """Proposes that the row goes on as it did after the same tokens; `before` is other text to look in."""

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

    def propose(self, tokens: list[int], most: int, roll: Roll) -> Proposal:
        """See `Drafter`."""
        self._read(tokens[len(self.text) - self.start :])
        at = next((self.next[last] for n in MATCHED if (last := tuple(self.text[-n:])) in self.next), None)
        if at is None:
            return Proposal([])
        count = min(self.count, most)
        # Past its end the text goes on with the draft tokens.
        return Proposal(list(itertools.islice(itertools.cycle(self.text[at : at + count]), count)))


class DraftModel:
    """Draft tokens of a second, smaller model."""

    def __init__(self, model: Transformer, count: int, sampling: Request, prompts: Prompts) -> None:
        self.model, self.count, self.sources = model, count, prompts.sources
        # Rules that look back are left to the other model: any q gives the right result.
        shared = ("temperature", *FILTERS, "allowed", "banned")
        self.sampling = Request(**{name: getattr(sampling, name) for name in shared})
        self.cache = Cache()
        self.length = 0  # tokens given at the last call
        self.drafted: list[int] = []  # and what it drafted

    def propose(self, tokens: list[int], most: int, roll: Roll) -> Proposal:
        """See `Drafter`."""
        config, count = self.model.config, min(self.count, most)
        if config.positions in TABLES:
            count = min(count, config.max_positions - len(tokens) + 1)
        kept = self.length + agreed(
            self.drafted, tokens[self.length :]
        )  # the draft tokens that were accepted
        self.cache.crop(min(self.cache.length, kept))
        self.length, self.drafted, drawn_from = len(tokens), [], []
        while len(self.drafted) < count:
            unread = tokens[self.cache.length :] if not self.drafted else self.drafted[-1:]
            logits = prefill(self.model, [unread], self.cache, *self.sources)
            q = distribution(adjust_by(logits, self.sampling), self.sampling)
            drawn_from.append(q)
            self.drafted.append(int(draw(q, roll())))
        return Proposal(self.drafted, drawn_from if self.sampling.temperature > 0 else None)


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


class _SpeculativeRow:
    """One row, its cache and its drafter."""

    def __init__(
        self, number: int, row: Continuation, prompts: Prompts, cache: Cache, drafter: Drafter
    ) -> None:
        self.number, self.row, self.cache, self.drafter = number, row, cache, drafter
        self.sources, self.tokens = prompts.sources, list(row.prompt)

    def step(self, model: Transformer, most: int, chooser: Chooser, ends: Ends) -> bool:
        """Add a token or more in one run of the model; return False when the row has ended or has `most`."""
        proposal = self.drafter.propose(
            self.tokens, most - len(self.row.ids) - 1, lambda: chooser.roll([self.number])
        )
        fed = torch.tensor(
            [self.tokens[self.cache.length :] + proposal.tokens], device=next(model.parameters()).device
        )
        logits = model(fed, None, *self.sources, cache=self.cache).logits[0]  # N+1 V
        reason, goes_on, steps = ends.reason(), True, self.row.steps + 1
        for place in range(len(proposal.tokens) + 1):
            here = logits[place, None]
            chosen, as_drafted = self._choose(here, proposal, place, chooser)
            if chooser.request.reports:
                report(here, chosen, [self.row], chooser.request.alternatives)
            goes_on = ends.go_on(self.number, self.row, int(chosen), steps, reason)
            self.tokens += self.row.ids[len(self.tokens) - len(self.row.prompt) :]  # nothing, if it is a stop
            if not (goes_on and as_drafted):
                break
        self.cache.crop(min(self.cache.length, len(self.tokens) - 1))
        return goes_on and len(self.row.ids) < most

    def _choose(
        self, logits: Tensor, proposal: Proposal, place: int, chooser: Chooser
    ) -> tuple[Tensor, bool]:
        """Choose the token after logits [1, V]; return it [1], and whether it is the draft token."""
        drafted = proposal.tokens[place] if place < len(proposal.tokens) else None
        if drafted is None or proposal.drawn_from is None:
            chosen = chooser.choose(logits, [self.number])
            return chosen, int(chosen) == drafted
        p = distribution(chooser.adjusted(logits, [self.number]), chooser.request)
        uniform, spare = chooser.roll([self.number]), chooser.roll([self.number])
        chosen, kept = accept(
            p, proposal.drawn_from[place].to(p), torch.tensor([drafted], device=p.device), uniform, spare
        )
        return chosen.to(logits.device), bool(kept)


def drafters_for(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    texts: Sequence[Sequence[int]],
    draft: Transformer | None,
) -> list[Drafter]:
    """Make a drafter for each row, or none. `texts` are the ids given: with an encoder, the sources."""
    config, rows = model.config, range(len(prompts.ids))
    if draft is None:
        looked_into = prompts.source is not None and config.source_vocab_size == config.vocab_size
        return [
            PromptLookup(request.lookup, texts[row] if looked_into else ()) for row in rows if request.lookup
        ]
    for name in ("family", "head", "vocab_size", "source_vocab_size"):
        mine, theirs = getattr(config, name), getattr(draft.config, name)
        refuse(
            mine != theirs,
            f"the draft's {name} is {theirs} and the model's {mine}: "
            "choose a draft with the same vocabulary and family",
        )
    return [DraftModel(draft, request.draft_tokens, request, prompts.rows([row])) for row in rows]


@torch.inference_mode()
def speculate(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    ends: Ends = LENGTH_ALONE,
    cache: Cache | None = None,
    *,
    drafters: Sequence[Drafter],
) -> list[Continuation]:
    """Decode with one drafter for each row; the result is that of `decode`."""
    check_request(model, request, prompts, ends)
    models = [model, *(drafter.model for drafter in drafters if isinstance(drafter, DraftModel))]
    refuse(
        not all(map(steps_back, models)),
        "a layer of the model, or of its draft, keeps a state that cannot take a rejected token back: "
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
        running.append(_SpeculativeRow(number, row, prompts.rows([number]), own, drafters[number]))
        unread = row.prompt[own.length : -1]  # the last token runs with the first draft tokens
        if unread:
            prefill(model, [unread], own, *running[-1].sources)
    while running:
        running = [row for row in running if row.step(model, most, chooser, ends)]
    return rows
