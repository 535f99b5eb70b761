"""What the model would say after each layer, and what each part adds to what it says.

    seen = lens(m, "Once upon a time")
    seen.layers, seen.columns                        # L + 1 layers, T tokens
    seen.top_names[3][-1]                            # the five best tokens after block 2, at the last token
    followed(m, "Once upon a time", " there")        # [L + 1, T] the probability of one answer
    result = contributions(m, "The cat sat on the", token=" mat", against=" floor")
    result.largest(5), result.total, result.logit       # total = logit

The logit lens takes the state after a layer through the final norm, whose statistics are taken anew, and
through the head, as if the layer were the last. For the last layer that is the model's own answer, bit for
bit.

A logit is a sum over direct contributions. Every part adds a vector to the residual stream, and the head
reads the sum through norms. With each norm held at its actual size (see `logit_attribution`) each head,
feed-forward and embedding adds one number to a token's logit, and biases get numbers of their own. What a
part does by way of later parts is not direct and is not counted for it.

Shapes: T tokens, C columns (T, or 1 for a classifier, or 2 for spans), L layers, D model, H heads, E head
width, R rows (tokens) that the head reads, N choices (the vocabulary, or the classes), K the best of them.
Only K of the N choices are kept, layer by layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from clearhead.core import dtypes
from clearhead.core.heads import LanguageHead
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.inside import inputs, names, results
from clearhead.inside.inputs import CachedPass, Choices, choices_of, find_column
from clearhead.inside.logit_attribution import Compared, LogitQuery, Term, parts_of, terms_of
from clearhead.run.generate.exits import stop_at
from clearhead.run.kernels.parts import like
from clearhead.variants.contexts import evaluating

TOGETHER = 32  # columns of which all layers are read at once
ROWS = 64  # columns whose probabilities over all choices are held at a time


@dataclass(frozen=True)
class Lens(results.Result):
    """What the model would say after each layer. Ranks count from 1; what is unknown has rank 0 and NaN."""

    layers: tuple[str, ...]  # L + 1: "embedding", "block 0", ...
    columns: tuple[str, ...]  # C: tokens, "whole text", or "begins" and "ends"
    kind: str  # what is chosen: token, class or place
    top: Tensor  # [L + 1, C, K] the best choices, best first
    top_names: tuple[tuple[tuple[str, ...], ...], ...]  # the same by name
    top_probabilities: Tensor  # [L + 1, C, K]
    entropy: Tensor  # [L + 1, C] bits
    divergence: Tensor  # [L + 1, C] bits: Kullback-Leibler, of the last layer from this one
    chosen: Tensor  # [C] what the model says in the end
    chosen_names: tuple[str, ...]
    chosen_probabilities: Tensor  # [L + 1, C]
    chosen_ranks: Tensor  # [L + 1, C]
    true: Tensor  # [C] the token that does come next (for a masked model: that stands there); -1: not known
    true_names: tuple[str | None, ...]
    true_probabilities: Tensor  # [L + 1, C]
    true_ranks: Tensor  # [L + 1, C]


def lens(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    target: inputs.Target = None,
    pair: str | None = None,
    top: int = 5,
    columns: Sequence[int] | None = None,
    translators: Callable[[Sequence[Tensor]], list[Tensor]] | None = None,
) -> Lens:
    """Read every layer of the stack that feeds the head; see `prepare` for what may be given.

    `top` says how many of the best choices are kept for each layer and column. `columns` are those that are
    read, by their numbers; None: all. `translators` take the states to what is read: a tuned or a Jacobian
    lens, see `translators`.
    """
    prepared = inputs.prepare(m, given, target, pair)
    choices = choices_of(prepared)
    refuse(top < 1, f"top {top} keeps nothing: choose 1 or more")
    some = [find_column(column, choices.columns) for column in columns or range(len(choices.columns))]
    layers = _read_layers(prepared, choices, some, translators=translators)
    last = layers[-1]
    chosen, true = last.topk(1, -1).indices[:, 0], _true(prepared, choices)[some]
    final = _log_shares(last)
    shares = final.exp()
    read = []
    for scores in layers:
        chunks = zip(*(torch.split(x, ROWS) for x in (scores, final, shares, chosen, true)))
        read += [_measure(min(top, choices.count), *chunk) for chunk in chunks]
    whole = {name: torch.cat([each[name] for each in read]).cpu() for name in read[0]}
    figures = {name: x.view(len(layers), len(last), *x.shape[1:]) for name, x in whole.items()}
    return Lens(
        layers=("embedding", *(f"block {layer}" for layer in range(len(layers) - 1))),
        columns=tuple(choices.columns[column] for column in some),
        kind=choices.kind,
        top_names=tuple(
            tuple(tuple(map(choices.name, row)) for row in layer) for layer in figures["top"].tolist()
        ),
        chosen=chosen.cpu(),
        chosen_names=tuple(map(choices.name, chosen.tolist())),
        true=true.cpu(),
        true_names=tuple(choices.name(token) if token >= 0 else None for token in true.tolist()),
        **figures,
    )


def best_choices(
    m: inputs.AnyModel, given: inputs.Given | inputs.Prepared, columns: Sequence[int]
) -> tuple[Choices, Tensor]:
    """Return the best choice after each layer at some columns, [L + 1, C]: `lens` without its figures."""
    prepared = inputs.prepare(m, given)
    choices = choices_of(prepared)
    some = [find_column(column, choices.columns) for column in columns]
    return choices, torch.stack([scores.argmax(-1) for scores in _read_layers(prepared, choices, some)]).cpu()


def _read_layers(
    prepared: inputs.Prepared,
    choices: Choices,
    some: list[int],
    reader: Transformer | None = None,
    translators: Callable[[Sequence[Tensor]], list[Tensor]] | None = None,
) -> list[Tensor]:
    """Return the scores of some columns after each layer: [C, N] each. Few columns are read at once.

    `reader` is the model whose head reads them, if not the one that was recorded.
    """
    reader = reader or prepared.model
    taps = names.states(prepared.model.main.spec)  # the embedding's, and each block's
    _, seen = prepared.record(*taps, logits="none")
    alone = choices.kind == "token" or prepared.m.config.head == "tagger"  # a column is a token's state
    states = [seen[tap][:, some] if alone else seen[tap] for tap in taps]
    states = states if translators is None else translators(states)
    groups = [torch.cat(states)] if len(some) <= TOGETHER else states
    scores = [row for group in groups for row in choices.scores(stopped_at(reader, group))]
    return scores if alone else [row[some] for row in scores]


def followed(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    token: str | int,
    target: inputs.Target = None,
    pair: str | None = None,
    columns: Sequence[int] | None = None,
) -> Tensor:
    """Return the probability of one choice after each layer, at each column: [L + 1, C]; see `lens`."""
    prepared = inputs.prepare(m, given, target, pair)
    choices = choices_of(prepared)
    choice = choices.find(token)
    some = [find_column(column, choices.columns) for column in columns or range(len(choices.columns))]
    alone = _with_one_choice(prepared.model, choice)
    if alone is None:
        read = (dtypes.wide(scores) for scores in _read_layers(prepared, choices, some))
        return torch.stack(
            [(scores[:, choice] - scores.logsumexp(-1)).exp().float().cpu() for scores in read]
        )
    sums = _log_sums(prepared, choices, some)
    scores = torch.cat(_read_layers(prepared, choices, some, alone), -1).T  # L + 1, C
    return (dtypes.wide(scores) - sums).exp().float().cpu()


def _log_sums(prepared: inputs.Prepared, choices: Choices, some: list[int]) -> Tensor:
    """Return the logarithm of the sum over all choices, [L + 1, C].

    It is kept with a cached pass: another choice then costs no matmul with the vocabulary.
    """
    kept = prepared.log_sums if isinstance(prepared, CachedPass) else dict[int, Tensor]()
    missing = [column for column in some if column not in kept]
    for first in range(0, len(missing), TOGETHER):
        few = missing[first : first + TOGETHER]
        read = (dtypes.wide(scores).logsumexp(-1) for scores in _read_layers(prepared, choices, few))
        kept.update(zip(few, torch.stack(list(read), 1)))
    return torch.stack([kept[column] for column in some], 1)


def _with_one_choice(model: Transformer, choice: int) -> Transformer | None:
    """Return the model with a head that scores one token alone; None where its head is another."""
    head = model.head
    if not isinstance(head, LanguageHead) or type(head.out) is not nn.Linear:
        return None
    weight, bias = head.out.weight, head.out.bias
    row = nn.Linear(weight.shape[1], 1, bias is not None, device="meta")
    row.weight = nn.Parameter(weight.detach()[choice : choice + 1], requires_grad=False)
    if bias is not None:
        row.bias = nn.Parameter(bias.detach()[choice : choice + 1], requires_grad=False)
    return like(model, type(model), head=like(head, type(head), out=row))


def stopped_at(model: Transformer, state: Tensor) -> Tensor:
    """Return the logits of a model that stops at this state of the residual stream, [B, T, D]."""
    with torch.no_grad(), evaluating(model):
        return stop_at(model, state)


def _true(prepared: inputs.Prepared, choices: Choices) -> Tensor:
    """Return the token that each column should say, [C]; -1 where it is not known."""
    unknown, ids = torch.full((len(choices.columns),), -1, device=prepared.main.device), prepared.main[0]
    if choices.kind != "token":
        return unknown
    if prepared.m.config.head == "lm":
        return torch.cat([ids[1:], unknown[:1]])
    return torch.where(ids == prepared.m.special.get("mask", -1), unknown, ids)


def _log_shares(scores: Tensor) -> Tensor:
    """Return the logarithm of each choice's share, finite where the share is 0, so that it times 0 is 0."""
    return dtypes.wide(scores).log_softmax(-1).clamp(min=-1e30)


def _measure(
    top: int, scores: Tensor, final: Tensor, shares: Tensor, chosen: Tensor, true: Tensor
) -> dict[str, Tensor]:
    """Return what is kept of some columns of one layer's scores [C, N]; `final` are the last log-shares."""
    logs = _log_shares(scores)  # C N
    best = scores.topk(top, -1).indices
    divergence = torch.linalg.vecdot(shares, final - logs).clamp(min=0)
    figures = {
        "top": best,
        "top_probabilities": logs.gather(-1, best).exp().float(),
        "entropy": (-torch.linalg.vecdot(logs.exp(), logs) / math.log(2)).float(),
        "divergence": (divergence / math.log(2)).float(),
    }
    for name, wanted in (("chosen", chosen), ("true", true)):
        place, known = wanted.clamp(min=0)[:, None], wanted >= 0
        probability = logs.gather(-1, place)[:, 0].exp()
        rank = 1 + (scores > scores.gather(-1, place)).sum(-1)
        figures[f"{name}_probabilities"] = torch.where(known, probability, math.nan).float()
        figures[f"{name}_ranks"] = torch.where(known, rank, 0)
    return figures


# Direct contributions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contributions(results.Result, Compared):
    """A logit as a sum; see `centred` in `logit_attribution`."""

    columns: tuple[str, ...]  # as in `Choices`: the tokens, mostly
    column: int  # where it is read
    choice: str  # whose logit it is
    against: str | None  # less whose logit; None: less the mean of all, where it is `centred`
    centred: bool
    probability: float | None  # of the choice; None where the model gives numbers
    terms: tuple[Term, ...]  # in the order of the forward pass
    logit: float  # what the model says; before the soft cap where it has one
    capped: float | None  # what it says after that cap
    total: float  # the sum of all terms: `logit`, except for rounding

    def largest(self, count: int) -> list[Term]:
        """Return the largest terms, of either sign."""
        return sorted(self.terms, key=lambda term: -abs(term.value))[:count]

    def heads(self, kind: str = "self") -> Tensor:
        """Return heads as a table [L, H], kind self or cross; NaN where a layer has fewer."""
        heads = [term for term in self.terms if term.kind == kind]
        layers = [[term.value for term in own] for _, own in groupby(heads, key=lambda term: term.layer)]
        return torch.from_numpy(results.filled(layers)).float()


def contributions(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    token: str | int | None = None,
    position: int = -1,
    target: inputs.Target = None,
    against: str | int | None = None,
    pair: str | None = None,
) -> Contributions:
    """Return what each part adds to one logit.

    Args:
        m, given, target, pair: as for `prepare`.
        token: whose logit: a token, by its text or id; a class, for a classifier or tagger; a place,
            "4:token", for spans. None: what the model says there.
        position: of the token that reads; -1 is the last. For spans 0 is where one begins, 1 where it ends.
        against: subtract the logit of this one, or of the "runner-up", the best other one. None: subtract the
            mean of all logits, so that what lifts every one alike counts for nothing (not where classes are
            numbers, or several may hold).
    """
    query = LogitQuery.of(m, given, token, position, target, against, pair)
    terms = terms_of(query, parts_of(query))
    return Contributions(
        columns=query.choices.columns,
        column=query.column,
        choice=query.name,
        against=query.against,
        centred=query.centred,
        probability=query.probability,
        terms=terms,
        logit=query.logit,
        capped=query.capped,
        total=math.fsum(term.value for term in terms),
    )
