"""Preference tuning (DPO), before and after, on held-out pairs, beside "choose the longer answer".

    python benchmarks/dpo.py --data ../shared/data --weights smollm2/ --device cuda --out dpo.json

`--data` holds `preferences/pandalm_pairs.jsonl.gz` and `preferences/llmbar.jsonl.gz`; a fifth of PandaLM's
instructions is held out, as is all of LLMBar, which is never trained on. `--weights` is the directory of a
chat model. Rates: how often the chosen answer is the likelier one, as a whole, per token, and by the ratio
to the model before training, which is what DPO learns. `--tiny` takes few rows and steps, for a CPU.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import tempfile
from pathlib import Path

import clearhead as ch
from clearhead.learn.training.events import read_log

TINY = ("train.steps=2", "data.max_length=128", "data.batch_size=2", "train.samples=0")


def read(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    return [
        {"prompt": "\n\n".join(filter(None, (row["instruction"], row.get("input")))),
         "chosen": row["chosen"], "rejected": row["rejected"]}
        for row in rows
        if row["chosen"].strip() and row["rejected"].strip() and row["chosen"] != row["rejected"]
    ]  # fmt: skip


def held(row: dict[str, str]) -> bool:
    return hashlib.sha256(row["prompt"].encode()).digest()[0] % 5 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    pandalm, llmbar = (
        read(given.data / "preferences" / f"{name}.jsonl.gz") for name in ("pandalm_pairs", "llmbar")
    )
    if given.tiny:
        pandalm, llmbar = pandalm[:40], llmbar[:4]
    sides = {
        "train": [row for row in pandalm if not held(row)],
        "pandalm": [row for row in pandalm if held(row)],
        "llmbar": llmbar,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side, rows in sides.items():
            (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        longer = {
            side: sum(len(row["chosen"]) > len(row["rejected"]) for row in sides[side]) / len(sides[side])
            for side in ("pandalm", "llmbar")
        }
        settings = [
            f"model.base={given.weights}", f"train.device={given.device}", f"train.seed={given.seed}",
            f"data.validation={folder / 'pandalm.jsonl'}", "train.metric=accuracy", *given.set,
            *(TINY if given.tiny else ()),
        ]  # fmt: skip
        before = rates(ch.load(given.weights, dtype="float32", device=given.device), folder, given.tiny)
        print("before", before, "longer", longer, flush=True)
        done = ch.train(
            folder / "train.jsonl", recipe="dpo", out=folder / "run", settings=settings, on_event=print
        )
        after = rates(ch.load(folder / "run", device=given.device), folder, given.tiny)
        print("after", after, done.metrics, flush=True)
        body = {
            "rows": {side: len(rows) for side, rows in sides.items()}, "seed": given.seed, "longer": longer,
            "before": before, "after": after, "held_out": done.metrics, "curve": read_log(folder / "run"),
        }  # fmt: skip
        given.out.write_text(json.dumps(body, indent=2) + "\n")


def rates(model: ch.Model, folder: Path, tiny: bool) -> dict[str, dict[str, float]]:
    plan = ch.read_recipe(None, ["data.task=prefer", f"data.max_length={128 if tiny else 512}"]).data
    judged = {
        side: ch.evaluate(model, folder / f"{side}.jsonl", plan, batch_size=2 if tiny else 16)
        for side in ("pandalm", "llmbar")
    }
    names = ("accuracy", "accuracy_per_token")
    return {side: {name: one.metrics[name] for name in names} for side, one in judged.items()}


if __name__ == "__main__":
    main()
