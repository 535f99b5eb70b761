"""The lab's ladder on a GPU: a plain GPT-2 and the same with known gains, at two sizes and a third one."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import device_name, save

from clearhead.labs.lab.experiment import interval
from clearhead.labs.lab.ladder import ARMS, BASELINE, EVERYTHING, Watch, shares_of

TEXTS, UNSEEN = ("books.txt.gz", "wiki.txt.gz"), ("unseen-books.txt.gz", "unseen-wiki.txt.gz")
CHECKS, LENGTH, ROWS = 20, 256, 64  # validations; tokens of a row; rows of a batch
SIZES: dict[str, dict[str, Any]] = {
    "12M": {"model.d_model": 384, "model.n_layers": 6, "model.n_heads": 6, "train.lr": 1e-3},
    "45M": {"model.d_model": 640, "model.n_layers": 8, "model.n_heads": 10, "train.lr": 8e-4},
    "92M": {"model.d_model": 768, "model.n_layers": 12, "model.n_heads": 12, "train.lr": 6e-4},
}
TWO = ("12M", "45M")
SEEDS = (0, 1, 2)
DOUBLE = "baseline, twice the rate"  # so that no arm wins by a better rate alone
SHARED: dict[str, Any] = {
    **{"data.task": "lm", "data.batch_size": ROWS, "tokens.kind": "bpe", "tokens.vocab_size": 8192},
    **{"model.base": "gpt2", "model.max_positions": LENGTH, "model.dropout": 0.0, "train.warmup": 50},
    **{"train.betas": (0.9, 0.95), "train.samples": 0, "train.compile": False, "train.floor": 0.02},
}
TINY: dict[str, Any] = {
    **{"model.d_model": 24, "model.n_heads": 4, "model.max_positions": 32, "data.batch_size": 4},
    **{"tokens.vocab_size": 400, "train.warmup": 2, "train.device": "cpu", "train.precision": "float32"},
}
Job = tuple[str, str, int]  # size, arm, seed


def settings_of(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a run is told."""
    size, arm, seed = job
    own: dict[str, Any] = {**SHARED, **SIZES[size]}
    own |= {"train.lr": 2 * own["train.lr"]} if arm == DOUBLE else ARMS[arm]
    if "train.window_schedule" in own:  # the lab's rows are of 64 tokens
        own["train.window_schedule"] = (LENGTH // 4, LENGTH // 2)
    every = max(1, options.steps // CHECKS)
    own |= {"train.steps": options.steps, "train.validate_every": every, "train.log_every": every}
    own |= {"train.save_every": options.steps, "train.seed": max(seed, 0), "train.device": options.device}
    own |= {"data.validation": tuple(str(options.data / name) for name in UNSEEN)}
    if options.tiny:
        own |= TINY
        own |= {"model.n_layers": 2} | ({"train.window_schedule": (8, 16)} if "windows" in arm else {})
    tokens = options.data / "tokens"  # of a tokenizer that was trained before, where there is one
    if tokens.exists():
        own |= {"tokens.model": str(tokens)}
        own = {name: value for name, value in own.items() if name not in ("tokens.kind", "tokens.vocab_size")}
    own |= {"data.cache": str(options.runs / "cache")}
    return own


def run(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm; write each validation down as it comes."""
    from clearhead.learn.training.events import Validated
    from clearhead.learn.training.run import train

    torch.set_num_threads(2)
    size, arm, seed = job
    name, start = f"{size} {arm} {seed}", time.perf_counter()
    watch = Watch(options.device)

    def listen(event: object) -> None:
        watch(event)  # type: ignore[arg-type]
        if isinstance(event, Validated):
            with open(options.out / "points.jsonl", "a") as lines:
                lines.write(
                    json.dumps({"size": size, "arm": arm, "seed": seed, "point": watch.points[-1]}) + "\n"
                )

    found: dict[str, Any] = {"size": size, "arm": arm, "seed": seed}
    try:
        own = settings_of(job, options)
        texts = [str(options.data / text) for text in TEXTS]
        with tempfile.TemporaryDirectory(dir=options.runs) as folder:
            done = train(texts, out=f"{folder}/run", settings=own, on_event=listen)
        grown = own.get("train.accumulate_schedule", (1,))
        per_step, steps = own["data.batch_size"] * own["model.max_positions"], options.steps
        counts = [grown[min(step * len(grown) // steps, len(grown) - 1)] * per_step for step in range(steps)]
        found |= {
            f"{size} loss": watch.points[-1][2],
            f"{size} over tokens": [[sum(counts[: int(step)]), loss] for step, _, loss in watch.points],
            f"{size} over time": [[seconds, loss] for _, seconds, loss in watch.points],
            "parameters": sum(weight.numel() for weight in done.model.model.parameters()),
        }
        told = f"loss {watch.points[-1][2]:.4f}, training {watch.seconds:.1f} s"
    except Exception as error:
        traceback.print_exc()
        found["failed"] = told = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    found["wall_seconds"] = round(time.perf_counter() - start, 1)
    print(f"{name}: {told}, in all {found['wall_seconds']} s", flush=True)
    return found


def tables(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return of each size and arm the loss and the shares of the baseline's tokens and time at equal loss."""
    whole = {(each["size"], each["arm"], each["seed"]): each for each in runs if "failed" not in each}
    rows: dict[str, Any] = {}
    for size, arm in dict.fromkeys(key[:2] for key in whole):
        seeds = [seed for seed in SEEDS if {(size, arm, seed), (size, BASELINE, seed)} <= whole.keys()]
        figures: dict[str, list[float]] = {"loss": [], "tokens": [], "time": []}
        for seed in seeds:
            mine, plain = whole[size, arm, seed], whole[size, BASELINE, seed]
            figures["loss"].append(mine[f"{size} loss"])
            for name, share in shares_of(mine, plain, [size]):
                figures[name.rpartition(" ")[2]].append(share)
        row = rows.setdefault(size, {}).setdefault(arm, {})
        for name, values in figures.items():
            row[name] = {"seeds": [round(value, 4) for value in values]}
            if values:
                row[name]["mean"] = round(statistics.fmean(values), 4)
            if len(values) > 1:
                row[name]["low"], row[name]["high"] = (round(end, 4) for end in interval(values))
    return rows


def keep(runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Write down all that is known."""
    body = {
        "title": "the ladder on a GPU",
        "device": "CPU, a trial" if options.tiny else device_name(),
        "torch": torch.__version__,
        "side_by_side": options.side_by_side,
        "steps": options.steps,
        "tokens_of_a_step": ROWS * LENGTH,
        "shared": SHARED,
        "sizes": SIZES,
        "arms": {arm: ARMS[arm] for arm in ARMS},
        "rows": tables(runs),
        "runs": runs,
    }
    partial = options.out / "ladder.json.part"
    partial.write_text(json.dumps(body, indent=1, default=str) + "\n")
    partial.rename(options.out / "ladder.json")
    return body


def jobs(runs: list[dict[str, Any]]) -> Iterator[Job | None]:
    """Yield the runs in their order; None: wait for one that is under way."""
    arms = [BASELINE, EVERYTHING, *(arm for arm in ARMS if arm not in (BASELINE, EVERYTHING)), DOUBLE]
    first = [(size, arm, 0) for size in TWO for arm in arms]
    yield from first
    yield from ((size, arm, seed) for seed in SEEDS[1:] for size in TWO for arm in (BASELINE, EVERYTHING))
    while len([each for each in runs if each["seed"] == 0]) < len(first):
        yield None
    rows = tables(runs)

    def share(arm: str) -> float:
        return sum(rows.get(size, {}).get(arm, {}).get("tokens", {}).get("mean", 9.0) for size in TWO)

    leading = sorted((arm for arm in arms if arm not in (BASELINE, EVERYTHING)), key=share)[:2]
    yield from ((size, arm, seed) for size in TWO for arm in leading for seed in SEEDS[1:])
    yield from (("92M", arm, 0) for arm in (BASELINE, EVERYTHING))


def main() -> None:
    """Train the arms of the lab's ladder on a GPU, several side by side, and write each run down.

        PYTHONPATH=src python benchmarks/run.py gpu_ladder --data DIR --out DIR [--seconds 490] [--save]

    DIR has the texts TEXTS and UNSEEN, and tokens/, a tokenizer. Every arm is trained at two sizes with one
    seed, then the baseline, everything and the two leading arms with two more, then a third size. What has
    not finished after --seconds is left out. The record is DIR/ladder.json; DIR/points.jsonl has each
    validation as it came.
    """
    parser = argparse.ArgumentParser(
        description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("/tmp/ladder"))
    parser.add_argument("--side-by-side", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=490)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tiny", action="store_true", help="a trial on a CPU")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    options.device = "cpu" if options.tiny else "cuda"
    for folder in (options.out, options.runs, options.runs / "cache"):
        folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    steps, options.steps = options.steps, 1
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:  # encodes the text
        pool.submit(run, ("12M", BASELINE, -1), options).result()
    options.steps = steps
    runs: list[dict[str, Any]] = []
    took: dict[str, float] = {}  # seconds of the slowest run of each size
    active: dict[Future[dict[str, Any]], Job] = {}
    todo = jobs(runs)
    pool = ProcessPoolExecutor(options.side_by_side, context)
    body: dict[str, Any] = {}
    waiting = True
    while waiting or active:
        while waiting and len(active) < options.side_by_side:
            job = next(todo, None)
            waiting = job is not None or (bool(active) and todo.gi_frame is not None)  # type: ignore[attr-defined]
            if job is None:
                break
            if time.monotonic() + took.get(job[0], 0.0) > end:
                print(f"{job}: no time left", flush=True)
                continue
            active[pool.submit(run, job, options)] = job
        if not active:
            break
        for done in wait(active, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_COMPLETED).done:
            size = active.pop(done)[0]
            runs.append(done.result())
            took[size] = max(took.get(size, 0.0), runs[-1]["wall_seconds"])
            body = keep(runs, options)
        if time.monotonic() > end:
            print(f"time is up; not finished: {sorted(active.values())}", flush=True)
            break
    for size, rows in body.get("rows", {}).items():
        for arm, row in rows.items():
            print(
                f"{size:<4} {arm:<32}", *(f"{name} {row[name].get('mean', float('nan')):.3f}" for name in row)
            )
    if options.save:
        save("ladder_h200", [body])
    os._exit(0)  # workers that are not done end with it


if __name__ == "__main__":
    main()
