"""What a mesh costs where it has one process, and how large a model may be that trains on one GPU.

    PYTHONPATH=src python benchmarks/run.py gpu_parallel [wrapped] [large] [--rounds 3] [--out FILE.json]

wrapped: `ch.train` of the 124M shape on characters, plain and split over a mesh of one process (FSDP2), which
    take turns, each in a process of its own; compiled (the model, and each of its blocks) and not.
large: a model whose weights, gradients and moments are twice what the GPU may use: plain, and with
    `train.checkpointing` and `train.offload`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.common import case_command

WARM, STEPS, EVERY = 20, 60, 10
LIMIT = 1024**3  # bytes that the GPU may use for the large model


def train(settings: list[str], report: Any, text: int = 20) -> None:
    """Train on characters, and give every event to `report`."""
    import torch

    import clearhead as ch

    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "text.txt"
        path.write_text(Path(torch.__file__).parent.joinpath("functional.py").read_text() * text)
        common = ["tokens.kind=char", "train.device=cuda", "train.samples=0", "model.dropout=0.0"]
        common += ["train.validate_every=1000", "train.save_every=1000"]
        ch.train(path, out=Path(work) / "run", settings=[*common, *settings], on_event=report)


def seconds_of_a_step(compiled: bool) -> float:
    """Return the seconds of a step of the 124M shape, after its warm-up."""
    times: dict[int, float] = {}

    def report(event: Any) -> None:
        if type(event).__name__ == "Stepped":
            times[event.step] = time.perf_counter()

    sizes = {"d_model": 768, "n_layers": 12, "n_heads": 12, "max_positions": 1024}
    settings = [f"model.{name}={value}" for name, value in sizes.items()]
    settings += [
        "data.batch_size=32",
        f"train.steps={STEPS}",
        f"train.log_every={EVERY}",
        f"train.compile={str(compiled).lower()}",
    ]
    train(settings, report)
    return (times[STEPS] - times[WARM]) / (STEPS - WARM)


def split_always() -> None:
    """Give one process a mesh too."""
    from clearhead.learn.parallel.world import World

    World.arranged = functools.partialmethod(World.arranged, always=True)  # type: ignore[assignment,method-assign]


def worker(mesh: bool, compiled: bool) -> None:
    """Time a step for each line that comes in."""
    if mesh:
        split_always()
    for _ in sys.stdin:
        print(f"seconds {seconds_of_a_step(compiled)}", flush=True)


def wrapped(rounds: int) -> list[dict[str, object]]:
    """Compare plain and split steps, in turn."""
    results: list[dict[str, object]] = []
    for compiled in (False, True):
        workers = {
            name: subprocess.Popen(
                case_command("gpu_parallel", "--worker", name, *(["--compiled"] if compiled else [])),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in ("plain", "mesh")
        }
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(rounds):
            for name, process in workers.items():
                assert process.stdin is not None and process.stdout is not None
                print("go", file=process.stdin, flush=True)
                line = next(line for line in process.stdout if line.startswith("seconds "))
                seconds[name].append(float(line.split()[1]))
        for process in workers.values():
            process.communicate()
        middle = {name: statistics.median(found) for name, found in seconds.items()}
        ratio = middle["plain"] / middle["mesh"]
        print(
            f"compiled {compiled}: plain {middle['plain']:.4f} s, mesh {middle['mesh']:.4f} s, {ratio:.3f} x",
            flush=True,
        )
        results.append(
            {"job": "wrapped", "compiled": compiled, "seconds": seconds, "mesh_over_plain": round(ratio, 4)}
        )
    return results


def large(offload: bool) -> dict[str, object]:
    """Train the large model, or say why not."""
    import torch

    import clearhead as ch

    torch.cuda.set_per_process_memory_fraction(LIMIT / torch.cuda.get_device_properties(0).total_memory)
    sizes = {"d_model": 768, "n_layers": 18, "n_heads": 12, "max_positions": 512}
    settings = [f"model.{name}={value}" for name, value in sizes.items()]
    settings += ["data.batch_size=2", "train.steps=6", "train.log_every=1", "train.compile=false"]
    if offload:
        settings += ["train.offload=true", "train.checkpointing=true"]
    found: dict[str, Any] = {"job": "large", "offload": offload, "limit": LIMIT, "losses": []}

    def report(event: Any) -> None:
        if type(event).__name__ == "Started":
            found["parameters"] = event.parameters
        if type(event).__name__ == "Stepped":
            found["losses"].append(event.loss)
            found["peak"] = event.memory
            found["tokens_per_second"] = event.tokens_per_second

    try:
        train(settings, report, text=1)
    except (ch.ClearheadError, torch.OutOfMemoryError) as error:
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", default=["wrapped", "large"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker in ("plain", "mesh"):
        return worker(options.worker == "mesh", options.compiled)
    if options.worker:
        print(json.dumps(large(options.worker == "offload")))
        return
    results: list[dict[str, object]] = []
    if "large" in options.jobs:
        for kind in ("whole", "offload"):
            command = case_command("gpu_parallel", "--worker", kind)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(results[-1], flush=True)
    if "wrapped" in options.jobs:
        results += wrapped(options.rounds)
    import torch

    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(date.today())}
    if options.out:
        options.out.write_text(
            json.dumps(
                {"command": "python benchmarks/run.py gpu_parallel", **facts, "results": results}, indent=2
            )
        )
