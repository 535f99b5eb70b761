"""Groups of processes that are forked from one that has imported everything: they start at once.

`torchrun` imports PyTorch in each process, which takes longer than most runs of the tests.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessContext

import clearhead.learn.parallel.split  # noqa: F401  imported once, for all processes

FORK = multiprocessing.get_context("fork")


def start(processes: int, log: Path, work: Callable[..., Any], *given: Any) -> list[Any]:
    """Start processes that know each other, as `torchrun` does; each prints into a file, see `printed`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    here = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    here |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    started = []
    for rank in map(str, range(processes)):
        own = {**here, "RANK": rank, "LOCAL_RANK": rank}
        started.append(FORK.Process(target=be, args=(own, log, work, *given)))
        started[-1].start()
    return started


def perform(processes: int, log: Path, work: Callable[..., Any], *given: Any) -> None:
    """Call `work` in several processes, and wait until it is done in all of them."""
    started = start(processes, log, work, *given)
    for one in started:
        one.join(timeout=280)
    codes = [one.exitcode for one in started]
    for one in started:
        one.kill()
    assert codes == [0] * processes, "\n".join(printed(log))


def torchrun(log: Path, restarts: int, work: Callable[..., Any], *given: Any) -> Any:
    """Start two processes and what watches over them; `restarts`: how often a failure starts them again."""
    launcher = FORK.Process(target=be, args=({}, log, watch, restarts, work, *given))
    launcher.start()
    return launcher


def printed(log: Path) -> tuple[str, str]:
    """Return what processes have printed, and what they have said of errors."""
    return log.read_text(), log.with_suffix(".errors").read_text()


def be(environment: dict[str, str], log: Path, work: Callable[..., Any], *given: Any) -> None:
    """Be one of several processes."""
    os.environ.update(environment)
    for number, path in ((1, log), (2, log.with_suffix(".errors"))):
        file = path.open("a", buffering=1)
        os.dup2(file.fileno(), number)
        setattr(sys, ("stdout", "stderr")[number - 1], file)
    work(*given)


def watch(restarts: int, work: Callable[..., Any], *given: Any) -> None:
    """Be `torchrun`."""
    config = LaunchConfig(
        **{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "run_id": uuid.uuid4().hex},
        **{"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": restarts},
        **{"start_method": "fork", "monitor_interval": 0.1},
    )
    # A process that waits for one that is gone is ended after 30 seconds, by default.
    ProcessContext.join = functools.partialmethod(ProcessContext.join, grace_period=1)  # type: ignore
    elastic_launch(config, work)(*given)
