"""Where words stand: neighbours and analogies among token vectors, words on a plane, one word in two texts.

    neighbours(m, "king", 5)                             # by cosine
    analogy(m, "man", "king", "woman")                   # king - man + woman
    projection(m, ["one", "two", "red", "blue"])         # principal components
    same_word(m, "the bank of the river", "a bank lends money", "bank")

A word that is one token with a space before it is taken so, as it stands in a text. A word of several tokens
is their mean, and the result names them.

Shapes: V vocabulary, D width of the table, N words, L layers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.api import Model
from clearhead.errors import InputError, refuse
from clearhead.inside.heads.words import positions
from clearhead.inside.inputs import AnyModel, as_model, prepare_first
from clearhead.inside.names import states
from clearhead.inside.position_maps import position_map as position_map
from clearhead.inside.position_maps import position_similarity as position_similarity
from clearhead.inside.results import Floats, Result, on_cpu
from clearhead.model.fronts import TokenFront
from clearhead.model.heads import LanguageHead
from clearhead.tokens.labels import label, labels

Table = Literal["input", "output"]
WordOrId = str | int


@dataclass(frozen=True)
class Nearest(Result):
    """The tokens nearest to a word, or to a sum of words; best first."""

    query: str
    words: dict[str, tuple[str, ...]]  # each word asked for, and the tokens whose mean stands for it
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

    def unit(self, word: WordOrId) -> Tensor:
        """Return the same, scaled to length one."""
        return nnf.normalize(self.mean(word), dim=0)

    def nearest(self, query: str, words: Sequence[WordOrId], direction: Tensor, k: int) -> Nearest:
        """Return the tokens nearest to a direction [D], without the words' own and any without a name."""
        refuse(k < 1, f"k {k} must be 1 or more")
        own = {str(word): self.ids(word) for word in words}
        scores = nnf.normalize(self.vectors, dim=-1) @ direction
        left_out = {token for ids in own.values() for token in ids}
        tokenizer = self.m.tokenizer
        if tokenizer is not None:
            left_out |= {token for token in range(len(scores)) if tokenizer.id_to_token(token) is None}
        scores = scores.index_fill(0, torch.tensor(sorted(left_out)), -torch.inf)
        best = scores.topk(min(k, len(scores) - len(left_out)))
        names = {word: labels(tokenizer, ids) for word, ids in own.items()}
        ids = best.indices.tolist()
        return Nearest(
            query, names, self.table, tuple(ids), labels(tokenizer, ids), tuple(best.values.tolist())
        )


def word_vectors(m: AnyModel, table: Table = "input") -> WordVectors:
    """Return the vectors of all tokens: what the first stack reads, or what the head compares states with."""
    m = as_model(m)
    model, front = m.model, (m.model.encoder or m.model.main).embedding.front
    if table == "output":
        if not isinstance(model.head, LanguageHead):
            raise InputError(f"head {model.config.head} has no table of tokens: choose table input")
        return WordVectors(m, table, on_cpu(model.head.out.weight))
    if not isinstance(front, TokenFront):
        raise InputError(
            f"this model reads {m.config.stacks[0].input}, which have no table of vectors: "
            "geometry takes a model of tokens"
        )
    return WordVectors(m, table, on_cpu(front.tokens.weight))


def neighbours(m: AnyModel, word: WordOrId, k: int = 10, table: Table = "input") -> Nearest:
    """Return the tokens whose vectors have the highest cosine with the word's, without its own tokens."""
    vectors = word_vectors(m, table)
    return vectors.nearest(str(word), [word], vectors.unit(word), k)


def analogy(
    m: AnyModel, a: WordOrId, b: WordOrId, c: WordOrId, k: int = 10, table: Table = "input"
) -> Nearest:
    """Answer what is to `c` as `b` is to `a`: the x with the highest cos(x, b) - cos(x, a) + cos(x, c).

    The words' own tokens are left out.
    """
    vectors = word_vectors(m, table)
    direction = vectors.unit(b) - vectors.unit(a) + vectors.unit(c)
    return vectors.nearest(f"{b} - {a} + {c}", (a, b, c), direction, k)


def projection(
    m: AnyModel, words: Sequence[WordOrId] | None = None, k: int = 100, table: Table = "input"
) -> Projection:
    """Return words on their first two principal components; the largest entry of each axis is positive.

    Args:
        m: what `load` gave, or a bare model, which takes ids.
        words: words or ids; None: `k` frequent tokens, see `frequent`.
        k: how many of those.
        table: input or output.
    """
    vectors = word_vectors(m, table)
    asked: Sequence[WordOrId] = frequent(vectors.m, k) if words is None else words
    refuse(len(asked) < 3, f"{len(asked)} words make no map: give three or more")
    rows = torch.stack([vectors.mean(word) for word in asked]).double()  # N D
    rows = rows - rows.mean(0)
    _, sizes, axes = torch.linalg.svd(rows, full_matrices=False)
    axes = axes[:2]
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    share = (sizes.square() / sizes.square().sum().clamp(min=1e-30))[:2].tolist()
    names = tuple(label(vectors.m.tokenizer, word) if isinstance(word, int) else word for word in asked)
    return Projection(names, on_cpu(rows @ axes.T).numpy(), (share[0], share[1]), on_cpu(axes).numpy(), table)


def frequent(m: Model, k: int) -> list[int]:
    """Return `k` tokens in the order of their ids, those of two letters or more first.

    Most tokenizers number frequent tokens first.
    """
    special = set(m.special.values())
    names = {
        number: label(m.tokenizer, number)
        for number in range(len(word_vectors(m).vectors))
        if number not in special
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
    similarity, baseline = [], []
    for a, b in zip(states_a, states_b):
        similarity.append(nnf.cosine_similarity(a[own_a].mean(0), b[own_b].mean(0), dim=0))
        baseline.append((nnf.normalize(a[rest_a], dim=-1) @ nnf.normalize(b[rest_b], dim=-1).T).mean())
    return SameWord(
        word,
        (text_a, text_b),
        (names_a, names_b),
        ("embedding", *map(str, range(len(states_a) - 1))),
        torch.stack(similarity).numpy(),
        torch.stack(baseline).numpy(),
    )


def _read(m: Model, text: str, word: str) -> tuple[list[Tensor], list[int], list[int], tuple[str, ...]]:
    """Return states [T, D] by layer, places of the word's tokens and of the others', the word's labels."""
    prepared = prepare_first(m, text)
    tokens = prepared.first_tokens
    own = list(positions([_find(word, text)], tokens.text_spans)[0])
    if not own:
        raise InputError(
            f'the word "{word}" has no token in "{text[:60]}": the model reads {len(tokens)} tokens of it'
        )
    rest = [place for place in range(len(tokens)) if place not in own and not tokens.special[place]]
    names = states(m.config.stacks[0])
    _, seen = prepared.record(*names)
    return [on_cpu(seen[name][0]) for name in names], own, rest, tuple(tokens.labels[place] for place in own)


def _find(word: str, text: str) -> tuple[int, int]:
    """Return the characters of a word in a text: as a whole word first, in its own letters first."""
    refuse(not word.strip(), "the word is empty: name a word of both texts")
    for pattern in (rf"(?<!\w){re.escape(word)}(?!\w)", re.escape(word)):
        for flag in (0, re.IGNORECASE):
            found = re.search(pattern, text, flag)
            if found:
                return found.span()
    raise InputError(f'the word "{word}" does not stand in "{text[:60]}": both texts must have it')
