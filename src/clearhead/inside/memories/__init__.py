"""The feed-forward as a memory (Geva et al. 2021): what fires each neuron, what it promotes, and whether the two agree.

    found = memories(m, texts)                           # one pass over the corpus, top contexts of every neuron
    found.ranked("agreement", 5)                         # neurons whose contexts go on as they say
    found.neuron("2.117").contexts                       # the places that fired it most
    found.search("the")                                  # who promotes a token, and whom it fires

A neuron fires where its activation is above zero. A gated neuron can also go below; it then promotes what is listed here
as suppressed. What is kept of the corpus are `top` contexts per neuron, however long it is. Agreement is the share of a
neuron's `top` contexts whose answer, the token that truly comes next, is among the `depth` tokens it promotes most; chance
is the share of all places of the corpus whose answer is.

Shapes: N neurons of one feed-forward, K contexts kept, P promoted tokens, T tokens of a batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError, nearest
from clearhead.inside.memories.firing import Running, fired, watch
from clearhead.inside.memories.neurons import chosen, parse_neuron, stack_of
from clearhead.inside.memories.passages import AROUND, NOTHING, WINDOW, Given, batches
from clearhead.inside.memories.promoted import Readout, directions, extremes, readout, said, token_id
from clearhead.model.transformer import Transformer

Order = Literal["agreement", "activation"]
DEPTH = 10  # promoted tokens among which the answer must be; of a small vocabulary one in twenty


@dataclass(frozen=True)
class Context:
    """One place of the corpus that fired a neuron."""

    before: str
    token: str
    after: str
    activation: float
    answer: str | None  # what the head is there to say; None where nothing is known
    text: int  # number of the text, counted from 0
    place: int  # of the token in it


@dataclass(frozen=True)
class Memory:
    """One neuron."""

    name: str
    activation: float  # the highest seen; 0: it never fired
    contexts: tuple[Context, ...]  # highest first
    promoted: tuple[
        tuple[str, float], ...
    ]  # tokens or classes with their scores, highest first; () where it cannot be read off
    suppressed: tuple[tuple[str, float], ...]  # lowest first
    agreement: float | None
    chance: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Found:
    """Neurons that have to do with one token; best first."""

    token: str
    promoting: tuple[tuple[str, float], ...]  # name, score of the token
    fired: tuple[
        tuple[str, float, float], ...
    ]  # name, share of its contexts at this token, highest activation

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Shelf:
    """The neurons of one feed-forward, or of one expert."""

    kind: str  # self, encoder
    layer: int
    expert: int | None
    units: Tensor  # [N]
    activations: Tensor  # [N, K], -inf where there are fewer contexts
    notes: Tensor  # [N, K, NOTE], see `passages`
    written: Tensor | None = None  # [N, D], what each neuron says to the head
    promoted: tuple[Tensor, Tensor, Tensor, Tensor] | None = (
        None  # [N, P] tokens, scores; suppressed tokens, scores
    )
    agreement: Tensor | None = None  # [N]
    chance: Tensor | None = None  # [N]

    def name(self, row: int) -> str:
        """Of one neuron, "2.117"; with experts "2.0.117"; "encoder.2.117" in the stack before the head's."""
        parts = [self.kind, self.layer, self.expert, int(self.units[row])]
        return ".".join(str(part) for part in parts if part not in (None, "self"))


@dataclass(frozen=True, eq=False)
class Memories:
    """What a corpus showed of a model's neurons."""

    m: Model = field(repr=False)
    shelves: tuple[Shelf, ...] = field(repr=False)
    top: int
    depth: int
    tokens: int  # read, both stacks together
    head: Readout | None = field(repr=False)
    note: str  # how to read what neurons promote, or why there is nothing to read

    def neuron(self, name: str) -> Memory:
        """One neuron by its name."""
        shelf, row = self._find(name)
        return self._memory(shelf, row)

    def ranked(self, by: Order | None = None, count: int | None = 10) -> list[Memory]:
        """The first neurons by agreement beyond chance, or by highest activation, which settles ties too; None: by what is known."""
        by = by or ("agreement" if self.agrees else "activation")
        if by == "agreement" and not self.agrees:
            raise InputError(f"no agreement is known ({self.note}): sort by activation")
        places = [(shelf, row) for shelf in self.shelves for row in range(len(shelf.units))]
        highest = torch.cat([shelf.activations[:, 0] for shelf in self.shelves]).argsort(
            descending=True, stable=True
        )
        scores = torch.cat([self._key(shelf, by) for shelf in self.shelves])[highest]
        order = highest[scores.argsort(descending=True, stable=True)].tolist()
        return [self._memory(*places[place]) for place in order[:count]]

    @property
    def agrees(self) -> bool:
        """Is any neuron's agreement known?"""
        return any(shelf.agreement is not None for shelf in self.shelves)

    def search(self, token: str | int, count: int = 10) -> Found:
        """The neurons that promote a token (or a class) most, and those that it fires: the token stands in most of their contexts."""
        number = self._token(token)
        promoting: list[tuple[str, float]] = []
        fired: list[tuple[str, float, float]] = []
        classes = self.head is not None and bool(self.head.names)
        for shelf in self.shelves:
            if shelf.written is not None and self.head is not None:
                best = (shelf.written @ self.head.weight[number]).topk(min(count, len(shelf.units)))
                promoting += [(shelf.name(int(row)), float(score)) for score, row in zip(*best)]
            if not classes:
                share = (shelf.notes[:, :, AROUND] == number).float().mean(1)
                rows = share.topk(min(count, len(share))).indices.tolist()
                fired += [
                    (shelf.name(row), float(share[row]), float(shelf.activations[row, 0]))
                    for row in rows
                    if share[row] > 0
                ]
        promoting.sort(key=lambda pair: -pair[1])
        fired.sort(key=lambda triple: (-triple[1], -triple[2]))
        name = said(self.m, self.head.names if self.head is not None else (), number)
        return Found(name, tuple(promoting[:count]), tuple(fired[:count]))

    def to_dict(self, by: Order | None = None, count: int | None = 10) -> dict[str, Any]:
        """Plain JSON values: the first `count` neurons, None: all."""
        neurons = [memory.to_dict() for memory in self.ranked(by, count)]
        return {
            "tokens": self.tokens,
            "top": self.top,
            "depth": self.depth,
            "note": self.note,
            "neurons": neurons,
        }

    def _key(self, shelf: Shelf, by: Order) -> Tensor:
        if by == "activation":
            return shelf.activations[:, 0]
        if shelf.agreement is None or shelf.chance is None:
            return torch.full((len(shelf.units),), -torch.inf)
        return shelf.agreement - shelf.chance

    def _find(self, name: str) -> tuple[Shelf, int]:
        kind, layer, expert, unit = parse_neuron(self.m, name)
        for shelf in self.shelves:
            if (shelf.kind, shelf.layer, shelf.expert) == (kind, layer, expert):
                rows = (shelf.units == unit).nonzero()
                if len(rows):
                    return shelf, int(rows[0])
        raise InputError(f'neuron "{name}" was not looked at: name its layer, or leave layer and neurons out')

    def _token(self, token: str | int) -> int:
        names = self.head.names if self.head is not None else ()
        if names:
            if token not in names and token not in range(len(names)):
                raise InputError(
                    f'no class is called "{token}"{nearest(str(token), names)}: classes are {", ".join(names[:10])}'
                )
            return names.index(token) if isinstance(token, str) else token
        return token_id(self.m, token)

    def _memory(self, shelf: Shelf, row: int) -> Memory:
        fired = [
            (float(value), note.tolist())
            for value, note in zip(shelf.activations[row], shelf.notes[row])
            if value > 0
        ]
        high, low = self._said(shelf, row, 0), self._said(shelf, row, 2)
        agreement, chance = (
            None if values is None else float(values[row]) for values in (shelf.agreement, shelf.chance)
        )
        contexts = tuple(_context(self.m, value, note) for value, note in fired)
        return Memory(shelf.name(row), fired[0][0] if fired else 0.0, contexts, high, low, agreement, chance)

    def _said(self, shelf: Shelf, row: int, which: int) -> tuple[tuple[str, float], ...]:
        if shelf.promoted is None or self.head is None:
            return ()
        tokens, scores = (shelf.promoted[which + part][row].tolist() for part in (0, 1))
        return tuple((said(self.m, self.head.names, token), score) for token, score in zip(tokens, scores))


def memories(
    m: Model | Transformer,
    texts: Iterable[Given],
    layer: int | str | None = None,
    top: int = 10,
    neurons: Sequence[str] | None = None,
    limit: int | None = None,
) -> Memories:
    """Read a corpus once and keep what fires each neuron; say what each promotes.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        texts: texts or ids; (source, target) or a source alone for two stacks; images for a model of patches. May be a stream.
        layer: a layer of the stack that feeds the head, or "encoder.1"; None: all of both stacks.
        top: contexts that are kept for each neuron, and tokens listed as promoted and suppressed.
        neurons: names such as "2.117"; None: every neuron of the layers.
        limit: stop after so many tokens.
    """
    m = m if isinstance(m, Model) else Model(m)
    if top < 1:
        raise InputError(f"top {top} must be 1 or more")
    shelves = [Running(shelf, top) for shelf in chosen(m, layer, neurons)]
    try:
        head, note = readout(m), ""
    except InputError as error:
        head, note = None, str(error)
    vocabulary = head is not None and not head.names
    counts = torch.zeros(m.config.vocab_size if vocabulary else 0, dtype=torch.long)
    tokens = 0
    for batch in batches(m, texts, limit):
        seen = watch(m, batch, shelves)
        notes = {stack: batch.places(stack) for stack in {shelf.stack for shelf in shelves}}
        for shelf in shelves:
            shelf.take(*fired(m, shelf, seen, batch, notes[shelf.stack]))
        answers = torch.tensor(
            [answer for passage in batch.passages for answer in passage.answers if answer != NOTHING],
            dtype=torch.long,
        )
        counts += answers.bincount(minlength=len(counts)) if vocabulary else 0
        tokens += sum(passage.size for passage in batch.passages)
    depth = min(DEPTH, max(1, m.config.vocab_size // 20)) if vocabulary else 0
    known = counts / counts.sum().clamp(min=1)
    found = tuple(_judged(m, shelf, head, top, depth, known) for shelf in shelves)
    if head is not None:
        only = (
            ""
            if any(shelf.promoted for shelf in found)
            else "the encoder speaks to cross-attention, not to the head; "
        )
        note = only + head.note
    return Memories(m, found, top, depth, tokens, head, note)


def _judged(m: Model, run: Running, head: Readout | None, top: int, depth: int, known: Tensor) -> Shelf:
    """A shelf with what its neurons promote, and how far that agrees with what fires them."""
    shelf = Shelf(run.kind, run.layer, run.expert, run.units, run.values, run.notes)
    if head is None or run.kind == "encoder":
        return shelf
    written = directions(m, stack_of(m, run.kind), run.layer, run.expert)[run.units]
    promoted = extremes(written, head.weight, max(top, depth))
    agreement = chance = None
    if depth:
        said_most = promoted[0][:, :depth]
        answers = run.notes[:, :, WINDOW]  # N K
        agreement = (answers[:, :, None] == said_most[:, None]).any(-1).float().mean(1)
        chance = known[said_most].sum(1)
    firsts, seconds, thirds, fourths = (part[:, :top] for part in promoted)
    listed = (firsts, seconds, thirds, fourths)
    return Shelf(
        run.kind, run.layer, run.expert, run.units, run.values, run.notes, written, listed, agreement, chance
    )


def _context(m: Model, value: float, note: list[int]) -> Context:
    """A note in words."""
    window, (answer, text, place) = note[:WINDOW], note[WINDOW:]
    if m.model.main.spec.input != "tokens":
        return Context(f"image {text} ", _patch(m, window[AROUND]), "", value, None, text, place)
    left, right = (
        [token for token in part if token != NOTHING] for part in (window[:AROUND], window[AROUND + 1 :])
    )
    here = [*left, window[AROUND]]
    before, upto, whole = (_text(m, ids) for ids in (left, here, [*here, *right]))
    token = upto[len(before) :] if upto.startswith(before) else said(m, (), window[AROUND])
    if token.strip(" "):  # the space before a word belongs to what comes before
        before, token = before + " " * (len(token) - len(token.lstrip(" "))), token.lstrip(" ")
    after = whole[len(upto) :] if whole.startswith(upto) else _text(m, right)
    return Context(
        before, token, after, value, None if answer == NOTHING else said(m, (), answer), text, place
    )


def _text(m: Model, ids: list[int]) -> str:
    if m.tokenizer is None:
        return "".join(f" {token}" for token in ids)
    return str(m.tokenizer.decode(ids, skip_special_tokens=False))


def _patch(m: Model, number: int) -> str:
    """A patch by its row and column."""
    assert m.config.image_size is not None
    columns = m.config.image_size[1] // m.config.patch_size
    number -= int(m.config.class_token)
    return "[CLS]" if number < 0 else f"{number // columns},{number % columns}"
