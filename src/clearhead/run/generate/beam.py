"""Beam search: carry on the best few continuations of each prompt together, and return the best that ended.

A prompt is read once, and so is a source; its beams then share what they have in common. Of the cache only
tokens written since the prompt move from beam to beam, and only to beams that change; keys of a source are
not copied at all.

A continuation of L tokens, the one that ended it included, has the score sum of log-probabilities / L **
length_penalty.

Shapes: B prompts still running, G groups, N beams of a prompt, M = N / G beams of a group, C candidates, L
tokens written, V vocabulary.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.core.cache import Cache, LayerKV
from clearhead.core.dtypes import precise, wide
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.learn.batches.ragged import by_length
from clearhead.run.generate.decode import RESERVE, check_request, is_stretched, prefill
from clearhead.run.generate.request import REMOVED, Request
from clearhead.run.generate.sequence import (
    LENGTH_ALONE,
    Ends,
    Prompts,
    Standing,
    adjust,
    adjust_by,
    check_best,
)
from clearhead.run.kernels.native import best_tokens

# Beams carried on together. Prompts are taken in the order of their length, so that less is padding. On a CPU
# more rows gain nothing.
ROWS_CPU, ROWS = 64, 1024


class Hypothesis(NamedTuple):
    """A continuation that has ended."""

    score: float
    ids: list[int]  # the new tokens, without the one that ended it
    stop_reason: str  # eos, length or time


@dataclass
class Search:
    """The best hypotheses that one group of a prompt's beams has found, as many as it has beams."""

    request: Request
    found: list[Hypothesis] = field(default_factory=list)  # best first

    def score(self, total: float, length: int) -> float:
        """Return the score of a sum of log-probabilities over this length."""
        return total / float(length**self.request.length_penalty)

    def add(self, hypothesis: Hypothesis) -> None:
        """Keep a hypothesis if it is among the best."""
        self.found = sorted([*self.found, hypothesis], key=lambda end: -end.score)[: self.request.group_size]

    def done(self, best: float, length: int) -> bool:
        """Return True where the search may end; its best open beam has the sum `best` over `length` tokens.

        Not before it has as many hypotheses as beams, unless no beam is open. Then at once with
        `early_stopping` True, else when the open beam can no more enter. Its sum can only fall, so the best
        score it may reach is its sum over the greatest length if the penalty is above 0, and over the present
        one otherwise. "never" goes by that, and misses nothing; False takes the present length in either
        case, which ends earlier and is the custom.
        """
        if best == REMOVED or len(self.found) < self.request.group_size:
            return best == REMOVED
        early = self.request.early_stopping
        longest = self.request.max_new_tokens
        reach = longest if early == "never" and self.request.length_penalty > 0 else length
        return early is True or self.score(best, reach) <= self.found[-1].score


class Candidates(NamedTuple):
    """Tokens that may extend the beams of each row, best first."""

    totals: Tensor  # B C: sums of log-probabilities
    origins: Tensor  # B C: the beam each goes on from
    tokens: Tensor  # B C
    ended: Tensor  # B C: does the token end it?

    def going_on(self, count: int) -> "Candidates":
        """Return the best `count` of each row that do not end, filled up with others whose sum is -inf."""
        open_ones = self._replace(totals=self.totals.masked_fill(self.ended, REMOVED))
        index = open_ones.totals.topk(count, dim=-1).indices
        return Candidates(*(x.gather(1, index) for x in open_ones))


class Tops(NamedTuple):
    """The best tokens of each beam, best first."""

    values: Tensor  # B N C: log-probabilities
    tokens: Tensor  # B N C


@torch.inference_mode()
def beam_search(
    model: Transformer, request: Request, prompts: Prompts, ends: Ends = LENGTH_ALONE
) -> list[list[Hypothesis]]:
    """Find the `request.num_return` best continuations of each prompt, best first; all, if there are fewer.

    Penalties, allowed and banned tokens change log-probabilities; nothing is drawn. Once the time of `ends`
    is over, the open beams are taken as they are.
    """
    check_request(model, request, prompts, ends)
    mask = prompts.source_mask
    lengths = list(map(len, prompts.ids)) if mask is None else mask.sum(1).tolist()
    on_cpu = next(model.parameters()).device.type == "cpu"
    at_once = max(1, (ROWS_CPU if on_cpu else ROWS) // request.num_beams)
    size = math.ceil(len(lengths) / math.ceil(len(lengths) / at_once))  # batches of one size, or nearly
    found: dict[int, list[Hypothesis]] = {}
    for rows in by_length(lengths, lambda count, _: count <= size):
        found |= zip(rows, _search(model, request, prompts.rows(rows), ends))
    return [found[row] for row in range(len(lengths))]


def _search(model: Transformer, request: Request, prompts: Prompts, ends: Ends) -> list[list[Hypothesis]]:
    """Search for the continuations of prompts that are read together."""
    longest = prompts.longest
    cache = Cache(reserve=min(longest + request.max_new_tokens, RESERVE))
    logits = prefill(model, prompts.ids, cache, *prompts.sources, vectors=prompts.vectors)  # B V
    B, N, M, device = len(prompts.ids), request.num_beams, request.group_size, logits.device
    stops = torch.tensor(list(ends.stop_ids), dtype=torch.long, device=device)
    searches = [[Search(request) for _ in range(request.num_beam_groups)] for _ in prompts.ids]
    running, stretched = list(range(B)), is_stretched(model, longest)
    # All beams of a group are alike at first, so that all but one must not count.
    totals = precise(torch.full((B, N), REMOVED, device=device))
    totals[:, ::M] = 0.0
    written = torch.empty(B, N, 0, dtype=torch.long, device=device)
    logits = logits.repeat_interleave(N, 0)
    cache.reorder(torch.arange(B, device=device).repeat_interleave(N), cross=False)
    for step in range(1, request.max_new_tokens + 1):
        ending = ends.reason() or ("length" if step == request.max_new_tokens else None)
        scores = _scores(logits, request, written, prompts, running, ends.stop_ids)
        groups = _propose(scores, totals, request, stops)
        for number, group in enumerate(groups):
            _collect([searches[row][number] for row in running], group, written, step, ending)
        # B N
        chosen = Candidates(*(torch.cat(parts, 1) for parts in zip(*(group.going_on(M) for group in groups))))
        best = chosen.totals[:, ::M].tolist()  # of each group
        done = [
            all(search.done(total, step) for search, total in zip(searches[row], best[i]))
            for i, row in enumerate(running)
        ]
        if ending is not None or all(done):
            break
        # B N: the cache's row that each goes on from
        rows = torch.arange(len(running), device=device)[:, None] * N + chosen.origins
        written = torch.cat([written.flatten(0, 1)[rows], chosen.tokens[..., None]], -1)  # B N L
        if any(done):
            kept = torch.tensor([i for i, over in enumerate(done) if not over], device=device)
            running = [row for row, over in zip(running, done) if not over]
            written, chosen = written[kept], Candidates(*(x[kept] for x in chosen))
            cache.reorder(rows[kept].flatten(), cross=False)
            cache.reorder_sources(kept)
        else:
            _move(cache, rows.flatten(), longest)
        totals = chosen.totals
        length = max(len(prompts.ids[row]) for row in running) + step
        if stretched == is_stretched(model, length):
            logits = model(chosen.tokens.view(-1, 1), cache=cache, logits="last").logits[:, -1]  # BN V
            continue
        refuse(
            prompts.source is not None,
            f"beams cannot cross the {length - 1} tokens at which longrope changes its divisors, "
            "with an encoder: leave them out, or ask for fewer tokens",
        )
        texts = [[*prompts.ids[row], *ids] for row, beams in zip(running, written.tolist()) for ids in beams]
        stretched, cache = not stretched, Cache(cache.reserve)
        own = [prompts.vectors_of(row) for row, beams in zip(running, written) for _ in beams]
        logits = prefill(model, texts, cache, vectors=own)
    ended = [[hypothesis for search in row for hypothesis in search.found] for row in searches]
    return [sorted(row, key=lambda end: -end.score)[: request.num_return] for row in ended]


def _scores(
    logits: Tensor,
    request: Request,
    written: Tensor,
    prompts: Prompts,
    running: list[int],
    stops: frozenset[int],
) -> Tensor | Tops:
    """Return log-probabilities with penalties and bans: [BN, V] -> [B, N, V]; or the best of them alone.

    Those suffice where rules only remove tokens, which they may do to logits as well.
    """
    B, N, L = written.shape
    rows = [row for row in running for _ in range(N)]
    lengths, logits = [len(prompts.ids[row]) for row in rows], wide(logits)
    standing = Standing(L, request.max_new_tokens - L, lengths, stops)
    forced = (request.forced_first is not None and L == 0) or (request.forced_last and standing.left == 1)
    changed = request.logit_bias or request.looks_back or request.renormalize or request.diversity_penalty
    if not (forced or changed):
        count = min(_count(request, len(stops)), logits.shape[-1])
        found = best_tokens(logits, adjust_by(logits, request, (), standing), count)
        if found is not None:
            check_best(found[0][:, 0], request)
            return Tops(*(x.view(B, N, -1) for x in found))
    seen, sources = [], []
    if request.looks_back:
        seen = [[*prompts.ids[row], *ids] for row, ids in zip(rows, written.flatten(0, 1).tolist())]
    if request.no_repeat_source_ngram:
        texts = {row: prompts.text(row) for row in running}
        sources = [texts[row] for row in rows]
    values = adjust(logits.log_softmax(-1), request, seen, lengths, sources, standing)
    return (values.log_softmax(-1) if request.renormalize else values).view(B, N, -1)


def _count(request: Request, stops: int) -> int:
    """Return how many candidates a group needs, so that every beam continues even if some end."""
    return max(2, 1 + stops) * request.group_size


def _propose(scores: Tensor | Tops, totals: Tensor, request: Request, stops: Tensor) -> list[Candidates]:
    """Return the best candidates of each group: log-probabilities [B, N, V], sums so far [B, N]."""
    M, count = request.group_size, _count(request, len(stops))
    groups: list[Candidates] = []
    for first in range(0, request.num_beams, M):
        if isinstance(scores, Tops):
            top = Tops(*(x[:, first : first + M] for x in scores))
        else:
            own = scores[:, first : first + M]
            if groups and request.diversity_penalty:
                taken = torch.cat([group.going_on(M).tokens for group in groups], 1)
                one = torch.ones_like(taken, dtype=own.dtype)
                counts = torch.zeros_like(scores[:, 0]).scatter_add_(1, taken, one)  # B V
                own = own - request.diversity_penalty * counts[:, None]
            top = Tops(*own.topk(min(count, own.shape[-1]), dim=-1))
        each = top.values.shape[-1]
        sums = (precise(top.values) + totals[:, first : first + M, None]).flatten(1)
        best = sums.topk(min(count, sums.shape[1]), dim=-1)  # of the group, B C
        tokens = top.tokens.flatten(1).gather(1, best.indices)
        groups.append(
            Candidates(best.values, first + best.indices // each, tokens, torch.isin(tokens, stops))
        )
    return groups


def _collect(
    searches: list[Search], group: Candidates, written: Tensor, length: int, ending: str | None
) -> None:
    """Keep those of each row's first M candidates that end here; where all rows end (`ending`), all."""
    first = Candidates(*(x[:, : searches[0].request.group_size] for x in group))
    over = (first.totals > REMOVED) & (first.ended | (ending is not None))
    overflowing = over.nonzero().tolist()
    totals, origins, tokens, ended = (x.tolist() for x in first) if overflowing else ([], [], [], [])
    for row, place in overflowing:
        ids, search = written[row, origins[row][place]].tolist(), searches[row]
        last, reason = ([], "eos") if ended[row][place] else ([tokens[row][place]], str(ending))
        search.add(Hypothesis(search.score(totals[row][place], length), ids + last, reason))


def _move(cache: Cache, rows: Tensor, since: int) -> None:
    """Copy row `rows[i]` of the cache to row i; rows of one prompt differ only from slot `since` on."""
    to = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
    if not len(to) or cache.length == since:
        return
    origins = rows[to]
    for keys in cache.layers.values():
        if type(keys) is not LayerKV:
            keys.reorder(rows)
            continue
        for buffer in keys.buffers():
            new = buffer.narrow(2, since, cache.length - since)
            new.index_copy_(0, to, new.index_select(0, origins))
