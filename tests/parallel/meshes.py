"""Small runs of every family, on any mesh: `python -m tests.parallel.meshes` records the whole table.

`--workers 4` has four groups of processes at work at once, each of up to four processes with one thread. Rows
are written as they come, and a second start with the same `--save` goes on where the first was stopped.
Started by `torchrun` with a file of jobs, it trains each of them in one group of processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import clearhead as ch
from clearhead.learn.parallel.world import joined
from clearhead.learn.training.events import read_log
from tests.harness import split

# Adam divides by the size of a gradient: where that is zero but for rounding (the bias of keys), rounding is
# all that a smaller eps would leave.
COMMON = {
    "train.eps": 1e-4,
    **{"model.d_model": 16, "model.n_layers": 2, "model.n_heads": 4, "model.d_ff": 24, "model.dropout": 0.0},
    **{"data.batch_size": 5, "train.steps": 20, "train.validate_every": 10, "train.log_every": 1},
    **{"train.samples": 0, "train.lr": 1e-2, "train.precision": "float32", "train.device": "cpu"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "decoder": {
        **{"model.positions": "rope", "model.n_kv_heads": 1, "model.gated": True, "model.norm": "rmsnorm"},
        **{"model.attention": "window(5)", "model.max_positions": 16},
        **{"train.accumulate": 2, "train.ema": 0.9},
    },
    "encoder": {"model.max_positions": 16, "train.label_smoothing": 0.1},
    "encoder-decoder": {"model.max_positions": 16, "model.positions": "relative", "model.n_kv_heads": 2},
    "vit": {"model.patch_size": 4},
    "moe": {
        **{"model.n_experts": 4, "model.n_active_experts": 2, "model.max_positions": 16},
        **{"model.qk_norm": "head", "model.positions": "alibi", "data.batch_size": 1},
    },
}
FAMILIES["muon"] = {
    **FAMILIES["moe"],
    **{"train.optimizer": "normuon", "train.cautious_decay": True},
    **{"train.ema": 0.9, "train.schedule": "constant", "data.batch_size": 4},
    **{"model.n_experts": 5, "model.d_shared_expert": 12, "model.gated": True},
}
FAMILIES["lora"] = {"train.lora": 2, "train.lora_targets": ["q", "k", "v", "out", "up", "down"]}
# Rows of several lengths, whose angles go by the longest of a batch.
SCALING = {"kind": "longrope", "short_factor": [1.0, 1.0], "long_factor": [5.0, 9.0], "original_positions": 8}
FAMILIES["rope"] = {**FAMILIES["encoder"], "model.positions": "rope", "model.rope_scaling": SCALING}
BASE = {
    "model.qk_norm": "full",
    "model.attention": ["full", "linear"],
    "model.n_kv_heads": 2,
    "train.steps": 1,
}
NONE: Mapping[str, int] = {}
AXES = ("data", "shard", "tensor", "expert", "pipeline", "context")
PAIRS = [dict.fromkeys(pair, 2) for pair in itertools.combinations(AXES, 2)]
MESHES = [*({axis: 2} for axis in AXES), *PAIRS]
REFUSED = {"rope": "pipeline", "lora": "context"}  # by name, as experts are where there are none
FEW = 3  # runs of one launch, which are lost together
FIGURES = ("loss", "weights", "moments")


def write_data(family: str, folder: Path) -> Path:
    """Write a little data for a family, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = split("the quick brown fox jumps over lazy dogs and sings of the wide blue sea")
    lines = [" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(90)]
    if family == "vit":
        random_pixels = np.random.default_rng(0)
        for number in range(40):
            place = folder / "pictures" / ("light" if number % 2 else "dark")
            place.mkdir(parents=True, exist_ok=True)
            low = 120 * (number % 2)
            pixels = random_pixels.integers(low, low + 120, (8, 8, 3)).astype("uint8")
            Image.fromarray(pixels).save(place / f"{number}.png")
        return folder / "pictures"
    if family in ("encoder", "rope"):
        rows = [f"{line}\t{'sea' if 'sea' in line else 'land'}" for line in lines]
        return _written(folder / "labels.tsv", ["text\tlabel", *rows])
    if family == "encoder-decoder":
        rows = [f"{line}\t{' '.join(reversed(line.split()))}" for line in lines]
        return _written(folder / "pairs.tsv", ["source\ttarget", *rows])
    text = _written(folder / "text.txt", lines)
    if family == "lora":
        perform(job("decoder", text, folder / "base", settings=BASE))
    return text


def _written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def job(family: str, data: Path, out: Path, mesh: Mapping[str, int] = NONE, **more: Any) -> dict[str, Any]:
    """Describe one run."""
    sizes = {f"parallel.{axis}": size for axis, size in mesh.items()}
    settings = {**COMMON, **FAMILIES[family], **sizes, **more.pop("settings", {})}
    if family == "lora":
        settings = {key: value for key, value in settings.items() if not key.startswith("model.")}
        settings["model.base"] = str(data.parent / "base")
    return {"data": str(data), "out": str(out), "settings": settings, **more}


def perform(job: dict[str, Any]) -> None:
    """Train, or go on; `kill` names a process and the step at which it dies, in its first life."""
    torch.set_num_threads(1)
    victim, step = job.get("kill", (None, 0))
    doomed = os.environ.get("RANK") == str(victim) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    calls = itertools.count(1)

    def stop() -> bool:
        if doomed and next(calls) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    if "resume" in job:
        ch.train(resume=job["resume"], settings=job["settings"], on_event=print)
    else:
        ch.train(job["data"], out=job["out"], settings=job["settings"], on_event=print, stop=stop)


def perform_all(jobs: list[dict[str, Any]]) -> None:
    """Train in the processes that were started."""
    with joined():
        for each in jobs:
            perform(each)


def launch(processes: int, jobs: list[Any], folder: Path, module: str = "tests.parallel.meshes") -> None:
    """Perform jobs in processes that `torchrun` starts."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", dir=folder, delete=False) as file:
        json.dump(jobs, file)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    options = {"capture_output": True, "text": True, "timeout": 3000}
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "-m", module, file.name], env=one_thread, **options)
    assert done.returncode == 0, done.stdout + done.stderr


class Launch(NamedTuple):
    """Jobs of one group of processes, and what is to be said of each."""

    processes: int
    jobs: list[dict[str, Any]]
    rows: list[dict[str, Any]]


def launch_all(launches: Iterable[Launch], folder: Path, workers: int, **more: str) -> Iterator[Launch]:
    """Perform so many launches at once; yield each as it ends, one that failed with `failed` in its rows."""
    with ThreadPoolExecutor(workers) as pool:
        begun = {pool.submit(launch, one.processes, one.jobs, folder, **more): one for one in launches}
        for ended in as_completed(begun):
            one, error = begun[ended], ended.exception()
            why = {} if error is None else {"failed": str(error)[-2000:]}
            yield one._replace(rows=[{**row, **why} for row in one.rows])


def differences(a: Path, b: Path) -> tuple[float, float, float]:
    """Return the largest differences of two runs: in losses of steps, in weights, in moments."""
    losses = [
        {one["step"]: one["loss"] for one in read_log(path) if one["event"] == "stepped"} for path in (a, b)
    ]
    assert losses[0].keys() == losses[1].keys()
    found = [max(abs(losses[0][step] - losses[1][step]) for step in losses[0])]
    for name in ("model", "training"):
        ours, theirs = (tensors(path / "last", name) for path in (a, b))
        assert ours.keys() == theirs.keys()
        found.append(max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in ours))
    return found[0], found[1], found[2]


def tensors(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the files of a checkpoint, one or several, by name."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        found |= load_file(path)
    return found


def table(folder: Path, save: Path | None, workers: int) -> list[dict[str, Any]]:
    """Train every family on every mesh; return the largest differences to one process."""
    rows: list[dict[str, Any]] = json.loads(save.read_text()) if save is not None and save.exists() else []
    found = {(row["model"], row["mesh"]): row for row in rows if "failed" not in row}
    launches = []
    for family, settings in FAMILIES.items():
        data = write_data(family, folder / family)
        refused = {REFUSED.get(family, ""), *(() if "model.n_experts" in settings else ("expert",))}
        meshes = [mesh for mesh in MESHES if not refused & {*mesh}]
        left = [mesh for mesh in meshes if (family, " x ".join(mesh)) not in found]
        if left:
            perform(job(family, data, folder / f"{family}-alone"))
        for processes in (4, 2):  # the long ones first
            some = [mesh for mesh in left if math.prod(mesh.values()) == processes]
            for few in (some[start : start + FEW] for start in range(0, len(some), FEW)):
                names = [" x ".join(mesh) for mesh in few]
                outs = [folder / f"{family} {name}" for name in names]
                jobs = [job(family, data, out, mesh) for out, mesh in zip(outs, few)]
                launches.append(Launch(processes, jobs, [{"model": family, "mesh": name} for name in names]))
    for ended in launch_all(launches, folder, workers):
        for row in ended.rows:
            family, mesh = row["model"], row["mesh"]
            if "failed" not in row:
                both = differences(folder / f"{family}-alone", folder / f"{family} {mesh}")
                row |= dict(zip(FIGURES, both))
            found[family, mesh] = row
            print(json.dumps(row), flush=True)
        if save is not None:
            save.write_text(json.dumps(list(found.values()), indent=1) + "\n")
    return list(found.values())


def main() -> None:
    """Record the table; end with code 1 if a run failed or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--workers", type=int, default=1, help="groups of processes at work at once")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = table(Path(work), given.save, given.workers)
    worst = max(row.get(name, math.inf) for row in found for name in FIGURES)
    print(f"{len(found)} runs, largest difference {worst:.1e}")
    sys.exit(worst > 1e-5)


if __name__ == "__main__" and sys.argv[1:] and Path(sys.argv[1]).is_file():
    perform_all(json.loads(Path(sys.argv[1]).read_text()))
elif __name__ == "__main__":
    main()
