"""Sparse dictionaries of a page's model: features are nodes of its graph, and are named by their examples."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from clearhead.app.explorer.findings import own_texts
from clearhead.app.explorer.views import PageRun, short
from clearhead.errors import ClearheadError
from clearhead.inside.features.dictionary import WEIGHTS, Dictionary, load
from clearhead.inside.features.report import show_features
from clearhead.inside.graph import refuse_unfit
from clearhead.run.api import Model

EXAMPLES = 3  # places that are shown of each feature
PROMOTED = 6


def dictionaries_of(m: Model, named: Sequence[str | Path] = ()) -> tuple[Dictionary, ...]:
    """Return the dictionaries that were named, else those in folders of the model's directory that fit."""
    if named:
        given = tuple(load(path) for path in named)
        refuse_unfit(m.model, given)
        return given
    found: dict[str, Dictionary] = {}
    for path in sorted(m.folder.glob(f"*/{WEIGHTS}")) if m.folder is not None and m.folder.is_dir() else ():
        with suppress(ClearheadError):  # of another part, or of another model
            one = load(path.parent)
            refuse_unfit(m.model, [one])
            found[one.out] = one
    return tuple(found.values())


def known_features(run: PageRun, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what features promote, and where they are strongest, by names such as "3.117"."""
    known: dict[str, dict[str, Any]] = {}
    for dictionary in run.features():
        layer = _layer(dictionary)
        numbers = sorted({int(name.rpartition(".")[2]) for name in names if name.rpartition(".")[0] == layer})
        if not numbers:
            continue
        texts = own_texts(run.m) or [run.given]
        for feature in show_features(run.m, dictionary, texts, numbers, top=EXAMPLES).features:
            fired = [{"before": x.before, "token": x.token, "after": x.after} for x in feature.contexts]
            promotes = [label for label, _ in feature.promoted][:PROMOTED]
            known[f"{layer}.{feature.name}"] = {"promotes": promotes, "fired": fired}
    return known


def strongest_feature(run: PageRun, part: str, position: int) -> dict[str, Any] | None:
    """Return the feature of a feed-forward that adds the longest vector at one token; None without one."""
    layer = part.removeprefix("feedforward:")
    dictionary = next((each for each in run.features() if _layer(each) == layer), None)
    if dictionary is None or layer == part or run.prepared.source is not None:
        return None
    with torch.no_grad():
        x = run.prepared.record(dictionary.at, logits="none")[1][dictionary.at][0, position]
        added = dictionary.encode(x) * dictionary.W_dec.norm(dim=1)
    if not float(added.max()):
        return None
    name = f"{layer}.{int(added.argmax())}"
    return {"name": name, "size": short(float(added.max())), **known_features(run, [name])[name]}


def _layer(dictionary: Dictionary) -> str:
    return dictionary.out.replace("blocks.", "").removesuffix(".feedforward.out")
