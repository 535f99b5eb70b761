"""What a token reads of the one before it, ahead of the first layer.

    smear_gate      x becomes x + s · sigmoid(w · x[:n] + b) · y, with y the embedding before (s: 0 first)
    bigrams         a table adds a vector for the two tokens, in a row found by a hash of both

The token before is the last real one of the same document; the first one has none. A cache keeps both of the
last token, as a short convolution does.

Shapes: B batch, T length, D model.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core.config import StackSpec
from clearhead.core.config.fields import Fields
from clearhead.core.config.kinds import Mistakes
from clearhead.core.dtypes import wide
from clearhead.core.masks import TokenInfo
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.caches import LayerState
from clearhead.variants.kinds import ShortConvKind
from clearhead.variants.recurrent import RecurrentState, convolve
from clearhead.variants.steps import INDEX, Pass, Step, linear_step

KIND = ShortConvKind(kernel=2)  # how a cache keeps the last token
FACTOR = 1_000_003  # of the token before, in the hash


class Previous(nn.Module):
    """Adds to the embedding of each token what the token before it says."""

    def __init__(self, spec: StackSpec) -> None:
        super().__init__()
        self.layer, self.columns, self.rows = spec.n_layers, spec.smear_gate, spec.bigrams
        self.gate = nn.Linear(self.columns, 1) if self.columns else None
        self.share = nn.Parameter(torch.zeros(1)) if self.columns else None
        self.table = nn.Embedding(self.rows, spec.d_model) if self.rows else None

    def forward(self, x: Tensor, ids: Tensor, tokens: TokenInfo, cache: Any, tap: Tap = SILENT) -> Tensor:
        """Map the embedding [B, T, D] of these ids to what the first layer reads."""
        # Ids are counted from 1, so that 0 says that there is none.
        parts = [wide(x)] if self.columns else []
        parts += [(ids[..., None] + 1).to(wide(x).dtype)] if self.rows else []
        read = torch.cat(parts, dim=-1)
        keys = None if cache is None else cache.layer(self.layer, KIND)
        state = None
        if isinstance(keys, LayerState):
            state = RecurrentState()
            for name, kept in zip(("tail", "document"), keys.state):
                setattr(state, name, kept)
        shift = torch.eye(2, device=x.device, dtype=read.dtype)[:1].expand(read.shape[-1], 1, 2)
        before, _ = convolve(read, shift, tokens.real, tokens.documents, state, bend=None)
        if isinstance(keys, LayerState) and state is not None:
            keys.keep(*(kept for kept in (state.tail, state.document) if kept is not None))
        if self.gate is not None and self.share is not None:
            opened = tap.step("gate", self.gate(x[..., : self.columns])).sigmoid()
            y = tap.step("before", before[..., : x.shape[-1]].to(x.dtype))
            x = tap.step("smeared", x + self.share * opened * y)
        if self.table is not None:
            hashed = (before[..., -1].long() * FACTOR + ids) % self.rows
            x = tap.step("paired", x + tap.step("pairs", self.table(hashed)))
        return x


def last_shape(spec: StackSpec) -> tuple[int, int]:
    """Return the shape of what a cache keeps of the last token of a row."""
    return 1, spec.d_model * bool(spec.smear_gate) + bool(spec.bigrams)


def steps(spec: StackSpec, run: Pass, name: str, rows: int) -> Iterator[Step]:
    """Yield the steps on `rows` tokens."""
    if spec.smear_gate:
        n, y = spec.smear_gate, rows * (spec.d_model + bool(spec.bigrams)) * run.wide
        read = rows * n * run.size if run.half else rows * spec.d_model * run.wide
        yield linear_step(f"{name}.gate", "embedding", rows, n, 1, bias=True, kept=read + rows * run.size)
        yield Step(f"{name}.share", "embedding", 1, kept=y + rows * run.wide)
    if spec.bigrams:
        yield Step(f"{name}.table", "embedding", spec.bigrams * spec.d_model, kept=rows * INDEX)


def previous_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Mistakes:
    """Yield what does not go with reading the token before."""
    name = "smear_gate" if config.smear_gate else "bigrams"
    for other, present in (
        ("family encoder-decoder", config.family == "encoder-decoder"),
        (f"input {config.input}", config.input != "tokens"),
        (f"n_mtp_layers {config.n_mtp_layers}", config.n_mtp_layers > 0),
    ):
        if present:
            yield f"{name} reads the token before, in one stack of tokens, and here is {other}: leave one out"
    if config.smear_gate > config.d_model:
        yield f"smear_gate {config.smear_gate} reads so many of the {config.d_model} columns: choose fewer"
