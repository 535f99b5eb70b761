"""Where words stand: neighbours and analogies in the table of tokens, the table on a plane, one word in two sentences.

    neighbours(m, "king", 5)                             # by cosine
    analogy(m, "man", "king", "woman")                   # king - man + woman
    projection(m, ["one", "two", "red", "blue"])         # principal components
    same_word(m, "the bank of the river", "a bank lends money", "bank")

A word that is one token with a space before it is taken so, as it stands in a text. A word of several tokens is their mean,
and the result names them.

Shapes: V vocabulary, D width of the table, N words, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as nnf
from numpy.typing import NDArray
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.inside.inputs import Prepared, prepare
from clearhead.inside.position_maps import position_map as position_map
from clearhead.inside.position_maps import position_similarity as position_similarity
from clearhead.model.fronts import TokenFront
from clearhead.model.heads import LanguageHead
from clearhead.model.transformer import Transformer
from clearhead.tokens.labels import label, labels

Table = Literal["input", "output"]
Word = str | int
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Nearest:
    """The tokens nearest to a word, or to a sum of words; best first."""

    query: str
    words: dict[str, tuple[str, ...]]  # each word asked for, and the tokens whose mean stands for it
    table: str
    ids: tuple[int, ...]
    labels: tuple[str, ...]
    scores: tuple[float, ...]  # cosine; of an analogy cos(x, b) - cos(x, a) + cos(x, c)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Projection:
    """Words on the plane in which they differ most."""

    labels: tuple[str, ...]  # N
    points: Floats  # [N, 2]
    explained: tuple[float, float]  # share of the variance along each axis
    axes: Floats  # [2, D]
    table: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "points": self.points.tolist(), "axes": self.axes.tolist()}


@dataclass(frozen=True, eq=False)
class SameWord:
    """One word in two texts: how alike its states are, layer by layer."""

    word: str
    texts: tuple[str, str]
    tokens: tuple[tuple[str, ...], tuple[str, ...]]  # of the word in each text
    layers: tuple[str, ...]  # "embedding", "0", "1", ...
    similarity: Floats  # [L + 1], cosine
    baseline: Floats  # [L + 1], mean cosine of other tokens of the two texts: what any two states have in common; NaN: there are none

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        baseline = [None if value != value else value for value in self.baseline.tolist()]
        return {**asdict(self), "similarity": self.similarity.tolist(), "baseline": baseline}


def embedding_table(m: Model | Transformer, table: Table = "input") -> Tensor:
    """The vectors of all tokens: what the first stack reads them as, or what the head compares states with. [V, D] in float32."""
    model = m.model if isinstance(m, Model) else m
    if table == "output":
        if not isinstance(model.head, LanguageHead):
            raise InputError(f"head {model.config.head} has no table of tokens: choose table input")
        return _plain(model.head.out.weight)
    first = model.encoder if model.encoder is not None else model.main
    if not isinstance(first.embedding.front, TokenFront):
        raise InputError(
            f"this model reads {first.spec.input}, which have no table of vectors: geometry takes a model of tokens"
        )
    return _plain(first.embedding.front.tokens.weight)


def neighbours(m: Model | Transformer, word: Word, k: int = 10, table: Table = "input") -> Nearest:
    """The tokens whose vectors point most nearly where the word's does; its own tokens are left out."""
    m = _loaded(m)
    unit = nnf.normalize(embedding_table(m, table), dim=-1)
    ids = word_ids(m, word, table)
    return _nearest(m, str(word), {str(word): ids}, unit @ vector(m, word, table), k, table)


def analogy(
    m: Model | Transformer, a: Word, b: Word, c: Word, k: int = 10, table: Table = "input"
) -> Nearest:
    """`a` is to `b` as `c` is to what: the tokens x with the highest cos(x, b) - cos(x, a) + cos(x, c); the words' own are left out."""
    m = _loaded(m)
    unit = nnf.normalize(embedding_table(m, table), dim=-1)
    direction = vector(m, b, table) - vector(m, a, table) + vector(m, c, table)
    words = {str(word): word_ids(m, word, table) for word in (a, b, c)}
    return _nearest(m, f"{b} - {a} + {c}", words, unit @ direction, k, table)


def projection(
    m: Model | Transformer, words: Sequence[Word] | None = None, k: int = 100, table: Table = "input"
) -> Projection:
    """Words on their first two principal components, signs fixed so that each axis' largest entry is positive.

    Args:
        m: what `load` gave, or a bare model, which takes ids.
        words: words or ids; None: `k` frequent tokens, see `frequent`.
        k: how many of those.
        table: input or output.
    """
    m = _loaded(m)
    asked: Sequence[Word] = frequent(m, k) if words is None else words
    if len(asked) < 3:
        raise InputError(f"{len(asked)} words make no map: give three or more")
    vectors = embedding_table(m, table)
    rows = torch.stack([vectors[word_ids(m, word, table)].mean(0) for word in asked]).double()  # N D
    _, sizes, axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    axes = axes[:2]
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    points = (rows - rows.mean(0)) @ axes.T
    share = (sizes.square() / sizes.square().sum().clamp(min=1e-30))[:2].tolist()
    names = tuple(label(m.tokenizer, word) if isinstance(word, int) else word for word in asked)
    return Projection(names, _array(points), (share[0], share[1]), _array(axes), table)


def frequent(m: Model, k: int) -> list[int]:
    """`k` tokens by their ids, as most tokenizers number frequent tokens first; those of two letters or more come before others."""
    size, special = len(embedding_table(m)), set(m.special.values())
    names = {
        number: name
        for number in range(size)
        if (name := label(m.tokenizer, number)) and number not in special
    }
    plain = {number: name for number, name in names.items() if not re.fullmatch(r"[\[<].*[\]>]", name)}
    word = [number for number, name in plain.items() if re.fullmatch(r"·?[^\W\d_]{2,}", name)]
    return [*word, *(number for number in plain if number not in set(word))][:k]


def same_word(m: Model | Transformer, text_a: str, text_b: str, word: str) -> SameWord:
    """The states of a word in two texts, compared at the embedding and after each layer; a word of several tokens is their mean.

    Of a model with two stacks, the encoder's states are taken. The baseline is the mean cosine of all pairs of tokens, one of
    each text, that are neither the word's nor special.
    """
    m = _loaded(m)
    embedding_table(m)
    rows = [_read(m, text, word) for text in (text_a, text_b)]
    (states_a, own_a, rest_a, names_a), (states_b, own_b, rest_b, names_b) = rows
    similarity, baseline = [], []
    for a, b in zip(states_a, states_b):
        similarity.append(nnf.cosine_similarity(a[own_a].mean(0), b[own_b].mean(0), dim=0))
        others = nnf.normalize(a[rest_a], dim=-1) @ nnf.normalize(b[rest_b], dim=-1).T
        baseline.append(others.mean() if others.numel() else torch.tensor(float("nan")))
    layers = ("embedding", *map(str, range(len(states_a) - 1)))
    return SameWord(
        word,
        (text_a, text_b),
        (names_a, names_b),
        layers,
        _array(torch.stack(similarity)),
        _array(torch.stack(baseline)),
    )


def _read(m: Model, text: str, word: str) -> tuple[list[Tensor], list[int], list[int], tuple[str, ...]]:
    """States [T, D] of a text by layer, the places of a word's tokens, those of the other words' tokens, the word's labels."""
    both = m.config.family == "encoder-decoder"
    prepared: Prepared = prepare(m, text, target="" if both else None)
    stack = "encoder." if both else ""
    tokens = prepared.tokens_of(stack)
    start, end = _find(word, text)
    own = [
        place
        for place, (a, b) in enumerate(tokens.spans)
        if max(a, start) < min(b, end) and not tokens.special[place]
    ]
    if not own:
        raise InputError(
            f'the word "{word}" has no token in "{text[:60]}": the model reads {len(tokens)} tokens of it'
        )
    rest = [place for place in range(len(tokens)) if place not in own and not tokens.special[place]]
    _, seen = prepared.record(f"{stack}embedding", f"{stack}blocks.*.resid_post")
    return (
        [states[0].float().cpu() for states in seen.values()],
        own,
        rest,
        tuple(tokens.labels[place] for place in own),
    )


def _find(word: str, text: str) -> tuple[int, int]:
    """The characters of a word in a text: as a whole word first, in its own letters first."""
    if not word.strip():
        raise InputError("the word is empty: name a word of both texts")
    patterns = (rf"(?<!\w){re.escape(word)}(?!\w)", re.escape(word))
    found = next(
        (
            hit
            for pattern in patterns
            for flag in (0, re.IGNORECASE)
            if (hit := re.search(pattern, text, flag))
        ),
        None,
    )
    if found is None:
        raise InputError(f'the word "{word}" does not stand in "{text[:60]}": both texts must have it')
    return found.span()


def word_ids(m: Model, word: Word, table: Table = "input") -> list[int]:
    """The tokens of a word: of itself with a space before it, or without where that takes fewer."""
    size = len(embedding_table(m, table))
    if isinstance(word, int):
        if not 0 <= word < size:
            raise InputError(f"token {word} is not in the vocabulary: ids go from 0 to {size - 1}")
        return [word]
    if not word.strip():
        raise InputError("the word is empty: give a word, or the number of a token")
    forms: list[list[int]] = [
        m.text_tokenizer.encode(form, add_special_tokens=False).ids for form in (" " + word, word)
    ]
    known = [ids for ids in forms if ids and m.special.get("unk") not in ids]
    if not known:
        raise InputError(
            f'"{word}" cannot be written with the tokens of this model: try another word, or the number of a token'
        )
    return min(known, key=len)


def vector(m: Model, word: Word, table: Table = "input") -> Tensor:
    """A word's direction: the mean of its tokens' vectors, of length one. [D]"""
    return nnf.normalize(embedding_table(m, table)[word_ids(m, word, table)].mean(0), dim=0)


def _nearest(
    m: Model, query: str, words: dict[str, list[int]], scores: Tensor, k: int, table: Table
) -> Nearest:
    """The best of all scores [V], the asked words' own tokens left out, and ids that the tokenizer does not know."""
    if k < 1:
        raise InputError(f"k {k} must be 1 or more")
    left_out = [token for ids in words.values() for token in ids]
    if m.tokenizer is not None:
        left_out += [token for token in range(len(scores)) if m.tokenizer.id_to_token(token) is None]
    scores = scores.index_fill(0, torch.tensor(left_out), -torch.inf)
    best = scores.topk(min(k, len(scores) - len(set(left_out))))
    ids = best.indices.tolist()
    names = {word: labels(m.tokenizer, tokens) for word, tokens in words.items()}
    return Nearest(query, names, table, tuple(ids), labels(m.tokenizer, ids), tuple(best.values.tolist()))


def _loaded(m: Model | Transformer) -> Model:
    return m if isinstance(m, Model) else Model(m)


def _plain(weight: Tensor) -> Tensor:
    return weight.detach().float().cpu()


def _array(values: Tensor) -> Floats:
    made: Floats = values.float().numpy()
    return made
