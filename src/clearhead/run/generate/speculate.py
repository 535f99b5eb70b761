"""Where draft tokens come from: cheap proposals, all of which one run of the model verifies.

The result is what plain decoding gives. Draft tokens from the row's own text (`PromptLookup`) are not drawn,
so the model draws as it always would, by the same seed, and goes on for as long as it draws the draft tokens:
the tokens themselves are the same. Those of a second model (`DraftModel`), or of the model's own layers for
multi-token prediction (`MTPDrafter`), are drawn from a distribution q; each is accepted with probability
min(1, p/q), and the first that is not is replaced by a draw from max(p - q, 0): the distribution is the same.

`decode` and the server verify them by `verify` (`sequence.py`), and drop the keys of those that are rejected.

Shapes: B rows, S source length, V vocabulary, N draft tokens.
"""

import itertools
import sys
from collections import abc

import torch
from torch import Tensor

from clearhead.core.cache import Cache
from clearhead.core.config import TABLES
from clearhead.core.masks import tokens_from
from clearhead.core.stack import Inputs
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.run.generate.decode import PREFILL_CHUNK, prefill
from clearhead.run.generate.request import FILTERS, Request
from clearhead.run.generate.sequence import Drafter, Prompts, Proposal, Roll, adjust_by, distribution, draw
from clearhead.run.generate.stream import agreed
from clearhead.variants.mtp import states_after

MATCHED = (3, 2)  # how many of the last tokens must have stood together before; one alone says too little


class PromptLookup(Drafter):
    """Drafts the tokens that followed the same n-gram earlier in the row, or in the text `before`."""

    def __init__(self, count: int, before: abc.Sequence[int] = ()) -> None:
        self.count, self.start = count, len(before)
        self.text: list[int] = []
        self.next: dict[tuple[int, ...], int] = {}  # where the text last went on after these tokens
        self._read(before)

    def _read(self, tokens: abc.Sequence[int]) -> None:
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


class Draws:
    """How draft tokens are drawn from logits, by the options that say nothing of earlier tokens."""

    def __init__(self, sampling: Request) -> None:
        # Rules that look back are left to the model that verifies: any q gives the right result.
        shared = ("temperature", *FILTERS, "logit_bias", "allowed", "banned")
        self.sampling = Request(**{name: getattr(sampling, name) for name in shared})
        self.drafted: list[int] = []
        self.drawn_from: list[Tensor] = []

    def draw(self, logits: Tensor, roll: Roll) -> None:
        """Add a draft token, drawn from logits [1, V]."""
        q = distribution(adjust_by(logits, self.sampling), self.sampling)
        self.drawn_from.append(q)
        self.drafted.append(int(draw(q, roll())))

    @property
    def proposal(self) -> Proposal:
        """All of them."""
        return Proposal(self.drafted, self.drawn_from if self.sampling.temperature > 0 else None)


class DraftModel(Drafter):
    """Draft tokens of a second, smaller model."""

    model: Transformer

    def __init__(
        self, model: Transformer, count: int, sampling: Request, prompts: Prompts, chunk: int = sys.maxsize
    ) -> None:
        """Draft up to `count` tokens at a time; a call reads `chunk` tokens at most before it drafts any."""
        self.model, self.count, self.sources, self.chunk = model, count, prompts.sources, chunk
        self.draws, self.cache = Draws(sampling), Cache()
        self.length = 0  # tokens given at the last call

    def propose(self, tokens: list[int], most: int, roll: Roll) -> Proposal:
        """See `Drafter`."""
        config, count = self.model.config, min(self.count, most)
        if config.positions in TABLES:
            count = min(count, config.max_positions - len(tokens) + 1)
        draws = self.draws
        kept = self.length + agreed(draws.drafted, tokens[self.length :])  # with the accepted draft tokens
        self.cache.crop(min(self.cache.length, kept))
        self.length, self.draws = len(tokens), (draws := Draws(draws.sampling))
        if count > 0 and len(tokens) - self.cache.length > self.chunk:
            prefill(self.model, [self.unread(tokens)[: self.chunk]], self.cache, *self.sources)
            return Proposal([])
        while len(draws.drafted) < count:
            unread = self.unread(tokens) if not draws.drafted else draws.drafted[-1:]
            draws.draw(prefill(self.model, [unread], self.cache, *self.sources), roll)
        return draws.proposal

    def unread(self, tokens: list[int]) -> list[int]:
        """See `Drafter`."""
        return tokens[self.cache.length :]


class MTPDrafter(Drafter):
    """Draft tokens of the model's own MTP layers, from the states that its last block gave the head.

    Layer k reads the state of token i from layer k - 1 and token i + k, and drafts token i + k + 1. Past the
    last layer, that layer reads its own states and drafts.
    """

    model: Transformer

    def __init__(self, model: Transformer, count: int, sampling: Request) -> None:
        """Draft up to `count` tokens at a time."""
        assert model.mtp is not None
        self.model, self.count, self.draws = model, count, Draws(sampling)
        self.layers, self.caches = list(model.mtp), [Cache() for _ in model.mtp]
        self.start: int | None = None  # the first token whose state is here: those of a kept prefix are not
        self.observed: list[tuple[int, Tensor]] = []  # states since the last proposal, and where they begin
        self.states = [torch.empty(0)] * len(self.layers)  # that a layer has not read next to known tokens

    def observe(self, start: int, states: Tensor) -> None:
        """Take the states [1, N, D] of tokens from position `start` on, in place of those from there on."""
        if self.start is None:
            self.start, self.states = start, [states[:, :0]] * len(self.layers)
        start -= self.start
        while self.observed and self.observed[-1][0] >= start:
            self.observed.pop()
        if self.observed:
            first, before = self.observed[-1]
            self.observed[-1] = (first, before[:, : start - first])
        self.observed.append((start, states))

    def unread(self, tokens: list[int]) -> list[int]:
        """See `Drafter`."""
        return tokens[(self.start or 0) + self.caches[0].length + 1 :]

    def _keep(self, layer: int, start: int, states: Tensor) -> None:
        read = self.caches[layer].length
        before = self.states[layer][:, : max(0, start - read)]
        self.states[layer] = torch.cat([before, states[:, max(0, read - start) :]], 1)

    def propose(self, tokens: list[int], most: int, roll: Roll) -> Proposal:
        """See `Drafter`; the states of all tokens but the last one were observed."""
        if self.observed:
            self._keep(0, self.observed[0][0], torch.cat([states for _, states in self.observed], 1))
            self.observed.clear()
        ids, draws = tokens[self.start :], Draws(self.draws.sampling)
        last, count = len(ids) - 1, min(self.count, most)
        if self.start is None or last < 1 or count < 1:
            return Proposal([])
        read, hidden = [cache.length for cache in self.caches], self.states[0]
        for number in range(count):
            layer = min(number, len(self.layers) - 1)
            first, later = self.caches[layer].length, ids + draws.drafted
            if number == layer:
                hidden = self._run(layer, self.states[layer][:, : last - first], later[first + layer + 1 :])
                if layer + 1 < len(self.layers):
                    self._keep(layer + 1, first, hidden)
            else:
                hidden = self._run(layer, hidden[:, -1:], later[-1:])
            draws.draw(self.model.head(hidden[:, -1:], None)[:, -1], roll)
        for layer, cache in enumerate(self.caches):  # what was read next to draft tokens is forgotten
            cache.crop(min(cache.length, max(0, last - layer)))
            self.states[layer] = self.states[layer][:, cache.length - read[layer] :]
        return draws.proposal

    def _run(self, layer: int, hidden: Tensor, ids: list[int]) -> Tensor:
        """Run a layer on states [1, N, D], with a later token for each -> [1, N, D]."""
        cache, later, found = self.caches[layer], torch.tensor([ids], device=hidden.device), []
        for states, some in zip(*(torch.split(x, PREFILL_CHUNK, 1) for x in (hidden, later))):
            tokens = tokens_from(1, some.shape[1], some.device, before=cache.tokens)
            found.append(states_after(self.model, self.layers[layer], states, Inputs(some), tokens, cache))
        return torch.cat(found, 1)


def check_draft(model: Transformer, draft: Transformer) -> None:
    """Refuse a draft model whose tokens are not the model's."""
    for name in ("family", "head", "vocab_size", "source_vocab_size"):
        mine, theirs = getattr(model.config, name), getattr(draft.config, name)
        refuse(
            mine != theirs,
            f"the draft's {name} is {theirs} and the model's {mine}: "
            "choose a draft with the same vocabulary and family",
        )


def check_mtp(model: Transformer, draft: str) -> None:
    """Refuse drafts of MTP layers from a model that has none."""
    refuse(
        draft != "mtp",
        f'draft "{draft}" is not known: give a smaller model, or "mtp" for the model\'s own layers',
    )
    refuse(
        not model.config.n_mtp_layers,
        'draft "mtp" is for a model with MTP layers: leave it out, or train with model.n_mtp_layers',
    )


def drafters_for(
    model: Transformer,
    request: Request,
    prompts: Prompts,
    texts: abc.Sequence[abc.Sequence[int]],
    draft: Transformer | str | None,
) -> list[Drafter]:
    """Make a drafter for each row, or none. `texts` are the ids given: with an encoder, the sources."""
    config, rows = model.config, range(len(prompts.ids))
    if isinstance(draft, str):
        return [MTPDrafter(model, request.draft_tokens, request) for _ in rows]
    if draft is None:
        looked_into = prompts.source is not None and config.source_vocab_size == config.vocab_size
        return [
            PromptLookup(request.lookup, texts[row] if looked_into else ()) for row in rows if request.lookup
        ]
    check_draft(model, draft)
    return [DraftModel(draft, request.draft_tokens, request, prompts.rows([row])) for row in rows]
