"""Shortcuts: what a layer reads of earlier ones, besides the stream that the layer before it left; and what a
token reads of the one before it, before the first layer.

    input_skips         x becomes a·x + b·x0, where x0 is what the first layer read (a, b learned: 1, 0)
    mirror_skips        in the second half, x becomes x + w·y, where y is what the mirrored layer left
                        (layer n - 1 - l of n for layer l), as in a U-Net (w learned: 1)
    value_residual      values become a·v + b·v1, where v1 are those of the first layer (ResFormer; 1/2, 1/2)
    value_embeddings    a table of its own adds a vector for each token to the values of these layers

    smear_gate          x becomes x + s · sigmoid(w · x[:n] + b) · y, with y the embedding before (s: 0 first)
    bigrams             a table adds a vector for the two tokens, in a row found by a hash of both

The token before is the last real one of the same document; the first one has none. A cache keeps both of the
last token, as a short convolution does. All others follow from one token alone, so a
cache keeps what it keeps without them.

Shapes: B batch, T length, D model, K key/value heads, E width of a value head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.core.attention import Attention, attention_class
from clearhead.core.config import StackSpec
from clearhead.core.config.fields import Fields
from clearhead.core.config.kinds import Mistakes
from clearhead.core.dtypes import wide
from clearhead.core.masks import TokenInfo, View
from clearhead.core.taps import SILENT, Tap
from clearhead.variants.caches import LayerState
from clearhead.variants.kinds import ShortConvKind
from clearhead.variants.recurrent import RecurrentState, convolve
from clearhead.variants.steps import INDEX, Pass, Step, linear_step


class Carried:
    """What one pass has kept for later layers."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self.streams: dict[int, Tensor] = {}  # what some layers read, by layer
        self.values: Tensor | None = None  # of the first layer: B K T E


class Shortcut(nn.Module):
    """The shortcuts into one layer."""

    def __init__(self, spec: StackSpec, layer: int) -> None:
        super().__init__()
        n = spec.n_layers
        self.layer = layer
        self.kept = layer in streams_read(spec)
        self.mirrored = n - layer if spec.mirror_skips and layer >= n - n // 2 else None
        self.mirror = None if self.mirrored is None else nn.Parameter(torch.ones(1))
        self.input = nn.Parameter(torch.tensor([1.0, 0.0])) if spec.input_skips and layer else None
        self.first_values = spec.value_residual and layer == 0
        self.values = nn.Parameter(torch.full((2,), 0.5)) if spec.value_residual and layer else None
        width = spec.n_kv_heads * spec.d_value
        self.table = nn.Embedding(spec.vocab_size, width) if layer in spec.value_embeddings else None

    def forward(self, x: Tensor, view: View, carried: Carried, tap: Tap = SILENT) -> tuple[Tensor, View]:
        """Return the stream [B, T, D] that the layer reads, and its view, which changes the values."""
        x = self.stream(x, carried, tap)
        if self.first_values or self.values is not None or self.table is not None:
            view = replace(view, values=partial(self.mix_values, carried, tap))
        return x, view

    def stream(self, x: Tensor, carried: Carried, tap: Tap = SILENT) -> Tensor:
        """Return the stream that the layer reads, from what the layer before it left: [B, T, D]."""
        if self.kept:
            carried.streams[self.layer] = x
        if self.mirror is not None and self.mirrored is not None:
            x = tap.step("mirrored", x + self.mirror * carried.streams[self.mirrored])
        if self.input is not None:
            x = tap.step("mixed", self.input[0] * x + self.input[1] * carried.streams[0])
        return x

    def mix_values(self, carried: Carried, tap: Tap, v: Tensor) -> Tensor:
        """Map the values of a layer [B, K, T, E] to those that it attends to."""
        if self.first_values:
            carried.values = v
        if self.values is not None and carried.values is not None:
            v = tap.step("values", self.values[0] * v + self.values[1] * carried.values)
        if self.table is not None:
            B, K, T, E = v.shape
            rows = tap.step("table", self.table(carried.ids.long()))
            v = tap.step("added", v + rows.view(B, T, K, E).transpose(1, 2).to(v.dtype))
        return v


def streams_read(spec: StackSpec) -> set[int]:
    """Return the layers whose input a later layer reads."""
    mirrored = range(1, spec.n_layers // 2 + 1) if spec.mirror_skips else ()
    return {*mirrored, *((0,) if spec.input_skips else ())}


def steps(spec: StackSpec, run: Pass, name: str, layer: int, rows: int) -> Iterator[Step]:
    """Yield the steps of the shortcuts into a layer on `rows` tokens."""
    n, stream = spec.n_layers, rows * spec.d_model * run.wide
    H, K, E, width = spec.n_heads, spec.n_kv_heads, spec.d_head, spec.n_kv_heads * spec.d_value
    if spec.mirror_skips and layer >= n - n // 2:
        yield Step(f"{name}.mirror", "norms", 1, kept=stream * (2 * layer == n))
    if spec.input_skips and layer:
        yield Step(f"{name}.input", "norms", 2, kept=stream)
    kept = rows * width * run.size
    if spec.value_residual and layer:
        yield Step(f"{name}.values", "attention", 2, kept=kept)
    if layer in spec.value_embeddings:
        # Values are a tensor of their own; where queries and keys are too, what they were cut from goes.
        goes = not spec.value_residual and (spec.positions == "rope" if spec.qk_norm == "none" else run.half)
        kept = -rows * (H + K) * E * run.size if goes else kept * (not (spec.value_residual and layer))
        yield Step(f"{name}.table", "attention", spec.vocab_size * width, kept=kept)


def shortcut_mistakes(config: Fields, stacks: Sequence[StackSpec]) -> Mistakes:
    """Yield what shortcuts do not go with."""
    fields = ("input_skips", "mirror_skips", "value_residual", "value_embeddings")
    name = next(field for field in fields if getattr(config, field))
    for other, present in (
        ("family encoder-decoder", config.family == "encoder-decoder"),
        (f"layer_groups {config.layer_groups}", config.layer_groups is not None),
        (f"loop {config.loop}", config.loop is not None),
        (f"depth_capacity {config.depth_capacity}", min(stacks[0].capacities) < 1),
        (f"n_mtp_layers {config.n_mtp_layers}", config.n_mtp_layers > 0),
    ):
        if present:
            yield f"{name} reads each layer of one stack by its number, and here is {other}: leave one out"
    if not (config.value_residual or config.value_embeddings):
        return
    name = "value_residual" if config.value_residual else "value_embeddings"
    for layer, kind in enumerate(stacks[0].kinds):
        used = config.value_residual or layer in config.value_embeddings
        if used and attention_class(stacks[0], layer) is not Attention:
            yield f"{kind.of_layer(layer)} takes no {name}: choose full or window there, or leave it out"
    if config.pruned_heads:
        yield f"{name} changes the values of all heads, and pruned_heads leaves some out: leave one out"
    if config.value_embeddings and config.input != "tokens":
        yield f"value_embeddings are of tokens, and input is {config.input}: leave them out"
    for layer in config.value_embeddings:
        if not 0 <= layer < config.n_layers:
            last = config.n_layers - 1
            yield f"value_embeddings names layer {layer}, and there are layers 0 to {last}"


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


def previous_steps(spec: StackSpec, run: Pass, name: str, rows: int) -> Iterator[Step]:
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
