"""Record a forward pass step by step, from text to the probabilities of what comes next.

    seen = trace(m, "The cat sat")
    for step in seen.steps: step.name, step.symbols, step.shape, step.why
    seen["blocks.0.attention.pattern"].value          # B H T S
    seen.parameters, seen.flops                       # those of `cost(config, length)`, exactly
    seen.rows(depth=2)                                # stacks and blocks, with sums

The values are those of the model's own forward pass, as its taps show them.

Shapes: see `words.LEGEND`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.api import Model
from clearhead.costs import Cost, cost
from clearhead.errors import InputError, nearest, refuse
from clearhead.hub.pixels import Image
from clearhead.inside.inputs import Prepared
from clearhead.inside.trace.answers import Prediction, answer_steps, probability_of
from clearhead.inside.trace.inputs import input_steps, trace_inputs
from clearhead.inside.trace.rows import Sums, TraceRow, rows_of
from clearhead.inside.trace.steps import Peek, Recorder, TraceStep, priced
from clearhead.inside.trace.words import LEGEND
from clearhead.model.taps import Listener, listening
from clearhead.model.transformer import Transformer, evaluating

__all__ = ["Peek", "Prediction", "Trace", "TraceRow", "TraceStep", "trace"]

ANSWERS = {"lm": "B T V", "mlm": "B T V", "classifier": "B C"}  # shape of the logits; other heads: B T C
POOLING = {"cls": "the first token's state", "mean": "mean over tokens", "last": "the last token's state"}


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
        return rows_of(self.steps, depth, layer)

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
    m: Model | Transformer,
    given: str | Sequence[int] | Tensor | Image,
    target: str | Sequence[int] | None = None,
    pair: str | None = None,
    top: int = 5,
    *,
    keep_values: bool | Collection[str] = True,
) -> Trace:
    """Run one input through the model and return its forward pass as a list of steps.

    Args:
        m: what `load` returned, or a bare model, which takes ids, pixels or numbers.
        given: text or token ids; for other models an image or numbers [T, d_input]. With two stacks, the
            input of the encoder.
        target: what the decoder of two stacks has written so far; None: what it writes greedily.
        pair: the second text of a pair, for an encoder.
        top: number of candidates to show.
        keep_values: keep the tensor of every step, or of the named steps; other steps keep a summary only.
    """
    m = m if isinstance(m, Model) else Model(m)
    refuse(top < 1, f"top {top} must be 1 or more: it is the number of candidates shown")
    prepared = trace_inputs(m, given, target, pair)
    model = m.model
    with torch.no_grad(), evaluating(model):
        expected = prepared.run().required_logits  # first, to warm up before steps are timed
        recorder = Recorder(model.config, _facts(m), keep_values)
        sources = _inputs(recorder, prepared, prepared.source, "encoder.", pair)
        inputs = _inputs(recorder, prepared, prepared.main, "", pair)
        with listening(Listener(model, {}, recorder.hear)):
            logits = prepared.run().required_logits
        predictions = answer_steps(recorder, m, prepared.tokens, logits, top)
    seen = recorder.steps[sources + inputs :]
    first = [step for step in seen if step.name.startswith("encoder.")]
    given_steps = recorder.steps[:sources], recorder.steps[sources : sources + inputs]
    price = _price(prepared)
    steps = priced([*given_steps[0], *first, *given_steps[1], *seen[len(first) :]], price.steps)
    source = prepared.source_tokens.labels if prepared.source_tokens is not None else ()
    difference = float((logits - expected).abs().max())
    return Trace(steps, prepared.tokens.labels, source, predictions, logits.float().cpu(), difference, price)


def _inputs(recorder: Recorder, prepared: Prepared, x: Tensor | None, prefix: str, pair: str | None) -> int:
    """Record how the input became numbers; return the number of steps."""
    before = len(recorder.steps)
    tokens = prepared.source_tokens if prefix else prepared.tokens
    if x is not None and tokens is not None:
        input_steps(recorder, prepared.m, x, tokens, prefix, pair)
    return len(recorder.steps) - before


def _price(prepared: Prepared) -> Cost:
    """Compute the cost of this very pass."""
    lengths = [None if x is None or x.ndim == 4 else x.shape[1] for x in (prepared.main, prepared.source)]
    dtype = str(next(prepared.model.parameters()).dtype).removeprefix("torch.")
    return cost(prepared.model.config, lengths[0], 1, dtype, lengths[1])


def _facts(m: Model) -> dict[str, Any]:
    """Return the values that fill in the formulas."""
    config = m.config
    if config.router_order == "topk_softmax":
        router = "softmax(the chosen)"
    else:
        router = "softmax(all), the chosen" + (" / their sum" if config.router_renormalise else "")
    return {
        "norm": config.norm,
        "activation": config.activation,
        "head_activation": config.head_activation,
        "embedding_scale": f"{config.embedding_scale:.4g}",
        "residual_scale": f"{config.residual_scale:.4g}",
        "logit_scale": f"{config.logit_scale:.4g}",
        "softcap": config.attention_softcap,
        "logit_softcap": config.logit_softcap,
        "qkv_bias": " + b" if config.qkv_bias else "",
        "out_bias": " + b" if config.attention_out_bias else "",
        "feedforward_bias": " + b" if config.feedforward_bias else "",
        "head_bias": " + b" if config.head_bias else "",
        "n_experts": config.n_experts,
        "n_active": config.n_active_experts,
        "router": router,
        "pooling": POOLING[config.readout.pooling],
        "pooler": config.pooler,
        "probability": probability_of(m)[1],
        "answers": ANSWERS.get(config.readout.head, "B T C"),
    }
