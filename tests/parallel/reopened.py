"""Save on N processes, open on M: every pair of {1, 2, 3, 4} over three meshes, bit for bit.

`python -m tests.parallel.reopened` prints the table, and with `--save` records it. Each checkpoint is opened
on every other mesh, weights and optimizer are put in place, and a checkpoint is written again from there. The
files of both are compared tensor by tensor. Started by `torchrun` with a file of jobs, it performs them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clearhead.parallel.world import World, joined
from clearhead.training import loop, resume
from clearhead.training.state import newest
from tests.parallel import generated, meshes

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "reopened.json"
# Twelve heads and widths that no size divides: 53 positions, and the vocabulary.
SETTINGS = {
    **{"model.d_model": 24, "model.n_heads": 12, "model.d_ff": 36, "model.max_positions": 53},
    **{"train.steps": 3, "train.validate_every": 3, "train.ema": 0.9},
}
MESHES: dict[int, dict[str, Mapping[str, int]]] = {
    1: {"one": {}},
    2: {"shard": {"shard": 2}, "tensor": {"tensor": 2}, "data": {"data": 2}},
    3: {"shard": {"shard": 3}, "tensor": {"tensor": 3}, "data": {"data": 3}},
    4: {
        "shard": {"shard": 4},
        "shard x tensor": {"shard": 2, "tensor": 2},
        "data x shard": {"data": 2, "shard": 2},
    },
}


def sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the settings of a mesh, every size given."""
    return {f"parallel.{axis}": mesh.get(axis, 1) for axis in ("data", "shard", "tensor")}


def perform(job: dict[str, Any], world: World) -> None:
    """Train a little, open a checkpoint and write it again, or let split models write."""
    torch.set_num_threads(1)
    if "models" in job:
        generated.record(job["models"], Path(job["out"]))
        return
    if "from" not in job:
        meshes.perform(job)
        return
    folder = Path(job["from"])
    checkpoint = newest(folder)
    assert checkpoint is not None
    recipe = resume.changed_recipe(folder, job["settings"])
    run = resume.restore(recipe, folder, checkpoint, lambda event: None, world)
    run.folder = Path(job["out"])
    loop.save(run)
    run.saver.finish(wait=True)
    world.meet()


def launched(processes: int, jobs: list[dict[str, Any]], folder: Path) -> None:
    """Perform jobs in this process, or in several."""
    if processes == 1:
        with joined() as world:
            for job in jobs:
                perform(job, world)
    else:
        meshes.launch(processes, jobs, folder, module="tests.parallel.reopened")


def differing(a: Path, b: Path) -> list[str]:
    """Return the names of tensors that are not the same bits in the last checkpoints of two folders."""
    wrong = []
    for stem in ("model", "training"):
        ours, theirs = (meshes.tensors(path / "last", stem) for path in (a, b))
        assert ours.keys() == theirs.keys() and ours
        wrong += [name for name in ours if not torch.equal(ours[name], theirs[name])]
    return wrong


def begun(out: Path, mesh: Mapping[str, int], data: Path, family: str, **settings: Any) -> dict[str, Any]:
    """Describe a short run on a mesh."""
    return meshes.job(family, data, out, settings={**SETTINGS, **settings, **sizes(mesh)})


def opened(source: Path, out: Path, mesh: Mapping[str, int]) -> dict[str, Any]:
    """Describe the opening of a checkpoint on a mesh."""
    return {"from": str(source), "out": str(out), "settings": sizes(mesh)}


def table(folder: Path) -> list[dict[str, Any]]:
    """Save on every mesh, open on every mesh; return a row for each pair."""
    data = meshes.write_data("encoder", folder / "data")
    saved = {f"{count} {name}": (count, mesh) for count in MESHES for name, mesh in MESHES[count].items()}
    for count in MESHES:
        jobs = [
            begun(folder / name, mesh, data, "encoder")
            for name, (size, mesh) in saved.items()
            if size == count
        ]
        launched(count, jobs, folder)
    rows = []
    for count in MESHES:
        pairs = [(source, to) for source in saved for to, (size, _) in saved.items() if size == count]
        launched(
            count,
            [opened(folder / source, folder / f"{source} to {to}", saved[to][1]) for source, to in pairs],
            folder,
        )
        for source, to in pairs:
            wrong = differing(folder / source, folder / f"{source} to {to}")
            rows.append({"saved on": source, "opened on": to, "tensors that differ": len(wrong)})
        print(f"opened on {count}: {len(pairs)} pairs", flush=True)
    return rows


if __name__ == "__main__" and sys.argv[1:] in ([], ["--save"]):
    with tempfile.TemporaryDirectory() as work:
        found = table(Path(work))
    differ = sum(row["tensors that differ"] > 0 for row in found)
    print(f"{len(found)} pairs, {differ} with a difference")
    if sys.argv[1:]:
        RESULT.write_text(
            json.dumps({"pairs": len(found), "differing": differ, "rows": found}, indent=1) + "\n"
        )
elif __name__ == "__main__":
    with joined() as everyone:
        for each in json.loads(Path(sys.argv[1]).read_text()):
            perform(each, everyone)
