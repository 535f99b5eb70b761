"""Tuning by reward on two toy tasks, sums in a grammar and JSON by a schema, and of a real model."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, case_parser, device_name, processor_name, save

import clearhead as ch
from clearhead.learn.training.events import Validated, read_log

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


# A real model -----------------------------------------------------------------------------------------------

PEOPLE = ("Ann", "Bob", "Eve", "Tom", "Mia", "Sam")
THINGS = ("apples", "books", "pens", "coins", "shells", "cards")
SHOWN = (
    ("Kim has 4 balls and gets 3 more. How many balls does Kim have now?", 7),
    ("Jon has 9 stamps and gives away 4. How many stamps does Jon have now?", 5),
    ("Lea has 2 toys and gets 1 more. How many toys does Lea have now?", 3),
)


def word_problem(draw: random.Random) -> dict[str, object]:
    """A story of a sum or a difference, after three that are solved, and what its answer must be."""
    person, things, total = draw.choice(PEOPLE), draw.choice(THINGS), draw.randint(2, 9)
    some = draw.randint(1, total - 1)
    if draw.random() < 0.5:
        first, does, right = some, f"gets {total - some} more", total
    else:
        first, does, right = total, f"gives away {some}", total - some
    asked = f"{person} has {first} {things} and {does}. How many {things} does {person} have now?"
    messages: list[dict[str, str]] = []
    for question, number in SHOWN:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": f"Answer: {number}"})
    return {"prompt": [*messages, {"role": "user", "content": asked}], "regex": f"Answer: {right}"}


class Words:
    """What is recorded of a run on word problems: an event at a time, written every ten steps."""

    def __init__(self, results: list[dict[str, Any]], path: Path, **about: Any) -> None:
        self.results, self.path, self.start = results, path, time.perf_counter()
        self.record: dict[str, Any] = {**about, "held_out": [], "rewards": [], "logprob_difference": 0.0}
        self.record |= {"redrawn": 0}
        results.append(self.record)

    def __call__(self, event: Any) -> None:
        """Take up a step or a validation."""
        record, figures = self.record, getattr(event, "figures", None)
        if isinstance(event, Validated):
            record["held_out"].append([event.step, round(event.metrics["reward"], 4)])
            print(json.dumps({"seed": record["seed"], "held_out": record["held_out"][-1]}), flush=True)
        if figures:
            record["rewards"].append(round(figures["reward"], 4))
            for name, join in (("logprob_difference", max), ("redrawn", lambda *both: sum(both))):
                record[name] = join(record[name], figures[name])
        record["seconds"] = round(time.perf_counter() - self.start, 1)
        if figures and (event.step % 10 == 0 or event.step < 3):
            self.write()
            shown = {key: round(value, 4) for key, value in figures.items()}
            print(json.dumps({"seed": record["seed"], "step": event.step, **shown}), flush=True)

    def write(self) -> None:
        """Write all that is recorded so far."""
        save(self.path.stem, self.results, self.path)


def run_words() -> None:
    """Rewards of SmolLM2-135M-Instruct on word problems over the steps, three seeds, in float32.

        python benchmarks/run.py grpo_words --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf [--out FILE]

    All weights are trained; an answer is right where all of it is "Answer: NUMBER". The record has the mean
    reward of each step, that of held-out problems before and after, and the difference of log-probabilities.
    It is written every ten steps, so that a run that is cut off keeps what it has.
    """
    parser = case_parser(run_words, saves=False)
    parser.add_argument("--smollm2", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--held", type=int, default=128, help="problems to validate with")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--out", type=Path, default=RESULTS / "grpo_h200.json")
    options = parser.parse_args()
    draw = random.Random(0)
    rows, later = ([word_problem(draw) for _ in range(number)] for number in (1000, 300))
    held = [row for row in later if row not in rows][: options.held]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ch.load(options.smollm2).save(folder / "base")
        for seed in options.seeds:
            record = Words(
                results, options.out, task="word problems", model="SmolLM2-135M-Instruct", seed=seed,
                lr=options.lr, answers_of_a_step=8 * options.prompts,
                device=device_name() if options.device == "cuda" else processor_name(),
            )  # fmt: skip
            settings = {
                "model.base": folder / "base", "grpo.reward": ["regex"], "train.seed": seed,
                "train.device": options.device, "train.precision": "float32", "train.lr": options.lr,
                "train.steps": options.steps, "train.validate_every": options.steps, "train.samples": 0,
                "data.batch_size": options.prompts, "generate.max_new_tokens": 10,
            }  # fmt: skip
            given, out = {"train": rows, "validation": held}, folder / "run"
            ch.train(given, recipe="grpo", out=out, settings=settings, on_event=record)
            record.write()
            shutil.rmtree(out)
