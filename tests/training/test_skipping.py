"""A step whose loss or gradient is not finite is skipped, counted and told; where they repeat, a run ends."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import clearhead as ch
from clearhead.app.cli import main
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training import captured, loop, machine, optim, prepare
from clearhead.learn.training.events import Skipped, read_log
from clearhead.learn.training.loop import TrainingRun
from clearhead.learn.training.machine import Precision
from tests.harness import build
from tests.training.test_faults import Cliff
from tests.training.test_run import StopAt, run, same, weights

EVERY = ("train.save_every=1", "train.keep_last=99", "train.validate_every=4")


@pytest.fixture
def plant(monkeypatch):
    """Return a function after which the loss, or else its gradient alone, is not finite at some steps."""

    before = TrainingRun.loss

    def planted(steps: Collection[int], loss: bool = False) -> None:
        def failing(self: TrainingRun, batch):
            found = before(self, batch)
            if self.state.step + 1 not in steps:
                return found
            return found * math.inf if loss else Cliff.apply(found)

        monkeypatch.setattr(TrainingRun, "loss", failing)

    return planted


def kept(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint."""
    place = folder / "checkpoints" / f"step-{step}"
    return {**load_file(place / "model.safetensors"), **load_file(place / "training.safetensors")}


@pytest.mark.ledger("H10")
@pytest.mark.parametrize("loss", [False, True], ids=["gradient", "loss"])
@pytest.mark.parametrize("how", ["adamw", "adafactor", "muon", "recorded"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_told(text, tmp_path, plant, how, loss, monkeypatch):
    monkeypatch.setattr(prepare, "can_capture", lambda run: how == "recorded")
    plant({5, 8, 9}, loss)
    told = []
    more = () if how == "recorded" else (f"train.optimizer={how}",)
    done = run(text, tmp_path / "run", *EVERY, *more, on_event=told.append)
    assert (done.step, done.reason, done.skipped) == (12, "done", 3)
    for step in range(2, 13):
        before, after = kept(tmp_path / "run", step - 1), kept(tmp_path / "run", step)
        assert same(before, after) is (step in (5, 8, 9)), step
    assert [(event.step, event.skipped) for event in told if isinstance(event, Skipped)] == [
        (5, 1),
        (8, 2),
        (9, 3),
    ]
    log = read_log(tmp_path / "run")
    assert [line["step"] for line in log if line["event"] == "skipped"] == [5, 8, 9]
    assert log[-1]["event"] == "finished" and log[-1]["skipped"] == 3


@pytest.mark.ledger("H8")
@pytest.mark.parametrize("stop", [4, 5, 6, 8])
def test_a_run_with_skipped_steps_goes_on_as_if_it_had_not_been_stopped(text, tmp_path, plant, stop):
    """Stopped before, at and after a step that is skipped: weights, optimizer, count and log are the same."""
    plant({5, 6, 9})
    run(text, tmp_path / "whole", "train.ema=0.9")
    part = run(text, tmp_path / "part", "train.ema=0.9", stop=StopAt(stop))
    assert part.reason == "stopped"
    assert ch.train(resume=tmp_path / "part").skipped == 3
    assert same(kept(tmp_path / "whole", 12), kept(tmp_path / "part", 12))
    logs = [
        [line["step"] for line in read_log(tmp_path / name) if line["event"] == "skipped"]
        for name in ("whole", "part")
    ]
    assert logs == [[5, 6, 9]] * 2


@pytest.mark.parametrize(
    ("bad", "ends"),
    [({5, 6, 7}, 7), ({1, 2, 3}, 3), (set(range(2, 13, 2)), 10), ({3, 4, 6, 7}, None)],
    ids=["three in a row", "from the beginning", "a large share", "now and then"],
)
def test_a_run_ends_where_such_steps_repeat(text, tmp_path, plant, monkeypatch, bad, ends):
    monkeypatch.setattr(loop, "FEW", 4)
    plant(bad)
    if ends is None:
        assert run(text, tmp_path / "run").skipped == 4
        return
    count = len([step for step in bad if step <= ends])
    with pytest.raises(ch.TrainingError, match=rf"^step {ends}: .*\({count} of {ends} steps were not finite"):
        run(text, tmp_path / "run", *EVERY)
    assert all(torch.isfinite(one).all() for one in weights(tmp_path / "run" / "last").values())


def test_a_count_of_a_run_that_goes_on_counts_what_was_before(text, tmp_path, plant):
    """Two in a row before a stop and one after it are three."""
    plant({5, 6, 7})
    run(text, tmp_path / "run", stop=StopAt(6))
    with pytest.raises(ch.TrainingError, match=r"^step 7: "):
        ch.train(resume=tmp_path / "run")


@pytest.mark.ledger("H10")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("loss", [False, True], ids=["gradient", "loss"])
def test_a_scaled_step_is_skipped_and_the_scale_falls(text, tmp_path, plant, monkeypatch, loss):
    half = Precision(torch.device("cpu"), torch.float16, "float16")
    monkeypatch.setattr(machine, "choose_precision", lambda *given, **more: half)
    plant({5}, loss)
    assert run(text, tmp_path / "run", *EVERY).skipped == 1
    scales = [
        json.loads((tmp_path / "run" / "checkpoints" / f"step-{step}" / "training.json").read_text())["scale"]
        for step in (4, 5, 12)
    ]
    assert scales[0] == 2 * scales[1] == 2 * scales[2]


def test_a_command_tells_at_the_end(text, tmp_path, plant, capsys):
    plant({5})
    settings = [
        "model.d_model=16",
        "model.n_layers=1",
        "model.n_heads=2",
        "train.steps=8",
        "train.device=cpu",
    ]
    main(
        ["train", str(text), "--out", str(tmp_path / "run"), "--json", *(f"--set={one}" for one in settings)]
    )
    out, said = capsys.readouterr()
    assert json.loads(out)["skipped"] == 1
    assert "step 5  skipped: the gradient is not finite  (1 so far)" in said
    assert "1 of 8 steps were skipped: their loss or gradient was not finite" in said


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon"])
def test_what_is_recorded_has_an_optimizer_that_skips_by_itself(kind):
    """Muon is an AdamW that is not fused: told of an infinite gradient on a GPU, it would stop the run."""
    model = build()
    made = optim.make_optimizer(model, TrainPlan(optimizer=kind), torch.device("cpu"))
    on_gpu = SimpleNamespace(
        loaded=SimpleNamespace(config=model.config),
        precision=Precision(torch.device("cuda"), torch.bfloat16, ""),
        world=SimpleNamespace(mesh=None),
        plan=TrainPlan(optimizer=kind),
        optimizer=made,
        task=TASKS["lm"],
    )
    assert captured.can_capture(on_gpu) is (kind == "adamw")
    if kind == "adamw":
        for one in model.parameters():
            one.grad = torch.full_like(one, math.nan)
        before = [one.detach().clone() for one in model.parameters()]
        optim.step_unless(made, torch.tensor(True))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
