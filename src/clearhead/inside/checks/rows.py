"""One row of the equality suite, before it is run (`Comparison`) and after (`Check`), and the random inputs
that rows run a model on.

Shapes: B rows, T tokens of the stack that feeds the head, S tokens of the encoder before it, P padding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.core.dtypes import precise
from clearhead.core.transformer import Output, Transformer
from clearhead.inside.results import Result
from clearhead.variants.kinds import GlobalKind

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
LARGE = 500_000_000  # parameters above which rows that copy the whole model are left out, unless asked for
PADDING = 3
SLOW = 50_000_000  # parameters
# relu(x) + 0.001: where a query is at the floor, its answer turns a thousand times as far as the query, and
# rounding of 3e-7 becomes 3e-4. Half precision, which has more to round, is left at what it has.
FLOORED, FLOORED_MOST = 30, 5e-2


@dataclass(frozen=True)
class Comparison:
    """A comparison that can be made: `run` returns the largest difference."""

    name: str
    compared: str  # what with what, in words
    run: Callable[[], float]
    tolerance: float
    copies: bool = False  # does it make a copy of the whole model?
    fits: bool = True  # does it make sense for this model?


@dataclass(frozen=True)
class Check(Result):
    """A comparison that was made, or was left out."""

    json_names = ("name", "compared", "difference", "tolerance", "seconds", "note", "verdict", "passed")

    name: str
    compared: str  # what with what, in words
    difference: float | None  # the largest, relative to the largest value above 1; None: nothing was compared
    tolerance: float
    seconds: float
    note: str = ""  # why it was left out, or what went wrong
    skipped: bool = False

    @property
    def verdict(self) -> Literal["equal", "differs", "error", "skipped"]:
        """Return "equal" within the tolerance, else "differs", as for NaN; without a difference, why."""
        if self.difference is None:
            return "skipped" if self.skipped else "error"
        return "equal" if self.difference <= self.tolerance else "differs"

    @property
    def passed(self) -> bool:
        """Return whether no fault was found; a row that was skipped found none: see `verdict`."""
        return self.verdict in ("equal", "skipped")


def gap(ours: Tensor, theirs: Tensor, least: float = 1.0) -> float:
    """Return the largest difference, relative to the largest of `theirs` where that is above `least`."""
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = precise(ours.detach()).cpu(), precise(theirs.detach()).cpu()
    return float((ours - theirs).abs().max()) / (max(least, float(theirs.abs().max())) or 1.0)


class Inputs:
    """Seeded inputs: `rows` rows of up to `length` tokens; by default a few, and fewer for a large model."""

    def __init__(
        self, model: Transformer, rows: int | None = None, length: int | None = None, seed: int = 0
    ) -> None:
        config, weight, plan = model.config, next(model.parameters()), model.main.spec
        slow = sum(weight.numel() for weight in model.parameters()) > SLOW
        rows, length = rows or (2 if slow else 3), length or (8 if slow else 12)
        self.model, self.rows, self.kind = model, rows, plan.input
        self.sequences = plan.input in ("tokens", "vectors")  # rows that can be padded
        self.caches = plan.input == "tokens" and config.head == "lm"  # the model can go on from a cache
        self.length = min(length, config.max_positions) if config.bounded else length
        self.device, self.dtype = weight.device, weight.dtype
        generator = torch.Generator().manual_seed(seed)

        def draw(kind: str, vocab: int, size: int) -> Tensor:
            if kind == "tokens":
                return torch.randint(vocab, (rows, size), generator=generator).to(self.device)
            image = (config.n_channels, *config.stacks[0].image_size)
            shape = image if kind == "patches" else (size, config.d_input)
            return torch.randn((rows, *shape), generator=generator).to(self.device, self.dtype)

        # What the model is called with; the others are for padding, and for another future.
        self.main, self.other = (draw(plan.input, plan.vocab_size, self.length) for _ in range(2))
        self.given = {"ids": self.main}
        if plan.n_types:
            self.given["types"] = draw("tokens", plan.n_types, self.length)
        marking = {kind.tokens for kind in plan.kinds if isinstance(kind, GlobalKind)}
        if marking & {"given", "question"}:  # random ids have no question
            self.given["global_mask"] = draw("tokens", 4, self.length) == 0
        self.source_kind = ""
        if model.encoder is not None and model.decoder is not None:
            front, length = model.encoder.spec, max(self.length - 2, 1)
            while front.bounded and front.input != "patches" and front.n_tokens(length) > front.max_positions:
                length //= 2
            self.source_kind = front.input
            self.given["source"] = draw(front.input, front.vocab_size, length)
            self.other_source = draw(front.input, front.vocab_size, length)

    def of(self, model: Transformer, fewer: int = 0) -> "Inputs":
        """Return inputs of the same size for another model, with `fewer` rows less."""
        return Inputs(model, self.rows - fewer, self.length)

    def compare(
        self,
        name: str,
        compared: str,
        run: Callable[..., float],
        *arguments: Any,
        tolerance: float | None = None,
        copies: bool = False,
        fits: bool = True,
    ) -> Comparison:
        """Return a row of the suite; `run` takes these inputs and the arguments.

        The usual tolerance is the dtype's; rounding grows in linear attention with relu features.
        """
        allowed = TOLERANCE[self.dtype] if tolerance is None else tolerance
        if any(
            getattr(kind, "features", "") == "relu"
            for stack in self.model.config.stacks
            for kind in stack.kinds
        ):
            allowed = max(allowed, min(FLOORED * allowed, FLOORED_MOST))
        return Comparison(name, compared, partial(run, self, *arguments), allowed, copies, fits)

    def piece(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return what the model is called with for some tokens, when a cache holds the earlier ones."""
        return {name: x if name == "source" else x[:, start:stop] for name, x in self.given.items()}

    def run(self, model: Callable[..., Any] | None = None, **changes: Any) -> Tensor:
        """Run the model, or another form of it, and return its logits."""
        output: Output = (model or self.model)(**{**self.given, **changes})
        return output.required_logits

    def padded(self, side: str) -> tuple[dict[str, Tensor], Tensor]:
        """Return what the model is called with when there is padding, and the places [T] of the real tokens.

        Padding of random content stands left, right or in between ("gaps"), in the source too.
        """
        given = dict(self.given)
        given["ids"], given["mask"], slots = _padded(self.main, self.other, side)
        for name in {"types", "global_mask"} & given.keys():
            given[name], _, _ = _padded(given[name], given[name].flip(1), side)
        if self.source_kind in ("tokens", "vectors"):
            given["source"], given["source_mask"], _ = _padded(given["source"], self.other_source, side)
        return given, slots


def _padded(x: Tensor, other: Tensor, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` [B, T, ...] among values of `other` [B, T + P, ...], its mask [B, T + P], its places [T]."""
    length, count = x.shape[1], torch.arange(x.shape[1], device=x.device)
    gaps = (count * PADDING + length - 1) // length
    slots = {"left": count + PADDING, "right": count, "gaps": count + gaps}[side]
    filled = torch.cat([other] * (1 + PADDING), dim=1)[:, : length + PADDING].clone()
    filled[:, slots] = x
    mask = torch.zeros(filled.shape[:2], dtype=torch.bool, device=x.device)
    mask[:, slots] = True
    return filled, mask, slots
