"""The four stages of tokenization seen one by one: normalise, pre-split, subword model, post-process.

Works for any tokenizer of the `tokenizers` library. Offsets are characters of the text as it was given, so
that `text[start:end]` is what a token was made of.
"""

from dataclasses import asdict, dataclass
from typing import Any

from tokenizers import AddedToken, PreTokenizedString, Regex, Tokenizer

from clearhead.errors import refusing
from clearhead.hub.tokens.streams import clean

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
        made = work.to_encoding()
        rows = zip(made.tokens, made.ids, made.offsets, made.word_ids)
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
