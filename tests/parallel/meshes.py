"""Small runs of every family, on any mesh: `python -m tests.parallel.meshes` records the whole table.

Started by `torchrun` with a file of jobs, it trains each of them in one group of processes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import clearhead as ch
from clearhead.parallel.world import joined
from clearhead.training.events import read_log

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
        **{
            "model.attention": "window(5)",
            "train.accumulate": 2,
            "train.ema": 0.9,
            "model.max_positions": 16,
        },
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
    **{"train.optimizer": "muon", "train.ema": 0.9, "train.schedule": "constant", "data.batch_size": 4},
    **{"model.n_experts": 5, "model.d_shared_expert": 12, "model.gated": True},
}
FAMILIES["lora"] = {"train.lora": 2, "train.lora_targets": ["q", "k", "v", "out", "up", "down"]}
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


def write_data(family: str, folder: Path) -> Path:
    """Write a little data for a family, the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dogs",
        "and",
        "sings",
        "of",
        "the",
        "wide",
        "blue",
        "sea",
    ]
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
    if family == "encoder":
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
    on_event: Any = print
    victim, step = job.get("kill", (None, 0))
    if os.environ.get("RANK") == str(victim) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        calls = itertools.count(1)

        def stop() -> bool:
            if next(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        ch.train(job["data"], out=job["out"], settings=job["settings"], on_event=on_event, stop=stop)
        return
    if "resume" in job:
        ch.train(resume=job["resume"], settings=job["settings"], on_event=on_event)
    else:
        ch.train(job["data"], out=job["out"], settings=job["settings"], on_event=on_event)


def launch(
    processes: int,
    jobs: list[dict[str, Any]],
    folder: Path,
    *options: str,
    module: str = "tests.parallel.meshes",
) -> str:
    """Perform jobs in several processes; return what they printed."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, *options, "-m", module, str(path)],
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def differences(a: Path, b: Path) -> tuple[float, float, float]:
    """Return the largest differences of two runs: in losses of steps, in weights, in moments."""
    losses = [
        {event["step"]: event["loss"] for event in read_log(path) if "norm" in event} for path in (a, b)
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


def table(folder: Path) -> list[dict[str, Any]]:
    """Train every family on every mesh; return the largest differences to one process."""
    rows = []
    for family in FAMILIES:
        data, alone = write_data(family, folder / family), folder / f"{family}-alone"
        perform(job(family, data, alone))
        for mesh in (
            mesh for mesh in MESHES if "expert" not in mesh or "model.n_experts" in FAMILIES[family]
        ):
            out = folder / f"{family}-{'-'.join(mesh)}"
            launch(math.prod(mesh.values()), [job(family, data, out, mesh)], folder)
            loss, weights, moments = differences(alone, out)
            rows.append({"model": family, **mesh, "loss": loss, "weights": weights, "moments": moments})
            print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__" and len(sys.argv) == 1:
    with tempfile.TemporaryDirectory() as work:
        found = table(Path(work))
    worst = max(max(row[name] for name in ("loss", "weights", "moments")) for row in found)
    print(f"{len(found)} runs, largest difference {worst:.1e}")
elif __name__ == "__main__":
    with joined():
        for each in json.loads(Path(sys.argv[1]).read_text()):
            perform(each)
