"""Planted faults are found where they were planted, and one line says what to change.

A step that is not finite is skipped, counted and told; where such steps repeat, the run ends.
"""

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
from clearhead.learn.batches.batch import Batch
from clearhead.learn.losses import Terms, batch_loss
from clearhead.learn.recipe import TrainPlan
from clearhead.learn.tasks.table import TASKS
from clearhead.learn.training import captured, loop, machine, optim, prepare
from clearhead.learn.training.events import Skipped, read_log
from clearhead.learn.training.faults import diagnose, find_fault
from clearhead.learn.training.loop import TrainingRun
from clearhead.learn.training.machine import Precision
from tests.harness import build, some_ids
from tests.training.test_run import SIZE, StopAt, run, same, weights

pytestmark = pytest.mark.ledger("H10", "H8")
PLAN, FLOAT32, LM = TrainPlan(lr=0.5), Precision(torch.device("cpu"), None, ""), TASKS["lm"]


def a_batch() -> Batch:
    return Batch(some_ids(4), some_ids(4, seed=2), numbers=torch.tensor([10, 11, 12, 13]))


def loss_of(model, batch):
    return batch_loss(model, batch, chunk=5)[0]


def test_a_sound_model_has_no_fault_and_keeps_its_gradients():
    model = build()
    loss_of(model, a_batch()).backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert find_fault(model, a_batch(), loss_of).kind == "none"
    assert all(torch.equal(parameter.grad, before[name]) for name, parameter in model.named_parameters())
    assert not any(part._forward_hooks for part in model.modules())
    assert "computed again" in diagnose(model, [a_batch()], 3, FLOAT32, PLAN, LM)


def test_terms_of_the_loss_are_computed_again_too():
    """A layer that only the loss of MTP layers reads."""
    model = build(n_mtp_layers=1).train()
    model.mtp[0].norm.weight.data[3] = math.nan
    line = diagnose(model, [a_batch()], 7, FLOAT32, TrainPlan(mtp_weight=0.3), LM)
    assert line.startswith("step 7: the weight mtp.0.norm.weight is not finite")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "name", ["decoder.blocks.1.attention.k", "decoder.blocks.0.feedforward.down", "decoder.norm", "head.out"]
)
def test_a_weight_that_is_not_finite_is_named(name, value):
    model = build(tie_embeddings=False)
    model.get_submodule(name).weight.data.flatten()[3] = value
    fault = find_fault(model, a_batch(), loss_of)
    assert (fault.kind, fault.name, fault.weight) == ("output", name, f"{name}.weight")
    line = diagnose(model, [a_batch()], 7, FLOAT32, PLAN, LM)
    assert line.startswith(f"step 7: the weight {name}.weight is not finite: ")
    assert "train.lr (now 0.5)" in line
    assert "\n" not in line


def test_the_examples_that_break_are_named():
    model = build(tie_embeddings=False)
    batch = a_batch()
    batch.ids[:] = batch.ids % 12
    batch.ids[2, 5] = 12
    model.decoder.embedding.front.tokens.weight.data[12] = 3e38  # finite, and a sum with it is not
    model.decoder.positions.table.weight.data[5] = 3e38
    fault = find_fault(model, batch, loss_of)
    assert fault.kind == "output" and fault.weight is None and fault.examples == (12,)
    line = diagnose(model, [batch], 7, FLOAT32, PLAN, LM)
    assert "decoder.embedding gave a number that is not finite" in line
    assert "in example 12: lower train.lr" in line


def test_an_overflow_of_float16_asks_for_another_precision():
    model = build()
    half = Precision(torch.device("cpu"), torch.float16, "")
    layer = model.decoder.blocks[1].feedforward.down
    layer.weight.data *= 1e5
    layer.bias.data.fill_(6e4)
    assert "computed again" in diagnose(model, [a_batch()], 7, FLOAT32, PLAN, LM)  # float32 can hold it
    line = diagnose(model, [a_batch()], 7, half, PLAN, LM)
    assert line.startswith(
        "step 7: decoder.blocks.1.feedforward.down passed 65504, where float16 ends, from an input of "
    )
    assert line.endswith("set train.precision to bfloat16 or float32")

    seen = {}
    layer.register_forward_pre_hook(lambda module, given: seen.update(largest=given[0].abs().max().item()))
    with half.autocast():
        fault = find_fault(model, a_batch(), loss_of)
    assert fault.largest == pytest.approx(seen["largest"])


def test_a_loss_of_finite_scores():
    model = build(family="encoder", head="span")
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    batch = Batch(some_ids(2), torch.tensor([[1, 2], [3, 7]]), mask)  # an answer that ends in padding
    assert find_fault(model, batch, loss_of).kind == "loss"
    assert "in examples 0, 1: look for a target" in diagnose(model, [batch], 7, FLOAT32, PLAN, LM)


class Cliff(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")


def test_a_gradient_that_is_not_finite_is_named_in_the_order_of_the_backward_pass():
    model = build()
    model.decoder.blocks[1].attention.out.register_forward_hook(lambda module, given, out: Cliff.apply(out))
    fault = find_fault(model, a_batch(), loss_of)
    assert fault.kind == "gradient" and fault.name == "decoder.blocks.1.attention.out.bias"
    line = diagnose(model, [a_batch()], 7, FLOAT32, TrainPlan(clip=0.0), LM)
    assert (
        "the gradient of decoder.blocks.1.attention.out.bias is not in examples 10, 11, 12, 13: "
        "set train.clip (now 0) to 1" in line
    )


EVERY = "train.save_every=1 train.keep_last=99 train.validate_every=4"


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


@pytest.mark.parametrize(
    ("how", "loss"),
    [
        *[("adamw", True), ("adafactor", False), ("muon", True), ("adamw", False)],
        *[("recorded adamw", False), ("recorded normuon", False)],
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_told(text, tmp_path, plant, how, loss, monkeypatch):
    *recorded, optimizer = how.split()
    monkeypatch.setattr(prepare, "can_capture", lambda run: bool(recorded))
    plant({5, 8, 9}, loss)
    told = []
    done = run(text, tmp_path / "run", f"{EVERY} train.optimizer={optimizer}", on_event=told.append)
    assert (done.step, done.reason, done.skipped) == (12, "done", 3)
    for step in range(2, 13):
        before, after = kept(tmp_path / "run", step - 1), kept(tmp_path / "run", step)
        assert same(before, after) is (step in (5, 8, 9)), step
    skipped = [(event.step, event.skipped) for event in told if isinstance(event, Skipped)]
    assert skipped == [(5, 1), (8, 2), (9, 3)]
    log = read_log(tmp_path / "run")
    assert [line["step"] for line in log if line["event"] == "skipped"] == [5, 8, 9]
    assert log[-1]["event"] == "finished" and log[-1]["skipped"] == 3


@pytest.mark.parametrize("stop", [4, 6])
def test_a_run_with_skipped_steps_goes_on_as_if_it_had_not_been_stopped(text, tmp_path, plant, stop):
    """Stopped before, at and after a step that is skipped: weights, optimizer, count and log are the same."""
    plant({5, 6, 9})
    run(text, tmp_path / "whole", "train.ema=0.9")
    part = run(text, tmp_path / "part", "train.ema=0.9", stop=StopAt(stop))
    assert part.reason == "stopped"
    assert ch.train(resume=tmp_path / "part").skipped == 3
    assert same(kept(tmp_path / "whole", 12), kept(tmp_path / "part", 12))
    for name in ("whole", "part"):
        log = read_log(tmp_path / name)
        assert [line["step"] for line in log if line["event"] == "skipped"] == [5, 6, 9]


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
        run(text, tmp_path / "run", EVERY)
    assert all(torch.isfinite(weight).all() for weight in weights(tmp_path / "run" / "last").values())


def test_a_count_of_a_run_that_goes_on_counts_what_was_before(text, tmp_path, plant):
    """Two in a row before a stop and one after it are three."""
    plant({5, 6, 7})
    run(text, tmp_path / "run", stop=StopAt(6))
    with pytest.raises(ch.TrainingError, match=r"^step 7: "):
        ch.train(resume=tmp_path / "run")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("loss", [False, True], ids=["gradient", "loss"])
def test_a_scaled_step_is_skipped_and_the_scale_falls(text, tmp_path, plant, monkeypatch, loss):
    half = Precision(torch.device("cpu"), torch.float16, "float16")
    monkeypatch.setattr(machine, "choose_precision", lambda *given, **more: half)
    plant({5}, loss)
    assert run(text, tmp_path / "run", EVERY).skipped == 1
    files = [tmp_path / "run" / "checkpoints" / f"step-{step}" / "training.json" for step in (4, 5, 12)]
    scales = [json.loads(file.read_text())["scale"] for file in files]
    assert scales[0] == 2 * scales[1] == 2 * scales[2]


def test_a_command_tells_at_the_end(text, tmp_path, plant, clearhead):
    plant({5})
    settings = [f"--set {setting}" for setting in f"{SIZE} train.steps=8 train.device=cpu".split()]
    ran = clearhead("train", text, f"--out {tmp_path}/run --json", *settings)
    assert ran.json["skipped"] == 1
    said = ran.err
    assert "step 5  skipped: the gradient is not finite  (1 so far)" in said
    assert "1 of 8 steps were skipped: their loss or gradient was not finite" in said


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon", "normuon"])
def test_what_is_recorded_has_an_optimizer_that_skips_by_itself(kind):
    """A recorded step does not wait to see whether its gradient is finite."""
    model = build()
    made = optim.make_optimizer(model, TrainPlan(optimizer=kind), torch.device("cpu"))
    on_gpu = SimpleNamespace(
        loaded=SimpleNamespace(config=model.config),
        precision=Precision(torch.device("cuda"), torch.bfloat16, ""),
        world=SimpleNamespace(mesh=None),
        plan=TrainPlan(optimizer=kind),
        optimizer=made,
        terms=Terms(),
        task=TASKS["lm"],
    )
    assert captured.can_capture(on_gpu) is (kind != "adafactor")
    if kind == "adafactor":
        return
    for bad in (False, True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan if bad else 0.5)
        before = [value.clone() for value in (*model.parameters(), *tensors_of(made))]
        optim.step_unless(made, torch.tensor(bad))
        after = (*model.parameters(), *tensors_of(made))
        assert bad is (len(before) == len(after) and all(map(torch.equal, before, after)))


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that an optimizer keeps."""
    return [value for kept in optimizer.state.values() for value in kept.values()]
