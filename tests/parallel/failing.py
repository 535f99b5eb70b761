"""One of several processes that work with other things than the first, or whose step fails."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import clearhead as ch
from clearhead.learn.parallel.world import joined
from clearhead.learn.training import loop, prepare


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
