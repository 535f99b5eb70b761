"""Train tokenizers on the user's text: kind and size, special tokens, the template around a text.

Each kind is one function, on the `tokenizers` library. Special tokens have the first ids. The same text gives
the same tokenizer: the library's own order of ties goes by hash tables that differ from run to run, so that
WordPiece and Unigram are put in order here.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from math import sqrt
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from clearhead.errors import InputError, refuse
from clearhead.hub.tokens import TokenKind, TokensPlan
from clearhead.hub.tokens.text import BYTES, assembled, byte_letters, clean

PIECE = 1 << 16  # characters
PARTS = re.compile(r"\s+|\S+")


@dataclass(frozen=True)
class TextFiles:
    """The text of files, in pieces that end before white space if possible; may be read again and again."""

    paths: tuple[Path, ...]

    def __iter__(self) -> Iterator[str]:
        """Yield each file from its start; bytes that are not UTF-8 become U+FFFD, line ends stay."""
        for path in self.paths:
            try:
                with path.open(encoding="utf-8", errors="replace", newline="") as file:
                    rest = ""
                    while block := file.read(PIECE):
                        *whole, rest = pieces([rest + block])
                        yield from whole
                    yield rest
            except OSError as error:
                raise InputError(f"{path} cannot be read: {error.strerror}") from None


def pieces(texts: Iterable[str], size: int = PIECE) -> Iterator[str]:
    """Yield texts in pieces of at most `size` characters, cut before white space if possible.

    Joined again they are the same text, except for broken surrogates, which become U+FFFD.
    """
    for text in texts:
        start = 0
        while len(text) - start > size:
            end = max(text.rfind(space, start + 1, start + size) for space in " \n\t")
            end = end if end > start else start + size
            yield clean(text[start:end])
            start = end
        yield clean(text[start:])


def known_words(texts: Iterable[str], room: int) -> Iterator[str]:
    """Yield texts unchanged until their distinct words fill `room` bytes, then without words that are new.

    A trainer keeps each distinct word, and text may hold any number of them. Those that first appear so late
    are rare: they hardly change a vocabulary.
    """
    seen: set[str] = set()
    for text in texts:
        if room > 0:
            new = set(text.split()) - seen
            seen |= new
            room -= len("".join(new).encode())
            yield text
        else:
            yield "".join(part for part in PARTS.findall(text) if part in seen or part.isspace())


# Kinds ------------------------------------------------------------------------------------------------------


WORDS = r"\w+|[^\w\s]"  # words, and each mark of punctuation
# Bytes of distinct words a trainer keeps.
ROOM = {"word": 30_000_000, "bpe": 8_000_000, "wordpiece": 8_000_000, "unigram": 1_000_000}
LONGEST = 1000  # characters of a word in training: merging takes time with the square of its length
REPEATED = 2  # what is seen once is no pattern: merges need this count
DIGITS = 3  # of a Unigram score: the sums behind it are in no fixed order, and differ far behind these


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
    return assembled(model, normalizer=lower, decoder=decoders.Fuse())


def byte(order: Order) -> Tokenizer:
    """Make a token of each of the 256 bytes of UTF-8, in their order; nothing is learned from the text."""
    order.need(len(order.special) + 256, "256 bytes")
    model = models.BPE(dict(zip([*order.special, *byte_letters()], count())), [])
    return assembled(
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
    tokenizer = assembled(
        models.WordLevel(unk_token=order.unk), normalizer=_lower(order), pre_tokenizer=split
    )
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
    tokenizer = assembled(
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
        work = assembled(models.WordPiece(unk_token=order.unk), **parts)
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
    return assembled(model, **parts, decoder=decoders.WordPiece())


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
    tokenizer = assembled(
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
        vocab_size=max(room, len(letters)) + 1, unk_token=order.unk, special_tokens=[], show_progress=False
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


def _lower(order: Order) -> normalizers.Normalizer | None:
    return normalizers.Lowercase() if order.lowercase else None


# Training ---------------------------------------------------------------------------------------------------


# Each stands for a span that was taken out.
SENTINELS = tuple(f"<extra_id_{number}>" for number in range(100))
SPELLS_ALL = ("byte", "bpe")  # kinds that can spell any text, and need no token for what is unknown
SMALL = 1_500_000  # bytes: below this, a text that is to be written is best learned character by character
SCALE = {"bpe": 2, "wordpiece": 2, "unigram": 2, "word": 8}  # vocabularies grow with the text's square root
STEP, LEAST, MOST = 256, 1024, 32768
LIMIT = 1 << 20  # no vocabulary is larger, and trainers reserve memory for it


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a task, and the template around a text and around two.

    `:1` marks the second text.
    """

    tokens: Mapping[str, str]  # by role: pad, bos, eos, unk, cls, sep, mask
    single: str = ""
    pair: str = ""
    sentinels: tuple[str, ...] = ()
    kind: TokenKind | None = None  # of tokenizer, where the plan names none; None: by the size of the text

    def roles(self, kind: TokenKind) -> dict[str, str]:
        """Return the special tokens by role, as far as a kind of tokenizer needs them."""
        return {role: token for role, token in self.tokens.items() if role != "unk" or kind not in SPELLS_ALL}

    def all(self, kind: TokenKind) -> list[str]:
        """Return the special tokens in the order of their ids."""
        return [*dict.fromkeys(self.roles(kind).values()), *self.sentinels]


GENERATOR = SpecialTokens(
    {"eos": "<|endoftext|>", "bos": "<|endoftext|>", "pad": "<|pad|>", "unk": "<|unk|>"}
)
DIFFUSER = replace(GENERATOR, tokens={**GENERATOR.tokens, "mask": "<|mask|>"})
READER = SpecialTokens(
    {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"},
    "[CLS] $A [SEP]",
    "[CLS] $A [SEP] $B:1 [SEP]:1",
    kind="wordpiece",
)
TRANSLATOR = SpecialTokens(
    {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}, "$A </s>", "$A </s> $B </s>"
)
DENOISER = replace(TRANSLATOR, sentinels=SENTINELS)


def choose(plan: TokensPlan, specials: SpecialTokens, size: int) -> tuple[TokensPlan, str]:
    """Fill in kind and vocab_size for `size` bytes of text -> the plan, and a note on the choice.

    `vocab_size` stays None for characters and bytes, whose number is given.
    """
    units = ((1e5, f"{size / 1e6:.1f} MB"), (100, f"{size / 1e3:.1f} kB"), (0, f"{size} bytes"))
    amount = next(f"{written} of text" for least, written in units if size >= least)
    reasons: list[tuple[TokenKind | None, str]] = [
        (plan.kind, "as asked"),
        (None if plan.pattern is None else "word", "as a pattern says what a word is"),
        (specials.kind, "as an encoder reads words"),
        ("char" if size < SMALL else None, f"as {amount} is little"),
        ("bpe", f"as it spells anything, and {amount} is enough to learn it"),
    ]
    kind, why = next((kind, why) for kind, why in reasons if kind is not None)
    if kind not in SCALE:
        return replace(plan, kind=kind), f"tokens: {kind}, {why}"
    vocab_size, how = plan.vocab_size, "as asked"
    if vocab_size is None:
        fitting = round(SCALE[kind] * sqrt(size) / STEP) * STEP
        vocab_size, how = min(max(fitting, LEAST), MOST), f"for {amount}"
    note = f"tokens: {kind}, {why}; at most {vocab_size:,} of them, {how}"
    return replace(plan, kind=kind, vocab_size=vocab_size), note


def train_tokenizer(
    texts: Iterable[str], plan: TokensPlan, specials: SpecialTokens, size: int, clamp: bool = False
) -> Tokenizer:
    """Train the tokenizer that a plan asks for.

    Args:
        texts: documents, lines or pieces of any length; read once or more, never held in memory.
        plan: kind and vocab_size where they are None are chosen as `choose` does. A vocab_size that was asked
            for is met exactly or is an error; one that was chosen is a limit, and the vocabulary may come out
            smaller.
        specials: the special tokens, and the template around a text.
        size: bytes of the texts, about.
        clamp: take as many tokens as the texts have, where fewer than a vocab_size that was asked for.

    The result needs nothing but its tokenizer.json, and is the same for the same texts.
    """
    _check(texts, plan)
    chosen, _ = choose(plan, specials, size)
    assert chosen.kind is not None
    usual, _ = choose(replace(plan, vocab_size=None), specials, size)
    # A size equal to the usual one is no demand, so that a plan filled in by `choose` gives the same
    # tokenizer.
    exact = plan.vocab_size is not None and plan.vocab_size != usual.vocab_size
    special, unk = specials.all(chosen.kind), specials.roles(chosen.kind).get("unk")
    order = Order(texts, special, unk, chosen.vocab_size, exact, plan.lowercase, plan.pattern)
    tokenizer = _framed(KINDS[chosen.kind](order), special, specials)
    reached = tokenizer.get_vocab_size()
    refuse(
        exact and not clamp and chosen.vocab_size is not None and reached < chosen.vocab_size,
        f"vocab_size {chosen.vocab_size} is more than the data allows: "
        f"kind {chosen.kind} finds {reached} tokens "
        f"in it, special ones included: set it to {reached} or less, or leave it out"
        + ("" if chosen.kind in SCALE else ", or set tokens.kind to bpe"),
    )
    return tokenizer


def byte_tokenizer(specials: SpecialTokens = GENERATOR) -> Tokenizer:
    """Return the tokenizer of kind byte, which needs no text to learn from."""
    special = specials.all("byte")
    return _framed(KINDS["byte"](Order((), special, None, None)), special, specials)


def _framed(tokenizer: Tokenizer, special: list[str], specials: SpecialTokens) -> Tokenizer:
    """Add special tokens that are never split, and the template around a text."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    single, pair = specials.single.split(), specials.pair.split()
    if single:
        around = [(token, tokenizer.token_to_id(token)) for token in special if token in single]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=around
        )
    return tokenizer


def begin_texts(tokenizer: Tokenizer, token: str) -> None:
    """Have the tokenizer put a special token before each text, besides what its template does already."""
    template = processors.TemplateProcessing(
        single=[token, "$A"],
        pair=[token, "$A", token, "$B"],
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )
    before = tokenizer.post_processor
    tokenizer.post_processor = template if before is None else processors.Sequence([before, template])


def _check(texts: Iterable[str], plan: TokensPlan) -> None:
    refuse(
        plan.pattern is not None and plan.kind not in (None, "word"),
        f"tokens.pattern says what a word is, and kind is {plan.kind}: "
        "set kind to word, or leave pattern out",
    )
    refuse(
        plan.vocab_size is not None and not 0 < plan.vocab_size <= LIMIT,
        f"vocab_size {plan.vocab_size} must lie between 1 and {LIMIT}",
    )
    refuse(
        iter(texts) is texts,
        "the texts can be read only once, and training may read them twice: "
        "give a list, or an object with __iter__",
    )
    seen: set[str] = set()
    for text in texts:
        seen.update(text[:1000].strip())
        if len(seen) > 1:
            return
    text_found = f'only the character "{seen.pop()}"' if seen else "nothing"
    raise InputError(
        f"there is {text_found} to train a tokenizer on: "
        "give text of two different characters at least, better of some thousands"
    )
