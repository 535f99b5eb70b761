"""How much each edge of a model matters, by exact patching and by estimates; see `circuit` for the methods.

    (run,) = runs_of(m, [PromptPair("Ann met Tom. Ann", "Ann met Tom. Tom")])
    METHODS["eap-ig"](run, 5)                                  # [R, W], what the metric loses by each cut
    exact_scores([run], run.graph.valid.nonzero())             # by cutting each edge in turn

Shapes: B rows, R readers, W writers, T tokens, L layers, D model, H heads, E head width, N choices.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import refuse
from clearhead.inside import inputs, names
from clearhead.inside.edges import Cut, Edits, Run, mean_metric, splits
from clearhead.inside.names import part_of

TRIED = 64  # edges that ACDC tries in one pass


# Estimates --------------------------------------------------------------------------------------------------


def _slopes(run: Run, edits: Edits, kept: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return what the metric loses by each edge's cut, as its slope says [R, W], and the slopes by `kept`."""
    model = run.clean.model
    mask = torch.zeros(1, *run.graph.valid.shape, device=inputs.device_of(model), requires_grad=True)
    with torch.enable_grad():
        value = run.measure(Cut(mask, changes=run.changes), edits=edits)
        wanted = [mask, *kept.values()]
        slopes = torch.autograd.grad(value.sum(), wanted, allow_unused=True)
    own, *others = (torch.zeros_like(x) if slope is None else slope for x, slope in zip(wanted, slopes))
    return -own[0].double().cpu(), others


def _eap(run: Run, steps: int) -> Tensor:
    """Return the slope at the clean input."""
    refuse(
        run.metric == "kl",
        "metric kl has no slope at the clean run: take method eap-ig or exact, or metric logit",
    )
    return _slopes(run, {}, {})[0]


def _eap_ig(run: Run, steps: int) -> Tensor:
    """Return the mean slope on the way of the input, by Gauss and Legendre's points: [R, W]."""
    total = torch.zeros(run.graph.valid.shape, dtype=torch.float64)
    for place, weight in zip(*np.polynomial.legendre.leggauss(steps)):
        moved = {
            name: partial(torch.add, run.outputs[name], run.changes[name], alpha=(1 - float(place)) / 2)
            for name in run.outputs
            if name.endswith("embedding")
        }
        edits = {name: lambda x, there=there: there() for name, there in moved.items()}
        total += float(weight) / 2 * _slopes(run, edits, {})[0]
    return total


def _atp(run: Run, steps: int) -> Tensor:
    """Return slopes as AtP* corrects them: [R, W].

    Sizes without a layer count where they are larger: they uncover effects that cancel. In a model of few
    layers a slope without one of them is hardly a slope.
    """
    refuse(run.metric == "kl", "metric kl has no slope at the clean run: take method eap-ig or exact")
    graph, parts, blocks = run.graph, _split_parts(run.clean.model), names.layer_names(run.clean.m.config)
    moved = {role: _moved(run, parts, role) for role in "qk"}

    def scores(without: str) -> Tensor:
        """Return scores by slopes that one block has no part in."""
        kept, edits = dict[str, Tensor](), dict[str, Any]()
        for tap in _outputs_of(run.clean.model):
            edits[tap] = partial(_keep, kept, tap, tap.startswith(f"{without}."))
        own, slopes = _slopes(run, edits, kept)
        by_tap = dict(zip(kept, slopes))
        for row, reader in enumerate(graph.readers):
            name, _, role = reader.name.rpartition(".")
            part = parts.get(name.rpartition(".")[0])
            if role in moved and part is not None:
                heads = [int(head.rpartition(".")[2]) for head in reader.feeds]
                change = (moved[role][part] * by_tap[f"{part}.z"])[:, heads]  # W h T E
                own[row] = -change.flatten(1).sum(1).double().cpu() * graph.valid[row]
        return own

    plain = scores("none")
    others = torch.tensor([[reader.layer != layer for layer in blocks] for reader in graph.readers])
    sizes = torch.stack([scores(block).abs() for block in blocks.values()])  # L R W
    mean = torch.einsum("rl,lrw->rw", others.double(), sizes) / others.sum(1, keepdim=True).clamp(min=1)
    return plain.sign() * torch.maximum(plain.abs(), mean)


def _split_parts(model: Transformer) -> dict[str, str]:
    """Return every attention whose heads read by themselves, "3" as "blocks.3.attention"."""
    every = names.kinds_of(model.config)
    return {str(name): name.part for name in every if splits(part_of(model, f"{name.part}.out"))}


def _outputs_of(model: Transformer) -> list[str]:
    """Return the taps of what every head and part gives, without embeddings."""
    parts = set(_split_parts(model).values())
    whole = {name.part for name in names.kinds_of(model.config)} - parts
    forwards = [f"{block}.feedforward.out" for block in names.layer_names(model.config).values()]
    return [*(f"{part}.z" for part in sorted(parts)), *(f"{part}.out" for part in sorted(whole)), *forwards]


def _keep(kept: dict[str, Tensor], tap: str, drop: bool, x: Tensor) -> Tensor | None:
    kept[tap] = x
    return x.detach() if drop else None


def _moved(run: Run, parts: Mapping[str, str], role: str) -> dict[str, Tensor]:
    """Return what heads mix more where their queries, or keys, see one writer cut: [W, H, T, E] by part."""
    taps = [f"{part}.{tap}" for part in parts.values() for tap in "qkv"]
    outputs = _outputs_of(run.clean.model)
    _, clean = run.clean.record(*taps, *outputs, logits="none")
    fixed = [tap for tap in (*taps, *outputs) if not tap.endswith(f".{role}")]
    count, changed = len(run.graph.writers), dict[str, list[Tensor]]()

    def put_back(tap: str, x: Tensor) -> Tensor:
        if tap.endswith(".z"):
            changed.setdefault(tap[:-2], []).append(x - clean[tap])
        return clean[tap].expand_as(x)

    with torch.no_grad():
        for columns in torch.split(torch.arange(count), run.together):
            mask = torch.zeros(len(columns), *run.graph.valid.shape, device=inputs.device_of(run.clean.model))
            mask[torch.arange(len(columns)), :, columns] = 1
            edits = {tap: partial(put_back, tap) for tap in fixed}
            run.measure(Cut(mask, changes=run.changes), len(columns), edits)
    return {part: torch.cat(changes) for part, changes in changed.items()}


# Patching ---------------------------------------------------------------------------------------------------


def exact_scores(
    runs: Sequence[Run], edges: Tensor, on_rows: Callable[[int], None] = lambda done: None
) -> Tensor:
    """Return what the metric loses when each of some edges [N, 2] is cut alone: [R, W], NaN for others."""
    valid = runs[0].graph.valid
    scores = torch.where(valid, torch.nan, 0.0).double()
    base = mean_metric(runs, torch.zeros(1, *valid.shape))
    done = 0
    for some in torch.split(edges, runs[0].together):
        masks = torch.zeros(len(some), *valid.shape)
        masks[torch.arange(len(some)), some[:, 0], some[:, 1]] = 1
        scores[some[:, 0], some[:, 1]] = base - mean_metric(runs, masks)
        on_rows(done := done + len(some))
    return scores


def acdc(runs: Sequence[Run], threshold: float, on_rows: Callable[[int], None]) -> tuple[Tensor, Tensor]:
    """Return which edges are kept, and what the metric lost as each was tried: [R, W] twice.

    Some edges are tried in one pass, each row without all of those before it too, as if none had been kept.
    Rows after the first edge that is kept are thrown away.
    """
    graph = runs[0].graph
    kept, scores = graph.valid.clone(), torch.zeros(graph.valid.shape, dtype=torch.float64)
    backwards = sorted(range(len(graph.readers)), key=lambda row: (graph.readers[row].stream != "", -row))
    edges = [
        (row, column) for row in backwards for column in graph.valid[row].nonzero()[:, 0].flip(0).tolist()
    ]
    value, tried = float(mean_metric(runs, ~kept[None] & graph.valid)), 0
    while tried < len(edges):
        some = edges[tried : tried + TRIED]
        masks = (graph.valid & ~kept).repeat(len(some), 1, 1)
        for number, (row, column) in enumerate(some):
            masks[number:, row, column] = True
        for (row, column), after in zip(some, mean_metric(runs, masks).tolist()):
            scores[row, column], tried = value - after, tried + 1
            if (value - after if runs[0].metric == "kl" else abs(value - after)) > threshold:
                break
            kept[row, column], value = False, after
        on_rows(tried)
    return kept, scores


METHODS: dict[str, Callable[[Run, int], Tensor]] = {"eap": _eap, "eap-ig": _eap_ig, "atp": _atp}
