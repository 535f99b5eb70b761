"""The copy of a model that generates: projections fused and, on a CPU, weights packed. It computes the same.

The copy shares the model's weights and adds what it fuses or packs. The model stays as it was. Where the
kernels of `kernels` run, blocks that suit them take one token of each row through these.

Shapes: B batch, T length, D model, N width out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from clearhead.core import masks, norms, positions
from clearhead.core.attention import Attention
from clearhead.core.cache import Cache, CrossKeys, LayerKeys
from clearhead.core.config.kinds import Full, Kind, Windowed
from clearhead.core.feedforward import ACTIVATIONS, FeedForward
from clearhead.core.heads import LanguageHead
from clearhead.core.masks import View
from clearhead.core.positions import Rotary
from clearhead.core.stack import Block, Residual, Stack
from clearhead.core.taps import SILENT, Tap, tap_for
from clearhead.core.transformer import Output, Transformer
from clearhead.errors import refuse
from clearhead.run.kernels import library
from clearhead.run.kernels import native as in_c
from clearhead.run.kernels.fixed_cache import FixedCache, FixedKeys, HeadConfig
from clearhead.run.kernels.kernels import (
    MOST_ROWS,
    available,
    materialise,
    step_attend,
    step_linear,
    step_norm,
)
from clearhead.run.kernels.native import NativeStack
from clearhead.run.kernels.parts import (
    Direct,
    FusedAttention,
    FusedFeedForward,
    JoinedLinear,
    PackedLinear,
    can_pack,
    direct,
    like,
)
from clearhead.run.kernels.training import OF_TRAINING, all_known, original
from clearhead.run.kernels.transpose import lay_out_rows
from clearhead.run.quant.grid import Codes, laid
from clearhead.run.quant.layers import QuantizedLinear, QuantizedTable
from clearhead.variants.routing import Experts, Router


def prepared(
    model: Transformer,
    kernels: bool | None = None,
    then: Callable[[nn.Module], nn.Module] | None = None,
    native: bool = True,
) -> Transformer:
    """Return the copy, in eval mode and without the model's hooks.

    It is valid while the model has the same parts and parameters; after their values change, `refresh` it.
    Matrices of the model that lie in columns, as GPT-2's files hold them, are laid out in rows first.

    `kernels`: let blocks that suit them take each token through the kernels of a step; None: where those run.
    `native`: on a CPU, let products of a few rows and blocks that suit it go through `native`, where it runs.
    `then` takes each part of the copy, before the parts within it, and returns what stands in its place.
    """
    in_rows, weight = lay_out_rows(model), next(model.parameters())  # the order that kernels read
    refuse(
        bool(kernels) and not in_rows,
        "this model was trained with weights that lie in columns, which kernels do not read: "
        "save it and load it again",
    )
    kernels = available(weight) and in_rows if kernels is None else kernels
    native = native and in_rows
    plain = not kernels and weight.device.type == "cpu" and weight.dtype == torch.float32
    compiled = plain and native and library.library() is not None
    way = Way(kernels, compiled, packs=plain and not compiled and can_pack(), exact=_below_routers(model))
    made: dict[nn.Module, nn.Module] = {}  # a part that occurs twice is built once

    def built(part: nn.Module) -> nn.Module:
        if part not in made:
            fast = part if isinstance(part, Direct) else _replacement(part, way)
            fast = made[part] = fast if then is None else then(fast)
            for name, child in list(fast.named_children()):
                setattr(fast, name, built(child))
            if isinstance(fast, Direct):
                fast.settle()
        return made[part]

    return cast(Transformer, built(model).eval())


class Way(NamedTuple):
    """How the parts of a copy compute."""

    kernels: bool
    native: bool
    packs: bool
    exact: frozenset[nn.Module]  # quantized layers whose rounded inputs could change what a router chooses


def _below_routers(model: Transformer) -> frozenset[nn.Module]:
    """Return the quantized layers of stacks that route tokens, to experts or past layers."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    routed = [one for one in stacks if any(isinstance(part, Experts | Router) for part in one.modules())]
    parts = (part for stack in routed for part in stack.modules())
    return frozenset(part for part in parts if isinstance(part, QuantizedLinear))


def _replacement(part: nn.Module, way: Way) -> nn.Module:
    """Build what stands for a part; the parts within it are still those of the model, or fused from them."""
    kind: Any = original(part)
    if way.native and kind is nn.Linear:
        return in_c.NativeLinear(cast(nn.Linear, part))
    if way.native and kind is QuantizedLinear:
        return like(part, in_c.NativeQuantizedTwice if part in way.exact else in_c.NativeQuantized)
    if way.kernels and kind is QuantizedLinear:
        return PackedQuantizedLinear(cast(QuantizedLinear, part))
    if way.kernels and kind is QuantizedTable:
        return PackedQuantizedTable(cast(QuantizedTable, part))
    if way.packs and isinstance(part, nn.Linear):
        return PackedLinear(part)
    if way.kernels and kind is nn.Linear:
        return like(part, StepLinear)
    if way.native and kind is Stack:
        return like(part, NativeStack)
    if way.kernels and kind is Transformer:
        return like(part, StepModel)
    if way.kernels and isinstance(part, Stack):
        return like(part, StepStack)
    if way.kernels and kind is norms.RMSNorm:
        return like(part, StepNorm)
    if isinstance(part, Block) and way.native:
        suits = in_c.suits_native(part) and way.exact.isdisjoint(part.modules())
        return cast(nn.Module, like(part, in_c.NativeBlock if suits else direct(kind)))
    if isinstance(part, Block):
        return _fused(part, StepBlock if way.kernels and suits_kernels(part) else direct(kind), way.kernels)
    return cast(nn.Module, like(part, kind if kind is nn.ModuleList else direct(kind)))


def _fused(block: Block, kind: type[Block], kernels: bool) -> Block:
    """Build a block of class `kind` in which self-attention and a gated feed-forward are fused."""
    attention, feedforward, new = block.attention, block.feedforward, like(block, kind)
    if isinstance(attention, Attention) and original(attention) is Attention:
        layers = (attention.q, attention.k, attention.v)
        if join := joining(layers, kernels):
            widths = [layer.out_features for layer in layers]
            new.attention = like(
                attention, FusedAttention, q=None, k=None, v=None, qkv=join(*layers), widths=widths
            )
    gate = getattr(feedforward, "gate", None)
    both = (gate, getattr(feedforward, "up", None))
    if isinstance(feedforward, FeedForward) and gate is not None and (join := joining(both, kernels)):
        new.feedforward = like(
            feedforward,
            FusedFeedForward,
            gate=None,
            up=None,
            both=join(*both),
            activation_name=ACTIVATION_NAMES.get(feedforward.activation),
        )
    return new


def joining(layers: Sequence[Any], kernels: bool) -> Callable[..., nn.Module] | None:
    """Return what makes one layer of these; None where they stay as they are."""
    if all(isinstance(layer, nn.Linear) for layer in layers):
        return JoinedLinear
    return PackedQuantizedLinear if kernels and can_join(*layers) else None


# All that the kernels compute, by class and attribute. A block with anything more, such as an option added
# later, keeps its own forward.
KNOWN: dict[type[nn.Module], set[str]] = {
    Block: {"attention", "attention_residual", "feedforward", "feedforward_residual"},
    Residual: {"before", "scale", "dropout", "skip"},
    norms.RMSNorm: {"weight", "eps", "unit_offset"},
    Attention: {"q", "k", "v", "out", "heads", "pruned", "n_heads", "n_kv_heads", "d_head", "d_value"}
    | {"scale", "softcap", "layout", "norm_over", "dropout", "kernel", "q_norm", "k_norm"},
    FeedForward: {"gate", "up", "down", "activation", "dropout"},
    nn.Linear: {"weight", "bias", "in_features", "out_features"},
    QuantizedLinear: {"codes", "scales", "offsets", "bias", "place", "grid", "in_features", "out_features"},
}
ACTIVATION_NAMES = {function: name for name, function in ACTIVATIONS.items()}
ACTIVATION_NAMES |= {new: ACTIVATION_NAMES[old] for new, old in OF_TRAINING.items()}


def suits_kernels(block: Block) -> bool:
    """Return True if the kernels of one step compute all that this block does."""
    feedforward, residuals = block.feedforward, (block.attention_residual, block.feedforward_residual)
    return (
        all_known(block, KNOWN)
        and all(residual.before is not None and residual.scale == 1 for residual in residuals)
        and isinstance(feedforward, FeedForward)
        and getattr(block.attention, "norm_over", "none") != "full"
        and (feedforward.gate is None or feedforward.activation in ACTIVATION_NAMES)
        and joining((block.attention.q, block.attention.k, block.attention.v), True) is not None
        and (feedforward.gate is None or joining((feedforward.gate, feedforward.up), True) is not None)
    )


class StepStack(Direct, Stack):
    """A stack whose masks and angles are computed once for all layers, also by a compiler."""

    def _views(
        self, of: Iterable[Kind], tokens: masks.Tokens, cache: Cache | None, *more: Any, **named: Any
    ) -> dict[Kind, masks.View]:
        views = super()._views(of, tokens, cache, *more, **named)
        if not isinstance(cache, FixedCache):
            return views
        return {
            kind: replace(
                view,
                mask=None if view.mask is None else materialise(view.mask),
                bias=None if view.bias is None else materialise(view.bias),
                rotary=None if view.rotary is None else positions.Rotary(*map(materialise, view.rotary)),
            )
            for kind, view in views.items()
        }


class StepBlock(Direct, Block):
    """A block that `suits_kernels`: they take one token with a fixed cache, and `Block` takes all else."""

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
        """[B, T, D] -> [B, T, D]."""
        suits = x.shape[1] == 1 and view.bias is None and tap is SILENT
        z = self.attended(x, view, keys) if suits else None
        if z is None:
            return super().forward(x, view, memory, cross_view, keys, cross_keys, tap)
        attention, feedforward = self.attention, self.feedforward
        assert isinstance(attention, FusedAttention) and isinstance(feedforward, FeedForward)
        x = step_linear(z, *weights_of(attention.out), add=x)
        norm = self.feedforward_residual.before
        if isinstance(feedforward, FusedFeedForward):
            post = _normed(x, norm, feedforward.both, feedforward.activation_name)
        else:
            post = feedforward.activation(_normed(x, norm, feedforward.up))
        return step_linear(post, *weights_of(feedforward.down), add=x)

    def attended(self, x: Tensor, view: masks.View, keys: LayerKeys | None) -> Tensor | None:
        """Attend with one token of each row [B, 1, D] -> [B, 1, H·E]; None where the kernel does not suit."""
        if not isinstance(keys, FixedKeys) or view.mask is None:
            return None
        found = (keys.k, keys.v, keys.cache.index, view.mask[:, 0, 0])
        return step_attend(self.projected(x), *found, self.formula(view))

    def projected(self, x: Tensor) -> Tensor:
        """Return queries, keys and values side by side: [B, 1, D] -> [B, 1, (H+K)·E + K·Ev]."""
        assert isinstance(self.attention, FusedAttention)
        return _normed(x, self.attention_residual.before, self.attention.qkv)

    def formula(self, view: masks.View) -> HeadConfig:
        """Return how this block attends, as the kernels of attention are told."""
        attention = cast(Attention, self.attention)
        return HeadConfig(
            None if view.rotary is None else view.rotary.cos,
            None if view.rotary is None else view.rotary.sin,
            attention.layout,
            attention.n_heads,
            attention.d_head**-0.5 if attention.scale is None else attention.scale,
            attention.softcap,
            *_head_norms(attention),
        )


class StepLinear(Direct, nn.Linear):
    """A linear layer that takes a row or two through one kernel, such as the head."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        rows = x.numel() // self.in_features
        if torch.compiler.is_compiling() or not 0 < rows <= MOST_ROWS or not available(x):
            return super().forward(x)
        y = step_linear(x.reshape(rows, 1, -1), self.weight, self.bias)
        return y.view(*x.shape[:-1], self.out_features)


class StepNorm(Direct, norms.RMSNorm):
    """An RMS norm in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] -> [..., width]."""
        return step_norm(x, self.weight, self.eps, self.unit_offset)


def _normed(x: Tensor, norm: nn.Module | None, layer: nn.Module, gate: str | None = None) -> Tensor:
    """Apply a norm, a linear layer and a gate: [B, 1, D] -> [B, 1, N]."""
    assert isinstance(norm, norms.RMSNorm)
    return step_linear(x, *weights_of(layer), norm.weight, norm.eps, norm.unit_offset, gate)


def weights_of(layer: nn.Module) -> tuple[Tensor | Codes, Tensor | None]:
    """Return the weight of a linear layer, of few bits or not, and its bias."""
    if isinstance(layer, PackedQuantizedLinear):
        return layer.codes, layer.bias
    assert isinstance(layer, nn.Linear)
    return layer.weight, layer.bias


def _head_norms(attention: Attention) -> tuple[Tensor | None, Tensor | None, float, bool]:
    """Return the scales [E] of the norms of queries and keys, their eps, and if one is added to both."""
    q, k = attention.q_norm, attention.k_norm
    if not isinstance(q, norms.RMSNorm) or not isinstance(k, norms.RMSNorm):
        return None, None, 0.0, False
    return q.weight, k.weight, q.eps, q.unit_offset


# Quantized layers for a GPU ---------------------------------------------------------------------------------


def can_join(*layers: nn.Module | None) -> bool:
    """Return True if these layers can be one: of one grid, and with inputs as they come."""
    few = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    alike = len({layer.grid for layer in few}) == 1 and not any(layer.smooth is not None for layer in few)
    return len(few) == len(layers) and alike


class PackedQuantizedLinear(Direct):
    """A linear layer of few bits; of several, their outputs are concatenated.

    Up to `kernels.MOST_FEW` rows, codes become numbers in registers. For more, such as a prompt's, the weight
    is made first, and the library's product is used.
    """

    def __init__(self, *layers: QuantizedLinear) -> None:
        super().__init__()
        first, biased = layers[0], any(layer.bias is not None for layer in layers)
        self.codes = laid([layer.made for layer in layers])
        self.smooth = first.smooth
        self.bias = torch.cat([_bias_of(layer) for layer in layers]) if biased else None
        self.in_features, self.out_features = first.in_features, len(self.codes.words)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        return step_linear(x if self.smooth is None else (x * self.smooth).to(x.dtype), self.codes, self.bias)


def _bias_of(layer: QuantizedLinear) -> Tensor:
    if layer.bias is not None:
        return layer.bias.detach()
    return torch.zeros(layer.out_features, dtype=layer.place.dtype, device=layer.place.device)


def few_rows(weight: Codes, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some rows of a weight of few bits: ids [n] -> [n, D]."""
    if torch.compiler.is_compiling() or not (weight.words.is_cuda or available(weight.scales)):
        offsets = None if weight.offsets is None else weight.offsets[ids]
        chosen = Codes(weight.bits, weight.columns, weight.words[ids], weight.scales[ids], offsets)
        return chosen.weight(dtype)
    from clearhead.run.kernels import triton_codes

    return triton_codes.spread(weight, dtype, ids)


class PackedQuantizedTable(Direct):
    """A token table of few bits."""

    def __init__(self, table: QuantizedTable) -> None:
        super().__init__()
        self.codes, self.smooth, self.dtype = laid([table.made]), table.smooth, table.place.dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        rows = few_rows(self.codes, ids.flatten(), self.dtype)
        rows = rows if self.smooth is None else (rows * self.smooth).to(self.dtype)
        return rows.view(*ids.shape, self.codes.columns)


# A decoder with few small kernels ---------------------------------------------------------------------------
#
# The model's own way writes down order, positions and padding of the new token, and computes masks and
# angles, in some forty operations, whatever the number of rows. Where each takes a kernel, that is a tenth of
# a step.


class StepModel(Direct, Transformer):
    """A model whose steps with a fixed cache do their bookkeeping in one kernel, where that suits."""

    def forward(
        self,
        ids: Tensor,
        *more: Any,
        cache: Any = None,
        logits: Literal["all", "last", "none"] = "all",
        **named: Any,
    ) -> Output:
        """Run the model; see `Transformer.forward`."""
        if more or named or not self._suits(ids, cache):
            named |= {"logits": logits} if cache is None else {"logits": logits, "cache": cache}
            return super().forward(ids, *more, **named)
        stack, spec = self.main, self.main.spec
        cache.room_for(1)
        x = stack.embedding(ids, None, lambda: None, None, SILENT)  # B 1 D
        views = {}
        for kind in spec.whole_kinds:
            views[kind] = marked(cache, self._angles(cache, kind.reach), kind.reach or 0)
        for layer, (block, kind) in enumerate(zip(stack.layers(), spec.kinds)):
            view = views[kind]
            turned = view.unrotated() if layer in spec.rope_skips else view
            x = block(x, turned, keys=cache.layer(layer, kind))
        cache.advance()
        hidden = x if stack.norm is None else stack.norm(x)
        return Output(None if logits == "none" else self.head(hidden, None), hidden)

    def _suits(self, ids: Tensor, cache: object) -> bool:
        """Return True if one kernel computes what the model's own bookkeeping would."""
        if torch.compiler.is_compiling() or not isinstance(cache, FixedCache) or self.encoder is not None:
            return False
        spec, kinds = self.main.spec, self.main.spec.whole_kinds
        plain = all(isinstance(kind, Full | Windowed) and not kind.kept_first for kind in kinds)
        return (
            ids.shape[1] == 1
            and spec.input == "tokens"
            and spec.positions == "rope"
            and plain
            and len(kinds) == 1
            and all(block.router is None for block in self.main.layers())
            and isinstance(self.head, LanguageHead)
            and not cache.packed
            and available(next(self.parameters()))
            and tap_for(self) is SILENT
        )

    def _angles(self, cache: FixedCache, reach: int | None) -> Rotary:
        """Return the rotation of every position that the cache has room for, computed once."""
        if reach not in cache.angles:
            every = torch.arange(cache.capacity, device=cache.cursor.device)[None]
            found = cast(Rotary, self.main.positions.rotary(every, reach))
            cache.angles[reach] = Rotary(found.cos.contiguous(), found.sin.contiguous())
        return cache.angles[reach]


def marked(cache: FixedCache, angles: Rotary, reach: int) -> View:
    """Put one more token into the slots of each row; return what it sees and how it is turned."""
    from clearhead.run.kernels import triton_step

    mask, rotary = triton_step.mark(cache, angles, reach)
    return View(mask=mask, rotary=rotary)
