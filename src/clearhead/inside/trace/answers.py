"""The end of a trace: the probabilities, and the candidates that are most likely.

Shapes: B batch (one row), T tokens, V vocabulary, C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from clearhead.api import Model
from clearhead.inside.inputs import InputTokens
from clearhead.inside.results import Result
from clearhead.inside.trace.steps import Recorder
from clearhead.model.dtypes import wide
from clearhead.tokens.labels import label


@dataclass(frozen=True)
class Choice(Result):
    """One candidate and its probability."""

    label: str
    id: int  # of a token, a class, or a place in the text
    probability: float


@dataclass(frozen=True)
class Prediction(Result):
    """The likeliest answers, at one token or for the whole input."""

    at: str  # the token that has just been read, or which question is answered: "class", "begins", "ends"
    position: int | None  # of that token
    id: int | None  # of that token, where it has one
    chosen: Choice  # the likeliest; for a language model, the next token of the row where there is one
    candidates: tuple[Choice, ...]  # the likeliest first


# Functions from logits to probabilities, by their formulas.
PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax(x)": lambda logits: wide(logits).softmax(-1),
    "softmax(x) over tokens": lambda logits: wide(logits).softmax(1),
    "sigmoid(x)": lambda logits: wide(logits).sigmoid(),
}


def probability_of(m: Model) -> str:
    """Return the formula from logits to probabilities; "" where no answer is chosen."""
    head, theirs = m.config.head, m.description.theirs if m.description is not None else {}
    kind = theirs.get("problem_type") if head == "classifier" else None
    if head in ("embedding", "none") or kind == "regression":
        return ""
    if head == "span":
        return "softmax(x) over tokens"
    each = kind == "multi_label_classification" or (head == "classifier" and m.config.n_classes == 1)
    return "sigmoid(x)" if each else "softmax(x)"


def answer_steps(
    recorder: Recorder, m: Model, tokens: InputTokens, logits: Tensor, top: int
) -> tuple[Prediction, ...]:
    """Record probabilities and candidates as steps, and return them as predictions."""
    head = m.config.head
    compute = PROBABILITIES.get(probability_of(m))
    if compute is None:
        return ()
    probabilities = recorder.timed("head.probabilities", lambda: compute(logits))
    # The last axis holds the options to choose from.
    options = probabilities.transpose(1, 2) if head == "span" else probabilities
    top = min(top, options.shape[-1])
    rows = {"classifier": "B top", "span": "B C top"}.get(head or "", "B T top")
    values = recorder.timed(
        "head.candidates", lambda: options.topk(top, dim=-1).values, candidates=rows, top=top
    )
    numbers = options.topk(top, dim=-1).indices
    by_token = head in ("lm", "mlm", "tagger")
    questions = list(tokens.labels) if by_token else ["class"] if head == "classifier" else ["begins", "ends"]
    follows: Sequence[int | None] = [*tokens.ids[1:], None] if head == "lm" else [None] * len(questions)
    options, values, numbers = (x.reshape(len(questions), -1).cpu() for x in (options, values, numbers))
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
