"""A logit as a sum over what every part adds to the residual stream, with each norm held at its actual size.

Shapes: T tokens, D model, H heads, E head width, R rows (tokens) that the head reads.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.attention import Attention
from clearhead.core.heads import LanguageHead
from clearhead.core.taps import Recording
from clearhead.core.transformer import Output, evaluating
from clearhead.errors import refuse
from clearhead.inside import inputs, names
from clearhead.inside.choices import Choices, choices_of, find_column
from clearhead.inside.frozen import LinearReadout, exact, freeze, read_back, read_span


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


@dataclass(frozen=True)
class AskedLogit:
    """The logit that is asked about, perhaps less another one, and the forward pass that it was read from."""

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
        target: inputs.Target,
        against: str | int | None,
        pair: str | None,
        *taps: str,
    ) -> "AskedLogit":
        """Run the model, record what `parts_of` reads and `taps` besides; see `contributions`."""
        prepared = inputs.prepare(m, given, target, pair)
        choices = choices_of(prepared)
        column = find_column(position, choices.columns)
        routed = ("blocks.*.router", "blocks.*.passed") if prepared.model.config.depth_capacity != 1 else ()
        output, seen = prepared.record(
            *("blocks.*.z", "blocks.*.attention.out", "blocks.*.feedforward.out", *routed, *taps),
            logits="none",
        )
        with torch.no_grad(), evaluating(prepared.model):
            scores = choices.column_scores(output.hidden, column)[0]
        choice = int(scores.argmax()) if token is None else choices.find(token)
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

    def difference(self, scores: Tensor) -> Tensor:
        """Return the logit, less the other one, of scores [N]: a number with its graph."""
        return scores[self.choice] if self.other is None else scores[self.choice] - scores[self.other]

    @cached_property
    def said(self) -> float:
        """What the model says, behind a soft cap where it has one."""
        return float(self.difference(self.scores.double()))

    @cached_property
    def logit(self) -> float:
        """What the model says before the soft cap."""
        head = self.uncapped
        if head is None:
            return self.said
        with torch.no_grad():
            return float(
                self.difference(head(self.output.hidden[:, self.column][:, None], None)[0, 0].double())
            )

    @property
    def capped(self) -> float | None:
        """What the model says behind its soft cap; None where it has none."""
        return None if self.uncapped is None else self.said

    @property
    def uncapped(self) -> LanguageHead | None:
        """The head without its soft cap; None where it has none."""
        head = self.prepared.model.head
        if not isinstance(head, LanguageHead) or head.softcap is None:
            return None
        uncapped = copy.copy(head)
        uncapped.softcap = None
        return uncapped


def parts_of(asked: AskedLogit) -> tuple[list[AddedPart], LinearReadout]:
    """Return every vector that is added to the stream, in the order of the forward pass, and what reads it.

    The stream is added up again with frozen norms: the logit is linear in each vector that is added, so a
    term is that vector times the logit's gradient with respect to it.
    """
    prepared, seen, stack = asked.prepared, asked.seen, asked.prepared.model.main
    read = _readout(asked)
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
        if not isinstance(attention, Attention):  # its heads are gated before they are joined
            given = exact(seen[f"blocks.{layer}.{part}.out"][0][read.rows])
            return add(given, Term(f"{part} {layer}", kind, layer=layer))
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
        for layer, block in enumerate(stack.layers()):
            for part, attention, residual in (
                ("attention", block.attention, block.attention_residual),
                ("cross", block.cross, block.cross_residual),
                ("feedforward", None, block.feedforward_residual),
            ):
                if residual is not None:
                    if attention is None:
                        given = exact(seen[f"blocks.{layer}.feedforward.out"][0][read.rows])
                        y = add(given, Term(f"feedforward {layer}", "feedforward", layer=layer))
                    else:
                        y = attended(layer, part, attention)
                    bias = f"{part} norm bias {layer}"
                    y = residual.scale * normed(residual.inside, y, bias, layer)
                    if block.router is not None:  # it lets so much of the layer through, or nothing
                        router, passed = (seen[f"blocks.{layer}.{one}"][0] for one in ("router", "passed"))
                        y = y * exact(router * passed)[read.rows, None]
                    x = normed(residual.after, x + y, bias, layer)
        logit = (normed(stack.norm, x, "final norm bias") * read.directions).sum()
    slopes = torch.autograd.grad(logit, [vector for _, vector in added])
    return [AddedPart(terms, x.detach(), slope) for (terms, x), slope in zip(added, slopes)], read


def terms_of(asked: AskedLogit, parts: Iterable[AddedPart]) -> tuple[Term, ...]:
    """Return what each part adds, in the order of the forward pass; biases that add nothing are left out."""
    values = defaultdict[Term, float](float)
    for part in parts:
        each = (part.slope * part.vector).reshape(len(part.terms), -1).sum(1).tolist()
        for term, value in zip(part.terms, each):
            values[term] += value
    read = _readout(asked)
    values |= {Term("head transform", "bias"): read.transform, Term("head bias", "bias"): read.bias}
    return tuple(replace(term, value=value) for term, value in values.items() if value or term.kind != "bias")


def _readout(asked: AskedLogit) -> LinearReadout:
    """Return how the logit depends on the hidden states."""
    head = asked.prepared.model.head
    if asked.choices.kind == "place":
        return read_span(head, asked.column, asked.choice, asked.other)
    return read_back(head, exact(asked.output.hidden[0]), asked.column, asked.choice, asked.other)


def _embeddings(prepared: inputs.Prepared) -> dict[str, Tensor]:
    """Return what the tables add, [1, T, D] each: the input itself, segments, positions."""
    stack = prepared.model.main
    with torch.no_grad():
        front = stack.embedding.front(prepared.main)
        found = {"patch embedding" if prepared.main.is_floating_point() else "token embedding": front}
        if stack.embedding.types is not None:
            first = torch.zeros(front.shape[:2], dtype=torch.long, device=front.device)
            found["segment embedding"] = stack.embedding.types(
                first if prepared.types is None else prepared.types
            )
        where = stack.positions.embed(
            masks.tokens_from(1, front.shape[1], front.device).positions, stack.dtype
        )
    return found if where is None else found | {"position embedding": where}
