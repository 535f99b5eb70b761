"""Parts built from other parts: the same parameters under the same names, with another `forward`.

A replacement takes the place of the first part by ordinary assignment. The first part stays as it was, and
can be put back. Those for inference are here: products joined into one, and weights packed for a few rows.

Shapes: B batch, T length, D model or width in, N width out, H heads, K key/value heads, E head width,
F feed-forward width.
"""

import copy
import functools
from typing import Any, TypeVar

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.model.attention import Attention
from clearhead.model.feedforward import FeedForward

Kind = TypeVar("Kind", bound=nn.Module)


def like(part: nn.Module, kind: type[Kind], **changes: object) -> Kind:
    """Return a module of class `kind` that shares all attributes of `part`, apart from `changes`."""
    new = kind.__new__(kind)
    state = part.__getstate__()  # type: ignore[no-untyped-call]
    new.__setstate__(  # type: ignore[no-untyped-call]
        {name: copy.copy(value) if isinstance(value, (dict, set)) else value for name, value in state.items()}
    )
    for name, value in changes.items():
        setattr(new, name, value)
    return new


class Direct(nn.Module):
    """A part for inference: calling it runs `forward` at once, without looking for hooks."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run `forward`."""
        return self.forward(*inputs, **named)

    def settle(self) -> None:
        """Keep parameters and submodules as ordinary attributes too, found without a search."""
        for name, value in (*self.named_parameters(recurse=False), *self.named_children()):
            object.__setattr__(self, name, value)


@functools.cache
def direct(kind: Any) -> Any:
    """Return a subclass of `kind`, a class of parts, that is `Direct`."""
    return type(kind.__name__, (Direct, kind), {})


# One row reads each weight once, and packing gains nothing; for many rows the plain product packs by itself.
PACKED_ROWS = range(2, 65)


class FusedAttention(Direct, Attention):
    """Self-attention whose queries, keys and values come from one product."""

    qkv: nn.Module
    widths: list[int]

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] -> [B, T, H·E], [B, T, K·E], [B, T, K·E]."""
        q, k, v = torch.split_with_sizes(self.qkv(x), self.widths, dim=-1)
        return q, k, v


class FusedFeedForward(Direct, FeedForward):
    """A gated feed-forward whose gate and up come from one product."""

    both: nn.Module
    activation_name: str | None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> [B, T, F] twice."""
        gate, up = self.both(x).chunk(2, dim=-1)
        return gate, up


class JoinedLinear(nn.Linear):
    """One linear layer, for inference, whose output is the outputs of several concatenated."""

    def __init__(self, *layers: nn.Linear) -> None:
        first, width = layers[0], sum(layer.out_features for layer in layers)
        biased = any(layer.bias is not None for layer in layers)
        super().__init__(first.in_features, width, biased, "meta", first.weight.dtype)  # nothing is drawn
        self.to_empty(device=first.weight.device).requires_grad_(False)
        self.layers = layers  # a tuple, so that they are no parts of this one
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights again, in place, whatever has changed them: faster than to look for a change."""
        torch.cat([layer.weight for layer in self.layers], out=self.weight.data)
        if self.bias is not None:
            torch.cat([layer.bias for layer in self.layers], out=self.bias.data)


class PackedLinear(Direct):
    """A linear layer that keeps its weight a second time, laid out for a few rows at once."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layers = (layer,)
        self.weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self.packed: Tensor | None = None  # made when first used
        self.packed_from: tuple[int, bytes] | None = None  # the fingerprint of the weight then
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        if x.numel() // self.in_features not in PACKED_ROWS:
            return nnf.linear(x, self.weight, self.bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS.start)
            self.packed_from = fingerprint(self.weight)
        rows = x.reshape(-1, self.in_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out.view(*x.shape[:-1], self.out_features)

    def refresh(self) -> None:
        """Forget what was packed from other weights; to pack again costs more than to look for a change."""
        for layer in self.layers:
            if isinstance(layer, JoinedLinear):
                layer.refresh()
        if self.packed is not None and fingerprint(self.weight) != self.packed_from:
            self.packed = None


def refresh(copy: nn.Module) -> None:
    """Bring every part that keeps a copy of weights up to date with them."""
    for part in copy.modules():
        if isinstance(part, JoinedLinear | PackedLinear):
            part.refresh()


@torch.no_grad()
def fingerprint(weight: Tensor) -> tuple[int, bytes]:
    """Return the sum of the bits of a weight, and its product with a fixed vector, row by row.

    A change of any bit shows in the first, and one that keeps the sum, such as two rows exchanged, in the
    second. Together they take about as long as two linear layers of one row.
    """
    table = weight.detach().reshape(-1, weight.shape[-1]).contiguous()
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    kind = kinds[weight.element_size()]
    whole = kind if weight.shape[-1] % (8 // weight.element_size()) else torch.int64  # the widest is fastest
    waves = torch.arange(1.0, weight.shape[-1] + 1, device=weight.device).sqrt().sin().to(weight.dtype)
    return int(table.view(whole).sum()), (table @ waves).view(kind).cpu().numpy().tobytes()


@functools.cache
def can_pack() -> bool:
    """Return True if this build of PyTorch has the packed product and it agrees with the plain one."""
    try:
        weight, bias = torch.full((8, 16), 0.3), torch.full((8,), 0.1)
        x = torch.linspace(-1, 1, 48).view(3, 16)
        layer = nn.Linear(16, 8)
        layer.weight.data, layer.bias.data = weight, bias
        return torch.allclose(PackedLinear(layer)(x), layer(x), atol=1e-5)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
