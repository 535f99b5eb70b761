"""Recording attention: the pattern of every head, or of some, for one text, pair or image.

    maps = attention(m, "The cat sat on the mat")
    maps.head("3.2").pattern                      # T S; beside it .queries.labels, .keys.labels, .entropy
    maps.layer(3).pattern                         # H T S
    maps.entropy()                                # L H, in bits
    maps.rollout().last                           # T T
    attention(m, text, to="folder", budget=None)  # a layer at a time to disk: memory never holds two

A pattern is taken while the forward pass makes it. One that has more cells than the budget is put into larger
cells at once, and one that goes to disk is written at once: so memory holds one whole pattern, however deep
the model. Layers that nobody asked for keep their fused kernel.

Shapes: H heads, T queries, S keys.
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from clearhead.core.transformer import Transformer
from clearhead.errors import InputError, refuse
from clearhead.hub.files import read_json
from clearhead.inside import inputs, names
from clearhead.inside.attention_maps import AttentionMaps, Axis, LayerMap, query_entropy

BUDGET = 512 * 512  # cells of one head's pattern
INDEX = "maps.json"


def attention(
    m: inputs.AnyModel,
    given: inputs.Given,
    target: inputs.Target = None,
    pair: str | None = None,
    kinds: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    budget: int | None = BUDGET,
    to: str | Path | None = None,
) -> AttentionMaps:
    """Return the attention patterns of one forward pass.

    Args:
        m: what `load` gave, or a bare model, which takes ids or pixels.
        given: text or token ids; for a model of patches an image.
        target: what the decoder of two stacks has written; None: what it writes by itself.
        pair: the second text of a pair, for an encoder.
        kinds: self, encoder, cross; None: all that the model has.
        layers: which layers of them; None: all that have a pattern. Those of mixtures and states have none.
        budget: the most cells of a head's pattern; a larger one is put into cells of several tokens: the sum
            over a cell's keys, the mean over its queries, so that rows still sum to 1. None: never.
        to: a new or empty folder that patterns are streamed to, a file each; the result maps them from there.
    """
    return maps_of(inputs.prepare(m, given, target, pair), kinds, layers, budget, to)


def maps_of(
    prepared: inputs.Prepared,
    kinds: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    budget: int | None = BUDGET,
    to: str | Path | None = None,
) -> AttentionMaps:
    """Return the patterns for inputs that are prepared already; see `attention`."""
    refuse(budget is not None and budget < 1, f"budget {budget} must be 1 cell or more, or None for no limit")
    chosen = _chosen(prepared.model, kinds, layers)
    axes = {each.kind: _axes(prepared, each.kind, budget) for each in chosen}
    folder = _new_folder(Path(to)) if to is not None else None
    found: list[LayerMap] = []

    def keep(x: Tensor, name: names.AttentionName) -> None:
        whole, (queries, keys) = x.detach()[0].float(), axes[name.kind]
        if max(queries.size, keys.size) == 1:
            cells, entropies = whole.cpu().numpy(), None
        else:
            # Copied out of torch's memory: small tensors between large ones would keep their blocks taken.
            cells = np.array(in_cells(whole, queries.size, keys.size).cpu())
            entropies = query_entropy(whole).cpu().numpy()
        each = LayerMap(name.kind, name.layer, cells, queries, keys, entropies)
        if folder is None:
            found.append(each)
        else:
            _write_arrays(each, folder)

    prepared.hand_out({f"{each.part}.pattern": partial(keep, name=each) for each in chosen})
    skipped = tuple(each for each, own in names.kinds_of(prepared.model.config).items() if not own.patterned)
    if folder is None:
        return AttentionMaps(tuple(found), skipped)
    rows = [
        {"kind": each.kind, "layer": each.layer}
        | {name: axis.to_dict() for name, axis in zip(("queries", "keys"), axes[each.kind])}
        for each in chosen
    ]
    index = {"maps": rows, "skipped": skipped}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
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
    # Queries first: sums of whole rows are quick, and leave less to sum in short pieces.
    cells = _summed(_summed(pattern, 1, queries), 2, keys)
    counts = [[min(queries, T - first)] for first in range(0, T, queries)]
    return cells / torch.tensor(counts, device=pattern.device)


def _summed(x: Tensor, axis: int, size: int) -> Tensor:
    """Return sums over cells of so many places of an axis; the last cell may be smaller."""
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
    for kind in kinds:
        refuse(
            kind not in there,
            f'there is no attention of the kind "{kind}": this model has {", ".join(there)}',
        )
    found = [each for each in known if each.kind in kinds]
    depth = max((each.layer for each in found), default=-1)
    for layer in layers or ():
        refuse(not 0 <= layer <= depth, f"there is no layer {layer}: layers are 0 to {depth}")
    found = [each for each in found if layers is None or each.layer in layers]
    refuse(not found, "no attention was chosen: name at least one kind and one layer")
    shown = [each for each in names.patterned(model.config) if each in found]
    refuse(not shown, f"there is no attention pattern to look at; {''.join(names.unpatterned(model.config))}")
    return shown


def _axes(prepared: inputs.Prepared, kind: str, budget: int | None) -> tuple[Axis, Axis]:
    """Return queries and keys of one kind, in cells that keep a pattern within the budget."""
    queries = prepared.tokens_of("encoder." if kind == "encoder" else "").labels
    keys = prepared.tokens_of("" if kind == "self" else "encoder.").labels
    side = max(len(queries), len(keys))
    if budget is not None and len(queries) * len(keys) > budget:
        side = math.isqrt(budget)
    return Axis.over(queries, math.ceil(len(queries) / side)), Axis.over(keys, math.ceil(len(keys) / side))


def _new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse(
            any(folder.iterdir()), f"the folder {folder} is not empty: name a new one to stream patterns to"
        )
    except OSError as error:
        raise InputError(f"the folder {folder} cannot be used: {error.strerror or error}") from None
    return folder


def _write_arrays(each: LayerMap, folder: Path) -> None:
    try:
        np.save(folder / f"{each.kind}.{each.layer}.npy", each.pattern)
        if each.recorded_entropies is not None:
            np.save(folder / f"{each.kind}.{each.layer}.entropies.npy", each.recorded_entropies)
    except OSError as error:
        raise InputError(f"patterns cannot be written to {folder}: {error.strerror or error}") from None
