"""Attention patterns: where each head looks, how spread it is, and what flows through a whole stack.

    maps = attention(m, "The cat sat on the mat")
    maps.head("3.2").pattern                      # T S; with .queries.labels, .keys.labels, .entropy
    maps.layer(3).pattern                         # H T S
    maps.entropy()                                # L H, in bits
    maps.rollout().last                           # T T
    attention(m, text, to="folder", budget=None)  # a layer at a time to disk: memory never holds two

A pattern has a row per query, a column per key, and each row sums to 1. It is taken while the forward pass
makes it. One that has more cells than the budget is put into larger cells at once (`Axis.size` says of how
many tokens), and one that goes to disk is written at once: so memory holds one whole pattern, however deep
the model. Layers that are not recorded keep their fused kernel.

Shapes: L layers, H heads, T queries, S keys, N tokens of a stack (T of them unless aggregated).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import nearest, refuse, refusing
from clearhead.hub.files import read_json, write_bytes, write_text
from clearhead.inside import inputs, names
from clearhead.inside.names import AttentionHead, AttentionName
from clearhead.inside.results import Array, Result, entropy_bits, filled, plain

FORMATS = (".json", ".npz")


def query_entropy(pattern: Tensor, real: Tensor | None = None) -> Tensor:
    """Return how spread each query's attention is, in bits: [..., T, S] -> [..., T].

    0: all on one key; log2(S): the same on all keys. Padding, which `real` [..., T] marks False, and a query
    that sees nothing at all are NaN: they have no part in a mean.
    """
    sees = pattern.sum(-1) > 0
    return entropy_bits(pattern).masked_fill(~(sees if real is None else sees & real), torch.nan)


def mean_entropy(bits: Array) -> Array:
    """Return the mean over queries that see something, [..., N] -> [...]; NaN where none does."""
    return torch.from_numpy(np.array(bits)).nanmean(-1).numpy()


@dataclass(frozen=True)
class Axis(Result):
    """The queries or the keys of a pattern: one label per cell."""

    json_names = ("labels", "size as tokens_per_cell")

    labels: tuple[str, ...]
    size: int = 1  # tokens per cell

    @classmethod
    def over(cls, labels: Sequence[str], size: int) -> Self:
        """Return cells of `size` tokens; a label has the first and last position and the first token."""
        if size == 1:
            return cls(tuple(labels))
        cells = [(first, min(first + size, len(labels)) - 1) for first in range(0, len(labels), size)]
        names = (
            f"{first}-{last} {labels[first]}…" if last > first else f"{first} {labels[first]}"
            for first, last in cells
        )
        return cls(tuple(names), size)


@dataclass(frozen=True)
class Link(Result):
    """One query looking at one key."""

    query: int
    key: int
    query_label: str
    key_label: str
    weight: float


@dataclass(frozen=True, eq=False)
class HeadPattern(Result):
    """The pattern of one head."""

    json_names = ("queries", "keys", "entropies", "pattern")

    head: AttentionHead
    pattern: Array  # T S
    queries: Axis
    keys: Axis
    entropies: Array  # N, in bits, one per query token; NaN: it sees nothing

    @property
    def entropy(self) -> float:
        """The mean over queries, in bits; NaN where none sees anything."""
        return float(mean_entropy(self.entropies))

    @property
    def strongest(self) -> Link:
        """The largest weight, among the queries that see more than one key."""
        choice = (self.pattern > 0).sum(-1) > 1
        rows = np.where(choice[:, None], self.pattern, -1.0) if choice.any() else self.pattern
        query, key = (int(place) for place in np.unravel_index(int(rows.argmax()), rows.shape))
        return Link(
            query, key, self.queries.labels[query], self.keys.labels[key], float(self.pattern[query, key])
        )

    def summary(self) -> dict[str, Any]:
        """Return plain JSON values, in few numbers."""
        return {"head": str(self.head), "entropy": plain(self.entropy), "strongest": self.strongest.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the summary, and every number."""
        return self.summary() | super().to_dict()


@dataclass(frozen=True, eq=False)
class LayerMap(Result):
    """The patterns of all heads of one attention."""

    json_names = ("kind", "layer", "queries", "keys", "entropies", "pattern")

    kind: str  # self, encoder or cross, as in the names of heads
    layer: int
    pattern: Array  # H T S; mapped from disk where it was streamed there
    queries: Axis
    keys: Axis
    recorded_entropies: Array | None = None  # H N, of the tokens themselves, where the pattern is of cells

    @property
    def name(self) -> str:
        """As heads are named, without the head: "3", "encoder.0", "cross.1"."""
        return str(AttentionName(self.kind, self.layer))

    @property
    def aggregated(self) -> int:
        """Tokens per cell, on the axis that has more."""
        return max(self.queries.size, self.keys.size)

    def entropies(self) -> Array:
        """Return [H, N] bits of each query of each head, of single tokens; NaN where a query sees nothing."""
        if self.recorded_entropies is not None:
            return self.recorded_entropies
        return query_entropy(torch.from_numpy(np.array(self.pattern))).numpy()

    def heads(self) -> list[HeadPattern]:
        """Return each head by itself."""
        names = AttentionName(self.kind, self.layer, len(self.pattern)).heads
        return [
            HeadPattern(name, pattern, self.queries, self.keys, bits)
            for name, pattern, bits in zip(names, self.pattern, self.entropies())
        ]


@dataclass(frozen=True, eq=False)
class Rollout(Result):
    """The share of each token in each position after each layer, if attention alone moved anything."""

    kind: str
    tokens: Axis
    flow: Array  # L T T: after each layer, the share of each token (column) in each place (row)

    @property
    def last(self) -> Array:
        """[T, T] after the last layer."""
        return np.asarray(self.flow[-1])


@dataclass(frozen=True, eq=False)
class AttentionMaps(Result):
    """Every pattern that was recorded, in the order of the forward pass."""

    json_names = ("aggregated", "maps")

    maps: tuple[LayerMap, ...]
    # Those of the model that have no pattern, or whose pattern shows a part of what they add.
    skipped: tuple[AttentionName, ...] = ()

    @property
    def aggregated(self) -> int:
        """Tokens per cell where most were put together; 1: nothing was."""
        return max(each.aggregated for each in self.maps)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of attention that were recorded."""
        return tuple(dict.fromkeys(each.kind for each in self.maps))

    def of(self, kind: str) -> list[LayerMap]:
        """Return all layers of one kind."""
        refuse(
            kind not in self.kinds,
            f'no attention of the kind "{kind}" was recorded: there is {", ".join(self.kinds)}',
        )
        return [each for each in self.maps if each.kind == kind]

    def layer(self, number: int, kind: str = "self") -> LayerMap:
        """Return one layer, all heads."""
        known = {each.layer: each for each in self.of(kind)}
        refuse(
            number not in known,
            f"layer {number} of {kind} attention was not recorded: there is {', '.join(map(str, known))}",
        )
        return known[number]

    def head(self, name: str) -> HeadPattern:
        """Return one head by its name: "3.2", "encoder.0.5", "cross.1.2"."""
        known = {
            f"{each.name}.{number}": (each, number)
            for each in self.maps
            for number in range(len(each.pattern))
        }
        wanted = name.strip().removeprefix("self.")
        refuse(
            wanted not in known,
            f'head "{name}" was not recorded{nearest(wanted, known)}: '
            f"heads are called layer.head, such as {', '.join(list(known)[:3])}",
        )
        layer, number = known[wanted]
        return layer.heads()[number]

    def heads(self) -> list[HeadPattern]:
        """Return every head by itself."""
        return [head for each in self.maps for head in each.heads()]

    def entropy(self, kind: str = "self") -> Array:
        """Return the mean entropy of each head in bits, [L, H]; NaN where a layer has fewer heads."""
        rows = [mean_entropy(each.entropies()).tolist() for each in self.of(kind)]
        return filled(rows).astype(np.float32)

    def rollout(self, kind: str = "self", residual: float = 0.5) -> Rollout:
        """Return the attention rollout of one stack.

        The mean over heads is mixed with the identity (`residual` is its share), rows are normalised to sum
        to one, and layers are multiplied. For aggregated maps it is the rollout of their cells.
        """
        layers = self.of(kind)
        refuse(
            kind == "cross",
            "rollout follows tokens through one stack, and cross-attention joins two: choose self or encoder",
        )
        skipped = [str(each.layer) for each in self.skipped if each.kind == kind]
        refuse(
            bool(skipped),
            "rollout follows patterns alone, and these layers have none, or a state-space mixer next to it: "
            + ", ".join(skipped),
        )
        refuse(
            [each.layer for each in layers] != list(range(len(layers))),
            "rollout starts at the first layer and leaves none out: record all layers",
        )
        refuse(not 0 <= residual <= 1, f"residual {residual} must be a share between 0 and 1")
        identity, flows = np.eye(layers[0].pattern.shape[-1]), list[Tensor]()
        for each in layers:
            heads = each.pattern.mean(0, dtype=np.float64) if len(each.pattern) else 0
            mixed = residual * identity + (1 - residual) * heads
            sums = mixed.sum(-1, keepdims=True)
            step = torch.from_numpy(np.divide(mixed, sums, out=np.zeros_like(mixed), where=sums > 0))
            flows.append(step @ flows[-1] if flows else step)  # torch: as many threads as the model has
        return Rollout(kind, layers[0].queries, torch.stack(flows).float().numpy())

    def save(self, path: str | Path) -> Path:
        """Write patterns, entropies and labels of every attention as .json, or as arrays in an .npz."""
        path = checked_ending(path)
        if path.suffix.lower() == ".json":
            write_text(path, json.dumps(self.to_dict()))
            return path
        arrays: dict[str, Any] = {"aggregated": np.array(self.aggregated)}
        for each in self.maps:
            axes = {"queries": np.array(each.queries.labels), "keys": np.array(each.keys.labels)}
            own = {"pattern": each.pattern, "entropies": each.entropies(), **axes}
            arrays |= {f"{each.kind}.{each.layer}.{name}": array for name, array in own.items()}
        file = BytesIO()
        np.savez(file, **arrays)
        write_bytes(path, file.getvalue())
        return path


def checked_ending(path: str | Path) -> Path:
    """Return a path whose ending says in which format to write."""
    path = Path(path)
    refuse(
        path.suffix.lower() not in FORMATS,
        f'patterns cannot be written as "{path.name}": end the name in {" or ".join(FORMATS)}',
    )
    return path


# Recording --------------------------------------------------------------------------------------------------


BUDGET = 512 * 512  # cells of one head's pattern
INDEX = "maps.json"


def attention(
    m: inputs.AnyModel,
    given: inputs.Given | inputs.Prepared,
    target: inputs.Target = None,
    pair: str | None = None,
    kinds: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    budget: int | None = BUDGET,
    to: str | Path | None = None,
) -> AttentionMaps:
    """Return the attention patterns of one forward pass; `m`, `given`, `target`, `pair` are as for `prepare`.

    Args:
        kinds: self, encoder, cross; None: all that the model has.
        layers: which layers of them; None: all that have a pattern. Those of mixtures and states have none.
        budget: the most cells of a head's pattern; a larger one is put into cells of several tokens: the sum
            over a cell's keys, the mean over its queries, so that rows still sum to 1. None: never.
        to: a new or empty folder that patterns are streamed to, a file each; the result maps them from there.
    """
    prepared = inputs.prepare(m, given, target, pair)
    refuse(budget is not None and budget < 1, f"budget {budget} must be 1 cell or more, or None for no limit")
    chosen = _chosen(prepared.model, kinds, layers)
    axes = {each.kind: _axes(prepared, each.kind, budget) for each in chosen}
    folder = None if to is None else Path(to)
    if folder is not None:
        with refusing(f"the folder {folder} cannot be used"):
            folder.mkdir(parents=True, exist_ok=True)
            refuse(
                any(folder.iterdir()),
                f"the folder {folder} is not empty: name a new one to stream patterns to",
            )
    maps: list[LayerMap] = []

    def keep(x: Tensor, name: names.AttentionName) -> None:
        whole, (queries, keys) = x.detach()[0].float(), axes[name.kind]
        if max(queries.size, keys.size) == 1:
            cells, entropies = whole.cpu().numpy(), None
        else:
            # Copied out of torch's memory: small tensors between large ones would keep their blocks taken.
            cells = np.array(in_cells(whole, queries.size, keys.size).cpu())
            entropies = query_entropy(whole).cpu().numpy()
        if folder is None:
            maps.append(LayerMap(name.kind, name.layer, cells, queries, keys, entropies))
            return
        with refusing(f"patterns cannot be written to {folder}"):
            np.save(folder / f"{name.kind}.{name.layer}.npy", cells)
            if entropies is not None:
                np.save(folder / f"{name.kind}.{name.layer}.entropies.npy", entropies)

    prepared.hand_out({f"{each.part}.pattern": partial(keep, name=each) for each in chosen})
    kinds_by_name = names.kinds_of(prepared.model.config)
    skipped = tuple(each for each, own in kinds_by_name.items() if not (own.patterned and own.has_heads))
    if folder is None:
        return AttentionMaps(tuple(maps), skipped)
    rows = [
        {"kind": each.kind, "layer": each.layer, "queries": queries.to_dict(), "keys": keys.to_dict()}
        for each in chosen
        for queries, keys in [axes[each.kind]]
    ]
    write_text(folder / INDEX, json.dumps({"maps": rows, "skipped": skipped}))
    return read_maps(folder)


def read_maps(folder: str | Path) -> AttentionMaps:
    """Return patterns that were streamed to a folder, mapped from its files."""
    folder, maps = Path(folder), []
    index = read_json(folder / INDEX)
    for entry in index["maps"]:
        queries, keys = (
            Axis(tuple(entry[side]["labels"]), entry[side]["tokens_per_cell"]) for side in ("queries", "keys")
        )
        name = f"{entry['kind']}.{entry['layer']}"
        pattern, entropies = np.load(folder / f"{name}.npy", mmap_mode="r"), folder / f"{name}.entropies.npy"
        own = np.load(entropies, mmap_mode="r") if entropies.exists() else None
        maps.append(LayerMap(entry["kind"], entry["layer"], pattern, queries, keys, own))
    return AttentionMaps(tuple(maps), tuple(names.AttentionName(*each) for each in index.get("skipped", ())))


def in_cells(pattern: Tensor, queries: int, keys: int) -> Tensor:
    """Return a pattern in cells of so many queries and keys: summed over keys, the mean over queries.

    [H, T, S] -> [H, ceil(T / queries), ceil(S / keys)]; the last cells may hold fewer tokens.
    """
    T = pattern.shape[1]
    # Queries first: sums of whole rows are quick, and leave less to sum in short chunks.
    cells = _summed(_summed(pattern, 1, queries), 2, keys)
    counts = [[min(queries, T - first)] for first in range(0, T, queries)]
    return cells / torch.tensor(counts, device=pattern.device)


def _summed(x: Tensor, axis: int, size: int) -> Tensor:
    """Return sums over cells of `size` positions of an axis; the last cell may be smaller."""
    whole = x.shape[axis] // size * size
    cells = torch.unflatten(x.narrow(axis, 0, whole), axis, (-1, size)).sum(axis + 1)
    if whole == x.shape[axis]:
        return cells
    return torch.cat([cells, x.narrow(axis, whole, x.shape[axis] - whole).sum(axis, keepdim=True)], axis)


def _chosen(
    model: Transformer, kinds: Sequence[str] | None, layers: Sequence[int] | None
) -> list[names.AttentionName]:
    """Return each attention to record."""
    known = list(names.kinds_of(model.config))
    there = tuple(dict.fromkeys(each.kind for each in known))
    kinds = (kinds,) if isinstance(kinds, str) else there if kinds is None else kinds
    unknown = next((kind for kind in kinds if kind not in there), None)
    refuse(
        unknown is not None,
        f'there is no attention of the kind "{unknown}": this model has {", ".join(there)}',
    )
    depth = max((each.layer for each in known if each.kind in kinds), default=-1)
    for layer in layers or ():
        refuse(not 0 <= layer <= depth, f"there is no layer {layer}: layers are 0 to {depth}")
    chosen = [each for each in known if each.kind in kinds and (layers is None or each.layer in layers)]
    refuse(not chosen, "no attention was chosen: name at least one kind and one layer")
    return names.patterned(model.config, among=chosen)


def _axes(prepared: inputs.Prepared, kind: str, budget: int | None) -> tuple[Axis, Axis]:
    """Return queries and keys of one kind, in cells that keep a pattern within the budget."""
    queries, keys = (tokens.labels for tokens in prepared.queries_and_keys(kind))
    side = max(len(queries), len(keys))
    if budget is not None and len(queries) * len(keys) > budget:
        side = math.isqrt(budget)
    return Axis.over(queries, math.ceil(len(queries) / side)), Axis.over(keys, math.ceil(len(keys) / side))
