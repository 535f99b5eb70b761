"""What `step.c` computes on the CPU: decode steps of blocks and stacks, matmuls of a few rows, top tokens.

Shapes: B batch, T length, S slots, D model, N width out.
"""

import ctypes
import sys
from array import array
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from clearhead.core import masks
from clearhead.core.attention import Attention
from clearhead.core.cache import Cache, LayerKV
from clearhead.core.feedforward import ACTIVATIONS
from clearhead.core.norms import LayerNorm, RMSNorm
from clearhead.core.stack import Block, Inputs, LayerInputs, Memory, Residual, Stack, StackCall
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
    STRUCTURES,
    VIEW,
    library,
)
from clearhead.run.kernels.parts import Direct, is_known, original
from clearhead.run.kernels.training import OF_TRAINING
from clearhead.run.quant.layers import QuantizedLinear, QuantizedTable, QuantizedWeight
from clearhead.variants.caches import RingKV

MOST_ROWS = 64  # up to so many rows our matmul is quicker than the plain one, on any processor
WIDE = 64  # where it is for any number of rows, it is so with layers of so many outputs

LAYER_FIELDS = len(STRUCTURES["Layer"]._fields_)
NO_NORM = NORM()
NORM_KINDS: dict[type[nn.Module], int] = {LayerNorm: 1, RMSNorm: 2}
ACTIVATION_NUMBERS = {function: number for number, function in enumerate(ACTIVATIONS.values())}
ACTIVATION_NUMBERS |= {new: ACTIVATION_NUMBERS[old] for new, old in OF_TRAINING.items()}


def suits_native(block: Block) -> bool:
    """Return True if `step.c` computes all that a block does."""
    return is_known(block) and block.feedforward.activation in ACTIVATION_NUMBERS


def suits_stack(stack: Stack) -> bool:
    """Return True if `NativeStack` does all that this stack does, around its blocks."""
    return is_known(stack, Stack) and (stack.norm is None or is_known(stack.norm))


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

    def norm(self, norm: Any) -> Any:
        """Describe a norm, or that there is none."""
        if norm is None:
            return NORM()
        kind = NORM_KINDS[original(norm)]
        return NORM(self.at(norm.weight), self.at(norm.bias), kind, norm.unit_offset, norm.eps)

    def linear(self, layer: Any) -> Any:
        """Describe a linear layer, or that there is none."""
        if layer is None:
            return LINEAR()
        sizes = layer.out_features, layer.in_features
        if not isinstance(layer, QuantizedWeight):
            return LINEAR(self.at(layer.weight), self.at(layer.bias), *sizes)
        parts = map(self.at, (layer.codes, layer.scales, layer.offsets, layer.smooth))
        bias = self.at(getattr(layer, "bias", None))  # a table has none
        twice = getattr(layer, "twice", False)  # a table has none
        return LINEAR(None, bias, *sizes, *parts, layer.grid.bits, layer.grid.group, twice)

    def residual(self, residual: Residual | None) -> Any:
        """Describe a residual, or that there is none."""
        if residual is None:
            return RESIDUAL()
        norms = (residual.before, residual.inside, residual.after)
        return RESIDUAL(*map(self.norm, norms), residual.scale)

    def attention(self, part: Attention | None) -> Any:
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
        feedforward = block.feedforward
        layers = (feedforward.gate, feedforward.up, feedforward.down)
        return BLOCK(
            self.attention(block.attention),
            self.attention(block.cross),
            FEEDFORWARD(*map(self.linear, layers), ACTIVATION_NUMBERS[feedforward.activation]),
            *map(self.residual, (block.attention_residual, block.cross_residual, block.feedforward_residual)),
            feedforward.down.out_features,
            block.parallel,
        )


class Described(Direct):
    """A part that `step.c` computes. It is described when it is first used."""

    described: tuple[Pointers, Any] | None = None

    def fields(self) -> Any:
        """Return the structure that describes this part."""
        if self.described is None:
            pointers = Pointers()
            self.described = pointers, self.describe(pointers)
        return self.described[1]

    def describe(self, pointers: Pointers) -> Any:
        """Describe this part, a linear layer or a table."""
        return pointers.linear(self)


class NativeLinear(Described):
    """A linear layer that takes a few rows through `step.c`, from the model's own weight.

    `alike`: any number of rows, each added up in the same order.
    """

    alike = False

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        found = library()
        any_rows = found is not None and found.clearhead_any_rows() and self.out_features >= WIDE
        self.most_rows = sys.maxsize if any_rows else MOST_ROWS

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        rows = x.numel() // self.in_features
        if not (rows > 0 and (self.alike or rows <= self.most_rows)) or not plain(x):
            return nnf.linear(x, self.weight, self.bias)
        return native_linear(self.fields(), x, self.out_features, self.alike)


class NativeQuantized(Described, QuantizedLinear):
    """A quantized linear layer whose matmul is that of `quantized.h`, for any number of rows.

    It rounds its inputs, which the layer itself does not. That each row has the same arithmetic in whatever
    batch it comes is why many rows take this way too.

    Of a model with routers, what one matmul rounds away from its inputs goes through a second (`twice`), so
    that they have about 16 bits. A router takes the largest of its scores: a small error below it may send a
    token another way.
    """

    twice = False

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., N]."""
        if not plain(x):
            return super().forward(x)
        if not x.numel():  # an expert that no token chose: its weight is not spelled out for that
            return x.new_empty(*x.shape[:-1], self.out_features)
        return native_linear(self.fields(), x, self.out_features)


class NativeTable(Described, QuantizedTable):
    """A quantized token table whose rows are spelled out by `quantized.h`: the same numbers in one step."""

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        found = library()
        if found is None or ids.dtype != torch.long or torch.compiler.is_compiling():
            return super().forward(ids)
        ids, out = ids.contiguous(), torch.empty(*ids.shape, self.in_features, dtype=torch.float32)
        pointers = (ctypes.addressof(self.fields()), ids.data_ptr(), ids.numel(), out.data_ptr())
        if found.clearhead_rows(*pointers):
            raise IndexError(f"ids contain one outside of the table's {self.out_features} rows")
        return out


def native_linear(fields: Any, x: Tensor, width: int, alike: bool = False) -> Tensor:
    """Return the matmul of `step.c` with the layer that `fields` describes: [..., D] -> [..., N]."""
    x, found = x.contiguous(), library()
    assert found is not None
    out = x.new_empty(*x.shape[:-1], width)
    rows, threads = x.numel() // x.shape[-1], torch.get_num_threads()
    pointers = (ctypes.addressof(fields), x.data_ptr(), out.data_ptr())
    if found.clearhead_linear(*pointers, rows, threads, alike):
        raise MemoryError(f"no memory for {rows} rows")
    return out


def run(x: Tensor, first: Any, layers: "array[int]", last: Any = None) -> Tensor:
    """Take rows [B, 1, D] through layers, `first` the call of the first one, and through the `last` norm."""
    x, found = x.contiguous(), library()
    assert found is not None
    out = torch.empty_like(x)
    first.x, first.out = x.data_ptr(), out.data_ptr()
    norm = NO_NORM if last is None else last
    if found.clearhead_blocks(layers.buffer_info()[0], len(layers) // LAYER_FIELDS, ctypes.addressof(norm)):
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


class NativeBlock(Described, Block):
    """A block that suits `step.c`, which takes one token with a cache; `Block` takes all else."""

    made_of: tuple[Block]  # a tuple, so that it is no part of this one
    alike = False  # add up each row in the same order, whatever the number of rows
    most_rows = MOST_ROWS

    def forward(self, x: Tensor, inputs: LayerInputs, tap: Tap = SILENT) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        suits = x.shape[1] == 1 and tap is SILENT and plain(x)
        call = self.call(x, inputs) if suits else None
        if call is None:
            return super().forward(x, inputs, tap)
        return run(x, call, array("Q", self.layer(call, inputs.keys, inputs.cross_keys)))

    def call(self, x: Tensor, inputs: LayerInputs) -> Any:
        """Describe a step of rows [B, 1, D] through layers of this view; None where `step.c` does not suit.

        The structure points to tensors that the view and the caches keep.
        """
        rows = x.shape[0]
        own = self._own(inputs.view, inputs.keys, rows) if rows <= self.most_rows else None
        source = self._source(inputs.cross_view, inputs.cross_keys, rows) if own is not None else None
        if own is None or source is None:
            return None
        (seen, *slot), rotary = own, inputs.view.rotary
        turns: tuple[int | None, ...] = (None, None, 0, 0)
        cos = sin = None
        if rotary is not None:
            cos, sin = (part.contiguous() for part in rotary)
            turns = cos.data_ptr(), sin.data_ptr(), _stride(cos, 0), cos.shape[-1]
        threads = torch.get_num_threads()
        made = CALL(None, None, rows, seen, source, *slot, *turns, threads, self.alike)
        made.kept = cos, sin  # for as long as the structure points to them
        return made

    def describe(self, pointers: Pointers) -> Any:
        """Describe the model's block: its weights are those of this one."""
        return pointers.block(self.made_of[0])

    def layer(self, call: Any, keys: Any, cross_keys: Any) -> tuple[int, ...]:
        """Return the fields of a layer: this block with its keys, which lie as those of the call."""
        source = (0, 0) if self.cross is None else (cross_keys.k.data_ptr(), cross_keys.v.data_ptr())
        pointers = ctypes.addressof(self.fields()), ctypes.addressof(call)
        return (*pointers, keys.k.data_ptr(), keys.v.data_ptr(), *source)

    def _own(self, view: masks.View, keys: LayerKV | None, rows: int) -> tuple[Any, ...] | None:
        """Describe the keys of the text, and the slots of the new ones; None where `step.c` does not suit."""
        if keys is None or type(keys) not in (LayerKV, RingKV):
            return None  # caches that compute otherwise have keys of their own
        if keys.k is None or keys.v is None or view.causal:
            return None
        if (
            view.blocks is not None
            or keys.k.shape[0] != rows
            or (view.bias is not None and self.attention.pruned)
        ):
            return None
        if isinstance(keys, RingKV):
            if keys.stream is not None:
                return None
            slots = keys.cache.slots[keys.kind]
            seen = _seen(keys.k, keys.v, keys.k.shape[2], view, rows) if view.mask is not None else None
            return None if seen is None else (seen, 0, slots.data_ptr(), _stride(slots, 0))
        slot = keys.cache.length
        seen = _seen(keys.k, keys.v, slot + 1, view, rows) if slot < keys.k.shape[2] else None
        return None if seen is None else (seen, slot, None, 0)

    def _source(self, view: masks.View | None, keys: LayerKV | None, rows: int) -> Any:
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


TOGETHER = 256  # tokens of a source that keep a matmul busy
WORTH = 0.9  # rows of a source are read in groups where so much of what padding makes of them is left


class NativeStack(Described, Stack):
    """A stack of blocks that `suits_native`: one call takes a step through all of them."""

    def forward(
        self,
        inputs: Inputs,
        tokens: masks.TokenInfo,
        memory: Memory | None = None,
        cache: Cache | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map the inputs, described by `tokens`, to hidden states [B, T, D]."""
        blocks = self.layers()
        native = all(isinstance(block, NativeBlock) and not block.attention.pruned for block in blocks)
        more = (cache, memory, inputs.types, inputs.prefix, inputs.bias, inputs.global_mask, inputs.vectors)
        bare = tap is SILENT and all(extra is None for extra in more)
        if bare and native and (groups := self.groups(inputs.ids, tokens)):
            return self._by_groups(inputs.ids, tokens, groups)
        one_token = cache is not None and tokens.length == 1 and inputs.vectors is None
        if cache is None or not one_token or tap is not SILENT or not native:
            return super().forward(inputs, tokens, memory, cache, tap)

        def place() -> Tensor | None:
            return self.positions.embed(tokens.positions, self.dtype)

        x: Tensor = self.embedding(inputs.ids, inputs.types, place, inputs.mask)  # B 1 D
        cache.begin(tokens)
        steps = self.layer_inputs(blocks, StackCall(inputs, tokens, cache, x.dtype), memory)
        found = through(x, blocks, steps, self.fields()) if plain(x) else None
        if found is None:
            for block, layer_inputs in zip(blocks, steps):
                x = block(x, layer_inputs)
            found = x if self.norm is None else self.norm(x)
        cache.advance()
        return found

    def describe(self, pointers: Pointers) -> Any:
        """Describe the norm after the last block, or that there is none."""
        return pointers.norm(self.norm)

    def groups(self, inputs: Tensor, tokens: masks.TokenInfo) -> list[tuple[Tensor, int]]:
        """Return rows of a source [B, T] by like length: their numbers and the longest's length.

        For rows that end in padding, of a stack whose states there nobody reads; none where it saves little.
        """
        real = tokens.real
        if not self.spec.prefix or self.spec.rotates_by_length or real is None or real.shape != inputs.shape:
            return []
        if tokens.documents is not None or torch.compiler.is_compiling():
            return []
        if not bool(real[:, 0].all()) or bool((real[:, 1:] > real[:, :-1]).any()):
            return []
        lengths = real.sum(1)
        at_once = max(1, TOGETHER * len(lengths) // int(lengths.sum()))
        found = [(rows, int(lengths[rows[-1]])) for rows in torch.split(lengths.argsort(), at_once)]
        return found if sum(len(rows) * most for rows, most in found) <= WORTH * inputs.numel() else []

    def _by_groups(self, inputs: Tensor, tokens: masks.TokenInfo, groups: list[tuple[Tensor, int]]) -> Tensor:
        """Map rows of like length together: [B, T] -> [B, T, D], zeros where padding is left out."""
        hidden = torch.zeros(*inputs.shape, self.spec.d_model, dtype=self.dtype)
        for rows, most in groups:

            def cut(x: Tensor, rows: Tensor = rows, most: int = most) -> Tensor:
                return x[rows, :most] if len(x) > 1 else x[:, :most]

            hidden[rows, :most] = super().forward(Inputs(cut(inputs)), tokens.map(cut))
        return hidden


def through(x: Tensor, blocks: list[Block], steps: list[LayerInputs], last: Any) -> Tensor | None:
    """Take rows [B, 1, D] through blocks and the `last` norm; None where `step.c` does not suit all of them.

    Layers of one view share the description of it, if their keys lie alike.
    """
    calls: dict[Any, Any] = {}
    layers = []
    for block, inputs in zip(blocks, steps):
        keys = inputs.keys
        assert isinstance(block, NativeBlock) and keys is not None
        if keys.k is None or keys.v is None:
            return None
        lie = (id(inputs.view), type(keys), keys.k.shape, keys.k.stride(), keys.v.stride())
        if lie not in calls:
            calls[lie] = block.call(x, inputs)
        if calls[lie] is None:
            return None
        layers.append(block.layer(calls[lie], keys, inputs.cross_keys))
    return run(x, calls[next(iter(calls))], array("Q", chain.from_iterable(layers)), last)


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
    sizes, pointers = (rows, width, count), (values.data_ptr(), ids.data_ptr())
    config = BEST(logits.data_ptr(), kept.data_ptr(), *sizes, *pointers)
    found.clearhead_best(ctypes.addressof(config), torch.get_num_threads())
    return values, ids
