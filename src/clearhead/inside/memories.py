"""The feed-forward as a memory (Geva et al. 2021): what fires each neuron, and what it promotes.

    found = memories(m, texts)                           # one pass over the corpus, for every neuron
    found.ranked("agreement", 5)                         # neurons whose contexts go on as they say
    found.neuron("2.117").contexts                       # the tokens that fired it most
    found.search("the")                                  # who promotes a token, and whom it fires

A neuron fires where its activation is above zero. A gated neuron can also go below; it then promotes what is
listed as suppressed. What is kept of the corpus are `top` contexts per neuron, however long it is.
Agreement is the share of a neuron's `top` contexts whose answer, the token that truly comes next, is among
the `depth` tokens it promotes most; chance is the share of all places of the corpus whose answer is.

Shapes: N neurons of one feed-forward, K contexts kept, P promoted tokens, T tokens of a batch, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.errors import nearest, refuse
from clearhead.hub.tokens.text import decoded, label
from clearhead.inside.inputs import AnyModel, as_model, patch_names
from clearhead.inside.neurons import (
    AROUND,
    NOTHING,
    WINDOW,
    Given,
    OutputLayer,
    Shelf,
    batches,
    directions,
    empty_shelves,
    output_layer,
    parse_neuron,
    read_batch,
)
from clearhead.inside.results import Result, plain
from clearhead.run.api import Model

Order = Literal["agreement", "activation"]
NEURONS = 1024  # scored at a time: their scores of all tokens are held at once
DEPTH = 10  # promoted tokens among which the answer must be; of a small vocabulary one in twenty


@dataclass(frozen=True)
class Context:
    """One token of the corpus that fired a neuron."""

    before: str
    token: str
    after: str
    activation: float
    answer: str | None  # what the head is there to say; None where nothing is known
    text: int  # number of the text, counted from 0
    place: int  # of the token in it


@dataclass(frozen=True)
class Neuron(Result):
    """One neuron."""

    name: str
    activation: float  # the highest seen; 0: it never fired
    contexts: tuple[Context, ...]  # highest first
    # Tokens or classes with their scores, highest first; () where unknown.
    promoted: tuple[tuple[str, float], ...]
    suppressed: tuple[tuple[str, float], ...]  # lowest first
    agreement: float | None
    chance: float | None


@dataclass(frozen=True)
class Found(Result):
    """Neurons that have to do with one token; best first."""

    token: str
    promoting: tuple[tuple[str, float], ...]  # name, score of the token
    # Name, share of its contexts at this token, highest activation.
    fired: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, eq=False)
class Memories(Result):
    """What a corpus showed of a model's neurons."""

    json_names = ("tokens", "top", "depth", "note")

    m: Model = field(repr=False)
    shelves: tuple[Shelf, ...] = field(repr=False)
    top: int
    depth: int
    tokens: int  # read, both stacks together
    head: OutputLayer = field(repr=False)
    note: str  # how to read what neurons promote, or why there is nothing to read

    def neuron(self, name: str) -> Neuron:
        """Return one neuron by its name."""
        own, unit = parse_neuron(self.m, name)
        found = [
            self._neuron(shelf, int(row))
            for shelf in self.shelves
            if shelf.own == own
            for row in (shelf.units == unit).nonzero()
        ]
        refuse(
            not found, f'neuron "{name}" was not looked at: name its layer, or leave layer and neurons out'
        )
        return found[0]

    def ranked(self, by: Order | None = None, count: int | None = 10) -> list[Neuron]:
        """Return the first neurons by agreement beyond chance, or by highest activation.

        Activation settles ties, too. With None, agreement counts where it is known.
        """
        by = by or ("agreement" if self.agrees else "activation")
        refuse(
            by == "agreement" and not self.agrees, f"no agreement is known ({self.note}): sort by activation"
        )
        places = [(shelf, row) for shelf in self.shelves for row in range(len(shelf.units))]
        order = torch.cat([shelf.activations[:, 0] for shelf in self.shelves]).argsort(
            descending=True, stable=True
        )
        if by == "agreement":
            # Agreement beyond chance; -inf where it is not known.
            gains = [
                torch.full((len(shelf.units),), -torch.inf)
                if shelf.agreement is None or shelf.chance is None
                else shelf.agreement - shelf.chance
                for shelf in self.shelves
            ]
            order = order[torch.cat(gains)[order].argsort(descending=True, stable=True)]
        return [self._neuron(*places[place]) for place in order[:count].tolist()]

    @property
    def agrees(self) -> bool:
        """Is any neuron's agreement known?"""
        return any(shelf.agreement is not None for shelf in self.shelves)

    def search(self, token: str | int, count: int = 10) -> Found:
        """Return the neurons that promote a token or class most, and those it fires most often."""
        number = self._number(token)
        promoting: list[tuple[str, float]] = []
        fired: list[tuple[str, float, float]] = []
        for shelf in self.shelves:
            if shelf.written is not None and self.head.weight is not None:
                best = (shelf.written @ self.head.weight[number]).topk(min(count, len(shelf.units)))
                promoting += [(shelf.name(int(row)), float(score)) for score, row in zip(*best)]
            if not self.head.names:
                best = (
                    (shelf.notes[:, :, AROUND] == number).float().mean(1).topk(min(count, len(shelf.units)))
                )
                fired += [
                    (shelf.name(int(row)), float(share), float(shelf.activations[row, 0]))
                    for share, row in zip(*best)
                    if share > 0
                ]
        promoting.sort(key=lambda pair: -pair[1])
        fired.sort(key=lambda triple: (-triple[1], -triple[2]))
        return Found(self._label(number), tuple(promoting[:count]), tuple(fired[:count]))

    def to_dict(self, by: Order | None = None, count: int | None = 10) -> dict[str, Any]:
        """Return plain JSON values: the first `count` neurons, None: all."""
        return super().to_dict() | {"neurons": plain(self.ranked(by, count))}

    def _number(self, token: str | int) -> int:
        names = self.head.names
        if not names:
            return token_id(self.m, token)
        refuse(
            token not in names and token not in range(len(names)),
            f'no class is called "{token}"{nearest(str(token), names)}: classes are {", ".join(names[:10])}',
        )
        return names.index(token) if isinstance(token, str) else token

    def _label(self, number: int) -> str:
        """Return a token or a class as people read it."""
        return self.head.names[number] if self.head.names else label(self.m.tokenizer, number)

    def _neuron(self, shelf: Shelf, row: int) -> Neuron:
        contexts = tuple(
            _context(self.m, float(value), note.tolist())
            for value, note in zip(shelf.activations[row], shelf.notes[row])
            if value > 0
        )
        lists = [part[row].tolist() for part in shelf.promoted or ()] or [[]] * 4
        return Neuron(
            name=shelf.name(row),
            activation=contexts[0].activation if contexts else 0.0,
            contexts=contexts,
            promoted=tuple(zip(map(self._label, lists[0]), lists[1])),
            suppressed=tuple(zip(map(self._label, lists[2]), lists[3])),
            agreement=None if shelf.agreement is None else float(shelf.agreement[row]),
            chance=None if shelf.chance is None else float(shelf.chance[row]),
        )


def memories(
    m: AnyModel,
    texts: Iterable[Given],
    layer: int | str | None = None,
    top: int = 10,
    neurons: Sequence[str] | None = None,
    limit: int | None = None,
) -> Memories:
    """Read a corpus once and keep what fires each neuron; say what each promotes.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        texts: texts or ids; (source, target) or a source alone for two stacks; images for a model of patches.
            May be a stream.
        layer: a layer of the stack that feeds the head, or "encoder.1"; None: all of both stacks.
        top: contexts that are kept for each neuron, and tokens listed as promoted and suppressed.
        neurons: names such as "2.117"; None: every neuron of the layers.
        limit: stop after so many tokens.
    """
    return read_corpus(m, texts, layer, top, neurons, limit).judged()


@dataclass(frozen=True, eq=False)
class ReadCorpus:
    """What fired the neurons of a model in a corpus; `judged` adds what they promote."""

    m: Model
    shelves: tuple[Shelf, ...]
    top: int
    texts: int
    tokens: int
    frequency: Tensor  # [V] of each token among the answers; [0] where nothing is chosen from a vocabulary

    def judged(self, neurons: Sequence[str] | None = None) -> Memories:
        """Return it with what the neurons promote; None: all of them."""
        m, head, shelves = self.m, output_layer(self.m), [shelf.some() for shelf in self.shelves]
        if neurons is not None:
            wanted = {parse_neuron(m, name) for name in neurons}
            rows = {own: [unit for name, unit in wanted if name == own] for own, _ in wanted}
            shelves = [
                shelf.some(torch.isin(shelf.units, torch.tensor(rows[shelf.own])))
                for shelf in self.shelves
                if shelf.own in rows
            ]
        depth = min(DEPTH, max(1, len(self.frequency) // 20)) if len(self.frequency) else 0
        only = "the encoder speaks to cross-attention, not to the head; " if head.weight is not None else ""
        for shelf in shelves:
            if head.weight is not None and not shelf.stack:
                _judge(m, shelf, head.weight, depth, self.frequency)
                only = ""
        return Memories(m, tuple(shelves), self.top, depth, self.tokens, head, only + head.note)


def read_corpus(
    m: AnyModel,
    texts: Iterable[Given],
    layer: int | str | None = None,
    top: int = 10,
    neurons: Sequence[str] | None = None,
    limit: int | None = None,
) -> ReadCorpus:
    """Read a corpus once and keep what fires each neuron; the arguments are those of `memories`."""
    m = as_model(m)
    refuse(top < 1, f"top {top} must be 1 or more")
    shelves, head = empty_shelves(m, layer, neurons, top), output_layer(m)
    count = tokens = 0
    vocabulary = m.config.vocab_size if head.weight is not None and not head.names else 0
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for batch in batches(m, texts, limit):
        read_batch(m, batch, shelves)
        count, tokens = batch[-1].number + 1, tokens + sum(passage.size for passage in batch)
        if vocabulary:
            answers = torch.tensor([answer for passage in batch for answer in passage.answers])
            counts += answers[answers != NOTHING].bincount(minlength=vocabulary)
    return ReadCorpus(m, tuple(shelves), top, count, tokens, counts / counts.sum().clamp(min=1))


def _judge(m: Model, shelf: Shelf, weight: Tensor, depth: int, frequency: Tensor) -> None:
    """Add to a shelf what its neurons promote, and how far that agrees with what fires them."""
    shelf.written = directions(m, shelf)
    count, parts = min(max(shelf.top, depth), len(weight)), []
    for some in torch.split(shelf.written, NEURONS):
        scores = some @ weight.T  # N V
        high, low = scores.topk(count), scores.topk(count, largest=False)
        parts.append((high.indices, high.values, low.indices, low.values))
    promoted = [torch.cat(column) for column in zip(*parts)]
    shelf.promoted = tuple(part[:, : shelf.top] for part in promoted)
    if depth:
        best = promoted[0][:, :depth]
        answers = shelf.notes[:, :, WINDOW]  # N K
        shelf.agreement = (answers[:, :, None] == best[:, None]).any(-1).float().mean(1)
        shelf.chance = frequency[best].sum(1)


def _context(m: Model, value: float, note: list[int]) -> Context:
    """Return a note in words."""
    window, (answer, text, place) = note[:WINDOW], note[WINDOW:]
    here = window[AROUND]
    if m.model.main.spec.input != "tokens":
        return Context(f"image {text} ", patch_names(m.config)[here], "", value, None, text, place)
    left, right = (
        [token for token in part if token != NOTHING] for part in (window[:AROUND], window[AROUND + 1 :])
    )
    before, upto, whole = (_text(m, ids) for ids in (left, [*left, here], [*left, here, *right]))
    token = upto[len(before) :] if upto.startswith(before) else label(m.tokenizer, here)
    if token.strip(" "):  # the space before a word belongs to what comes before
        before, token = before + " " * (len(token) - len(token.lstrip(" "))), token.lstrip(" ")
    after = whole[len(upto) :] if whole.startswith(upto) else _text(m, right)
    return Context(
        before=before,
        token=token,
        after=after,
        activation=value,
        answer=None if answer == NOTHING else label(m.tokenizer, answer),
        text=text,
        place=place,
    )


def _text(m: Model, ids: list[int]) -> str:
    if m.tokenizer is None:
        return "".join(f" {token}" for token in ids)
    return decoded(m.tokenizer, ids, special=True)


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
    whole, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (token, " " + token))
    known = [
        int(encoding.ids[0])
        for encoding in (whole, spaced)
        if len(encoding.ids) == 1 and encoding.ids[0] != m.special.get("unk")
    ]
    refuse(
        not known,
        f'"{token}" is no token of the vocabulary but {len(whole.tokens)} ({" ".join(whole.tokens[:8])}): '
        "name one of them",
    )
    return known[0]
