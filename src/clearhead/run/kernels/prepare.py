"""The copy of a model that generates: projections fused and, on a CPU, weights packed. It computes the same.

The copy shares the model's weights and adds what it fuses or packs. The model stays as it was. Where the
kernels of `kernels` run, blocks that suit them take one token of each row through these.

Shapes: B batch, T length, D model, N width out.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from clearhead.core import masks, norms, positions
from clearhead.core.attention import Attention
from clearhead.core.cache import LayerKV
from clearhead.core.config.kinds import Full, Kind, Windowed
from clearhead.core.feedforward import ACTIVATIONS, FeedForward
from clearhead.core.heads import LanguageHead
from clearhead.core.masks import View
from clearhead.core.positions import Rotary
from clearhead.core.stack import Block, LayerInputs, Stack, StackCall
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.run.kernels import library
from clearhead.run.kernels import native as in_c
from clearhead.run.kernels.fixed_cache import FixedCache, FixedKV, HeadConfig, MatmulConfig
from clearhead.run.kernels.kernels import (
    MOST_ROWS,
    available,
    materialise,
    step_attend,
    step_linear,
    step_norm,
)
from clearhead.run.kernels.native import NativeStack
from clearhead.run.kernels.native_model import NativeModel
from clearhead.run.kernels.parts import (
    DecodeModel,
    Direct,
    FusedAttention,
    FusedFeedForward,
    JoinedLinear,
    PackedLinear,
    can_pack,
    has_only,
    is_known,
    like,
    original,
    settle,
)
from clearhead.run.kernels.training import OF_TRAINING
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
    `native`: on a CPU, let matmuls of a few rows and blocks that suit it go through `native`, where it runs.
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
    backend: Any = "kernels" if kernels else "torch"
    if plain and native and library.library() is not None:
        backend = "native"
    elif plain and can_pack():
        backend = "packed"
    way = Way(backend, _below_routers(model))
    made: dict[nn.Module, nn.Module] = {}  # a part that occurs twice is built once

    def built(part: nn.Module) -> nn.Module:
        if part not in made:
            fast = part if isinstance(part, Direct) else _replacement(part, way)
            fast = made[part] = fast if then is None else then(fast)
            for name, hooks in vars(fast).items():
                if name.startswith(("_forward", "_backward")):
                    hooks.clear()
            for name, child in list(fast.named_children()):
                setattr(fast, name, built(child))
            settle(fast)
        return made[part]

    return cast(Transformer, built(model).eval())


class Way(NamedTuple):
    """How the parts of a copy compute."""

    backend: Literal["native", "kernels", "packed", "torch"]
    exact: frozenset[nn.Module]  # quantized layers whose rounded inputs could change what a router chooses


def _below_routers(model: Transformer) -> frozenset[nn.Module]:
    """Return the quantized layers of stacks that route tokens, to experts or past layers."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    routed = [it for it in stacks if any(isinstance(part, Experts | Router) for part in it.modules())]
    parts = (part for stack in routed for part in stack.modules())
    return frozenset(part for part in parts if isinstance(part, QuantizedLinear))


def _replacement(part: nn.Module, way: Way) -> nn.Module:
    """Build the replacement of a part, from the model's own modules or fused ones."""
    kind = original(part)
    if isinstance(part, Block):
        return _block(part, way)
    if way.backend == "packed" and kind is JoinedLinear:
        return PackedLinear(cast(nn.Linear, part))
    build = BUILDERS.get((way.backend, kind)) if is_known(part) else None
    if build is None or (isinstance(part, Stack) and build is NativeStack and not in_c.suits_stack(part)):
        return like(part, kind)
    more = {"twice": True} if build is in_c.NativeQuantized and part in way.exact else {}
    new: nn.Module = build(part) if build in MADE_ANEW else like(part, build, **more)
    return new


def _block(block: Block, way: Way) -> nn.Module:
    """Build the replacement of a block: one kernel or one call of C where that suits, else fused parts."""
    if way.backend != "native":
        kernels = way.backend == "kernels"
        return _fused(block, StepBlock if kernels and suits_kernels(block) else original(block), kernels)
    if in_c.suits_native(block) and way.exact.isdisjoint(block.modules()):
        return like(block, in_c.NativeBlock, made_of=(block,))
    return like(block, original(block))


def _fused(block: Block, kind: Any, kernels: bool) -> Block:
    """Build a block of class `kind` in which self-attention and a gated feed-forward are fused."""
    attention, feedforward = block.attention, block.feedforward
    new: Block = like(block, kind)
    if has_only(attention, Attention, FusedAttention.knows):
        layers = (attention.q, attention.k, attention.v)
        if join := joining(layers, kernels):
            widths = [layer.out_features for layer in layers]
            new.attention = like(
                attention, FusedAttention, q=None, k=None, v=None, qkv=join(*layers), widths=widths
            )
    both = (getattr(feedforward, "gate", None), getattr(feedforward, "up", None))
    if has_only(feedforward, FeedForward, FusedFeedForward.knows) and (join := joining(both, kernels)):
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
    if not can_join(*layers):
        return None
    if original(layers[0]) is nn.Linear:
        return JoinedLinear
    return PackedQuantizedLinear if kernels else None


ACTIVATION_NAMES = {function: name for name, function in ACTIVATIONS.items()}
ACTIVATION_NAMES |= {new: ACTIVATION_NAMES[old] for new, old in OF_TRAINING.items()}


def suits_kernels(block: Block) -> bool:
    """Return True if the kernels of one step compute all that a block does."""
    if not is_known(block) or block.cross is not None or block.parallel:
        return False
    for residual in (block.attention_residual, block.feedforward_residual):
        before_alone = residual.inside is None and residual.after is None and residual.scale == 1
        if not isinstance(residual.before, norms.RMSNorm) or not before_alone:
            return False
    attention, feedforward = block.attention, block.feedforward
    head_norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if attention.sink is not None or attention.norm_over == "full":
        return False
    if not all(isinstance(norm, norms.RMSNorm) for norm in head_norms):
        return False
    gate, up, activation = feedforward.gate, feedforward.up, feedforward.activation
    if any(getattr(layer, "smooth", None) is not None for layer in (attention.out, up, feedforward.down)):
        return False
    gated = gate is None or (activation in ACTIVATION_NAMES and can_join(gate, up))
    return gated and can_join(attention.q, attention.k, attention.v)


def can_join(*layers: Any) -> bool:
    """Return True if these layers can be one: quantized by one grid and with inputs as they come, or not."""
    if any(layer is None or not is_known(layer) for layer in layers):
        return False
    if all(original(layer) is nn.Linear for layer in layers):
        return True
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    alike = len({layer.grid for layer in quantized}) == 1 and all(layer.smooth is None for layer in quantized)
    return len(quantized) == len(layers) and alike


class StepStack(Direct, Stack):
    """A stack whose masks and angles are computed once for all layers, also by a compiler."""

    def views(self, kinds: tuple[Kind, ...], call: StackCall) -> dict[Kind, masks.View]:
        """Return what the layers of each kind may see; see `Stack`."""
        views = super().views(kinds, call)
        if not isinstance(call.cache, FixedCache):
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

    def forward(self, x: Tensor, inputs: LayerInputs, tap: Tap = SILENT) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        suits = x.shape[1] == 1 and inputs.view.bias is None and tap is SILENT
        z = self.attended(x, inputs.view, inputs.keys) if suits else None
        if z is None:
            return super().forward(x, inputs, tap)
        attention, feedforward = self.attention, self.feedforward
        assert isinstance(attention, FusedAttention) and isinstance(feedforward, FeedForward)
        x = _linear(z, attention.out, add=x)
        norm = self.feedforward_residual.before
        if isinstance(feedforward, FusedFeedForward):
            post = _normed(x, norm, feedforward.both, feedforward.activation_name)
        else:
            post = feedforward.activation(_normed(x, norm, feedforward.up))
        return _linear(post, feedforward.down, add=x)

    def attended(self, x: Tensor, view: masks.View, keys: LayerKV | None) -> Tensor | None:
        """Attend with one token of each row [B, 1, D] -> [B, 1, H·E]; None where the kernel does not suit."""
        if not isinstance(keys, FixedKV) or view.mask is None:
            return None
        found = (keys.k, keys.v, keys.cache.index, view.mask[:, 0, 0])
        return step_attend(self.projected(x), *found, self.formula(view))

    def projected(self, x: Tensor) -> Tensor:
        """Return packed queries, keys and values: [B, 1, D] -> [B, 1, (H+K)·E + K·Ev]."""
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
        y = step_linear(x.reshape(rows, 1, -1), self.weight, MatmulConfig(self.bias))
        return y.view(*x.shape[:-1], self.out_features)


class StepNorm(Direct, norms.RMSNorm):
    """An RMS norm in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] -> [..., width]."""
        return step_norm(x, self.weight, self.eps, self.unit_offset)


def _normed(x: Tensor, norm: nn.Module | None, layer: nn.Module, gate: str | None = None) -> Tensor:
    """Apply a norm, a linear layer and a gate: [B, 1, D] -> [B, 1, N]."""
    assert isinstance(norm, norms.RMSNorm)
    return _linear(x, layer, scale=norm.weight, eps=norm.eps, unit_offset=norm.unit_offset, gate=gate)


def _linear(x: Tensor, layer: nn.Module, **around: Any) -> Tensor:
    """Apply a linear layer, quantized or not, with what its kernel does `around`: [B, 1, D] -> [B, 1, N]."""
    assert isinstance(layer, PackedQuantizedLinear | nn.Linear)
    weight = layer.codes if isinstance(layer, PackedQuantizedLinear) else layer.weight
    return step_linear(x, weight, MatmulConfig(layer.bias, **around))


def _head_norms(attention: Attention) -> tuple[Tensor | None, Tensor | None, float, bool]:
    """Return the scales [E] of the norms of queries and keys, their eps, and if one is added to both."""
    q, k = attention.q_norm, attention.k_norm
    if not isinstance(q, norms.RMSNorm) or not isinstance(k, norms.RMSNorm):
        return None, None, 0.0, False
    return q.weight, k.weight, q.eps, q.unit_offset


# Quantized layers for a GPU ---------------------------------------------------------------------------------


class PackedQuantizedLinear(Direct):
    """A quantized linear layer; of several, their outputs are concatenated.

    Up to `kernels.MOST_FEW` rows, codes become numbers in registers. For more, such as a prompt's, the weight
    is made first, and the library's matmul is used.
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
        x = x if self.smooth is None else (x * self.smooth).to(x.dtype)
        return step_linear(x, self.codes, MatmulConfig(self.bias))


def _bias_of(layer: QuantizedLinear) -> Tensor:
    if layer.bias is not None:
        return layer.bias.detach()
    return torch.zeros(layer.out_features, dtype=layer.place.dtype, device=layer.place.device)


def few_rows(weight: Codes, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some rows of a quantized weight: ids [n] -> [n, D]."""
    if torch.compiler.is_compiling() or not (weight.words.is_cuda or available(weight.scales)):
        offsets = None if weight.offsets is None else weight.offsets[ids]
        chosen = Codes(weight.bits, weight.columns, weight.words[ids], weight.scales[ids], offsets)
        return chosen.weight(dtype)
    from clearhead.run.kernels import triton_codes

    return triton_codes.spread(weight, dtype, ids)


class PackedQuantizedTable(Direct):
    """A quantized token table."""

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


class StepModel(DecodeModel):
    """A model whose steps with a fixed cache do their bookkeeping in one kernel, where that suits."""

    def decoded(self, ids: Tensor, cache: Any) -> Tensor | None:
        """Return the hidden states of one token of each row [B, 1, D]; None: the kernel does not suit."""
        if not isinstance(cache, FixedCache) or not self._suits(cache):
            return None
        stack, spec = self.main, self.main.spec
        cache.room_for(1)
        x = stack.embedding(ids, None, lambda: None, None, SILENT)  # B 1 D
        views = {}
        for kind in spec.whole_kinds:
            views[kind] = marked(cache, self._angles(cache, kind.reach), kind.reach or 0)
        for layer, (block, kind) in enumerate(zip(stack.layers(), spec.kinds)):
            view = views[kind]
            view = view.unrotated() if layer in spec.rope_skips else view
            x = block(x, LayerInputs(view, cache.layer(layer, kind)))
        cache.advance()
        return x if stack.norm is None else cast(Tensor, stack.norm(x))

    def _suits(self, cache: FixedCache) -> bool:
        """Return True if one kernel computes what the model's own bookkeeping would."""
        spec, kinds = self.main.spec, self.main.spec.whole_kinds
        return (
            self.encoder is None
            and isinstance(self.main, StepStack)
            and spec.input == "tokens"
            and spec.positions == "rope"
            and all(isinstance(kind, Full | Windowed) and not kind.kept_first for kind in kinds)
            and len(kinds) == 1
            and all(block.router is None for block in self.main.layers())
            and isinstance(self.head, LanguageHead)
            and not cache.packed
            and available(next(self.parameters()))
        )

    def _angles(self, cache: FixedCache, reach: int | None) -> Rotary:
        """Return the rotation of every position that the cache has room for, computed once."""
        if reach not in cache.angles:
            every = torch.arange(cache.capacity, device=cache.cursor.device)[None]
            found = cast(Rotary, self.main.positions.rotary(every, reach))
            cache.angles[reach] = Rotary(found.cos.contiguous(), found.sin.contiguous())
        return cache.angles[reach]


def marked(cache: FixedCache, angles: Rotary, reach: int) -> View:
    """Add a token to the fixed cache of each row; return its view: mask and rotary angles."""
    from clearhead.run.kernels import triton_step

    mask, rotary = triton_step.mark(cache, angles, reach)
    return View(mask=mask, rotary=rotary)


# By backend and class: what stands for a part of which everything is known.
BUILDERS: dict[tuple[str, type[nn.Module]], Any] = {
    ("packed", nn.Linear): PackedLinear,
    ("native", nn.Linear): in_c.NativeLinear,
    ("native", QuantizedLinear): in_c.NativeQuantized,
    ("native", QuantizedTable): in_c.NativeTable,
    ("native", Stack): NativeStack,
    ("native", Transformer): NativeModel,
    ("kernels", nn.Linear): StepLinear,
    ("kernels", QuantizedLinear): PackedQuantizedLinear,
    ("kernels", QuantizedTable): PackedQuantizedTable,
    ("kernels", norms.RMSNorm): StepNorm,
    ("kernels", Stack): StepStack,
    ("kernels", Transformer): StepModel,
}
MADE_ANEW = (PackedLinear, in_c.NativeLinear, PackedQuantizedLinear, PackedQuantizedTable)
