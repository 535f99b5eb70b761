"""The steps of a trace, the recorder that collects them while the model runs, and the answers at the end.

    recorder = Recorder(config)
    with listening(Listener(model, {}, recorder.hear)):
        logits = model(ids).logits
    answer_steps(recorder, m, tokens, logits, top=5)

The recorder hears every value that the model shows to its taps. An activation that `record` knows is attached
to the step that computed it. Each expert of a mixture computes a run of rows, which the recorder joins into
one step.

Shapes: see `words.LEGEND`.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from clearhead.core.config import ModelConfig
from clearhead.core.dtypes import wide
from clearhead.core.steps import Step
from clearhead.hub.tokens.text import label
from clearhead.inside.inputs import InputTokens
from clearhead.inside.results import Result
from clearhead.inside.trace.facts import filled_words
from clearhead.inside.trace.words import INPUTS
from clearhead.run.api import Model

FIRST = 5  # values shown of each result
RECENT = 12  # latest steps that are searched for the one that computed an activation
# Functions from logits to probabilities, by their formulas.
PROBABILITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax(x)": lambda logits: wide(logits).softmax(-1),
    "softmax(x) over tokens": lambda logits: wide(logits).softmax(1),
    "sigmoid(x)": lambda logits: wide(logits).sigmoid(),
}
# Of all steps, of the named ones, or what a function makes of each.
KeepValues = bool | Collection[str] | Callable[[Tensor], Tensor]
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Peek(Result):
    """A summary of a result; masked scores are left out of mean, standard deviation and minimum."""

    first: tuple[float, ...]
    mean: float | None = None  # None for integers and empty tensors
    std: float | None = None
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True)
class TraceStep(Result):
    """One step of a forward pass."""

    json_names = (
        "name", "title", "level", "symbols", "dtype", "formula", "why", "parameters", "flops", "bytes",
        "seconds", "path", "shape", "sample", "taps", "costs", "peek",
    )  # fmt: skip

    name: str  # stable: "blocks.3.attention.scores", "encoder.norm", "head.out"
    title: str  # short: "scores"
    path: tuple[str, ...]  # the groups around it: stack, block, sublayer
    symbols: str  # its shape in the letters of the legend: "B H T S"
    shape: tuple[int, ...]
    dtype: str
    peek: Peek
    seconds: float
    bytes: int  # of the result
    formula: str
    why: str
    # On the CPU, float32 at least; None where it was not kept.
    value: Tensor | None = field(repr=False, compare=False, default=None)
    sample: tuple[str, ...] = ()  # labels of the tokens, where the result is tokens
    taps: tuple[str, ...] = ()  # names of this value in `record` and `edit`
    costs: tuple[str, ...] = ()  # names of the cost steps whose figures it has
    parameters: int = 0  # used here for the first time: tied and shared weights count once
    flops: int = 0

    @property
    def level(self) -> int:
        """Depth in the tree: a stack is 1, a block 2, a sublayer 3, a step of a sublayer 4."""
        return len(self.path) + 1


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


class Recorder:
    """Collects the steps of one forward pass."""

    def __init__(self, config: ModelConfig, keep_values: KeepValues = True) -> None:
        self.config, self.keep_values = config, keep_values
        self.steps: list[TraceStep] = []
        self._recent: deque[tuple[int, Tensor]] = deque(maxlen=RECENT)  # number of a step, and its value
        self._experts: dict[str, tuple[list[Tensor], float]] = {}  # pieces of a step, and their seconds
        self._named = set[str]()
        self._clock = time.perf_counter()

    def hear(self, name: str, x: Tensor, public: bool) -> None:
        """Record a value that the model shows; `public` values are activations that `record` knows."""
        seconds = self._elapsed(x)
        if _EXPERT.search(name):
            if not public:
                joined = _EXPERT.sub(".experts.", name)
                pieces, before = self._experts.get(joined, ([], 0.0))
                self._experts[joined] = ([*pieces, x], before + seconds)
        else:
            for joined, (pieces, before) in self._experts.items():
                self.note(joined, torch.cat(pieces), before)
            self._experts.clear()
            # An activation that a recent step has computed is this very tensor.
            made = next((number for number, value in reversed(self._recent) if public and value is x), None)
            if made is not None:
                self.steps[made] = replace(self.steps[made], taps=(*self.steps[made].taps, name))
            elif name not in self._named:
                self.note(name, x, seconds, taps=(name,) if public else ())
        self._clock = time.perf_counter()

    def timed(
        self, name: str, compute: Callable[[], Tensor], sample: tuple[str, ...] = (), **facts: Any
    ) -> Tensor:
        """Run `compute`, append its result as a step, and return it; `facts` fill in formula and symbols."""
        self._clock = time.perf_counter()
        x = compute()
        self.note(name, x, self._elapsed(x), sample, **facts)
        return x

    def note(
        self,
        name: str,
        x: Tensor,
        seconds: float,
        sample: tuple[str, ...] = (),
        taps: tuple[str, ...] = (),
        **facts: Any,
    ) -> None:
        """Append a step."""
        words = filled_words(self.config, name, x, **facts)
        self._recent.append((len(self.steps), x))
        self._named.add(name)
        self.steps.append(
            TraceStep(
                name,
                words.title,
                path_of(self.config, name),
                words.symbols,
                tuple(x.shape),
                str(x.dtype).removeprefix("torch."),
                _peek(x),
                seconds,
                x.numel() * x.element_size(),
                words.formula,
                words.why,
                self._kept(name, x),
                sample,
                taps,
            )
        )

    def _kept(self, name: str, x: Tensor) -> Tensor | None:
        if callable(self.keep_values):
            return wide(self.keep_values(x.detach())).cpu()
        keeps = self.keep_values if isinstance(self.keep_values, bool) else name in self.keep_values
        return wide(x.detach()).cpu() if keeps else None

    def _elapsed(self, x: Tensor) -> float:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        return time.perf_counter() - self._clock


def priced(steps: Sequence[TraceStep], costs: Iterable[Step]) -> tuple[TraceStep, ...]:
    """Add the costs to the steps of the same name, or else to the last step of the same part."""
    places = {step.name: number for number, step in enumerate(steps)}
    last: dict[str, int] = {}  # by part: its last step
    for number, step in enumerate(steps):
        parts = step.name.split(".")
        last |= {".".join(parts[:depth]): number for depth in range(1, len(parts) + 1)}
    taken: dict[int, list[Step]] = {}
    for cost in costs:
        part = cost.name
        while part and part not in last:
            part = part.rpartition(".")[0]
        taken.setdefault(places.get(cost.name, last.get(part, len(steps) - 1)), []).append(cost)
    return tuple(
        replace(
            step,
            costs=tuple(cost.name for cost in taken.get(number, ())),
            parameters=sum(cost.parameters for cost in taken.get(number, ())),
            flops=sum(cost.forward for cost in taken.get(number, ())),
        )
        for number, step in enumerate(steps)
    )


def path_of(config: ModelConfig, name: str) -> tuple[str, ...]:
    """Return the groups around a step of this name: stack, block, sublayer."""
    if name.startswith("head."):
        return ("head",)
    at = "encoder." if name.startswith("encoder.") else ""
    stack = "encoder" if at or config.decoder is None else "decoder"
    part, *rest = name.removeprefix(at).split(".")
    if part == "blocks":
        layer, sublayer, *step = rest
        block = f"{at}blocks.{layer}"
        joins = sublayer.endswith("_residual") and config.parallel and step != ["before"]
        return (stack, block, f"{block}.{'residual' if joins else sublayer.removesuffix('_residual')}")
    if part in INPUTS:
        return (stack, f"{at}input")
    if part in ("mask", "counts") or (part == "positions" and rest[0] in ("rotary", "bias", "norm", "which")):
        return (stack, f"{at}view")
    return (stack,) if part == "norm" else (stack, f"{at}embedding")


def _peek(x: Tensor) -> Peek:
    """Summarise a tensor of any shape: its first values, and figures over all of them."""
    first = tuple(x.flatten()[:FIRST].tolist())
    if not x.is_floating_point():
        return Peek(first, min=float(x.min()), max=float(x.max())) if x.numel() else Peek(first)
    if not x.numel():
        return Peek(first)
    low, high = (float(end) for end in torch.aminmax(x))
    seen, lowest, count = wide(x), torch.finfo(x.dtype).min, x.numel()
    if low == lowest:  # masked scores
        shown = x > lowest
        count = int(torch.count_nonzero(shown))
        if not count:
            return Peek(first)
        low = float(seen.masked_fill(~shown, math.inf).min())
        mean = float(torch.where(shown, seen, 0.0).sum()) / count
        centred = torch.where(shown, seen - mean, 0.0).flatten()
    else:
        mean = float(seen.mean())
        centred = (seen - mean).flatten()
    return Peek(first, mean, math.sqrt(float(centred @ centred) / count), low, high)


# Answers ----------------------------------------------------------------------------------------------------


def _probability_of(m: Model) -> str:
    """Return the formula from logits to probabilities; "" where no answer is chosen."""
    head, theirs = m.config.head, m.description.theirs if m.description is not None else {}
    kind = theirs.get("problem_type") if head == "classifier" else None
    if head in ("embedding", "none") or kind == "regression":
        return ""
    if head == "span":
        return "softmax(x) over tokens"
    each = kind == "multi_label_classification" or (
        head in ("classifier", "tagger") and m.config.n_classes == 1
    )
    return "sigmoid(x)" if each else "softmax(x)"


def answer_steps(
    recorder: Recorder, m: Model, tokens: InputTokens, logits: Tensor, top: int
) -> tuple[Prediction, ...]:
    """Record probabilities and candidates as steps, and return them as predictions."""
    head, formula = m.config.head, _probability_of(m)
    if not formula:
        return ()
    probabilities = recorder.timed(
        "head.probabilities", lambda: PROBABILITIES[formula](logits), probability=formula
    )
    # The last axis holds the options to choose from.
    options = probabilities.transpose(1, 2) if head == "span" else probabilities
    top = min(top, options.shape[-1])
    shape = {"classifier": "B top", "span": "B C top"}.get(head or "", "B T top")
    recorder.timed("head.candidates", lambda: options.topk(top).values, candidates=shape, top=top)
    by_token = head in ("lm", "mlm", "tagger")
    questions = list(tokens.labels) if by_token else ["class"] if head == "classifier" else ["begins", "ends"]
    follows: Sequence[int | None] = [*tokens.ids[1:], None] if head == "lm" else [None] * len(questions)
    shares = options.reshape(len(questions), -1).cpu()

    def choice(row: int, number: int) -> Choice:
        return Choice(_answer_name(m, tokens, number), number, float(shares[row, number]))

    made = []
    for row, (best, following) in enumerate(zip(shares.topk(top).indices.tolist(), follows)):
        candidates = tuple(choice(row, number) for number in best)
        chosen = candidates[0] if following is None else choice(row, following)
        read = tokens.ids[row] if by_token and tokens.ids else None
        made.append(Prediction(questions[row], row if by_token else None, read, chosen, candidates))
    return tuple(made)


def _answer_name(m: Model, tokens: InputTokens, number: int) -> str:
    """Return the name of an answer: a token, a class, or the token at a place."""
    if m.config.head in ("lm", "mlm"):
        return label(m.tokenizer, number)
    return tokens.labels[number] if m.config.head == "span" else m.class_names[number]
