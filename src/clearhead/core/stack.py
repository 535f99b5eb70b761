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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks, norms
from clearhead.core.attention import Attention, attention_class, attention_steps
from clearhead.core.cache import Cache, CrossKeys, LayerKeys
from clearhead.core.config import StackSpec
from clearhead.core.config.fields import passing
from clearhead.core.config.kinds import FULL, Kind
from clearhead.core.config.registry import Registry
from clearhead.core.embedding import Embedding, embedding_steps
from clearhead.core.feedforward import feedforward_class
from clearhead.core.masks import PLANS, Tokens
from clearhead.core.positions import POSITIONS
from clearhead.core.steps import Part, Pass, Step, norm_step
from clearhead.core.taps import SILENT, Tap

# What sends only some of the tokens through a layer, where `capacities` ask for it.
ROUTERS: Registry[Any] = Registry({"depth": "clearhead.variants.routing:Router"})


class Residual(nn.Module):
    """What joins one sublayer to the residual stream: norms, dropout and stochastic depth."""

    def __init__(self, spec: StackSpec, reads_other: bool = False) -> None:
        """Build the norms; with `reads_other`, the sublayer reads a norm that stands elsewhere."""
        super().__init__()
        layout, norm, D = spec.norm_position, spec.norm, spec.d_model
        self.before = norms.make_norm(norm, D) if layout in ("pre", "sandwich") and not reads_other else None
        self.inside = norms.make_norm(norm, D) if layout in ("sandwich", "output") else None
        self.after = norms.make_norm(norm, D) if layout == "post" else None
        self.scale, self.dropout, self.skip = spec.residual_scale, spec.dropout, spec.layer_drop

    def read(self, x: Tensor, tap: Tap = SILENT) -> Tensor:
        """Return the input of the sublayer: [B, T, D] -> [B, T, D]."""
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


class Block(nn.Module):
    """One layer. A decoder's differs from an encoder's in its view, and perhaps in having cross-attention."""

    def __init__(self, spec: StackSpec, layer: int) -> None:
        super().__init__()
        name = f"{spec.prefix}blocks.{layer}"
        self.attention = attention_class(spec, layer)(spec, f"{name}.attention", spec.kinds[layer])
        self.attention_residual = Residual(spec, reads_other=layer == 0 and not spec.first_norm)
        self.cross = Attention(spec, f"{name}.cross") if spec.cross else None
        self.cross_residual = Residual(spec) if spec.cross else None
        self.feedforward = feedforward_class(spec, layer)(spec)
        self.parallel = spec.parallel
        self.feedforward_residual = Residual(spec, reads_other=spec.parallel and spec.parallel_norms == 1)
        self.router = ROUTERS["depth"](spec, layer) if spec.capacities[layer] < 1 else None

    def forward(
        self,
        x: Tensor,
        view: masks.View,
        memory: Tensor | None = None,
        cross_view: masks.View | None = None,
        keys: LayerKeys | None = None,
        cross_keys: CrossKeys | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [B, T, D] -> [B, T, D]; cross-attention reads `memory` [B, S, D], or filled `cross_keys`."""
        if self.router is not None and view.partial:
            return cast(Tensor, self.router(x, view, keys, partial(Block.forward, self), tap))
        first, second = tap.part("attention_residual"), tap.part("feedforward_residual")
        x = tap("resid_pre", x)
        read = self.attention_residual.read(x, first)
        attended = self.attention(read, view, None, keys, tap.part("attention"))
        if self.parallel:  # the feed-forward reads the same stream, through the same norm or its own
            if self.feedforward_residual.before is not None:
                read = self.feedforward_residual.read(x, second)
            expanded = self.feedforward(read, tap.part("feedforward"))
            x = self.attention_residual.add(x, attended, first)
            return tap("resid_post", self.feedforward_residual.add(x, expanded, second))
        x = self.attention_residual.add(x, attended, first)
        if self.cross is not None and self.cross_residual is not None and cross_view is not None:
            residual, join = self.cross_residual, tap.part("cross_residual")
            y = self.cross(residual.read(x, join), cross_view, memory, cross_keys, tap.part("cross"))
            x = residual.add(x, y, join)
        x = tap("resid_mid", x)
        expanded = self.feedforward(self.feedforward_residual.read(x, second), tap.part("feedforward"))
        return tap("resid_post", self.feedforward_residual.add(x, expanded, second))


def block_steps(spec: StackSpec, run: Pass, layer: int, tokens: int, memory: int) -> Iterator[Step]:
    """Yield the steps of one layer on rows of `tokens`; cross-attention reads `memory` tokens."""
    name, D, layout = f"{spec.prefix}blocks.{layer}", spec.d_model, spec.norm_position
    if spec.capacities[layer] < 1:
        yield from ROUTERS["depth"].steps(spec, run, name, layer, tokens)
    tokens = passing(spec.capacities[layer], tokens)
    rows, whole = run.batch * tokens, "feedforward" in spec.feedforwards(layer)  # else a mixture
    attend = attention_class(spec, layer).steps(spec, run, f"{name}.attention", tokens, spec.kinds[layer])
    sublayers: dict[Part, Iterator[Step]] = {"attention": attend}
    if spec.cross:
        sublayers["cross"] = attention_steps(spec, run, f"{name}.cross", tokens, memory, FULL, "cross")
    sublayers["feedforward"] = feedforward_class(spec, layer).steps(spec, run, f"{name}.feedforward", rows)
    for part, steps in sublayers.items():
        residual = f"{name}.{part}_residual"
        second = spec.parallel and part == "feedforward"  # it reads the same stream as attention
        shared = second and spec.parallel_norms == 1  # it reads what attention has read
        bare = part == "attention" and layer == 0 and not spec.first_norm
        if layout in ("pre", "sandwich") and not shared and not bare:
            yield norm_step(f"{residual}.before", spec.norm, run, rows, D, input_kept=second)
        if run.half or not shared:
            products = 2 if part == "feedforward" and spec.gated and whole else 1
            yield Step(f"{residual}.read", part, kept=(products if run.half else 1) * rows * D * run.size)
        yield from steps
        if layout in ("sandwich", "output"):
            yield norm_step(f"{residual}.inside", spec.norm, run, rows, D)
        if spec.dropout:
            yield Step(f"{residual}.dropout", part, kept=rows * D)
        if layout == "post":
            yield norm_step(f"{residual}.after", spec.norm, run, rows, D)


@dataclass(frozen=True)
class Memory:
    """The source that cross-attention reads; `hidden` is None once its keys are in the cache."""

    hidden: Tensor | None  # B S D
    tokens: masks.Tokens


class Stack(nn.Module):
    """Embedding, blocks, final norm."""

    copies = 1  # processes that return the same states in training

    def __init__(self, spec: StackSpec, front: nn.Module | None = None) -> None:
        """Build the stack; `front` is the other stack's, where both share a token table."""
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(spec, front)
        self.positions = POSITIONS[spec.positions](spec)
        first = [spec.block_of.index(block) for block in sorted(set(spec.block_of))]  # layer of each block
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in first)
        self.norm = norms.make_norm(spec.norm, spec.d_model) if spec.final_norm else None
        # For long rows of kinds that choose few keys; looked up once, as passes may be compiled.
        self.plan = PLANS["plan"] if any(kind.block_size is not None for kind in spec.kinds) else None

    def layers(self) -> list[Block]:
        """Return the block of each layer; layers that share weights have the same block."""
        blocks = list(self.blocks)
        return cast(list[Block], [blocks[block] for block in self.spec.block_of])

    def forward(
        self,
        inputs: Tensor,
        tokens: masks.Tokens,
        memory: Memory | None = None,
        cache: Cache | None = None,
        types: Tensor | None = None,
        prefix: Tensor | None = None,
        bias: Tensor | None = None,
        input_mask: Tensor | None = None,
        global_mask: Tensor | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map the inputs, described by `tokens`, to hidden states [B, T, D]."""

        def vectors() -> Tensor | None:
            return self.positions.embed(tokens.positions, self.dtype, tap.part("positions"))

        x = self.embedding(inputs, types, vectors, input_mask, tap.part("embedding"))
        x = tap("embedding", x)  # B T D
        if cache is not None:
            cache.begin(tokens)
        views_of = partial(
            self._views, prefix=prefix, bias=bias, dtype=x.dtype, ids=inputs, global_mask=global_mask
        )
        views = views_of(self.spec.whole_kinds, tokens, cache, tap=tap)
        cross_view = self.cross_view(tokens, memory.tokens, x.shape[0]) if memory is not None else None
        for layer, (block, kind) in enumerate(zip(self.layers(), self.spec.kinds)):
            if block.router is not None:
                view, keys = block.router.part(layer, kind, tokens, cache, views_of)
            else:
                view, keys = views[kind], cache.layer(layer, kind) if cache is not None else None
            x = block(
                x,
                view.unrotated() if layer in self.spec.rope_skips else view,
                memory.hidden if memory is not None else None,
                cross_view,
                keys,
                cache.cross_layer(layer) if cache is not None and memory is not None else None,
                tap.part(f"blocks.{layer}"),
            )
        if cache is not None:
            cache.advance()
        return tap("hidden", tap.step("norm", self.norm(x)) if self.norm is not None else x)

    def _views(
        self,
        of: Iterable[Kind],
        tokens: masks.Tokens,
        cache: Cache | None,
        prefix: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        tap: Tap,
        ids: Tensor,
        global_mask: Tensor | None,
    ) -> dict[Kind, masks.View]:
        """Return the view of attention for each kind in `of`; layers of the same kind share it."""
        scheme, at, causal = self.positions, tap.part("positions"), self.spec.causal
        kinds, views = dict.fromkeys(of), {}
        names = {kind: "" if len(kinds) == 1 else f".{kind.reach or kind}" for kind in kinds}  # of steps
        for kind in kinds:
            rotary = scheme.rotary(tokens.positions, kind.reach, at)
            if not kind.chooses:
                views[kind] = masks.View(rotary=rotary, tokens=tokens)
                continue
            queries = kind.describe(tokens, causal, ids, global_mask)
            keys = queries if cache is None else cache.visible(kind)
            relative = scheme.relative(queries.positions, keys.positions, at)

            def biased(queries: Tokens, keys: Tokens, kind: Kind = kind, tap: Tap = SILENT) -> Tensor | None:
                total = scheme.bias(queries.positions, keys.positions, dtype, tap.part("positions"))
                return cast(Tensor | None, kind.with_counts(total, queries, keys, dtype, names[kind], tap))

            def dense(kind: Kind = kind, queries: Tokens = queries, keys: Tokens = keys) -> masks.View:
                total = biased(queries, keys, kind, tap)
                if bias is not None:
                    given = (bias if cache is None else cache.aligned(bias, kind)).to(dtype)
                    total = given if total is None else total + given
                mask, plain = masks.compose(queries, keys, causal=causal, kind=kind, prefix=prefix)
                if tap.traced:
                    whole = masks.spelled_out(mask, plain, queries, keys)
                    mask, plain = tap.step(f"mask{names[kind]}", whole), False
                return masks.View(mask, plain, total)

            plan = None
            if self.plan is not None and prefix is None and bias is None and relative is None:
                plan = None if tap.traced else self.plan(self, queries, keys, kind, dtype, biased)
            view = dense() if plan is None else masks.View(blocks=plan, dense=dense)
            views[kind] = replace(view, rotary=rotary, relative=relative, tokens=queries)
        return views

    def cross_view(self, tokens: Tokens, source: Tokens, batch: int) -> masks.View:
        """Return what cross-attention may see: all real tokens of the source."""
        return masks.View(mask=masks.compose(tokens, source)[0])

    def own(self, x: Tensor, fill: float) -> Tensor:
        """Return of values of each token [B, T] those of the states that a pass in training returns: all.

        A stack that works on some of the tokens gives their values, and `fill` where there is no token.
        """
        return x

    def worked_on(self, mask: Tensor | None) -> Tensor | None:
        """Return which tokens of the latest pass were real, for those that the blocks have worked on: all."""
        return mask

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next(self.parameters()).dtype


def stack_steps(
    spec: StackSpec, run: Pass, length: int, memory: int = 0, shared_front: bool = False
) -> Iterator[Step]:
    """Yield the steps on rows of `length` inputs; the other stack counts the weights of a `shared_front`."""
    tokens, rows = spec.n_tokens(length), run.batch * spec.n_tokens(length)
    positions = POSITIONS[spec.positions].steps(spec, run, f"{spec.prefix}positions", tokens)
    yield from embedding_steps(spec, run, length, positions, shared_front)
    for layer, block in enumerate(spec.block_of):
        for step in block_steps(spec, run, layer, tokens, memory):
            yield step.reused() if block in spec.block_of[:layer] else step
    if spec.final_norm:
        yield norm_step(f"{spec.prefix}norm", spec.norm, run, rows, spec.d_model)
    if spec.prefix and not run.half:  # every cross-attention reads the output of this stack: it is kept once
        yield Step(f"{spec.prefix}hidden", "cross", kept=rows * spec.d_model * run.size)
