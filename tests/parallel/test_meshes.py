"""Any model on any mesh gives one process's numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import clearhead as ch
from clearhead.parallel.experts import split_experts
from clearhead.training.events import read_log
from tests.parallel import meshes

pytestmark = pytest.mark.ledger("I3")
# In the suite each family and each axis; `python -m tests.parallel.meshes` takes all of them.
CASES = [
    ("decoder", {"data": 2}),
    ("encoder", {"shard": 2}),
    ("encoder-decoder", {"tensor": 2}),
    ("vit", {"tensor": 2}),
    ("moe", {"data": 2}),
    ("decoder", {"tensor": 2}),
    ("moe", {"expert": 2}),
    ("muon", {"expert": 2}),
    ("lora", {"tensor": 2}),
    ("encoder-decoder", {"pipeline": 2}),
    ("decoder", {"context": 2}),
    ("encoder-decoder", {"context": 2}),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train every case in one process, and in two."""
    folder = tmp_path_factory.mktemp("meshes")
    data = {family: meshes.write_data(family, folder / family) for family in meshes.FAMILIES}
    for family in dict.fromkeys(family for family, _ in CASES):
        meshes.perform(meshes.job(family, data[family], folder / f"{family}-alone"))
    jobs = [
        meshes.job(family, data[family], folder / f"{family}-{'-'.join(mesh)}", mesh)
        for family, mesh in CASES
    ]
    half = {"train.steps": 10}
    meshes.perform(meshes.job("muon", data["muon"], folder / "muon-spread", settings=half))
    jobs += [
        {"resume": str(folder / "muon-spread"), "settings": {"train.steps": 20, "parallel.expert": 2}},
        meshes.job("muon", data["muon"], folder / "muon-joined", {"expert": 2}, settings=half),
    ]
    stages = {"train.steps": 10, "train.schedule": "constant"}
    jobs.append(meshes.job("decoder", data["decoder"], folder / "staged", {"pipeline": 2}, settings=stages))
    shards = {"train.steps": 20, "parallel.pipeline": 1, "parallel.shard": 2}
    jobs.append({"resume": str(folder / "staged"), "settings": shards})
    meshes.launch(2, jobs, folder)
    return folder


@pytest.mark.parametrize(
    ("family", "mesh"), CASES, ids=lambda value: "-".join(value) if isinstance(value, dict) else value
)
def test_a_mesh_gives_the_numbers_of_one_process(family: str, mesh: dict[str, int], runs: Path) -> None:
    loss, weights, moments = meshes.differences(runs / f"{family}-alone", runs / f"{family}-{'-'.join(mesh)}")
    assert loss <= 1e-5
    assert weights <= 1e-5
    assert moments <= 1e-5


def test_experts_and_muon_go_on_with_another_number_of_processes(runs: Path) -> None:
    """Ten steps in one process and ten in two, and the other way round."""
    settings = {"train.steps": 20, "parallel.expert": 1}
    meshes.perform({"resume": str(runs / "muon-joined"), "settings": settings})
    for name in ("muon-spread", "muon-joined"):
        assert max(meshes.differences(runs / "muon-alone", runs / name)) <= 1e-5, name


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (2, {}, "parallel.expert 2 shares out experts, and the model has none: use data, shard or tensor"),
        (
            5,
            {"n_experts": 4},
            "parallel.expert 5 is more than the 4 experts of decoder.blocks.0.feedforward: ",
        ),
    ],
)
def test_too_few_experts_are_refused(size: int, changes: dict[str, int], words: str) -> None:
    model = ch.Transformer(ch.preset("micro-decoder").replace(**changes))
    with pytest.raises(ch.ConfigError, match=words):
        split_experts(model, SimpleNamespace(size=lambda: size, get_local_rank=lambda: 0))


@pytest.mark.parametrize(("begun", "ended"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(
    begun: int, ended: int, runs: Path, tmp_path: Path
) -> None:
    """Ten steps on one mesh and ten on another are twenty in one process."""
    data, out = runs / "decoder" / "text.txt", tmp_path / "run"
    first = meshes.job("decoder", data, out, {"shard": 2} if begun == 2 else {}, settings={"train.steps": 10})
    # A schedule by the number of steps would be that of the shorter run.
    first["settings"]["train.schedule"] = "constant"
    sizes = {"parallel.shard": 1} if ended == 1 else {"parallel.shard": 1, "parallel.tensor": 2}
    second = {"resume": str(out), "settings": {"train.steps": 20, **sizes}}
    for count, job in ((begun, first), (ended, second)):
        if count == 1:
            meshes.perform(job)
        else:
            meshes.launch(count, [job], tmp_path)
    whole = meshes.job("decoder", data, tmp_path / "whole", settings={"train.schedule": "constant"})
    meshes.perform(whole)
    assert max(meshes.differences(out, tmp_path / "whole")) <= 1e-5


def test_stages_go_on_as_shards(runs: Path, tmp_path: Path) -> None:
    """Ten steps in two stages and ten in two shards are twenty in one process."""
    data, settings = runs / "decoder" / "text.txt", {"train.schedule": "constant"}
    meshes.perform(meshes.job("decoder", data, tmp_path / "whole", settings=settings))
    assert max(meshes.differences(runs / "staged", tmp_path / "whole")) <= 1e-5
    staged, whole = (read_log(path) for path in (runs / "encoder-decoder-pipeline", tmp_path / "whole"))
    assert set(staged[-1]["metrics"]) == set(whole[-1]["metrics"]) == {"step", "loss", "perplexity"}
