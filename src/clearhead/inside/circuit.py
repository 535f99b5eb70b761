"""Circuits: the edges between parts by which a model answers, and how much of the answer they carry alone.

    result = circuit(m, "Ann met Tom. Ann", "Ann met Tom. Tom")       # score every edge, keep the fewest
    result.edges[0], result.faithfulness                               # the strongest edge; 1: as the model
    result.save("circuit.json"); Circuit.load("circuit.json").apply(m)  # a model without all other edges
    path_patch(m, clean, corrupt, "0.1 -> 1.0.k -> logits").share    # what goes by one path

The edges are those of `edges`. An edge is cut when its reader sees, in place of what its writer gives in the
clean run, what it gives in the corrupt run (`resample`), its mean over all prompts (`mean`) or zeros. The
score of an edge is what the metric loses when that edge alone is cut:

    exact     by cutting each edge in turn
    eap       estimated by the slope at the clean run (edge attribution patching, Syed et al. 2023)
    eap-ig    by the mean of slopes between the corrupt and the clean input (Hanna et al. 2024)
    atp       eap with the corrections of AtP* (Kramár et al. 2024): softmax taken anew for queries and keys,
              and the mean size over slopes in which one layer is left out, where that is larger
    acdc      no estimate: edges are cut for good, last ones first, while each costs less than a threshold
              (Conmy et al. 2023)

Faithfulness is the metric with only the circuit's edges, completeness what the metric loses without just
these; both on a scale on which the run with all edges cut has 0 and the model 1.

Shapes: B rows, R readers, W writers, T tokens, L layers, D model, H heads, E head width, N choices.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, refuse, refuse_outside, refuse_seed, refuse_unknown
from clearhead.inside import inputs, names, results
from clearhead.inside.edges import (
    OUTPUT,
    Ablation,
    Cut,
    EdgeGraph,
    Edits,
    Metric,
    PromptPair,
    Run,
    cut_model,
    mean_metric,
    runs_of,
    splits,
)
from clearhead.inside.names import part_of
from clearhead.inside.patch import SAME
from clearhead.run.api import Model

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


Method = Literal["eap", "eap-ig", "atp", "exact", "acdc"]
DEFAULT_STEPS, FAITHFUL = 5, 0.9
UNREAD = {"kl": ("answer", "wrong"), "probability": ("wrong",)}  # what of a pair these metrics do not read
SIZES = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700)  # and so on, times ten
OnEdges = Callable[[str, int, int], None]  # (stage, done, total)


@dataclass(frozen=True)
class Edge:
    """An edge, and what the metric loses without it."""

    writer: str
    reader: str
    score: float

    def __str__(self) -> str:
        return f"{self.writer} -> {self.reader}"


@dataclass(frozen=True)
class Point:
    """How much of the answer so many edges carry."""

    edges: int
    faithfulness: float  # the metric with these edges alone
    completeness: float  # what it loses without them
    random: float  # faithfulness of as many edges drawn at random; the mean of some draws


@dataclass(frozen=True)
class Circuit(results.Result):
    """The edges by which a model answers some prompts."""

    json_names = (
        *("prompts", "method", "metric", "ablation", "position", "steps", "full", "empty", "n_edges"),
        *("edges", "faithfulness", "completeness", "random", "curve"),
    )

    prompts: tuple[PromptPair, ...]
    method: str
    metric: str
    ablation: str
    position: int
    steps: int
    full: float  # the metric of the model, the mean over prompts
    empty: float  # and with all edges cut
    n_edges: int  # of the model
    edges: tuple[Edge, ...]  # of the circuit, the strongest first
    faithfulness: float
    completeness: float
    random: float
    curve: tuple[Point, ...]
    scores: Tensor | None = None  # [R, W], of all edges; not saved
    graph: EdgeGraph | None = None

    @classmethod
    def load(cls, path: str | Path) -> "Circuit":
        """Return the circuit of a file."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            lists: Mapping[str, Any] = {"prompts": PromptPair._make, "edges": _of(Edge), "curve": _of(Point)}
            return cls(**{**values, **{name: tuple(map(make, values[name])) for name, make in lists.items()}})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is no circuit: {error}") from None

    def apply(self, m: inputs.AnyModel, prompt: int = 0) -> Model:
        """Return the model in which all edges outside the circuit are cut; it shares the weights.

        `prompt` is the number of the pair whose corrupt run is read across cuts, for ablation `resample`:
        then inputs must have its length.
        """
        m = inputs.as_model(m)
        refuse_outside("prompt", prompt, 0, len(self.prompts) - 1)
        runs = runs_of(m, self.prompts, self.metric, self.ablation, self.position)
        return replace(
            m, model=cut_model(m.model, runs[0].graph, self.cut(runs[prompt].graph, runs[prompt].values))
        )

    def cut(self, graph: EdgeGraph, values: Mapping[str, Tensor]) -> Cut:
        """Return all edges outside the circuit."""
        mask = graph.valid.clone()
        readers = {reader.name: row for row, reader in enumerate(graph.readers)}
        for edge in self.edges:
            known = edge.reader in readers and edge.writer in graph.writers
            refuse(not known, f'this model has no edge "{edge}": the circuit is of another model')
            mask[readers[edge.reader], graph.writers.index(edge.writer)] = False
        return Cut(mask[None].float(), values)


def _of(kind: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: kind(**values)


# Circuits ---------------------------------------------------------------------------------------------------


def circuit(
    m: inputs.AnyModel,
    clean: inputs.Given | None = None,
    corrupt: inputs.Given | None = None,
    answer: str | int | None = None,
    wrong: str | int | None = None,
    *,
    prompts: Sequence[Sequence[Any]] = (),
    method: Method = "eap-ig",
    metric: Metric = "logit",
    ablation: Ablation = "resample",
    edges: int | None = None,
    faithful: float | None = None,
    threshold: float | None = None,
    steps: int | None = None,
    draws: int = 5,
    seed: int = 0,
    position: int = -1,
    target: str | None = None,
    on_progress: OnEdges = lambda stage, done, total: None,
) -> Circuit:
    """Find the edges by which a model answers CLEAN as it does, and not as it answers CORRUPT.

    Args:
        m: what `load` gave, or a bare model; see `prepare` for what may be given.
        clean: the prompt whose answer is asked about.
        corrupt: a prompt of the same length that differs in a detail, and is answered otherwise.
        answer: what the clean run says: a token, by its text or id, or a class. None: what it says.
        wrong: what the corrupt run says; None: that.
        prompts: further pairs, as (clean, corrupt, answer, wrong, target), of which the last may be left out.
        method: how edges are scored: eap, eap-ig, atp (AtP*), exact; or acdc, which prunes them one by one.
        metric: logit (of the answer less the wrong one), probability (of the answer), or kl (from the model's
            own distribution, negative).
        ablation: what a cut edge carries: resample (the corrupt run's), mean (over all prompts) or zero.
        edges: how many to keep; None: the fewest, of some numbers, that are faithful.
        faithful: the faithfulness to reach; None: 0.9.
        threshold: acdc: what an edge must be worth; None: a hundredth of what all carry together.
        steps: eap-ig: points between the corrupt and the clean input; None: 5.
        draws: random sets of edges that each point of the curve is compared with.
        seed: of these.
        position: where the answer is read; -1 is the last token.
        target: what the decoder of an encoder-decoder has written; None: what it writes for both alike.
        on_progress: told the stage and how much of it is done.
    """
    refuse_unknown("method", method, get_args(Method))
    refuse(
        (clean is None) != (corrupt is None), "clean and corrupt belong together: give both, or prompts alone"
    )
    alone = next(
        (name for name, x in (("answer", answer), ("wrong", wrong), ("target", target)) if x is not None), ""
    )
    refuse(
        clean is None and alone,
        f"{alone} is of clean and corrupt, and each of the prompts has its own: leave it out",
    )
    sizes_by = [name for name, x in (("edges", edges), ("faithful", faithful)) if x is not None]
    refuse(len(sizes_by) > 1, "edges and faithful both say how many edges to keep: choose one")
    refuse(
        method == "acdc" and sizes_by,
        f"acdc keeps what is worth its threshold: leave {''.join(sizes_by)} out, or choose another method",
    )
    refuse(
        threshold is not None and method != "acdc",
        f"threshold belongs to method acdc, not {method}: leave it out",
    )
    refuse(
        steps is not None and method != "eap-ig",
        f"steps belong to method eap-ig, not {method}: leave them out",
    )
    steps = DEFAULT_STEPS if steps is None else steps
    refuse_outside("steps", steps, 1, 1000)
    refuse_outside("faithful", FAITHFUL if faithful is None else faithful, 0, 1, open=True)
    refuse_outside("threshold", threshold or 0.0, 0)
    refuse_outside("draws", draws, 0)
    refuse_seed(seed)
    own = [] if clean is None else [PromptPair(clean, corrupt, answer, wrong, target)]
    pairs = (*own, *(PromptPair(*pair) for pair in prompts))
    refuse(not pairs, "no prompts: give clean and corrupt, or a list of pairs")
    _refuse_unused(pairs, metric)
    runs = runs_of(inputs.as_model(m), pairs, metric, ablation, position)
    graph, valid = runs[0].graph, runs[0].graph.valid
    full, empty = mean_metric(runs, torch.stack([torch.zeros_like(valid), valid]).float()).tolist()
    refuse(
        abs(full - empty) < SAME,
        f"the metric is {full:.4f} with all edges and with none: choose another answer, or other prompts",
    )
    count = int(valid.sum())
    told = partial(on_progress, f"{method}: edges" if method in ("exact", "acdc") else f"{method}: prompts")
    kept = None
    if method == "exact":
        scores = exact_scores(runs, valid.nonzero(), lambda done: told(done, count))
    elif method == "acdc":
        limit = abs(full - empty) / 100 if threshold is None else threshold
        kept, scores = acdc(runs, limit, lambda done: told(done, count))
        edges = int(kept.sum())
        scores = torch.where(kept, scores.abs() + scores.abs().max(), scores)  # kept ones before all others
    else:
        scores = torch.zeros(valid.shape, dtype=torch.float64)
        for number, run in enumerate(runs):
            scores += METHODS[method](run, steps) / len(runs)
            told(number + 1, len(runs))
    order = torch.where(valid, scores.abs(), -1.0).flatten().argsort(descending=True, stable=True)[:count]
    if edges is not None and method != "acdc":
        refuse_outside("edges", edges, 1, count)
    sizes = [size * scale for scale in (1, 1000, 1000_000) for size in SIZES]
    sizes = sorted({min(size, count) for size in (*sizes, count, *([] if edges is None else [edges]))})
    kept_of = {size: connected(graph, order, size) for size in sizes}
    generator, curve = torch.Generator().manual_seed(seed), dict[int, Point]()  # by what is left of them
    for done, mask in enumerate(kept_of.values(), 1):
        if (size := int(mask.sum())) not in curve:
            curve[size] = _point(runs, mask, (full, empty), draws, generator)
        on_progress("curve", done, len(kept_of))
    if edges is None:
        faithfulness = {size: curve[int(mask.sum())].faithfulness for size, mask in kept_of.items()}
        edges = next((size for size, value in faithfulness.items() if value >= (faithful or FAITHFUL)), count)
    mask = kept_of[edges]
    point = curve[int(mask.sum())]
    ordered = [divmod(place, valid.shape[1]) for place in order.tolist() if mask.flatten()[place]]
    return Circuit(
        prompts=tuple(_answered(pair, run, metric) for pair, run in zip(pairs, runs)),
        method=method, metric=metric, ablation=ablation, position=position, steps=steps,
        full=full, empty=empty, n_edges=count,
        edges=tuple(
            Edge(graph.writers[column], graph.readers[row].name, float(scores[row, column]))
            for row, column in ordered
        ),
        faithfulness=point.faithfulness, completeness=point.completeness, random=point.random,
        curve=tuple(curve[size] for size in sorted(curve)), scores=scores, graph=graph,
    )  # fmt: skip


def _refuse_unused(pairs: Sequence[PromptPair], metric: Metric) -> None:
    """Refuse answers that the metric does not read."""
    unread = UNREAD.get(metric, ())
    name = next((name for pair in pairs for name in unread if getattr(pair, name) is not None), None)
    refuse(name is not None, f"metric {metric} reads no {name}: leave it out, or choose metric logit")


def _answered(pair: PromptPair, run: Run, metric: Metric) -> PromptPair:
    """Return a pair with the answers that the metric reads, so that it can be given to `circuit` again."""
    answers = {"answer": run.choices.name(run.good), "wrong": run.choices.name(run.bad)}
    return pair._replace(**{name: x for name, x in answers.items() if name not in UNREAD.get(metric, ())})


def _point(
    runs: Sequence[Run], kept: Tensor, limits: tuple[float, float], draws: int, generator: torch.Generator
) -> Point:
    """Measure a set of edges, all others, and random sets of the same size."""
    valid, size = runs[0].graph.valid, int(kept.sum())
    masks = [valid & ~kept, kept]
    for _ in range(draws):
        chance = torch.rand(valid.shape, generator=generator).masked_fill(~valid, -1)
        drawn = torch.zeros_like(valid).flatten()
        drawn[chance.flatten().topk(size).indices] = True
        masks.append(valid & ~drawn.view_as(valid))
    full, empty = limits
    alone, without, *others = (
        (mean_metric(runs, torch.stack(masks).float()) - empty) / (full - empty)
    ).tolist()
    return Point(size, alone, 1 - without, sum(others) / draws if draws else float("nan"))


def connected(graph: EdgeGraph, order: Tensor, size: int) -> Tensor:
    """Return the first edges of an order without those on no path from an embedding to the output: [R, W]."""
    kept = torch.zeros(graph.valid.numel(), dtype=torch.bool)
    kept[order[:size]] = True
    kept = kept.view_as(graph.valid)
    feeds = torch.tensor([[name in reader.feeds for name in graph.writers] for reader in graph.readers])
    starts = torch.tensor([name.endswith("embedding") for name in graph.writers])
    ends = torch.tensor([reader.name == OUTPUT for reader in graph.readers])
    live, useful = starts, ends  # writers that the input reaches, readers that reach the output
    for _ in graph.readers:
        further = starts | (feeds & (kept & live).any(1, keepdim=True)).any(0)
        earlier = ends | (feeds & (kept & useful[:, None]).any(0)).any(1)
        if torch.equal(further, live) and torch.equal(earlier, useful):
            break
        live, useful = further, earlier
    return kept & live & useful[:, None]


# Path patching ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PathPatch(results.Result):
    """What goes by one path."""

    path: str
    answer: str
    wrong: str
    clean: float  # the metric
    patched: float  # with what the path carries taken from the corrupt run
    corrupt: float
    share: float  # of the way from clean to corrupt


def path_patch(
    m: inputs.AnyModel,
    clean: inputs.Given,
    corrupt: inputs.Given,
    path: str,
    answer: str | int | None = None,
    wrong: str | int | None = None,
    *,
    metric: Metric = "logit",
    position: int = -1,
    target: str | None = None,
) -> PathPatch:
    """Patch one path: its first part gives what it gives in the corrupt run, and only the path sees that.

    `path` names parts in their order, "0.1 -> 1.0.k -> logits": a head alone stands for its queries, keys
    and values. All that is not on the path gives what it gives in the clean run. Other arguments are
    `circuit`'s.
    """
    _refuse_unused([PromptPair(clean, corrupt, answer, wrong)], metric)
    (run,) = runs_of(
        inputs.as_model(m), [PromptPair(clean, corrupt, answer, wrong, target)], metric, "resample", position
    )
    graph = run.graph
    first, stops = graph.find(path)
    mask = graph.valid.clone()
    mask[:, first] = False
    mask[stops[0].readers, first] = True
    for stop, following in itertools.pairwise(stops):
        mask[torch.tensor(following.readers)[:, None], torch.tensor(stop.feeds)] = False
    values = {**run.outputs, graph.writers[first]: run.values[graph.writers[first]]}
    nothing, everything = torch.zeros_like(graph.valid), graph.valid
    before, after = run.measure_rows(torch.stack([nothing, everything]).float()).tolist()
    patched = float(replace(run, values=values).measure_rows(mask[None].float()))
    refuse(abs(before - after) < SAME, f"the metric is {before:.4f} in both runs: choose prompts that differ")
    return PathPatch(
        path=path,
        answer=run.choices.name(run.good),
        wrong=run.choices.name(run.bad),
        clean=before,
        patched=patched,
        corrupt=after,
        share=(before - patched) / (before - after),
    )
