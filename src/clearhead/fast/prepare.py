"""A copy of a model that runs faster here and computes the same: projections fused, and on a CPU weights packed.

The copy shares the model's own weights and adds what it packs or fuses; the model itself is left alone.
"""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.fast.kernels import available, held, step_attend, step_linear
from clearhead.model.attention import Attention
from clearhead.model.block import Block
from clearhead.model.cache import Cache, CrossKeys, LayerKeys
from clearhead.model.feedforward import FeedForward
from clearhead.model.fixed_cache import FixedCache, FixedKeys
from clearhead.model.masks import Tokens, View
from clearhead.model.norms import RMSNorm
from clearhead.model.rope import Rotary
from clearhead.model.taps import SILENT, Tap
from clearhead.model.stack import Stack
from clearhead.model.transformer import Transformer

# With one row, a product reads each weight once and packing gains nothing; with many, the plain product packs as it goes.
PACKED_ROWS = range(2, 65)


class PackedLinear(nn.Module):
    """A linear layer that keeps its weight a second time, laid out for a few rows at once."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.packed: Tensor | None = None  # made when first used
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.numel() // self.in_features not in PACKED_ROWS:
            return nnf.linear(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS.start)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.reshape(-1, self.in_features), self.packed, self.bias, "none", [], ""
        )
        return out.view(*x.shape[:-1], self.out_features)


class FusedAttention(Attention):
    """Self-attention whose queries, keys and values come from one product."""

    qkv: nn.Module
    widths: list[int]

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] -> [B, T, H·E], [B, T, K·E], [B, T, K·E]."""
        q, k, v = torch.split_with_sizes(self.qkv(x), self.widths, dim=-1)
        return q, k, v


class FusedFeedForward(FeedForward):
    """A gated feed-forward whose gate and up come from one product."""

    both: nn.Module

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> [B, T, F] twice."""
        gate, up = self.both(x).chunk(2, dim=-1)
        return gate, up


class StepStack(Stack):
    """A stack that works out masks and angles once for all its layers, compiled or not."""

    def _views(
        self,
        tokens: Tokens,
        cache: Cache | None,
        prefix: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
        tap: Tap = SILENT,
    ) -> dict[int | None, View]:
        views = super()._views(tokens, cache, prefix, bias, dtype, tap)
        if not isinstance(cache, FixedCache):
            return views
        return {
            window: View(
                None if view.mask is None else held(view.mask),
                view.causal,
                None if view.bias is None else held(view.bias),
                None if view.rotary is None else Rotary(held(view.rotary.cos), held(view.rotary.sin)),
            )
            for window, view in views.items()
        }


class StepBlock(Block):
    """A block that takes one token with a fixed cache through a few kernels, and anything else as ever."""

    gate: str | None

    def forward(
        self,
        x: Tensor,
        view: View,
        memory: Tensor | None = None,
        cross_view: View | None = None,
        keys: LayerKeys | None = None,
        cross_keys: CrossKeys | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        if (
            not isinstance(keys, FixedKeys)
            or x.shape[1] > 1
            or view.mask is None
            or view.bias is not None
            or tap is not SILENT
        ):
            return super().forward(x, view, memory, cross_view, keys, cross_keys, tap)
        attention, feedforward = self.attention, self.feedforward
        assert isinstance(attention, FusedAttention) and isinstance(feedforward, FeedForward)
        turns = view.rotary
        z = step_attend(
            _normed(x, self.attention_residual.before, attention.qkv),
            keys.k,
            keys.v,
            keys.cache.index,
            view.mask[:, 0, 0],
            None if turns is None else turns.cos,
            None if turns is None else turns.sin,
            attention.layout,
            attention.n_heads,
            attention.d_head**-0.5 if attention.scale is None else attention.scale,
            attention.softcap,
        )
        x = step_linear(z, attention.out.weight, attention.out.bias, add=x)
        wide = feedforward.both if isinstance(feedforward, FusedFeedForward) else feedforward.up
        post = _normed(x, self.feedforward_residual.before, wide, self.gate)
        if self.gate is None:
            post = feedforward.activation(post)
        out: Tensor = step_linear(post, feedforward.down.weight, feedforward.down.bias, add=x)
        return out


def _normed(x: Tensor, norm: nn.Module | None, layer: nn.Module, gate: str | None = None) -> Tensor:
    """A norm, a linear layer and a gate in one: [B, 1, D] -> [B, 1, N]."""
    assert isinstance(norm, RMSNorm) and isinstance(layer, nn.Linear)
    out: Tensor = step_linear(x, layer.weight, layer.bias, norm.weight, norm.eps, norm.unit_offset, gate)
    return out


def _steps_well(block: Block) -> bool:
    """Is this a block that `StepBlock` can take?"""
    attention, before = block.attention, (block.attention_residual, block.feedforward_residual)
    plain = all(
        isinstance(part.before, RMSNorm) and part.inside is part.after is None and part.scale == 1
        for part in before
    )
    return (
        plain
        and not block.parallel
        and block.cross is None
        and attention.q_norm is None
        and isinstance(block.feedforward, FeedForward)
    )


def prepared(model: Transformer, kernels: bool | None = None) -> Transformer:
    """The copy: in eval mode, for inference only, without the model's hooks, valid until its weights change.

    `kernels`: let blocks that can take a token through the kernels for one step; None: where those run.
    """
    shared = {id(parameter): parameter for parameter in model.parameters()}
    fast = copy.deepcopy(model, shared).eval()
    weight = next(fast.parameters())
    kernels = available(weight) if kernels is None else kernels
    if kernels and fast.decoder is not None:
        fast.decoder.__class__ = StepStack
    packs = not kernels and weight.device.type == "cpu" and weight.dtype == torch.float32 and _can_pack()
    for stack in (fast.encoder, fast.decoder):
        for block in stack.blocks if stack is not None else ():
            assert isinstance(block, Block)
            steps = kernels and _steps_well(block)
            _fuse_attention(block.attention)
            if isinstance(block.feedforward, FeedForward) and block.feedforward.gate is not None:
                _fuse_feedforward(block.feedforward, block.feedforward.gate)
            if steps:
                block.__class__ = StepBlock
                assert isinstance(block, StepBlock)
                block.gate = model.config.activation if model.config.gated else None
    if packs:
        for part in list(fast.modules()):
            for name, child in part.named_children():
                if isinstance(child, nn.Linear):
                    setattr(part, name, PackedLinear(child.weight, child.bias))
    for part in fast.modules():
        part._compiled_call_impl = part.forward  # a copy runs no hooks: calling a part is running its forward
        part.__dict__.update(
            {**part._modules, **part._parameters}
        )  # and its parts are found without a search
    return fast


def _fuse_attention(attention: Attention) -> None:
    layers = [attention.q, attention.k, attention.v]
    attention.__class__ = FusedAttention
    assert isinstance(attention, FusedAttention)
    attention.widths, attention.qkv = [layer.out_features for layer in layers], _joined(*layers)
    del attention.q, attention.k, attention.v


def _fuse_feedforward(feedforward: FeedForward, gate: nn.Linear) -> None:
    both = _joined(gate, feedforward.up)
    feedforward.__class__ = FusedFeedForward
    assert isinstance(feedforward, FusedFeedForward)
    feedforward.both = both
    del feedforward.gate, feedforward.up


def _joined(*layers: nn.Linear) -> nn.Linear:
    """One linear layer that gives what these give, side by side."""
    joined = nn.Linear(1, 1, bias=False, device="meta")
    joined.in_features, joined.out_features = (
        layers[0].in_features,
        sum(layer.out_features for layer in layers),
    )
    joined.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None  # type: ignore[assignment]
    return joined


@functools.cache
def _can_pack() -> bool:
    """Does this build of PyTorch have the packed product, and does it give the plain one's answer?"""
    try:
        layer = nn.Linear(16, 8, device="meta").to_empty(device="cpu")
        nn.init.constant_(layer.weight, 0.3)
        nn.init.constant_(layer.bias, 0.1)
        x = torch.linspace(-1, 1, 48).view(3, 16)
        return torch.allclose(PackedLinear(layer.weight, layer.bias)(x), layer(x), atol=1e-5)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
