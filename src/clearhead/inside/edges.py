"""Edges between parts: a model in which every part reads a stream of its own, so that edges can be cut.

    graph = EdgeGraph.of(m.model)
    graph.writers[:3], graph.readers[0].name            # ("embedding", "0.0", "0.1"), "0.0.q"
    cut = Cut(mask, values)                             # [B, readers, writers], 1: cut; what is read instead
    cut_model(m.model, graph, cut)(ids)                 # a model that shares its weights
    runs_of(m, [PromptPair("Ann met Tom. Ann", "Ann met Tom. Tom")], "logit", "resample", -1)

What a part gives is added to the residual stream, and every later part reads the stream. So there is an edge
from each writer (an embedding, a head, a feed-forward) to each later reader (the queries, keys or values of a
head, a feed-forward, the output layer). Here each reader has its own copy of the stream, to which each writer
adds what it gives, or, across an edge that is cut, something else. Norms are taken anew for each copy, so
the definition is exact for every residual layout; and where nothing is cut the model is the model.

A writer of a stack is called as in `ablation`: "embedding", "3.2", "cross.1.0", "feedforward:3", and before
the decoder "encoder.embedding", "encoder.0.1", "feedforward:encoder.0". Heads that share keys and values
read them together: "3.0-2.k". Attention that has no queries, keys and values of each head by itself (latent,
gated, global, gated delta) is one part: "attention:3".

Shapes: B rows, R readers of a stack, W writers, n some readers or writers, T tokens of a stack, D model,
H heads, K key/value heads, E head width, N choices.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from clearhead.core.attention import Attention
from clearhead.core.cache import Cache, LayerKV
from clearhead.core.dtypes import wide
from clearhead.core.masks import TokenInfo, View
from clearhead.core.positions import Rotary
from clearhead.core.stack import Inputs, Memory, Residual, Stack, StackCall
from clearhead.core.taps import SILENT, Tap
from clearhead.core.transformer import Transformer
from clearhead.errors import refuse, refuse_unknown
from clearhead.inside import inputs
from clearhead.inside.inputs import choices_of, find_column
from clearhead.inside.names import AttentionName, refuse_foreign, refuse_shortcuts
from clearhead.inside.patch import aligned, answers_of, prepare_both
from clearhead.run.api import Model
from clearhead.run.kernels.parts import like
from clearhead.run.quant.layers import weight_of
from clearhead.variants.contexts import edit, evaluating
from clearhead.variants.global_attention import GlobalAttention

OUTPUT = "logits"


@dataclass(frozen=True)
class Reader:
    """What reads a stream: "3.2.q", "feedforward:3", "logits"."""

    name: str
    stream: str  # the prefix of the stack whose stream it reads
    layer: str  # "3", "encoder.0"; "" for the output layer
    sources: int  # how many of the stream's writers stand before it
    feeds: tuple[str, ...]  # the writers that compute from it


@dataclass(frozen=True)
class EdgeGraph:
    """The readers and the writers of a model, each in the order of the forward pass."""

    readers: tuple[Reader, ...]
    writers: tuple[str, ...]
    streams: Mapping[str, tuple[str, ...]]  # the writers of each stack, by its prefix

    @classmethod
    def of(cls, model: Transformer) -> "EdgeGraph":
        """Return the graph of a model."""
        refuse_foreign(model)
        refuse_shortcuts(model.config)
        refuse(
            model.config.depth_capacity != 1,
            "a router lets tokens skip whole layers of this model, which have no edges: take another one",
        )
        stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
        streams: dict[str, list[str]] = {stack.spec.prefix: [] for stack in stacks}
        readers: list[Reader] = []

        def read(name: str, stream: str, layer: str, feeds: tuple[str, ...]) -> None:
            readers.append(Reader(name, stream, layer, len(streams[stream]), feeds))

        crossing: list[tuple[str, str, tuple[str, ...]]] = []
        for stack in stacks:
            prefix, written = stack.spec.prefix, streams[stack.spec.prefix]
            written.append(f"{prefix}embedding")
            for number, block in enumerate(stack.layers()):
                layer = f"{prefix}{number}"
                inner = (f"feedforward:{layer}", prefix, layer, (f"feedforward:{layer}",))
                for part, kind in (
                    (block.attention, "encoder" if prefix else "self"),
                    (block.cross, "cross"),
                ):
                    if part is None:
                        continue
                    name = str(AttentionName(kind, number))
                    given, own = _parts_of(part, name)
                    for reader, feeds in own:
                        if kind == "cross" and not reader.endswith(".q"):
                            crossing.append((reader, layer, feeds))
                        else:
                            read(reader, prefix, layer, feeds)
                    if block.parallel:
                        read(*inner)
                    written += given
                if not block.parallel:
                    read(*inner)
                written.append(f"feedforward:{layer}")
            if stack is model.main:
                read(OUTPUT, prefix, "", ())
        for reader, layer, feeds in crossing:
            read(reader, stacks[0].spec.prefix, layer, feeds)
        names = tuple(name for written in streams.values() for name in written)
        return cls(tuple(readers), names, {prefix: tuple(written) for prefix, written in streams.items()})

    @cached_property
    def valid(self) -> Tensor:
        """Which edges there are: [R, W], boolean."""
        mask = torch.zeros(len(self.readers), len(self.writers), dtype=torch.bool)
        for row, reader in enumerate(self.readers):
            start = self.writers.index(self.streams[reader.stream][0])
            mask[row, start : start + reader.sources] = True
        return mask

    def reads(self, stream: str) -> list[int]:
        """Return the numbers of the readers of a stack's stream, in the order in which they read it."""
        return [row for row, reader in enumerate(self.readers) if reader.stream == stream]

    def edge(self, row: int, column: int) -> str:
        """Return an edge in words."""
        return f"{self.writers[column]} -> {self.readers[row].name}"

    def find(self, path: str) -> tuple[int, list["Stop"]]:
        """Return the first writer of a path, by its number, and every later stop.

        "0.3 -> 1.2.q -> logits"; a head without q, k or v stands for all that it reads.
        """
        first, *rest = (name.strip() for name in path.split("->"))
        refuse(not rest, f'"{path}" is no path: name a part and what reads it: "0.1 -> 1.0.q -> logits"')
        refuse_unknown("part", first, self.writers)
        known: dict[str, list[tuple[int, tuple[str, ...]]]] = {}  # the readers of a name, and what they feed
        for row, reader in enumerate(self.readers):
            known.setdefault(reader.name, []).append((row, reader.feeds))
            for feed in reader.feeds if reader.name[-2:] in (".q", ".k", ".v") else ():
                for name in {feed, f"{feed}{reader.name[-2:]}"} - {reader.name}:
                    known.setdefault(name, []).append((row, (feed,)))
        stops, current = list[Stop](), [self.writers.index(first)]
        for name in rest:
            refuse_unknown("reader", name, known)
            rows = [row for row, _ in known[name] if self.valid[row, current].any()]
            refuse(not rows, f"{name} does not read {self.writers[current[0]]}: name parts in their order")
            stops.append(Stop(rows, [self.writers.index(feed) for feed in known[name][0][1]]))
            current = stops[-1].feeds
        return self.writers.index(first), stops


class Stop(NamedTuple):
    """A stop of a path: readers, and the writers that compute from them, by number."""

    readers: list[int]
    feeds: list[int]


def _parts_of(part: Any, name: str) -> tuple[list[str], list[tuple[str, tuple[str, ...]]]]:
    """Return the writers of an attention, and its readers with the writers that each feeds."""
    if not splits(part):
        refuse(
            name.startswith("cross."),
            "cross-attention with a gate has no edges of its own: take another model",
        )
        return [f"attention:{name}"], [(f"attention:{name}", (f"attention:{name}",))]
    H, K = part.n_heads, part.n_kv_heads
    heads = [f"{name}.{head}" for head in range(H)]
    groups = [heads[group * H // K : (group + 1) * H // K] for group in range(K)]
    shared = [
        group[0] if len(group) == 1 else f"{group[0]}-{group[-1].rpartition('.')[2]}" for group in groups
    ]
    readers: list[tuple[str, tuple[str, ...]]] = [(f"{head}.q", (head,)) for head in heads]
    readers += [(f"{own}.{role}", tuple(group)) for role in "kv" for own, group in zip(shared, groups)]
    return heads, readers


def splits(part: Any) -> bool:
    """Return whether an attention has queries, keys and values of each head that come of its input alone."""
    plain = isinstance(part, Attention) and type(part).forward is Attention.forward
    return plain and part.gate is None and not isinstance(part, GlobalAttention)


@dataclass(frozen=True)
class Cut:
    """Which edges are cut, and what is read across them."""

    mask: Tensor | None = None  # [B|1, R, W]: 1 for an edge that is cut; None: none is
    values: Mapping[str, Tensor] = field(default_factory=dict)  # [B|1, T|1, D] by writer; without: zeros
    changes: Mapping[str, Tensor] | None = None  # what a cut adds to a writer's output, in place of `values`
    seen: dict[str, Tensor] | None = None  # filled with what every writer gives: [B, T, D]


def cut_model(model: Transformer, graph: EdgeGraph, cut: Cut) -> Transformer:
    """Return a model that shares all weights, and in which some edges are cut.

    Where layers hand on a stream, there are many: `resid_pre`, `resid_mid` and `resid_post` are not shown.
    """
    stacks = {
        name: like(stack, CutStack, graph=graph, cut=cut, made_of=tuple(stack.layers()))
        for name in ("encoder", "decoder")
        if (stack := getattr(model, name)) is not None
    }
    return like(model, type(model), **stacks)


class CutStack(Stack):
    """A stack whose readers have streams of their own. One before a decoder returns those: [B, n, T, D]."""

    graph: EdgeGraph
    cut: Cut
    made_of: tuple[Any, ...]  # the blocks of its layers

    def forward(
        self,
        inputs: Inputs,
        tokens: TokenInfo,
        memory: Memory | None = None,
        cache: Cache | None = None,
        tap: Tap = SILENT,
    ) -> Tensor:
        """Map the inputs, described by `tokens`, to hidden states [B, T, D]."""

        def vectors() -> Tensor | None:
            return self.positions.embed(tokens.positions, self.dtype, tap.part("positions"))

        x = self.embedding(
            inputs.ids, inputs.types, vectors, inputs.mask, tap.part("embedding"), inputs.vectors
        )
        streams = Streams(self.graph, self.cut, self.spec.prefix, tap("embedding", x))
        if cache is not None:
            cache.begin(tokens)
        call = StackCall(inputs, tokens, cache, x.dtype, tap)
        blocks = list(self.made_of)
        sources = None if memory is None or memory.hidden is None else _Queue(memory.hidden)
        for layer, (block, given) in enumerate(zip(blocks, self.layer_inputs(blocks, call, memory))):
            own = tap.part(f"blocks.{layer}")
            inner = own.part("feedforward")
            residual, second = block.attention_residual, block.feedforward_residual
            count = (
                1 if not splits(block.attention) else block.attention.n_heads + 2 * block.attention.n_kv_heads
            )
            normed = residual.norm_input(streams.take(count), SILENT)
            expanded = None
            if block.parallel:
                read = streams.take(1)[:, 0]
                shared = second.before is None
                read = residual.norm_input(read, SILENT) if shared else second.norm_input(read, SILENT)
                expanded = block.feedforward(inner("in", read), inner)
            streams.add(residual, *_attended(block, "attention", normed, normed, given.view, given.keys, own))
            if block.cross is not None and given.cross_view is not None:
                joins, cross = block.cross_residual, block.cross
                keys = None if sources is None else sources.take(2 * cross.n_kv_heads)
                queries = joins.norm_input(streams.take(cross.n_heads), SILENT)
                streams.add(
                    joins, *_attended(block, "cross", queries, keys, given.cross_view, given.cross_keys, own)
                )
            if expanded is None:
                read = second.norm_input(streams.take(1)[:, 0], SILENT)
                expanded = block.feedforward(inner("in", read), inner)
            streams.add(second, expanded[None])
        if cache is not None:
            cache.advance()
        x = streams.rest() if self.spec.prefix else streams.take(1)[:, 0]
        return tap("hidden", self.norm(x) if self.norm is not None else x)


class _Queue:
    """Streams [B, n, T, D] that are taken one after another."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def take(self, count: int) -> Tensor:
        """Return the next streams: [B, count, T, D]."""
        taken, self.x = self.x[:, :count], self.x[:, count:]
        return taken


class Streams(_Queue):
    """The streams of the readers that have not read yet, and what is still to be written to them."""

    def __init__(self, graph: EdgeGraph, cut: Cut, prefix: str, x: Tensor) -> None:
        self.cut, self.rows = cut, graph.reads(prefix)
        self.names, self.written = graph.streams[prefix], 0
        self.first = graph.writers.index(self.names[0])
        super().__init__(x[:, None].expand(-1, len(self.rows), -1, -1))
        self.x = self.x + self.swapped(x[None])

    def take(self, count: int) -> Tensor:
        """Return the streams of the next readers."""
        self.rows = self.rows[count:]
        return super().take(count)

    def rest(self) -> Tensor:
        """Return the streams of all readers that are left."""
        return self.x

    def add(self, residual: Residual, outputs: Tensor, others: Tensor | None = None) -> None:
        """Add what the next writers give [n, B, T, D], and what belongs to no writer [B, T, D]."""
        total = outputs.sum(0) if others is None else outputs.sum(0) + others
        self.x = residual.add(self.x, total[:, None] + self.swapped(outputs), SILENT)

    def swapped(self, outputs: Tensor) -> Tensor | float:
        """Return what cuts change for each reader, of the next writers' outputs: [B, n, T, D] or 0."""
        names = self.names[self.written : self.written + len(outputs)]
        columns = slice(self.first + self.written, self.first + self.written + len(outputs))
        self.written += len(outputs)
        if self.cut.seen is not None:
            self.cut.seen.update(zip(names, outputs))
        if self.cut.mask is None or not self.rows:
            return 0.0
        given = self.cut.values if self.cut.changes is None else self.cut.changes
        length = max((x.shape[-2] for name in names if (x := given.get(name)) is not None), default=1)
        refuse(
            length not in (1, outputs.shape[-2]),
            f"what is read across a cut is of {length} tokens, and these are {outputs.shape[-2]}: "
            "give an input of that length, or cut with ablation zero or mean",
        )
        if self.cut.changes is not None:
            changes = torch.stack([self.cut.changes[name].expand_as(outputs[0]) for name in names])
        else:
            values = [self.cut.values.get(name, outputs.new_zeros(())) for name in names]
            changes = torch.stack([x - y for x, y in zip(values, outputs)])
        mask = self.cut.mask[:, self.rows, columns].to(changes)  # B|1 R n
        if len(mask) == 1:
            return torch.einsum("rn,nbtd->brtd", mask[0], changes)
        return torch.einsum("brn,nbtd->brtd", mask, changes)


# Runs with cuts, on a pair of prompts -----------------------------------------------------------------------

Metric = Literal["logit", "probability", "kl"]
Ablation = Literal["resample", "mean", "zero"]
Edits = Mapping[str, Callable[[Tensor], Tensor | None]]
NUMBERS = 2**22  # of all streams of one pass together: more are slower


class PromptPair(NamedTuple):
    """Two prompts of equal length that differ in a detail, and the answer to each."""

    clean: Any
    corrupt: Any
    answer: str | int | None = None  # None: what the clean run says
    wrong: str | int | None = None
    target: str | None = None  # what the decoder of an encoder-decoder has written


@dataclass(frozen=True, eq=False)
class Run:
    """One pair of prompts: its clean input, what is read across cuts, and the metric."""

    graph: EdgeGraph
    clean: inputs.Prepared
    choices: inputs.Choices
    column: int
    good: int
    bad: int
    metric: str
    outputs: Mapping[str, Tensor]  # what every writer gives in the clean run, [1, T, D]
    values: Mapping[str, Tensor]
    final: Tensor  # [N] logarithms of the model's own probabilities
    note: str = ""

    def measure(self, cut: Cut, rows: int = 1, edits: Edits = MappingProxyType({})) -> Tensor:
        """Return the metric of each row of a run with cuts, and with some activations edited: [B]."""
        model = cut_model(self.clean.model, self.graph, cut)
        arguments = {name: x.expand(rows, *x.shape[1:]) for name, x in self.clean.arguments.items()}
        with evaluating(self.clean.model), evaluating(model), edit(model, edits):
            return self.of(self.choices.column_scores(model(**arguments, logits="none").hidden, self.column))

    def of(self, scores: Tensor) -> Tensor:
        """Return the metric of scores [B, N]: more is better."""
        scores = wide(scores)
        if self.metric == "logit":
            return scores[:, self.good] - scores[:, self.bad]
        if self.metric == "probability":
            return scores.softmax(-1)[:, self.good]
        return (self.final.exp() * (scores.log_softmax(-1) - self.final)).sum(-1)  # -KL

    @property
    def together(self) -> int:
        """How many rows one pass may hold."""
        tokens = len(self.clean.tokens) + len(self.clean.source_tokens or ())
        return max(1, NUMBERS // (len(self.graph.readers) * tokens * self.clean.m.config.d_model))

    def measure_rows(self, masks: Tensor) -> Tensor:
        """Return the metric with the edges of each mask cut: [B, R, W] -> [B]."""
        done = []
        with torch.no_grad():
            for some in torch.split(masks.float().to(self.final.device), self.together):
                done.append(self.measure(Cut(some, self.values), len(some)).cpu())
        return torch.cat(done)

    @property
    def changes(self) -> dict[str, Tensor]:
        """What a cut adds to each writer's output in the clean run."""
        return {name: self.values.get(name, torch.zeros_like(y)) - y for name, y in self.outputs.items()}


def runs_of(m: Model, prompts: Sequence[PromptPair], metric: str, ablation: str, position: int) -> list[Run]:
    """Return the runs of some pairs of prompts."""
    refuse_unknown("metric", metric, get_args(Metric))
    refuse_unknown("ablation", ablation, get_args(Ablation))
    graph, runs, given = EdgeGraph.of(m.model), list[Run](), list[Mapping[str, Tensor]]()
    for pair in prompts:
        first, second = prepare_both(m, pair.clean, pair.corrupt, pair.target)
        aligned(first.first_tokens, second.first_tokens)  # refuses unequal lengths
        choices = choices_of(first)
        column = find_column(position, choices.columns)
        (outputs, clean), (values, corrupt) = (_outputs(graph, run, column) for run in (first, second))
        good, bad, note = answers_of(choices, clean, corrupt, pair.answer, pair.wrong)
        final = wide(clean).log_softmax(-1).clamp(min=-1e30)
        runs.append(Run(graph, first, choices, column, good, bad, metric, outputs, values, final, note))
        given += [outputs, values]
    if ablation == "zero":
        return [replace(run, values={}) for run in runs]
    if ablation == "mean":
        means = {name: torch.cat([y[name][0] for y in given]).mean(0)[None, None] for name in graph.writers}
        return [replace(run, values=means) for run in runs]
    return runs


def _outputs(graph: EdgeGraph, run: inputs.Prepared, column: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return what every writer gives [1, T, D], and the scores of a column [N]."""
    seen = dict[str, Tensor]()
    with torch.no_grad(), evaluating(run.model):
        model = cut_model(run.model, graph, Cut(seen=seen))
        hidden = model(**run.arguments, logits="none").hidden
        return seen, choices_of(run).column_scores(hidden, column)[0]


def mean_metric(runs: Sequence[Run], masks: Tensor) -> Tensor:
    """Return the metric with the edges of each mask cut, the mean over prompts: [B, R, W] -> [B]."""
    return torch.stack([run.measure_rows(masks) for run in runs]).double().mean(0)


# Attention whose heads read streams of their own ------------------------------------------------------------


def _attended(
    block: Any, name: str, x: Tensor, source: Tensor | None, view: View, keys: LayerKV | None, tap: Tap
) -> tuple[Tensor, Tensor | None]:
    """Return what each head gives [H, B, T, D] and what no head gives [B, T, D].

    `x` [B, n, T, D] are the streams, of self-attention all: of queries, keys and values. In cross-attention
    `source` are those of keys and values; None: they are cached.
    """
    attention, tap = getattr(block, name), tap.part(name)
    memory = None if source is x or source is None else source[:, 0]
    if not splits(attention):
        return attention(x[:, 0], view, memory, keys, tap)[None], None
    H, K = attention.n_heads, attention.n_kv_heads
    if source is x:
        q, k, v = _projected(attention, x, view)
        k, v = k[:, H:], v[:, H:]
    else:
        q = _projected(attention, x, view)[0]
        k = v = q
        if source is not None:
            _, k, v = _projected(attention, source, view)
    parts = {"q": _own(q[:, :H])}
    if source is not None:
        parts |= {"k": _own(k[:, :K]), "v": _own(v[:, K:])}
    swap = _Swap(tap, parts)
    out = attention(x[:, 0], view, memory, keys, swap)
    weight = weight_of(attention, "out").to(out).view(out.shape[-1], H, -1)  # D H E
    given = torch.einsum("bhte,dhe->hbtd", swap.z, weight)
    return given, out - given.sum(0)


def _own(x: Tensor) -> Tensor:
    """Return the head h of stream h: [B, H, H, T, E] -> [B, H, T, E]."""
    return x.diagonal(dim1=1, dim2=2).movedim(-1, 1)


def _projected(attention: Attention, x: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of every head from every stream: [B, n, T, D] -> [B, n, H, T, E]."""
    B, n = x.shape[:2]
    rotary = view.rotary
    if rotary is not None and rotary.cos.shape[0] > 1:
        rotary = Rotary(*(part.repeat_interleave(n, 0) for part in rotary))
    catch = _Catch()
    with suppress(_CaughtError):
        attention(x.flatten(0, 1), replace(view, rotary=rotary), tap=catch)
    q, k, v = (x.view(B, n, *x.shape[1:]) for x in (catch.seen[name] for name in "qkv"))
    return q, k, v


class _CaughtError(Exception):
    """A pass that has shown what it was run for."""


class _Catch(Tap):
    """A tap that keeps queries, keys and values, and ends the pass before they are attended with."""

    def __init__(self) -> None:
        self.seen: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        self.seen[name] = x
        if name == "v":
            raise _CaughtError
        return x


class _Swap(Tap):
    """A tap that puts other queries, keys and values in place, and keeps what the heads mix."""

    def __init__(self, tap: Tap, parts: Mapping[str, Tensor]) -> None:
        self.tap, self.parts, self.traced = tap, parts, tap.traced

    def __call__(self, name: str, x: Tensor) -> Tensor:
        x = self.tap(name, self.parts.get(name, x))
        if name == "z":
            self.z = x
        return x

    def step(self, name: str, x: Tensor) -> Tensor:
        return self.tap.step(name, x)

    def part(self, name: str) -> Tap:
        return self.tap.part(name)

    def wants(self, *names: str) -> bool:
        return self.tap.wants(*names)
