"""Heads and annotated words: the words of a text among its tokens, heads that follow a word alignment, and
heads that follow the relations of a treebank.

    words = align(m, ["Do", "n't", "go"], "Don't go")              # .words: token positions of each word
    between = word_attention(pattern, *word_matrices([words.words], len(words)))  # [1, T, T] -> [1, W, W]
    agreement(m, read_alignments(Path("pairs.jsonl"))).ranking()   # heads, best first
    syntax(m, read_treebank(Path("dev.conllu.gz"))).best("det")    # the head that follows a relation best

Characters decide: a word and a token belong together where their spans of the text overlap, whatever the
tokenizer. A word may have several tokens or none, and several words may share one.

An alignment says which span of a text belongs to which, a line each:

    {"text": "The cat that I saw ran", "pairs": [[[4, 7], [19, 22]]]}        one stack, or the encoder of two
    {"source": "Ein Hund", "target": "A dog", "pairs": [[[4, 8], [2, 5]]]}   cross-attention, source first
    {"text": "The cat ran", "unit": "tokens", "pairs": [[[1, 2], [3, 4]]]}   spans of tokens, special included

For each pair and head: does the strongest link from one span, among tokens that are neither special nor in
it, go into the other, and how much attention goes there? Cross-attention is measured twice, as a target token
has two queries: the one that predicts it, from the token before, and the one that reads it.

An arc of a treebank is found where the strongest link of one of its words goes to the other, among the other
words of the sentence. The baseline is the best fixed distance, chosen for each relation on these sentences.
The best of many heads is the best partly by luck: `held_out` is the accuracy where the head was chosen on one
half of the sentences and measured on the other.

Shapes: B batch, H heads, N heads that are ranked, T tokens or queries, S keys, W words, A arcs, R relations.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, refuse, refuse_unknown
from clearhead.hub.tokenizer import framed
from clearhead.hub.tokens.text import labels
from clearhead.inside import inputs, results
from clearhead.inside.names import AttentionHead, heads_in, patterned
from clearhead.learn.batches.ragged import by_length
from clearhead.learn.data import conll, files
from clearhead.learn.data.conll import Sentence
from clearhead.run.api import Model

UNLIMITED = 1 << 30


@dataclass(frozen=True)
class WordTokens(inputs.InputTokens):
    """The words of a text among its tokens."""

    # W: positions of each word's tokens; none for a word cut off or not spelled.
    words: tuple[tuple[int, ...], ...] = ()
    types: tuple[int, ...] = ()  # T: segments


def align(
    m: Model | Tokenizer,
    words: Sequence[str] | conll.Sentence,
    text: str | None = None,
    spans: Sequence[conll.Span] | None = None,
    max_length: int | None = None,
) -> WordTokens:
    """Return the tokens of each word of a sentence.

    Args:
        m: a loaded model, or a tokenizer alone. A model that goes on with its text does not read what ends
            it.
        words: the words in order, or a sentence of a treebank, which knows its text and spans.
        text: what they are words of; None: the words with a space between each two.
        spans: the characters of each word; None: the words are looked for in the text, one after the other.
        max_length: tokens that are kept; None: what the model can read.
    """
    if isinstance(words, conll.Sentence):
        return align(m, [word.form for word in words.words], words.text, words.spans or None, max_length)
    text = " ".join(words) if text is None else text
    spans = conll.locate(words, text) if spans is None else spans
    if spans is None:
        raise InputError(f"the words do not make up the text: {' '.join(words)[:60]!r} against {text[:60]!r}")
    refuse(len(spans) != len(words), f"{len(spans)} spans for {len(words)} words: give one for each")
    tokenizer = m.text_tokenizer if isinstance(m, Model) else m
    encoding = framed(tokenizer, max_length or (m.max_length if isinstance(m, Model) else UNLIMITED), text)
    ids, count, special = encoding.ids, len(encoding.ids), tuple(map(bool, encoding.special_tokens_mask))
    ended = isinstance(m, Model) and m.config.family == "decoder" and count > 1 and ids[-1] in m.stops
    if ended and special[-1]:
        count -= 1
    read = WordTokens(
        labels(tokenizer, ids[:count]),
        tuple(ids[:count]),
        tuple(encoding.offsets[:count]),
        text,
        special[:count],
    )
    return replace(read, words=positions(spans, read.text_spans), types=tuple(encoding.type_ids[:count]))


def positions(words: Sequence[conll.Span], tokens: Sequence[conll.Span]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the tokens that overlap each stretch of characters; empty ones overlap none."""
    return tuple(
        tuple(place for place, (a, b) in enumerate(tokens) if max(a, start) < min(b, end))
        for start, end in words
    )


def word_matrices(rows: Sequence[Sequence[Sequence[int]]], length: int) -> tuple[Tensor, Tensor]:
    """Return `sum_of` [B, T, W], ones at the tokens of each word, and `mean_of` [B, W, T]; its rows sum to 1.

    Words that rows of a batch do not have, and words without tokens, are zeros.
    """
    width = max((len(row) for row in rows), default=0)
    sum_of = torch.zeros(len(rows), length, width)
    for number, row in enumerate(rows):
        for word, tokens in enumerate(row):
            sum_of[number, list(tokens), word] = 1.0
    mean_of = sum_of.transpose(1, 2)
    return sum_of, mean_of / mean_of.sum(-1, keepdim=True).clamp(min=1.0)


def word_attention(pattern: Tensor, sum_of: Tensor, mean_of: Tensor) -> Tensor:
    """Return attention between words: to a word the sum over its tokens, from a word their mean (Clark et al.
    2019).

    pattern [..., T, T], sum_of [..., T, W] of the words looked at, mean_of [..., W, T] of those that look
    -> [..., W, W].
    """
    return mean_of @ pattern @ sum_of


# Heads that follow an alignment -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Aligned:
    """Stretches that belong together: of one text, or of a source and its target."""

    text: str
    pairs: tuple[tuple[conll.Span, conll.Span], ...]
    target: str | None = None
    unit: Literal["characters", "tokens"] = "characters"


@dataclass(frozen=True)
class Agreement(results.Result):
    """How well each head agrees; shares from 0 to 1."""

    json_names = ("pairs", "skipped", "ranking as heads")

    heads: tuple[AttentionHead, ...]
    directions: tuple[str, str]  # first to second and back; for cross-attention written, read
    accuracy: results.Array  # [2, N]: how often the strongest link goes into the other stretch
    mass: results.Array  # [2, N]: the attention that goes there
    chance: results.Array  # [2]: how often a random link would
    pairs: int
    skipped: int  # pairs with a stretch that has no token

    def ranking(self) -> list[dict[str, Any]]:
        """Return heads, best first, each with its better direction."""
        better = np.where(self.accuracy[1] > self.accuracy[0], 1, 0)
        rows: list[dict[str, Any]] = [
            {
                "head": str(head),
                "direction": self.directions[better[at]],
                "accuracy": float(self.accuracy[better[at], at]),
                "attention": float(self.mass[better[at], at]),
                "chance": float(self.chance[better[at]]),
            }
            for at, head in enumerate(self.heads)
        ]
        return sorted(rows, key=lambda row: (-row["accuracy"], -row["attention"]))


def read_alignments(path: Path) -> list[Aligned]:
    """Read a JSONL file of aligned texts; see the module for its lines."""
    if not path.exists():
        raise files.missing(path)
    alignments = []
    for number, line in files.read_lines(path):
        if line.strip():
            try:
                alignments.append(_aligned(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                form = 'a line is {"text": ..., "pairs": [[[start, end], [start, end]], ...]}'
                raise InputError(
                    f"{path}, line {number}: {error if isinstance(error, InputError) else form}"
                ) from None
    refuse(not alignments, f"{path} is empty: there is no alignment in it")
    return alignments


def _aligned(line: dict[str, Any]) -> Aligned:
    """Return one line, checked."""
    text, target = (line["source"], line["target"]) if "source" in line else (line["text"], None)
    unit = line.get("unit", "characters")
    refuse_unknown("unit", unit, ("characters", "tokens"))
    refuse(
        not isinstance(text, str) or not (target is None or isinstance(target, str)),
        "a text must be a string",
    )
    pairs = tuple(((int(a), int(b)), (int(c), int(d))) for (a, b), (c, d) in line["pairs"])
    for pair in pairs:
        for (start, end), whole in zip(pair, (text, text if target is None else target)):
            refuse(
                not 0 <= start < end or (unit == "characters" and end > len(whole)),
                f"the span [{start}, {end}] is no stretch of a text of {len(whole)} characters",
            )
    return Aligned(text, pairs, target, unit)


def agreement(m: inputs.AnyModel, examples: Iterable[Aligned]) -> Agreement:
    """Judge heads by alignments: of cross-attention where there is a target, else of the first stack."""
    m = inputs.as_model(m)
    examples = list(examples)
    across = {example.target is not None for example in examples}
    refuse(not any(example.pairs for example in examples), "there is no pair to judge by: give at least one")
    refuse(len(across) > 1, "some alignments have a target and some have none: give one kind at a time")
    cross, both = across.pop(), m.config.family == "encoder-decoder"
    refuse(
        cross and not both,
        "alignments of a source and a target need an encoder-decoder: "
        'give {"text": ..., "pairs": ...} for this model',
    )
    kind = ("cross" if cross else "encoder") if both else "self"
    looking = patterned(m.config, kind)
    heads, names = tuple(heads_in(looking)), [f"{attention.part}.pattern" for attention in looking]
    hits, mass = torch.zeros(2, len(heads)), torch.zeros(2, len(heads))
    chance, counted = torch.zeros(2), 0
    for example in examples:
        prepared, first, second = _read(m, example)
        _, seen = prepared.record(*names)
        pattern = torch.cat([results.on_cpu(seen[name][0]) for name in names])  # N T S
        spans = [
            (_tokens(span, first, example.unit), _tokens(other, second, example.unit))
            for span, other in example.pairs
        ]
        known = [pair for pair in spans if all(pair)]
        counted += len(known)
        for span, other in known:
            looks = [(other, span, -1), (other, span, 0)] if cross else [(span, other, 0), (other, span, 0)]
            for direction, (queries, keys, shift) in enumerate(looks):
                candidates = ~torch.tensor(first.special)
                if not cross:
                    candidates[queries] = False
                candidates[keys] = True
                row = pattern[:, [max(query + shift, 0) for query in queries]].mean(1)  # N S
                best = row.masked_fill(~candidates, -1.0)
                hits[direction] += torch.isin(best.argmax(-1), torch.tensor(keys)) & (best.max(-1).values > 0)
                mass[direction] += row[:, keys].sum(-1)
                chance[direction] += len(keys) / float(candidates.sum())
    refuse(not counted, "no stretch of the alignments has a token: check their spans")
    accuracy, attention, random = ((x / counted).double().numpy() for x in (hits, mass, chance))
    return Agreement(
        heads=heads,
        directions=("written", "read") if cross else ("first to second", "second to first"),
        accuracy=accuracy,
        mass=attention,
        chance=random,
        pairs=counted,
        skipped=sum(len(example.pairs) for example in examples) - counted,
    )


def _read(m: Model, example: Aligned) -> tuple[inputs.Prepared, inputs.InputTokens, inputs.InputTokens]:
    """Return the inputs, the tokens of the first text and of the second."""
    if example.target is None:
        prepared = inputs.prepare_first(m, example.text)
        return prepared, prepared.first_tokens, prepared.first_tokens
    encoding = m.framed(example.target)
    start = m.start_ids
    own = [place for place, token in enumerate(encoding.ids) if token not in (*m.stops, *start)]
    kept = own[: m.config.max_positions - len(start)]
    prepared = inputs.prepare(m, example.text, target=[*start, *(encoding.ids[place] for place in kept)])
    second = replace(
        prepared.tokens,
        spans=(*((0, 0) for _ in start), *(encoding.offsets[place] for place in kept)),
        special=(*(True for _ in start), *(False for _ in kept)),
    )
    return prepared, prepared.first_tokens, second


def _tokens(span: conll.Span, tokens: inputs.InputTokens, unit: str) -> list[int]:
    """Return the positions of the tokens in a span."""
    if unit == "characters":
        return list(positions([span], tokens.text_spans)[0])
    refuse(
        span[1] > len(tokens),
        f"the span [{span[0]}, {span[1]}] goes beyond the {len(tokens)} tokens of its text",
    )
    return list(range(*span))


# Syntax -----------------------------------------------------------------------------------------------------


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

    json_names = ("sentences", "words", "lost", "table as relations")

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
        """Return the head that follows a relation best, and the baseline."""
        refuse_unknown("relation", relation, self.relations)
        at = self.relations.index(relation)
        accuracy, arcs = self.accuracy[:, :, at], int(self.arcs[:, at].sum())
        direction, head = np.unravel_index(accuracy.argmax(), accuracy.shape)
        right = self.right[..., at].reshape(2, -1)  # halves, directions and heads
        right_held_out = sum(int(right[half, right[1 - half].argmax()]) for half in (0, 1))
        return Relation(
            name=relation,
            arcs=arcs,
            distance=self.distances[at],
            baseline=float(self.baselines[at]),
            head=str(self.heads[head]),
            direction=DIRECTIONS[direction],
            accuracy=float(accuracy.max()),
            held_out=right_held_out / arcs if self.arcs[:, at].all() else float("nan"),
            gain=float(accuracy.max() - self.baselines[at]),
        )

    def table(self, least: int = 1) -> list[Relation]:
        """Return a row for each relation that has this many arcs, most frequent first."""
        return [self.best(name) for name, arcs in zip(self.relations, self.arcs.sum(0)) if arcs >= least]


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
    read = [at for at, sentence in enumerate(aligned) if sentence.ids]
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
        words=sum(len(sentence.words) for sentence in aligned),
        lost=sum(not tokens for sentence in aligned for tokens in sentence.words),
    )


def _fixed_distance(sentences: Sequence[Sentence]) -> tuple[list[str], tuple[int, ...], results.Array]:
    """Return relations by frequency, the commonest distance of each (governor - dependent), and its share."""
    counts = Counter(
        (word.relation, word.head - own)
        for sentence in sentences
        for own, word in enumerate(sentence.words, 1)
        if word.head
    )
    totals = Counter(relation for relation, _ in counts.elements())
    names = sorted(totals, key=lambda name: (-totals[name], name))
    common = [  # of each relation: how often, negative, and the distance
        min((-count, abs(distance), distance) for (own, distance), count in counts.items() if own == name)
        for name in names
    ]
    shares = np.array([-count / totals[name] for name, (count, _, _) in zip(names, common)])
    return names, tuple(distance for _, _, distance in common), shares


def strongest_links(m: Model, batch: Sequence[WordTokens], kind: str = "self") -> Tensor:
    """Return for every head and word the other word it looks at most: [B, N, W]; -1 where it looks at none.

    `kind` is "self" for a model of one stack, "encoder" for the encoder before a decoder.
    """
    sentences = [words.ids for words in batch]
    names = [f"{attention.part}.pattern" for attention in patterned(m.config, kind)]
    rows = ([m.start_ids[:1]] * len(batch), sentences) if kind == "encoder" else (sentences,)
    seen = inputs.recorded(m.model, names, **inputs.padded_rows(m, *rows))
    matrices = word_matrices([words.words for words in batch], max(map(len, sentences)))
    sum_of, mean_of = (x.to(inputs.device_of(m.model))[:, None] for x in matrices)  # B 1 T W, B 1 W T
    itself = torch.eye(sum_of.shape[-1], dtype=torch.bool, device=sum_of.device)
    links = []
    for name in names:
        between = word_attention(seen[name].float(), sum_of, mean_of).masked_fill(itself, 0.0)  # B H W W
        most, where = between.max(-1)
        links.append(where.masked_fill(most <= 0, -1))
    return torch.cat(links, 1).cpu()
