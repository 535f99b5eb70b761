"""Syntax in attention: for each relation of a treebank, the head whose strongest link between words follows it best.

    found = syntax(m, read_treebank(Path("dev.conllu.gz")))
    found.best("det")            # Relation(name="det", arcs=1841, head=..., direction="to governor", accuracy=..., baseline=...)

An arc counts as found where the strongest link of one of its words goes to the other, among the other words of the
sentence; special tokens are no words. The baseline is the best fixed distance: the governor always k words away, k
chosen for each relation on these very sentences. The best of many heads is the best partly by luck: `held_out` is its
accuracy where the head was chosen on one half of the sentences and judged on the other.

Shapes: B batch, H heads, N heads of the model, T tokens, W words, A arcs, R relations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.bundle import Model
from clearhead.data.treebank import Sentence
from clearhead.errors import InputError, nearest
from clearhead.inside.heads.words import WordTokens, align, word_attention, word_matrices
from clearhead.inside.names import Head, all_heads, attentions
from clearhead.model.taps import record
from clearhead.model.transformer import Transformer, evaluating

DIRECTIONS = ("to governor", "to dependent")
CELLS = 300_000  # of one head's patterns in a batch


@dataclass(frozen=True)
class Relation:
    """One row of the table; shares from 0 to 1."""

    name: str
    arcs: int
    distance: int  # of the baseline: governor minus dependent, in words
    baseline: float
    head: str
    direction: str
    accuracy: float
    held_out: float

    @property
    def gain(self) -> float:
        """What the head finds beyond the baseline."""
        return self.accuracy - self.baseline

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "gain": self.gain}


@dataclass(frozen=True)
class Syntax:
    """How often each head is right about each relation."""

    heads: tuple[Head, ...]
    relations: tuple[str, ...]  # most frequent first
    arcs: NDArray[np.int64]  # [2, R]: in either half of the sentences
    right: NDArray[np.int64]  # [2, 2, N, R]: halves, DIRECTIONS, heads
    distances: tuple[int, ...]  # R
    baselines: NDArray[np.float64]  # R
    sentences: int
    words: int
    lost: int  # words without a token, or behind the last token that the model reads: their arcs count as missed

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """[2, N, R]: for either direction, how often each head is right."""
        return np.asarray(self.right.sum(0) / self.arcs.sum(0))

    def best(self, relation: str) -> Relation:
        """The head that follows a relation best, beside the baseline."""
        if relation not in self.relations:
            raise InputError(
                f'no arc is called "{relation}"{nearest(relation, self.relations)}: there are {", ".join(self.relations)}'
            )
        at = self.relations.index(relation)
        accuracy = self.accuracy[:, :, at]
        direction, head = np.unravel_index(accuracy.argmax(), accuracy.shape)
        row = (relation, int(self.arcs[:, at].sum()), self.distances[at], float(self.baselines[at]))
        return Relation(
            *row, str(self.heads[head]), DIRECTIONS[direction], float(accuracy.max()), self._held_out(at)
        )

    def _held_out(self, at: int) -> float:
        """The accuracy of the head chosen on the other half, over both halves; NaN where one half has no arc."""
        if not self.arcs[:, at].all():
            return float("nan")
        hits = 0
        for half in (0, 1):
            chosen = np.unravel_index(self.right[1 - half, :, :, at].argmax(), self.right.shape[1:3])
            hits += int(self.right[half, *chosen, at])
        return hits / int(self.arcs[:, at].sum())

    def table(self, least: int = 1) -> list[Relation]:
        """A row for each relation that has this many arcs, most frequent first."""
        return [self.best(name) for name, arcs in zip(self.relations, self.arcs.sum(0)) if arcs >= least]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        counts = {"sentences": self.sentences, "words": self.words, "lost": self.lost}
        rows = [row.to_dict() for row in self.table()]
        return counts | {
            "relations": [
                {key: None if value != value else value for key, value in row.items()} for row in rows
            ]
        }


def syntax(m: Model, sentences: Sequence[Sentence]) -> Syntax:
    """Judge every head by every relation. Where there are two stacks, the encoder reads the sentences."""
    if isinstance(m, Transformer):
        raise InputError("syntax needs a tokenizer: give what load gave, not the bare model")
    if m.model.main.spec.input != "tokens" or (
        m.config.encoder is not None and m.config.encoder.input != "tokens"
    ):
        raise InputError("syntax needs a model that reads text, and this one reads images or vectors")
    if not any(word.head for sentence in sentences for word in sentence.words):
        raise InputError("there is no arc to judge by: give sentences of two words or more")
    counted, distances, baselines = _fixed_distance(sentences)
    number = {name: at for at, name in enumerate(counted)}
    kind = "encoder" if m.config.family == "encoder-decoder" else "self"
    heads = tuple(head for head in all_heads(m.config) if head.kind == kind)
    right = torch.zeros(2, 2, len(heads), len(counted), dtype=torch.long)
    arcs = torch.zeros(2, len(counted), dtype=torch.long)
    aligned = [align(m, sentence) for sentence in sentences]
    for batch in _batches(aligned):
        rows = [
            (row, own, word.head - 1, number[word.relation], at % 2)
            for row, at in enumerate(batch)
            for own, word in enumerate(sentences[at].words)
            if word.head
        ]
        if not rows:
            continue
        row, dependent, governor, relation, half = torch.tensor(rows).T
        arcs.index_put_((half, relation), torch.ones_like(row), accumulate=True)
        links = strongest_links(m, [aligned[at] for at in batch], kind)  # B N W
        for direction, (source, goal) in enumerate(((dependent, governor), (governor, dependent))):
            hits = (links[row, :, source] == goal[:, None]).long()  # A N
            flat = torch.zeros(2 * len(counted), len(heads), dtype=torch.long).index_add_(
                0, half * len(counted) + relation, hits
            )
            right[:, direction] += flat.view(2, len(counted), len(heads)).transpose(1, 2)
    words = sum(len(one.words) for one in aligned)
    lost = sum(not tokens for one in aligned for tokens in one.words)
    return Syntax(
        heads, tuple(counted), arcs.numpy(), right.numpy(), distances, baselines, len(sentences), words, lost
    )


def _fixed_distance(sentences: Sequence[Sentence]) -> tuple[list[str], tuple[int, ...], NDArray[np.float64]]:
    """Relations by how many arcs they have, and for each the commonest distance, governor minus dependent, with its share."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for sentence in sentences:
        for own, word in enumerate(sentence.words, 1):
            if word.head:
                found[word.relation][word.head - own] += 1
    names = sorted(found, key=lambda name: (-found[name].total(), name))
    common = [min(found[name].items(), key=lambda item: (-item[1], abs(item[0]), item[0])) for name in names]
    shares = np.array([count / found[name].total() for name, (_, count) in zip(names, common)])
    return names, tuple(distance for distance, _ in common), shares


def _batches(aligned: Sequence[WordTokens]) -> Iterator[list[int]]:
    """Numbers of sentences of like length, so many that their patterns stay small."""
    order = sorted((at for at, one in enumerate(aligned) if one.ids), key=lambda at: len(aligned[at].ids))
    batch: list[int] = []
    for at in order:
        if batch and (len(batch) + 1) * len(aligned[at].ids) ** 2 > CELLS:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch


@torch.no_grad()
def strongest_links(m: Model, batch: Sequence[WordTokens], kind: str = "self") -> Tensor:
    """For every head and word, the other word it looks at most: [B, N, W]; -1 where it looks at none.

    `kind` is "self" for a model of one stack, "encoder" for the encoder before a decoder.
    """
    device = next(m.model.parameters()).device
    length = max(len(one.ids) for one in batch)
    ids = torch.full((len(batch), length), m.special.get("pad", 0))
    mask = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, one in enumerate(batch):
        ids[row, : len(one.ids)], mask[row, : len(one.ids)] = torch.tensor(one.ids), True
    names = [f"{Head(own, layer, 0).part}.pattern" for own, layer, _ in attentions(m.config) if own == kind]
    ids, mask = ids.to(device), mask.to(device)
    with record(m.model, *names) as seen, evaluating(m.model):
        if kind == "encoder":
            begin = torch.tensor([m._start()[:1]] * len(batch), device=device)
            m.model(begin, source=ids, source_mask=mask, logits="none")
        else:
            m.model(ids, mask, logits="none")
    sum_of, mean_of = (
        x.to(device)[:, None] for x in word_matrices([one.words for one in batch], length)
    )  # B 1 T W, B 1 W T
    itself = torch.eye(sum_of.shape[-1], dtype=torch.bool, device=device)
    found = []
    for name in names:
        between = word_attention(seen[name].float(), sum_of, mean_of).masked_fill(itself, 0.0)  # B H W W
        most, where = between.max(-1) if between.shape[-1] else (between.sum(-1), between.sum(-1).long())
        found.append(where.masked_fill(most <= 0, -1))
    return torch.cat(found, 1).cpu()
