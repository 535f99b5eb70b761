"""Encodings with offsets and segment types: pairs truncated to fit, long texts in overlapping windows."""

from tokenizers import Encoding, Tokenizer

from clearhead.errors import refuse, refusing
from clearhead.hub.tokenizer import Side, clean, warn_if_cut


def encoding_of(tokenizer: Tokenizer, text: str | list[str], special: bool = False) -> Encoding:
    """Encode one text, or a list of words, with its special tokens or without."""
    words = not isinstance(text, str)
    cleaned = clean(text) if isinstance(text, str) else [clean(word) for word in text]
    with refusing("the tokenizer cannot read a text"):
        return tokenizer.encode(cleaned, is_pretokenized=words, add_special_tokens=special)


def framed(
    tokenizer: Tokenizer, max_length: int, text: str, pair: str | None = None, side: Side = "right"
) -> Encoding:
    """Encode a text or a pair with its special tokens; the longer one is truncated until all fits."""
    parts = [encoding_of(tokenizer, part) for part in ((text,) if pair is None else (text, pair))]
    room = max_length - tokenizer.num_special_tokens_to_add(is_pair=pair is not None)
    warn_if_cut(sum(map(len, parts)) > max(room, 0), max_length, side)
    for part, length in zip(parts, _shares(max(room, 0), *map(len, parts))):
        part.truncate(length, direction=side)
    return tokenizer.post_process(parts[0], parts[1] if pair is not None else None)


def _shares(room: int, first: int, second: int = 0) -> tuple[int, int]:
    """Return how many tokens of each of two texts fit: of the shorter one half of the room at least."""
    shorter, longer = sorted((first, second))
    shorter = min(shorter, max(room // 2, room - longer))
    longer = min(longer, room - shorter)
    return (shorter, longer) if first <= second else (longer, shorter)


def windows(
    tokenizer: Tokenizer, max_length: int, text: str | list[str], stride: int, question: str | None = None
) -> list[tuple[int, Encoding]]:
    """Encode a text in windows that fit, each with its special tokens and the question before it.

    Return (number of the first token, encoding) for each.

    Neighbours share `stride` tokens, half a window at most.
    """
    refuse(stride < 0, f"stride {stride} is negative: it is the number of tokens that two windows share")
    first = None if question is None else encoding_of(tokenizer, question)
    taken = tokenizer.num_special_tokens_to_add(is_pair=first is not None) + len(first or [])
    room = max_length - taken
    refuse(
        room < 1,
        f"a question takes {taken} tokens, special ones too, and a window has {max_length}: shorten it",
    )
    stride = min(stride, room // 2)
    whole = encoding_of(tokenizer, text)
    whole.truncate(room, stride=stride)
    return [
        (
            number * (room - stride),
            tokenizer.post_process(piece) if first is None else tokenizer.post_process(first, piece),
        )
        for number, piece in enumerate([whole, *whole.overflowing])
    ]
