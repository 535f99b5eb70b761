"""Attribution graphs: which parts, at which tokens, led to a token, and by way of which other parts.

    result = graph(m, "The capital of France is", token=" Paris")
    result.nodes[-1].value, result.logit                 # what the logit is made of
    result.edges[0]                                     # source, target, kind, value, share of the influence
    result.save("graph.json")
    graph(m, "The capital of France is", verify=True).difference   # of each edge from its intervention
    without_edges(m, "The capital of France is", result.edges[:3], token=" Paris")   # with nothing held

A node is an embedding, a head, or a feed-forward, at one token; with `features` (or `neurons`) a feed-forward
is its active features and an error, what they leave over. With patterns, norm sizes and gates held (`held`)
all of them meet in sums. The last node is a logit, less the mean of all or that of one other choice, and

    a node's value    what it adds to the logit, over all paths
    an edge's value   what the target's value loses if it does not get what the source adds to it directly
    a node's value  = its edges from other nodes + `others`, from what is left out + `bias`

A pattern that is held has no reasons. With `scores` a head has two more kinds of edges, "key" and "query":
what a source adds to its scores, times what each score brought, the integrated gradient of the head's value
between looking everywhere alike and looking where it does. A node's value then counts these ways too.

Nodes and edges are pruned by influence, as in circuit-tracer: edges into a node are divided by the sum of
their sizes, and a node's influence is its share of the logit over all paths.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import refuse, refuse_outside
from clearhead.inside import inputs, results
from clearhead.inside.direct_effects import TINY, Effects, GraphEdge, Node
from clearhead.inside.features.dictionary import Dictionary
from clearhead.inside.held import (
    HEADS,
    CutPass,
    dictionaries_of,
    exact_copy,
    holding,
    on_cpu,
    refuse_unscored,
    removing,
)
from clearhead.inside.interventions import OnRows
from clearhead.inside.logit_attribution import Compared, LogitQuery
from clearhead.inside.names import part_of
from clearhead.variants.contexts import edit, evaluating, record

CANDIDATES = 600


@dataclass(frozen=True)
class Graph(results.Result, Compared):
    """The nodes and edges that led to a logit, as far as they are kept."""

    tokens: tuple[str, ...]
    source_tokens: tuple[str, ...]
    column: int
    choice: str
    against: str | None
    centred: bool
    probability: float | None
    logit: float
    nodes: tuple[Node, ...]  # in the order of the forward pass; the logit is the last
    edges: tuple[GraphEdge, ...]  # the most influential first
    kept_nodes: float  # share of the influence of all nodes
    kept_edges: float
    scores: bool
    # The largest difference of a node or an edge from its intervention, as a share of the largest edge.
    difference: float | None = None

    def node(self, name: str) -> Node:
        """Return a node by its id."""
        known = {node.id: node for node in self.nodes}
        refuse(name not in known, f'the graph has no node "{name}": nodes are called as {self.nodes[0].id}')
        return known[name]

    def merged(self, groups: Mapping[str, Sequence[str]]) -> "Graph":
        """Return a graph in which each group is one node, by its name; edges within a group are left out."""
        home = {node: name for name, some in groups.items() for node in some}
        for name, some in groups.items():
            refuse(not (name and some), f'the group "{name}" needs a name and nodes')
            taken = any(node.id == name for node in self.nodes)
            refuse(taken, f'"{name}" is a node: call the group otherwise')
        refuse(
            len(home) < sum(map(len, groups.values())), "a node is named twice in the groups: name each once"
        )
        for node in home:
            refuse(
                self.node(node).kind == "logit", "the logit is what all others lead to: leave it by itself"
            )
        together = defaultdict[str, list[Node]](list)
        for own in self.nodes:
            together[home.get(own.id, own.id)].append(own)
        nodes = [some[0] if some[0].id == name else _group(name, some) for name, some in together.items()]
        sums = defaultdict[tuple[str, str, str], list[float]](lambda: [0.0, 0.0])
        for edge in self.edges:
            ends = home.get(edge.source, edge.source), home.get(edge.target, edge.target)
            if ends[0] != ends[1]:
                both = sums[*ends, edge.kind]
                both[0] += edge.value
                both[1] += edge.influence
        edges = [GraphEdge(*ends, value, influence) for ends, (value, influence) in sums.items()]
        return replace(self, nodes=tuple(nodes), edges=_strongest(edges))


def _group(name: str, nodes: Sequence[Node]) -> Node:
    """Return one node for several, where the last of them is."""
    positions = {node.position for node in nodes}
    sums = {
        figure: sum(getattr(node, figure) for node in nodes)
        for figure in ("value", "influence", "others", "bias")
    }
    position = nodes[-1].position if len(positions) == 1 else None
    return replace(nodes[-1], id=name, kind="group", label=name, position=position, activation=None, **sums)


def _strongest(edges: Iterable[GraphEdge]) -> tuple[GraphEdge, ...]:
    return tuple(sorted(edges, key=lambda edge: (-edge.influence, -abs(edge.value))))


# Building ---------------------------------------------------------------------------------------------------


def refuse_unfit(model: Transformer, features: Sequence[Dictionary]) -> None:
    """Refuse dictionaries of which a graph of this model takes none."""
    dictionaries_of(model, features)


def _influence(tables: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the influence of each node [N], and of each edge of all kinds [N + 1, N]."""
    sizes = torch.stack(list(tables.values())).abs().sum(0)
    shares = sizes / sizes.sum(1, keepdim=True).clamp(min=TINY)
    influence, reached = torch.zeros(shares.shape[1], dtype=shares.dtype), shares[-1]
    while float(reached.sum()) > 1e-9:  # a step for each edge of the longest path
        influence += reached
        reached = reached @ shares[:-1]
    return influence, torch.cat([influence, influence.new_ones(1)])[:, None] * shares


def _most(influence: Tensor, share: float, count: int) -> tuple[Tensor, float]:
    """Return which few carry a share of the influence, in order of it, and the share that they do carry."""
    order = influence.argsort(descending=True)
    carried = influence[order].cumsum(0) / influence.sum().clamp(min=TINY)
    kept = min(int((carried < share - 1e-12).sum()) + 1, count, int((influence > 0).sum()))
    return order[:kept], float(carried[kept - 1]) if kept else 0.0


def graph(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    token: str | int | None = None,
    position: int = -1,
    target: inputs.Target = None,
    against: str | int | None = None,
    pair: str | None = None,
    *,
    features: Sequence[str | Path | Dictionary] = (),
    neurons: bool = False,
    scores: bool = False,
    node_share: float = 0.8,
    edge_share: float = 0.95,
    nodes: int = 50,
    verify: bool = False,
    candidates: int = CANDIDATES,
    on_progress: OnRows = lambda done, total: None,
) -> Graph:
    """Return the attribution graph of a logit, pruned. The model is copied in float64.

    The first arguments, down to `pair`, are those of `contributions`.

    Args:
        features: folders of sparse dictionaries, or dictionaries, of feed-forwards; others stay whole.
        neurons: take the other feed-forwards apart into their neurons.
        scores: also show what made heads look where they look.
        node_share: keep the fewest nodes that carry so much of the influence.
        edge_share: keep the fewest edges among them that carry so much of theirs.
        nodes: keep at most so many.
        verify: test every node and edge that is kept by an intervention: see `Graph.difference`.
        candidates: nodes of the largest values, among which edges are computed.
        on_progress: is told of how many of them the edges are known.
    """
    for name, share in (("node_share", node_share), ("edge_share", edge_share)):
        refuse_outside(name, share, 0, 1, open=True)
    refuse(nodes < 1, f"nodes {nodes} keeps nothing: choose 1 or more")
    prepared = exact_copy(inputs.prepare(m, given, target, pair))
    if scores:
        refuse_unscored(prepared)
    query = LogitQuery.of(prepared.m, prepared, token, position, against=against, parts=False)
    dictionaries = dictionaries_of(prepared.model, features)
    cut = CutPass.of(prepared, "v", "pattern", *(("q", "k", "scores") if scores else ()))
    effects = Effects(query, cut, dictionaries, neurons, scores)
    some = effects.candidates(candidates)
    tables, sums = effects.edges(some, on_progress)
    influence, of_edges = _influence(tables)
    kept, node_kept = _most(influence, node_share, nodes)
    kept = kept.sort().values
    rows = torch.cat([kept, torch.tensor([len(some)])])
    inner = of_edges[rows][:, kept]
    strongest, edge_kept = _most(inner.flatten(), edge_share, inner.numel())
    named = [replace(some[number].node, influence=float(influence[number])) for number in kept.tolist()]
    named.append(_logit_node(query))
    edges, incoming = [], torch.zeros(len(rows), dtype=torch.float64)
    for row, column in ((int(cell) // len(kept), int(cell) % len(kept)) for cell in strongest):
        number, source = int(rows[row]), int(kept[column])
        total = sum(float(table[number, source].abs()) for table in tables.values())
        for kind, table in tables.items():
            if value := float(table[number, source]):
                share = float(inner[row, column]) * abs(value) / total
                edges.append(GraphEdge(named[column].id, named[row].id, kind, value, share))
                incoming[row] += value if kind == "value" else 0
    for row, node in enumerate(named):
        if node.kind not in ("embedding", "error"):
            total = float(sums[rows[row]])
            named[row] = replace(node, others=total - float(incoming[row]), bias=node.value - total)
    chosen = [some[number] for number in kept.tolist()]
    return Graph(
        tokens=prepared.tokens.labels,
        source_tokens=() if prepared.source_tokens is None else prepared.source_tokens.labels,
        column=query.column,
        choice=query.name,
        against=query.against,
        centred=query.centred,
        probability=query.probability,
        logit=query.logit,
        nodes=tuple(named),
        edges=_strongest(edges),
        kept_nodes=node_kept,
        kept_edges=edge_kept,
        scores=scores,
        difference=effects.differences(chosen, edges) if verify else None,
    )


# Without an edge --------------------------------------------------------------------------------------------


READS = {"value": "v", "key": "k", "query": "q"}  # what a head reads by an edge of each kind
TESTED = 24  # edges of one pass


@dataclass(frozen=True)
class EdgeEffect(results.Result):
    """What the model says without one edge. Unlike in the graph, everything after it is free to change."""

    source: str
    target: str
    kind: str
    held: float | None  # change of the logit with all else held, as in the graph; None: of keys and queries
    change: float  # of the logit
    before: float | None  # the probability of the choice; None where the model gives a number
    after: float | None


def without_edges(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    edges: Sequence[GraphEdge],
    token: str | int | None = None,
    position: int = -1,
    target: inputs.Target = None,
    against: str | int | None = None,
    pair: str | None = None,
) -> list[EdgeEffect]:
    """Return what each of some edges changes where its target does not get what its source adds.

    The target alone computes anew, from the values, keys or queries that it has without the edge; then all
    later parts do, once with patterns, norms and gates held, once with their own. Edges are those of a graph
    whose nodes are embeddings, heads, feed-forwards and neurons; other arguments are `contributions`'.
    """
    prepared = on_cpu(inputs.prepare(m, given, target, pair))
    query = LogitQuery.of(prepared.m, prepared, token, position, against=against, parts=False)
    cut, read = CutPass.of(prepared), query.read
    effects: list[EdgeEffect] = []
    for first in range(0, len(edges), TESTED):
        some = edges[first : first + TESTED]
        with torch.no_grad(), evaluating(prepared.model):
            with holding(prepared.model):
                held = _hidden_without(cut, some)[:, read.rows].double()
            scores = query.choices.column_scores(_hidden_without(cut, some), query.column).double()
        moved = ((held - held[:1]) * read.directions).sum((1, 2)).tolist()
        logits = query.difference(scores).tolist()
        before, *after = (query.choices.probability(row, query.choice) for row in scores)
        for row, edge in enumerate(some, 1):
            ends = edge.source, edge.target, edge.kind
            exact = moved[row] if edge.kind == "value" else None
            effects.append(EdgeEffect(*ends, exact, logits[row] - logits[0], before, after[row - 1]))
    return effects


class _Site(NamedTuple):
    """Where a node is: the tap of its part's output, and which head or neuron of it."""

    tap: str
    position: int
    number: int | None = None
    neuron: bool = False

    @classmethod
    def of(cls, node: str) -> "_Site":
        name, _, position = node.rpartition("@")
        kind, _, rest = name.rpartition(" ")
        refuse(
            kind not in ("", "feedforward", "neuron"),
            f'"{node}" is no part whose edges can be tested: those are embeddings, heads, feed-forwards '
            "and neurons",
        )
        if name.endswith("embedding"):
            return cls(name, int(position))
        *stack, layer = rest.split(".")
        number = None
        if kind != "feedforward":
            number, layer = int(layer), stack.pop()
        prefix = "encoder." if "encoder" in stack else ""
        part = "feedforward" if kind else "cross" if "cross" in stack else "attention"
        return cls(f"{prefix}blocks.{layer}.{part}.out", int(position), number, kind == "neuron")

    @property
    def part(self) -> str:
        return self.tap.removesuffix(".out")

    @property
    def shows(self) -> str:
        """The tap of what the node itself computes."""
        if self.number is None:
            return self.tap
        return f"{self.part}.post" if self.neuron else f"{self.part}.z"

    def reads(self, kind: str) -> str:
        """Return the tap of what the node reads by an edge of a kind."""
        return f"{self.part}.{READS[kind] if self.tap.endswith(HEADS) else 'in'}"

    def added(self, cut: CutPass, x: Tensor) -> Tensor:
        """Return what the node adds to the stream [D], from the activation at `shows` of one row."""
        if self.number is None:
            return x[self.position]
        if self.neuron:
            weight: Tensor = part_of(cut.prepared.model, self.tap).down.weight
            return x[self.position, self.number] * weight[:, self.number]
        return x[self.number, self.position] @ cut.weight_out(self.tap)[self.number]


def _hidden_without(cut: CutPass, edges: Sequence[GraphEdge]) -> Tensor:
    """Return the hidden states of the model, and of the model without each edge: [1 + edges, T, D]."""
    model, rows = cut.prepared.model, range(1, len(edges) + 1)
    sources = [_Site.of(edge.source) for edge in edges]
    targets = [None if edge.target == "logit" else _Site.of(edge.target) for edge in edges]
    repeated = {name: x.expand(len(edges) + 1, *x.shape[1:]) for name, x in cut.prepared.arguments.items()}
    removed = [(site.tap, site.position, site.added(cut, cut[site.shows][0].detach())) for site in sources]
    reads = {row: site.reads(edge.kind) for row, site, edge in zip(rows, targets, edges) if site}
    with record(model, *reads.values(), "hidden") as direct, removing(cut, removed, hold=True):
        model(**repeated, logits="none")  # all parts add what they did: what is read differs by the edge
    hidden = direct["hidden"].clone()
    if not reads:
        return hidden

    def swapped(tap: str, x: Tensor) -> Tensor:
        x = x.clone()
        for row, read in reads.items():
            if read == tap:
                x[row] = direct[tap][row]
        return x

    inner = {row: site for row, site in zip(rows, targets) if site}
    with (
        record(model, *(site.shows for site in inner.values())) as seen,
        edit(model, {tap: partial(swapped, tap) for tap in reads.values()}),
    ):
        model(**repeated, logits="none")
    lost = [(next(iter(cut.leaves)), 0, hidden.new_zeros(()))] * len(edges)  # nothing
    for row, site in inner.items():
        x = seen[site.shows]
        lost[row - 1] = site.tap, site.position, site.added(cut, x[0]) - site.added(cut, x[row])
    with removing(cut, lost, hold=False):
        free = model(**repeated, logits="none").hidden
    for row in inner:
        hidden[row] = free[row]
    return hidden


def _logit_node(query: LogitQuery) -> Node:
    return Node("logit", "logit", None, int(query.read.rows[-1]), query.name, "", query.logit, 1.0)
