"""What each node of an attribution graph adds, to the logit and to other nodes: see `graph`.

Shapes: T tokens, S keys, D model, H heads, K key/value heads, E head width, N units (features or neurons),
G targets at a time, R rows of slopes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.inside import results
from clearhead.inside.features.dictionary import Dictionary
from clearhead.inside.held import HEADS, CutPass, Scores, holding, removing
from clearhead.inside.interventions import OnRows
from clearhead.inside.logit_attribution import LogitQuery
from clearhead.inside.names import part_of
from clearhead.variants.contexts import evaluating, record

TINY = 1e-30
TOGETHER = 2**24  # numbers of the gradients that are held at a time
STEPS = 16  # of the integral over scores
ROWS = 16  # interventions of one pass


@dataclass(frozen=True)
class Node(results.Result):
    """One part at one token."""

    id: str  # "3.2@5", "feedforward 3@5", "feature 3.117@5", "embedding@0", "logit", or a group's name
    kind: str  # embedding, head, feedforward, feature, neuron, error, skip, group, logit
    layer: int | None  # -1: the embedding
    position: int | None
    label: str  # of the token
    stack: str  # "encoder." or ""
    value: float  # what it adds to the logit
    influence: float = 0.0
    activation: float | None = None  # of a feature or a neuron
    others: float = 0.0  # of the value: from nodes and edges that are left out
    bias: float = 0.0  # of the value: from biases


@dataclass(frozen=True)
class GraphEdge(results.Result):
    """What one node adds to another directly."""

    source: str
    target: str
    kind: str  # value, key, query
    value: float  # in logits
    influence: float = 0.0


# The units of a feed-forward --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Units:
    """A feed-forward's output as a sum of units, each a vector times an activation that is linear in x."""

    name: str  # feature or neuron
    layer: str  # "3", "encoder.3"
    tap: str  # of x
    x: Tensor  # 1 T D_in, with its graph
    active: Tensor  # T N
    encoder: Tensor | None  # D_in N; None: the units are x itself
    decoder: Tensor  # N D
    bias: Tensor  # D
    skip: Tensor | None  # D D_in

    def inward(self, slope: Tensor) -> Tensor:
        """Return the slope at x of what units (and the skip) add, from the slope at the output: [T, D]."""
        units = (slope @ self.decoder.T) * (self.active != 0)
        back = units if self.encoder is None else units @ self.encoder.T
        return back if self.skip is None else back + slope @ self.skip


def units_of(cut: CutPass, tap: str, dictionaries: Mapping[str, Dictionary], neurons: bool) -> Units | None:
    """Return the units of a feed-forward by the tap of its output; None where it stays whole."""
    layer = tap.replace("blocks.", "").removesuffix(".feedforward.out")
    if not tap.endswith(".feedforward.out"):
        return None
    if tap in dictionaries:
        own = dictionaries[tap]
        x = cut[own.at]
        with torch.no_grad():
            active = own.encode(x[0].detach())
        skip = None if own.W_skip is None else own.W_skip.detach()
        encoder, decoder, bias = (weight.detach() for weight in (own.W_enc, own.W_dec, own.b_dec))
        return Units("feature", layer, own.at, x, active, encoder, decoder, bias, skip)
    if neurons:
        name = f"{tap.removesuffix('out')}post"
        post = cut[name]
        down = part_of(cut.prepared.model, tap).down
        bias = torch.zeros_like(down.weight[:, 0]) if down.bias is None else down.bias
        active, decoder = post[0].detach(), down.weight.detach().T
        return Units("neuron", layer, name, post, active, None, decoder, bias.detach(), None)
    return None


# Nodes and edges ------------------------------------------------------------------------------------------


@dataclass
class Part:
    """The nodes of one part."""

    tap: str
    kind: str  # of its nodes
    name: str  # "3" of the heads "3.0", "3.1"; "feedforward 3"
    values: Tensor  # [H, T], [T, N] or [T]: what each adds to the logit
    vectors: Tensor  # [T, D]; of heads z [H, T, E]
    slope: Tensor  # T D: the logit's slope at what the part adds, over all paths
    units: Units | None = None
    weights: Tensor | None = None  # H T S: what a unit of each score brought


class Candidate(NamedTuple):
    """A node that may be kept."""

    part: Part
    place: tuple[int, ...]  # in the part's values
    node: Node
    vector: Tensor  # D: what it adds


class Effects:
    """The nodes of a cut pass, with their values, and the edges among some."""

    def __init__(
        self,
        query: LogitQuery,
        cut: CutPass,
        dictionaries: Mapping[str, Dictionary],
        neurons: bool,
        scores: bool,
    ) -> None:
        self.query, self.cut, self.with_scores = query, cut, scores
        self.parts: list[Part] = []
        hidden, read = cut.hidden, query.read
        at_hidden = torch.zeros_like(hidden).index_add(1, read.rows, read.directions[None])
        slopes = {name: torch.zeros_like(leaf[0]) for name, leaf in cut.leaves.items()}
        self.direct = cut.slopes([hidden], [at_hidden], cut.leaves)
        for name, slope in self.direct.items():
            slopes[name] += slope
        for tap in reversed(list(cut.leaves)):
            slope, attention = slopes[tap], tap.removesuffix(".out")
            units = units_of(cut, tap, dictionaries, neurons)
            parts = self._parts(tap, slope, units)
            self.parts = parts + self.parts
            if tap.endswith("embedding"):
                continue
            outs, back = [cut.outs[tap]], [slope[None]]
            if units is not None:
                outs, back = [units.x], [units.inward(slope)[None]]
            elif parts[0].weights is not None:
                sides = self._toward_scores(attention, parts[0].weights)
                outs += [cut.seen[f"{attention}.q"], cut.seen[f"{attention}.k"]]
                back += [side[None] for side in sides]
            for name, more in cut.slopes(outs, back, cut.before(tap)).items():
                slopes[name] += more

    def _parts(self, tap: str, slope: Tensor, units: Units | None) -> list[Part]:
        leaf, short = self.cut.leaves[tap][0].detach(), tap.replace("blocks.", "")
        if tap.endswith(HEADS):
            attention = tap.removesuffix(".out")
            z, weight = self.cut.seen[f"{attention}.z"][0].detach(), self.cut.weight_out(tap)
            slope_z = torch.einsum("td,hed->hte", slope, weight)
            name = short.removesuffix(".attention.out")
            name = f"cross.{name.removesuffix('.cross.out')}" if name.endswith(".cross.out") else name
            weights = self._score_weights(attention, slope_z, z) if self.with_scores else None
            return [Part(tap, "head", name, (slope_z * z).sum(-1), z, slope, weights=weights)]
        if units is None:
            kind = "embedding" if tap.endswith("embedding") else "feedforward"
            name = tap if kind == "embedding" else f"feedforward {short.removesuffix('.feedforward.out')}"
            return [Part(tap, kind, name, (slope * leaf).sum(-1), leaf, slope)]
        values = units.active * (slope @ units.decoder.T)
        parts = [Part(tap, units.name, f"{units.name} {units.layer}", values, leaf, slope, units)]
        left = leaf - units.active @ units.decoder - units.bias
        if units.skip is not None:
            skipped = units.x[0].detach() @ units.skip.T
            left = left - skipped
            value = (slope * skipped).sum(-1)
            parts.append(Part(tap, "skip", f"skip {units.layer}", value, skipped, slope, units))
        if units.name == "feature":
            parts.append(
                Part(tap, "error", f"error {units.layer}", (slope * left).sum(-1), left, slope, units)
            )
        return parts

    def _score_weights(self, attention: str, slope: Tensor, z: Tensor) -> Tensor:
        """Return what a unit of each score brought: the head's value integrated from no scores to these."""
        pattern, v = (self.cut.seen[f"{attention}.{tap}"][0].detach() for tap in ("pattern", "v"))
        v = v.repeat_interleave(len(pattern) // len(v), 0)
        mixed = pattern @ v
        gate = torch.where(mixed == 0, 0.0, z / torch.where(mixed == 0, 1.0, mixed))
        values = ((slope * gate) @ v.mT).float()  # H T S
        scores, total = Scores.of(self.cut, attention), torch.zeros_like(values)
        sink = part_of(self.cut.prepared.model, attention).sink_logits()
        hidden = torch.where(scores.seen, 0.0, -math.inf).float()
        for step in range(STEPS):
            logits = scores.total.float() * ((step + 0.5) / STEPS) + hidden
            if sink is not None:
                logits = torch.cat([logits, sink.float()[:, None, None].expand(-1, logits.shape[1], 1)], -1)
            share = logits.softmax(-1).nan_to_num()[..., : values.shape[-1]]
            total += share * (values - (share * values).sum(-1, keepdim=True))
        return total.to(z.dtype) / STEPS

    def _toward_scores(self, attention: str, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return slopes at queries [..., H, T, E], keys [..., K, S, E]; weights [..., H, T, S] of scores."""
        scores, groups = Scores.of(self.cut, attention), self.cut.seen[f"{attention}.k"].shape[1]
        weights = weights * scores.factor
        keys = weights.mT @ scores.q
        return weights @ scores.k, torch.unflatten(keys, -3, (groups, -1)).sum(-3)

    # Nodes --------------------------------------------------------------------------------------------------

    def candidates(self, count: int) -> list[Candidate]:
        """Return the nodes of the largest values."""
        sizes = torch.cat([part.values.abs().flatten() for part in self.parts])
        least = max(float(sizes.topk(min(count, len(sizes))).values[-1]), TINY)
        chosen = []
        for part in self.parts:
            indices = (part.values.abs() >= least).nonzero()
            if len(indices):
                vectors = self._vectors(part, indices)
                chosen += [self._candidate(part, tuple(p), v) for p, v in zip(indices.tolist(), vectors)]
        return chosen

    def _vectors(self, part: Part, indices: Tensor) -> Tensor:
        """Return what nodes of one part add: [N, D]."""
        first, last, units = indices[:, 0], indices[:, -1], part.units
        if part.kind == "head":
            return torch.einsum("ne,ned->nd", part.vectors[first, last], self.cut.weight_out(part.tap)[first])
        if units is not None and part.kind == units.name:
            return units.active[first, last, None] * units.decoder[last]
        return part.vectors[first]

    def _candidate(self, part: Part, place: tuple[int, ...], vector: Tensor) -> Candidate:
        stack = "encoder." if part.tap.startswith("encoder.") else ""
        layer = int(part.tap.partition("blocks.")[2].partition(".")[0] or -1)
        activation, name, position = None, part.name, place[0]
        if part.kind == "head":
            (head, position) = place
            name = f"{name}.{head}"
        elif part.units is not None and part.kind == part.units.name:
            activation, name = float(part.units.active[place]), f"{name}.{place[1]}"
        label, value = self.query.prepared.tokens_of(stack).labels[position], float(part.values[place])
        node = Node(
            f"{name}@{position}", part.kind, layer, position, label, stack, value, activation=activation
        )
        return Candidate(part, place, node, vector)

    # Edges --------------------------------------------------------------------------------------------------

    def edges(
        self, some: Sequence[Candidate], on_progress: OnRows = lambda done, total: None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return what each of some nodes adds to each, by kind [N + 1, N], and what all add to each [N + 1].

        The last target is the logit. What a target gets by value is from all nodes, kept or not, without
        biases.
        """
        kinds = ("value", "key", "query") if self.with_scores else ("value",)
        tables = {kind: torch.zeros(len(some) + 1, len(some), dtype=torch.float64) for kind in kinds}
        self._sources = defaultdict[str, list[int]](list)
        for number, each in enumerate(some):
            self._sources[each.part.tap].append(number)
        sums = torch.zeros(len(some) + 1, dtype=torch.float64)
        self._fill(tables["value"], sums, [len(some)], some, {k: x[None] for k, x in self.direct.items()})
        by_part = defaultdict[int, list[int]](list)
        for number, each in enumerate(some):
            by_part[id(each.part)].append(number)
        cells = max(leaf.numel() for leaf in self.cut.leaves.values())
        together, done = max(1, TOGETHER // cells), 0
        for numbers in by_part.values():
            for first in range(0, len(numbers), together):
                chunk = numbers[first : first + together]
                targets = [some[number] for number in chunk]
                for kind, tap, back in self._readouts(targets):
                    before = self.cut.before(targets[0].part.tap)
                    slopes = self.cut.slopes([self.cut[tap]], [back[:, None]], before)
                    self._fill(tables[kind], sums if kind == "value" else None, chunk, some, slopes)
                done += len(chunk)
                on_progress(done, len(some))
        return tables, sums

    def _fill(
        self, table: Tensor, sums: Tensor | None, targets: list[int], some: Sequence[Candidate],
        slopes: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Put in what sources add to some targets, from the slopes at leaves: [G, T, D] each.
        Leaves that are only added together have one slope. A feed-forward reads its own token alone.
        """
        rows, own = torch.arange(len(targets)), torch.full((len(targets),), -1)
        if targets[0] < len(some) and some[targets[0]].part.kind != "head":
            rows, own = torch.tensor(_packed([some[number] for number in targets])).T
        by_slope, indices = defaultdict[int, list[str]](list), torch.tensor(targets)
        for tap, slope in slopes.items():
            by_slope[slope.data_ptr()].append(tap)
        for taps in by_slope.values():
            slope, by_position = slopes[taps[0]], defaultdict[int, list[int]](list)
            for tap in taps:
                for number in self._sources[tap]:
                    by_position[some[number].place[-1 if some[number].part.kind == "head" else 0]].append(
                        number
                    )
            for position, sources in by_position.items():
                reads = (own < 0) | (own == position)
                if reads.any():
                    vectors = torch.stack([some[number].vector for number in sources])
                    scores = slope[rows[reads], position] @ vectors.T
                    table[indices[reads][:, None], torch.tensor(sources)] = scores
            if sums is not None:
                added = torch.stack([self.added[tap] for tap in taps]).sum(0)
                if int(own[0]) >= 0:
                    sums[targets] += (slope[rows, own] * added[own]).sum(-1)
                else:
                    sums[targets] += slope.flatten(1) @ added.flatten()

    @cached_property
    def added(self) -> dict[str, Tensor]:
        """What the nodes of each part add together, without the part's bias: [T, D]."""
        added = {}
        for tap, leaf in self.cut.leaves.items():
            own = next(part for part in self.parts if part.tap == tap)
            bias = own.units.bias if own.units is not None else self.cut.bias_out(tap)
            added[tap] = leaf[0].detach() - bias
        return added

    def _readouts(self, targets: Sequence[Candidate]) -> Iterator[tuple[str, str, Tensor]]:
        """Yield kinds of edges, the activation that targets of one part read, and slopes at it [R, ...]."""
        part = targets[0].part
        rows = list(range(len(targets)))
        attention, units = part.tap.removesuffix(".out"), part.units
        if part.kind in ("embedding", "error"):
            return
        positions = [target.place[-1 if part.kind == "head" else 0] for target in targets]
        slope = part.slope[positions]  # G D
        if part.kind == "head":
            heads = [target.place[0] for target in targets]
            z = self.cut[f"{attention}.z"]
            back = torch.zeros(len(targets), *z.shape[1:], dtype=z.dtype)
            back[rows, heads, positions] = torch.einsum(
                "gd,ged->ge", slope, self.cut.weight_out(part.tap)[heads]
            )
            yield "value", f"{attention}.z", back
            if part.weights is not None:
                weights = torch.zeros(len(targets), *part.weights.shape, dtype=z.dtype)
                weights[rows, heads, positions] = part.weights[heads, positions]
                sides = self._toward_scores(attention, weights)
                for kind, tap, side in zip(("query", "key"), ("q", "k"), sides):
                    yield kind, f"{attention}.{tap}", side
            return
        tap = part.tap if units is None else units.tap
        x, rows = self.cut[tap], [row for row, _ in _packed(targets)]
        back = torch.zeros(max(rows) + 1, *x.shape[1:], dtype=x.dtype)
        if units is None:
            back[rows, positions] = slope
        elif part.kind == "skip":
            assert units.skip is not None
            back[rows, positions] = slope @ units.skip
        else:
            numbers = [target.place[1] for target in targets]
            size = (slope * units.decoder[numbers]).sum(-1)
            if units.encoder is None:
                back[rows, positions, numbers] = size
            else:
                back[rows, positions] = size[:, None] * units.encoder[:, numbers].T
        yield "value", tap, back

    def differences(self, some: Sequence[Candidate], edges: Sequence[GraphEdge]) -> float:
        """Return the largest difference of an edge or a node from its intervention, per largest edge.

        Nodes have one where all paths are the model's own: scores are no sums, and errors have no inputs.
        """
        prepared, read = self.cut.prepared, self.query.read
        by_id = {each.node.id: each for each in some}
        wanted: dict[tuple[str, str], list[tuple[GraphEdge, Tensor]]] = defaultdict(list)
        for edge in edges:
            if edge.target == "logit":
                wanted[edge.source, "hidden"].append((edge, read.directions))
                continue
            for kind, tap, back in self._readouts([by_id[edge.target]]):
                if kind == edge.kind:
                    wanted[edge.source, tap].append((edge, back[0]))
        taps, largest = {tap for _, tap in wanted}, 0.0
        for first in range(0, len(some), ROWS):
            rows = some[first : first + ROWS]
            sources = [(each.part.tap, each.node.position or 0, each.vector) for each in rows]
            repeated = {name: x.expand(len(rows) + 1, *x.shape[1:]) for name, x in prepared.arguments.items()}
            model = prepared.model
            with torch.no_grad(), evaluating(model), holding(model):
                with record(model, *taps, "hidden") as seen, removing(self.cut, sources, hold=True):
                    model(**repeated, logits="none")
                for row, each in enumerate(rows, 1):
                    for tap in taps:
                        change = seen[tap][0] - seen[tap][row]
                        for edge, back in wanted.get((each.node.id, tap), ()):
                            moved = change[read.rows] if tap == "hidden" else change
                            largest = max(largest, abs(float((moved * back).sum()) - edge.value))
                if not self.with_scores and all(part.kind != "error" for part in self.parts):
                    with removing(self.cut, sources, hold=False):
                        hidden = model(**repeated, logits="none").hidden[:, read.rows]
                    changes = ((hidden[:1] - hidden[1:]) * read.directions).sum((1, 2)).tolist()
                    largest = max(largest, *(abs(c - each.node.value) for c, each in zip(changes, rows)))
        return largest / max((abs(edge.value) for edge in edges), default=1.0)


def _packed(targets: Sequence[Candidate]) -> list[tuple[int, int]]:
    """Return a row and the position of each target that reads its own token; a row has one of each."""
    counts = Counter[int]()
    packed = []
    for target in targets:
        position = target.place[0]
        packed.append((counts[position], position))
        counts[position] += 1
    return packed
