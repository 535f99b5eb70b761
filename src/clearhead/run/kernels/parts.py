"""Parts built from other parts: the same parameters under the same names, with another `forward`.

A replacement takes the place of the first part by ordinary assignment. The first part stays as it was, and
can be put back. Those for inference are here: products joined into one, and weights packed for a few rows.

Shapes: B batch, T length, D model or width in, N width out, H heads, K key/value heads, E head width,
F feed-forward width.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import dtypes
from clearhead.core.attention import Attention
from clearhead.core.feedforward import FeedForward

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
        super().__init__(first.in_features, width, biased, "meta")  # nothing is drawn
        for name, parameter in list(self.named_parameters()):
            room = first.weight.new_empty(parameter.shape)
            self.register_parameter(name, nn.Parameter(room, requires_grad=False))
        self.layers = layers  # a tuple, so that they are no parts of this one
        self.fingerprints: list[Tensor] = []  # of the weights that were copied
        self.refresh()

    def refresh(self) -> None:
        """Copy biases and weights again, in place; on a CPU, weights only where they have changed."""
        weights = [layer.weight.detach() for layer in self.layers]
        looks = not self.weight.is_cuda and self.weight.element_size() > 2
        fingerprints = [fingerprint(weight) for weight in weights] if looks else []
        if not looks or not same(fingerprints, self.fingerprints):
            torch.cat(weights, out=self.weight.data)
        self.fingerprints = fingerprints
        if self.bias is not None:
            torch.cat([bias_of(layer).detach() for layer in self.layers], out=self.bias.data)


def bias_of(layer: nn.Linear) -> Tensor:
    """Return the bias of a layer; zeros where it has none and others that it is joined with have one."""
    return layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias


class PackedLinear(Direct):
    """A linear layer that keeps its weight a second time, laid out for a few rows at once.

    The first product after a `refresh` that needs it looks through the weight, and packs it again where it
    has changed.
    """

    packed_rows = PACKED_ROWS

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.made_of = (layer,)  # a tuple, so that it is no part of this one
        self.weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self.packed: Tensor | None = None
        self.packed_from: list[Tensor] = []  # the fingerprints of the model's weights then
        self.current = False  # whether it was packed, or looked through, since the latest refresh
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        # The compiler cannot take a packed weight as an input, and lays weights out by itself.
        if x.numel() // self.in_features not in self.packed_rows or torch.compiler.is_compiling():
            return nnf.linear(x, self.weight, self.bias)
        if not self.current:
            self._pack()
        rows = x.reshape(-1, self.in_features)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out.view(*x.shape[:-1], self.out_features)

    def refresh(self) -> None:
        """Trust nothing that was packed before, and bring joined weights up to date."""
        self.current = False
        for layer in self.made_of:
            if isinstance(layer, JoinedLinear):
                layer.refresh()

    def _pack(self) -> None:
        """Pack the weight, unless it was packed and has not changed."""
        (layer,) = self.made_of
        found = layer.fingerprints if isinstance(layer, JoinedLinear) else [fingerprint(layer.weight)]
        if self.packed is None or not same(found, self.packed_from):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), PACKED_ROWS.start)
            self.packed_from = found
        self.current = True


def fingerprint(weight: Tensor) -> Tensor:
    """Return the product of each row of a weight with a fixed vector: [N], or in half precision [2, N].

    A change is missed only where it is lost in the rounding of such a product, as it would be in that of the
    layer. Half precision rounds too much for that: sums of the bits of each row show any change there.
    """
    table = weight.detach().reshape(-1, weight.shape[-1])
    products = table @ _waves(weight.shape[-1], weight.dtype, weight.device)
    if weight.element_size() > 2:
        return products
    return torch.stack([products.double(), table.contiguous().view(torch.int16).sum(1).double()])


def same(fingerprints: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return True if these are of the same weights; one with a value that is no number never is."""
    return len(fingerprints) == len(others) and all(map(torch.equal, fingerprints, others))


@functools.lru_cache(maxsize=64)
def _waves(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector [width] of numbers from -1 to 1 of which no two are equal."""
    return torch.arange(1.0, width + 1, device=device).sqrt().sin().to(dtype)


@functools.cache
def can_pack() -> bool:
    """Return True if this build of PyTorch has the packed product and it agrees with the plain one."""
    try:
        x = torch.linspace(-1, 1, 48, dtype=torch.float32, device="cpu").view(3, 16)
        layer = nn.Linear(16, 8, device="meta", dtype=torch.float32).to_empty(
            device="cpu"
        )  # nothing is drawn
        nn.init.constant_(layer.weight, 0.3)
        nn.init.constant_(layer.bias, 0.1)
        with dtypes.uncast(x):  # the answer is kept: whoever asks first must not decide it
            return torch.allclose(PackedLinear(layer)(x), layer(x), atol=1e-5)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
