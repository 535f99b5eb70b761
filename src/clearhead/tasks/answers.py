"""Answers to questions, found in a context.

Shapes: T length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import Encoding
from torch import Tensor

from clearhead.errors import InputError
from clearhead.hub.encodings import windows
from clearhead.tasks.results import Answer
from clearhead.tasks.run import check_head, logits_of

if TYPE_CHECKING:
    from clearhead.bundle import Model

WINDOW, STRIDE = 384, 128  # tokens of a window over a long context, and of the overlap of two


def answer(
    loaded: Model,
    question: str | list[str],
    context: str | list[str],
    *,
    none: bool = False,
    max_tokens: int = 30,
    stride: int = STRIDE,
    batch_size: int = 32,
) -> Answer | list[Answer]:
    """The part of the context that answers the question; lists of both give a list.

    Args:
        question: what is asked.
        context: where the answer is looked for; a long one is read in windows that overlap by `stride` tokens.
        none: allow "no answer": an empty text where the model finds that likelier than any answer.
        max_tokens: the longest answer.
        stride: see `context`.
        batch_size: windows at a time.
    """
    check_head(loaded, "answer")
    single = isinstance(question, str)
    questions, contexts = ([question], [context]) if isinstance(question, str) else (question, context)
    if isinstance(contexts, str) or len(questions) != len(contexts):
        raise InputError(
            "answer needs one context for each question: give two texts, or two lists of one length"
        )
    tokenizer, room = loaded.text_tokenizer, min(loaded.max_length, WINDOW)
    rows, owners = [], []
    for number, (asked, given) in enumerate(zip(questions, contexts)):
        if not str(asked).strip() or not str(given).strip():
            raise InputError("a question or its context is empty: give both")
        pieces = [piece for _, piece in windows(tokenizer, room, str(given), stride, str(asked))]
        rows += pieces
        owners += [number] * len(pieces)
    best: list[Answer] = [Answer("", 0, 0, -1.0)] * len(questions)
    nothing = [1.0] * len(questions)  # the least probability of "no answer" over the windows
    for row, number, logits in zip(rows, owners, logits_of(loaded, rows, batch_size)):
        found, empty = _best_span(row, logits, str(contexts[number]), max_tokens)
        best[number] = max(best[number], found, key=lambda each: each.score)
        nothing[number] = min(nothing[number], empty)
    if none:
        best = [
            found if found.score > empty else Answer("", 0, 0, empty) for found, empty in zip(best, nothing)
        ]
    return best[0] if single else best


def _best_span(row: Encoding, logits: Tensor, context: str, max_tokens: int) -> tuple[Answer, float]:
    """The best answer of one window, and the probability of none: logits [T, 2]."""
    inside = torch.tensor(
        [part == 1 and end > start for part, (start, end) in zip(row.sequence_ids, row.offsets)]
    )  # T
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
