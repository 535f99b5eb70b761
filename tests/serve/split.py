"""Models that are split over processes, served: what each process of a launch does in the tests."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import torch

import clearhead as ch
from clearhead.errors import ClearheadError
from clearhead.learn.parallel.world import joined
from clearhead.run.serve.engine import ServeEngine
from clearhead.run.serve.processes import Processes
from tests.serve import mixes


def serve_mixes(folder: Path, runs: list[tuple[str, int, bool]], path: Path) -> None:
    """Serve random mixes, each of a model by name with a seed; compare with the whole model."""
    torch.set_num_threads(1)
    with joined() as world:
        processes, engines = Processes(world), []
        for name, seed, _ in runs:
            m = ch.load(folder / name, parallel={"tensor": world.size})
            engines.append(ServeEngine(m, mixes.limits(random.Random(seed)), processes=processes))
        processes.meet({})
        if not world.first:
            return processes.follow()
        found = []
        with processes.leading(lambda: None):
            for (name, seed, guessing), engine in zip(runs, engines):
                t = time.time()
                whole = ch.load(folder / name)
                mixes.mixed(whole, seed, guessing, engine=engine, most=1e-5)
                stats = engine.stats
                found.append([name, seed, stats.preempted, stats.prefix_found, stats.accepted, dict(stats.ended), stats.steps, time.time()-t])
                print(found[-1], flush=True)
        path.write_text(json.dumps(found))
