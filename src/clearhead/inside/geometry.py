"""Where words and positions stand: neighbours, analogies, words on a plane, one word in two texts, positions,
and the similarity of two texts.

    neighbours(m, "king", 5)                             # by cosine
    analogy(m, "man", "king", "woman")                   # king - man + woman
    projection(m, ["one", "two", "red", "blue"])         # principal components
    same_word(m, "the bank of the river", "a bank lends money", "bank")
    position_map(m, 64), position_similarity(m, 64)      # what tells positions apart, how alike two are
    similarity(m, "A dog runs", "The cat sleeps").cosine # of the two vectors that `embed` gives

A word that is one token with a space before it is taken so, as it stands in a text. A word of several tokens
is their mean, and the result names them.

Shapes: V vocabulary, D width of the table, N words, L layers, T positions, R rotated columns, H heads.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.core.config import TABLES
from clearhead.core.embedding import TokenFront
from clearhead.core.heads import LanguageHead
from clearhead.core.stack import Stack
from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.text import label, labels
from clearhead.inside.alignments import positions
from clearhead.inside.inputs import AnyModel, as_model, device_of, prepare, prepare_first
from clearhead.inside.names import states
from clearhead.inside.results import Floats, Result, on_cpu
from clearhead.learn.tasks.images import patch_names
from clearhead.learn.tasks.vectors import likeness
from clearhead.run.api import Model

Table = Literal["input", "output"]
WordOrId = str | int
Which = Literal["main", "encoder"]
LENGTH = 64  # positions, where nobody says how many


@dataclass(frozen=True)
class Nearest(Result):
    """The tokens nearest to a word, or to a sum of words; best first."""

    query: str
    words: dict[str, tuple[str, ...]]  # each word of the query, and the tokens whose mean stands for it
    table: str
    ids: tuple[int, ...]
    labels: tuple[str, ...]
    scores: tuple[float, ...]  # cosine; of an analogy cos(x, b) - cos(x, a) + cos(x, c)


@dataclass(frozen=True, eq=False)
class Projection(Result):
    """Words on the plane in which they differ most."""

    labels: tuple[str, ...]  # N
    points: Floats  # [N, 2]
    explained: tuple[float, float]  # share of the variance along each axis
    axes: Floats  # [2, D]
    table: str


@dataclass(frozen=True, eq=False)
class SameWord(Result):
    """One word in two texts: how alike its states are, layer by layer."""

    word: str
    texts: tuple[str, str]
    tokens: tuple[tuple[str, ...], tuple[str, ...]]  # of the word in each text
    layers: tuple[str, ...]  # "embedding", "0", "1", ...
    similarity: Floats  # [L + 1], cosine
    # [L + 1], mean cosine of other tokens of the two texts: what any two states share; NaN: none.
    baseline: Floats


@dataclass(frozen=True, eq=False)
class PositionMap(Result):
    """A table of numbers with names for both sides."""

    scheme: str  # learned, sinusoidal, rope, alibi, relative
    values: Floats  # [rows, columns]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_name: str
    column_name: str
    measure: str  # what the numbers are


@dataclass(frozen=True, eq=False)
class WordVectors:
    """A table of token vectors, read by words."""

    m: Model
    table: Table
    vectors: Tensor  # [V, D], float32 on the CPU

    def ids(self, word: WordOrId) -> list[int]:
        """Return the tokens of a word: with a space before it, or without where that takes fewer."""
        m, size = self.m, len(self.vectors)
        if isinstance(word, int):
            refuse(
                not 0 <= word < size, f"token {word} is not in the vocabulary: ids go from 0 to {size - 1}"
            )
            return [word]
        refuse(not word.strip(), "the word is empty: give a word, or the number of a token")
        forms: list[list[int]] = [
            m.text_tokenizer.encode(form, add_special_tokens=False).ids for form in (" " + word, word)
        ]
        known = [ids for ids in forms if ids and m.special.get("unk") not in ids]
        refuse(
            not known,
            f'"{word}" cannot be written with the tokens of this model: '
            "try another word, or the number of a token",
        )
        return min(known, key=len)

    def mean(self, word: WordOrId) -> Tensor:
        """Return the mean of the vectors of a word's tokens. [D]"""
        return self.vectors[self.ids(word)].mean(0)

    def nearest(self, query: str, words: Sequence[tuple[int, WordOrId]], k: int) -> Nearest:
        """Return the tokens nearest to a signed sum of words, without their own and any without a name."""
        refuse(k < 1, f"k {k} must be 1 or more")
        own, tokenizer = {str(word): self.ids(word) for _, word in words}, self.m.tokenizer
        left_out = {token for ids in own.values() for token in ids}
        if tokenizer is not None:
            left_out |= {token for token in range(len(self.vectors)) if tokenizer.id_to_token(token) is None}
        unit = torch.stack([sign * nnf.normalize(self.mean(word), dim=0) for sign, word in words])
        scores = nnf.normalize(self.vectors, dim=-1) @ unit.sum(0)
        scores = scores.index_fill(0, torch.tensor(sorted(left_out)), -torch.inf)
        best = scores.topk(min(k, len(scores) - len(left_out)))
        names, ids = {word: labels(tokenizer, own[word]) for word in own}, best.indices.tolist()
        return Nearest(
            query, names, self.table, tuple(ids), labels(tokenizer, ids), tuple(best.values.tolist())
        )


def word_vectors(m: AnyModel, table: Table = "input") -> WordVectors:
    """Return the vectors of all tokens: what the first stack reads, or what the head compares states with."""
    m = as_model(m)
    head, front = m.model.head, (m.model.encoder or m.model.main).embedding.front
    if table == "output":
        if not isinstance(head, LanguageHead):
            raise InputError(f"head {m.config.head} has no table of tokens: choose table input")
        return WordVectors(m, table, on_cpu(head.out.weight))
    if not isinstance(front, TokenFront):
        raise InputError(
            f"this model reads {m.config.stacks[0].input}, which have no table of vectors: "
            "geometry takes a model of tokens"
        )
    return WordVectors(m, table, on_cpu(front.tokens.weight))


def neighbours(m: AnyModel, word: WordOrId, k: int = 10, table: Table = "input") -> Nearest:
    """Return the tokens whose vectors have the highest cosine with the word's, without its own tokens."""
    return word_vectors(m, table).nearest(str(word), [(1, word)], k)


def analogy(
    m: AnyModel, a: WordOrId, b: WordOrId, c: WordOrId, k: int = 10, table: Table = "input"
) -> Nearest:
    """Answer what is to `c` as `b` is to `a`: the x with the highest cos(x, b) - cos(x, a) + cos(x, c).

    The words' own tokens are left out.
    """
    return word_vectors(m, table).nearest(f"{b} - {a} + {c}", [(-1, a), (1, b), (1, c)], k)


def projection(
    m: AnyModel, words: Sequence[WordOrId] | None = None, k: int = 100, table: Table = "input"
) -> Projection:
    """Return words on their first two principal components; the largest entry of each axis is positive.

    `words` are words or ids; None: `k` frequent tokens, see `frequent`.
    """
    vectors = word_vectors(m, table)
    chosen: Sequence[WordOrId] = frequent(vectors.m, k) if words is None else words
    refuse(len(chosen) < 3, f"{len(chosen)} words make no map: give three or more")
    rows = torch.stack([vectors.mean(word) for word in chosen]).double()  # N D
    rows = rows - rows.mean(0)
    _, sizes, axes = torch.linalg.svd(rows, full_matrices=False)
    axes = axes[:2] * axes[:2].gather(1, axes[:2].abs().argmax(1, keepdim=True)).sign()
    share = (sizes.square() / sizes.square().sum().clamp(min=1e-30))[:2].tolist()
    names = tuple(label(vectors.m.tokenizer, word) if isinstance(word, int) else word for word in chosen)
    return Projection(names, on_cpu(rows @ axes.T).numpy(), (share[0], share[1]), on_cpu(axes).numpy(), table)


def frequent(m: Model, k: int) -> list[int]:
    """Return `k` tokens in the order of their ids, those of two letters or more first.

    Most tokenizers number frequent tokens first.
    """
    names = {
        number: label(m.tokenizer, number)
        for number in range(len(word_vectors(m).vectors))
        if number not in m.special.values()
    }
    plain = [number for number, name in names.items() if name and not re.fullmatch(r"[\[<].*[\]>]", name)]
    return sorted(plain, key=lambda number: not re.fullmatch(r"·?[^\W\d_]{2,}", names[number]))[:k]


def same_word(m: AnyModel, text_a: str, text_b: str, word: str) -> SameWord:
    """Compare the states of a word in two texts, at the embedding and after each layer.

    A word of several tokens is their mean. Of a model with two stacks, the encoder's states are taken. The
    baseline is the mean cosine of all pairs of tokens, one of each text, that are neither the word's nor
    special.
    """
    m = word_vectors(m).m
    (states_a, own_a, rest_a, names_a), (states_b, own_b, rest_b, names_b) = (
        _read(m, text, word) for text in (text_a, text_b)
    )
    layers = list(zip(states_a, states_b))
    similarity = [nnf.cosine_similarity(a[own_a].mean(0), b[own_b].mean(0), dim=0) for a, b in layers]
    baseline = [
        (nnf.normalize(a[rest_a], dim=-1) @ nnf.normalize(b[rest_b], dim=-1).T).mean() for a, b in layers
    ]
    return SameWord(
        word,
        (text_a, text_b),
        (names_a, names_b),
        ("embedding", *map(str, range(len(states_a) - 1))),
        torch.stack(similarity).numpy(),
        torch.stack(baseline).numpy(),
    )


def _read(m: Model, text: str, word: str) -> tuple[list[Tensor], list[int], list[int], tuple[str, ...]]:
    """Return states [T, D] by layer, positions of the word's tokens and of the others', the word's labels."""
    prepared = prepare_first(m, text)
    tokens = prepared.first_tokens
    own = list(positions([_find(word, text)], tokens.text_spans)[0])
    refuse(
        not own,
        f'the word "{word}" has no token in "{text[:60]}": the model reads {len(tokens)} tokens of it',
    )
    rest = [place for place in range(len(tokens)) if place not in own and not tokens.special[place]]
    names = states(m.config.stacks[0])
    _, seen = prepared.record(*names)
    return [on_cpu(seen[name][0]) for name in names], own, rest, tuple(tokens.labels[place] for place in own)


def _find(word: str, text: str) -> tuple[int, int]:
    """Return the characters of a word in a text: as a whole word first, in its own letters first."""
    refuse(not word.strip(), "the word is empty: name a word of both texts")
    patterns = (rf"(?<!\w){re.escape(word)}(?!\w)", re.escape(word))
    ways = [(pattern, flag) for pattern in patterns for flag in (0, re.IGNORECASE)]
    matches = [match.span() for pattern, flag in ways for match in re.finditer(pattern, text, flag)]
    refuse(not matches, f'the word "{word}" does not stand in "{text[:60]}": both texts must have it')
    return matches[0]


# Positions --------------------------------------------------------------------------------------------------


def position_map(m: AnyModel, length: int | None = None, stack: Which = "main") -> PositionMap:
    """Return what tells positions apart.

    Learned and sinusoidal positions are vectors [T, D]. Rotary ones are the cosines, then the sines, of each
    pair's angle [T, R]. Biases are what is added to the scores by distance [H, distances].

    `length` is of positions; None: as many as the model takes, 64 at most, or all patches of an image.
    """
    part, where, names = _positions(m, length, stack)
    scheme, values = part.positions.spec.positions, _vectors(part, where)
    row_name, column_name, measure = "position", "dimension", "value"
    if values is None:
        bias, last = _bias(part, where), where.shape[1] - 1
        values = torch.cat([bias[:, -1], bias[:, 0, 1:]], -1)  # H distances: -last to last
        values = values[:, : last + 1] if part.spec.causal else values
        names = tuple(map(str, range(len(values))))
        columns = tuple(str(place - last) for place in range(values.shape[1]))
        row_name, column_name, measure = "head", "key's position - query's", "added to the score"
    elif scheme == "rope":
        columns = tuple(f"{name} {pair}" for name in ("cos", "sin") for pair in range(values.shape[-1] // 2))
        column_name, measure = "pair", "cosine or sine of the angle"
    else:
        columns = tuple(map(str, range(values.shape[-1])))
    return PositionMap(scheme, on_cpu(values).numpy(), names, columns, row_name, column_name, measure)


def position_similarity(m: AnyModel, length: int | None = None, stack: Which = "main") -> PositionMap:
    """Return how alike two positions are, [T, T].

    Of vectors it is their cosine; of rotary positions the mean over the pairs of the cosine of the angle
    between them; of biases, which know no vectors, the mean over the heads of what is added to the score.
    """
    part, where, names = _positions(m, length, stack)
    scheme, vectors = part.positions.spec.positions, _vectors(part, where)
    if vectors is None:
        values, measure = _bias(part, where).mean(0), "mean added to the score"
    else:
        unit = nnf.normalize(vectors.detach().double().cpu(), dim=-1)
        values, measure = unit @ unit.T, "mean cosine of the angle between" if scheme == "rope" else "cosine"
    return PositionMap(scheme, on_cpu(values).numpy(), names, names, "position", "position", measure)


def _positions(m: AnyModel, length: int | None, stack: Which) -> tuple[Stack, Tensor, tuple[str, ...]]:
    """Return a stack that has positions, their numbers [1, T] and their names."""
    model = as_model(m).model
    config, part = model.config, model.encoder if stack == "encoder" else model.main
    if part is None:
        raise InputError("stack encoder is not there: this model has one stack, so leave it out")
    refuse(
        config.positions == "none", "this model has no positions (positions none): there is nothing to draw"
    )
    image = part.spec.input == "patches"
    most = config.n_patches + config.class_token if image else config.max_positions
    if length is None:
        length = most if image else min(most, LENGTH)
    table = image or config.positions in TABLES
    allowed = f"lie between 2 and {most}" if table else "be 2 or more"
    refuse(length < 2 or (table and length > most), f"length {length} must {allowed}")
    names = patch_names(config)[:length] if image else tuple(map(str, range(length)))
    return part, torch.arange(length, device=device_of(model))[None], names


def _vectors(part: Stack, where: Tensor) -> Tensor | None:
    """Return the vector of each position [T, D]; of rotary ones cosines and sines [T, R]; of biases None."""
    vectors = part.positions.embed(where, torch.float32)
    first = next((layer for layer in range(part.spec.n_layers) if layer not in part.spec.rope_skips), 0)
    rotary = part.positions.rotary(where, part.spec.windows[first])
    if rotary is None:
        return None if vectors is None else vectors[0]
    half = rotary.cos.shape[-1] // 2
    own = slice(half) if part.positions.spec.rope_layout == "half" else slice(None, None, 2)
    return torch.cat([rotary.cos[0, 0, :, own], rotary.sin[0, 0, :, own]], -1)


def _bias(part: Stack, where: Tensor) -> Tensor:
    """Return what is added to the scores: [H, T, T]."""
    bias = part.positions.bias(where, where, torch.float32)
    assert bias is not None
    return bias[0].detach().cpu()


# Similarity of two texts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Similarity(Result):
    """Two texts, side by side."""

    cosine: float
    tokens: tuple[tuple[str, ...], tuple[str, ...]]
    states: Tensor  # [T, S]


def similarity(m: AnyModel, text: str, other: str) -> Similarity:
    """Return how alike two texts are to a model that embeds texts; each is read by itself."""
    m = as_model(m)
    read = [prepare(m, read_text) for read_text in (text, other)]
    hidden = [prepared.record("hidden", logits="none")[0].hidden[0] for prepared in read]
    first, second = (nnf.normalize(x.double().cpu(), dim=-1) for x in hidden)
    labels = (read[0].tokens.labels, read[1].tokens.labels)
    return Similarity(likeness(m, text, other), labels, (first @ second.T).float())
