"""The neurons of a feed-forward: their names, what fires each most over a corpus, and what each promotes.

A name such as "2.117" is layer 2, neuron 117; "2.0.117" has an expert between them; "encoder.0.5" is in the
stack before the head's.

What fires a neuron is kept as its highest activations, in memory that does not grow with the corpus. What it
promotes is the straight way from what it writes to the scores of the head. A neuron adds its column of `down`
to the residual stream, as often as it fires. On its way to the head that vector passes norms and perhaps
linear layers; what attention and later feed-forwards make of it is left out. Of a norm the linear part is
kept: the mean is subtracted (layernorm) and the weight multiplied. Left out are the size by which a norm
divides, which depends on the text, and the activation in a masked model's head. So the scores rank the tokens
that a neuron promotes, and do not say by how much.

Shapes: N neurons of one feed-forward, K contexts kept, T tokens of a batch, P promoted tokens, D model, V
tokens of the vocabulary or classes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from clearhead.api import Model
from clearhead.errors import InputError, refuse
from clearhead.inside.inputs import recorded
from clearhead.inside.memories.passages import NOTE, NOTHING, PassageBatch
from clearhead.inside.names import AttentionName, layer_names
from clearhead.inside.results import on_cpu
from clearhead.model.feedforward import Experts, FeedForward
from clearhead.model.heads import ClassifierHead, LanguageHead, TokenHead
from clearhead.model.norms import LayerNorm
from clearhead.model.stack import Stack

_NAME = re.compile(r"(?:(self|encoder)\.)?(\d+)\.(?:(\d+)\.)?(\d+)")
Place = tuple[str, int, int | None]  # kind, layer and expert of a feed-forward
NEURONS = 1024  # scored at a time: their scores of all tokens are held at once


@dataclass(eq=False)
class Shelf:
    """The neurons of one feed-forward, or of one expert, with a note on each place that fired them most."""

    kind: str  # self, encoder
    layer: int
    expert: int | None
    units: Tensor  # [N]
    top: int
    activations: Tensor = field(init=False)  # [N, K], -inf where there are fewer contexts
    notes: Tensor = field(init=False)  # [N, K, NOTE], see `passages`
    written: Tensor | None = None  # [N, D], what each neuron says to the head
    promoted: tuple[Tensor, ...] | None = None  # [N, P] tokens, scores; suppressed tokens, scores
    agreement: Tensor | None = None  # [N]
    chance: Tensor | None = None  # [N]

    def __post_init__(self) -> None:
        self.activations = torch.full((len(self.units), self.top), -torch.inf)
        self.notes = torch.full((len(self.units), self.top, NOTE), NOTHING, dtype=torch.int32)

    @property
    def stack(self) -> str:
        """The prefix of its activations."""
        return "encoder." if self.kind == "encoder" else ""

    @property
    def part(self) -> str:
        """The feed-forward, as activations are named."""
        return f"{self.stack}blocks.{self.layer}.feedforward"

    @property
    def tap(self) -> str:
        """The activation of its neurons."""
        return f"{self.part}.post" if self.expert is None else f"{self.part}.experts.{self.expert}.post"

    def name(self, row: int) -> str:
        """Return the name of one neuron."""
        parts = [self.kind, self.layer, self.expert, int(self.units[row])]
        return ".".join(str(part) for part in parts if part not in (None, "self"))

    def take(self, activations: Tensor, notes: Tensor) -> None:
        """Add activations [T, N] and a note on each token [T, NOTE]; of equal ones the earlier stays."""
        values, places = activations.topk(min(self.top, len(activations)), dim=0)  # K N
        values = values.T.masked_fill(values.T <= 0, -torch.inf)
        both = torch.cat([self.activations, values], 1)
        order = both.argsort(dim=1, descending=True, stable=True)[:, : self.top]
        self.activations = both.gather(1, order)
        noted = torch.cat([self.notes, notes[places.T]], 1)
        kept = noted.gather(1, order[:, :, None].expand(-1, -1, NOTE))
        self.notes = kept.masked_fill(self.activations.isinf()[:, :, None], NOTHING)


def read_batch(m: Model, batch: PassageBatch, shelves: Sequence[Shelf]) -> None:
    """Run one batch, and let each shelf take the activations at the real tokens that reached its neurons."""
    names = {shelf.tap for shelf in shelves}
    names |= {f"{shelf.part}.router" for shelf in shelves if shelf.expert is not None}
    seen = recorded(m.model, sorted(names), **batch.arguments)
    all_notes = {stack: batch.places(stack) for stack in {shelf.stack for shelf in shelves}}
    for shelf in shelves:
        post = on_cpu(seen[shelf.tap].flatten(0, -2)[:, shelf.units.to(seen[shelf.tap].device)])
        real, notes = batch.real(shelf.stack).flatten(), all_notes[shelf.stack]
        if shelf.expert is not None:
            experts = stack_of(m, shelf.kind).layers()[shelf.layer].feedforward
            assert isinstance(experts, Experts)
            chosen = experts.choose(seen[f"{shelf.part}.router"].flatten(0, -2))[1].cpu()
            here = (chosen == shelf.expert).any(-1)  # an expert gets its tokens in their order
            real, notes = real[here], notes[here[real]]
        shelf.take(post[real], notes)


# Names ------------------------------------------------------------------------------------------------------


def feedforward(stack: Stack, layer: int, expert: int | None) -> FeedForward:
    """Return the feed-forward of a layer, or one of its experts."""
    part = stack.layers()[layer].feedforward
    found = part.experts[expert] if isinstance(part, Experts) and expert is not None else part
    assert isinstance(found, FeedForward)
    return found


def stack_of(m: Model, kind: str) -> Stack:
    """Return the stack of a kind of neuron."""
    stack = m.model.encoder if kind == "encoder" else m.model.main
    assert stack is not None
    return stack


def feedforwards(m: Model) -> dict[Place, int]:
    """Return how many neurons every feed-forward of a model has."""
    kinds = ("encoder", "self") if m.config.family == "encoder-decoder" else ("self",)
    experts = range(m.config.n_experts) if m.config.n_experts else (None,)
    return {
        (kind, layer, expert): feedforward(stack_of(m, kind), layer, expert).down.in_features
        for kind in kinds
        for layer in range(stack_of(m, kind).spec.n_layers)
        for expert in experts
    }


def empty_shelves(m: Model, layer: int | str | None, neurons: Sequence[str] | None, top: int) -> list[Shelf]:
    """Return a shelf for every feed-forward that is to be looked at, with those of its neurons."""
    wanted, known = None if layer is None else str(layer).removeprefix("self."), layer_names(m.config)
    refuse(
        wanted is not None and wanted not in known,
        f'there is no layer "{layer}": layers are {", ".join(known)}',
    )
    asked = None if neurons is None else [parse_neuron(m, name) for name in neurons]
    refuse(
        asked is not None and not asked, "no neurons are named: name some, such as 0.5, or leave neurons out"
    )
    shelves = []
    for place, width in feedforwards(m).items():
        units = range(width) if asked is None else sorted({unit for own, unit in asked if own == place})
        if units and wanted in (None, str(AttentionName(*place[:2]))):
            shelves.append(Shelf(*place, torch.tensor(units), top))
    return shelves


def parse_neuron(m: Model, name: str) -> tuple[Place, int]:
    """Return the feed-forward and the unit from a neuron's name."""
    matched, known = _NAME.fullmatch(name.strip()), feedforwards(m)
    if matched:
        place = (matched[1] or "self", int(matched[2]), int(matched[3]) if matched[3] else None)
        width, unit = known.get(place, 0), int(matched[4])
        if unit < width:
            return place, unit
        refuse(width, f'there is no neuron "{name}": this layer has neurons 0 to {width - 1}')
    form = "layer.expert.neuron, such as 0.0.5" if m.config.n_experts else "layer.neuron, such as 0.5"
    more = ", encoder.0.5 in the encoder" if m.config.family == "encoder-decoder" else ""
    raise InputError(f'there is no neuron "{name}": neurons are called {form}{more}')


# What neurons promote ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputLayer:
    """The last layer of a head."""

    weight: Tensor  # [V, D]
    names: tuple[str, ...]  # of classes; none for a vocabulary
    note: str  # what to keep in mind


def output_layer(m: Model) -> OutputLayer:
    """Return what turns the last state into scores; where no straight way leads there, an error says why."""
    head, names, note = m.model.head, m.class_names, "scores leave out what norms divide by"
    if not isinstance(head, LanguageHead | TokenHead | ClassifierHead):
        raise InputError(
            f"head {m.config.head} scores no tokens and no classes: what a neuron promotes cannot be read off"
        )
    if isinstance(head, LanguageHead):
        names = ()
        note += "; the bend in its head is taken as straight" if head.activation is not None else ""
    elif m.config.head == "span":
        names = ("answer begins", "answer ends")
    elif isinstance(head, ClassifierHead):
        if head.pooler is not None:
            raise InputError(
                "a pooler bends what the tokens say before the classes are scored: "
                "what a neuron promotes cannot be read off"
            )
        alone = "token alone: a neuron that fires elsewhere speaks through attention"
        where = {"cls": f"the first {alone}", "last": f"the last {alone}"}
        note += f"; classes are read from {where.get(head.pooling or 'mean', 'the mean of all tokens')}"
    return OutputLayer(on_cpu(head.out.weight), names, note)


def directions(m: Model, kind: str, layer: int, expert: int | None = None) -> Tensor:
    """Return what each neuron writes, as it arrives at the last layer of the head: [N, D]."""
    stack, head = stack_of(m, kind), m.model.head
    blocks = stack.layers()
    residual = blocks[layer].feedforward_residual
    written = on_cpu(feedforward(stack, layer, expert).down.weight).T  # N D
    written = _through(residual.after, _through(residual.inside, written) * residual.scale)
    for block in blocks[layer + 1 :]:
        for later in (block.attention_residual, block.cross_residual, block.feedforward_residual):
            written = _through(later.after if later is not None else None, written)
    written = _through(stack.norm, written)
    if isinstance(head, LanguageHead):
        if head.transform is not None:
            written = written @ on_cpu(head.transform.weight).T
        written = _through(head.norm, written) * head.scale
    return written


def extremes(written: Tensor, weight: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the tokens promoted most, their scores, those suppressed most, their scores: [N, count] each."""
    count, parts = min(count, len(weight)), []
    for some in torch.split(written, NEURONS):
        scores = some @ weight.T  # N V
        high, low = scores.topk(count), scores.topk(count, largest=False)
        parts.append((high.indices, high.values, low.indices, low.values))
    return tuple(torch.cat(column) for column in zip(*parts))


def token_id(m: Model, token: str | int) -> int:
    """Return a token of the vocabulary by its number, its name, or a text that is this one token."""
    size = m.config.vocab_size
    if isinstance(token, int):
        refuse(not 0 <= token < size, f"token {token} is not in the vocabulary: ids go from 0 to {size - 1}")
        return token
    tokenizer = m.text_tokenizer
    named: int | None = tokenizer.token_to_id(token)
    if named is not None:
        return named
    plain, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (token, " " + token))
    for encoding in (plain, spaced):
        if len(encoding.ids) == 1 and encoding.ids[0] != m.special.get("unk"):
            return int(encoding.ids[0])
    pieces = plain.tokens
    raise InputError(
        f'"{token}" is no token of the vocabulary but {len(pieces)} ({" ".join(pieces[:8])}): '
        "name one of them"
    )


def _through(norm: nn.Module | None, written: Tensor) -> Tensor:
    """Return what the linear part of a norm makes of it."""
    if norm is None:
        return written
    weight = on_cpu(norm.weight)  # type: ignore[arg-type]
    if isinstance(norm, LayerNorm):
        written = written - written.mean(-1, keepdim=True)
    return written * (1 + weight if norm.unit_offset else weight)
