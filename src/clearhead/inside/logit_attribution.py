"""Direct logit attribution: a logit as a sum over what every part, and every neuron, adds to the stream.

A part may lift every logit alike, which changes no probability. So where a softmax follows, a logit is that
of its choice less the mean of all choices (`centred`), or less that of one other choice.

    result = firing(m, "The cat sat on the", count=5)
    result.neurons[0].name, result.neurons[0].value       # "2.117", in logits

A norm divides by a size that it measures. With that size held at its actual value the norm is linear, and a
logit is a sum over everything that was added to the stream. A direction g stands for the number <g, x>;
`back` takes a direction after a norm to the one before it, and `shift` is what the norm's own bias adds.
A feed-forward writes its neurons' activations times their output vectors, and a bias, so each neuron adds one
number too; with the bias they are the feed-forward's own term of `contributions`.

Shapes: R rows (tokens) that the head reads, T tokens, D model, H heads, E head width, F neurons of a
feed-forward. All in float64.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.attention import Attention
from clearhead.core.dtypes import precise, wide
from clearhead.core.heads import Head, LanguageHead
from clearhead.core.norms import LayerNorm, RMSNorm
from clearhead.core.transformer import Output
from clearhead.errors import refuse
from clearhead.inside import inputs, names, results
from clearhead.inside.inputs import Choices, choices_of, find_column
from clearhead.run.quant.layers import weight_of
from clearhead.variants.contexts import Recording, evaluating, tap_names
from clearhead.variants.heads import ClassifierHead, PooledHead, TokenHead


@dataclass(frozen=True)
class FrozenNorm:
    """A norm whose size is held at its actual value; without a norm, the identity."""

    scale: Tensor | float = 1.0  # [D]
    size: Tensor | float = 1.0  # [R, 1] the standard deviation, or the root mean square, that it divides by
    bias: Tensor | float = 0.0  # [D]
    centred: bool = False  # is the mean subtracted?

    def forward(self, x: Tensor) -> Tensor:
        """Return what the norm gives: [R, D] -> [R, D]."""
        return (x - x.mean(-1, keepdim=True) if self.centred else x) / self.size * self.scale + self.bias

    def back(self, direction: Tensor) -> Tensor:
        """Return the direction before the norm from the one after it: [R, D] -> [R, D]."""
        before = direction * self.scale / self.size
        return before - before.mean(-1, keepdim=True) if self.centred else before

    def shift(self, direction: Tensor) -> float:
        """Return what the bias adds: [R, D] -> a number."""
        return float((direction * self.bias).sum())


def freeze(norm: nn.Module | None, x: Tensor) -> FrozenNorm:
    """Return a norm as it is at its actual input [R, D]."""
    if norm is None:
        return FrozenNorm()
    assert isinstance(norm, LayerNorm | RMSNorm)
    centred = isinstance(norm, LayerNorm)
    spread = x - x.mean(-1, keepdim=True) if centred else x
    size = (spread.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    scale = exact(norm.weight) + float(norm.unit_offset)
    return FrozenNorm(scale, size, 0.0 if bias is None else exact(bias), centred)


@dataclass(frozen=True)
class LinearReadout:
    """A number that a head says, as a sum: <directions, hidden states at `rows`> + transform + bias."""

    rows: Tensor  # [R] which tokens are read
    directions: Tensor  # [R, D]
    # What a dense layer before the output adds: biases, and what its tangent leaves over.
    transform: float = 0.0
    bias: float = 0.0  # of the output layer


def read_back(
    head: Head, hidden: Tensor, column: int, choice: int, against: int | None, centred: bool
) -> LinearReadout:
    """Return how a score depends on the hidden states [T, D]; before a soft cap.

    `column` and the choices are as in `Choices`. The score is less that of the choice `against`, or, where
    that is None and it is `centred`, less the mean of all. An activation on the way is replaced by its
    tangent at the actual state; what that leaves over is in `transform`.
    """
    assert isinstance(head, ClassifierHead | TokenHead | LanguageHead)
    direction, bias = _difference(head.out, choice, against, centred)
    if isinstance(head, ClassifierHead):
        every = list(range(len(hidden)))
        rows = {"cls": every[:1], "last": every[-1:]}.get(head.pooling or "mean", every)
        direction, transform = _through_pooler(head, hidden[rows].mean(0), direction)
        return LinearReadout(torch.tensor(rows), direction.expand(len(rows), -1) / len(rows), transform, bias)
    transform = 0.0
    if isinstance(head, TokenHead):
        direction, transform = _through_pooler(head, hidden[column], direction)
    elif isinstance(head, LanguageHead):
        direction, transform = _through_transform(head, hidden[column], direction * head.scale)
    return LinearReadout(torch.tensor([column]), direction[None], transform, bias)


def read_span(head: Head, column: int, place: int, against: int | None, among: int) -> LinearReadout:
    """Return the same for a span, where a choice is one of `among` tokens; centred if there are several."""
    assert isinstance(head, TokenHead)
    refuse(
        head.pooler is not None,
        "a pooler bends the states of a span before they are scored: ask about a model without it",
    )
    direction, bias = _difference(head.out, column, None, False)
    if against is not None:
        return LinearReadout(torch.tensor([place, against]), torch.stack([direction, -direction]))
    shares = torch.zeros(among, dtype=torch.float64)
    shares[place] = 1
    if among > 1:
        shares, bias = shares - 1 / among, 0.0
    return LinearReadout(torch.arange(among), shares[:, None] * direction, bias=bias)


def exact(x: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU, without gradients."""
    return precise(x.detach()).cpu()


def through_linear(layer: nn.Linear, direction: Tensor) -> tuple[Tensor, float]:
    """Return the direction before a linear layer, and what its bias adds: [..., D]."""
    bias = 0.0 if layer.bias is None else float((direction @ exact(layer.bias)).sum())
    return direction @ exact(layer.weight), bias


def _difference(out: nn.Linear, choice: int, against: int | None, centred: bool) -> tuple[Tensor, float]:
    """Return a row of an output layer, less another or the mean, and the same of its bias: [D], a number."""

    def of(weight: Tensor) -> Tensor:
        row = exact(weight[choice])
        if against is not None:
            return row - exact(weight[against])
        if not centred:
            return row
        mean = torch.zeros_like(row)
        for first in range(0, len(weight), ROWS):  # as float64 all rows at once would be a long copy
            mean += exact(weight[first : first + ROWS]).sum(0) / len(weight)
        return row - mean

    return of(out.weight), 0.0 if out.bias is None else float(of(out.bias))


def _through_transform(head: LanguageHead, state: Tensor, direction: Tensor) -> tuple[Tensor, float]:
    """Return the direction before the head's dense layer, and what is left over: hidden state [D]."""
    if head.transform is None:
        return direction, 0.0
    shift = left = 0.0
    if head.activation is not None and head.norm is not None:
        dense = _linear(head.transform, state)
        norm = freeze(head.norm, head.activation(dense))
        shift = norm.shift(direction)
        direction, left = _tangent(head.activation, dense, norm.back(direction))
    direction, bias = through_linear(head.transform, direction)
    return direction, shift + left + bias


def _through_pooler(head: PooledHead, state: Tensor, direction: Tensor) -> tuple[Tensor, float]:
    """Return the direction before the head's dense layer, and what is left over: a state [D]."""
    if head.pooler is None:
        return direction, 0.0
    dense, shift = _linear(head.pooler, state), 0.0
    if head.pooler_norm is not None:
        norm = freeze(head.pooler_norm, head.bend(dense))
        shift, direction = norm.shift(direction), norm.back(direction)
    direction, left = _tangent(head.bend, dense, direction)
    direction, inner = through_linear(head.pooler, direction)
    return direction, shift + left + inner


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return nnf.linear(x, exact(layer.weight), None if layer.bias is None else exact(layer.bias))


def _tangent(bend: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> tuple[Tensor, float]:
    """Return the direction before an activation, taken as its tangent at x, and what that leaves over."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        y = bend(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
    return direction * slope, float(direction @ (y - slope * x).detach())


RUNNER_UP = "runner-up"  # names the best choice but the one that is asked about
ROWS = 4096  # of an output layer that are taken to float64 at a time


# Direct contributions of each part --------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """One part and what it adds."""

    name: str  # "3.2" for a head, "feedforward 3", "token embedding", ...
    kind: str  # self or cross: a head; feedforward, embedding, bias
    value: float = 0.0
    layer: int | None = None
    head: int | None = None


@dataclass(frozen=True)
class AddedPart:
    """A vector that is added to the stream, and the slope of the logit with respect to it."""

    terms: tuple[Term, ...]  # the heads of z share one vector
    vector: Tensor  # [..., R, D], or [H, R, E]
    slope: Tensor  # of the same shape


class Compared:
    """The base of results about one logit, less another one or the mean of all."""

    choice: Any
    against: str | None
    centred: bool

    @property
    def logit_name(self) -> str:
        """The logit in words."""
        less = "the mean of all" if self.centred else f"that of {self.against}" if self.against else ""
        return f"logit of {self.choice}{less and f' less {less}'}"


@dataclass(frozen=True)
class LogitQuery:
    """One logit, less another one or the mean of all, and the forward pass that it was read from."""

    prepared: inputs.Prepared
    choices: Choices
    column: int
    choice: int
    other: int | None
    scores: Tensor  # [N] of the column
    output: Output
    seen: Recording

    @classmethod
    def of(
        cls,
        m: inputs.AnyModel,
        given: inputs.Given | inputs.Prepared,
        token: str | int | None,
        position: int,
        target: inputs.Target = None,
        against: str | int | None = None,
        pair: str | None = None,
        taps: Sequence[str] = (),
        parts: bool = True,
    ) -> "LogitQuery":
        """Run the model and record `taps`, and with `parts` what `parts_of` reads; see `contributions`."""
        prepared = inputs.prepare(m, given, target, pair)
        choices = choices_of(prepared)
        column = find_column(position, choices.columns)
        if parts:
            routed = ("router", "passed") if prepared.model.config.depth_capacity != 1 else ()
            added = ("z", "attention.out", "feedforward.out", *routed)
            embedded = ["embedding"] if prepared.model.main.spec.recalls else []
            taps = [*(f"blocks.*.{tap}" for tap in added), *embedded, *taps]
        output, seen = prepared.record(*taps, logits="none")
        with torch.no_grad(), evaluating(prepared.model):
            scores = choices.column_scores(output.hidden, column)[0]
        choice = int(scores.argmax()) if token is None else choices.find(token)
        if against == RUNNER_UP:
            refuse(len(scores) < 2, "there is no runner-up: this model has one choice")
            others = scores.clone()
            others[choice] = -math.inf
            against = int(others.argmax())
        other = None if against is None else choices.find(against)
        refuse(
            other == choice,
            f'"{choices.name(choice)}" against itself is always 0: choose another to compare it with',
        )
        return cls(prepared, choices, column, choice, other, scores, output, seen)

    @property
    def name(self) -> str:
        """Whose logit it is."""
        return self.choices.name(self.choice)

    @property
    def against(self) -> str | None:
        """Whose logit is subtracted."""
        return None if self.other is None else self.choices.name(self.other)

    @property
    def centred(self) -> bool:
        """Whether the logit is less the mean of all."""
        return self.other is None and self.choices.exclusive

    @property
    def probability(self) -> float | None:
        """The model's probability of the choice; None where it gives a number."""
        return self.choices.probability(self.scores, self.choice)

    def difference(self, scores: Tensor) -> Tensor:
        """Return the logit, less the other one or the mean, of scores [..., N] -> [...], with its graph."""
        logit = scores[..., self.choice]
        if self.other is not None:
            return logit - scores[..., self.other]
        return logit - scores.mean(-1) if self.centred else logit

    @cached_property
    def output_logit(self) -> float:
        """The model's logit, after its soft cap where it has one."""
        return float(self.difference(self.scores.double()))

    @cached_property
    def logit(self) -> float:
        """The model's logit before the soft cap."""
        head = self.uncapped
        if head is None:
            return self.output_logit
        with torch.no_grad():
            return float(
                self.difference(head(self.output.hidden[:, self.column][:, None], None)[0, 0].double())
            )

    @cached_property
    def read(self) -> LinearReadout:
        """How the logit depends on the hidden states."""
        head = self.prepared.model.head
        refuse(
            isinstance(head, TokenHead) and head.up is not None,
            "head_layer stands between the states and their scores, which are no sum of parts: "
            "ask about a model without it",
        )
        if self.choices.kind == "place":
            return read_span(head, self.column, self.choice, self.other, self.choices.count)
        hidden = exact(self.output.hidden[0])
        return read_back(head, hidden, self.column, self.choice, self.other, self.centred)

    @property
    def capped(self) -> float | None:
        """The model's logit after its soft cap; None where it has none."""
        return None if self.uncapped is None else self.output_logit

    @property
    def uncapped(self) -> LanguageHead | None:
        """The head without its soft cap; None where it has none."""
        head = self.prepared.model.head
        if not isinstance(head, LanguageHead) or head.softcap is None:
            return None
        uncapped = copy.copy(head)
        uncapped.softcap = None
        return uncapped


def parts_of(query: LogitQuery) -> list[AddedPart]:
    """Return every vector that is added to the stream, in the order of the forward pass.

    The stream is added up again with frozen norms: the logit is linear in each vector that is added, so a
    term is that vector times the logit's gradient with respect to it.
    """
    prepared, seen, stack, read = query.prepared, query.seen, query.prepared.model.main, query.read
    added: list[tuple[tuple[Term, ...], Tensor]] = []  # a vector may be of several terms: the heads of its z

    def add(vector: Tensor, *terms: Term) -> Tensor:
        added.append((terms, vector.clone().requires_grad_()))
        return added[-1][1]

    def normed(norm: nn.Module | None, x: Tensor, name: str, layer: int | None = None) -> Tensor:
        frozen = freeze(norm, x.detach())
        if isinstance(frozen.bias, Tensor):
            frozen = replace(frozen, bias=add(frozen.bias, Term(name, "bias", layer=layer)))
        return frozen.forward(x)

    def attended(layer: int, part: str, attention: nn.Module) -> Tensor:
        kind = "self" if part == "attention" else "cross"
        alone = part == "cross" or stack.spec.kinds[layer].has_heads
        if not (alone and isinstance(attention, Attention)):  # its heads are no sum by themselves
            output = exact(seen[f"blocks.{layer}.{part}.out"][0][read.rows])
            return add(output, Term(f"{part} {layer}", kind, layer=layer))
        heads = names.AttentionName(kind, layer, attention.n_heads).heads
        terms = [Term(str(head), kind, layer=layer, head=head.number) for head in heads]
        z = add(exact(seen[f"blocks.{layer}.{part}.z"][0][:, read.rows]), *terms)  # H R E
        y = z.transpose(0, 1).flatten(1) @ exact(attention.out.weight).T  # R H·E -> R D
        if attention.out.bias is None:
            return y
        return y + add(exact(attention.out.bias), Term(f"{part} bias {layer}", "bias", layer=layer))

    with torch.enable_grad():
        vectors = {name: exact(y[0])[read.rows] for name, y in _embeddings(prepared).items()}  # R D
        x = torch.stack([add(y, Term(name, "embedding")) for name, y in vectors.items()]).sum(0)
        x = normed(stack.embedding.norm, x, "embedding bias")
        project = stack.embedding.project
        if project is not None:
            x = x @ exact(project.weight).T
            if project.bias is not None:
                x = x + add(exact(project.bias), Term("embedding bias", "bias"))
        if stack.previous is not None:
            x = x + add(
                exact(seen["embedding"][0])[read.rows] - x.detach(), Term("previous token", "embedding")
            )
        carried = None if stack.carried is None else stack.carried(prepared.main)
        for layer, block in enumerate(stack.layers()):
            x = x if block.shortcut is None else block.shortcut.stream(x, carried)
            for part, attention, residual in (
                ("attention", block.attention, block.attention_residual),
                ("cross", block.cross, block.cross_residual),
                ("feedforward", None, block.feedforward_residual),
            ):
                if residual is not None:
                    if attention is None:
                        output = exact(seen[f"blocks.{layer}.feedforward.out"][0][read.rows])
                        y = add(output, Term(f"feedforward {layer}", "feedforward", layer=layer))
                    else:
                        y = attended(layer, part, attention)
                    bias = f"{part} norm bias {layer}"
                    y = residual.scale * normed(residual.inside, y, bias, layer)
                    if block.router is not None:  # it lets so much of the layer through, or nothing
                        router, passed = (seen[f"blocks.{layer}.{tap}"][0] for tap in ("router", "passed"))
                        y = y * exact(router * passed)[read.rows, None]
                    x = normed(residual.after, x + y, bias, layer)
        logit = (normed(stack.norm, x, "final norm bias") * read.directions).sum()
    slopes = torch.autograd.grad(logit, [vector for _, vector in added])
    return [AddedPart(terms, x.detach(), slope) for (terms, x), slope in zip(added, slopes)]


def terms_of(query: LogitQuery, parts: Iterable[AddedPart]) -> tuple[Term, ...]:
    """Return what each part adds, in the order of the forward pass; biases that add nothing are left out."""
    values = defaultdict[Term, float](float)
    for part in parts:
        each = (part.slope * part.vector).reshape(len(part.terms), -1).sum(1).tolist()
        for term, value in zip(part.terms, each):
            values[term] += value
    read = query.read
    values |= {Term("head transform", "bias"): read.transform, Term("head bias", "bias"): read.bias}
    return tuple(replace(term, value=value) for term, value in values.items() if value or term.kind != "bias")


def _embeddings(prepared: inputs.Prepared) -> dict[str, Tensor]:
    """Return what the tables add, [1, T, D] each: the input itself, segments, positions."""
    stack = prepared.model.main
    with torch.no_grad():
        front = stack.embedding.front(prepared.main) if prepared.vectors is None else prepared.vectors
        embeddings = {"patch embedding" if prepared.main.is_floating_point() else "token embedding": front}
        if stack.embedding.types is not None:
            first = torch.zeros(front.shape[:2], dtype=torch.long, device=front.device)
            embeddings["segment embedding"] = stack.embedding.types(
                first if prepared.types is None else prepared.types
            )
        where = stack.positions.embed(
            masks.tokens_from(1, front.shape[1], front.device).positions, stack.dtype
        )
    return embeddings if where is None else embeddings | {"position embedding": where}


# Neurons ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FiringNeuron(results.Result):
    """One neuron: its activation where it is read, and what it adds to the logit."""

    name: str  # as in `memories`: "2.117"
    activation: float
    value: float


@dataclass(frozen=True)
class Firing(results.Result):
    """The neurons that add most to a logit, or take most from it."""

    column: int
    choice: str
    neurons: tuple[FiringNeuron, ...]  # largest first, of either sign
    sums: dict[str, float]  # by feed-forward, "feedforward 2": all of its neurons together, without its bias


def firing(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    token: str | int | None = None,
    position: int = -1,
    target: inputs.Target = None,
    against: str | int | None = None,
    pair: str | None = None,
    count: int = 10,
    layer: int | None = None,
) -> Firing:
    """Return the neurons that matter most to one logit, of all feed-forwards or of one layer's.

    The other arguments are `contributions`'.
    """
    model = inputs.as_model(m).model
    every = range(model.main.spec.n_layers)
    refuse(
        layer is not None and layer not in every, f"there is no layer {layer}: layers are 0 to {every[-1]}"
    )
    taps = [
        f"blocks.{own}.feedforward.post"
        for own in (every if layer is None else [layer])
        if f"blocks.{own}.feedforward.post" in tap_names(model)
    ]
    refuse(not taps, "this model has no plain feed-forward whose neurons could be looked at")
    query = LogitQuery.of(m, given, token, position, target, against, pair, taps)
    blocks = model.main.layers()
    values: dict[int, Tensor] = {}
    posts: dict[int, Tensor] = {}
    for part in parts_of(query):
        (term, *_) = part.terms
        tap = f"blocks.{term.layer}.feedforward.post"
        if term.kind == "feedforward" and term.layer is not None and tap in taps:
            posts[term.layer] = exact(query.seen[tap][0][query.read.rows])  # R F
            # As float64 it would be a long copy.
            down = wide(weight_of(blocks[term.layer], "feedforward.down").detach())  # D F
            values[term.layer] = (posts[term.layer] * exact(part.slope.to(down) @ down)).sum(0)
    best = sorted(
        (
            (layer, int(unit), float(table[unit]))
            for layer, table in values.items()
            for unit in table.abs().topk(min(count, len(table))).indices
        ),
        key=lambda neuron: -abs(neuron[2]),
    )[:count]
    return Firing(
        query.column,
        query.name,
        tuple(
            FiringNeuron(f"{layer}.{unit}", float(posts[layer][-1, unit]), value)
            for layer, unit, value in best
        ),
        {f"feedforward {layer}": float(table.sum()) for layer, table in values.items()},
    )
