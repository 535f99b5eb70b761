"""Processes that fail: one line, one way out, the weights of a run that did not."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import clearhead as ch
from clearhead.app import cli
from clearhead.errors import ConfigError
from clearhead.learn.parallel.world import joined
from clearhead.learn.training import loop, prepare
from clearhead.learn.training.events import read_log
from tests.harness import split
from tests.parallel import forking, meshes

pytestmark = pytest.mark.ledger("I3")


def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    data = meshes.write_data("decoder", tmp_path)
    wrong = ("--set", "parallel.tensor=3", "--set", "train.device=cpu")
    command = ["train", str(data), "--out", str(tmp_path / "run"), *wrong]
    forking.torchrun(tmp_path / "log", 0, cli.main, command).join(timeout=100)
    errors = forking.printed(tmp_path / "log")[1]
    lines = [line for line in errors.splitlines() if "[parallel]" in line]
    assert len(lines) == 1, errors
    assert "asks for 3 processes" in lines[0]
    assert "and 2 were started" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_command_for_one_process_is_refused_in_several(rank, monkeypatch, clearhead):
    """Each process would do all of the work, and write over the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    ran = clearhead("eval", "model", "data.txt")
    assert ran.code == 2
    line = "clearhead: eval runs in one process: start it without torchrun, which is for train, generate and"
    assert ran.err == (f"{line} serve\n" if rank == 0 else "")


@pytest.mark.slow
def test_a_killed_process_changes_nothing(tmp_path: Path) -> None:
    """`torchrun` starts all processes again, and the run goes on from its last checkpoint by itself.

    `python -m tests.parallel.kills` kills either, at random moments.
    """
    victim = 0
    data = meshes.write_data("decoder", tmp_path)
    settings = {"train.steps": 9, "train.save_every": 3}
    job = meshes.job("decoder", data, tmp_path / "killed", {"shard": 2}, settings=settings)
    run = forking.torchrun(tmp_path / "log", 1, meshes.perform_all, [{**job, "kill": [victim, 7]}])
    run.join(timeout=200)
    # The checkpoint of step 6 may not have been written yet: then that of step 3 has.
    assert re.search(r"resuming from step [36]\b", forking.printed(tmp_path / "log")[0])
    meshes.perform(meshes.job("decoder", data, tmp_path / "whole", settings=settings))
    assert max(meshes.differences(tmp_path / "killed", tmp_path / "whole")) <= 1e-5


def failing(fault: str, data: Path, mesh: dict[str, int]) -> dict[str, Any]:
    """Describe a run whose second process fails."""
    settings = {"train.steps": 3, "parallel.timeout": 3 if fault == "hang" else 30}
    name = f"{fault}-{'-'.join(mesh)}"
    return {**meshes.job("decoder", data, data.parent / name, mesh, settings=settings), "fault": fault}


@pytest.mark.slow
def test_what_fails_in_one_process_is_said_by_all(tmp_path: Path) -> None:
    """Other settings, data or code; numbers that are not finite in one part of a model; no memory."""
    data = meshes.write_data("decoder", tmp_path)
    faults = ["settings", "data", "code", "nan", "memory"]
    jobs = [failing(fault, data, {"shard": 2}) for fault in faults]
    jobs[4:4] = [failing("nan", data, {axis: 2}) for axis in ("tensor", "pipeline")]
    forking.perform(2, tmp_path / "log", endings, jobs, tmp_path)
    first, second = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1))
    assert first[:6] == second[:6]
    assert first[0].startswith("process 1 has another train.seed than process 0 (7, not None): start all")
    assert first[1].startswith("process 1 has another data than process 0 (another, not ")
    assert first[2].startswith("process 1 has another code than process 0 (another, not ")
    lost = "step 3: the weight decoder.blocks.1.feedforward.up.weight is not finite: begin again, or"
    assert all(line.startswith(lost) for line in first[3:6])
    assert second[6].startswith("step 3: process 1 of 2 has no memory left (CUDA out of memory. Tried to")
    assert first[6].startswith("process 0 waited for the gradients of step 3 in vain: process 1 came no")


def test_a_step_that_is_not_finite_in_one_process_is_skipped_by_all(tmp_path: Path) -> None:
    """The others have finite numbers; the weights are those of one process that skips the same step."""
    data, settings = meshes.write_data("decoder", tmp_path), {"train.steps": 5, "train.validate_every": 5}
    jobs = [failing("step", data, {axis: 2}) for axis in ("shard", "pipeline")]
    for job in jobs:
        job["settings"] |= settings
    forking.perform(2, tmp_path / "log", endings, jobs, tmp_path)
    first, second = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second == ["skipped 1"] * len(jobs)
    alone = meshes.job("decoder", data, tmp_path / "alone", settings=settings)
    with fault("step", alone):
        meshes.perform(alone)
    for job in jobs:
        assert max(meshes.differences(Path(job["out"]), tmp_path / "alone")) <= 1e-5


def test_a_process_that_hangs_is_named(tmp_path: Path) -> None:
    data = meshes.write_data("decoder", tmp_path)
    jobs = [failing("hang", data, {"data": 2})]
    first, second = forking.start(2, tmp_path / "log", endings, jobs, tmp_path)
    first.join(timeout=200)
    second.kill()
    assert first.exitcode == 0, forking.printed(tmp_path / "log")
    [line] = json.loads((tmp_path / "said-0.json").read_text())
    expected = "process 1 came no further than the gradients of step 3"
    assert line == f"process 0 waited for the gradients of step 3 in vain: {expected}"


def lead(command: list[str]) -> None:
    """Be `torchrun` at the head of a group of processes, as a shell starts it."""
    os.setsid()
    forking.watch(0, cli.main, command)


@pytest.mark.slow
def test_ctrl_c_saves_and_stops_all(tmp_path: Path) -> None:
    """The terminal sends it to every process, and `torchrun` sends it to its own once more."""
    data, out, log = meshes.write_data("decoder", tmp_path), tmp_path / "run", tmp_path / "log"
    sizes = "model.d_model=16 model.n_layers=1 model.max_positions=16 parallel.shard=2"
    command = ["train", str(data), "--out", str(out)]
    for setting in split("train.steps=100000 train.device=cpu train.log_every=1", sizes):
        command += ["--set", setting]
    run = forking.FORK.Process(target=forking.be, args=({}, log, lead, command))
    run.start()
    while len(read_log(out)) < 3 and run.is_alive():
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    run.join(timeout=100)
    said = forking.printed(log)[1]
    stopped = re.search(r"stopped at step (\d+), saved", said)
    assert stopped, said
    assert (out / "last").resolve().name == f"step-{stopped[1]}"
    assert said.count("stopping after this step") == 1


def test_adafactor_is_refused_where_weights_are_split(tmp_path: Path) -> None:
    data = meshes.write_data("decoder", tmp_path / "data")
    settings = {"train.optimizer": "adafactor", "train.offload": True}
    with pytest.raises(ConfigError, match="choose adamw or muon"):
        meshes.perform(meshes.job("decoder", data, tmp_path / "run", settings=settings))


@contextmanager
def fault(kind: str, job: dict[str, Any]) -> Iterator[None]:
    """Let something go wrong in this process."""
    before, agreed = loop.TrainingRun.loss, prepare.facts

    def failing(run: loop.TrainingRun, batch: Any) -> torch.Tensor:
        if run.state.step < 2:
            return before(run, batch)
        if kind == "step":
            return before(run, batch) * (torch.nan if run.state.step == 2 else 1)
        if kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 1 has more")
        if kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        up = run.model.get_parameter("decoder.blocks.1.feedforward.up.weight")
        with torch.no_grad():
            up.to_local().fill_(torch.nan)
        return before(run, batch)

    if kind in ("memory", "hang", "nan", "step"):
        with mock.patch.object(loop.TrainingRun, "loss", failing):
            yield
    elif kind in ("data", "code"):
        with mock.patch.object(prepare, "facts", lambda corpus: {**agreed(corpus), kind: "another"}):
            yield
    else:
        job["settings"] |= {"train.seed": 7} if kind == "settings" else {}
        yield


def endings(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Perform jobs that name what happens in the second process; write how each ended to `said-RANK.json`."""
    torch.set_num_threads(1)
    rank, said = int(os.environ["RANK"]), []
    with joined():
        for job in jobs:
            try:
                with fault(job["fault"] if rank == 1 else "", job):
                    done = ch.train(job["data"], out=job["out"], settings=job["settings"])
                    said.append(f"skipped {done.skipped}")
            except ch.ClearheadError as error:
                said.append(str(error))
            (folder / f"said-{rank}.json").write_text(json.dumps(said))
