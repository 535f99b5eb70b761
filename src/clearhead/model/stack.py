"""The stack: embedding, blocks, final norm. It also makes the view of each layer: mask, bias, rotation.

Shapes: B batch, T query length, S key or source length, D model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from clearhead.config import StackSpec
from clearhead.model.block import Block, block_steps
from clearhead.model.cache import Cache
from clearhead.model.fronts import Embedding, embedding_steps
from clearhead.model.masks import Tokens, View, compose, spelled_out
from clearhead.model.norms import make_norm
from clearhead.model.positions import POSITIONS
from clearhead.model.steps import Pass, Step, norm_step
from clearhead.model.taps import SILENT, Tap


@dataclass(frozen=True)
class Memory:
    """The source that cross-attention reads; `hidden` is None once its keys are in the cache."""

    hidden: Tensor | None  # B S D
    tokens: Tokens


class Stack(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, spec: StackSpec, front: nn.Module | None = None) -> None:
        """Build the stack; `front` is the other stack's, where both share a token table."""
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(spec, front)
        self.positions = POSITIONS[spec.positions](spec)
        first = [spec.block_of.index(block) for block in sorted(set(spec.block_of))]  # layer of each block
        self.blocks = nn.ModuleList(Block(spec, f"{spec.prefix}blocks.{layer}") for layer in first)
        self.norm = make_norm(spec.norm, spec.d_model) if spec.final_norm else None

    def layers(self) -> list[Block]:
        """Return the block of each layer; layers that share weights have the same block."""
        blocks = list(self.blocks)
        return [cast(Block, blocks[block]) for block in self.spec.block_of]

    def forward(
        self,
        inputs: Tensor,
        tokens: Tokens,
        memory: Memory | None = None,
        cache: Cache | None = None,
        types: Tensor | None = None,
        prefix: Tensor | None = None,
        bias: Tensor | None = None,
        input_mask: Tensor | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map the inputs, described by `tokens`, to hidden states [B, T, D]."""

        def place() -> Tensor | None:
            return self.positions.embed(tokens.positions, self.dtype, tap.part("positions"))

        x = tap("embedding", self.embedding(inputs, types, place, input_mask, tap.part("embedding")))  # B T D
        if cache is not None:
            cache.begin(tokens)
        views = self._views(tokens, cache, prefix, bias, x.dtype, tap)
        cross_view = View(mask=compose(tokens, memory.tokens)[0]) if memory is not None else None
        for layer, (block, window) in enumerate(zip(self.layers(), self.spec.windows)):
            unrotated = layer in self.spec.rope_skips
            x = block(
                x,
                replace(views[window], rotary=None) if unrotated else views[window],
                memory.hidden if memory is not None else None,
                cross_view,
                cache.layer(layer, window) if cache is not None else None,
                cache.cross_layer(layer) if cache is not None and memory is not None else None,
                tap.part(f"blocks.{layer}"),
            )
        if cache is not None:
            cache.advance()
        return tap("hidden", tap.step("norm", self.norm(x)) if self.norm is not None else x)

    def _views(
        self,
        tokens: Tokens,
        cache: Cache | None,
        prefix: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        tap: Tap = SILENT,
    ) -> dict[int | None, View]:
        """Return the view of attention for each window; layers with the same window share it."""
        scheme, at, windows = self.positions, tap.part("positions"), dict.fromkeys(self.spec.windows)
        views = {}
        for window in windows:
            keys = tokens if cache is None else cache.visible(window)
            rotary = scheme.rotary(tokens.positions, window, at)
            total = scheme.bias(tokens.positions, keys.positions, dtype, at)
            if bias is not None:
                given = (bias if cache is None else cache.aligned(bias, window)).to(dtype)
                total = given if total is None else total + given
            mask, causal = compose(tokens, keys, causal=self.spec.causal, window=window, prefix=prefix)
            if tap.traced:
                name = "mask" if len(windows) == 1 else f"mask.{window or 'full'}"
                mask, causal = tap.step(name, spelled_out(mask, causal, tokens, keys)), False
            views[window] = View(mask, causal, total, rotary)
        return views

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype


def stack_steps(
    spec: StackSpec, run: Pass, length: int, memory: int = 0, shared_front: bool = False
) -> Iterator[Step]:
    """Yield the steps on rows of `length` inputs; the other stack counts the weights of a `shared_front`."""
    tokens = spec.n_tokens(length)
    rows = run.batch * tokens
    places = POSITIONS[spec.positions].steps(spec, run, f"{spec.prefix}positions", tokens)
    yield from embedding_steps(spec, run, length, places, shared_front)
    for layer, block in enumerate(spec.block_of):
        again = block in spec.block_of[:layer]
        for step in block_steps(spec, run, layer, tokens, memory):
            yield step.reused() if again else step
    if spec.final_norm:
        yield norm_step(f"{spec.prefix}norm", spec.norm, run, rows, spec.d_model)
    if spec.prefix:  # every cross-attention reads the output of this stack, which is kept once
        yield Step(f"{spec.prefix}hidden", "cross", kept=rows * spec.d_model * run.size)
