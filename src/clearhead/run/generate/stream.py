"""Streaming: text as it grows, in whole characters, with stop strings held back until they are certain.

What is emitted, put together, is exactly the text of all the ids at once. A token is decoded together with
the few before it, never with the whole row: how a token reads depends on its neighbours alone (the space
before a word, the bytes of one character), so a long row costs a token no more than a short one.

`TokenTexts` divides a text among its tokens. Put together they are the text. Part of a character has no text
by itself: there the token that completes it has the text, and each has its own bytes.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from clearhead.hub.tokens.text import BYTES, byte_letters, decoded

# How SentencePiece writes a byte; a run of them is read as a whole, or as invalid.
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
PARTIAL = "\ufffd"  # what part of a character reads as
LETTERS = {letter: value for value, letter in enumerate(byte_letters())}


class TextStream:
    """The text of one row, token by token, as it reads after the prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(text for text in stop if text)
        self.context, self.skips = list(prompt), skip_special_tokens
        added = tokenizer.get_added_tokens_decoder().items() if skip_special_tokens else ()
        self._special = {token for token, entry in added if entry.special}
        self.stopped_by: str | None = None
        self._emitted: list[str] = []
        self._held = ""  # settled, but perhaps the beginning of a stop string
        # Settled tokens that the next ones are read after.
        self._known = [token for token in self.context if self.is_read(token)]
        self._open: list[int] = []  # tokens whose text may still change
        self._start = len(self._decode(self._known))

    @property
    def text(self) -> str:
        """The text so far, cut at the first stop string."""
        rest = "" if self.stopped_by is not None else self._held + self.tail
        return "".join(self._emitted) + rest[: self._first_stop(rest)[0]]

    def push(self, token: int) -> str:
        """Add a token; return the new text that is final: whole characters, no beginning of a stop string."""
        if not self.is_read(token):
            return ""
        self._open.append(token)
        tail = self.tail
        text = self._held + tail
        cut, self.stopped_by = self._first_stop(text)
        if self.stopped_by is not None:
            return self._emit(text[:cut])
        if not tail or tail.endswith("\ufffd") or BYTE.fullmatch(self.tokenizer.id_to_token(token) or ""):
            return ""  # a character of which some bytes may still come
        self._known, self._open = self._open, []
        self._start = len(self._decode(self._known))
        sure = len(text) - self._may_stop(text)
        self._held = text[sure:]
        return self._emit(text[:sure])

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens that are read together and emitted by `finish`."""
        self._open += [token for token in tokens if self.is_read(token)]

    def peek(self, token: int) -> str:
        """Return the text that a token would add here, without adding it."""
        whole = self._decode([*self._known, *self._open, token])[self._start :]
        return whole[len(self.tail.rstrip("\ufffd")) :]

    def finish(self) -> str:
        """Return the text that was held back."""
        if self.stopped_by is not None:
            return ""
        text = self._held + self.tail
        cut, self.stopped_by = self._first_stop(text)
        self._held, self._known, self._open, self._start = "", [], [], 0
        return self._emit(text[:cut])

    def is_read(self, token: int) -> bool:
        """Return True where a token has a text; special tokens and unknown ids are skipped."""
        return token not in self._special and self.tokenizer.id_to_token(token) is not None

    def _emit(self, new: str) -> str:
        self._emitted.append(new)
        return new

    @property
    def settled(self) -> bool:
        """Whether no later token changes how those so far read."""
        return not self._open

    @property
    def tail(self) -> str:
        """The text of the tokens that are not settled."""
        return self._decode(self._known + self._open)[self._start :] if self._open else ""

    def _decode(self, ids: list[int]) -> str:
        return decoded(self.tokenizer, ids, special=not self.skips) if ids else ""

    def _first_stop(self, text: str) -> tuple[int | None, str | None]:
        """Return where the first stop string begins, and which it is."""
        return min(((text.find(stop), stop) for stop in self.stop if stop in text), default=(None, None))

    def _may_stop(self, text: str) -> int:
        """Return how many characters at the end may begin a stop string."""
        return max(
            (n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
        )


class TokenText(NamedTuple):
    """A token as part of a text, or as what could have stood there."""

    id: int
    text: str
    bytes: bytes

    def entry(self, logprob: float | None) -> dict[str, Any]:
        """Return it as `/v1/chat/completions` reports it."""
        return {"token": self.text, "logprob": logprob, "bytes": list(self.bytes)}


def raw_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """Return the bytes of a token that may be part of a character; None where its text has them."""
    kind, written = repr(tokenizer.decoder), tokenizer.id_to_token(token)
    if written is None or token in tokenizer.get_added_tokens_decoder():
        return None
    if "ByteLevel(" in kind and LETTERS.keys() >= set(written):
        return bytes(map(LETTERS.__getitem__, written))
    return bytes([BYTES.index(written)]) if "ByteFallback(" in kind and written in BYTES else None


class TokenTexts:
    """The tokens of one text as it grows, and the alternatives to each as they would read there."""

    def __init__(self, stream: TextStream) -> None:
        self._stream, self._tokenizer = stream, stream.tokenizer
        self.tokens: list[TokenText] = []  # those whose text is settled
        self.alternatives: list[list[tuple[TokenText, float]]] = []
        self._open: list[tuple[int, str]] = []  # not settled: of each token the text since the last one was

    @property
    def read(self) -> int:
        """Number of tokens so far."""
        return len(self.tokens) + len(self._open)

    def push(self, token: int, alternatives: Mapping[int, float]) -> None:
        """Add a token."""
        self.alternatives.append([(self._instead(other), value) for other, value in alternatives.items()])
        new = self._stream.push(token)
        self._open.append((token, self._stream.tail or new))
        if self._stream.settled:
            self._settle(new)

    def finish(self) -> None:
        """Settle what is left, such as part of a character."""
        self._settle(self._stream.finish())

    def _settle(self, text: str) -> None:
        """Divide a text among the tokens that it comes from: each has what was certain with it."""
        start = 0
        for number, (token, tail) in enumerate(self._open):
            certain = agreed(tail.rstrip(PARTIAL), text)
            stop = len(text) if number == len(self._open) - 1 else max(start, certain)
            own, raw = text[start:stop], raw_bytes(self._tokenizer, token)
            self.tokens.append(TokenText(token, own, own.encode("utf-8", "replace") if raw is None else raw))
            start = stop
        self._open = []

    def _instead(self, token: int) -> TokenText:
        """Return how another token would read here; a special one by its name."""
        raw = raw_bytes(self._tokenizer, token)
        text = self._stream.peek(token) if self._stream.is_read(token) else self._tokenizer.id_to_token(token)
        return TokenText(token, text or "", (text or "").encode("utf-8", "replace") if raw is None else raw)


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; put together they are the text. A special token is its name."""
    found = TokenTexts(TextStream(tokenizer))
    for token in ids:
        found.push(token, {})
    found.finish()
    special = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
    return [token.text or special.get(token.id, "") for token in found.tokens]


def agreed(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items at the beginning of both are the same."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
