"""How the chunks of a step go through the model: rows of one token in one way, longer chunks in another.

The ragged model runs chunks of several sequences next to each other in one row, without padding. Linear
layers, norms and heads work on all tokens of the row at once. Attention works on each chunk by itself,
through the model's own formula, so that a chunk meets the same kernels with the same shapes whoever else is
in the row. Where rows are to be exact, any number of them goes through packed weights as a few rows do: on a
CPU these give each row the same bits whatever their number (`rows_agree` asks the machine). Which way a chunk
goes depends on its own length and request, and in a step that need not be exact on how many such rows there
are.

A decode step has rows of one token of a sequence each, as a rule its last, with keys in the pool of blocks:

- On a CPU, one call of C a block reads the keys of all rows where they lie; a table says which blocks each
  row reads. Where `alike`, a row is summed in the same order whatever the number of rows, so that its bits do
  not depend on who else is in the step.
- On a GPU, a CUDA graph is captured for a few sizes, which double, for rows and for blocks. A step reads its
  rows from one table on the GPU: of each row its token, its position, and the blocks of the pool that hold
  its text. So one copy from the host says all that a step must know. Rows that fill a size up write to a
  block of the pool that nobody reads.

Shapes: B batch or rows, T tokens of all chunks, M blocks of the longest row, D model, H heads, K key/value
heads, E head width, V vocabulary.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.core import masks
from clearhead.core.cache import LayerKV
from clearhead.core.config.fields import BIASES
from clearhead.core.config.kinds import Full, Kind, Windowed
from clearhead.core.feedforward import ACTIVATIONS
from clearhead.core.positions import Rotary
from clearhead.core.stack import Stack, StackCall
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Output, Transformer
from clearhead.learn.parallel.shards import is_split
from clearhead.run.generate.vectors import Span, axes_of, embedded
from clearhead.run.kernels.fixed_cache import FixedKV
from clearhead.run.kernels.kernels import available, paged_attend
from clearhead.run.kernels.library import VIEW, library
from clearhead.run.kernels.native import MOST_ROWS, NativeBlock, NativeLinear
from clearhead.run.kernels.parts import Direct, PackedLinear, like
from clearhead.run.kernels.prepare import StepBlock, prepared
from clearhead.run.kernels.steps import captured, slots_bucket
from clearhead.run.serve.adapters import AdaptedLayers
from clearhead.run.serve.kv_cache import (
    Chunk,
    Int8Slots,
    PagedCache,
    Pool,
    Slots,
    SourceTokens,
    group_of,
    read_slots,
)
from clearhead.run.serve.limits import Limits
from clearhead.run.serve.sequence import Plan, ServedSequence
from clearhead.variants.caches import LayerState
from clearhead.variants.recurrent import RecurrentLayer

HEAD_ROWS = 2  # beyond them packed weights are quicker for the head
FEWEST_BLOCKS = 8
SMALLEST_BLOCK = 16  # slots of a block that a kernel takes at least


class CpuBlock(NativeBlock):
    """A block that takes the rows of a step through `step.c`."""

    most_rows = sys.maxsize

    def _own(self, view: masks.View, keys: LayerKV | None, rows: int) -> tuple[Any, ...] | None:
        if not isinstance(keys, FixedKV):
            return super()._own(view, keys, rows)
        return _paged(view, keys), 0, keys.cache.rows_of(group_of(keys.kind)).new.data_ptr(), 1

    def _source(self, view: masks.View | None, keys: LayerKV | None, rows: int) -> Any:
        paged = view is not None and isinstance(keys, FixedKV)
        return _paged(view, keys) if paged else super()._source(view, keys, rows)


def _paged(view: masks.View | None, keys: Any) -> Any:
    """Describe keys in a pool, with mask, bias and table, as `step.c` reads them."""
    assert view is not None and view.mask is not None
    k, v, mask, bias = keys.k, keys.v, view.mask, view.bias
    table = keys.cache.rows_of(group_of(keys.kind)).table
    added: tuple[int | None, ...] = (None, 0, 0, 0)
    if bias is not None:
        added = (bias.data_ptr(), *(bias.stride(axis) if bias.shape[axis] > 1 else 0 for axis in (0, 1, 3)))
    seen = (mask.data_ptr(), mask.stride(0), mask.stride(3))
    strides = (0, k.stride(1), k.stride(2), 0, v.stride(1), v.stride(2))
    rows = (table.data_ptr(), table.stride(0), mask.shape[3] // table.shape[1])
    return VIEW(k.data_ptr(), v.data_ptr(), *strides, 1, mask.shape[3], *seen, *added, *rows)


class CpuRunner:
    """An inference model that takes one token of each of several sequences further."""

    in_order = True  # keys of all rows are written before one is read: a sequence may have several rows

    def __init__(self, model: Transformer, alike: bool) -> None:
        """Prepare the copy; `alike`: the bits of a row do not depend on the number of rows."""
        self.alike, self.most = alike, sys.maxsize if alike else MOST_ROWS
        self.head_rows = 0 if alike else HEAD_ROWS  # beyond them the packed head, whose rows are alike

        def part_of(part: nn.Module) -> nn.Module:
            if isinstance(part, NativeBlock):
                part = like(part, CpuBlock)
            if alike and isinstance(part, NativeBlock | NativeLinear):
                part.alike = True
            return part

        self.model = prepared(model, then=part_of)

    @staticmethod
    def make(model: Transformer, alike: bool) -> "CpuRunner | None":
        """Return a runner; None where `step.c` does not compute all that the model's blocks do."""
        weight, spec = next(model.parameters()), model.main.spec
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or library() is None:
            return None
        if not all(isinstance(kind, Full | Windowed) for kind in spec.kinds):
            return None
        made = CpuRunner(model, alike)
        blocks = cast(Sequence[Any], made.model.main.blocks)
        plain = all(isinstance(block, CpuBlock) and not block.attention.pruned for block in blocks)
        return made if plain and isinstance(made.model.head.out, NativeLinear) else None

    def __call__(
        self, pool: Pool, chunks: Sequence[Chunk[Any]], tokens: Sequence[int], sources: Sequence[int]
    ) -> Tensor:
        """Run one token of each chunk; return its hidden state [B, D]."""
        cache, ids = PagedCache(pool, chunks, sources, by_rows=True), torch.tensor(tokens)[:, None]
        positions = torch.tensor([[chunk.start] for chunk in chunks])
        hidden: Tensor = self.model(ids, positions=positions, cache=cache, logits="none").hidden
        return hidden[:, 0]


class GraphBlock(StepBlock):
    """A block that takes one token of each row through the kernels, with keys in a pool."""

    def attended(self, x: Tensor, view: masks.View, keys: LayerKV | None) -> Tensor | None:
        """Attend with one token of each row [B, 1, D] -> [B, 1, H·E]."""
        if not isinstance(keys, FixedKV) or keys.kind is None or not isinstance(keys.cache, PagedCache):
            return super().attended(x, view, keys)
        given, size, reach = cast(Tensor, keys.cache.given), keys.cache.pool.size, keys.kind.reach or 0
        where = (given[:, 2:], given[:, 1], size, reach)
        return paged_attend(self.projected(x), keys.k, keys.v, *where, self.formula(view))


class CudaGraphRunner:
    """An inference model that takes one token of each of several sequences further, by CUDA graphs."""

    alike = False
    in_order = False  # a row reads while others write their keys

    def __init__(self, model: Transformer, most: int) -> None:
        """Prepare the copy for up to `most` rows."""

        def part_of(part: nn.Module) -> nn.Module:
            return like(part, GraphBlock) if isinstance(part, StepBlock) else part

        self.most = self.head_rows = most
        self.model = prepared(model, kernels=True, then=part_of)
        self.steps: dict[tuple[int, int], tuple[Tensor, Callable[[], object], list[Tensor]]] = {}

    @staticmethod
    def make(model: Transformer, most: int, size: int) -> "CudaGraphRunner | None":
        """Return a runner; None where the kernels do not compute all that the model's blocks do.

        Nor do they read blocks of every `size`: it must be a power of two.
        """
        weight, spec = next(model.parameters()), model.main.spec
        reads = all(isinstance(kind, Full | Windowed) and not kind.kept_first for kind in spec.kinds)
        alike = len({group_of(kind) for kind in spec.kinds}) == 1  # one table serves all layers
        fits = size >= SMALLEST_BLOCK and size.bit_count() == 1
        if not (available(weight) and reads and alike and fits) or spec.cross or spec.positions in BIASES:
            return None
        made = CudaGraphRunner(model, most)
        blocks = cast(Sequence[Any], made.model.main.blocks)
        plain = all(isinstance(block, GraphBlock) and not block.attention.pruned for block in blocks)
        return made if plain else None

    def __call__(
        self, pool: Pool, chunks: Sequence[Chunk[Any]], tokens: Sequence[int], sources: Sequence[int] = ()
    ) -> Tensor:
        """Run one token of each chunk; return its hidden state [B, D], which the next call overwrites."""
        (group,) = {group_of(kind) for kind in self.model.main.spec.kinds}
        rows = [chunk.seq.tables[group].ids for chunk in chunks]
        longest = max(chunk.start // pool.size + 1 for chunk in chunks)
        size = slots_bucket(len(chunks), 1), slots_bucket(longest, FEWEST_BLOCKS)
        table = np.full((size[0], 2 + size[1]), pool.spare, np.int64)
        table[:, :2] = 0
        for line, chunk, token, ids in zip(table, chunks, tokens, rows):
            count = chunk.start // pool.size + 1
            line[0], line[1] = token, chunk.start
            line[2 : 2 + count] = [pool.spare if block is None else block for block in ids[:count]]
        if size not in self.steps:
            self.steps[size] = self._step(pool, *size)
        given, replay, hidden = self.steps[size]
        given.copy_(torch.from_numpy(table), non_blocking=True)
        replay()
        return hidden[0][: len(chunks)]

    def _step(self, pool: Pool, rows: int, blocks: int) -> tuple[Tensor, Callable[[], object], list[Tensor]]:
        """Make the step of a size; on a GPU, capture it."""
        given = torch.full((rows, 2 + blocks), pool.spare, dtype=torch.long, device=pool.device)
        given[:, :2] = 0
        cache, found = PagedCache(pool, given=given), list[Tensor]()

        def run() -> None:
            cache.count_from(given[:, 1:2])
            hidden = self.model(given[:, :1], cache=cache, logits="none").hidden[:, 0]
            if found:
                found[0].copy_(hidden)
            else:
                found.append(hidden.clone())

        run()
        return given, captured(run) if pool.device.type == "cuda" else run, found


@dataclass(frozen=True)
class ChunkView:
    """What the attention of one chunk may see; `slots` of a pool hold its keys, else they are its own."""

    span: slice
    view: masks.View
    slots: Slots | None = None

    def keys(self, x: Tensor | Int8Slots) -> Tensor:
        """Return the keys or values that this chunk reads: [1, K, S, E]."""
        slots = self.span if self.slots is None else self.slots
        return x.at(slots) if isinstance(x, Int8Slots) else read_slots(x, slots)


@dataclass(frozen=True)
class RaggedView(masks.View):
    """The views of the chunks of a row; `rotary` is that of the whole row."""

    chunks: tuple[ChunkView, ...] = ()

    def attended(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, keys: Any, tap: Any, x: Tensor
    ) -> Tensor:
        """Attend with each chunk of queries [1, H, T, E] by itself; keys [1, K, T, E] are written first."""
        if keys is not None and not isinstance(keys, LayerState):
            k, v = keys.update(k, v)
        answers = [
            attend(
                q[:, :, chunk.span], chunk.keys(k), chunk.keys(v), chunk.view, state, tap, x[:, chunk.span]
            )
            for chunk, state in zip(self.chunks, self.states(keys))
        ]
        return torch.cat(answers, dim=2)

    def states(self, keys: LayerKV | None) -> Iterable[LayerState | None]:
        """Return the state of each chunk, where a layer keeps states."""
        return keys.chunks if isinstance(keys, LayerState) else [None] * len(self.chunks)


class RaggedStack(Direct, Stack):
    """A stack that views each chunk of a row by itself: those of a paged cache, or packed documents."""

    def views(self, kinds: tuple[Kind, ...], call: StackCall) -> dict[Kind, masks.View]:
        """Return the views of each chunk; of other passes, see `Stack`."""
        inputs, tokens, cache = call.inputs, call.tokens, call.cache
        chunks: list[tuple[slice, masks.TokenInfo, Any]]
        if isinstance(cache, PagedCache):
            chunks = [(p.span, _counted(p.start, p.stop, tokens.order.device), p) for p in cache.chunks]
        elif cache is None and tokens.documents is not None and tokens.order.shape[0] == 1:
            spans = runs(tokens.documents[0].tolist())
            device = tokens.order.device
            chunks = [(span, _counted(0, span.stop - span.start, device), None) for span in spans]
        else:
            return super().views(kinds, call)
        found: list[dict[Kind, masks.View]] = []
        for span, own, alone in chunks:
            marked = inputs.global_mask
            cut = inputs._replace(
                ids=inputs.ids[:, span], global_mask=None if marked is None else marked[:, span]
            )
            if tokens.axes is not None:
                own = replace(own, axes=tokens.axes[:, span])
            found.append(super().views(kinds, call._replace(inputs=cut, tokens=own, cache=alone)))

        def ragged(kind: Kind) -> masks.View:
            views = [views_of[kind] for views_of in found]
            parts = tuple(
                ChunkView(span, view, p.read(group_of(kind))[1] if p is not None and kind.masked else None)
                for (span, _, p), view in zip(chunks, views)
            )
            turns = [view.rotary for view in views if view.rotary is not None]
            return RaggedView(
                rotary=Rotary(*(torch.cat(t, dim=2) for t in zip(*turns))) if turns else None, chunks=parts
            )

        return {kind: ragged(kind) for kind in kinds}

    def cross_view(self, tokens: masks.TokenInfo, source: masks.TokenInfo, batch: int) -> masks.View:
        """Return what each chunk sees of its source: all."""
        if not isinstance(source, SourceTokens):
            return super().cross_view(tokens, source, batch)
        at, parts = 0, []
        for slots, length in zip(source.slots, source.lengths):
            parts.append(ChunkView(slice(at, at + length), masks.View(), slots))
            at += length
        return RaggedView(chunks=tuple(parts))


def _counted(start: int, stop: int, device: torch.device) -> masks.TokenInfo:
    count = torch.arange(start, stop, device=device)[None]
    return masks.TokenInfo(count, count, None, None, plain=True)


def runs(documents: list[int]) -> list[slice]:
    """Return where each run of equal numbers begins and ends."""
    starts = [at for at, document in enumerate(documents) if at == 0 or document != documents[at - 1]]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(documents)])]


class RaggedRecurrent(Direct, RecurrentLayer):
    """A recurrent layer that reads each chunk of a row by itself."""

    adapted: AdaptedLayers | None = None  # of the runner, where its steps may have adapters

    def forward(
        self,
        x: Tensor,
        view: masks.View,
        memory: Tensor | None = None,
        layer_kv: LayerKV | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map [1, T, D] -> [1, T, D]."""
        if not isinstance(view, RaggedView):
            return super().forward(x, view, memory, layer_kv, tap)
        answers = []
        for chunk, state in zip(view.chunks, view.states(layer_kv)):
            with contextlib.nullcontext() if self.adapted is None else self.adapted.within(chunk.span):
                answers.append(super().forward(x[:, chunk.span], chunk.view, memory, state, tap))
        return torch.cat(answers, dim=1)


class Unpadded(Direct, Transformer):
    """A model of one stack that leaves the padding of its rows out of all work but the head's."""

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *more: Any,
        types: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        **named: Any,
    ) -> Output:
        """Run as `Transformer.forward`, whose arguments these are."""
        left = self.decoder is not None or mask is None or any(given is not None for given in more)
        if left or named or self.main.spec.input != "tokens":
            return super().forward(ids, mask, *more, types=types, logits=logits, **named)
        assert mask is not None
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        flat = super().forward(
            ids[mask][None],
            documents=rows[mask][None],
            types=None if types is None else types[mask][None],
            logits="none",
        )
        hidden = flat.hidden.new_zeros(*ids.shape, flat.hidden.shape[-1])  # B T D
        hidden[mask] = flat.hidden[0]
        return Output(None if logits == "none" else self.head(hidden, mask), hidden)


RAGGED: dict[type[nn.Module], type[nn.Module]] = {
    Transformer: Unpadded,
    Stack: RaggedStack,
    RecurrentLayer: RaggedRecurrent,
}


def ragged(model: Transformer, exact: bool = False) -> Transformer:
    """Return the inference model that runs rows of chunks; `prepared` says how long it is valid.

    `exact`: any number of rows takes packed weights.
    """

    def part_of(part: nn.Module) -> nn.Module:
        for base, kind in RAGGED.items():
            if isinstance(part, base):
                recurrent = base is RecurrentLayer  # each has a class of its own
                return like(part, type(kind.__name__, (kind, type(part)), {}) if recurrent else kind)
        if exact and isinstance(part, PackedLinear):
            part.packed_rows = range(1, sys.maxsize)
        return part

    return prepared(model, then=part_of, native=False)


@torch.inference_mode()
def rows_agree(model: Transformer, most: int) -> bool:
    """Return whether linear layers and activations give a row the same bits alone and among `most` rows."""
    generator = torch.Generator().manual_seed(0)
    tried: set[tuple[int, int]] = set()

    def alike(part: Callable[[Tensor], Tensor], width: int, like: Tensor) -> bool:
        x = torch.randn(most, width, generator=generator).to(like)
        whole = part(x)
        counts = {1, 2, 3, 5, 8, 9, 17, 33, 64, 65, most // 2}
        return all(torch.equal(part(x[:count]), whole[:count]) for count in counts if 0 < count <= most)

    for part in model.modules():
        sizes = (getattr(part, "in_features", 0), getattr(part, "out_features", 0))
        if isinstance(part, PackedLinear | NativeLinear | nn.Linear) and sizes not in tried:
            tried.add(sizes)
            if not alike(part, sizes[0], part.weight):
                return False
    # The last numbers of a tensor, too few for a vector, may be computed otherwise than those before them.
    spec = model.main.spec
    return alike(ACTIVATIONS[spec.activation], spec.d_ff, next(model.parameters()))


# cuDNN's is not among them: it makes a plan for each new length, which takes longer than the attention.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_kernels(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Let PyTorch choose from these kernels in the context."""
    return sdpa_kernel(KERNELS) if device.type == "cuda" else contextlib.nullcontext()


class ModelRunner:
    """The inference models that the steps of an engine run."""

    def __init__(self, model: Transformer, limits: Limits) -> None:
        spec = model.main.spec
        self.decode_runner: CpuRunner | CudaGraphRunner | None = None
        floats = limits.cache is None  # all that its kernels read
        if spec.causal and model.config.head == "lm" and limits.rows and floats and not is_split(model):
            self.decode_runner = CpuRunner.make(model, limits.exact) or CudaGraphRunner.make(
                model, limits.running, limits.block
            )
        self.runner = ragged(model, limits.exact)
        self.head: Callable[[Tensor, None], Tensor] = self.runner.head
        self.adapted = AdaptedLayers(self.runner, model)
        # Told of each chunk and its states [N, D].
        self.observe: Callable[[Chunk[ServedSequence], Tensor], None] = lambda chunk, states: None
        for part in self.runner.modules():
            if isinstance(part, RaggedRecurrent):
                part.adapted = self.adapted

    def run(self, pool: Pool, plan: Plan) -> Iterator[tuple[Plan, Plan, Tensor | None]]:
        """Run a step: yield what ran, what of it a token is chosen after, and its logits [B, V]."""
        rows = [chunk for chunk in plan if self._is_row(chunk)]
        if (
            self.decode_runner is not None and not self.decode_runner.in_order
        ):  # a row would not see those of its own text
            counts = Counter(chunk.seq for chunk in rows)
            rows = [chunk for chunk in rows if counts[chunk.seq] == 1]
        if self.decode_runner is None or len(rows) > self.decode_runner.most:
            rows = []
        longer = [chunk for chunk in plan if chunk not in rows] if rows else plan
        if longer:  # first, since the rows of a text may follow in the same step
            yield self._together(pool, longer)
        if rows and self.decode_runner is not None:
            tokens = [token for chunk in rows for token in chunk.seq.tokens_at(chunk.start, chunk.stop)]
            sources = [chunk.seq.sources for chunk in rows] if rows[0].seq.sources else []
            hidden = self.decode_runner(pool, rows, tokens, sources)  # B D
            few = len(rows) <= self.decode_runner.head_rows
            logits = (self.decode_runner.model.head if few else self.head)(hidden[:, None], None)[:, 0]
            for chunk, row, state in zip(rows, logits, hidden):
                chunk.seq.keep_prompt(row[None], chunk.start)
                self.observe(chunk, state[None])
            last = [number for number, chunk in enumerate(rows) if _ends_text(chunk)]
            yield rows, [rows[number] for number in last], logits[last]

    def agree(self, most: int) -> bool:
        """Return whether this machine gives a row the same bits whatever else is in a step of `most` rows."""
        writes = self.decode_runner is None or (
            self.decode_runner.alike and rows_agree(self.decode_runner.model, most)
        )
        return writes and rows_agree(self.runner, most)

    def _is_row(self, chunk: Chunk[ServedSequence]) -> bool:
        own = chunk.seq.vectors
        images = own is not None and (own.axes is not None or own.holds(chunk.start, chunk.stop))
        one = chunk.stop - chunk.start == 1 and not images
        return one and chunk.seq.encoded and chunk.seq.adapter is None

    def _together(self, pool: Pool, plan: Plan) -> tuple[Plan, Plan, Tensor | None]:
        """Run chunks of any length, side by side in one row."""
        at = 0
        for chunk in plan:
            at = chunk.placed(at)
        first, device = plan[0].seq, next(self.runner.parameters()).device
        encoded = first.encoded
        sources = [chunk.seq.sources for chunk in plan] if first.sources and encoded else []
        spans = [(chunk.span if encoded else slice(None), chunk.seq.adapter) for chunk in plan]
        adapted = [(span, adapter) for span, adapter in spans if adapter is not None]
        tokens = [t for chunk in plan for t in chunk.seq.tokens_at(chunk.start, chunk.stop)]
        positions = [n for chunk in plan for n in range(chunk.start, chunk.stop)]
        ids = torch.tensor([tokens], device=device)
        vectors = [Span(chunk.seq.vectors, chunk.start, chunk.stop, chunk.span.start) for chunk in plan]
        with self.adapted.step(adapted), attention_kernels(device):
            x, counted = embedded(self.runner, ids, vectors), torch.tensor([positions], device=device)
            axes = axes_of(vectors, counted)
            hidden = self.runner(
                ids,
                positions=counted,
                source=None if encoded else first.prompts.source,
                cache=PagedCache(pool, plan, sources),
                logits="none",
                **({} if x is None else {"vectors": x}),
                **({} if axes is None else {"axes": axes}),
            ).hidden[0]  # T D
        for chunk in plan:
            seq = chunk.seq
            self.observe(chunk, hidden[chunk.span])
            if seq.serving.prompt_logprobs is not None and chunk.start < len(seq.prompt):
                seq.keep_prompt(self.head(hidden[None, chunk.span], None)[0], chunk.start)
        last = [chunk for chunk in plan if _ends_text(chunk)]
        if not last:
            return plan, [], None
        logits = self.head(hidden[[chunk.span.stop - 1 for chunk in last]][:, None], None)[:, 0]
        return plan, last, logits


def _ends_text(chunk: Chunk[ServedSequence]) -> bool:
    """Return whether a chunk ends where its text does, or after it with a draft token."""
    return chunk.stop >= len(chunk.seq.tokens)
