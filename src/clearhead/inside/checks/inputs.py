"""Random inputs that fit any model, for the equality suite.

Shapes: B rows, T tokens of the stack that feeds the head, S tokens of the encoder before it, P padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.inside.checks.row import TOLERANCE, Comparison
from clearhead.model.transformer import Output, Transformer

PADDING = 3
SLOW = 50_000_000  # parameters


class Inputs:
    """Seeded inputs: `rows` rows of up to `length` tokens; by default a few, and fewer for a large model."""

    def __init__(
        self, model: Transformer, rows: int | None = None, length: int | None = None, seed: int = 0
    ) -> None:
        slow = sum(weight.numel() for weight in model.parameters()) > SLOW
        rows, length = rows or (2 if slow else 3), length or (8 if slow else 12)
        self.model, self.rows, config = model, rows, model.config
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        generator = torch.Generator().manual_seed(seed)
        table = config.max_positions if config.positions == "learned" else length
        self.length = min(length, table)

        def draw(kind: str, vocab: int, size: int) -> Tensor:
            if kind == "tokens":
                return torch.randint(vocab, (rows, size), generator=generator).to(self.device)
            image = (config.n_channels, *(config.image_size or ()))
            shape = image if kind == "patches" else (size, config.d_input)
            return torch.randn((rows, *shape), generator=generator).to(self.device, self.dtype)

        plan = model.main.spec
        self.kind = plan.input
        self.main = draw(plan.input, plan.vocab_size, self.length)
        self.other = draw(plan.input, plan.vocab_size, self.length)  # for padding and for another future
        typed = config.n_types and plan.input == "tokens"
        self.types = draw("tokens", config.n_types, self.length) if typed else None
        self.source: Tensor | None = None
        self.other_source: Tensor | None = None
        self.source_kind = ""
        if model.encoder is not None and model.decoder is not None:
            front, length = model.encoder.spec, max(self.length - 2, 1)
            self.source_kind = front.input
            self.source, self.other_source = (draw(front.input, front.vocab_size, length) for _ in range(2))

    def of(self, model: Transformer, fewer: int = 0) -> Inputs:
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

        The usual tolerance is the dtype's.
        """
        allowed = TOLERANCE[self.dtype] if tolerance is None else tolerance
        return Comparison(name, compared, partial(run, self, *arguments), allowed, copies, fits)

    @property
    def sequences(self) -> bool:
        """Return whether the main stack reads rows of tokens or vectors, which can be padded."""
        return self.kind in ("tokens", "vectors")

    def given(self, main: Tensor | None = None, rows: slice = slice(None)) -> dict[str, Tensor]:
        """Return what the model is called with."""
        values = {"ids": self.main if main is None else main, "source": self.source, "types": self.types}
        return {name: value[rows] for name, value in values.items() if value is not None}

    def piece(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return what the model is called with for some tokens, when a cache holds the earlier ones."""
        given = self.given()
        source = {"source": given.pop("source")} if "source" in given else {}
        return {**{name: value[:, start:stop] for name, value in given.items()}, **source}

    def output(self, main: Tensor | None = None, rows: slice = slice(None), **options: Any) -> Output:
        """Run the model."""
        output: Output = self.model(**{**self.given(main, rows), **options})
        return output

    def run(self, main: Tensor | None = None, rows: slice = slice(None), **options: Any) -> Tensor:
        """Run the model and return its logits."""
        return self.output(main, rows, **options).required_logits

    def padded(self, side: str) -> tuple[dict[str, Tensor], Tensor]:
        """Return what the model is called with when there is padding, and the places [T] of the real tokens.

        Padding of random content stands left, right or in between ("gaps"), in the source too.
        """
        length = self.length
        slots = _slots(length, side).to(self.device)
        given = {"ids": _with_padding(self.main, self.other, slots), "mask": _mask(self.rows, length, slots)}
        if self.types is not None:
            given["types"] = _with_padding(self.types, self.types.flip(1), slots)
        if self.source is not None and self.other_source is not None:
            given["source"] = self.source
            if self.source_kind in ("tokens", "vectors"):
                places = _slots(self.source.shape[1], side).to(self.device)
                given["source"] = _with_padding(self.source, self.other_source, places)
                given["source_mask"] = _mask(self.rows, self.source.shape[1], places)
        return given, slots


def _slots(length: int, side: str) -> Tensor:
    """Return where real tokens stand among padding: [T]."""
    count = torch.arange(length)
    return {
        "left": count + PADDING,
        "right": count,
        "gaps": count + (count * PADDING + length - 1) // length,
    }[side]


def _mask(rows: int, length: int, slots: Tensor) -> Tensor:
    """Return a mask [B, T + P], True where a real token stands."""
    mask = torch.zeros(rows, length + PADDING, dtype=torch.bool, device=slots.device)
    mask[:, slots] = True
    return mask


def _with_padding(x: Tensor, other: Tensor, slots: Tensor) -> Tensor:
    """Return `x` [B, T, ...] in its slots, and values of `other` in the rest: [B, T + P, ...]."""
    filled = torch.cat([other] * (1 + PADDING), dim=1)[:, : x.shape[1] + PADDING].clone()
    filled[:, slots] = x
    return filled
