"""What `step.c` computes on the CPU: decode steps of blocks and stacks, matmuls of a few rows, top tokens.

Shapes: B batch, T length, S slots, D model, N width out.
"""

import ctypes
import sys
from array import array
from itertools import chain
from typing import Any, cast

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks, norms
from clearhead.core.attention import Attention
from clearhead.core.cache import Cache, CrossKeys, GrowingKeys, LayerKeys
from clearhead.core.feedforward import ACTIVATIONS, FeedForward
from clearhead.core.stack import Block, Memory, Residual, Stack
from clearhead.core.taps import SILENT, Tap
from clearhead.run.kernels.library import (
    ATTENTION,
    BEST,
    BLOCK,
    CALL,
    FEEDFORWARD,
    LINEAR,
    NORM,
    RESIDUAL,
    VIEW,
    library,
)
from clearhead.run.kernels.parts import Direct
from clearhead.run.kernels.training import OF_TRAINING, all_known
from clearhead.run.quant.layers import QuantizedLinear, rounded_inputs
from clearhead.variants.caches import RingKeys

MOST_ROWS = 64  # up to so many rows our product is quicker than the plain one, on any processor
WIDE = 64  # where it is for any number of rows, it is so with layers of so many outputs

NORM_KINDS = {norms.LayerNorm: 1, norms.RMSNorm: 2}
ACTIVATION_NUMBERS = {function: number for number, function in enumerate(ACTIVATIONS.values())}
ACTIVATION_NUMBERS |= {new: ACTIVATION_NUMBERS[old] for new, old in OF_TRAINING.items()}

# All that a structure says, by class and attribute. A block with anything more keeps its own forward.
KNOWN: dict[type[nn.Module], set[str]] = {
    Block: {"attention", "cross", "feedforward", "parallel"}
    | {"attention_residual", "cross_residual", "feedforward_residual"},
    Residual: {"before", "inside", "after", "scale", "dropout", "skip"},
    norms.LayerNorm: {"weight", "bias", "eps", "unit_offset"},
    norms.RMSNorm: {"weight", "eps", "unit_offset"},
    Attention: {"q", "k", "v", "out", "q_norm", "k_norm", "sink", "heads", "pruned", "n_heads", "n_kv_heads"}
    | {"d_head", "d_value", "scale", "softcap", "layout", "norm_over", "dropout", "kernel"},
    FeedForward: {"gate", "up", "down", "activation", "dropout"},
    nn.Linear: {"weight", "bias", "in_features", "out_features"},
    QuantizedLinear: {"codes", "scales", "offsets", "smooth", "bias", "place", "grid"}
    | {"in_features", "out_features"},
}


def suits_native(block: Block) -> bool:
    """Return True if `step.c` computes all that this block does."""
    feedforward = block.feedforward
    return (
        all_known(block, KNOWN)
        and isinstance(feedforward, FeedForward)
        and feedforward.activation in ACTIVATION_NUMBERS
    )


class Pointers:
    """Structures that point to a block's weights, and those weights, which live as long."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def at(self, tensor: Tensor | None) -> int | None:
        """Return where the numbers of a tensor begin; None for None."""
        if tensor is None:
            return None
        self.kept.append(tensor.detach().contiguous())
        return self.kept[-1].data_ptr()

    def norm(self, norm: nn.Module | None) -> Any:
        """Describe a norm, or that there is none."""
        if not isinstance(norm, norms.Norm):
            return NORM()
        kind = next(number for base, number in NORM_KINDS.items() if isinstance(norm, base))
        return NORM(self.at(norm.weight), self.at(norm.bias), kind, norm.unit_offset, norm.eps)

    def linear(self, layer: Any) -> Any:
        """Describe a linear layer, or that there is none."""
        if layer is None:
            return LINEAR()
        sizes = layer.out_features, layer.in_features
        if not isinstance(layer, QuantizedLinear):
            return LINEAR(self.at(layer.weight), self.at(layer.bias), *sizes)
        parts = map(self.at, (layer.codes, layer.scales, layer.offsets, layer.smooth))
        return LINEAR(None, self.at(layer.bias), *sizes, *parts, layer.grid.bits, layer.grid.group)

    def residual(self, residual: Residual | None) -> Any:
        """Describe a residual, or that there is none."""
        if residual is None:
            return RESIDUAL()
        places = (residual.before, residual.inside, residual.after)
        return RESIDUAL(*map(self.norm, places), residual.scale)

    def attention(self, part: Any) -> Any:
        """Describe an attention, or that there is none."""
        if part is None:
            return ATTENTION()
        return ATTENTION(
            *map(self.linear, (part.q, part.k, part.v, part.out)),
            self.norm(part.q_norm),
            self.norm(part.k_norm),
            self.at(part.sink),
            part.n_heads,
            part.n_kv_heads,
            part.d_head,
            part.d_value,
            part.norm_over == "full",
            part.layout != "half",
            part.d_head**-0.5 if part.scale is None else part.scale,
            part.softcap or 0.0,
        )

    def block(self, block: Block) -> Any:
        """Describe a block."""
        feedforward = cast(FeedForward, block.feedforward)
        layers = (feedforward.gate, feedforward.up, feedforward.down)
        return BLOCK(
            self.attention(block.attention),
            self.attention(block.cross),
            FEEDFORWARD(*map(self.linear, layers), ACTIVATION_NUMBERS[feedforward.activation]),
            *map(self.residual, (block.attention_residual, block.cross_residual, block.feedforward_residual)),
            feedforward.down.out_features,
            block.parallel,
        )


class NativeLinear(Direct):
    """A linear layer that takes a few rows through `step.c`, from the model's own weight.

    `alike`: any number of rows, each added up in the same order.
    """

    alike = False

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.pointers = Pointers()
        self.fields, found = self.pointers.linear(self), library()
        any_rows = found is not None and found.clearhead_any_rows() and self.out_features >= WIDE
        self.most_rows = sys.maxsize if any_rows else MOST_ROWS

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        rows = x.numel() // self.in_features
        if not (rows > 0 and (self.alike or rows <= self.most_rows)) or not plain(x):
            return nnf.linear(x, self.weight, self.bias)
        return native_linear(self.fields, x, self.out_features, self.alike)


class NativeQuantized(Direct, QuantizedLinear):
    """A linear layer of few bits whose product is that of `quantized.h`, for any number of rows.

    It rounds its inputs, which the layer itself does not. That each row has the same arithmetic in whatever
    batch it comes is why many rows take this way too.
    """

    described: tuple[Pointers, Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        if not x.numel() or not plain(x):
            return super().forward(x)
        if self.described is None:
            pointers = Pointers()
            self.described = pointers, pointers.linear(self)
        return native_linear(self.described[1], x, self.out_features)


class NativeQuantizedTwice(NativeQuantized):
    """The same for a model with routers: what one product rounds away from its inputs goes through a second.

    A router takes the largest of its scores, so that a small error below it may send a token another way.
    Inputs have about 16 bits so, and tokens go where the model itself sends them.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        product = super().forward(x)
        if not x.numel() or not plain(x):
            return product
        left = super().forward(x - rounded_inputs(self, x))
        return product + (left if self.bias is None else left - self.bias)


def native_linear(fields: Any, x: Tensor, width: int, alike: bool = False) -> Tensor:
    """Return the product of `step.c` with the layer that `fields` describes: [..., D] -> [..., N]."""
    x, found = x.contiguous(), library()
    assert found is not None
    out = x.new_empty(*x.shape[:-1], width)
    rows, threads = x.numel() // x.shape[-1], torch.get_num_threads()
    places = (ctypes.addressof(fields), x.data_ptr(), out.data_ptr())
    if found.clearhead_linear(*places, rows, threads, alike):
        raise MemoryError(f"no memory for {rows} rows")
    return out


def run(x: Tensor, first: Any, layers: list[tuple[int, ...]]) -> Tensor:
    """Take rows [B, 1, D] through layers; `first` is the call of the first one."""
    x, found = x.contiguous(), library()
    assert found is not None
    out = torch.empty_like(x)
    first.x, first.out = x.data_ptr(), out.data_ptr()
    fields = array("Q", chain.from_iterable(layers))
    if found.clearhead_blocks(fields.buffer_info()[0], len(layers)):
        raise MemoryError("no memory for the values of one token")
    return out


def plain(x: Tensor) -> bool:
    """Return True if nothing but numbers is asked of this tensor: no gradient, no compiler, no autocast."""
    return (
        x.dtype == torch.float32
        and not (torch.is_grad_enabled() and x.requires_grad)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


class NativeBlock(Direct, Block):
    """A block of `KNOWN` parts: `step.c` takes one token with a cache, and `Block` takes all else."""

    described: tuple[Pointers, Any] | None = None
    alike = False  # add up each row in the same order, whatever the number of rows
    most_rows = MOST_ROWS

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
        suits = x.shape[1] == 1 and tap is SILENT and plain(x)
        call = self.call(x, view, cross_view, keys, cross_keys) if suits else None
        if call is None:
            return super().forward(x, view, memory, cross_view, keys, cross_keys, tap)
        return run(x, call, [self.layer(call, keys, cross_keys)])

    def call(
        self,
        x: Tensor,
        view: masks.View,
        cross_view: masks.View | None,
        keys: LayerKeys | None,
        cross_keys: CrossKeys | None,
    ) -> Any:
        """Describe a step of rows [B, 1, D] through layers of this view; None where `step.c` does not suit.

        The structure points to tensors that the view and the caches keep.
        """
        rows = x.shape[0]
        own = self._own(view, keys, rows) if rows <= self.most_rows else None
        source = self._source(cross_view, cross_keys, rows) if own is not None else None
        if own is None or source is None:
            return None
        (seen, *slot), rotary = own, view.rotary
        turns: tuple[int | None, ...] = (None, None, 0, 0)
        cos = sin = None
        if rotary is not None:
            cos, sin = (part.contiguous() for part in rotary)
            turns = cos.data_ptr(), sin.data_ptr(), _stride(cos, 0), cos.shape[-1]
        threads = torch.get_num_threads()
        made = CALL(None, None, rows, seen, source, *slot, *turns, threads, self.alike)
        made.kept = cos, sin  # for as long as the structure points to them
        return made

    def layer(self, call: Any, keys: Any, cross_keys: Any) -> tuple[int, ...]:
        """Return the fields of a layer: this block with its keys, which lie as those of the call."""
        if self.described is None:
            pointers = Pointers()
            self.described = pointers, pointers.block(self)
        source = (0, 0) if self.cross is None else (cross_keys.k.data_ptr(), cross_keys.v.data_ptr())
        places = ctypes.addressof(self.described[1]), ctypes.addressof(call)
        return (*places, keys.k.data_ptr(), keys.v.data_ptr(), *source)

    def _own(self, view: masks.View, keys: LayerKeys | None, rows: int) -> tuple[Any, ...] | None:
        """Describe the keys of the text, and the slots of the new ones; None where `step.c` does not suit."""
        if not isinstance(keys, GrowingKeys | RingKeys) or type(keys) not in (GrowingKeys, RingKeys):
            return None  # caches that compute otherwise have keys of their own
        if keys.k is None or keys.v is None or view.causal:
            return None
        if (
            view.blocks is not None
            or keys.k.shape[0] != rows
            or (view.bias is not None and self.attention.pruned)
        ):
            return None
        if isinstance(keys, RingKeys):
            slots = keys.cache.slots[keys.kind]
            seen = _seen(keys.k, keys.v, keys.k.shape[2], view, rows) if view.mask is not None else None
            return None if seen is None else (seen, 0, slots.data_ptr(), _stride(slots, 0))
        slot = keys.cache.length
        seen = _seen(keys.k, keys.v, slot + 1, view, rows) if slot < keys.k.shape[2] else None
        return None if seen is None else (seen, slot, None, 0)

    def _source(self, view: masks.View | None, keys: CrossKeys | None, rows: int) -> Any:
        """Describe the keys of the source, or that there is none; None where `step.c` does not suit."""
        if self.cross is None:
            return VIEW(shared_by=1)
        if view is None or keys is None or keys.k is None or keys.v is None or view.rotary is not None:
            return None
        if view.bias is not None and self.cross.pruned:
            return None
        return _seen(keys.k, keys.v, keys.k.shape[2], view, rows)


def _stride(x: Tensor, axis: int) -> int:
    """Return the step from one index of an axis to the next; 0 where all are the same."""
    return x.stride(axis) if x.shape[axis] > 1 else 0


def _seen(k: Tensor, v: Tensor, slots: int, view: masks.View, rows: int) -> Any:
    """Describe keys and values [B', K, S, E], mask and bias; None where `step.c` does not suit."""
    mask, bias = view.mask, view.bias
    shared, rest = divmod(rows, k.shape[0])
    if rest or k.stride(3) != 1 or v.stride(3) != 1 or k.dtype != torch.float32:
        return None
    if mask is not None and (
        mask.shape[0] not in (1, k.shape[0]) or mask.shape[1] != 1 or mask.shape[3] != slots
    ):
        return None
    if bias is not None and (
        bias.dtype != torch.float32 or bias.shape[0] not in (1, rows) or bias.shape[3] != slots
    ):
        return None
    seen = (None, 0, 0) if mask is None else (mask.data_ptr(), _stride(mask, 0), mask.stride(3))
    added: tuple[int | None, ...] = (None, 0, 0, 0)
    if bias is not None:
        added = bias.data_ptr(), _stride(bias, 0), _stride(bias, 1), bias.stride(3)
    strides = (*k.stride()[:3], *v.stride()[:3])
    return VIEW(k.data_ptr(), v.data_ptr(), *strides, shared, slots, *seen, *added)


# Whole stacks -----------------------------------------------------------------------------------------------


TOGETHER = 256  # tokens of a source that keep a product busy
WORTH = 0.9  # rows of a source are read in groups where so much of what padding makes of them is left


class NativeStack(Direct, Stack):
    """A stack of blocks that `suits_native`: one call takes a step through all of them."""

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
        blocks = self.layers()
        native = all(isinstance(block, NativeBlock) and not block.attention.pruned for block in blocks)
        more = (types, prefix, bias, input_mask, global_mask, tap)
        bare = cache is None and memory is None and all(given is None or given is SILENT for given in more)
        if bare and native and (groups := self.groups(inputs, tokens)):
            return self._by_groups(inputs, tokens, groups)
        if cache is None or tokens.length != 1 or tap is not SILENT or not native:
            return super().forward(inputs, tokens, memory, cache, *more)

        def place() -> Tensor | None:
            return self.positions.embed(tokens.positions, self.dtype)

        x: Tensor = self.embedding(inputs, types, place, input_mask)  # B 1 D
        cache.begin(tokens)
        given = (prefix, bias, x.dtype, tap, inputs, global_mask)
        views = self._views(self.spec.whole_kinds, tokens, cache, *given)
        cross_view = None if memory is None else self.cross_view(tokens, memory.tokens, x.shape[0])
        steps = []
        for layer, kind in enumerate(self.spec.kinds):
            view = views[kind].unrotated() if layer in self.spec.rope_skips else views[kind]
            cross_keys = None if memory is None else cache.cross_layer(layer)
            steps.append((view, cross_view, cache.layer(layer, kind), cross_keys))
        found = through(x, blocks, steps) if plain(x) else None
        if found is None:
            found = x
            for block, (view, other, keys, cross_keys) in zip(blocks, steps):
                found = block(found, view, memory and memory.hidden, other, keys, cross_keys)
        cache.advance()
        return found if self.norm is None else self.norm(found)

    def groups(self, inputs: Tensor, tokens: masks.Tokens) -> list[tuple[Tensor, int]]:
        """Return rows of a source [B, T] by like length: their places and the longest's length.

        For rows that end in padding, of a stack whose states there nobody reads; none where it saves little.
        """
        real, scaling = tokens.real, self.spec.rope_scaling
        turns = scaling is not None and scaling.kind in ("dynamic", "longrope")  # by the length of a call
        if not self.spec.prefix or turns or real is None or real.shape != inputs.shape:
            return []
        if tokens.documents is not None or torch.compiler.is_compiling():
            return []
        if not bool(real[:, 0].all()) or bool((real[:, 1:] > real[:, :-1]).any()):
            return []
        lengths = real.sum(1)
        at_once = max(1, TOGETHER * len(lengths) // int(lengths.sum()))
        found = [(rows, int(lengths[rows[-1]])) for rows in torch.split(lengths.argsort(), at_once)]
        return found if sum(len(rows) * most for rows, most in found) <= WORTH * inputs.numel() else []

    def _by_groups(self, inputs: Tensor, tokens: masks.Tokens, groups: list[tuple[Tensor, int]]) -> Tensor:
        """Map rows of like length together: [B, T] -> [B, T, D], zeros where padding is left out."""
        hidden = torch.zeros(*inputs.shape, self.spec.d_model, dtype=self.dtype)
        for rows, most in groups:

            def cut(x: Tensor, rows: Tensor = rows, most: int = most) -> Tensor:
                return x[rows, :most] if len(x) > 1 else x[:, :most]

            hidden[rows, :most] = super().forward(cut(inputs), tokens.map(cut))
        return hidden


def through(x: Tensor, blocks: list[Block], steps: list[Any]) -> Tensor | None:
    """Take rows through blocks [B, 1, D] -> [B, 1, D]; None where `step.c` does not suit all of them.

    Each step is (view, cross view, keys, cross keys). Layers of one view share the description of it, if
    their keys lie alike.
    """
    calls: dict[Any, Any] = {}
    layers = []
    for block, (view, cross_view, keys, cross_keys) in zip(blocks, steps):
        assert isinstance(block, NativeBlock)
        if keys.k is None or keys.v is None:
            return None
        lie = (id(view), type(keys), keys.k.shape, keys.k.stride(), keys.v.stride())
        if lie not in calls:
            calls[lie] = block.call(x, view, cross_view, keys, cross_keys)
        if calls[lie] is None:
            return None
        layers.append(block.layer(calls[lie], keys, cross_keys))
    return run(x, calls[next(iter(calls))], layers)


# Top tokens -------------------------------------------------------------------------------------------------


def best_tokens(logits: Tensor, kept: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
    """Return the `count` best of `kept` [R, V], best first: log-probabilities and ids [R, C] each.

    `kept`: the logits [R, V], some of them removed. Where less than `count` are left, others follow with
    -inf. None where that is not compiled, or not for these tensors.
    """
    suits = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in (logits, kept))
    found = library() if suits else None
    if found is None:
        return None
    logits, kept = logits.contiguous(), kept.contiguous()
    rows, width = logits.shape
    values, ids = logits.new_empty(rows, count), torch.empty(rows, count, dtype=torch.long)
    sizes, places = (rows, width, count), (values.data_ptr(), ids.data_ptr())
    asked = BEST(logits.data_ptr(), kept.data_ptr(), *sizes, *places)
    found.clearhead_best(ctypes.addressof(asked), torch.get_num_threads())
    return values, ids
