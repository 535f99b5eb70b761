"""Rows about edges: circuits of all edges and of none, one edge by hand, integrated gradients.

Shapes: B rows, R readers, W writers, T tokens, D model.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.dtypes import wide
from clearhead.core.transformer import Transformer
from clearhead.inside.checks.rows import SLOW, TOLERANCE, Comparison, Inputs, gap
from clearhead.inside.edges import Cut, EdgeGraph, cut_model, splits
from clearhead.variants.contexts import edit, record

WAY, POINTS = 1 / 64, 4  # of integrated gradients: how far to another input, and slopes on the way
SUM, BENT = 1e-3, 0.1  # what so few points may be off, relative to the difference; where slopes jump


def edge_rows(inputs: Inputs) -> list[Comparison]:
    """Return the rows about edges between parts."""
    config = inputs.model.config
    row = partial(
        inputs.compare, fits=config.depth_capacity == 1 and not (config.attention_gate and config.main.cross)
    )
    small = sum(weight.numel() for weight in inputs.model.parameters()) < SLOW
    exact = TOLERANCE[inputs.dtype] <= TOLERANCE[torch.float32]  # the way is short: half precision hides it
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
            # A router that chooses other experts on the way makes the output jump.
            fits=config.depth_capacity == 1
            and not config.n_experts
            and config.head != "none"
            and small
            and exact,
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
    """Compare what a step toward another input does to a logit with the slopes on the way."""
    model, graph = inputs.model, EdgeGraph.of(inputs.model)

    def read(moved: Transformer, share: float) -> Tensor:
        steps = {name: share * changes[name] for name in starts}
        with edit(moved, {name: partial(torch.add, step) for name, step in steps.items()}):
            return wide(inputs.run(moved))[0].flatten()[-1]

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
