"""A corpus as batches for one model: texts cut and padded, each place with its surroundings and its answer.

    for batch in batches(m, texts):                      # texts, pairs for two stacks, or images
        model(**batch.arguments)
        batch.places("")                                 # [N, NOTE]: a note on each of the N real tokens

The answer at a place is what the head is there to say: the next token, or, for a masked model, the token
itself.

Shapes: B batch, T tokens, N real tokens of a batch, W tokens of a window.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.api import Model
from clearhead.batches.padding import padded, real_tokens
from clearhead.errors import InputError, refuse
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
class PassageBatch:
    """Passages side by side."""

    passages: list[Passage]
    pad: int

    @property
    def arguments(self) -> dict[str, Tensor]:
        """What the model is called with: ids or pixels, masks, and the source where there are two stacks."""
        first = self.passages[0].prepared
        if not first.tokens.ids:
            return {"ids": torch.cat([passage.prepared.main for passage in self.passages])}
        found = self._padded("", "ids", "mask")
        return found if first.source is None else found | self._padded("encoder.", "source", "source_mask")

    def _padded(self, stack: str, ids: str, mask: str) -> dict[str, Tensor]:
        rows = [passage.prepared.tokens_of(stack).ids for passage in self.passages]
        device = self.passages[0].prepared.main.device
        return {ids: padded(rows, self.pad, device), mask: real_tokens(rows, device)}

    def real(self, stack: str) -> Tensor:
        """Return which tokens of a stack are not padding: [B, T]."""
        return real_tokens([range(len(passage.prepared.tokens_of(stack))) for passage in self.passages])

    def places(self, stack: str) -> Tensor:
        """Return a note on each real token, row by row: [N, NOTE]."""
        return torch.cat([self._notes(passage, stack) for passage in self.passages])

    def _notes(self, passage: Passage, stack: str) -> Tensor:
        tokens = passage.prepared.tokens_of(stack)
        ids = torch.tensor(tokens.ids or range(len(tokens)))  # a patch is known by its number
        around = nnf.pad(ids, (AROUND, AROUND), value=NOTHING).unfold(0, WINDOW, 1)  # T W
        answers = torch.tensor(passage.answers if stack == "" else [NOTHING] * len(tokens))
        where = passage.start + torch.arange(len(tokens))
        about = torch.stack([answers, torch.full_like(where, passage.number), where], 1)
        return torch.cat([around, about], 1).int()


def batches(m: Model, texts: Iterable[Given], limit: int | None = None) -> Iterator[PassageBatch]:
    """Yield the passages of a corpus in the order they come, as many at a time as `BATCH` tokens hold.

    Args:
        m: the model.
        texts: texts or ids; (source, target) or a source alone for two stacks; images for a model of patches.
        limit: tokens, padding not counted, after which no further passage is read.
    """
    batch: list[Passage] = []
    read = longest = 0
    for passage in passages(m, texts):
        longest = max(longest, passage.size)
        if batch and (len(batch) + 1) * longest > BATCH:
            yield PassageBatch(batch, m.special.get("pad", 0))
            batch, longest = [], passage.size
        batch.append(passage)
        read += passage.size
        if limit is not None and read >= limit:
            break
    refuse(not batch, "the corpus is empty: give at least one text with a token in it")
    yield PassageBatch(batch, m.special.get("pad", 0))


def passages(m: Model, texts: Iterable[Any]) -> Iterator[Passage]:
    """Yield the stretches of each text that the model reads at once; texts without a token are left out."""
    for number, given in enumerate(texts):
        if m.config.family == "encoder-decoder":
            source, target = given if isinstance(given, tuple) else (given, None)
            if len(source):
                prepared = prepare(m, source, target)
                if len(prepared.tokens) > m.max_length:
                    prepared = prepare(m, source, prepared.tokens.ids[: m.max_length])
                ends = m.stops[0] if m.stops else NOTHING  # after its last token, the target ends
                yield Passage(prepared, number, 0, (*prepared.tokens.ids[1:], ends))
        elif m.model.main.spec.input != "tokens":
            prepared = prepare(m, given)
            yield Passage(prepared, number, 0, (NOTHING,) * len(prepared.tokens))
        elif isinstance(given, tuple):
            raise InputError(
                "a pair was given to a model of one stack: "
                "give texts, or a model with an encoder and a decoder"
            )
        else:
            for start, ids, following in _stretches(m, given):
                yield Passage(prepare(m, ids), number, start, tuple(following))


def _stretches(m: Model, given: str | Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield where each stretch begins, its ids, and the answer at each."""
    length = min(m.max_length, LONGEST)
    masked = m.config.family == "encoder"
    if masked and isinstance(given, str):
        for start, encoding in windows(m.text_tokenizer, length, given, 0) if given.strip() else ():
            yield start, list(encoding.ids), list(encoding.ids)
        return
    ids = m.prompt_ids(given) if len(given) else []
    answers = ids if masked else [*ids[1:], NOTHING]
    for start in range(0, len(ids), length):
        yield start, ids[start : start + length], answers[start : start + length]
