"""Tuning by reward on two toy tasks: sums in a grammar, and JSON by a schema."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import RESULTS, processor_name, save

import clearhead as ch
from clearhead.learn.training.events import read_log

SMALL = {
    "model.d_model": 64, "model.n_layers": 2, "model.n_heads": 4, "model.max_positions": 96,
    "model.dropout": 0.0, "tokens.kind": "char", "train.device": "cpu", "train.lr": 3e-3,
    "train.epochs": None, "data.batch_size": 32, "train.samples": 0, "train.threads": 1,
}  # fmt: skip
TUNED = {
    "train.device": "cpu", "train.threads": 1, "train.lr": 6e-4, "train.samples": 0, "data.batch_size": 16,
}  # fmt: skip
NAMES = ("ann", "bob", "eve", "tom")


def summed(draw: random.Random) -> dict[str, object]:
    """A sum of the grammar `digit + digit`, its completion and the right answer."""
    one, two = draw.randint(0, 9), draw.randint(0, 9)
    return {"prompt": f"{one}+{two}", "completion": f"{one + two}", "answer": f"{one + two}"}


def described(draw: random.Random) -> dict[str, object]:
    """A name and an age, the JSON of them, and the schema that only this JSON fits."""
    name, age = draw.choice(NAMES), draw.randint(1, 9)
    exact = {"name": {"const": name}, "age": {"const": age}}
    schema = {
        "type": "object",
        "required": ["name", "age"],
        "properties": exact,
        "additionalProperties": False,
    }
    return {"prompt": f"{name} {age}", "completion": json.dumps({"name": name, "age": age}), "schema": schema}


# Of each task: its rows, reward, steps of the base and of tuning, and the most tokens of an answer.
TASKS = {"arithmetic": (summed, "exact", 120, 150, 6), "json": (described, "json_schema", 240, 40, 28)}


def run_grpo() -> None:
    """Rewards of two toy tasks over the steps, three seeds; `arithmetic` or `json` measures one of them.

    The base has learned a few examples. The record has the mean reward of each step, that of the held-out
    prompts before and after, and the largest difference between log-probabilities of sampling and training.
    """
    path = RESULTS / "cpu_grpo.json"
    results = json.loads(path.read_text())["results"] if path.exists() else []
    for task in sys.argv[1:] or TASKS:
        make, reward, steps, tuning, most = TASKS[task]
        draw = random.Random(0)
        rows = [make(draw) for _ in range(400)]
        held = [make(draw) for _ in range(64)]
        results = [row for row in results if row["task"] != task]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            asked = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
            ch.train(asked, recipe="sft", out=folder / "base", settings={**SMALL, "train.steps": steps})
            for seed in range(3):
                start, out = time.perf_counter(), folder / f"seed-{seed}"
                settings = {
                    **TUNED, "model.base": folder / "base", "grpo.reward": [reward], "train.seed": seed,
                    "train.steps": tuning, "train.validate_every": tuning, "generate.max_new_tokens": most,
                }  # fmt: skip
                prompts = [
                    [{key: value for key, value in row.items() if key != "completion"} for row in some]
                    for some in (rows, held)
                ]
                given = dict(zip(("train", "validation"), prompts))
                ch.train(given, recipe="grpo", out=out, settings=settings)
                log = read_log(out)
                stepped = [line["figures"] for line in log if line["event"] == "stepped"]
                validated = [line["metrics"]["reward"] for line in log if line["event"] == "validated"]
                results.append(
                    {
                        "task": task, "seed": seed, "rewards": [round(row["reward"], 4) for row in stepped],
                        "before": round(validated[0], 4), "after": round(validated[-1], 4),
                        "logprob_difference": max(row["logprob_difference"] for row in stepped),
                        "redrawn": sum(row["redrawn"] for row in stepped),
                        "seconds": round(time.perf_counter() - start, 1), "device": processor_name(),
                    }
                )  # fmt: skip
                print(
                    json.dumps({key: results[-1][key] for key in results[-1] if key != "rewards"}), flush=True
                )
                save("cpu_grpo", results)
