"""Streaming: text as it grows, in whole characters, with stop strings held back until they are sure.

What is emitted, put together, is exactly the text of all the ids at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


class TextStream:
    """The text of one row, token by token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(text for text in stop if text)
        self.ids: list[int] = []
        self.prompt = list(prompt)
        self.before = len(tokenizer.decode(self.prompt)) if self.prompt else 0
        self.emitted = ""
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All the text so far, cut at the stop string where one has come."""
        whole = self._decode()
        cut = self._stop_at(whole)
        return whole if cut is None else whole[:cut]

    def push(self, token: int) -> str:
        """Add a token; return the new text that is sure: whole characters, and no beginning of a stop string."""
        self.ids.append(token)
        whole = self._decode()
        cut = self._stop_at(whole)
        if cut is not None:
            return self._emit(whole[:cut])
        sure = whole.rstrip("\ufffd")  # a character of which some bytes are still to come
        return self._emit(sure[: len(sure) - self._held(sure)])

    def finish(self) -> str:
        """What was held back, now that nothing more comes."""
        return self._emit(self.text)

    def _emit(self, whole: str) -> str:
        new = whole[len(self.emitted) :]
        self.emitted += new
        return new

    def _decode(self) -> str:
        """The text of the new ids, as it reads after the prompt."""
        return str(self.tokenizer.decode(self.prompt + self.ids))[self.before :]

    def _stop_at(self, whole: str) -> int | None:
        found = [(whole.find(text), text) for text in self.stop if text in whole]
        if not found:
            return None
        cut, self.stopped_by = min(found)
        return cut

    def _held(self, text: str) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        return max((n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
