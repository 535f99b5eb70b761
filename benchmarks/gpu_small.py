"""Time the steps of small models on a GPU: one by one, recorded as CUDA graphs, compiled.

    PYTHONPATH=src python benchmarks/gpu_small.py [JOB ...] [--data ../shared/data] [--out FILE.json]

The jobs are those of benchmarks/recipes.py, with their data: `multi30k` (3.1M parameters, batches of many
lengths) and `char-gpt` (10.8M, batches of one shape). Each way trains from the same weights by the loop that
`clearhead train` runs. The first steps of each way are compared: they have the same batches and, because
dropout follows from the number of the step, the same dropout. Where batches are padded to the sizes that are
recorded, dropout draws other numbers: there a recorded step is compared to one that is only padded.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch

from clearhead.learn.training.captured import capture_steps
from clearhead.learn.training.events import Event, Note, Stepped
from clearhead.learn.training.loop import PlainStep, TrainingRun, learn
from clearhead.learn.training.optim import make_optimizer
from clearhead.learn.training.prepare import _compile, prepare
from clearhead.learn.training.run import planned
from clearhead.learn.training.state import State
from recipes import JOBS, there

COMPARED = 50  # steps whose losses are compared
FIRST = {"multi30k": 250, "char-gpt": 50}  # the step from which on time counts: every size has come by then
TIMED = {"plain": 60, "padded": 1, "recorded": 400, "compiled": 200, "compiled and recorded": 200}
WAYS = {"multi30k": ["plain", "padded", "recorded"], "char-gpt": [way for way in TIMED if way != "padded"]}


class Enough(Exception):
    """All steps are timed."""


@dataclass
class Watch:
    """What is seen of a run until its last step."""

    last: int
    losses: list[float] = field(default_factory=list)
    times: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.line)
        if isinstance(event, Stepped):
            self.losses.append(event.loss)
            self.times[event.step] = time.perf_counter()
            if event.step >= self.last:
                raise Enough


def opened(name: str, data: str, folder: str) -> TrainingRun:
    """The run of a recipe, ready for its first step."""
    job, places = JOBS[name], {"data": str(Path(data).absolute())}
    settings: dict[str, object] = {"train.compile": False}
    if job.validation:
        settings["data.validation"] = [there(path, places) for path in job.validation]
    paths = [there(path, places) for path in job.train]
    recipe, _, _ = planned(paths, job.recipe, folder, settings)
    return prepare(recipe, Path(folder), lambda event: None)


def timed(run: TrainingRun, weights: dict[str, torch.Tensor], name: str, way: str, profile: bool) -> dict:
    """Train from the same weights in one way: seconds of a step, of what comes before, and first losses."""
    run.model.load_state_dict(weights)
    first = COMPARED if way in ("plain", "padded") else FIRST[name]
    last = first + TIMED[way]
    plan = replace(run.plan, validate_every=10**9, save_every=10**9, log_every=1)
    plain = {"fit": lambda batch: batch, "stepping": PlainStep, "compiled": None}
    run = replace(
        run,
        plan=plan,
        state=State(),
        optimizer=make_optimizer(run.model, plan, run.precision.device),
        **plain,
    )
    watch, start = Watch(last), time.perf_counter()
    if "compiled" in way:
        _compile(run, watch)
    if "recorded" in way or way == "padded":
        capture_steps(run)
    if way == "padded":
        run.stepping = PlainStep
    profiler = cProfile.Profile()
    with suppress(Enough):
        (profiler.runcall if profile else lambda call, *given: call(*given))(learn, run, watch, lambda: False)
    torch.cuda.synchronize()
    if profile:
        pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(18)
    per_step = (watch.times[last] - watch.times[first]) / TIMED[way]
    return {
        "ms_per_step": round(per_step * 1e3, 2),
        "steps_per_second": round(1 / per_step, 1),
        "seconds_before": round(watch.times[first] - start - first * per_step, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "notes": watch.notes,
        "losses": watch.losses[:COMPARED],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--data", default=str(Path(__file__).parents[2] / "shared" / "data"))
    parser.add_argument("--ways", nargs="*", default=list(TIMED), choices=list(TIMED))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true", help="of the host, for recorded steps")
    options = parser.parse_args()
    rows: dict[str, dict] = {}
    for name in options.jobs:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            run = opened(name, options.data, folder)
            print(f"{name}: made ready in {time.perf_counter() - start:.1f} s", flush=True)
            weights = {key: one.clone() for key, one in run.model.state_dict().items()}
            found: dict[str, dict] = {}
            compared: list[float] = []
            for way in (way for way in WAYS[name] if way in options.ways):
                torch.cuda.reset_peak_memory_stats()
                try:
                    found[way] = timed(run, weights, name, way, options.profile and way == "recorded")
                except Exception as error:
                    print(f"{name}, {way}: failed: {error!r}", flush=True)
                    continue
                losses = found[way].pop("losses")
                compared = losses if way == "padded" else compared or losses
                found[way]["largest_difference"] = max(abs(a - b) for a, b in zip(compared, losses))
                print(f"{name}, {way}:", json.dumps(found[way]), flush=True)
                print("   ", [round(loss, 4) for loss in losses[:: COMPARED // 5]], flush=True)
            rows[name] = found
    if options.out:
        body = {
            "command": f"PYTHONPATH=src python benchmarks/gpu_small.py {' '.join(options.jobs)} --data DATA",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "date": date.today().isoformat(),
            "rows": rows,
        }
        options.out.write_text(json.dumps(body, indent=2) + "\n")


if __name__ == "__main__":
    main()
