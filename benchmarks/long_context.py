"""Measure two small models on long contexts, as `clearhead long` does, with scalings of rotary positions.

    python benchmarks/long_context.py [--steps 2000] [--rows 16] [--trials 20] [--model DIR] [--save]

One is a character model with rotary positions, trained here on rows of 64 tokens of a book and measured on
the tenth of it that was held out. The other is stories260K, trained on 512 tokens, measured on the book and
on stories. Book, stories and weights lie in the shared folder beside the repository. `--model` names a
character model that is trained already. `--save` writes benchmarks/results/long_context.json, and pictures:
docs/images/long_char.png, long_cost.png and long_stories.png.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clearhead as ch
from clearhead.app.plot import save as save_picture
from clearhead.app.plot.models import draw_long
from common import device_name, save

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
BOOK = SHARED / "data" / "book" / "war_and_peace.txt.gz"
STORIES = SHARED / "data" / "tinystories_sample" / "tinystories.txt"
WEIGHTS = SHARED / "weights" / "stories260K"
KINDS = ("window(128)", "linear")
COST = {"parts": ["cost"], "length": 8192, "scalings": ()}
SCALINGS = ("none", "linear", "ntk", "yarn", "llama3")


def trained(out: Path, steps: int) -> Path:
    """A character model of the book that knows 64 positions."""
    settings: dict[str, Any] = {
        "model.positions": "rope",
        "model.max_positions": 64,
        "model.d_model": 64,
        "model.n_layers": 3,
        "data.batch_size": 16,
        "train.steps": steps,
        "train.validate_every": 500,
        "train.device": "cpu",
        "train.threads": 1,
        "train.seed": 0,
    }
    return ch.train(BOOK, recipe="char-gpt-cpu", out=out, settings=settings).folder


def of_kind(m: ch.Model, attention: str) -> ch.Model:
    """A model of the same size with another kind of attention, and random weights."""
    return ch.Model(ch.Transformer(m.config.replace(attention=attention)).eval())


def rounded(value: Any) -> Any:
    """The same with five significant digits."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def shown(title: str, found: ch.LongReport) -> dict[str, object]:
    """Print the main figures; return all of them."""
    print(f"\n{title}  [{device_name()}, torch {torch.__version__}]")
    if found.perplexity is not None:
        sides = [side for side in (found.perplexity.within, found.perplexity.beyond) if side is not None]
        print("  perplexity " + ", ".join(f"{one.start}-{one.stop}: {one.perplexity:.2f}" for one in sides))
    for one in found.scalings:
        print(f"  {one.name:<12}" + "".join(f"{value:10.2f}" for value in one.perplexities))
    for grid in found.retrieval:
        print(f"  {grid.probe:<12}right {np.nanmean(grid.right):.3f}, chance {grid.chance:.3f}")
    if found.cost is not None:
        print(f"  slopes {found.cost.slopes}")
    about = {"title": title, "device": device_name(), "torch": torch.__version__}
    body = {**found.to_dict(), "text": found.text and Path(found.text).name}
    del body["notes"]
    for one in body["scalings"]:
        del one["scaling"]  # its name says it
    return {**about, **rounded(body)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.model or trained(Path(tempfile.mkdtemp()) / "char", options.steps)
    char = ch.load(folder)
    stories = ch.load(WEIGHTS / "hf", tokenizer=WEIGHTS / "tok512.bin")
    asked: dict[str, Any] = {"rows": options.rows, "trials": options.trials, "scalings": SCALINGS}
    jobs: list[tuple[str, ch.Model, Any, dict[str, Any], str | None]] = [
        ("a character model, on the book it held out", char, (), {"length": 256, "rows": 64}, "long_char"),
        ("the character model, cost", char, (), COST, "long_cost"),
        *((f"the same with attention {kind}, cost", of_kind(char, kind), (), COST, None) for kind in KINDS),
        ("stories260K, on a book", stories, BOOK, {}, "long_stories"),
        ("stories260K, on stories", stories, STORIES, {"parts": ["perplexity"]}, None),
    ]
    results = []
    for title, model, text, more, picture in jobs:
        found = ch.long(model, text, **{**asked, **more})
        results.append(shown(title, found))
        if options.save and picture is not None:
            about = f"{title}: trained length {found.trained}, rows of {found.length:,} tokens"
            save_picture(draw_long(found, about), ROOT / "docs" / "images" / f"{picture}.png")
    if options.save:
        save("long_context", results)


if __name__ == "__main__":
    main()
