"""Ways to train that save memory take the same steps, on whatever device there is."""

from __future__ import annotations

import pytest

from tests.parallel import meshes

SIZES = {"model.d_model": 64, "model.d_ff": 128, "model.attention": "full", "model.n_kv_heads": 4}
WAYS = {
    "recomputed": {"train.checkpointing": True},
    "in main memory": {"train.offload": True},
    "both": {"train.checkpointing": True, "train.offload": True},
}


@pytest.mark.ledger("I3")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_saving_memory_changes_no_number(precision, tmp_path):
    """Of 64 wide and 16 a head: what the quickest kernels of a GPU take."""
    data = meshes.write_data("decoder", tmp_path / "data")
    # On a GPU, half precision shows the order of sums in the optimizer and in the backward pass.
    ways = {"plain": {}, **(WAYS if precision == "float32" else {"recomputed": WAYS["recomputed"]})}
    allowed = 1e-5 if precision == "float32" else 1e-3
    for name, settings in ways.items():
        common = {**SIZES, "train.device": "auto", "train.precision": precision, "train.steps": 6}
        meshes.perform(meshes.job("decoder", data, tmp_path / name, settings={**common, **settings}))
    for name in ways:
        assert max(meshes.differences(tmp_path / "plain", tmp_path / name)) <= allowed
