"""A corpus as batches for one model: texts cut to what it reads, padded, each place with its surroundings and its answer.

    for batch in batches(m, texts):                      # texts, pairs for two stacks, images for a model of patches
        model(batch.main, **batch.given)
        batch.places("")                                 # [N, NOTE]: what is worth keeping of each of the N real tokens

The answer at a place is what the head is there to say: the next token, or, for a masked model, the token itself.

Shapes: B batch, T tokens, N real tokens of a batch, W tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.bundle import Model
from clearhead.errors import InputError
from clearhead.hub.encodings import windows
from clearhead.hub.pixels import Image
from clearhead.inside.inputs import Prepared, prepare

Given = str | Sequence[int] | tuple[str, str] | Image
LONGEST = 512  # tokens of a passage, though the model may take more
BATCH = 4096  # tokens of a batch, padding included
AROUND = 12  # tokens that are kept on each side of a place
WINDOW = 2 * AROUND + 1
NOTE = WINDOW + 3  # a window of ids, then the answer, the number of the text, the place in it
NOTHING = -1  # in a note: no token, no answer


@dataclass(frozen=True)
class Passage:
    """A stretch of one text that the model reads at once."""

    prepared: Prepared
    number: int  # of the text
    start: int  # of the passage in its text, in tokens
    answers: tuple[int, ...]  # one per token of the stack that feeds the head; NOTHING: not known

    @property
    def size(self) -> int:
        """Tokens of both stacks."""
        return len(self.prepared.tokens) + len(self.prepared.source_tokens or ())


@dataclass(frozen=True)
class Batch:
    """Passages side by side."""

    passages: tuple[Passage, ...]
    pad: int

    @property
    def main(self) -> Tensor:
        """Ids [B, T], or pixels [B, C, H, W]."""
        rows = [passage.prepared.main[0] for passage in self.passages]
        return filled_up(rows, self.pad) if rows[0].ndim == 1 else torch.stack(rows)

    @property
    def given(self) -> dict[str, Any]:
        """What the model is called with beside `main`: masks, and the source where there are two stacks."""
        first = self.passages[0].prepared
        if first.main.ndim != 2:
            return {}
        more: dict[str, Any] = {"mask": self.real("").to(first.main.device)}
        sources = [
            passage.prepared.source[0] for passage in self.passages if passage.prepared.source is not None
        ]
        if sources:
            more |= {
                "source": filled_up(sources, self.pad),
                "source_mask": self.real("encoder.").to(first.main.device),
            }
        return more

    def real(self, stack: str) -> Tensor:
        """Which tokens of a stack are no padding: [B, T]."""
        return filled_up(
            [
                torch.ones(len(passage.prepared.tokens_of(stack)), dtype=torch.bool)
                for passage in self.passages
            ],
            0,
        )

    def places(self, stack: str) -> Tensor:
        """A note on each real token, row by row: [N, NOTE]."""
        return torch.cat([self._notes(passage, stack) for passage in self.passages])

    def _notes(self, passage: Passage, stack: str) -> Tensor:
        tokens = passage.prepared.tokens_of(stack)
        ids = torch.tensor(tokens.ids or range(len(tokens)))  # a patch is known by its number
        around = nnf.pad(ids, (AROUND, AROUND), value=NOTHING).unfold(0, WINDOW, 1)  # T W
        answers = torch.tensor(passage.answers if stack == "" else [NOTHING] * len(tokens))
        where = passage.start + torch.arange(len(tokens))
        return torch.cat(
            [around, torch.stack([answers, torch.full_like(where, passage.number), where], 1)], 1
        ).int()


def filled_up(rows: Sequence[Tensor], value: int) -> Tensor:
    """Rows of unequal length, filled up on the right: [B, T]."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def batches(m: Model, texts: Iterable[Given], limit: int | None = None) -> Iterator[Batch]:
    """The passages of a corpus in the order they come, as many at a time as `BATCH` tokens hold.

    Args:
        m: the model.
        texts: texts or ids; (source, target) or a source alone for two stacks; images for a model of patches.
        limit: tokens, padding not counted, after which no further passage is read.
    """
    waiting: list[Passage] = []
    longest = read = 0
    for passage in passages(m, texts):
        if waiting and (len(waiting) + 1) * max(longest, passage.size) > BATCH:
            yield Batch(tuple(waiting), m.special.get("pad", 0))
            waiting, longest = [], 0
        waiting.append(passage)
        longest, read = max(longest, passage.size), read + passage.size
        if limit is not None and read >= limit:
            break
    if waiting:
        yield Batch(tuple(waiting), m.special.get("pad", 0))
    if not read:
        raise InputError("the corpus is empty: give at least one text with a token in it")


def passages(m: Model, texts: Iterable[Given]) -> Iterator[Passage]:
    """The stretches of each text that the model reads at once; texts without a token are left out."""
    return chain.from_iterable(_passages(m, number, given) for number, given in enumerate(texts))


def _passages(m: Model, number: int, given: Any) -> Iterator[Passage]:
    if m.config.family == "encoder-decoder":
        source, target = given if isinstance(given, tuple) else (given, None)
        if len(source):
            yield _pair(m, number, source, target)
    elif m.model.main.spec.input != "tokens":
        prepared = prepare(m, given)
        yield Passage(prepared, number, 0, (NOTHING,) * len(prepared.tokens))
    elif isinstance(given, tuple):
        raise InputError(
            "a pair was given to a model of one stack: give texts, or a model with an encoder and a decoder"
        )
    else:
        for start, ids, following in _stretches(m, given):
            yield Passage(prepare(m, ids), number, start, tuple(following))


def _stretches(m: Model, given: str | Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Where each stretch begins, its ids, and the answer at each."""
    length = min(m.max_length, LONGEST)
    if m.config.family == "encoder" and isinstance(given, str):
        for start, encoding in windows(m.text_tokenizer, length, given, 0) if given.strip() else ():
            yield start, list(encoding.ids), list(encoding.ids)
        return
    ids = m._prompt(given) if len(given) else []
    for start in range(0, len(ids), length):
        stretch = ids[start : start + length]
        following = (
            stretch
            if m.config.family == "encoder"
            else [*ids[start + 1 : start + length + 1], NOTHING][: len(stretch)]
        )
        yield start, stretch, following


def _pair(m: Model, number: int, source: Any, target: Any) -> Passage:
    """Source and target; after its last token, the target ends."""
    prepared = prepare(m, source, target)
    if len(prepared.tokens) > m.max_length:
        prepared = prepare(m, source, prepared.tokens.ids[: m.max_length])
    ends = m.stops[0] if m.stops else NOTHING
    return Passage(prepared, number, 0, (*prepared.tokens.ids[1:], ends))
