"""The folder of a run: one run at a time writes it, and what was there before is never lost."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.errors import TrainingError
from clearhead.learn.training.folder import BEFORE, LOCK, MOVING
from clearhead.learn.training.prepare import FINGERPRINT
from clearhead.learn.training.state import newest
from tests.harness import Notes
from tests.training.kills import survive
from tests.training.test_run import StopAt, child, run, same, weights

QUICK = "train.steps=2 train.validate_every=2"
FSYNC = os.fsync  # as it is before the suite spares its runs the wait


@pytest.fixture(autouse=True)
def _synced(monkeypatch):
    """A write takes its time here, so that a kill can come within it."""
    monkeypatch.setattr(os, "fsync", FSYNC)


def wait(number: int) -> int:
    """Wait for a process; return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def begin(data: Path, folder: Path, settings: str = "") -> int:
    """Start a run that does not end by itself in another process, and wait for its first checkpoint."""
    for _ in range(3):  # threads of a library that a fork leaves behind may abort it
        number = child(lambda: run(data, folder, f"train.steps=1000000 train.validate_every=50 {settings}"))
        ended = (0, 0)
        while newest(folder) is None and ended == (0, 0):
            ended = os.waitpid(number, os.WNOHANG)
            time.sleep(0.01)
        if ended != (number, signal.SIGABRT):
            break
        shutil.rmtree(folder, ignore_errors=True)
    assert ended == (0, 0)
    return number


def refused(action) -> int:
    """Return 0 if a process is refused the folder in one line, which names the run that writes to it."""

    def tried() -> None:
        with pytest.raises(ch.CheckpointError, match=r"another run is writing to .*process \d+ on .*--out"):
            action()

    return wait(child(tried))


def test_two_runs_in_one_folder(text, tmp_path):
    folder = tmp_path / "run"
    number = begin(text, folder)
    try:
        assert refused(lambda: run(text, folder)) == 0
        assert refused(lambda: run(text, folder, overwrite=True)) == 0
        assert refused(lambda: ch.train(resume=folder)) == 0
        assert os.waitpid(number, os.WNOHANG) == (0, 0) and newest(folder) is not None
    finally:
        os.kill(number, signal.SIGKILL)
        wait(number)
    assert (folder / LOCK).exists()  # its owner died, so it locks nothing
    assert ch.train(resume=folder, stop=StopAt(1)).reason == "stopped"
    assert run(text, folder, QUICK, overwrite=True).step == 2
    assert not (folder / LOCK).exists()


def test_of_two_runs_that_start_together_one_is_made(text, tmp_path):
    """The other neither removes the folder, nor what the first has written, whenever it ends."""
    for attempt in range(2):
        folder = tmp_path / f"run{attempt}"
        started = [child(lambda f=folder: run(text, f, QUICK)) for _ in range(3)]
        codes = sorted(map(wait, started))
        assert codes == [0, 1, 1]
        assert ch.load(folder).config.d_model == 16 and newest(folder).name == "step-2"


@pytest.mark.slow
def test_a_run_survives_kills_and_a_second_run(text, tmp_path):
    """`python -m tests.training.kills` does the same with twenty kills."""
    steps = [kill.step for kill in survive(text, tmp_path, kills=3)]
    assert steps[-1] and steps == sorted(steps, key=lambda step: step or 0)


def test_the_first_stage_is_locked_with_its_run(text, tmp_path):
    rows = tmp_path / "rows.tsv"
    rows.write_text("".join(f"{line} {i}\t{'yn'[i % 2]}\n" for i, line in enumerate(["a b c"] * 30)))
    number = begin(rows, tmp_path / "run", "data.header=false train.pretrain=2")
    try:
        assert refused(lambda: ch.train(resume=tmp_path / "run" / "pretrain")) == 0
    finally:
        os.kill(number, signal.SIGKILL)
        wait(number)


def test_a_run_killed_while_it_overwrites_another_loses_neither(text, tmp_path):
    """Kill it at a rename; what is found then is the earlier run whole, or the new one."""
    folder, replace = tmp_path / "run", os.replace
    run(text, folder, QUICK)
    earlier, survived = weights(folder), 0
    for moment in (1, 12, 13, 14, 17, 24, 29):

        def overwrite(left: int = moment) -> None:
            def rename(*names, **more):
                nonlocal left
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                replace(*names, **more)

            os.replace = rename
            run(text, folder, f"{QUICK} train.seed=1", overwrite=True)

        assert wait(child(overwrite)) == -signal.SIGKILL
        assert ch.train(resume=folder).step == 2
        assert not any((folder / name).exists() for name in (LOCK, BEFORE, MOVING))
        if ch.read_recipe(folder / "train.toml").train.seed == 0:
            assert same(weights(folder), earlier)
            survived += 1
        else:
            run(text, folder, QUICK, overwrite=True)
    assert 4 <= survived < 7


def test_a_run_whose_data_was_split_otherwise_is_not_resumed(tmp_path):
    """A fingerprint of an earlier way of reading data is told from one of other data."""
    (tmp_path / "a.txt").write_text("some text to learn from, line by line\n" * 20)
    notes = Notes()
    run(tmp_path / "a.txt", tmp_path / "run", QUICK, on_event=notes)
    assert any("for GGUF, set tokens.kind=byte or bpe" in note for note in notes)
    fingerprint = tmp_path / "run" / FINGERPRINT
    version, _, content = fingerprint.read_text().partition(":")
    assert version.isdigit()
    for written, says in (
        (content, r"begun by a version of clearhead that read and split its data in another way"),
        (f"{version}:0{content}", r"the data of .* has changed since the run began"),
    ):
        fingerprint.write_text(written)
        with pytest.raises(TrainingError, match=says):
            ch.train(resume=tmp_path / "run", settings={"train.steps": 3})
