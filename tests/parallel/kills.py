"""Kill random processes at random moments of short runs: each must end with the weights of one left alone.

`python -m tests.parallel.kills --runs 100 --save benchmarks/results/kills_parallel.json` takes some ten
seconds a run on an idle machine, and `--workers 6` has six runs of two processes at work at once. Runs take
turns on the meshes. Weights, moments, moving average and losses must be those of the run that was left alone
bit for bit: the mesh is the same, and the order of every sum. Each run is recorded as it ends; a second start
with the same seed and file goes on where the first was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import date
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from clearhead.app import cli
from clearhead.learn.training.events import read_log
from tests.parallel import forking, meshes
from tests.parallel.forking import FORK

MESHES = ({"shard": 2}, {"pipeline": 2}, {"data": 2}, {"tensor": 2}, {"context": 2})
SETTINGS = {"train.steps": 14, "train.validate_every": 5, "train.save_every": 3, "train.log_every": 1}
SETTINGS |= {"parallel.timeout": 120, "train.samples": 1}
RESTARTS = 3
BY_COMMAND = 10  # one run of so many is started by the command, so that imports are killed too


def begin(data: Path, out: Path, mesh: dict[str, int], forked: bool) -> BaseProcess:
    """Start a run by `torchrun`; `forked`: by what is behind the command, without the imports."""
    settings = meshes.job("decoder", data, out, mesh, settings=SETTINGS)["settings"]
    command = ["train", str(data), "--out", str(out)]
    for name, value in settings.items():
        command += ["--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    log = out.with_suffix(".log")
    if forked:
        return forking.torchrun(log, RESTARTS, cli.main, command)
    launcher = FORK.Process(target=_execute, args=(command, log))
    launcher.start()
    return launcher


def _execute(command: list[str], log: Path) -> None:
    """Become `torchrun`, its output in a file."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    os.execv(sys.executable, [*launch, f"--max-restarts={RESTARTS}", "-m", "clearhead", *command])


def import_all(data: Path, out: Path) -> None:
    """Import here what a run imports on its way, for all processes that are forked from this one."""
    names = FORK.SimpleQueue()

    def train() -> None:
        with contextlib.redirect_stdout(None):
            meshes.perform(meshes.job("decoder", data, out))
        names.put(list(sys.modules))

    FORK.Process(target=train).start()
    for name in names.get():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def ranks(launcher: int | None) -> list[int]:
    """Return the processes that `torchrun` has started, in the order of their ranks."""
    try:
        return [int(part) for part in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def kill(run: BaseProcess, rank: int, after: float, old: set[int]) -> int | None:
    """Kill a rank so many seconds after the processes are there; return its number, or None: it has ended."""
    while run.is_alive() and (len(here := ranks(run.pid)) < 2 or old & set(here)):
        time.sleep(0.01)
    time.sleep(after)
    try:
        victim = ranks(run.pid)[rank]
        os.kill(victim, signal.SIGKILL)
    except (OSError, IndexError):
        return None
    return victim


def reached(out: Path) -> str:
    """Say how far a run has come."""
    if not (out / "checkpoints").is_dir():
        return "prepares" if out.is_dir() else "starts"
    lines, saving = read_log(out), list((out / "checkpoints").glob(".*"))
    return f"step {lines[-1]['step'] if lines else 0}{', saves' if saving else ''}"


def attempt(
    data: Path, out: Path, mesh: dict[str, int], forked: bool, seconds: float, draw: random.Random
) -> dict[str, Any]:
    """Train once, with one process killed, or two one after the other; say what came of it."""
    run, old, kills = begin(data, out, mesh, forked), set[int](), []
    for _ in range(draw.choice((1, 1, 2))):
        rank, after = draw.randrange(2), draw.uniform(0, seconds)
        victim = kill(run, rank, after, old)
        if victim is not None:
            kills.append({"rank": rank, "seconds": round(after, 2), "at": reached(out)})
            old |= {victim}
    run.join(timeout=300)
    if run.is_alive():
        run.terminate()
        run.join()
    return {**mesh, "kills": kills, "exit": run.exitcode}


def equal(a: Path, b: Path) -> bool:
    """Return True if two runs have the same weights, moments and losses, bit for bit."""
    ours, theirs = ({path.name: path.read_bytes() for path in one.glob("*.safetensors")} for one in (a, b))
    return bool(ours) and ours == theirs and max(meshes.differences(a, b)) == 0.0


def whole_run(data: Path, out: Path, mesh: dict[str, int]) -> None:
    """Train a run that is left alone."""
    started, alone = time.monotonic(), begin(data, out, mesh, forked=True)
    alone.join()
    assert alone.exitcode == 0, forking.printed(out.with_suffix(".log"))
    out.with_suffix(".seconds").write_text(str(time.monotonic() - started))


def work_on(
    numbers: Iterable[int], folder: Path, given: argparse.Namespace, killed: Any, results: Any
) -> None:
    """Perform the runs with some numbers until enough were killed; then give None."""
    for number in numbers:
        if killed.value >= given.runs:
            results.put(None)
            return
        draw, mesh = random.Random(f"{given.seed} {number}"), number % len(MESHES)
        forked = number % BY_COMMAND != BY_COMMAND - 1
        out, whole = folder / f"run{number}", folder / f"{mesh}"
        seconds = float(whole.with_suffix(".seconds").read_text()) + 5 * (not forked)
        found = attempt(folder / "text.txt", out, MESHES[mesh], forked, seconds, draw)
        same = found["exit"] == 0 and equal(whole, out)
        if not same and given.keep:
            given.keep.mkdir(parents=True, exist_ok=True)
            for log in (out.with_suffix(".log"), out.with_suffix(".errors")):
                shutil.copy(log, given.keep) if log.exists() else None
        shutil.rmtree(out, ignore_errors=True)
        results.put({"run": number, **found, "same": same})


def record(path: Path, seed: int, found: list[dict[str, Any]]) -> None:
    """Write the runs of a seed beside those of others."""
    others = [one for one in read_series(path) if one.get("seed") != seed]
    killed = [one for one in found if one["kills"]]
    summary = {
        "command": f"python -m tests.parallel.kills --seed {seed}",
        "seed": seed,
        "date": date.today().isoformat(),
        "runs": len(killed),
        "kills": sum(len(one["kills"]) for one in killed),
        "same": sum(one["same"] for one in killed),
        "compared": "weights, moments, moving average and losses, bit for bit, on the same mesh",
    }
    path.write_text(json.dumps({"series": [*others, {**summary, "each": found}]}, indent=1) + "\n")


def read_series(path: Path) -> list[dict[str, Any]]:
    """Return what was recorded, by seed."""
    return json.loads(path.read_text())["series"] if path.exists() else []


def main() -> None:
    """Run as often as asked; end with code 1 if a run ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1, help="runs of two processes at work at once")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--keep", type=Path, help="folder that keeps the logs of runs that failed")
    given = parser.parse_args()
    before = read_series(given.save) if given.save else []
    found = [run for one in before if one.get("seed") == given.seed for run in one["each"]]
    done, results = {run["run"] for run in found}, FORK.SimpleQueue()
    killed = FORK.Value("i", sum(bool(run["kills"]) for run in found))
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        data = meshes.write_data("decoder", folder)
        import_all(data, folder / "first")
        wholes = [(data, folder / str(number), mesh) for number, mesh in enumerate(MESHES)]
        alone = [FORK.Process(target=whole_run, args=given_run) for given_run in wholes]
        for start in range(0, len(alone), given.workers):
            some = alone[start : start + given.workers]
            for one in some:
                one.start()
            for one in some:
                one.join()
                assert one.exitcode == 0, "a run that was left alone has failed"
        for worker in range(given.workers):
            own = (number for number in itertools.count(worker, given.workers) if number not in done)
            FORK.Process(target=work_on, args=(own, folder, given, killed, results)).start()
        ended = 0
        while ended < given.workers:
            run = results.get()
            if run is None:
                ended += 1
                continue
            found.append(run)
            killed.value += bool(run["kills"])
            print(json.dumps(run), flush=True)
            if given.save:
                record(given.save, given.seed, found)
    wrong = sum(not one["same"] for one in found)
    print(f"{len(found)} runs with {sum(len(one['kills']) for one in found)} kills, {wrong} ended otherwise")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
