"""Kill a run many times, resume it each time, and compare it with a run that was left alone.

    python -m tests.training.kills [--kills 20] [--seed 0]

Every time two processes start at once in the same folder: one is refused, the other is killed, by SIGKILL or
SIGTERM, at a random moment or within the write of a checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import clearhead as ch
from clearhead.app.commands.train import train
from clearhead.learn.training.events import read_log
from clearhead.learn.training.state import CHECKPOINTS, newest
from tests.training.test_run import TEXT, TINY, child, same, weights

REFUSED = 2
STEPS = 30  # for each kill: more than a run makes before it comes
LATEST = 0.15  # seconds after the start
WRITE = 0.005  # seconds that the write of a checkpoint takes


class Kill(NamedTuple):
    """How a run was ended, and the step of its newest checkpoint after that."""

    signal: signal.Signals
    writing: bool  # within the write of a checkpoint
    step: int | None


def command(**options: object) -> Callable[[], None]:
    """Return `clearhead train`, which ends its process with the exit code of the command."""

    def action() -> None:
        try:
            train(**options)  # type: ignore[arg-type]
        except SystemExit as stopped:
            os._exit(stopped.code if isinstance(stopped.code, int) else 1)
        except ch.CheckpointError as error:
            os._exit(REFUSED if "another run is writing" in str(error) else 1)

    return action


def ended(number: int) -> int | None:
    """Return the exit code of a process, negative for a signal; None while it runs."""
    found, status = os.waitpid(number, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def step_of(folder: Path) -> int | None:
    """Return the step of the newest checkpoint; it must open."""
    found = newest(folder)
    if found is None:
        return None
    ch.load(found)
    return int(found.name.removeprefix("step-"))


def half_written(folder: Path) -> set[str]:
    """Return the names of checkpoints that are being written, or were when a run was killed."""
    return {path.name for path in (folder / CHECKPOINTS).glob(".step-*") if path.suffix != ".old"}


def start_two(action: Callable[[], None]) -> int:
    """Start two processes at once; return the one that is not refused."""
    numbers = [child(action), child(action)]
    while True:
        for number in numbers:
            if (code := ended(number)) is not None:
                assert code == REFUSED, f"a run that should have been refused, or go on, ended with {code}"
                return numbers[1 - numbers.index(number)]
        time.sleep(0.001)


def killed(text: Path, folder: Path, settings: tuple[str, ...], kills: int, seed: int) -> list[Kill]:
    """Start or resume the run, and kill it, `kills` times."""
    moments, made = random.Random(seed), list[Kill]()
    for turn in range(kills):
        before, left = step_of(folder), half_written(folder)
        again = {"resume": folder} if before is not None else {"data": (str(text),), "out": folder}
        options = again if before is not None else {**again, "set": settings, "overwrite": folder.exists()}
        number = start_two(command(**options))
        how = (signal.SIGKILL, signal.SIGTERM)[turn % 2]
        writing, wait = turn % 4 > 1, moments.random()
        while writing and not half_written(folder) - left:
            assert ended(number) is None, "the run ended before it was killed"
        time.sleep(wait * (WRITE if writing else LATEST))
        os.kill(number, how)
        expected = -how if how is signal.SIGKILL else 128 + how
        assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == expected
        made.append(Kill(how, writing, step_of(folder)))
        assert (made[-1].step or 0) >= (before or 0), f"steps were lost: {before} to {made[-1].step}"
    return made


def survive(text: Path, folder: Path, kills: int, seed: int = 0) -> list[Kill]:
    """Make one run whole and one with kills; both must end with the same weights and the same log."""
    settings = (*TINY, f"train.steps={STEPS * kills}", "train.save_every=3", "train.validate_every=15")
    whole, part = folder / "whole", folder / "part"
    ch.train(text, out=whole, settings=settings)
    made = killed(text, part, settings, kills, seed)
    assert ch.train(resume=part).step == STEPS * kills
    for name in ("", "last", "best"):
        assert same(weights(whole / name), weights(part / name)), f"other weights in {name or part}"
    logs = []
    for folder in (whole, part):
        logs.append([(line["step"], line.get("loss"), line.get("metrics")) for line in read_log(folder)])
    lost, extra = ([line for line in one if line not in other] for one, other in (logs, logs[::-1]))
    assert logs[0] == logs[1], f"another log: without {lost}, with {extra}"
    assert [path.name for path in part.rglob(".*")] == [], "something half-written is left"
    return made


def main() -> None:
    """Kill a run, and print how and where."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text(TEXT)
        made = survive(text, Path(folder), options.kills, options.seed)
    for kill in made:
        print(f"{kill.signal.name}{' within a write' if kill.writing else ''}: newest step {kill.step}")
    counts = Counter((kill.signal.name, kill.writing) for kill in made)
    print(f"{len(made)} kills {dict(counts)}; the end is bit for bit that of a run left alone")


if __name__ == "__main__":
    main()
