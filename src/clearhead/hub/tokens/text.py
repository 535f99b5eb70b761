"""Tokens and text: labels that people read, the bytes of each token, and the stages from text to tokens.

`Merges` is BPE dropout (Provilkov et al. 2020): the merges of a tokenizer, applied with some left out.
A model that sees one word in several segmentations learns what its parts mean. At a share of 0 the tokens are
the tokenizer's own, at 1 single characters (of a byte-level tokenizer: bytes), and in between they are drawn
as the tokenizers library draws them. Its random numbers have no seed; here they are an argument.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter
from random import Random
from typing import Any

from tokenizers import AddedToken, PreTokenizedString, Regex, Tokenizer, decoders

from clearhead.errors import ConfigError, refuse, refusing

BYTES = [f"<0x{value:02X}>" for value in range(256)]  # as SentencePiece writes them
VISIBLE = {" ": "·", "\n": "↵", "\t": "→", "\r": "←"}


def assembled(
    model: Any, normalizer: Any = None, pre_tokenizer: Any = None, decoder: Any = None
) -> Tokenizer:
    """Return a tokenizer of these parts: its model, and what normalises, splits into words and decodes."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, pre_tokenizer, decoder
    return tokenizer


def clean(text: str) -> str:
    """Return the text with each broken surrogate, which no file can hold, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def visible(text: str) -> str:
    """Return text with visible white space: · for a space, ↵ for a line end, → for a tab.

    Control characters are escaped.
    """
    return "".join(
        VISIBLE.get(letter) or (letter if letter.isprintable() else _escaped(ord(letter))) for letter in text
    )


def decoded(tokenizer: Tokenizer, ids: Sequence[int], special: bool = False) -> str:
    """Return the text of tokens, with special ones or without; a decoder that fails says so in one line."""
    with refusing("the tokenizer cannot write a text"):
        return str(tokenizer.decode(list(ids), skip_special_tokens=not special))


def _escaped(number: int) -> str:
    return f"\\u{number:04x}" if number < 2**16 else f"\\U{number:08x}"


def label(tokenizer: Tokenizer | None, token: int) -> str:
    """Return one token for an axis, a chip or a table; without a tokenizer its number."""
    written = None if tokenizer is None else tokenizer.id_to_token(token)
    if tokenizer is None or written is None:
        return str(token)
    if isinstance(tokenizer.decoder, decoders.ByteLevel):  # it writes bytes as letters of its own alphabet
        read = decoded(tokenizer, [token], special=True)
        return visible(read) if read and "\ufffd" not in read else written
    return visible(written.replace("▁", " "))


def labels(tokenizer: Tokenizer | None, ids: list[int]) -> tuple[str, ...]:
    """Return the label of each token."""
    return tuple(label(tokenizer, token) for token in ids)


# Bytes ------------------------------------------------------------------------------------------------------


CHECKED = 40  # tokens of which every pair is read side by side


def token_bytes(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Return what each id below `size` adds to a text; nothing for special tokens and ids without a token.

    A tokenizer whose tokens read otherwise next to others is refused.
    """
    added = tokenizer.get_added_tokens_decoder()
    written = [None if number in added else tokenizer.id_to_token(number) for number in range(size)]
    kind = repr(tokenizer.decoder)
    if "ByteLevel(" in kind:
        values = {letter: value for value, letter in enumerate(byte_letters())}
        pieces = [
            bytes(map(values.__getitem__, token)) if values.keys() >= set(token) else token.encode()
            for token in (token or "" for token in written)
        ]
    else:
        pieces = _read(tokenizer, written)
        for number, token in enumerate(written):
            if "ByteFallback(" in kind and token in BYTES:
                pieces[number] = bytes([BYTES.index(token)])
    for number, entry in added.items():
        if number < size:
            pieces[number] = b"" if entry.special else entry.content.encode()
    return pieces


def _read(tokenizer: Tokenizer, written: Sequence[str | None]) -> list[bytes]:
    """Return what each token adds after another one, as the tokenizer reads it."""
    known = [number for number, token in enumerate(written) if token is not None]
    before = next((n for n in known if re.fullmatch(r"\w+", decoded(tokenizer, [n]))), known[0])
    start = len(decoded(tokenizer, [before]))
    texts = [text[start:] for text in tokenizer.decode_batch([[before, number] for number in known])]
    added = dict(zip(known, texts))
    short = sorted(known, key=lambda n: (len(added[n]), n))[:: max(1, len(known) // CHECKED // 4)][:CHECKED]
    pairs = [(a, b) for a in short for b in short if "\ufffd" not in added[a] + added[b]]
    for (a, b), text in zip(pairs, tokenizer.decode_batch([[before, a, b] for a, b in pairs])):
        refuse(
            text[start:] != added[a] + added[b],
            f'this tokenizer reads "{written[a]}" and "{written[b]}" side by side as "{text[start:]}": '
            "a form needs tokens that read alike wherever they stand",
        )
    return [added.get(n, "").replace("\ufffd", "").encode() for n in range(len(written))]


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary.

    A visible byte stands for itself, another for a letter from 256 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in seen]
    return [chr(value if value in seen else 256 + hidden.index(value)) for value in range(256)]


# Stages -----------------------------------------------------------------------------------------------------


Span = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """What pre-splitting cuts off.

    No token runs across two of them. A special token in the text is one of its own.
    """

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class Token:
    """What the subword model makes of a piece."""

    token: str
    id: int
    start: int
    end: int
    piece: int  # number of the piece it lies in


@dataclass(frozen=True)
class Final:
    """A token as a model gets it."""

    token: str
    id: int
    start: int
    end: int
    type: int  # segment
    text: int | None  # 0: of the text, 1: of the pair, None: put there by post-processing


@dataclass(frozen=True)
class TextStages:
    """The first three stages of one text."""

    text: str
    normalised: str
    alignment: tuple[Span, ...]  # of each character of `normalised`: where it comes from in `text`
    pieces: tuple[Piece, ...]
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Stages:
    """All four stages."""

    text: TextStages
    pair: TextStages | None
    final: tuple[Final, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON has them."""
        return asdict(self)


def stages(tokenizer: Tokenizer, text: str, pair: str | None = None) -> Stages:
    """Return what each stage makes of a text, or of two that belong together."""
    text, pair = clean(text), None if pair is None else clean(pair)
    with refusing("the tokenizer cannot read a text"):
        whole = tokenizer.encode(text, pair)
    rows = zip(whole.tokens, whole.ids, whole.offsets, whole.type_ids, whole.sequence_ids)
    final = tuple(Final(token, number, *span, kind, source) for token, number, span, kind, source in rows)
    return Stages(_of_text(tokenizer, text), None if pair is None else _of_text(tokenizer, pair), final)


def _of_text(tokenizer: Tokenizer, text: str) -> TextStages:
    normalised, alignment, pieces, tokens = "", list[Span](), list[Piece](), list[Token]()
    for (start, end), special in _segments(tokenizer, text):
        if special is not None:  # found before the first stage, and passes all of them as it is
            normalised += text[start:end]
            alignment += [(at, at + 1) for at in range(start, end)]
            tokens.append(
                Token(tokenizer.id_to_token(special) or text[start:end], special, start, end, len(pieces))
            )
            pieces.append(Piece(text[start:end], start, end))
            continue
        letters = _normalised(tokenizer, text, start, end)
        letters.split(lambda _, string: string.split(Regex(r"[\s\S]"), "isolated"))
        for letter, span, _ in letters.get_splits():
            normalised += letter
            alignment.append(span)
        work = _normalised(tokenizer, text, start, end)
        if tokenizer.pre_tokenizer is not None:
            tokenizer.pre_tokenizer.pre_tokenize(work)
        first = len(pieces)
        pieces += [Piece(piece, *span) for piece, span, _ in work.get_splits()]
        work.tokenize(tokenizer.model.tokenize)
        encoding = work.to_encoding()
        rows = zip(encoding.tokens, encoding.ids, encoding.offsets, encoding.word_ids)
        tokens += [Token(token, number, *span, first + (word or 0)) for token, number, span, word in rows]
    return TextStages(text, normalised, tuple(alignment), tuple(pieces), tuple(tokens))


def _normalised(tokenizer: Tokenizer, text: str, start: int, end: int) -> PreTokenizedString:
    """Return a part of the text after the first stage, with its place in the whole text."""
    work = PreTokenizedString(text)
    work.split(lambda _, string: [string.slice((start, end))])
    if tokenizer.normalizer is not None:
        work.normalize(tokenizer.normalizer.normalize)
    return work


def _segments(tokenizer: Tokenizer, text: str) -> list[tuple[Span, int | None]]:
    """Split the text at the special and other added tokens that it holds.

    Returns spans, and the token's id where a span is one.
    """
    known = tokenizer.get_added_tokens_decoder()
    encoding = tokenizer.encode(text, add_special_tokens=False)
    segments: list[tuple[Span, int | None]] = []
    done = 0
    for number, (start, end) in zip(encoding.ids, encoding.offsets):
        # An unknown word has the id of an added token too, but does not spell it.
        if number in known and start >= done and _spells(tokenizer, text[start:end], known[number]):
            segments += [((done, start), None), ((start, end), number)]
            done = end
    segments.append(((done, len(text)), None))
    return [(span, special) for span, special in segments if span[0] < span[1]]


def _spells(tokenizer: Tokenizer, text: str, token: AddedToken) -> bool:
    """Return True if a part of the text is an added token, written out.

    The token may include white space, or be found after normalising.
    """
    read = (
        tokenizer.normalizer.normalize_str if token.normalized and tokenizer.normalizer is not None else str
    )
    return bool(read(text).strip() == read(token.content).strip())


GONE = -1  # in place of a token that was merged into the one before it


class Merges:
    """The merges of a BPE tokenizer: pairs of tokens, each with its rank and the token that it becomes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        model = json.loads(tokenizer.to_str())["model"]
        refuse(
            not model.get("merges"),
            f"data.bpe_dropout skips merges, and this tokenizer ({model['type']}) has none: set "
            "tokens.kind=bpe, or leave bpe_dropout out",
            ConfigError,
        )
        ids, prefix = model["vocab"], len(model["continuing_subword_prefix"] or "")
        self.pairs: dict[tuple[int, int], tuple[int, int]] = {}  # left, right -> rank, merged
        made_of: dict[int, tuple[int, int]] = {}  # merged -> left, right
        for rank, merge in enumerate(model["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            pair, merged = (ids[left], ids[right]), ids[left + right[prefix:]]
            self.pairs[pair] = rank, merged
            made_of.setdefault(merged, pair)
        whole = tokenizer.get_added_tokens_decoder()  # these are never merged from parts
        self.made_of = {token: pair for token, pair in made_of.items() if token not in whole}
        self.known: dict[int, tuple[int, ...]] = {}

    def leaves(self, token: int) -> tuple[int, ...]:
        """Return the characters that a token is merged from; one that is not merged is its own."""
        if token not in self.known:
            parts = self.made_of.get(token)
            split = (token,) if parts is None else self.leaves(parts[0]) + self.leaves(parts[1])
            self.known[token] = split
        return self.known[token]

    def redrawn(
        self, ids: Sequence[int], words: Sequence[int | None], share: float, random: Random
    ) -> list[int]:
        """Cut a text into tokens again, with a share of the merges left out.

        Args:
            ids: the tokens of the text, as the tokenizer cuts it.
            words: of each token the number of the word that it belongs to; no token is merged beyond one.
            share: the probability with which a merge is skipped.
            random: where random numbers come from.
        """
        tokens = list[int]()
        for _, word in groupby(zip(words, ids), key=itemgetter(0)):
            tokens += self.merged([leaf for _, token in word for leaf in self.leaves(token)], share, random)
        return tokens

    def merged(self, leaves: Sequence[int], share: float, random: Random) -> list[int]:
        """Merge the characters of a word, the merges of lowest rank first.

        Each is skipped with probability `share`, and may come again after the next one that is not.
        """
        tokens, end = list(leaves), len(leaves)
        before, after = list(range(-1, end - 1)), list(range(1, end + 1))

        def merges_at(*places: int) -> Iterator[tuple[int, int, int]]:
            for place in places:
                if place >= 0 and after[place] < end:
                    merge = self.pairs.get((tokens[place], tokens[after[place]]))
                    if merge is not None:
                        yield merge[0], place, merge[1]

        queue = list(merges_at(*range(end)))
        heapify(queue)
        skipped = list[tuple[int, int, int]]()
        while queue:
            merge = heappop(queue)
            if share and random.random() < share:
                skipped.append(merge)
                continue
            while skipped:
                heappush(queue, skipped.pop())
            if merge not in merges_at(merge[1]):
                continue  # one of the two tokens has been merged with another since
            _, place, tokens[place] = merge
            right = after[place]
            tokens[right], after[place] = GONE, after[right]
            if after[place] < end:
                before[after[place]] = place
            for new in merges_at(before[place], place):
                heappush(queue, new)
        return [token for token in tokens if token != GONE]
