"""Kill random processes at random moments of short runs: each must end with the weights of one left alone.

`python -m tests.parallel.kills --runs 100 --save benchmarks/results/kills_parallel.json` takes some ten
seconds a run on an idle machine. Runs take turns on the meshes. Weights, moments, moving average and losses
must be those of the run that was left alone bit for bit: the mesh is the same, and the order of every sum.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from datetime import date
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessContext

import clearhead.parallel.split  # noqa: F401  imported once, for all processes that are forked
from clearhead import cli
from clearhead.training.events import read_log
from tests.parallel import meshes

MESHES = ({"shard": 2}, {"pipeline": 2}, {"data": 2}, {"tensor": 2})
SETTINGS = {"train.steps": 14, "train.validate_every": 5, "train.save_every": 3, "train.log_every": 1}
SETTINGS |= {"parallel.timeout": 120, "train.samples": 1}
RESTARTS = 3
BY_COMMAND = 10  # one run of so many is started by the command, so that imports are killed too
FORK = multiprocessing.get_context("fork")


def begin(data: Path, out: Path, mesh: dict[str, int], forked: bool) -> multiprocessing.process.BaseProcess:
    """Start a run by the command `torchrun`; `forked`: by what is behind it, without the imports."""
    settings = meshes.job("decoder", data, out, mesh, settings=SETTINGS)["settings"]
    command = ["train", str(data), "--out", str(out)]
    for name, value in settings.items():
        command += ["--set", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
    launcher = FORK.Process(target=_launch, args=(command, out.with_suffix(".log"), forked))
    launcher.start()
    return launcher


def _launch(command: list[str], log: Path, forked: bool) -> None:
    """Be `torchrun`, its output in a file; `forked`: its processes have imported everything already."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if not forked:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        os.execv(sys.executable, [*launch, f"--max-restarts={RESTARTS}", "-m", "clearhead", *command])
    config = LaunchConfig(
        **{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "run_id": uuid.uuid4().hex},
        **{"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": RESTARTS},
        **{"start_method": "fork", "monitor_interval": 0.1},
    )
    # A process that waits for one that is gone is ended after 30 seconds, by default.
    ProcessContext.join = functools.partialmethod(ProcessContext.join, grace_period=3)  # type: ignore
    elastic_launch(config, cli.main)(command)


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
        return [int(one) for one in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def kill(run: multiprocessing.process.BaseProcess, rank: int, after: float, old: set[int]) -> int | None:
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


def main() -> None:
    """Run as often as asked; end with code 1 if a run ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--keep", type=Path, help="folder that keeps the logs of runs that failed")
    given = parser.parse_args()
    draw, results, whole = random.Random(given.seed), [], {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        data = meshes.write_data("decoder", folder)
        import_all(data, folder / "first")
        for number, mesh in enumerate(MESHES):
            started = time.monotonic()
            alone = begin(data, folder / f"whole{number}", mesh, forked=True)
            alone.join()
            assert alone.exitcode == 0, (folder / f"whole{number}.log").read_text()
            whole[number] = time.monotonic() - started
        while sum(bool(one["kills"]) for one in results) < given.runs:
            number, out = len(results) % len(MESHES), folder / f"run{len(results)}"
            forked = len(results) % BY_COMMAND != BY_COMMAND - 1
            found = attempt(data, out, MESHES[number], forked, whole[number] + 5 * (not forked), draw)
            same = found["exit"] == 0 and equal(folder / f"whole{number}", out)
            results.append({**found, "same": same})
            print(json.dumps(results[-1]), flush=True)
            if not same and given.keep:
                given.keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(out.with_suffix(".log"), given.keep)
            shutil.rmtree(out, ignore_errors=True)
            killed = [one for one in results if one["kills"]]
            summary = {
                "command": "python -m tests.parallel." + " ".join(["kills", *sys.argv[1:]]),
                "date": date.today().isoformat(),
                "runs": len(killed),
                "kills": sum(len(one["kills"]) for one in killed),
                "same": sum(one["same"] for one in killed),
                "compared": "weights, moments, moving average and losses, bit for bit, on the same mesh",
            }
            if given.save:
                given.save.write_text(json.dumps({**summary, "each": killed}, indent=1) + "\n")
    print(f"{summary['runs']} runs with {summary['kills']} kills, {summary['same']} as if left alone")
    sys.exit(summary["same"] < summary["runs"])


if __name__ == "__main__":
    main()
