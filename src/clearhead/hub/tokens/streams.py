"""Read text in pieces of bounded size, so that a tokenizer is trained on any amount in little memory."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clearhead.errors import InputError

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


def clean(text: str) -> str:
    """Return the text with each broken surrogate, which no file can hold, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


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
