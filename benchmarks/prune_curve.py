"""Plot quality against heads removed, on a model trained here: an encoder-decoder that turns dates into ISO.

    python benchmarks/prune_curve.py [--steps 600] [--orders 5] [--examples 300] [--out /tmp/prune-curve]
        [--save]

Trains a small model on the embedded corpus, ranks its heads on part of the training side and measures loss
and accuracy on the validation side while heads are masked one after another: by gradient, by ablation of each
alone, and in random orders. Then half of the heads are cut out, and the smaller model is trained on. `--save`
writes benchmarks/results/prune_curve.json and docs/images/prune_curve.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import torch

import clearhead as ch
from clearhead.app.plot import save as save_picture
from clearhead.app.plot.models import draw_curves
from clearhead.inside.ablation import Examples, examples_from, judge
from clearhead.inside.names import all_heads
from clearhead.inside.pruning import PruneCurve, least, prune, prune_curve, scores
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data
from common import device_name, save

ROOT = Path(__file__).resolve().parents[1]
SHAPE = (
    "model.d_model=64",
    "model.n_layers=2",
    "model.n_heads=8",
    "data.batch_size=64",
    "train.device=cpu",
    "train.threads=1",
)


def trained(out: Path, steps: int, base: Path | None = None) -> Path:
    """A model directory: a new model, or `base` trained on."""
    settings = [
        *(SHAPE if base is None else SHAPE[3:]),
        f"train.steps={steps}",
        f"train.validate_every={steps}",
        "train.seed=0",
    ]
    settings += [f'model.base="{base}"', "train.lr=3e-4"] if base is not None else ["train.lr=3e-3"]
    return ch.train("dates", out=out, settings=settings, overwrite=True).folder


def both_sides(m: ch.Model, most: int) -> tuple[Examples, Examples]:
    """Return examples to rank heads on and examples to measure on, in the order of the corpus.

    The former are of the training side, the latter of the validation side.
    """
    corpus = open_data(DataPlan(paths=("dates",)))
    sides = [list(corpus.train)[:most], list(corpus.validation)[:most]]
    made = [examples_from(m, dataclasses.replace(corpus, validation=rows)) for rows in sides]
    return made[0], made[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--orders", type=int, default=5, help="random orders")
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = options.out or Path(tempfile.mkdtemp())
    m = ch.load(trained(place / "whole", options.steps))
    ranking, measured = both_sides(m, options.examples)
    ways: dict[str, list[PruneCurve]] = {
        "by importance": [prune_curve(m, measured, 24, ranked_on=ranking)],
        "by importance, ranked anew": [prune_curve(m, measured, 24, recompute=True, ranked_on=ranking)],
        "by ablation": [prune_curve(m, measured, 24, "ablation", ranked_on=ranking)],
        "at random": [prune_curve(m, measured, 24, "random", seed) for seed in range(options.orders)],
    }
    rows = {}
    for name, curves in ways.items():
        first = curves[0]
        loss, accuracy = (
            np.mean([getattr(curve, kind) for curve in curves], 0).round(4).tolist()
            for kind in ("loss", "accuracy")
        )
        rows[name] = {
            "orders": len(curves),
            "heads_removed": list(first.removed),
            "loss": loss,
            "accuracy": accuracy,
        }
        print(f"{name:<28}" + "".join(f"{value:8.3f}" for value in accuracy))

    ranked = scores(m, ranking).numbers(m.config)
    smaller = prune(m, least(m.config, ranked, 0.5))
    smaller.save(place / "half")
    again = ch.load(trained(place / "tuned", options.steps // 4, place / "half"))
    half = {}
    for name, one in (("whole", m), ("half of the heads", smaller), ("trained on", again)):
        size = sum(weight.numel() for weight in one.model.parameters())
        half[name] = {
            "heads": len(all_heads(one.config)),
            "parameters": size,
            **judge(one.model, measured).to_dict(),
        }
        print(f"{name:<28}{half[name]}")
    if options.save:
        title = f"dates, encoder-decoder, {len(all_heads(m.config))} heads: quality against heads removed"
        save_picture(draw_curves(ways, title), ROOT / "docs" / "images" / "prune_curve.png")
        about = {
            "title": title,
            "device": device_name(),
            "examples": measured.rows,
            "targets": measured.targets,
        }
        save(
            "prune_curve",
            [
                {**about, "rows": rows},
                {**about, "title": "half of the heads cut out, and trained on", "rows": half},
            ],
        )


if __name__ == "__main__":
    main()
