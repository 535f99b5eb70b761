"""Record a forward pass step by step, from text to the probabilities of what comes next.

    seen = trace(m, "The cat sat")
    for step in seen.steps: step.name, step.symbols, step.shape, step.why
    seen["blocks.0.attention.pattern"].value          # B H T S
    seen.parameters, seen.flops                       # those of `cost(config, length)`, exactly
    seen.rows(depth=2)                                # stacks and blocks, with sums

The values are those of the model's own forward pass, as its taps show them to a `Recorder`. An activation
that `record` knows is attached to the step that computed it. Each expert of a mixture computes a run of rows,
which the recorder joins into one step.

Shapes: see `trace_words.LEGEND`.
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
from clearhead.core.taps import Listener
from clearhead.errors import InputError, nearest, refuse
from clearhead.hub.tokens.text import label
from clearhead.inside.inputs import AnyModel, Given, InputTokens, Prepared, Target, as_model, prepare
from clearhead.inside.results import Result
from clearhead.inside.trace_words import INPUTS, LEGEND, filled_words
from clearhead.run.api import Model
from clearhead.variants.contexts import evaluating, listening
from clearhead.variants.costs import Cost, cost
from clearhead.variants.steps import Step

FIRST = 5  # values shown of each result
RECENT = 24  # latest steps that are searched for the one that computed an activation
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
    parameters: int = 0  # used for the first time by this step: tied and shared weights count once
    flops: int = 0

    @property
    def level(self) -> int:
        """Depth in the tree: a stack is 1, a block 2, a sublayer 3, a step of a sublayer 4."""
        return len(self.path) + 1


@dataclass(frozen=True)
class Choice(Result):
    """One candidate and its probability."""

    label: str
    id: int  # of a token, a class, or a position in the text
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
        self._experts: dict[str, tuple[list[Tensor], float]] = {}  # chunks of a step, and their seconds
        self._named = set[str]()
        self._clock = time.perf_counter()

    def hear(self, name: str, x: Tensor, public: bool) -> None:
        """Record a value that the model shows; `public` values are activations that `record` knows."""
        seconds = self._elapsed(x)
        if _EXPERT.search(name):
            if not public:
                joined = _EXPERT.sub(".experts.", name)
                chunks, before = self._experts.get(joined, ([], 0.0))
                self._experts[joined] = ([*chunks, x], before + seconds)
        else:
            for joined, (chunks, before) in self._experts.items():
                self.note(joined, torch.cat(chunks), before)
            self._experts.clear()
            # An activation that a recent step has computed is this very tensor.
            step = next((number for number, value in reversed(self._recent) if public and value is x), None)
            if step is not None:
                self.steps[step] = replace(self.steps[step], taps=(*self.steps[step].taps, name))
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
    numbers = {step.name: number for number, step in enumerate(steps)}
    last: dict[str, int] = {}  # by part: its last step
    for number, step in enumerate(steps):
        parts = step.name.split(".")
        last |= {".".join(parts[:depth]): number for depth in range(1, len(parts) + 1)}
    taken: dict[int, list[Step]] = {}
    for step_cost in costs:
        part = step_cost.name
        while part and part not in last:
            part = part.rpartition(".")[0]
        taken.setdefault(numbers.get(step_cost.name, last.get(part, len(steps) - 1)), []).append(step_cost)
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
        names = tokens.labels if head == "span" else m.class_names
        name = label(m.tokenizer, number) if head in ("lm", "mlm") else names[number]
        return Choice(name, number, float(shares[row, number]))

    predictions = []
    for row, (best, following) in enumerate(zip(shares.topk(top).indices.tolist(), follows)):
        candidates = tuple(choice(row, number) for number in best)
        chosen = candidates[0] if following is None else choice(row, following)
        read = tokens.ids[row] if by_token and tokens.ids else None
        predictions.append(Prediction(questions[row], row if by_token else None, read, chosen, candidates))
    return tuple(predictions)


# The whole trace --------------------------------------------------------------------------------------------


__all__ = ["Peek", "Prediction", "Trace", "TraceRow", "TraceStep", "trace"]


class Sums(Result):
    """The figures of several steps, added up."""

    steps: tuple[TraceStep, ...]

    @property
    def parameters(self) -> int:
        """Parameters of all its steps."""
        return sum(step.parameters for step in self.steps)

    @property
    def flops(self) -> int:
        """FLOPs of all its steps."""
        return sum(step.flops for step in self.steps)

    @property
    def bytes(self) -> int:
        """Bytes of the results of all its steps."""
        return sum(step.bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """Seconds of all its steps."""
        return sum(step.seconds for step in self.steps)

    def figures(self) -> dict[str, Any]:
        """Return all figures by name."""
        return {name: getattr(self, name) for name in ("parameters", "flops", "bytes", "seconds")}


@dataclass(frozen=True)
class TraceRow(Sums):
    """One line of the tree: a step or a group of steps."""

    name: str
    title: str
    level: int  # 1 stack, 2 block, 3 sublayer, 4 step; a step outside of blocks has a lower level
    steps: tuple[TraceStep, ...] = field(repr=False)

    @property
    def step(self) -> TraceStep | None:
        """The step itself; None for a group."""
        first = self.steps[0]
        return first if (self.name, self.level) == (first.name, first.level) else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, with the names of the first and the last step."""
        return {
            "name": self.name,
            "title": self.title,
            "level": self.level,
            **self.figures(),
            "first": self.steps[0].name,
            "last": self.steps[-1].name,
            "steps": len(self.steps),
        }


@dataclass(frozen=True)
class Trace(Sums):
    """One forward pass of one model."""

    json_names = (
        *("tokens", "source_tokens", "legend", "figures as totals", "difference", "steps", "groups"),
        "predictions",
    )

    steps: tuple[TraceStep, ...]
    tokens: tuple[str, ...]  # labels of the input of the stack that feeds the head
    source_tokens: tuple[str, ...]  # labels of the input of the encoder before it, if any
    predictions: tuple[Prediction, ...]  # the likeliest answers, at each token or for the whole input
    logits: Tensor = field(repr=False, compare=False)  # output of the head, on the CPU
    difference: float  # the largest between these logits and those of a pass that is not traced
    cost: Cost = field(repr=False)  # of this pass: `cost(config, length, source_length=...)`

    @property
    def legend(self) -> dict[str, str]:
        """The letters in the shapes of these steps, with their meaning."""
        used = {letter for step in self.steps for letter in step.symbols.replace("·", " ").split()}
        return {letter: meaning for letter, meaning in LEGEND.items() if letter in used}

    def __getitem__(self, name: str) -> TraceStep:
        """Return the step of this name."""
        known = {step.name: step for step in self.steps}
        if name not in known:
            raise InputError(
                f'there is no step "{name}"{nearest(name, known)}: steps are called as {self.steps[-1].name}'
            )
        return known[name]

    def rows(self, depth: int = 4, layer: int | None = None) -> tuple[TraceRow, ...]:
        """Return the steps as a tree: depth 1 stacks, 2 blocks, 3 sublayers, 4 steps; one `layer` in full."""
        refuse(
            not 1 <= depth <= 4,
            f"depth {depth} is not known: 1 shows stacks, 2 blocks, 3 sublayers, 4 all steps",
        )
        layers = sorted({number for step in self.steps if (number := _layer(step)) is not None})
        refuse(
            layer not in (None, *layers), f"there is no layer {layer}: layers are {layers[0]} to {layers[-1]}"
        )
        rows: list[TraceRow] = []
        open_groups: tuple[str, ...] = ()
        for number, step in enumerate(self.steps):
            limit = 4 if layer is not None and _layer(step) == layer else depth
            for level in range(1, min(len(step.path), limit) + 1):
                group = step.path[:level]
                if open_groups[:level] != group:
                    own = tuple(later for later in self.steps[number:] if later.path[:level] == group)
                    last = group[-1].rpartition(".")[2]
                    title = f"block {last}" if last.isdigit() else last
                    rows.append(TraceRow(group[-1], title, level, own))
            open_groups = step.path
            if step.level <= limit:
                rows.append(TraceRow(step.name, step.title, step.level, (step,)))
        return tuple(rows)

    @property
    def groups(self) -> list[TraceRow]:
        """Stacks, blocks and sublayers."""
        return [row for row in self.rows(depth=3) if row.step is None]


def trace(
    m: AnyModel,
    given: Given | Prepared,
    target: Target = None,
    pair: str | None = None,
    top: int = 5,
    *,
    keep_values: KeepValues = True,
) -> Trace:
    """Run one input through the model and return its forward pass as a list of steps.

    `m`, `given`, `target` and `pair` are as for `prepare`; `given` may be numbers [T, d_input] too.

    Args:
        top: number of candidates to show.
        keep_values: keep the tensor of every step, of the named steps, or what a function makes of each;
            other steps keep a summary only.
    """
    m = as_model(m)
    refuse(top < 1, f"top {top} must be 1 or more: it is the number of candidates shown")
    prepared = prepare(m, given, target, pair, numbers=True)
    tokens, source = prepared.tokens, prepared.source_tokens
    with torch.no_grad(), evaluating(m.model):
        expected = prepared.record()[0].required_logits  # first, to warm up before steps are timed
        recorder = Recorder(m.config, keep_values)
        if source is not None and prepared.source is not None:
            _input_steps(recorder, m, prepared.source, source, "encoder.", pair)
        _input_steps(recorder, m, prepared.main, tokens, "", pair)
        with listening(Listener(m.model, {}, recorder.hear)):
            logits = prepared.run().required_logits
        predictions = answer_steps(recorder, m, tokens, logits, top)
    lengths = [None if x is None or x.ndim == 4 else x.shape[1] for x in (prepared.main, prepared.source)]
    dtype = str(next(m.model.parameters()).dtype).removeprefix("torch.")
    price = cost(m.config, lengths[0], 1, dtype, lengths[1])
    # Both inputs were recorded first; the decoder's comes after the encoder has run.
    ordered = sorted(recorder.steps, key=lambda step: not step.name.startswith("encoder."))
    return Trace(
        priced(ordered, price.steps),
        tokens.labels,
        () if source is None else source.labels,
        predictions,
        logits.float().cpu(),
        float((logits - expected).abs().max()),
        price,
    )


def _input_steps(
    recorder: Recorder, m: Model, x: Tensor, tokens: InputTokens, prefix: str, pair: str | None
) -> None:
    """Record how the input became numbers."""
    if x.ndim > 2:
        recorder.timed(f"{prefix}{'pixels' if x.ndim == 4 else 'vectors'}", lambda: x)
        return
    if tokens.spans:

        def tokenized() -> Tensor:
            m.framed(tokens.text, pair)
            return torch.tensor(tokens.spans)

        recorder.timed(f"{prefix}tokenize", tokenized, tokens.labels)
    recorder.timed(f"{prefix}ids", lambda: x, tokens.labels)


def _layer(step: TraceStep) -> int | None:
    """Return the number of the block of a step; None outside of blocks."""
    parts = step.path[1].split(".") if len(step.path) > 1 else []
    return int(parts[-1]) if len(parts) > 1 and parts[-2] == "blocks" else None
