"""One of several processes that work with other things than the first, or whose step fails.

Started with `RANK`, `WORLD_SIZE` and a file of jobs, it writes to `said-RANK.json` how each of them ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import clearhead as ch
from clearhead.parallel.world import joined
from clearhead.training import loop, prepare


@contextmanager
def fault(kind: str, job: dict[str, Any]) -> Iterator[None]:
    """Let something go wrong in this process."""
    before, agreed = loop.TrainingRun.loss, prepare.facts

    def failing(run: loop.TrainingRun, batch: Any) -> torch.Tensor:
        if run.state.step < 2:
            return before(run, batch)
        if kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 1 has more")
        if kind == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        up = run.model.get_parameter("decoder.blocks.1.feedforward.up.weight")
        with torch.no_grad():
            up.to_local().fill_(torch.nan)
        return before(run, batch)

    if kind in ("memory", "hang", "nan"):
        with mock.patch.object(loop.TrainingRun, "loss", failing):
            yield
    elif kind in ("data", "code"):
        with mock.patch.object(prepare, "facts", lambda corpus: {**agreed(corpus), kind: "another"}):
            yield
    else:
        job["settings"] |= {"train.seed": 7} if kind == "settings" else {}
        yield


def main(path: Path) -> None:
    """Perform the jobs; each says what happens in the second process."""
    torch.set_num_threads(1)
    rank, said = int(os.environ["RANK"]), []
    with joined():
        for job in json.loads(path.read_text()):
            try:
                with fault(job["fault"] if rank == 1 else "", job):
                    ch.train(job["data"], out=job["out"], settings=job["settings"])
            except ch.ClearheadError as error:
                said.append(str(error))
            (path.parent / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
