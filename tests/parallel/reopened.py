"""Save on N processes, open on M: every pair of {1, 2, 3, 4} over three meshes, bit for bit.

`python -m tests.parallel.reopened --workers 4` prints the table, and `--save FILE` records it as it comes.
Each checkpoint is opened on every other mesh, weights and optimizer are put in place, and a checkpoint is
written again from there. The files of both are compared tensor by tensor. Started by `torchrun` with a file
of jobs, it performs them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clearhead.learn.parallel.world import World, joined
from clearhead.learn.training import loop
from clearhead.learn.training import run as training
from clearhead.learn.training.prepare import Job
from clearhead.learn.training.state import newest
from tests.parallel import generated, meshes

MODULE = "tests.parallel.reopened"
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
    recipe = training.changed_recipe(folder, job["settings"])
    run = training.restore(recipe, checkpoint, Job(folder, world=world))
    run.folder = Path(job["out"])
    loop.save(run)
    run.saver.finish(wait=True)
    world.meet()


def perform_all(jobs: list[dict[str, Any]]) -> None:
    """Perform jobs in the processes that were started, or in this one."""
    with joined() as world:
        for job in jobs:
            perform(job, world)


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


def table(folder: Path, save: Path | None, workers: int) -> list[dict[str, Any]]:
    """Save on every mesh, open on every mesh; return a row for each pair."""
    data = meshes.write_data("encoder", folder / "data")
    saved = {f"{count} {name}": (count, mesh) for count in MESHES for name, mesh in MESHES[count].items()}
    begin = {name: begun(folder / name, mesh, data, "encoder") for name, (_, mesh) in saved.items()}
    perform_all([begin["1 one"]])
    worlds = [meshes.Launch(size, [begin[name]], []) for name, (size, _) in saved.items() if size > 1]
    list(meshes.launch_all(worlds, folder, workers, module=MODULE))
    worlds, rows = [], []
    for to, (size, mesh) in saved.items():
        jobs = [opened(folder / source, folder / f"{source} to {to}", mesh) for source in saved]
        worlds.append(meshes.Launch(size, jobs, [{"saved on": source, "opened on": to} for source in saved]))
    perform_all(worlds[0].jobs)
    for ended in itertools.chain(worlds[:1], meshes.launch_all(worlds[1:], folder, workers, module=MODULE)):
        for row in ended.rows:
            source, to = row["saved on"], row["opened on"]
            if "failed" not in row:
                wrong = differing(folder / source, folder / f"{source} to {to}")
                row["tensors that differ"] = len(wrong)
            rows.append(row)
            print(json.dumps(row), flush=True)
        if save is not None:
            found = {"pairs": len(rows), "differing": count_wrong(rows), "rows": rows}
            save.write_text(json.dumps(found, indent=1) + "\n")
    return rows


def count_wrong(rows: list[dict[str, Any]]) -> int:
    """Count the pairs with a tensor that is not the same, or that failed."""
    return sum(row.get("tensors that differ") != 0 for row in rows)


def main() -> None:
    """Record the table; end with code 1 if a tensor is not the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--workers", type=int, default=1, help="groups of processes at work at once")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = table(Path(work), given.save, given.workers)
    print(f"{len(found)} pairs, {count_wrong(found)} with a difference")
    sys.exit(count_wrong(found) > 0)


if __name__ == "__main__" and sys.argv[1:] and Path(sys.argv[1]).is_file():
    perform_all(json.loads(Path(sys.argv[1]).read_text()))
elif __name__ == "__main__":
    main()
