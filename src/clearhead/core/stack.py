"""The stack: an embedding, blocks, a final norm. It also makes the view of each layer: mask, bias, rotation.

A block is attention, perhaps cross-attention, and a feed-forward, each added to the residual stream. The
residual layouts differ only in where the norm stands:

    pre         x + f(norm(x))                      steady gradients; needs a norm after the last block
    post        norm(x + f(x))                      the original
    sandwich    x + norm'(f(norm(x)))
    output      x + norm'(f(x))
    parallel    x + attention(norm(x)) + feedforward(norm(x))

Shapes: B batch, T query length, S key or source length, D model.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks, norms
from clearhead.core.attention import Attention, attention_class
from clearhead.core.cache import Cache, LayerKV
from clearhead.core.config import StackSpec
from clearhead.core.config.kinds import Kind
from clearhead.core.config.registry import Registry
from clearhead.core.embedding import Embedding
from clearhead.core.feedforward import feedforward_class
from clearhead.core.masks import PLANS, TokenInfo, View
from clearhead.core.positions import POSITIONS
from clearhead.core.taps import SILENT, Tap

# What sends only some of the tokens through a layer, where `capacities` ask for it.
ROUTERS: Registry[Any] = Registry({"depth": "clearhead.variants.routing:Router"})
# What a layer reads of earlier ones besides the stream; what a token reads of the one before it.
AT = "clearhead.variants"
SHORTCUTS: Registry[Any] = Registry({n: f"{AT}.shortcuts:{n}" for n in ("Shortcut", "Carried", "steps")})
PREVIOUS: Registry[Any] = Registry({n: f"{AT}.shortcuts:{n}" for n in ("Previous", "previous_steps")})


class Residual(nn.Module):
    """What joins one sublayer to the residual stream: norms, dropout and stochastic depth."""

    def __init__(self, spec: StackSpec, reads_normed: bool = False) -> None:
        """Build the norms; with `reads_normed`, none before a sublayer whose input is normed already."""
        super().__init__()
        layout, norm, D = spec.norm_position, spec.norm, spec.d_model
        # A norm may stand at three points; each layout uses one or two. Their names are those of parameters
        # in clearhead's own checkpoints.
        self.before = norms.make_norm(norm, D) if layout in ("pre", "sandwich") and not reads_normed else None
        self.inside = norms.make_norm(norm, D) if layout in ("sandwich", "output") else None
        self.after = norms.make_norm(norm, D) if layout == "post" else None
        self.scale, self.dropout, self.skip = spec.residual_scale, spec.dropout, spec.layer_drop

    def norm_input(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Return the input of the sublayer, with pre-norm normed: [B, T, D] -> [B, T, D]."""
        return tap.step("before", self.before(x)) if self.before is not None else x

    def add(self, x: Tensor, y: Tensor, tap: Tap = SILENT) -> Tensor:
        """Add the sublayer's output `y` to the stream `x`: [B, T, D] twice -> [B, T, D]."""
        if self.inside is not None:
            y = tap.step("inside", self.inside(y))
        if self.scale != 1:
            y = tap.step("scaled", y * self.scale)
        if self.training:
            y = nnf.dropout(y, self.dropout)
        if self.training and self.skip:  # some rows skip the sublayer
            y = y * (torch.rand(y.shape[0], 1, 1, device=y.device) >= self.skip) / (1 - self.skip)
        x = tap.step("add", x + y)
        return tap.step("after", self.after(x)) if self.after is not None else x


class LayerInputs(NamedTuple):
    """The inputs of a layer besides the residual stream."""

    view: View
    keys: LayerKV | None = None  # those of earlier tokens, where there is a cache
    memory: Tensor | None = None  # B S D, for cross-attention; None once its keys are cached
    cross_view: View | None = None
    cross_keys: LayerKV | None = None
    carried: Any = None  # of this pass, for the shortcuts between layers


class Block(nn.Module):
    """One layer. A decoder's differs from an encoder's in its view, and perhaps in having cross-attention."""

    def __init__(self, spec: StackSpec, layer: int) -> None:
        super().__init__()
        name = f"{spec.prefix}blocks.{layer}"
        self.attention = attention_class(spec, layer)(spec, f"{name}.attention", spec.kinds[layer])
        bare = (layer == 0 and not spec.first_norm) or spec.kinds[layer].name == "none"
        self.attention_residual = Residual(spec, reads_normed=bare)
        self.cross = Attention(spec, f"{name}.cross") if spec.cross else None
        self.cross_residual = Residual(spec) if spec.cross else None
        self.feedforward = feedforward_class(spec, layer)(spec)
        self.parallel = spec.parallel
        shared = spec.parallel and spec.parallel_norms == 1
        self.feedforward_residual = Residual(spec, reads_normed=shared or not spec.feedforwards(layer))
        self.router = ROUTERS["depth"](spec, layer) if spec.capacities[layer] < 1 else None
        self.shortcut = SHORTCUTS["Shortcut"](spec, layer) if spec.carries else None

    def forward(self, x: Tensor, inputs: LayerInputs, tap: Tap = SILENT) -> Tensor:
        """Map [B, T, D] -> [B, T, D]."""
        view, keys, memory, cross_view, cross_keys, carried = inputs
        if self.router is not None and view.routed:
            # Mixture of depths: the router calls this method again, with the chosen tokens and a plain view.
            return cast(Tensor, self.router(x, view, keys, partial(Block.forward, self), tap))
        first, second = tap.part("attention_residual"), tap.part("feedforward_residual")
        x = tap("resid_pre", x)
        if self.shortcut is not None:
            x, view = self.shortcut(x, view, carried, tap.part("shortcut"))
        normed = self.attention_residual.norm_input(x, first)
        attended = self.attention(normed, view, None, keys, tap.part("attention"))
        if self.parallel:  # the feed-forward reads the same stream, through the same norm or its own
            if self.feedforward_residual.before is not None:
                normed = self.feedforward_residual.norm_input(x, second)
            inner = tap.part("feedforward")
            expanded = self.feedforward(inner("in", normed), inner)
            x = self.attention_residual.add(x, attended, first)
            return tap("resid_post", self.feedforward_residual.add(x, expanded, second))
        x = self.attention_residual.add(x, attended, first)
        if self.cross is not None and self.cross_residual is not None and cross_view is not None:
            residual, join = self.cross_residual, tap.part("cross_residual")
            y = self.cross(residual.norm_input(x, join), cross_view, memory, cross_keys, tap.part("cross"))
            x = residual.add(x, y, join)
        x = tap("resid_mid", x)
        inner = tap.part("feedforward")
        expanded = self.feedforward(inner("in", self.feedforward_residual.norm_input(x, second)), inner)
        return tap("resid_post", self.feedforward_residual.add(x, expanded, second))


class Inputs(NamedTuple):
    """What a call gives one stack; `Transformer.forward` explains each."""

    ids: Tensor  # or pixels, vectors, frames
    mask: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    types: Tensor | None = None
    prefix: Tensor | None = None
    bias: Tensor | None = None
    global_mask: Tensor | None = None
    vectors: Tensor | None = None
    axes: Tensor | None = None


@dataclass(frozen=True)
class Memory:
    """The source that cross-attention reads; `hidden` is None once its keys are in the cache."""

    hidden: Tensor | None  # B S D
    tokens: TokenInfo


class StackCall(NamedTuple):
    """One forward pass of a stack."""

    inputs: Inputs
    tokens: TokenInfo  # that the inputs are
    cache: Cache | None
    dtype: torch.dtype  # of hidden states
    tap: Tap = SILENT


class Stack(nn.Module):
    """Embedding, blocks, final norm."""

    copies = 1  # processes that return the same states in training

    def __init__(self, spec: StackSpec, front: nn.Module | None = None) -> None:
        """Build the stack; `front` is the other stack's, where both share a token table."""
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(spec, front)
        self.positions = POSITIONS["axes" if spec.rope_sections else spec.positions](spec)
        self.previous = PREVIOUS["Previous"](spec) if spec.recalls else None
        first = [spec.block_of.index(block) for block in sorted(set(spec.block_of))]  # layer of each block
        # Parameters are numbered by block, taps by layer: the two differ where layers share weights.
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in first)
        self.norm = norms.make_norm(spec.norm, spec.d_model) if spec.final_norm else None
        # For long rows of kinds that see few keys; looked up once, as passes may be compiled.
        self.plan = PLANS["blocks"] if any(kind.block_size is not None for kind in spec.kinds) else None
        self.carried = SHORTCUTS["Carried"] if spec.carries else None

    def layers(self) -> list[Block]:
        """Return the block of each layer; layers that share weights have the same block."""
        blocks = list(self.blocks)
        return cast(list[Block], [blocks[block] for block in self.spec.block_of])

    def forward(
        self,
        inputs: Inputs,
        tokens: TokenInfo,
        memory: Memory | None = None,
        cache: Cache | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map the inputs, described by `tokens`, to hidden states [B, T, D]."""

        def vectors() -> Tensor | None:
            return self.positions.embed(tokens.positions, self.dtype, tap.part("positions"))

        at = tap.part("embedding")
        x = self.embedding(inputs.ids, inputs.types, vectors, inputs.mask, at, inputs.vectors)
        if cache is not None:
            cache.begin(tokens)
        if self.previous is not None:
            x = self.previous(x, inputs.ids, tokens, cache, tap.part("previous"))
        x = tap("embedding", x)  # B T D
        blocks, call = self.layers(), StackCall(inputs, tokens, cache, x.dtype, tap)
        for layer, (block, layer_inputs) in enumerate(zip(blocks, self.layer_inputs(blocks, call, memory))):
            x = block(x, layer_inputs, tap.part(f"blocks.{layer}"))
        if cache is not None:
            cache.advance()
        return tap("hidden", tap.step("norm", self.norm(x)) if self.norm is not None else x)

    def layer_inputs(self, blocks: list[Block], call: StackCall, memory: Memory | None) -> list[LayerInputs]:
        """Return the inputs of each layer besides the residual stream: its view and its keys and values."""
        views, cache = self.views(self.spec.whole_kinds, call), call.cache
        hidden = cross_view = None
        carried = self.carried(call.inputs.ids) if self.carried is not None else None
        if memory is not None:
            hidden = memory.hidden
            cross_view = self.cross_view(call.tokens, memory.tokens, call.inputs.ids.shape[0])
        layers = []
        for layer, (block, kind) in enumerate(zip(blocks, self.spec.kinds)):
            if block.router is not None:
                view, keys = block.router.part(layer, kind, call, self.views)
            else:
                view, keys = views[kind], cache.layer(layer, kind) if cache is not None else None
            if layer in self.spec.rope_skips:
                view = view.unrotated()
            source = cache.cross_layer(layer) if cache is not None and memory is not None else None
            layers.append(LayerInputs(view, keys, hidden, cross_view, source, carried))
        return layers

    def views(self, kinds: tuple[Kind, ...], call: StackCall) -> dict[Kind, View]:
        """Return what the layers of each of these kinds of attention may see."""
        return {
            kind: self.view(kind, "" if len(kinds) == 1 else f".{kind.reach or kind}", call) for kind in kinds
        }

    def view(self, kind: Kind, name: str, call: StackCall) -> View:
        """Return what layers of one kind may see: mask, bias and rotation; `name` ends the names of steps."""
        inputs, tokens, cache, dtype, tap = call
        scheme, at, causal = self.positions, tap.part("positions"), self.spec.causal
        rotary = scheme.rotary(tokens.positions if tokens.axes is None else tokens.axes, kind.reach, at)
        if not kind.masked:
            return View(rotary=rotary, tokens=tokens)
        queries = kind.describe(tokens, causal, inputs.ids, inputs.global_mask)
        keys = queries if cache is None else cache.visible(kind)
        relative = scheme.relative(queries.positions, keys.positions, at)

        def bias_of(queries: TokenInfo, keys: TokenInfo, tap: Tap = SILENT) -> Tensor | None:
            total = scheme.bias(queries.positions, keys.positions, dtype, tap.part("positions"))
            return cast(Tensor | None, kind.with_counts(total, queries, keys, dtype, name, tap))

        def dense() -> View:
            total = bias_of(queries, keys, tap)
            if inputs.bias is not None:
                own = (inputs.bias if cache is None else cache.aligned(inputs.bias, kind)).to(dtype)
                total = own if total is None else total + own
            mask, is_causal = masks.compose(queries, keys, causal=causal, kind=kind, prefix=inputs.prefix)
            if tap.traced:
                mask = tap.step(f"mask{name}", masks.spelled_out(mask, is_causal, queries, keys))
                is_causal = False
            return View(mask, is_causal, total)

        plan = None
        by_pairs = (inputs.prefix, inputs.bias, relative)  # what needs a mask over all pairs of tokens
        if self.plan is not None and not tap.traced and all(extra is None for extra in by_pairs):
            plan = self.plan(self, queries, keys, kind, dtype, bias_of)
        view = dense() if plan is None else View(blocks=plan, dense=dense)
        return replace(view, rotary=rotary, relative=relative, tokens=queries)

    def cross_view(self, tokens: TokenInfo, source: TokenInfo, batch: int) -> View:
        """Return what cross-attention may see: all real tokens of the source."""
        return View(mask=masks.compose(tokens, source)[0])

    # Hooks, like `copies`, for training with the tokens of a row split over processes; here nothing is split.

    def own(self, x: Tensor, fill: float) -> Tensor:
        """Return the values [B, T] of the tokens of this process, filled up with `fill`."""
        return x

    def worked_on(self, mask: Tensor | None) -> Tensor | None:
        """Return which tokens of this process were real in the latest pass."""
        return mask

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype
