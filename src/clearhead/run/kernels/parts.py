"""Parts built from other parts: the same parameters under the same names, with another `forward`.

A replacement takes the place of the first part by ordinary assignment. The first part stays as it was, and
can be put back. Those for inference are here: matmuls joined into one, and weights packed for a few rows.

A replacement with arithmetic of its own knows the attributes that a part computes with (`KNOWN`). A part that
has any other attribute, parameter or submodule keeps its own `forward`.

Shapes: B batch, T length, D model or width in, N width out, H heads, K key/value heads, E head width,
F feed-forward width.
"""

import copy
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import dtypes, norms
from clearhead.core.attention import Attention
from clearhead.core.feedforward import FeedForward
from clearhead.core.stack import Block, Residual, Stack
from clearhead.core.taps import SILENT, tap_for
from clearhead.core.transformer import Output, Transformer
from clearhead.run.quant.layers import QuantizedLinear, QuantizedTable

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


def settle(part: nn.Module) -> None:
    """Keep parameters and submodules as ordinary attributes too, found without a search."""
    if not isinstance(part, nn.ModuleList):
        for name, value in (*part.named_parameters(recurse=False), *part.named_children()):
            object.__setattr__(part, name, value)


def original(part: nn.Module) -> type[nn.Module]:
    """Return the class that a part for training replaces; for other parts, their own class."""
    return cast(type[nn.Module], getattr(type(part), "stands_for", type(part)))


# What fast paths know ---------------------------------------------------------------------------------------

# The attributes that the parts of each class compute with.
QUANTIZED = (*("codes", "scales", "offsets", "smooth", "place"), *("grid", "in_features", "out_features"))
KNOWN: Mapping[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight", "bias", "in_features", "out_features", "matmul"),  # that of training
    QuantizedLinear: (*QUANTIZED, "bias"),
    QuantizedTable: (*QUANTIZED, "num_embeddings", "embedding_dim"),
    norms.LayerNorm: ("weight", "bias", "eps", "unit_offset"),
    norms.RMSNorm: ("weight", "eps", "unit_offset"),
    Residual: ("before", "inside", "after", "scale", "dropout", "skip"),
    Attention: (
        *("q", "k", "v", "out", "q_norm", "k_norm", "sink"),
        *("heads", "pruned", "n_heads", "n_kv_heads", "d_head", "d_value"),
        *("scale", "softcap", "layout", "norm_over", "dropout", "kernel"),
    ),
    FeedForward: ("gate", "up", "down", "activation", "dropout"),
    Block: (
        *("attention", "attention_residual", "cross", "cross_residual"),
        *("feedforward", "feedforward_residual", "parallel"),
    ),
    Stack: ("spec", "embedding", "positions", "blocks", "norm", "plan"),
    Transformer: ("config", "encoder", "decoder", "head", "mtp"),
}
WHOLES = (Stack, Transformer)  # whose parts may compute as they like


def is_known(part: nn.Module, kind: type[nn.Module] | None = None) -> bool:
    """Return True if a part is of this class, or of one in `KNOWN`, and has nothing that is not there."""
    own = original(part)
    if own not in KNOWN or (kind is not None and own is not kind) or not has_only(part, own, KNOWN[own]):
        return False
    return isinstance(part, WHOLES) or all(is_known(child) for child in part.children())


def has_only(part: nn.Module, kind: type[nn.Module], names: Collection[str]) -> bool:
    """Return True if a part is of this class and has no others of its attributes set than these."""
    tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
    named = (*vars(part).items(), *tensors, *part.named_children())
    has = {name for name, value in named if value is not None and value is not False and name[0] != "_"}
    return original(part) is kind and has <= {*names, "training"}


# Fused parts ------------------------------------------------------------------------------------------------

# One row reads each weight once, and packing gains nothing; for many rows the plain matmul packs by itself.
PACKED_ROWS = range(2, 65)


class FusedAttention(Direct, Attention):
    """Self-attention whose queries, keys and values come from one matmul."""

    knows = (*KNOWN[Attention], "gate")
    qkv: nn.Module
    widths: list[int]

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, D] -> [B, T, H·E], [B, T, K·E], [B, T, K·E]."""
        q, k, v = torch.split_with_sizes(self.qkv(x), self.widths, dim=-1)
        return q, k, v


class FusedFeedForward(Direct, FeedForward):
    """A gated feed-forward whose gate and up come from one matmul."""

    knows = (*KNOWN[FeedForward], "clamp", "shift")
    both: nn.Module
    activation_name: str | None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> [B, T, F] twice."""
        gate, up = self.both(x).chunk(2, dim=-1)
        return gate, up


class DecodeModel(Direct, Transformer):
    """A model that takes one token of each row further in a way of its own, where that suits."""

    def forward(
        self,
        ids: Tensor,
        *more: Any,
        cache: Any = None,
        logits: Literal["all", "last", "none"] = "all",
        **named: Any,
    ) -> Output:
        """Run the model; see `Transformer.forward`."""
        one_token = cache is not None and not more and not named and ids.ndim == 2 and ids.shape[1] == 1
        plain = one_token and not torch.compiler.is_compiling() and tap_for(self) is SILENT
        hidden = self.decoded(ids, cache) if plain else None
        if hidden is None:
            named |= {"logits": logits} if cache is None else {"logits": logits, "cache": cache}
            return super().forward(ids, *more, **named)
        return Output(None if logits == "none" else self.head(hidden, None), hidden)

    def decoded(self, ids: Tensor, cache: Any) -> Tensor | None:
        """Return the hidden states of one token of each row [B, 1, D]; None: the model takes its own way."""
        raise NotImplementedError


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
    """A linear layer with a second copy of its weight, packed for matmuls of a few rows.

    The first matmul after a `refresh` that needs it looks through the weight, and packs it again where it
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
    """Return True if this build of PyTorch has the packed matmul and it agrees with the plain one."""
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
