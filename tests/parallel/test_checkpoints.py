"""Checkpoints that several processes write, and models split over them, are those of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import clearhead as ch
from tests.parallel import generated, reopened
from tests.parallel.test_failures import torchrun

pytestmark = pytest.mark.ledger("I3")
# As GPT-2, whose file holds queries, keys and values as one transposed tensor.
GPT2 = {
    **{"model.positions": "learned", "model.n_kv_heads": 12, "model.gated": False, "model.attention": "full"},
    **{"model.norm": "layernorm", "data.max_length": 16},
}


def test_saved_on_two_processes_and_opened_on_others(tmp_path: Path) -> None:
    """Weights, averages and moments come back bit for bit on other meshes; transformers opens them."""
    data = reopened.meshes.write_data("decoder", tmp_path)
    first, second, third = (tmp_path / name for name in ("shard", "tensor", "one"))
    jobs = [
        reopened.begun(first, {"shard": 2}, data, "decoder", **GPT2),
        reopened.opened(first, second, {"tensor": 2}),
    ]
    reopened.launched(2, jobs, tmp_path)
    reopened.launched(1, [reopened.opened(first, third, {})], tmp_path)
    for folder in (first, second):
        names = {path.name for path in (folder / "last").iterdir()}
        assert {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} <= names
        assert {"training-00002-of-00002.safetensors", "training.safetensors.index.json"} <= names
    assert reopened.differing(first, second) == reopened.differing(first, third) == []
    from transformers import AutoModelForCausalLM

    ids = torch.arange(7)[None]
    theirs = AutoModelForCausalLM.from_pretrained(first / "last").eval()
    with torch.no_grad():
        ours = ch.load(first / "last").model(ids).logits
        assert (ours - theirs(ids).logits).abs().max() <= 1e-5


def test_a_split_model_writes_what_one_process_writes(tmp_path: Path) -> None:
    """Greedy, sampled, beams; rows of several lengths; one key head for two processes; an encoder."""
    folders = [str(path) for path in generated.write_models(tmp_path)]
    alone = {Path(name).name: ch.load(name) for name in folders}
    done = torchrun("-m", "tests.parallel.generated", *folders)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name, m in alone.items():
        assert found[name]["ids"] == generated.written(m)
        assert set(found[name]["heads"]) == {1}  # of one, or of two key/value heads
        assert found[name]["weights"] < 0.6 * sum(one.numel() for one in m.model.parameters())
        assert all("split over processes" in line for line in found[name]["refused"])


def test_the_command_prints_once(tmp_path: Path) -> None:
    [folder, _] = generated.write_models(tmp_path)
    command = [
        "-m",
        "clearhead",
        "generate",
        str(folder),
        "3 4 5",
        "--ids",
        "--json",
        "--max-new-tokens",
        "5",
    ]
    alone = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    done = torchrun(*command)
    assert done.stdout == alone.stdout and done.stdout.count("\n") == 1, done.stderr


def test_sizes_without_a_meaning_are_refused(tmp_path: Path) -> None:
    [folder, _] = generated.write_models(tmp_path)
    with pytest.raises(ch.ClearheadError, match=r"split by heads, as \{\"tensor\": 2\}"):
        ch.load(folder, parallel={"shard": 2})
    with pytest.raises(ch.ClearheadError, match=r"asks for 2 processes .* and 1 were started"):
        ch.load(folder, parallel={"tensor": 2})
