"""From tokens to words: which tokens a word is made of, and attention between words.

Characters decide. A word and a token belong together where their stretches of the text overlap, so that any
tokenizer will do: a word may have several tokens, several words may share one, and a word may have none.

    read = align(m, ["Do", "n't", "go"], "Don't go")              # .words: token positions of each word
    matrices = word_matrices([read.words], len(read))
    between = word_attention(pattern, *matrices)                  # [1, T, T] -> [1, W, W]

Shapes: B batch, H heads, T tokens, W words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tokenizers import Tokenizer
from torch import Tensor

from clearhead.api import Model
from clearhead.data.treebank import Sentence, Span, locate
from clearhead.errors import InputError, refuse
from clearhead.hub.encodings import framed
from clearhead.inside.inputs import InputTokens
from clearhead.tokens.labels import labels

UNLIMITED = 1 << 30


@dataclass(frozen=True)
class WordTokens(InputTokens):
    """The words of a text among its tokens."""

    # W: positions of each word's tokens; none for a word cut off or not spelled.
    words: tuple[tuple[int, ...], ...] = ()
    types: tuple[int, ...] = ()  # T: segments


def align(
    m: Model | Tokenizer,
    words: Sequence[str] | Sentence,
    text: str | None = None,
    spans: Sequence[Span] | None = None,
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
    if isinstance(words, Sentence):
        return align(m, [word.form for word in words.words], words.text, words.spans or None, max_length)
    text = " ".join(words) if text is None else text
    spans = locate(words, text) if spans is None else spans
    if spans is None:
        raise InputError(f"the words do not make up the text: {' '.join(words)[:60]!r} against {text[:60]!r}")
    refuse(len(spans) != len(words), f"{len(spans)} spans for {len(words)} words: give one for each")
    tokenizer = m.text_tokenizer if isinstance(m, Model) else m
    room = max_length or (m.max_length if isinstance(m, Model) else UNLIMITED)
    encoding = framed(tokenizer, room, text)
    ids, count, special = encoding.ids, len(encoding.ids), tuple(map(bool, encoding.special_tokens_mask))
    ended = isinstance(m, Model) and m.config.family == "decoder" and count > 1 and ids[-1] in m.stops
    if ended and special[-1]:
        count -= 1
    spelled = labels(tokenizer, ids[:count])
    read = WordTokens(spelled, tuple(ids[:count]), tuple(encoding.offsets[:count]), text, special[:count])
    return replace(read, words=positions(spans, read.text_spans), types=tuple(encoding.type_ids[:count]))


def positions(words: Sequence[Span], tokens: Sequence[Span]) -> tuple[tuple[int, ...], ...]:
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
