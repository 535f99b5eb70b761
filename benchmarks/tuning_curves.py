"""Draw the curves of instruction, preference and embedding tuning from their records.

    python benchmarks/tuning_curves.py

Reads benchmarks/results/tune_sft.json, tune_dpo.json and tune_embed.json (`sft.py`, `dpo.py`, `embed.py`) and
writes docs/images/tuning.png: what held-out data say, by step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clearhead.app.plot import BLUE, RED, name, new, save

ROOT = Path(__file__).resolve().parents[1]


def record(part: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"tune_{part}.json").read_text())["results"][0]


def points(curve: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps, and what held-out data gave there."""
    seen = [event for event in curve if event["event"] == "validated"]
    return [event["step"] for event in seen], [event["metrics"][metric] for event in seen]


def main() -> None:
    sft, dpo, sts = record("sft"), record("dpo"), record("embed")["results"]["sts"]
    figure = new(11, 3.2)
    left, middle, right = figure.subplots(1, 3)
    steps, losses = points(sft["curve"], "loss")
    left.plot([0, *steps], [sft["before"]["loss"], *losses], "o-", color=BLUE)
    name(left, "Instruction tuning, Dolly", "steps", "loss of held-out answers")
    middle.plot(*points(dpo["curve"], "accuracy"), "o-", color=BLUE, label="DPO")
    middle.axhline(dpo["longer"]["pandalm"], color=RED, linestyle="--", label="the longer answer")
    middle.axhline(0.5, color="gray", linestyle=":", label="chance")
    middle.legend(fontsize=8)
    name(middle, "Preferences, PandaLM", "steps", "share of held-out pairs")
    right.plot(*points(sts["curve"], "spearman"), "o-", color=BLUE)
    name(right, "Embeddings, STS Benchmark", "steps", "Spearman on the dev part")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    save(figure, ROOT / "docs" / "images" / "tuning.png")


if __name__ == "__main__":
    main()
