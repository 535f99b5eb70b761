"""Tokens as people read them.

A space, a line's end and a byte shown as such, whatever the tokenizer writes in their place.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders

from clearhead.errors import refusing

VISIBLE = {" ": "·", "\n": "↵", "\t": "→", "\r": "←"}


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
