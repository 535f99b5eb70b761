"""Recording attention: the pattern of every head, or of some, for one text, pair or image.

    maps = attention(m, "The cat sat on the mat")
    maps.head("3.2").pattern                      # T S, a numpy array; .queries.labels, .keys.labels, .entropy
    maps.layer(3).pattern                         # H T S
    maps.entropy()                                # L H, in bits
    maps.rollout().last                           # T T
    attention(m, text, to="folder", budget=None)  # a layer at a time to disk: memory never holds two

A pattern is taken while the forward pass makes it. One that has more cells than the budget is put into larger cells at
once, and one that goes to disk is written at once: so memory holds one whole pattern, however deep the model. Layers
that nobody asked for keep their fused kernel.

Shapes: H heads, T queries, S keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from clearhead.api import Model
from clearhead.errors import InputError
from clearhead.hub.files import read_json
from clearhead.hub.pixels import Image
from clearhead.inside.attention_maps import (
    Array,
    AttentionMaps,
    Axis,
    HeadMap,
    LayerMap,
    Link,
    Rollout,
    query_entropy,
)
from clearhead.inside.inputs import Prepared, prepare
from clearhead.inside.names import Head, attentions
from clearhead.model.taps import edit
from clearhead.model.transformer import Transformer

__all__ = [
    "AttentionMaps",
    "Axis",
    "HeadMap",
    "LayerMap",
    "Link",
    "Rollout",
    "attention",
    "maps_of",
    "query_entropy",
    "read_maps",
]

BUDGET = 512 * 512  # cells of one head's pattern
INDEX = "maps.json"


def attention(
    m: Model | Transformer,
    given: str | Sequence[int] | Tensor | Image,
    target: str | Sequence[int] | None = None,
    pair: str | None = None,
    kinds: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    budget: int | None = BUDGET,
    to: str | Path | None = None,
) -> AttentionMaps:
    """The attention patterns of one forward pass.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        given: text or token ids; for a model of patches an image.
        target: what the decoder of two stacks has written; None: what it writes by itself.
        pair: the second text of a pair, for an encoder.
        kinds: self, encoder, cross; None: all that the model has.
        layers: which layers of them; None: all.
        budget: the most cells of a head's pattern; a larger one is put into cells of several tokens: the sum over a
            cell's keys, the mean over its queries, so that rows still sum to 1. None: never.
        to: a new or empty folder that patterns are streamed to, a file each; the result maps them from there.
    """
    return maps_of(prepare(m, given, target, pair), kinds, layers, budget, to)


def maps_of(
    prepared: Prepared,
    kinds: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    budget: int | None = BUDGET,
    to: str | Path | None = None,
) -> AttentionMaps:
    """The patterns for inputs that are prepared already; see `attention`."""
    if budget is not None and budget < 1:
        raise InputError(f"budget {budget} must be 1 cell or more, or None for no limit")
    chosen = _chosen(prepared.model, kinds, layers)
    axes = {kind: _axes(prepared, kind, budget) for kind, _ in chosen}
    folder = _new_folder(Path(to)) if to is not None else None
    found: list[LayerMap] = []

    def keep(x: Tensor, kind: str, layer: int) -> Tensor:
        each = _layer_map(x, kind, layer, *axes[kind])
        found.append(each if folder is None else _written(each, folder))
        return x

    handlers: dict[str, Callable[[Tensor], Tensor]] = {
        f"{Head(kind, layer, 0).part}.pattern": partial(keep, kind=kind, layer=layer)
        for kind, layer in chosen
    }
    with torch.no_grad(), edit(prepared.model, handlers):
        prepared.run(logits="none")
    if folder is not None:
        _write_index(found, folder)
    return AttentionMaps(tuple(found))


def read_maps(folder: str | Path) -> AttentionMaps:
    """Patterns that were streamed to a folder, mapped from its files."""
    folder = Path(folder)
    maps = []
    for entry in read_json(folder / INDEX)["maps"]:
        queries, keys = (
            Axis(tuple(entry[side]["labels"]), entry[side]["tokens_per_cell"]) for side in ("queries", "keys")
        )
        pattern, entropies = _mapped(folder, entry["kind"], entry["layer"])
        maps.append(LayerMap(entry["kind"], entry["layer"], pattern, queries, keys, entropies))
    return AttentionMaps(tuple(maps))


def in_cells(pattern: Tensor, queries: int, keys: int) -> Tensor:
    """A pattern in cells of so many queries and keys: summed over keys, the mean over queries.

    [H, T, S] -> [H, ceil(T / queries), ceil(S / keys)]; the last cells may hold fewer tokens.
    """
    H, T, S = pattern.shape
    columns = nnf.pad(pattern, (0, -S % keys)).view(H, T, -1, keys).sum(-1)
    rows = nnf.pad(columns, (0, 0, 0, -T % queries)).view(H, -1, queries, columns.shape[-1]).sum(2)
    counts = torch.full((rows.shape[1], 1), float(queries), device=pattern.device)
    counts[-1] -= -T % queries
    return rows / counts


def _layer_map(x: Tensor, kind: str, layer: int, queries: Axis, keys: Axis) -> LayerMap:
    """One row's pattern [1, H, T, S] as data; in cells where the axes say so."""
    whole = x.detach()[0].float()
    if max(queries.size, keys.size) == 1:
        return LayerMap(kind, layer, whole.cpu().numpy(), queries, keys)
    entropies = query_entropy(whole).cpu().numpy()
    # Copied out of torch's room: small tensors left standing between large ones that come and go keep their room taken, too.
    cells = np.array(in_cells(whole, queries.size, keys.size).cpu())
    return LayerMap(kind, layer, cells, queries, keys, entropies)


def _chosen(
    model: Transformer, kinds: Sequence[str] | None, layers: Sequence[int] | None
) -> list[tuple[str, int]]:
    """Kind and layer of each attention to record."""
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    known = [(kind, layer) for kind, layer, _ in attentions(model.config)]
    there = tuple(dict.fromkeys(kind for kind, _ in known))
    for kind in kinds or ():
        if kind not in there:
            raise InputError(f'there is no attention of the kind "{kind}": this model has {", ".join(there)}')
    found = [(kind, layer) for kind, layer in known if kinds is None or kind in kinds]
    depth = max((layer for _, layer in found), default=-1)
    for layer in layers or ():
        if not 0 <= layer <= depth:
            raise InputError(f"there is no layer {layer}: layers are 0 to {depth}")
    found = [(kind, layer) for kind, layer in found if layers is None or layer in layers]
    if not found:
        raise InputError("no attention was chosen: name at least one kind and one layer")
    return found


def _axes(prepared: Prepared, kind: str, budget: int | None) -> tuple[Axis, Axis]:
    """Queries and keys of one kind, in cells that keep a pattern within the budget."""
    queries = prepared.tokens_of("encoder." if kind == "encoder" else "").labels
    keys = prepared.tokens_of("" if kind == "self" else "encoder.").labels
    if budget is None or len(queries) * len(keys) <= budget:
        return Axis(queries), Axis(keys)
    side = math.isqrt(budget)
    return Axis.over(queries, -(-len(queries) // side)), Axis.over(keys, -(-len(keys) // side))


def _new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"the folder {folder} is not empty: name a new one to stream patterns to")
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be used: {error.strerror or error}") from None
    return folder


def _written(each: LayerMap, folder: Path) -> LayerMap:
    """The same with its arrays on disk."""
    try:
        np.save(folder / f"{each.kind}.{each.layer}.npy", each.pattern)
        if each.recorded_entropies is not None:
            np.save(folder / f"{each.kind}.{each.layer}.entropies.npy", each.recorded_entropies)
    except OSError as error:
        raise InputError(f"patterns cannot be written to {folder}: {error.strerror or error}") from None
    pattern, entropies = _mapped(folder, each.kind, each.layer)
    return LayerMap(each.kind, each.layer, pattern, each.queries, each.keys, entropies)


def _mapped(folder: Path, kind: str, layer: int) -> tuple[Array, Array | None]:
    """Pattern and entropies of one attention, from their files."""
    entropies = folder / f"{kind}.{layer}.entropies.npy"
    pattern: Array = np.load(folder / f"{kind}.{layer}.npy", mmap_mode="r")
    return pattern, np.load(entropies, mmap_mode="r") if entropies.exists() else None


def _write_index(maps: list[LayerMap], folder: Path) -> None:
    rows = [
        {
            "kind": each.kind,
            "layer": each.layer,
            "queries": each.queries.to_dict(),
            "keys": each.keys.to_dict(),
        }
        for each in maps
    ]
    (folder / INDEX).write_text(json.dumps({"maps": rows}), encoding="utf-8")
