"""Rows about what looking inside says: contributions, scores, graphs, circuits and sparse features.

What adds up must add up, and must hold under interventions. Contributions and graphs are of the first row of
the inputs; a graph is computed in float64, whatever the dtype of the model. A dictionary of features has
random weights: what is checked is arithmetic and wiring, not what was learned.

Shapes: B rows, R readers, W writers, T tokens, D model.
"""

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.dtypes import precise
from clearhead.core.transformer import Transformer
from clearhead.errors import InputError
from clearhead.inside import names
from clearhead.inside.attribution import looks
from clearhead.inside.checks.rows import SLOW, Comparison, Inputs, gap
from clearhead.inside.edges import Cut, EdgeGraph, cut_model, splits
from clearhead.inside.features.dictionary import Dictionary, find_taps
from clearhead.inside.graph import graph
from clearhead.inside.held import refuse_bent, refuse_unscored
from clearhead.inside.inputs import KINDS, InputTokens, Prepared
from clearhead.inside.lens import contributions
from clearhead.run.api import Model
from clearhead.variants.contexts import edit, record, tap_names

EXACT = 1e-8
SUMS = 1e-4  # of terms that one by one may be a thousand times the logit


def effects_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows; a graph takes a model that is linear once patterns, norms and gates are held."""
    config = inputs.model.config
    chooses = config.head in KINDS and inputs.kind in ("tokens", "patches") and not config.head_layer
    chooses &= inputs.source_kind in ("", "tokens") and "global_mask" not in inputs.arguments
    return [
        inputs.compare(
            "contributions = logit",
            "what all parts add to the likeliest choice, with its logit less the mean of all",
            _contributions,
            tolerance=max(SUMS, inputs.compare("", "", _contributions).tolerance),
            fits=chooses and all(weight.is_floating_point() for weight in inputs.model.parameters()),
        ),
        inputs.compare(
            "score terms = score",
            "a score as a sum over the parts that made its query and its key, with the score",
            _score,
            fits=chooses and _linear(inputs, scored=True),
        ),
        inputs.compare(
            "graph = interventions",
            "nodes and edges of an attribution graph with what changes without each, all else held",
            _graph,
            tolerance=EXACT,
            copies=True,
            fits=chooses and _linear(inputs),
        ),
    ]


def _linear(inputs: Inputs, scored: bool = False) -> bool:
    prepared = _prepared(inputs)
    try:
        refuse_bent(inputs.model)
        if scored:
            refuse_unscored(prepared)
    except InputError:
        return False
    return True


def _prepared(inputs: Inputs) -> Prepared:
    """Return the first row of the inputs."""
    first = {name: x[:1] for name, x in inputs.arguments.items()}
    count = inputs.model.main.spec.n_tokens(inputs.length)
    if inputs.kind == "patches":
        count = inputs.model.config.stacks[0].n_tokens(inputs.length)
    labels = [InputTokens(tuple(map(str, range(size)))) for size in
              (count, first["source"].shape[1] if "source" in first else 0)]  # fmt: skip
    source = first.get("source")
    return Prepared(
        Model(inputs.model), first["ids"], labels[0], source, None if source is None else labels[1],
        first.get("types"),
    )  # fmt: skip


def _contributions(inputs: Inputs) -> float:
    terms = contributions(inputs.model, _prepared(inputs))
    return abs(terms.total - terms.logit) / max(1.0, abs(terms.logit))


def _score(inputs: Inputs) -> float:
    worst = 0.0
    for attention in names.patterned(inputs.model.config):
        score = looks(inputs.model, _prepared(inputs), f"{attention}.0", 0, 0)
        total = math.fsum((score.rest, score.position, *(term.value for term in score.terms)))
        worst = max(worst, abs(total - score.score) / max(1.0, abs(score.score)))
    return worst


def _graph(inputs: Inputs) -> float:
    traced = graph(inputs.model, _prepared(inputs), verify=True, nodes=24)
    assert traced.difference is not None
    return traced.difference


WAY, POINTS = 1 / 64, 4  # of integrated gradients: how far to another input, and slopes on the way
SUM, BENT = 1e-4, 0.1  # what so few points may be off, relative to the difference; where slopes jump


def edge_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about edges between parts."""
    config = inputs.model.config
    gated = config.main.cross and bool(config.attention_gate or config.head_gate)
    row = partial(
        inputs.compare,
        fits=config.depth_capacity == 1 and not gated and not config.main.carries and not config.main.recalls,
    )
    small = sum(weight.numel() for weight in inputs.model.parameters()) < SLOW
    return [
        row("circuit of all edges = model", "every part with a stream of its own, no edge cut", _whole),
        row("circuit of no edges = corrupt run", "every edge cut, with a run on another input", _empty),
        row(
            "one edge cut = by hand",
            "one edge cut with that edge alone put in place by two runs with edits",
            _one_edge,
        ),
        inputs.compare(
            "integrated gradients = difference",
            f"slopes by edges at {POINTS} points of a way of the input, added up, with what the way changes",
            _integrated,
            tolerance=BENT if config.activation == "relu" or config.gated_clamp else SUM,
            copies=True,
            # A router that chooses other experts on the way makes the output jump.
            fits=config.depth_capacity == 1
            and not config.n_experts
            and config.head != "none"
            and small
            and not config.main.carries
            and not config.main.recalls
            and not gated,
        ),
    ]


def _others(inputs: Inputs) -> dict[str, Any]:
    """Return what the model is called with for another input of the same size."""
    more = {"source": inputs.other_source} if inputs.source_kind else {}
    return {**inputs.arguments, "ids": inputs.other, **more}


def _run_on(inputs: Inputs, graph: EdgeGraph, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what every writer gives on an input: [B, T, D] each."""
    seen = dict[str, Tensor]()
    cut_model(inputs.model, graph, Cut(seen=seen))(**arguments)
    return seen


def _whole(inputs: Inputs) -> float:
    graph = EdgeGraph.of(inputs.model)
    return gap(inputs.run(cut_model(inputs.model, graph, Cut())), inputs.run())


def _empty(inputs: Inputs) -> float:
    graph = EdgeGraph.of(inputs.model)
    others = _others(inputs)
    cut = Cut(graph.valid[None].to(inputs.device), _run_on(inputs, graph, others))
    return gap(inputs.run(cut_model(inputs.model, graph, cut)), inputs.run(**others))


def _one_edge(inputs: Inputs) -> float:
    """Cut the edge from the embedding to what the last head, or the feed-forward, of a layer reads."""
    model, graph = inputs.model, EdgeGraph.of(inputs.model)
    layer = 0 if model.config.norm_position == "post" else model.main.spec.n_layers - 1  # the stream is a sum
    attention = model.main.layers()[layer].attention
    head = attention.n_heads - 1 if splits(attention) else 0
    name = f"{layer}.{head}.q" if splits(attention) else f"attention:{layer}"
    tap = f"blocks.{layer}.attention.{'q' if splits(attention) else 'out'}"
    row = [reader.name for reader in graph.readers].index(name)
    mask = torch.zeros(1, *graph.valid.shape, device=inputs.device)
    mask[0, row, graph.writers.index("embedding")] = 1
    values = _run_on(inputs, graph, _others(inputs))
    ours = inputs.run(cut_model(model, graph, Cut(mask, values)))
    with record(model, "embedding") as clean:
        inputs.run()
    change = values["embedding"] - clean["embedding"]
    with edit(model, {f"blocks.{layer}.resid_pre": lambda x: x + change}), record(model, tap) as moved:
        inputs.run()

    def put(x: Tensor) -> Tensor:
        if not splits(attention):
            return moved[tap]
        return torch.cat([x[:, :head], moved[tap][:, head:]], 1)

    with edit(model, {tap: put}):
        return gap(ours, inputs.run())


def _integrated(inputs: Inputs) -> float:
    """Compare what a step toward another input does to a logit with the slopes on the way, in float64."""
    inputs = inputs.of(copy.deepcopy(inputs.model).double())
    model, graph = inputs.model, EdgeGraph.of(inputs.model)

    def read(moved: Transformer, share: float) -> Tensor:
        steps = {name: share * changes[name] for name in starts}
        with edit(moved, {name: partial(torch.add, step) for name, step in steps.items()}):
            return inputs.run(moved)[0].flatten()[-1]

    starts = [name for name in graph.writers if name.endswith("embedding")]
    clean, other = (_run_on(inputs, graph, arguments) for arguments in (inputs.arguments, _others(inputs)))
    changes = {
        name: WAY * (y - clean[name]) if name in starts else torch.zeros_like(y) for name, y in other.items()
    }
    total, size = 0.0, 0.0
    for place, weight in zip(*np.polynomial.legendre.leggauss(POINTS)):
        mask = torch.zeros(1, *graph.valid.shape, device=inputs.device, requires_grad=True)
        with torch.enable_grad():
            value = read(cut_model(model, graph, Cut(mask, changes=changes)), (1 + float(place)) / 2)
            (slope,) = torch.autograd.grad(value, mask)
        total += float(weight) / 2 * float(slope.double().sum())
        size += float(weight) / 2 * float(slope.double().abs().sum())
    wanted = read(model, 1.0) - read(model, 0.0)
    return gap(
        torch.tensor([total]), wanted[None], max(size, 1e-9)
    )  # of what is added up, not of what is left


FEATURES, ACTIVE = 24, 4


def feature_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about a skip transcoder of the last feed-forward."""
    parts = [name.removesuffix(".in") for name in tap_names(inputs.model) if name.endswith("feedforward.in")]
    return [
        inputs.compare(
            "replacement + error = model",
            "the last feed-forward replaced by features and their error, with the model",
            _replaced,
            parts[-1:],
            fits=bool(parts),
        ),
        inputs.compare(
            "features = formula",
            "features and reconstruction with float64 sums, one token and one feature at a time",
            _spelled_out,
            parts[-1:],
            tolerance=1e-5,
            fits=bool(parts),
        ),
    ]


def _drawn(inputs: Inputs, parts: list[str]) -> tuple[Dictionary, Tensor]:
    """Return a dictionary of random weights, and what it reads of these inputs: [N, D]."""
    reads, writes = find_taps(inputs.model.config, parts[0], "skip-transcoder")
    with record(inputs.model, *reads) as seen:
        inputs.run()
    x = seen[reads[0]].flatten(0, -2)
    width = x.shape[-1]
    dictionary = Dictionary("skip-transcoder", reads, writes, width, width, FEATURES, k=ACTIVE)
    generator = torch.Generator().manual_seed(0)
    for weight in dictionary.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / math.sqrt(width))
    return dictionary.to(inputs.device), x


def _replaced(inputs: Inputs, parts: list[str]) -> float:
    dictionary, _ = _drawn(inputs, parts)
    read: list[Tensor] = []

    def replace(y: Tensor) -> Tensor:
        return (precise(dictionary(read[-1])) + dictionary.error(read[-1], y)).to(y.dtype)

    with edit(inputs.model, {dictionary.at: read.append, dictionary.out: replace}):
        replaced = inputs.run()
    return gap(replaced, inputs.run())


def _spelled_out(inputs: Inputs, parts: list[str]) -> float:
    dictionary, x = _drawn(inputs, parts)
    weights = {name: weight.double().cpu() for name, weight in dictionary.state_dict().items()}
    features, written = [], []
    for token in x.float().double().cpu():
        sums = [
            float((token * weights["W_enc"][:, feature]).sum() + bias)
            for feature, bias in enumerate(weights["b_enc"])
        ]
        best = sorted(range(FEATURES), key=lambda feature: -sums[feature])[:ACTIVE]
        a = [max(value, 0.0) if feature in best else 0.0 for feature, value in enumerate(sums)]
        y = weights["b_dec"] + weights["W_skip"] @ token
        for feature, value in enumerate(a):
            y = y + value * weights["W_dec"][feature]
        features.append(a)
        written.append(y)
    x = x.float()
    return max(
        gap(dictionary.encode(x).double(), torch.tensor(features, dtype=torch.double)),
        gap(dictionary(x).double(), torch.stack(written)),
    )
