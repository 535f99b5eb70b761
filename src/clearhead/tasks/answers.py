"""Answers to questions, found in a context.

Shapes: T length.
"""

from collections.abc import Sequence
from typing import TypedDict

import torch
from tokenizers import Encoding
from torch import Tensor

from clearhead.bundle import Bundle
from clearhead.errors import refuse
from clearhead.hub.encodings import windows
from clearhead.tasks.results import Answer
from clearhead.tasks.run import check_head, logits_of

WINDOW, STRIDE = 384, 128  # tokens of a window over a long context, and of the overlap of two


class AnswerOptions(TypedDict, total=False):
    """Keywords of `answer`."""

    none: bool
    max_tokens: int
    stride: int
    batch_size: int


def answer(
    m: Bundle,
    questions: Sequence[str],
    contexts: Sequence[str],
    *,
    none: bool = False,
    max_tokens: int = 30,
    stride: int = STRIDE,
    batch_size: int = 32,
) -> list[Answer]:
    """Find the part of each context that answers its question; see `Model.answer`."""
    check_head(m, "answer")
    refuse(
        isinstance(contexts, str) or len(questions) != len(contexts),
        "answer needs one context for each question: give two texts, or two lists of one length",
    )
    tokenizer, room = m.text_tokenizer, min(m.max_length, WINDOW)
    rows, owners = [], []
    for number, (asked, given) in enumerate(zip(questions, contexts)):
        refuse(
            not str(asked).strip() or not str(given).strip(), "a question or its context is empty: give both"
        )
        pieces = [piece for _, piece in windows(tokenizer, room, str(given), stride, str(asked))]
        rows += pieces
        owners += [number] * len(pieces)
    best: list[Answer] = [Answer("", 0, 0, -1.0)] * len(questions)
    nothing = [1.0] * len(questions)  # the least probability of "no answer" over the windows
    for row, number, logits in zip(rows, owners, logits_of(m, rows, batch_size)):
        found, empty = _best_span(row, logits, str(contexts[number]), max_tokens)
        best[number] = max(best[number], found, key=lambda each: each.score)
        nothing[number] = min(nothing[number], empty)
    if none:
        best = [
            found if found.score > empty else Answer("", 0, 0, empty) for found, empty in zip(best, nothing)
        ]
    return best


def _best_span(row: Encoding, logits: Tensor, context: str, max_tokens: int) -> tuple[Answer, float]:
    """Return the best answer of one window, and the probability of none: logits [T, 2]."""
    places = zip(row.sequence_ids, row.offsets)
    inside = torch.tensor([part == 1 and end > start for part, (start, end) in places])  # T
    allowed = inside.clone()
    allowed[0] = True  # the first token stands for "no answer"
    begins, ends = logits.masked_fill(~allowed[:, None], float("-inf")).softmax(0).unbind(-1)  # T
    empty = float(begins[0] * ends[0])
    both = begins[:, None] * ends  # T T
    valid = (inside[:, None] & inside).triu().tril(max_tokens - 1)
    at = int(both.masked_fill(~valid, -1).argmax())
    first, last = divmod(at, len(row.ids))
    start, end = row.offsets[first][0], row.offsets[last][1]
    return Answer(context[start:end], start, end, float(both[first, last])), empty
