"""From tokens to words: which tokens a word is made of, and attention between words from attention between tokens.

Characters decide. A word and a token belong together where their stretches of the text overlap, so that any tokenizer
will do: a word may have several tokens, several words may share one, and a word may have none.

    words = align(m, ["Do", "n't", "go"], "Don't go")    # .words: token positions of each word
    between = word_attention(pattern, *words.matrices())  # [..., T, T] -> [..., W, W]

Shapes: B batch, H heads, T tokens, W words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.api import Model
from clearhead.data.treebank import Sentence, locate
from clearhead.errors import InputError
from clearhead.hub.encodings import framed
from clearhead.tokens.labels import labels

Span = tuple[int, int]
UNLIMITED = 1 << 30


@dataclass(frozen=True)
class WordTokens:
    """The words of a text among its tokens."""

    ids: tuple[int, ...]  # T of them, special tokens included, as the model reads the text
    words: tuple[
        tuple[int, ...], ...
    ]  # W of them: the positions of each word's tokens; none for a word cut off or not spelled
    spans: tuple[Span, ...]  # T: characters of the text behind each token; (0, 0): none
    special: tuple[bool, ...]  # T: put there by the tokenizer, not by the text
    types: tuple[int, ...]  # T: segments
    labels: tuple[str, ...]  # T: tokens as people read them

    def matrices(self) -> tuple[Tensor, Tensor]:
        """`sum_of` [T, W] and `mean_of` [W, T]; see `word_attention`."""
        sum_of, mean_of = word_matrices([self.words], len(self.ids))
        return sum_of[0], mean_of[0]


def align(
    m: Model | Tokenizer,
    words: Sequence[str] | Sentence,
    text: str | None = None,
    spans: Sequence[Span] | None = None,
    max_length: int | None = None,
) -> WordTokens:
    """The tokens of each word of a sentence.

    Args:
        m: a loaded model, or a tokenizer alone. A model that goes on with its text does not read what ends it.
        words: the words in order, or a sentence of a treebank, which knows its text and spans.
        text: what they are words of; None: the words with a space between each two.
        spans: the characters of each word; None: the words are looked for in the text, one after the other.
        max_length: tokens that are kept; None: what the model can read.
    """
    if isinstance(words, Sentence):
        return align(m, [word.form for word in words.words], words.text, words.spans or None, max_length)
    text = " ".join(words) if text is None else text
    if spans is None:
        spans = locate(words, text)
        if spans is None:
            raise InputError(
                f"the words do not make up the text: {' '.join(words)[:60]!r} against {text[:60]!r}"
            )
    if len(spans) != len(words):
        raise InputError(f"{len(spans)} spans for {len(words)} words: give one for each")
    tokenizer = m.text_tokenizer if isinstance(m, Model) else m
    room = max_length or (m.max_length if isinstance(m, Model) else UNLIMITED)
    encoding = framed(tokenizer, room, text)
    ids = list(encoding.ids)
    if (
        isinstance(m, Model)
        and m.config.family == "decoder"
        and len(ids) > 1
        and ids[-1] in m.stops
        and encoding.special_tokens_mask[-1]
    ):
        ids = ids[:-1]
    kept = len(ids)
    token_spans: tuple[Span, ...] = tuple(encoding.offsets[:kept])
    special = tuple(bool(mark) for mark in encoding.special_tokens_mask[:kept])
    behind = [(0, 0) if mark else span for span, mark in zip(token_spans, special)]
    return WordTokens(
        tuple(ids),
        positions(spans, behind),
        token_spans,
        special,
        tuple(encoding.type_ids[:kept]),
        labels(tokenizer, ids),
    )


def positions(words: Sequence[Span], tokens: Sequence[Span]) -> tuple[tuple[int, ...], ...]:
    """For each stretch of characters in `words`, the positions of the tokens that overlap it. A token of no characters overlaps none."""
    return tuple(
        tuple(place for place, (a, b) in enumerate(tokens) if max(a, start) < min(b, end))
        for start, end in words
    )


def word_matrices(rows: Sequence[Sequence[Sequence[int]]], length: int) -> tuple[Tensor, Tensor]:
    """For rows of words, each word its token positions: `sum_of` [B, T, W] of ones, and `mean_of` [B, W, T] whose rows sum to 1.

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
    """Attention between words: to a word, the sum over its tokens; from a word, the mean over its tokens (Clark et al. 2019).

    pattern [..., T, T], sum_of [..., T, W] of the words looked at, mean_of [..., W, T] of those that look -> [..., W, W].
    """
    return mean_of @ pattern @ sum_of
