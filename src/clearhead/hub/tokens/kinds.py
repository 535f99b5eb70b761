"""One function for each kind of tokenizer: from text, special tokens and a size to a tokenizer, on the
`tokenizers` library.

Special tokens have the first ids. The same text gives the same tokenizer: the library's own order of ties
goes by hash tables that differ from run to run, so that WordPiece and Unigram are put in order here.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from clearhead.errors import InputError, refuse
from clearhead.hub.tokens.plan import TokenKind
from clearhead.hub.tokens.streams import known_words, pieces

WORDS = r"\w+|[^\w\s]"  # words, and each mark of punctuation
# Bytes of distinct words a trainer keeps.
ROOM = {"word": 30_000_000, "bpe": 8_000_000, "wordpiece": 8_000_000, "unigram": 1_000_000}
LONGEST = 1000  # characters of a word in training: merging takes time with the square of its length
REPEATED = 2  # what is seen once is no pattern: merges need this count
DIGITS = 3  # of a Unigram score: the sums behind it are in no fixed order, and differ far behind these
BYTES = [f"<0x{value:02X}>" for value in range(256)]  # as SentencePiece writes them


@dataclass(frozen=True)
class Order:
    """What a kind is asked to make."""

    texts: Iterable[str]  # read once or more
    special: Sequence[str]
    unk: str | None
    vocab_size: int | None  # at most; None: what there is
    exact: bool = False  # the size was asked for, and the least that the text needs must fit into it
    lowercase: bool = False
    pattern: str | None = None

    def stream(self, room: int) -> Iterator[str]:
        """Yield the texts in pieces that fit into a trainer's memory."""
        return known_words(pieces(self.texts, LONGEST), room)

    def marks(self) -> list[AddedToken]:
        """Return the special tokens as the library takes them: never split, found before normalisation."""
        return [AddedToken(text, special=True, normalized=False) for text in self.special]

    def need(self, least: int, parts: str) -> int:
        """Return the size to train for, given the least that the alphabet and the special tokens take."""
        size = self.vocab_size if self.vocab_size is not None else least
        refuse(
            size < least and self.exact,
            f"vocab_size {size} is too small: {parts} and {len(self.special)} special tokens take "
            f"{least}: "
            f"set it to {least} or more, or leave it out",
        )
        return max(size, least)


def char(order: Order) -> Tokenizer:
    """Make a token of each character of the text; no merge joins any two."""
    seen, lower = set(chain.from_iterable(pieces(order.texts))), _lower(order)
    alphabet = sorted(seen if lower is None else set("".join(map(lower.normalize_str, seen))))
    vocabulary = [*order.special, *(each for each in alphabet if each not in order.special)]
    order.need(len(vocabulary), f"{len(alphabet)} characters")
    model = models.BPE(dict(zip(vocabulary, count())), [], unk_token=order.unk)
    return _built(model, normalizer=lower, decoder=decoders.Fuse())


def byte(order: Order) -> Tokenizer:
    """Make a token of each of the 256 bytes of UTF-8, in their order; nothing is learned from the text."""
    order.need(len(order.special) + 256, "256 bytes")
    model = models.BPE(dict(zip([*order.special, *byte_letters()], count())), [])
    return _built(
        model,
        normalizer=_lower(order),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoder=decoders.ByteLevel(),
    )


def word(order: Order) -> Tokenizer:
    """Make tokens of the most frequent words.

    `pattern` says what a word is. Decoded text has one space between words.
    """
    try:
        words = Regex(order.pattern or WORDS)
    except Exception as error:
        raise InputError(f'pattern "{order.pattern}" is no regular expression: {error}') from None
    split = pre_tokenizers.Split(words, "removed", invert=True)
    tokenizer = _built(models.WordLevel(unk_token=order.unk), normalizer=_lower(order), pre_tokenizer=split)
    trainer = trainers.WordLevelTrainer(
        vocab_size=order.need(len(order.special) + 1, "one word"),
        special_tokens=order.marks(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(order.stream(ROOM["word"]), trainer)
    refuse(
        tokenizer.get_vocab_size() == len(order.special),
        f'pattern "{order.pattern or WORDS}" finds no word in the text: '
        "choose one that does, or leave it out",
    )
    return tokenizer


def bpe(order: Order) -> Tokenizer:
    """Train byte-level BPE with GPT-2's pre-split: exact on any text, and nothing is unknown."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = _built(
        models.BPE(), normalizer=_lower(order), pre_tokenizer=split, decoder=decoders.ByteLevel()
    )
    trainer = trainers.BpeTrainer(
        vocab_size=order.need(len(order.special) + 256, "256 bytes"),
        min_frequency=REPEATED,
        special_tokens=order.marks(),
        initial_alphabet=byte_letters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(order.stream(ROOM["bpe"]), trainer)
    return tokenizer


def wordpiece(order: Order) -> Tokenizer:
    """Train BERT's WordPiece: words are cut into pieces, and those that continue a word begin with ##.

    The text is read twice: for the alphabet, then for the pieces.
    """
    normalizer = normalizers.BertNormalizer(lowercase=order.lowercase)
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}

    def train(first: Sequence[str], size: int) -> dict[str, int]:
        trainer = trainers.WordPieceTrainer(
            vocab_size=size,
            min_frequency=REPEATED,
            special_tokens=[*order.special, *first],
            show_progress=False,
        )
        work = _built(models.WordPiece(unk_token=order.unk), **parts)
        work.train_from_iterator(order.stream(ROOM["wordpiece"]), trainer)
        return dict(work.get_vocab())

    alphabet = train([], 0)
    size = order.need(len(alphabet), f"{len(alphabet) - len(order.special)} letters, with and without ##,")
    # Letters with ## get their ids as the trainer meets them, in the order of a hash table, and ties between
    # merges go by
    # id. Named beforehand, like special tokens, they have a fixed one.
    vocabulary = train(
        sorted(letter for letter in alphabet if letter.startswith("##") and len(letter) == 3), size
    )
    model = models.WordPiece(vocabulary, unk_token=order.unk)
    return _built(model, **parts, decoder=decoders.WordPiece())


def unigram(order: Order) -> Tokenizer:
    """Train SentencePiece's Unigram model: words begin with ▁, and the likeliest split wins.

    What no piece spells falls back on its bytes.
    """
    lines = pre_tokenizers.Split(Regex(r"[\r\n]+"), "isolated")  # no piece runs across a line's end
    spelled = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer = _built(
        models.Unigram(),
        normalizer=_lower(order),
        pre_tokenizer=pre_tokenizers.Sequence([lines, pre_tokenizers.Metaspace(prepend_scheme="first")]),
        decoder=decoders.Sequence(spelled),
    )
    reserved = [*order.special, *BYTES]
    room = order.need(len(reserved) + 1, "256 bytes, one piece") - len(reserved)
    assert order.unk is not None
    letters = {"▁", *chain.from_iterable(order.stream(ROOM["unigram"]))}
    # The trainer wants a place for every letter and the unknown token; letters for which there is no room
    # fall back on bytes.
    trainer = trainers.UnigramTrainer(
        vocab_size=max(room, len(letters)) + 1,
        unk_token=order.unk,
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(order.stream(ROOM["unigram"]), trainer)
    learned = [
        (piece, score)
        for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]
        if piece not in reserved
    ]
    pieces_kept = _ordered(learned, room)
    fallback = 7 * min((score for _, score in pieces_kept), default=0.0)  # below what six letters cost
    scores = [*((token, 0.0) for token in order.special), *((token, fallback) for token in BYTES)]
    unk = order.special.index(order.unk)
    tokenizer.model = models.Unigram([*scores, *pieces_kept], unk, byte_fallback=True)
    return tokenizer


KINDS: dict[TokenKind, Callable[[Order], Tokenizer]] = {
    "char": char,
    "byte": byte,
    "word": word,
    "bpe": bpe,
    "wordpiece": wordpiece,
    "unigram": unigram,
}


def _ordered(learned: list[tuple[str, float]], room: int) -> list[tuple[str, float]]:
    """Return pieces by score, as many as there is room for, equal from run to run.

    Letters that the trainer dropped and must have again get the lowest score plus a ten-thousandth for each,
    in no fixed order: all of them get the lowest score itself.
    """
    letters = sum(len(piece) == 1 for piece, _ in learned)
    lowest = min((score for _, score in learned), default=0.0)
    band = lowest + 1e-4 * (letters + 1)
    level = [
        (piece, round(lowest if len(piece) == 1 and score < band else score, DIGITS))
        for piece, score in learned
    ]
    return sorted(level, key=lambda each: (-each[1], each[0]))[:room]


def _built(model: models.Model, **parts: Any) -> Tokenizer:
    """Return a tokenizer of a model and its other parts by name."""
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def _lower(order: Order) -> normalizers.Normalizer | None:
    return normalizers.Lowercase() if order.lowercase else None


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in a byte-level vocabulary.

    A visible byte stands for itself, another for a letter from 256 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in seen]
    return [chr(value if value in seen else 256 + hidden.index(value)) for value in range(256)]
