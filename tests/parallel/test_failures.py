"""Processes that fail: one line, one way out, the weights of a run that did not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel import meshes

pytestmark = pytest.mark.ledger("I3")


def torchrun(*command: str, processes: int = 2, **environment: str) -> subprocess.CompletedProcess[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*launch, *command], capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )


def test_a_mistake_is_said_once(tmp_path: Path) -> None:
    data = meshes.write_data("decoder", tmp_path)
    wrong = ("--set", "parallel.tensor=3", "--set", "train.device=cpu")
    done = torchrun("-m", "clearhead", "train", str(data), "--out", str(tmp_path / "run"), *wrong)
    lines = [line for line in done.stderr.splitlines() if "[parallel]" in line]
    assert len(lines) == 1, done.stderr
    assert "asks for 3 processes" in lines[0]
    assert "and 2 were started" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_changes_nothing(victim: int, tmp_path: Path) -> None:
    """`torchrun` starts all processes again, and the run goes on from its last checkpoint by itself."""
    data = meshes.write_data("decoder", tmp_path)
    settings = {"train.save_every": 5}
    job = meshes.job("decoder", data, tmp_path / "killed", {"shard": 2}, settings=settings)
    printed = meshes.launch(2, [{**job, "kill": [victim, 13]}], tmp_path, "--max-restarts=1")
    assert "resuming from step 10" in printed
    meshes.perform(meshes.job("decoder", data, tmp_path / "whole", settings=settings))
    assert max(meshes.differences(tmp_path / "killed", tmp_path / "whole")) <= 1e-5
