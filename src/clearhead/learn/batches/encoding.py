"""Encode examples as ids, many texts at a time.

Each function yields `Columns`: arrays to be concatenated. A pair of arrays stands for rows of unequal length:
their ids, flat, and the length of each row.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from clearhead.errors import InputError, nearest, refuse
from clearhead.hub.tokens.chat import ChatTemplate
from clearhead.learn.batches.batch import IGNORE
from clearhead.learn.batches.rows import Frame
from clearhead.learn.data.examples import Chunk, Example, Labelled, Pair, Question, Tagged

Column = NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]
Columns = dict[str, Column]
Item = TypeVar("Item")
BUFFER = 2**18  # characters encoded at a time
PIECE = 2**14  # characters given to the tokenizer as one text: its threads share a buffer's pieces
EXAMPLES = 1024  # encoded at a time


class Encoder(NamedTuple):
    """What turns text and labels into numbers."""

    tokenizer: Tokenizer
    numbers: Mapping[str, int]  # of each label
    separator: int | None  # the token between documents
    template: ChatTemplate | None = None  # of conversations

    def ids(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def number(self, name: str, what: str) -> int:
        """Return the number of a label."""
        if name not in self.numbers:
            known = ", ".join(list(self.numbers)[:10]) + (", ..." if len(self.numbers) > 10 else "")
            raise InputError(
                f'the {what} "{name}" is not among those of the training data '
                f"({known}){nearest(name, self.numbers)}"
            )
        return self.numbers[name]

    def frame(self, pair: bool) -> Frame:
        """Return the special tokens that the tokenizer's template puts around one text, or around two."""
        tokenizer = self.tokenizer
        candidates = ("a", "e", "0", ".", *tokenizer.get_vocab())
        text = next((one for one in candidates if tokenizer.encode(one, add_special_tokens=False).ids), None)
        refuse(
            text is None,
            "the tokenizer turns every text into nothing: train another, or name one with tokens.model",
        )
        encoding = tokenizer.encode(text, text) if pair else tokenizer.encode(text)
        pieces: list[list[int]] = [[]]  # places of the special tokens before, between and after the texts
        text_types, previous = [], None
        for place, (number, kind) in enumerate(zip(encoding.sequence_ids, encoding.type_ids)):
            if number is None:
                pieces[-1].append(place)
            elif number != previous:
                pieces.append([])
                text_types.append(kind)
                previous = number
        special, types = (
            [[values[place] for place in piece] for piece in pieces]
            for values in (encoding.ids, encoding.type_ids)
        )
        return Frame(special, types, text_types)

    def unknown(self) -> int | None:
        """Return the id of text that the tokenizer has no token for; None where it has no such id."""
        model = json.loads(self.tokenizer.to_str())["model"]
        unigram = model["type"] == "Unigram"
        return model["unk_id"] if unigram else self.tokenizer.token_to_id(model.get("unk_token") or "")


def flat(rows: Sequence[Sequence[int]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return rows end to end, and the length of each."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum())), lengths


def groups(rows: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield rows by the buffer: up to `EXAMPLES` of them, or `BUFFER` characters."""
    group, total = list[Item](), 0
    for row in rows:
        group.append(row)
        total += size(row)
        if len(group) == EXAMPLES or total >= BUFFER:
            yield group
            group, total = [], 0
    if group:
        yield group


def characters(row: Example) -> int:
    """Return the number of characters of an example."""
    return sum(map(len, row.texts()))


# Text ------------------------------------------------------------------------------------------------------


def encode_text(chunks: Iterable[Chunk], encoder: Encoder) -> Iterator[Columns]:
    """Encode documents end to end, each followed by the separator; a single one by nothing.

    Documents without tokens are left out.
    """
    between = [] if encoder.separator is None else [encoder.separator]
    several, length = False, 0  # `length`: tokens of the current document
    ended: int | None = None  # tokens of the document before, until it is known whether another follows
    for group in groups(pieces(chunks), lambda piece: len(piece.text)):
        ids, lengths = list[list[int]](), list[int]()
        for piece, row in zip(group, encoder.ids(piece.text for piece in group)):
            if row and ended is not None:
                ids.append(between)
                lengths.append(ended + len(between))
                several, ended = True, None
            ids.append(row)
            length += len(row)
            if piece.ends and length:
                ended, length = length, 0
        yield {"ids": (flat(ids)[0], np.array(lengths, dtype=np.int64))}
    ended = length or ended
    last = between if several else []
    if ended is not None:
        yield {"ids": (np.array(last, dtype=np.int64), np.array([ended + len(last)]))}


def pieces(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the same documents in pieces of at most `PIECE` characters, cut where tokenizers cut too."""
    rest = ""
    for text, ends in chunks:
        rest, at = rest + text, 0
        while len(rest) - at > PIECE:
            end = _cut(rest, at + PIECE // 2, at + PIECE)
            yield Chunk(rest[at:end], False)
            at = end
        rest = rest[at:]
        if ends:
            yield Chunk(rest, True)
            rest = ""
    if rest:
        yield Chunk(rest, True)


def _cut(text: str, low: int, high: int) -> int:
    """Return the last good place to cut between `low` and `high`.

    That is before a single space between words, as words of many tokenizers begin with it; else before white
    space.
    """
    for pattern in (r"(?<=\w) (?=\w)", r"(?<=\S)\s"):
        for start in range(high - 256, low - 256, -256):
            found = [match.start() for match in re.finditer(pattern, text[max(low, start) - 1 : start + 257])]
            if found:
                return max(low, start) - 1 + found[-1]
    return high


# Rows ------------------------------------------------------------------------------------------------------


def encode_pairs(rows: Iterable[Pair], encoder: Encoder) -> Iterator[Columns]:
    """Encode sources and targets."""
    for group in groups(rows, characters):
        yield {
            "source": flat(encoder.ids(row.source for row in group)),
            "target": flat(encoder.ids(row.target for row in group)),
        }


def encode_labelled(rows: Iterable[Labelled], encoder: Encoder) -> Iterator[Columns]:
    """Encode texts, second texts, whether there is a second text, and the number of the class."""
    for group in groups(rows, characters):
        yield {
            **encode_texts(group, encoder),
            "labels": np.array([encoder.number(row.label, "label") for row in group], dtype=np.int64),
        }


def encode_texts(group: Sequence[Labelled], encoder: Encoder) -> Columns:
    """Encode the texts of some rows, second texts, and whether there is a second text."""
    return {
        "first": flat(encoder.ids(row.text for row in group)),
        "second": flat(encoder.ids(row.pair or "" for row in group)),
        "paired": np.array([row.pair is not None for row in group]),
    }


def encode_tagged(rows: Iterable[Tagged], encoder: Encoder) -> Iterator[Columns]:
    """Encode the tokens of each word; the first has the word's tag as its target, the others IGNORE.

    `lost` counts the words without a token. A tag that the model does not have is no target.
    """
    for group in groups(rows, characters):
        for row in group:
            refuse(
                len(row.words) != len(row.tags),
                f"a sentence has {len(row.words)} words and {len(row.tags)} tags: "
                f"each word needs one ({row.words[:5]})",
            )
        encodings = encoder.tokenizer.encode_batch(
            [list(row.words) for row in group], is_pretokenized=True, add_special_tokens=False
        )
        targets: list[int] = []
        lost = 0
        for row, encoding in zip(group, encodings):
            places = reversed(list(enumerate(encoding.word_ids)))
            first = {word: place for place, word in places if word is not None}
            numbers = {place: encoder.numbers.get(row.tags[word], IGNORE) for word, place in first.items()}
            targets += [numbers.get(place, IGNORE) for place in range(len(encoding))]
            lost += len(row.words) - len(first)
        yield {
            "ids": flat([encoding.ids for encoding in encodings]),
            "targets": np.array(targets, dtype=np.int32),
            "lost": np.array(lost, dtype=np.int64),
        }


def encode_questions(rows: Iterable[Question], encoder: Encoder) -> Iterator[Columns]:
    """Encode questions, contexts with the characters of each token, and the answer's first and last token.

    (-1, -1) stands for no answer.
    """
    for group in groups(rows, characters):
        contexts = encoder.tokenizer.encode_batch([row.context for row in group], add_special_tokens=False)
        offsets = [span for encoding in contexts for span in encoding.offsets]
        yield {
            "question": flat(encoder.ids(row.question for row in group)),
            "context": flat([encoding.ids for encoding in contexts]),
            "characters": np.array(offsets, dtype=np.int32).reshape(-1, 2),
            "answer": np.array(list(map(_answer, group, contexts)), dtype=np.int64),
        }


def _answer(row: Question, encoding: Encoding) -> tuple[int, int]:
    """Return the first and last token that hold a character of the answer."""
    end = row.start + len(row.answer)
    refuse(
        row.context[row.start : end] != row.answer,
        f'the answer "{row.answer:.40}" does not stand at character {row.start} of its context: '
        "correct its start",
    )
    inside = [
        place for place, (first, last) in enumerate(encoding.offsets) if first < end and last > row.start
    ]
    return (inside[0], inside[-1]) if inside and row.answer else (-1, -1)
