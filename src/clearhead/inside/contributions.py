"""Direct contributions: how much each head, each feed-forward and each embedding adds to a token's logit.

Every part adds a vector to the residual stream, and the head reads the sum through norms. With each norm on
the way held at its actual size (see `frozen`) the logit is the sum of one number for each part, and biases
get numbers of their own. What a part does by way of later parts is not direct and is not counted for it.

    found = contributions(m, "The cat sat on the", token=" mat", against=" floor")
    found.largest(5), found.total, found.logit              # total = logit

Shapes: R rows (tokens) that the head reads, T tokens, D model, H heads, E head width, L layers.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.errors import InputError
from clearhead.inside.choices import Choices, choices_of, find_column
from clearhead.inside.frozen import (
    FrozenNorm,
    bias_term,
    exact,
    freeze,
    read_back,
    read_span,
    through_linear,
)
from clearhead.inside.inputs import AnyModel, Given, Prepared, Target, prepare
from clearhead.inside.names import AttentionHead
from clearhead.inside.results import Result, filled
from clearhead.model.heads import LanguageHead
from clearhead.model.masks import tokens_from
from clearhead.model.stack import Block
from clearhead.model.taps import Recording
from clearhead.model.transformer import Output

TAPS = ("resid_pre", "resid_post", "attention.z", "attention.out", "feedforward.out")


@dataclass(frozen=True)
class Term:
    """One part and what it adds."""

    name: str  # "3.2" for a head, "feedforward 3", "token embedding", ...
    kind: str  # self or cross: a head; feedforward, embedding, bias
    value: float
    layer: int | None = None
    head: int | None = None


@dataclass(frozen=True)
class Contributions(Result):
    """A logit as a sum."""

    json_names = ("columns", "column", "choice", "against", "terms", "logit", "capped", "total")

    columns: tuple[str, ...]  # as in `choices`: the tokens, mostly
    column: int  # where it is read
    choice: str  # whose logit it is
    against: str | None  # less whose logit
    terms: tuple[Term, ...]  # in the order of the forward pass
    logit: float  # what the model says; before the soft cap where it has one
    capped: float | None = None  # what it says behind that cap

    @property
    def total(self) -> float:
        """The sum of all terms: `logit`, except for rounding."""
        return math.fsum(term.value for term in self.terms)

    def largest(self, count: int) -> list[Term]:
        """Return the largest terms, of either sign."""
        return sorted(self.terms, key=lambda term: -abs(term.value))[:count]

    def heads(self, kind: str = "self") -> Tensor:
        """Return heads as a table [L, H], kind self or cross; NaN where a layer has fewer."""
        layers: dict[int | None, list[float]] = {}
        for term in self.terms:
            if term.kind == kind:
                layers.setdefault(term.layer, []).append(term.value)
        return torch.from_numpy(filled(list(layers.values()))).float()


@dataclass(frozen=True)
class Sublayer:
    """What one sublayer gave, and its way into the stream: inner norm, scale, sum, outer norm."""

    part: str  # attention, cross or feedforward
    y: Tensor  # [R, D]
    scale: float
    inner: FrozenNorm
    outer: FrozenNorm


def contributions(
    m: AnyModel,
    given: Given,
    token: str | int | None = None,
    position: int = -1,
    target: Target = None,
    against: str | int | None = None,
    pair: str | None = None,
) -> Contributions:
    """Return what each part adds to one logit; see `prepare` for what may be given.

    Args:
        m: what `load` gave, or a bare model.
        given: text, token ids, or an image.
        token: whose logit: a token, by its text or id; a class, for a classifier or tagger; a place,
            "4:token", for spans. None: what the model says there.
        position: of the token that reads; -1 is the last. For spans 0 is where one begins, 1 where it ends.
        target: what the decoder of an encoder-decoder has written.
        against: subtract the logit of this one.
        pair: the second text of a pair.
    """
    prepared = prepare(m, given, target, pair)
    choices, model = choices_of(prepared), prepared.model
    column = find_column(position, choices.columns)
    taps = (*TAPS, "cross.z", "cross.out") if model.main.spec.cross else TAPS
    output, seen = prepared.record(*(f"blocks.*.{tap}" for tap in taps))
    best = int(choices.scores(output.required_logits)[0, column].argmax())
    choice = best if token is None else choices.find(token)
    other = None if against is None else choices.find(against)
    if other == choice:
        raise InputError(
            f'"{choices.name(choice)}" against itself is always 0: choose another to compare it with'
        )
    logit, capped = _logits(choices, output, column, choice, other)
    return Contributions(
        columns=choices.columns,
        column=column,
        choice=choices.name(choice),
        against=None if other is None else choices.name(other),
        terms=tuple(_terms(prepared, choices, output, seen, column, choice, other)),
        logit=logit,
        capped=capped,
    )


def _logits(
    choices: Choices, output: Output, column: int, choice: int, other: int | None
) -> tuple[float, float | None]:
    """Return the logit, or the difference of two, before the soft cap, and behind it where there is one."""

    def difference(scores: Tensor) -> float:
        return float(scores[choice]) - (0.0 if other is None else float(scores[other]))

    head = choices.prepared.model.head
    logit = difference(choices.scores(output.required_logits)[0, column])
    if not isinstance(head, LanguageHead) or head.softcap is None:
        return logit, None
    uncapped = copy.copy(head)
    uncapped.softcap = None
    with torch.no_grad():
        return difference(uncapped(output.hidden[:, column : column + 1], None)[0, 0]), logit


def _terms(
    prepared: Prepared,
    choices: Choices,
    output: Output,
    seen: Recording,
    column: int,
    choice: int,
    other: int | None,
) -> list[Term]:
    """Return every term in the order of the forward pass; biases that add nothing are left out."""
    stack, head = prepared.model.main, prepared.model.head
    if choices.kind == "place":
        read = read_span(head, column, choice, other)
    else:
        read = read_back(head, exact(output.hidden[0]), column, choice, other)
    rows = read.rows
    final = freeze(stack.norm, exact(seen[f"blocks.{stack.spec.n_layers - 1}.resid_post"][0])[rows])
    backwards = [
        Term("head bias", "bias", read.bias),
        Term("head transform", "bias", read.transform),
        Term("final norm bias", "bias", final.shift(read.directions)),
    ]
    direction = final.back(read.directions)
    for layer, block in reversed(list(enumerate(stack.layers()))):
        for sublayer in reversed(_sublayers(block, layer, seen, rows)):
            terms, direction = _sublayer_terms(sublayer, block, layer, seen, rows, direction)
            backwards += reversed(terms)
    backwards += reversed(_embedding_terms(prepared, rows, direction))
    return [term for term in reversed(backwards) if term.value or term.kind != "bias"]


def _sublayers(block: Block, layer: int, seen: Recording, rows: Tensor) -> list[Sublayer]:
    """Return what one block added to the stream, in order, at the rows that are read."""
    x, found = exact(seen[f"blocks.{layer}.resid_pre"][0])[rows], []
    parts = {
        "attention": block.attention_residual,
        "cross": block.cross_residual,
        "feedforward": block.feedforward_residual,
    }
    for part, residual in parts.items():
        if residual is not None:
            y = exact(seen[f"blocks.{layer}.{part}.out"][0])[rows]
            inner = freeze(residual.inside, y)
            x = x + residual.scale * inner.forward(y)
            outer = freeze(residual.after, x)
            x = outer.forward(x)
            found.append(Sublayer(part, y, residual.scale, inner, outer))
    return found


def _sublayer_terms(
    sublayer: Sublayer, block: Block, layer: int, seen: Recording, rows: Tensor, direction: Tensor
) -> tuple[list[Term], Tensor]:
    """Return the terms of one sublayer, and the direction [R, D] before it."""
    part, shift, direction = sublayer.part, sublayer.outer.shift(direction), sublayer.outer.back(direction)
    scaled = direction * sublayer.scale
    norm_bias = Term(f"{part} norm bias {layer}", "bias", shift + sublayer.inner.shift(scaled), layer)
    towards = sublayer.inner.back(scaled)
    if part == "feedforward":
        value = float((towards * sublayer.y).sum())
        return [Term(f"feedforward {layer}", "feedforward", value, layer), norm_bias], direction
    kind, attention = ("self", block.attention) if part == "attention" else ("cross", block.cross)
    assert attention is not None
    z = exact(seen[f"blocks.{layer}.{part}.z"][0][:, rows])  # H R E
    weight = exact(attention.out.weight).view(-1, attention.n_heads, attention.d_value)  # D H E
    values = torch.einsum("hre,dhe,rd->h", z, weight, towards).tolist()
    heads = [
        Term(str(AttentionHead(kind, layer, number)), kind, value, layer, number)
        for number, value in enumerate(values)
    ]
    bias = Term(f"{part} bias {layer}", "bias", bias_term(attention.out.bias, towards), layer)
    return [*heads, bias, norm_bias], direction


def _embedding_terms(prepared: Prepared, rows: Tensor, direction: Tensor) -> list[Term]:
    """Return what the tables add: the input itself, segments, positions, and biases on their way."""
    stack = prepared.model.main
    embedding = stack.embedding
    with torch.no_grad():
        front = embedding.front(prepared.main)
        where = stack.positions.embed(tokens_from(1, front.shape[1], front.device).positions, stack.dtype)
    parts = {"patch embedding" if prepared.main.is_floating_point() else "token embedding": front}
    if embedding.types is not None:
        first = torch.zeros(front.shape[:2], dtype=torch.long, device=front.device)
        parts["segment embedding"] = embedding.types(first if prepared.types is None else prepared.types)
    if where is not None:
        parts["position embedding"] = where
    vectors = {name: exact(x[0])[rows] for name, x in parts.items()}  # R D
    bias = 0.0
    if embedding.project is not None:
        direction, bias = through_linear(embedding.project, direction)
    norm = freeze(embedding.norm, torch.stack(list(vectors.values())).sum(0))
    bias, direction = bias + norm.shift(direction), norm.back(direction)
    terms = [Term(name, "embedding", float((direction * x).sum())) for name, x in vectors.items()]
    return [*terms, Term("embedding bias", "bias", bias)]
