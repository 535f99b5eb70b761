"""Syntax in attention: for each relation of a treebank, the head whose strongest links follow it best.

    found = syntax(m, read_treebank(Path("dev.conllu.gz")))
    found.best("det")            # Relation(name="det", arcs=1841, head=..., direction="to governor", ...)

An arc counts as found where the strongest link of one of its words goes to the other, among the other words
of the sentence; special tokens are no words. The baseline is the best fixed distance: the governor always k
words away, k chosen for each relation on these very sentences. The best of many heads is the best partly by
luck: `held_out` is its accuracy where the head was chosen on one half of the sentences and judged on the
other.

Shapes: B batch, H heads, N heads of the model, T tokens, W words, A arcs, R relations.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import nearest, refuse
from clearhead.inside import inputs, results
from clearhead.inside.heads.alignments import WordTokens, align, word_attention, word_matrices
from clearhead.inside.names import AttentionHead, heads_in, patterned
from clearhead.learn.batches.padding import by_length, padded, real_tokens
from clearhead.learn.data.treebank import Sentence
from clearhead.run.api import Model

DIRECTIONS = ("to governor", "to dependent")
CELLS = 300_000  # of one head's patterns in a batch


@dataclass(frozen=True)
class Relation(results.Result):
    """One row of the table; shares from 0 to 1."""

    name: str
    arcs: int
    distance: int  # of the baseline: governor minus dependent, in words
    baseline: float
    head: str
    direction: str
    accuracy: float
    held_out: float  # of the head chosen on the other half; NaN where one half has no arc
    gain: float  # what the head finds beyond the baseline


@dataclass(frozen=True)
class Syntax(results.Result):
    """How often each head is right about each relation."""

    heads: tuple[AttentionHead, ...]
    relations: tuple[str, ...]  # most frequent first
    arcs: results.Array  # [2, R]: in either half of the sentences
    right: results.Array  # [2, 2, N, R]: halves, DIRECTIONS, heads
    distances: tuple[int, ...]  # R
    baselines: results.Array  # R
    sentences: int
    words: int
    lost: int  # words without a token, or beyond the last token that is read: their arcs count as missed

    @property
    def accuracy(self) -> results.Array:
        """[2, N, R]: for either direction, how often each head is right."""
        return np.asarray(self.right.sum(0) / self.arcs.sum(0))

    def best(self, relation: str) -> Relation:
        """Return the head that follows a relation best, beside the baseline."""
        refuse(
            relation not in self.relations,
            f'no arc is called "{relation}"{nearest(relation, self.relations)}: '
            f"there are {', '.join(self.relations)}",
        )
        at = self.relations.index(relation)
        accuracy, arcs = self.accuracy[:, :, at], int(self.arcs[:, at].sum())
        direction, head = np.unravel_index(accuracy.argmax(), accuracy.shape)
        right = self.right[..., at].reshape(2, -1)  # halves, directions and heads
        found = sum(int(right[half, right[1 - half].argmax()]) for half in (0, 1))
        return Relation(
            name=relation,
            arcs=arcs,
            distance=self.distances[at],
            baseline=float(self.baselines[at]),
            head=str(self.heads[head]),
            direction=DIRECTIONS[direction],
            accuracy=float(accuracy.max()),
            held_out=found / arcs if self.arcs[:, at].all() else float("nan"),
            gain=float(accuracy.max() - self.baselines[at]),
        )

    def table(self, least: int = 1) -> list[Relation]:
        """Return a row for each relation that has this many arcs, most frequent first."""
        return [self.best(name) for name, arcs in zip(self.relations, self.arcs.sum(0)) if arcs >= least]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "sentences": self.sentences,
            "words": self.words,
            "lost": self.lost,
            "relations": results.plain(self.table()),
        }


def syntax(m: Model, sentences: Sequence[Sentence]) -> Syntax:
    """Judge every head by every relation. Where there are two stacks, the encoder reads the sentences."""
    refuse(isinstance(m, Transformer), "syntax needs a tokenizer: give what load gave, not the bare model")
    refuse(
        any(spec.input != "tokens" for spec in m.config.stacks),
        "syntax needs a model that reads text, and this one reads images or vectors",
    )
    refuse(
        not any(word.head for sentence in sentences for word in sentence.words),
        "there is no arc to judge by: give sentences of two words or more",
    )
    counted, distances, baselines = _fixed_distance(sentences)
    kind = "encoder" if m.config.family == "encoder-decoder" else "self"
    heads = tuple(heads_in(patterned(m.config, kind)))
    right = torch.zeros(2, 2, len(heads), len(counted), dtype=torch.long)
    arcs = torch.zeros(2, len(counted), dtype=torch.long)
    aligned = [align(m, sentence) for sentence in sentences]
    read = [at for at, one in enumerate(aligned) if one.ids]
    for group in by_length(
        [len(aligned[at].ids) for at in read], lambda count, longest: count * longest**2 <= CELLS
    ):
        batch = [read[place] for place in group]
        rows = [
            (row, own, word.head - 1, counted.index(word.relation), at % 2)
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
            right[:, direction].transpose(1, 2).index_put_((half, relation), hits, accumulate=True)
    return Syntax(
        heads=heads,
        relations=tuple(counted),
        arcs=arcs.numpy(),
        right=right.numpy(),
        distances=distances,
        baselines=baselines,
        sentences=len(sentences),
        words=sum(len(one.words) for one in aligned),
        lost=sum(not tokens for one in aligned for tokens in one.words),
    )


def _fixed_distance(sentences: Sequence[Sentence]) -> tuple[list[str], tuple[int, ...], results.Array]:
    """Return relations by frequency, the commonest distance of each (governor - dependent), and its share."""
    found = Counter(
        (word.relation, word.head - own)
        for sentence in sentences
        for own, word in enumerate(sentence.words, 1)
        if word.head
    )
    totals = Counter(relation for relation, _ in found.elements())
    names = sorted(totals, key=lambda name: (-totals[name], name))
    common = [  # of each relation: how often, negative, and the distance
        min((-count, abs(distance), distance) for (own, distance), count in found.items() if own == name)
        for name in names
    ]
    shares = np.array([-count / totals[name] for name, (count, _, _) in zip(names, common)])
    return names, tuple(distance for _, _, distance in common), shares


def strongest_links(m: Model, batch: Sequence[WordTokens], kind: str = "self") -> Tensor:
    """Return for every head and word the other word it looks at most: [B, N, W]; -1 where it looks at none.

    `kind` is "self" for a model of one stack, "encoder" for the encoder before a decoder.
    """
    device = inputs.device_of(m.model)
    sentences = [one.ids for one in batch]
    ids, mask = padded(sentences, m.special.get("pad", 0), device), real_tokens(sentences, device)
    names = [f"{one.part}.pattern" for one in patterned(m.config, kind)]
    if kind == "encoder":
        start = torch.tensor([m.start_ids[:1]] * len(batch), device=device)
        seen = inputs.recorded(m.model, names, start, source=ids, source_mask=mask)
    else:
        seen = inputs.recorded(m.model, names, ids, mask=mask)
    matrices = word_matrices([one.words for one in batch], ids.shape[1])
    sum_of, mean_of = (x.to(device)[:, None] for x in matrices)  # B 1 T W, B 1 W T
    itself = torch.eye(sum_of.shape[-1], dtype=torch.bool, device=device)
    found = []
    for name in names:
        between = word_attention(seen[name].float(), sum_of, mean_of).masked_fill(itself, 0.0)  # B H W W
        most, where = between.max(-1)
        found.append(where.masked_fill(most <= 0, -1))
    return torch.cat(found, 1).cpu()
