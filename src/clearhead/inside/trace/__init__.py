"""Record a forward pass step by step, from text to the probabilities of what comes next.

    seen = trace(m, "The cat sat")
    for step in seen.steps: step.name, step.symbols, step.shape, step.why
    seen["blocks.0.attention.pattern"].value          # B H T S
    seen.parameters, seen.flops                       # those of `cost(config, length)`, exactly
    seen.rows(depth=2)                                # stacks and blocks, with sums

The values are those of the model's own forward pass, as its taps show them.

Shapes: see `words.LEGEND`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.core.taps import Listener, listening
from clearhead.core.transformer import evaluating
from clearhead.errors import InputError, nearest, refuse
from clearhead.inside.inputs import AnyModel, Given, InputTokens, Prepared, Target, as_model, prepare_any
from clearhead.inside.trace.legend import LEGEND
from clearhead.inside.trace.steps import (
    KeepValues,
    Peek,
    Prediction,
    Recorder,
    TraceStep,
    answer_steps,
    priced,
)
from clearhead.run.api import Model
from clearhead.variants.costs import Cost, cost

__all__ = ["Peek", "Prediction", "Trace", "TraceRow", "TraceStep", "trace"]


class Sums:
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
            layer not in (None, *layers),
            f"there is no layer {layer}: layers are {layers[0]} to {layers[-1]}",
        )
        rows: list[TraceRow] = []
        open_groups: tuple[str, ...] = ()
        for number, step in enumerate(self.steps):
            limit = 4 if layer is not None and _layer(step) == layer else depth
            for level in range(1, min(len(step.path), limit) + 1):
                group = step.path[:level]
                if open_groups[:level] != group:
                    own = tuple(one for one in self.steps[number:] if one.path[:level] == group)
                    last = group[-1].rpartition(".")[2]
                    title = f"block {last}" if last.isdigit() else last
                    rows.append(TraceRow(group[-1], title, level, own))
            open_groups = step.path
            if step.level <= limit:
                rows.append(TraceRow(step.name, step.title, step.level, (step,)))
        return tuple(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, without the values of steps and the logits."""
        return {
            "tokens": list(self.tokens),
            "source_tokens": list(self.source_tokens),
            "legend": self.legend,
            "totals": self.figures(),
            "difference": self.difference,
            "steps": [step.to_dict() for step in self.steps],
            "groups": [row.to_dict() for row in self.rows(depth=3) if row.step is None],
            "predictions": [prediction.to_dict() for prediction in self.predictions],
        }


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

    Args:
        m: what `load` returned, or a bare model, which takes ids, pixels or numbers.
        given: text or token ids; for other models an image or numbers [T, d_input]. With two stacks, the
            input of the encoder.
        target: what the decoder of two stacks has written so far; None: what it writes greedily.
        pair: the second text of a pair, for an encoder.
        top: number of candidates to show.
        keep_values: keep the tensor of every step, of the named steps, or what a function makes of each;
            other steps keep a summary only.
    """
    m = as_model(m)
    refuse(top < 1, f"top {top} must be 1 or more: it is the number of candidates shown")
    prepared = prepare_any(m, given, target, pair)
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
