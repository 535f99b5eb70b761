"""Any model on any mesh gives one process's numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.tensor import Replicate, Shard

import clearhead as ch
from clearhead.learn.parallel.shards import copies_of
from clearhead.learn.parallel.split import split_experts
from clearhead.learn.training.events import read_log
from tests.harness import once
from tests.parallel import forking, meshes

pytestmark = pytest.mark.ledger("I3")
# In the suite each family and each axis, for a few steps; `python -m tests.parallel.meshes` takes all for 20.
STEPS = 4
CASES = [
    ("decoder", {"data": 2}),
    ("encoder", {"shard": 2}),
    ("encoder-decoder", {"pipeline": 2}),
    ("vit", {"tensor": 2}),
    ("moe", {"expert": 2}),
    ("decoder", {"context": 2}),
    ("lora", {"tensor": 2}),
    ("encoder-decoder", {"context": 2}),
    ("rope", {"data": 2}),
]
# Begun on one mesh, ended on another, which a decoder on `tensor` and experts by Muon need not do alone.
SPREAD = [
    ("muon", {}, {"expert": 2}),
    ("muon", {"expert": 2}, {}),
    ("decoder", {}, {"tensor": 2}),
    ("decoder", {"shard": 2}, {}),
    ("decoder", {"pipeline": 2}, {"shard": 2}),
]
# A schedule by the number of steps would be that of the shorter run.
HALF, WHOLE = ({"train.steps": steps, "train.schedule": "constant"} for steps in (STEPS // 2, STEPS))


def sizes(mesh: dict[str, int]) -> dict[str, int]:
    """Return the settings of a mesh, every size given."""
    return {f"parallel.{axis}": mesh.get(axis, 1) for axis in meshes.AXES}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs, which the workers of a test run share."""
    return once(tmp_path_factory, "meshes", train_all)


def train_all(folder: Path) -> None:
    """Train every case in one process, and in two; those that end in one are yet to be ended."""
    data = {family: meshes.write_data(family, folder / family) for family in meshes.FAMILIES}
    jobs = []
    for family, mesh in CASES:
        given = {"settings": {"train.steps": STEPS}}
        jobs.append(meshes.job(family, data[family], folder / name_of(family, mesh), mesh, **given))
        if not (folder / f"{family}-alone").exists():
            meshes.perform(meshes.job(family, data[family], folder / f"{family}-alone", **given))
    for number, (family, begun, ended) in enumerate(SPREAD):
        out, alone = folder / f"spread-{number}", folder / f"{family}-whole"
        first = meshes.job(family, data[family], out, begun, settings=HALF)
        second = {"resume": str(out), "settings": {"train.steps": STEPS, **sizes(ended)}}
        if begun:
            jobs.append(first)
        else:
            meshes.perform(first)
        if ended:
            jobs.append(second)
        if not alone.exists():
            meshes.perform(meshes.job(family, data[family], alone, settings=WHOLE))
    forking.perform(2, folder / "log", meshes.perform_all, jobs)


def name_of(family: str, mesh: dict[str, int]) -> str:
    """Return the name of the folder of a run."""
    return f"{family}-on-{'-'.join(mesh)}"


@pytest.mark.parametrize(("family", "mesh"), CASES, ids=str)
@pytest.mark.slow
def test_a_mesh_gives_the_numbers_of_one_process(family: str, mesh: dict[str, int], runs: Path) -> None:
    alone, split = runs / f"{family}-alone", runs / name_of(family, mesh)
    assert max(meshes.differences(alone, split)) <= 1e-5  # of losses, weights and moments
    ours, theirs = (read_log(path)[-1]["metrics"] for path in (split, alone))
    assert ours.keys() == theirs.keys()
    assert abs(ours["loss"] - theirs["loss"]) <= 1e-5


@pytest.mark.parametrize("number", range(len(SPREAD)), ids=lambda number: f"{SPREAD[number]}")
@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(number: int, runs: Path) -> None:
    """Half of the steps on one mesh and half on another are all of them in one process."""
    family, _, ended = SPREAD[number]
    out = runs / f"spread-{number}"
    if not ended:
        meshes.perform({"resume": str(out), "settings": {"train.steps": STEPS, **sizes(ended)}})
    assert max(meshes.differences(runs / f"{family}-whole", out)) <= 1e-5


def test_experts_count_once_in_a_second_run_of_a_process() -> None:
    """PyTorch hands out the mesh of an earlier run that looks the same, around which there were others."""
    mesh = SimpleNamespace(mesh_dim_names=("data", "expert_held"), shape=(1, 1))
    part = SimpleNamespace(device_mesh=mesh, placements=(Replicate(), Shard(0)))
    assert [copies_of(part, 4, experts) for experts in (1, 2, 4)] == [4, 2, 1]


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (2, {}, "parallel.expert 2 shares out experts, and the model has none: use data, shard or tensor"),
        (5, {"n_experts": 4}, "parallel.expert 5 is more than the 4 experts of decoder.blocks.0"),
    ],
)
def test_too_few_experts_are_refused(size: int, changes: dict[str, int], words: str) -> None:
    model = ch.Transformer(ch.preset("micro-decoder").replace(**changes))
    with pytest.raises(ch.ConfigError, match=words):
        split_experts(model, SimpleNamespace(size=lambda: size, get_local_rank=lambda: 0))
