"""Direct contributions: how much each head, each feed-forward and each embedding adds to a token's logit.

Every part adds a vector to the residual stream, and the head reads the sum through norms. With each norm on the way
held at its actual size (see `frozen`) the logit is the sum of one number for each part, and biases get numbers of their
own. What a part does by way of later parts is not direct and is not counted for it.

    found = contributions(m, "The cat sat on the", token=" mat", against=" floor")
    found.largest(5), found.total, found.logit              # total = logit

Shapes: R rows (tokens) that the head reads, T tokens, D model, H heads, E head width, L layers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.hub.pixels import Image
from clearhead.inside.choices import Choices, choices_of, find_column
from clearhead.inside.frozen import FrozenNorm, exact, freeze, read_back, read_span
from clearhead.inside.inputs import Prepared, prepare
from clearhead.inside.names import Head
from clearhead.model.attention import Attention
from clearhead.model.block import Block, Residual
from clearhead.model.heads import LanguageHead
from clearhead.model.masks import tokens_from
from clearhead.model.taps import Recording
from clearhead.model.transformer import Output, Transformer

TAPS = ("resid_pre", "resid_post", "attention.z", "attention.out", "feedforward.out")
CROSS_TAPS = ("cross.z", "cross.out")


@dataclass(frozen=True)
class Term:
    """One part and what it adds."""

    name: str  # "3.2" for a head, "feedforward 3", "token embedding", ...
    kind: str  # self or cross: a head; feedforward, embedding, bias
    value: float
    layer: int | None = None
    head: int | None = None


@dataclass(frozen=True)
class Contributions:
    """A logit as a sum."""

    columns: tuple[str, ...]  # as in `choices`: the tokens, mostly
    column: int  # where it is read
    choice: str  # whose logit it is
    against: str | None  # less whose logit
    terms: tuple[Term, ...]  # in the order of the forward pass
    logit: float  # what the model says; before the soft cap where it has one
    capped: float | None = None  # what it says behind that cap

    @property
    def total(self) -> float:
        """The sum of all terms: `logit`, but for rounding."""
        return math.fsum(term.value for term in self.terms)

    def largest(self, count: int) -> list[Term]:
        """The terms that weigh most, of either sign."""
        return sorted(self.terms, key=lambda term: -abs(term.value))[:count]

    def heads(self, kind: str = "self") -> Tensor:
        """Heads as a table [L, H], kind self or cross; NaN where a layer has fewer."""
        found = [term for term in self.terms if term.kind == kind]
        size = [1 + max((getattr(term, axis) for term in found), default=-1) for axis in ("layer", "head")]
        table = torch.full(size, math.nan)
        for term in found:
            assert term.layer is not None and term.head is not None
            table[term.layer, term.head] = term.value
        return table

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Added:
    """One sublayer's answer y, added to the stream x: behind an inner norm, before an outer one, where there are such."""

    layer: int
    part: str  # attention, cross or feedforward
    x: Tensor  # [R, D]
    y: Tensor  # [R, D]
    scale: float
    inner: FrozenNorm | None
    outer: FrozenNorm | None
    out: Tensor  # [R, D] the stream afterwards


def _add(layer: int, part: str, residual: Residual, x: Tensor, y: Tensor) -> Added:
    inner = freeze(residual.inside, y) if residual.inside is not None else None
    out = x + residual.scale * (inner.forward(y) if inner is not None else y)
    outer = freeze(residual.after, out) if residual.after is not None else None
    return Added(
        layer, part, x, y, residual.scale, inner, outer, outer.forward(out) if outer is not None else out
    )


def contributions(
    m: Model | Transformer,
    given: str | Sequence[int] | Tensor | Image,
    token: str | int | None = None,
    position: int = -1,
    target: str | Sequence[int] | None = None,
    against: str | int | None = None,
    pair: str | None = None,
) -> Contributions:
    """What each part adds to one logit; see `prepare` for what may be given.

    Args:
        m: what `load` gave, or a bare model.
        given: text, token ids, or an image.
        token: whose logit: a token, by its text or id; a class, for a classifier or tagger; a place, "4:token", for
            spans. None: what the model says there.
        position: of the token that reads; -1 is the last. For spans 0 is where one begins, 1 where it ends.
        target: what the decoder of an encoder-decoder has written.
        against: subtract the logit of this one.
        pair: the second text of a pair.
    """
    prepared = prepare(m, given, target, pair)
    choices, model = choices_of(prepared), prepared.model
    column = find_column(position, choices.columns)
    output, seen = prepared.record(*(f"blocks.*.{tap}" for tap in TAPS + CROSS_TAPS * model.main.spec.cross))
    said = choices.scores(output.required_logits)[0, column]
    choice = int(said.argmax()) if token is None else choices.find(token)
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
    """The logit, or the difference of two, before the soft cap, and behind it where there is one."""

    def difference(scores: Tensor) -> float:
        return float(scores[choice]) - (0.0 if other is None else float(scores[other]))

    head = choices.prepared.model.head
    said = difference(choices.scores(output.required_logits)[0, column])
    if not isinstance(head, LanguageHead) or head.softcap is None:
        return said, None
    uncapped = copy.copy(head)
    uncapped.softcap = None
    with torch.no_grad():
        return difference(uncapped(output.hidden[:, column : column + 1], None)[0, 0]), said


def _terms(
    prepared: Prepared,
    choices: Choices,
    output: Output,
    seen: Recording,
    column: int,
    choice: int,
    other: int | None,
) -> list[Term]:
    """Every term in the order of the forward pass; biases that add nothing are left out."""
    model, head = prepared.model, prepared.model.head
    hidden, span = exact(output.hidden[0]), choices.kind == "place"
    read = read_span(head, column, choice, other) if span else read_back(head, hidden, column, choice, other)
    rows, direction = read.rows, read.directions
    backwards = [Term("head bias", "bias", read.bias), Term("head transform", "bias", read.transform)]
    if model.main.norm is not None:
        final = freeze(
            model.main.norm, exact(seen[f"blocks.{model.main.spec.n_layers - 1}.resid_post"][0])[rows]
        )
        backwards.append(Term("final norm bias", "bias", final.shift(direction)))
        direction = final.back(direction)
    for layer, block in reversed(list(enumerate(model.main.layers()))):
        for step in reversed(_steps(block, layer, seen, rows)):
            terms, direction = _step_terms(step, block, seen, rows, direction)
            backwards += reversed(terms)
    backwards += reversed(_embedding_terms(prepared, rows, direction))
    return [term for term in reversed(backwards) if term.value or term.kind != "bias"]


def _steps(block: Block, layer: int, seen: Recording, rows: Tensor) -> list[Added]:
    """What one block added to the stream, in order; only the rows that are read."""
    x, steps = exact(seen[f"blocks.{layer}.resid_pre"][0])[rows], []
    parts = {
        "attention": block.attention_residual,
        "cross": block.cross_residual,
        "feedforward": block.feedforward_residual,
    }
    for part, residual in parts.items():
        if residual is not None:
            steps.append(_add(layer, part, residual, x, exact(seen[f"blocks.{layer}.{part}.out"][0])[rows]))
            x = steps[-1].out
    return steps


def _step_terms(
    step: Added, block: Block, seen: Recording, rows: Tensor, direction: Tensor
) -> tuple[list[Term], Tensor]:
    """The terms of one sublayer, and the direction [R, D] before it."""
    shift, layer, part = 0.0, step.layer, step.part
    if step.outer is not None:
        shift, direction = step.outer.shift(direction), step.outer.back(direction)
    towards = direction * step.scale
    if step.inner is not None:
        shift, towards = shift + step.inner.shift(towards), step.inner.back(towards)
    if part == "feedforward":
        terms = [Term(f"feedforward {layer}", "feedforward", float((towards * step.y).sum()), layer)]
    else:
        attention = block.attention if part == "attention" else block.cross
        assert attention is not None
        z = exact(seen[f"blocks.{layer}.{part}.z"][0][:, rows])  # H R E
        terms = _head_terms(attention, "self" if part == "attention" else "cross", layer, z, towards)
    return [*terms, Term(f"{part} norm bias {layer}", "bias", shift, layer)], direction


def _head_terms(attention: Attention, kind: str, layer: int, z: Tensor, towards: Tensor) -> list[Term]:
    """One term for each head, and one for the bias of the output projection: z [H, R, E], direction [R, D]."""
    weight = exact(attention.out.weight).view(-1, attention.n_heads, attention.d_value)  # D H E
    values = torch.einsum("hre,dhe,rd->h", z, weight, towards).tolist()
    terms = [
        Term(str(Head(kind, layer, number)), kind, value, layer, number)
        for number, value in enumerate(values)
    ]
    bias = attention.out.bias
    name = f"{'attention' if kind == 'self' else 'cross'} bias {layer}"
    return [*terms, Term(name, "bias", 0.0 if bias is None else float((towards @ exact(bias)).sum()), layer)]


def _embedding_terms(prepared: Prepared, rows: Tensor, direction: Tensor) -> list[Term]:
    """What the tables add: the input itself, segments, positions, and biases on their way."""
    stack = prepared.model.main
    embedding = stack.embedding
    with torch.no_grad():
        front = embedding.front(prepared.main)
        where = stack.positions.embed(tokens_from(1, front.shape[1], front.device).positions, stack.dtype)
    parts = {"patch embedding" if prepared.main.is_floating_point() else "token embedding": front}
    if embedding.types is not None:
        types = prepared.types
        table = (
            embedding.types.weight[:1].expand(front.shape[1], -1)
            if types is None
            else embedding.types(types.long())[0]
        )
        parts["segment embedding"] = table[None]
    if where is not None:
        parts["position embedding"] = where
    vectors = {name: exact(x[0])[rows] for name, x in parts.items()}  # R D
    shift = 0.0
    if embedding.project is not None:
        bias = embedding.project.bias
        shift += float((direction @ exact(bias)).sum()) if bias is not None else 0.0
        direction = direction @ exact(embedding.project.weight)
    if embedding.norm is not None:
        norm = freeze(embedding.norm, torch.stack(list(vectors.values())).sum(0))
        shift, direction = shift + norm.shift(direction), norm.back(direction)
    terms = [Term(name, "embedding", float((direction * x).sum())) for name, x in vectors.items()]
    return [*terms, Term("embedding bias", "bias", shift)]
