"""The end of a trace: the probabilities, and the candidates that are most likely.

Shapes: B batch (one row), T tokens, V vocabulary, C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clearhead.api import Model
from clearhead.inside.inputs import InputTokens
from clearhead.inside.trace.steps import Recorder
from clearhead.model.dtypes import wide
from clearhead.tokens.labels import label


@dataclass(frozen=True)
class Choice:
    """One candidate and its probability."""

    label: str
    id: int  # of a token, a class, or a place in the text
    probability: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"label": self.label, "id": self.id, "probability": self.probability}


@dataclass(frozen=True)
class Prediction:
    """The likeliest answers, at one token or for the whole input."""

    at: str  # the token that has just been read, or which question is answered: "class", "begins", "ends"
    position: int | None  # of that token
    id: int | None  # of that token, where it has one
    chosen: Choice  # the likeliest; for a language model, the next token of the row where there is one
    candidates: tuple[Choice, ...]  # the likeliest first

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        candidates = [candidate.to_dict() for candidate in self.candidates]
        where = {"at": self.at, "position": self.position, "id": self.id}
        return {**where, "chosen": self.chosen.to_dict(), "candidates": candidates}


def probability_of(m: Model) -> tuple[Callable[[Tensor], Tensor] | None, str]:
    """Return the function from logits to probabilities, and its formula; None where no answer is chosen."""
    config = m.config
    if config.head in ("embedding", "none"):
        return None, ""
    if config.head == "span":
        return (lambda logits: wide(logits).softmax(1)), "softmax(x) over tokens"
    theirs = m.description.theirs if m.description is not None else {}
    kind = theirs.get("problem_type") if config.head == "classifier" else None
    if kind == "regression":
        return None, ""
    if kind == "multi_label_classification" or (config.head == "classifier" and config.n_classes == 1):
        return (lambda logits: wide(logits).sigmoid()), "sigmoid(x)"
    return (lambda logits: wide(logits).softmax(-1)), "softmax(x)"


def answer_steps(
    recorder: Recorder, m: Model, tokens: InputTokens, logits: Tensor, top: int
) -> tuple[Prediction, ...]:
    """Record probabilities and candidates as steps, and return them as predictions."""
    head = m.config.head
    compute, _ = probability_of(m)
    if compute is None:
        return ()
    probabilities = recorder.timed("head.probabilities", lambda: compute(logits))
    # The last axis holds the options to choose from.
    options = probabilities.transpose(1, 2) if head == "span" else probabilities
    top = min(top, options.shape[-1])
    rows = {"classifier": "B top", "span": "B C top"}.get(head or "", "B T top")
    found: list[Tensor] = []

    def best() -> Tensor:
        values, numbers = options.topk(top, dim=-1)
        found.append(numbers)
        return values

    values = recorder.timed("head.candidates", best, candidates=rows, top=top)
    by_token = head in ("lm", "mlm", "tagger")
    questions = list(tokens.labels) if by_token else ["class"] if head == "classifier" else ["begins", "ends"]
    follows: Sequence[int | None] = [*tokens.ids[1:], None] if head == "lm" else [None] * len(questions)
    options, values, numbers = (x.reshape(len(questions), -1).cpu() for x in (options, values, found[0]))
    names, made = _names(m, tokens), []
    for row, (question, following) in enumerate(zip(questions, follows)):
        shown = zip(numbers[row].tolist(), values[row].tolist())
        candidates = tuple(Choice(names(number), number, value) for number, value in shown)
        chosen = candidates[0]
        if following is not None:
            chosen = Choice(names(following), following, float(options[row, following]))
        read = tokens.ids[row] if by_token and tokens.ids else None
        made.append(Prediction(question, row if by_token else None, read, chosen, candidates))
    return tuple(made)


def _names(m: Model, tokens: InputTokens) -> Callable[[int], str]:
    """Return the function that names an answer: a token, a class, or the token at a place."""
    if m.config.head in ("lm", "mlm"):
        return lambda number: label(m.tokenizer, number)
    if m.config.head == "span":
        return lambda number: tokens.labels[number]
    classes = m.class_names
    return lambda number: classes[number]
