"""What a run chooses by the machine is chosen by facts, recorded, and kept: one recipe, one set of bits."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.errors import ConfigError
from clearhead.learn.training import machine, prepare
from tests.harness import Notes
from tests.training.test_run import StopAt, run, same, weights

pytestmark = pytest.mark.ledger("H8", "X1")


def spin() -> None:
    while True:
        pass


@pytest.fixture
def load() -> Iterator[None]:
    """Two processes that keep the machine busy."""
    apart = multiprocessing.get_context("fork")
    busy = [apart.Process(target=spin, daemon=True) for _ in range(2)]
    for one in busy:
        one.start()
    yield
    for one in busy:
        one.kill()
        one.join()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def choices(folder: Path) -> dict:
    return json.loads((folder / "last" / "training.json").read_text())["choices"]


def test_runs_under_load_have_one_precision_and_one_set_of_bits(text, tmp_path, load):
    folders = [tmp_path / f"run-{number}" for number in range(2)]
    for folder in folders:
        machine.cpu_has_bfloat16.cache_clear()
        run(text, folder, "train.steps=3 train.device=cpu")
    recipes = {(folder / "train.toml").read_text() for folder in folders}
    assert len(recipes) == 1 and 'precision = "float32"' in recipes.pop()
    assert all(same(weights(folders[0]), weights(folder)) for folder in folders[1:])


def test_a_run_goes_on_with_the_threads_it_began_with(text, tmp_path, threads):
    wide = "train.device=cpu model.d_model=128 model.d_ff=512 data.batch_size=16 train.steps=6"
    torch.set_num_threads(3)
    whole = run(text, tmp_path / "whole", wide)
    run(text, tmp_path / "part", wide, stop=StopAt(3))
    assert choices(tmp_path / "part") == {
        **machine.place(torch.device("cpu")),
        **{"threads": 3, "loss_chunk": 2**24 // whole.model.config.vocab_size},
        **{"compiled": False, "recorded": False},
    }
    torch.set_num_threads(1)  # another machine
    said = Notes()
    ch.train(resume=tmp_path / "part", on_event=said)
    assert "3 threads, as the run began with; train.threads changes that" in said
    assert torch.get_num_threads() == 3 == choices(tmp_path / "part")["threads"]
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))


def test_threads_and_compiling_may_be_changed_where_that_is_asked_for(text, tmp_path, threads):
    run(text, tmp_path / "run", "train.device=cpu", stop=StopAt(3))
    ch.train(resume=tmp_path / "run", settings=["train.threads=2", "train.compile=false"])
    assert torch.get_num_threads() == 2 == choices(tmp_path / "run")["threads"]


@pytest.mark.parametrize("works", [True, False])
def test_a_run_that_was_begun_compiled_goes_on_compiled_or_not_at_all(text, tmp_path, monkeypatch, works):
    """What compiling gave is recorded; a compiler that is gone does not change a run silently."""
    asked = []

    def compiling(run, on_event) -> bool:
        asked.append(True)
        return works or len(asked) == 1

    monkeypatch.setattr(prepare, "_compile", compiling)
    # As fewer steps or another GPU might have it.
    monkeypatch.setattr(machine, "pays", lambda *given: not asked)
    run(text, tmp_path / "run", "train.device=cpu", stop=StopAt(3))
    assert choices(tmp_path / "run")["compiled"] is True
    if works:
        ch.train(resume=tmp_path / "run")
        assert len(asked) == 2 and choices(tmp_path / "run")["compiled"] is True
        return
    with pytest.raises(ConfigError, match=r"begun compiled, .*set train\.compile=false"):
        ch.train(resume=tmp_path / "run")
    assert ch.train(resume=tmp_path / "run", settings=["train.compile=false"]).step == 12
    assert choices(tmp_path / "run")["compiled"] is False


def test_the_loss_is_taken_in_the_pieces_that_a_run_began_with(text, tmp_path, monkeypatch):
    """On a GPU their size is by its memory."""
    monkeypatch.setattr(prepare, "default_chunk", lambda vocabulary, device: 7)
    run(text, tmp_path / "whole", "train.device=cpu")
    run(text, tmp_path / "part", "train.device=cpu", stop=StopAt(3))
    monkeypatch.setattr(prepare, "default_chunk", lambda vocabulary, device: 64)
    ch.train(resume=tmp_path / "part")
    assert choices(tmp_path / "part")["loss_chunk"] == 7
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))


def test_a_run_says_that_it_goes_on_on_another_device(text, tmp_path, threads):
    run(text, tmp_path / "run", "train.device=cpu", stop=StopAt(3))
    counters = tmp_path / "run" / "checkpoints" / "step-3" / "training.json"
    kept = json.loads(counters.read_text())
    there = {"device": "cuda", "processor": "NVIDIA H200", "torch": "2.11.0"}
    kept["choices"] = {**there, "threads": 7, "loss_chunk": 5, "compiled": True, "recorded": False}
    counters.write_text(json.dumps(kept))
    said = Notes()
    ch.train(resume=tmp_path / "run", on_event=said)
    here = f"a CPU ({torch.backends.cpu.get_cpu_capability()}) by PyTorch {torch.__version__}"
    line = f"begun on NVIDIA H200 by PyTorch 2.11.0, the run goes on on {here}: numbers differ in"
    assert any(one.startswith(line) for one in said)
    assert choices(tmp_path / "run")["compiled"] is False and torch.get_num_threads() != 7


def test_a_checkpoint_of_before_has_no_choices_and_goes_on(text, tmp_path):
    run(text, tmp_path / "whole", "train.device=cpu")
    run(text, tmp_path / "run", "train.device=cpu", stop=StopAt(3))
    counters = tmp_path / "run" / "checkpoints" / "step-3" / "training.json"
    kept = json.loads(counters.read_text())
    for name in ("choices", "skipped", "skipped_last"):
        kept.pop(name)
    counters.write_text(json.dumps(kept))
    ch.train(resume=tmp_path / "run")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "run"))
