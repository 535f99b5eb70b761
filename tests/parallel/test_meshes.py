"""Any model on any mesh gives one process's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

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
