"""How the chunks of a step go through the model: rows of one token in one way, longer chunks in another.

The ragged model runs chunks of several sequences side by side in one row, without padding. Linear layers,
norms and heads work on all tokens of the row at once. Attention works on each chunk by itself, through the
model's own formula, so that a chunk meets the same kernels with the same shapes whoever else is in the row.
Where rows are to be exact, any number of them goes through packed weights as a few rows do: on a CPU these
give each row the same bits whatever their number (`rows_agree` asks the machine). Which way a chunk goes
depends on its own length and request, and in a step that need not be exact on how many such rows there are.

Shapes: B batch, T tokens of all chunks, D model, H heads, K key/value heads, E head width, V vocabulary.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.core import masks
from clearhead.core.cache import LayerKV
from clearhead.core.config.kinds import Kind
from clearhead.core.feedforward import ACTIVATIONS
from clearhead.core.positions import Rotary
from clearhead.core.stack import Stack, StackCall
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Output, Transformer
from clearhead.learn.parallel.shards import is_split
from clearhead.run.kernels.native import NativeLinear
from clearhead.run.kernels.parts import Direct, PackedLinear, like
from clearhead.run.kernels.prepare import prepared
from clearhead.run.serve.adapters import AdaptedLayers
from clearhead.run.serve.decode_runner import CpuRunner, CudaGraphRunner
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
            for chunk, row in zip(rows, logits):
                chunk.seq.keep_prompt(row[None], chunk.start)
            last = [number for number, chunk in enumerate(rows) if _ends_text(chunk)]
            yield rows, [rows[number] for number in last], logits[last]

    def agree(self, most: int) -> bool:
        """Return whether this machine gives a row the same bits whatever else is in a step of `most` rows."""
        writes = self.decode_runner is None or (
            self.decode_runner.alike and rows_agree(self.decode_runner.model, most)
        )
        return writes and rows_agree(self.runner, most)

    def _is_row(self, chunk: Chunk[ServedSequence]) -> bool:
        return chunk.stop - chunk.start == 1 and chunk.seq.encoded and chunk.seq.adapter is None

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
        places = [place for chunk in plan for place in range(chunk.start, chunk.stop)]
        with self.adapted.step(adapted), attention_kernels(device):
            hidden = self.runner(
                torch.tensor([tokens], device=device),
                positions=torch.tensor([places], device=device),
                source=None if encoded else first.prompts.source,
                cache=PagedCache(pool, plan, sources),
                logits="none",
            ).hidden[0]  # T D
        for chunk in plan:
            seq = chunk.seq
            if seq.serving.prompt_logprobs is not None and chunk.start < len(seq.prompt):
                seq.keep_prompt(self.head(hidden[None, chunk.span], None)[0], chunk.start)
        last = [chunk for chunk in plan if _ends_text(chunk)]
        if not last:
            return plan, [], None
        logits = self.head(hidden[[chunk.span.stop - 1 for chunk in last]][:, None], None)[:, 0]
        return plan, last, logits


def _ends_text(chunk: Chunk[ServedSequence]) -> bool:
    """Return whether a chunk ends where its text does, or behind it with a draft token."""
    return chunk.stop >= len(chunk.seq.tokens)
