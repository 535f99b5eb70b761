"""Streaming: text as it grows, in whole characters, with stop strings held back until they are certain.

What is emitted, put together, is exactly the text of all the ids at once. A token is decoded together with
the few before it, never with the whole row: how a token reads depends on its neighbours alone (the space
before a word, the bytes of one character), so a long row costs a token no more than a short one.
"""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from clearhead.hub.tokens.text import decoded

# How SentencePiece writes a byte; a run of them is read as a whole, or as invalid.
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextStream:
    """The text of one row, token by token, as it reads after the prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(text for text in stop if text)
        self._special = {
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        }
        self.stopped_by: str | None = None
        self._emitted: list[str] = []
        self._held = ""  # settled, but perhaps the beginning of a stop string
        # Settled tokens that the next ones are read after.
        self._known = [token for token in prompt if self._is_read(token)]
        self._open: list[int] = []  # tokens whose text may still change
        self._context = len(self._decode(self._known))

    @property
    def text(self) -> str:
        """The text so far, cut at the first stop string."""
        rest = "" if self.stopped_by is not None else self._held + self._tail()
        return "".join(self._emitted) + rest[: self._first_stop(rest)[0]]

    def push(self, token: int) -> str:
        """Add a token; return the new text that is final: whole characters, no beginning of a stop string."""
        if not self._is_read(token):
            return ""
        self._open.append(token)
        tail = self._tail()
        text = self._held + tail
        cut, self.stopped_by = self._first_stop(text)
        if self.stopped_by is not None:
            return self._emit(text[:cut])
        if not tail or tail.endswith("\ufffd") or BYTE.fullmatch(self.tokenizer.id_to_token(token) or ""):
            return ""  # a character of which some bytes may still come
        self._known, self._open = self._open, []
        self._context = len(self._decode(self._known))
        sure = len(text) - self._may_stop(text)
        self._held = text[sure:]
        return self._emit(text[:sure])

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens that are read together and emitted by `finish`."""
        self._open += [token for token in tokens if self._is_read(token)]

    def finish(self) -> str:
        """Return the text that was held back."""
        if self.stopped_by is not None:
            return ""
        text = self._held + self._tail()
        cut, self.stopped_by = self._first_stop(text)
        self._held, self._known, self._open, self._context = "", [], [], 0
        return self._emit(text[:cut])

    def _is_read(self, token: int) -> bool:
        """Return True where a token has a text; special tokens and unknown ids are skipped."""
        return token not in self._special and self.tokenizer.id_to_token(token) is not None

    def _emit(self, new: str) -> str:
        self._emitted.append(new)
        return new

    def _tail(self) -> str:
        """Return the text of the tokens that are not settled."""
        return self._decode(self._known + self._open)[self._context :] if self._open else ""

    def _decode(self, ids: list[int]) -> str:
        return decoded(self.tokenizer, ids) if ids else ""

    def _first_stop(self, text: str) -> tuple[int | None, str | None]:
        """Return where the first stop string begins, and which it is."""
        return min(((text.find(stop), stop) for stop in self.stop if stop in text), default=(None, None))

    def _may_stop(self, text: str) -> int:
        """Return how many characters at the end may begin a stop string."""
        return max(
            (n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )
