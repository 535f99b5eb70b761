"""Text to ids, example by example of each task; many texts at a time, as much as one buffer holds.

Each function yields `Columns`: arrays to be put end to end. A pair of arrays stands for rows of unequal length: their
ids, flat, and the length of each row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from clearhead.batches.batch import IGNORE
from clearhead.batches.rows import Frame
from clearhead.data.examples import Chunk, Labelled, Pair, Question, Tagged
from clearhead.errors import InputError, nearest

Column = NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]
Columns = dict[str, Column]
Item = TypeVar("Item")
BUFFER = 2**18  # characters encoded at a time
PIECE = 2**14  # characters given to the tokenizer as one text: its threads share a buffer's pieces
EXAMPLES = 1024  # encoded at a time


def frame_of(tokenizer: Tokenizer, pair: bool) -> Frame:
    """The special tokens that the tokenizer's template puts around one text, or around two."""
    candidates = ("a", "e", "0", ".", *tokenizer.get_vocab())
    text = next((text for text in candidates if tokenizer.encode(text, add_special_tokens=False).ids), None)
    if text is None:
        raise InputError(
            "the tokenizer turns every text into nothing: train another, or name one with tokens.model"
        )
    encoding = tokenizer.encode(text, text) if pair else tokenizer.encode(text)
    pieces: list[list[int]] = [[]]  # places of the special tokens before, between and after the texts
    types, previous = [], None
    for place, (number, kind) in enumerate(zip(encoding.sequence_ids, encoding.type_ids)):
        if number is None:
            pieces[-1].append(place)
        elif number != previous:
            pieces.append([])
            types.append(kind)
            previous = number
    if not pair:
        pieces.insert(1, [])
    ids = [tuple(encoding.ids[place] for place in piece) for piece in pieces]
    kinds = [tuple(encoding.type_ids[place] for place in piece) for piece in pieces]
    return Frame(ids[0], ids[1], ids[2], kinds[0], kinds[1], kinds[2], tuple(types))


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The id that stands for text the tokenizer has no token for; None where it has no such id."""
    model = json.loads(tokenizer.to_str())["model"]
    if model["type"] == "Unigram":
        return cast(int | None, model["unk_id"])
    return tokenizer.token_to_id(model.get("unk_token") or "")


def flat(rows: Sequence[Sequence[int]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows end to end, and the length of each."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum())), lengths


def groups(rows: Iterable[Item], weight: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Rows by the buffer: up to `EXAMPLES` of them, or `BUFFER` of weight."""
    group: list[Item] = []
    total = 0
    for row in rows:
        group.append(row)
        total += weight(row)
        if len(group) == EXAMPLES or total >= BUFFER:
            yield group
            group, total = [], 0
    if group:
        yield group


def ids_of(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, no special tokens added."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


# Text -------------------------------------------------------------------------------------------------------------------


def encode_text(chunks: Iterable[Chunk], tokenizer: Tokenizer, separator: int | None) -> Iterator[Columns]:
    """Documents end to end, each followed by the separator; a single one by nothing. Those without tokens are left out."""
    between = [] if separator is None else [separator]
    several, length = False, 0  # `length`: tokens of the document at hand
    ended: int | None = None  # tokens of the document before, while it is not known whether another follows
    for group in groups(pieces(chunks), lambda piece: len(piece.text)):
        ids: list[list[int]] = []
        lengths: list[int] = []
        for piece, row in zip(group, ids_of(tokenizer, [piece.text for piece in group])):
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
    """The same documents in pieces of at most `PIECE` characters, cut where tokenizers cut too."""
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
    """A place to cut between `low` and `high`, as late as can be: before a lone space, as words of many tokenizers begin with it."""
    for pattern in (r"(?<=\w) (?=\w)", r"(?<=\S)\s"):
        for start in range(high - 256, low - 256, -256):
            found = [match.start() for match in re.finditer(pattern, text[max(low, start) - 1 : start + 257])]
            if found:
                return max(low, start) - 1 + found[-1]
    return high


# Examples ---------------------------------------------------------------------------------------------------------------


def encode_pairs(rows: Iterable[Pair], tokenizer: Tokenizer) -> Iterator[Columns]:
    """Sources and targets."""
    for group in groups(rows, lambda row: len(row.source) + len(row.target)):
        yield {
            "source": flat(ids_of(tokenizer, [row.source for row in group])),
            "target": flat(ids_of(tokenizer, [row.target for row in group])),
        }


def encode_labelled(
    rows: Iterable[Labelled], tokenizer: Tokenizer, labels: Sequence[str]
) -> Iterator[Columns]:
    """Texts, the texts read with them, whether there is such a one, and the number of the class."""
    number = {label: number for number, label in enumerate(labels)}
    for group in groups(rows, lambda row: len(row.text) + len(row.pair or "")):
        yield {
            "first": flat(ids_of(tokenizer, [row.text for row in group])),
            "second": flat(ids_of(tokenizer, [row.pair or "" for row in group])),
            "paired": np.array([row.pair is not None for row in group]),
            "labels": np.array([_number(number, row.label, "label") for row in group], dtype=np.int64),
        }


def encode_tagged(rows: Iterable[Tagged], tokenizer: Tokenizer, labels: Sequence[str]) -> Iterator[Columns]:
    """The pieces of each word; the tag stands at a word's first piece, IGNORE at the others. `lost`: words without a piece."""
    number = {label: number for number, label in enumerate(labels)}
    for group in groups(rows, lambda row: sum(map(len, row.words))):
        for row in group:
            if len(row.words) != len(row.tags):
                raise InputError(
                    f"a sentence has {len(row.words)} words and {len(row.tags)} tags: each word needs one ({row.words[:5]})"
                )
        encodings = tokenizer.encode_batch(
            [list(row.words) for row in group], is_pretokenized=True, add_special_tokens=False
        )
        targets: list[list[int]] = []
        lost = []
        for row, encoding in zip(group, encodings):
            words = encoding.word_ids
            first = {word: place for place, word in reversed(list(enumerate(words))) if word is not None}
            target = [IGNORE] * len(words)
            for word, place in first.items():
                target[place] = _number(number, row.tags[word], "tag")
            targets.append(target)
            lost.append(len(row.words) - len(first))
        yield {
            "ids": flat([encoding.ids for encoding in encodings]),
            "targets": flat(targets)[0].astype(np.int32),
            "lost": np.array(lost, dtype=np.int64),
        }


def encode_questions(rows: Iterable[Question], tokenizer: Tokenizer) -> Iterator[Columns]:
    """Questions, contexts with the characters of each token, and the answer's first and last token (-1, -1: there is none)."""
    for group in groups(rows, lambda row: len(row.question) + len(row.context)):
        contexts = tokenizer.encode_batch([row.context for row in group], add_special_tokens=False)
        yield {
            "question": flat(ids_of(tokenizer, [row.question for row in group])),
            "context": flat([encoding.ids for encoding in contexts]),
            "characters": np.array(
                [span for encoding in contexts for span in encoding.offsets], dtype=np.int32
            ).reshape(-1, 2),
            "answer": np.array(
                [_answer(row, encoding) for row, encoding in zip(group, contexts)], dtype=np.int64
            ),
        }


def _answer(row: Question, encoding: Encoding) -> tuple[int, int]:
    """First and last token that hold a character of the answer."""
    if not row.answer:
        return -1, -1
    end = row.start + len(row.answer)
    if row.context[row.start : end] != row.answer:
        raise InputError(
            f'the answer "{row.answer:.40}" does not stand at character {row.start} of its context: correct its start'
        )
    inside = [
        place for place, (first, last) in enumerate(encoding.offsets) if first < end and last > row.start
    ]
    return (inside[0], inside[-1]) if inside else (-1, -1)


def _number(numbers: Mapping[str, int], name: str, what: str) -> int:
    if name not in numbers:
        known = ", ".join(list(numbers)[:10]) + (", ..." if len(numbers) > 10 else "")
        raise InputError(
            f'the {what} "{name}" is not among those of the training data ({known}){nearest(name, numbers)}'
        )
    return numbers[name]
