"""Checkpoints that several processes write, and models split over them, are those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.app.cli import main
from tests.harness import worst
from tests.parallel import forking, generated, reopened

pytestmark = [pytest.mark.ledger("I3"), pytest.mark.slow]  # one run of two processes serves all
# As GPT-2, whose file holds queries, keys and values as one transposed tensor.
GPT2 = {
    **{"model.positions": "learned", "model.n_kv_heads": 12, "model.gated": False, "model.attention": "full"},
    **{"model.norm": "layernorm", "data.max_length": 16},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save on two processes, open on another mesh, and let split models write."""
    folder = tmp_path_factory.mktemp("checkpoints")
    data = reopened.meshes.write_data("decoder", folder)
    models = [str(path) for path in generated.write_models(folder)]
    jobs = [
        reopened.begun(folder / "shard", {"shard": 2}, data, "decoder", **GPT2),
        reopened.opened(folder / "shard", folder / "tensor", {"tensor": 2}),
        {"models": models, "out": str(folder / "written.json")},
    ]
    forking.perform(2, folder / "log", reopened.perform_all, jobs)
    return folder


def test_saved_on_two_processes_and_opened_on_others(work: Path) -> None:
    """Weights, averages and moments come back bit for bit on other meshes; transformers opens them."""
    first, second, third = (work / name for name in ("shard", "tensor", "one"))
    reopened.perform_all([reopened.opened(first, third, {})])
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


@pytest.mark.parametrize("name", generated.MODELS)
def test_a_split_model_writes_what_one_process_writes(name: str, work: Path) -> None:
    """Greedy, sampled, beams; rows of several lengths; one or three key heads for two processes; experts."""
    found, alone = json.loads((work / "written.json").read_text())[name], ch.load(work / name)
    assert found["ids"] == generated.written(alone)
    prompt = torch.tensor([generated.PROMPTS[0]])
    source = prompt if alone.config.family == "encoder-decoder" else None
    with torch.no_grad():
        logits = alone.model(prompt, source=source).logits
    assert worst(torch.tensor(found["logits"]), logits) <= 1e-5 * logits.abs().max()
    # Of one, or of two key/value heads; of three one for each head, as those of a process share unevenly.
    assert set(found["heads"]) == {3 if name == "uneven" else 1}
    assert found["weights"] < 0.7 * sum(parameter.numel() for parameter in alone.model.parameters())
    assert all("split over processes" in line for line in found["refused"])


def test_the_command_prints_once(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", str(work / "decoder"), "3 4 5", "--ids", "--json", "--max-new-tokens", "5"]
    main(given)
    forking.perform(2, work / "printed", main, given)
    found, errors = forking.printed(work / "printed")
    assert found == capsys.readouterr().out and found.count("\n") == 1, errors


def test_sizes_without_a_meaning_are_refused(work: Path) -> None:
    with pytest.raises(ch.ClearheadError, match=r"split by heads, as \{\"tensor\": 2\}"):
        ch.load(work / "decoder", parallel={"shard": 2})
    with pytest.raises(ch.ClearheadError, match=r"asks for 2 processes .* and 1 were started"):
        ch.load(work / "decoder", parallel={"tensor": 2})
