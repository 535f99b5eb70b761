"""Recorded steps are the steps they stand for: on a GPU as CUDA graphs, elsewhere as the calls recorded.

Ways to train that save memory take the same steps, on whatever device there is.
"""

from __future__ import annotations

import pytest
import torch

import clearhead as ch
from clearhead.learn.batches.batch import IGNORE, Batch, padded_up, scored_up, size_above
from clearhead.learn.losses import batch_loss
from clearhead.learn.training import captured, prepare
from clearhead.learn.training.events import Note
from clearhead.run.kernels import steps
from tests.harness import build
from tests.parallel import meshes

pytestmark = pytest.mark.ledger("I3")
THERE = torch.cuda.is_available()
# On a GPU other sizes take other kernels, whose sums differ in order; Adam enlarges that.
ALLOWED = 1e-3 if THERE else 1e-5
HERE = {"train.device": "auto", "train.steps": 10, "train.validate_every": 5}


@pytest.fixture
def recording(monkeypatch):
    """Count what is recorded and replayed, whatever the device."""
    counts = {"recorded": 0, "passes": 0}
    first, again = captured.CapturedStep._recorded, captured.CapturedPass.__call__

    def count_first(self, *given):
        counts["recorded"] += 1
        return first(self, *given)

    def count_again(self, batch):
        counts["passes"] += 1
        again(self, batch)

    monkeypatch.setattr(captured.CapturedStep, "_recorded", count_first)
    monkeypatch.setattr(captured.CapturedPass, "__call__", count_again)
    monkeypatch.setattr(prepare, "can_capture", lambda run: True)
    return counts


def plainly(monkeypatch) -> None:
    monkeypatch.setattr(prepare, "can_capture", lambda run: False)


def perform(family: str, data, out, **settings) -> None:
    meshes.perform(meshes.job(family, data, out, settings={**HERE, **settings}))


@pytest.mark.parametrize("count", [1, 3, 8, 9, 64, 100, 129, 1000, 4097])
def test_sizes_are_few_and_little_above(count):
    size = size_above(count)
    assert count <= size <= max(2 * count, 8) and size_above(size) == size
    assert count <= 8 or size - count < max(8, count / 8)
    assert len({size_above(number) for number in range(1, 1025)}) < 50


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("share", [0.9, 0.2])
def test_what_is_padded_up_has_the_same_loss_and_gradient(family, share):
    """In float64, so that a wrong position shows: in a sum of float32 it could hide."""
    torch.manual_seed(0)
    model = build(family=family, max_positions=13).double()
    ids, source = torch.randint(13, (5, 11)), torch.randint(13, (5, 9))
    targets = torch.where(torch.rand(5, 11) < share, ids, IGNORE)
    mask = torch.arange(11) < torch.tensor([11, 7, 3, 11, 1])[:, None]
    targets[~mask] = IGNORE
    more = {"source": source} if family == "encoder-decoder" else {}
    plain = Batch(ids, targets, mask, **more)
    padded = scored_up(padded_up(plain, 13))
    assert padded.ids.shape == (8, 13) and padded.n_targets == plain.n_targets
    assert (padded.n_tokens, padded.n_rows) == (plain.n_tokens, plain.n_rows)
    found = []
    for batch in (plain, padded):
        model.zero_grad()
        loss, _ = batch_loss(model, batch)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        found.append([loss.detach(), *gradients])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["decoder", "decoder normuon", "encoder", "encoder-decoder", "vit", "lora"])
def test_recorded_steps_train_as_plain_ones(kind, tmp_path, recording, monkeypatch):
    family, _, optimizer = kind.partition(" ")
    data = meshes.write_data(family, tmp_path / "data")
    settings = {"model.attention": "full"} if family == "decoder" else {}
    settings |= {"train.optimizer": optimizer} if optimizer else {}
    perform(family, data, tmp_path / "recorded", **settings)
    assert recording["recorded"] > 1 and recording["passes"] >= 10
    plainly(monkeypatch)
    perform(family, data, tmp_path / "plain", **settings)
    assert max(meshes.differences(tmp_path / "recorded", tmp_path / "plain")) < ALLOWED


def test_recorded_steps_have_the_terms_of_the_loss(tmp_path, recording, monkeypatch):
    """Two passes with other dropout too: batches of one shape draw the same numbers."""
    data = meshes.write_data("decoder", tmp_path / "data")
    terms = {"train.z_loss": 0.01, "train.future_tokens": [0.5], "train.r_drop": 1.0, "model.dropout": 0.2}
    perform("decoder", data, tmp_path / "recorded", **terms, **{"model.attention": "full"})
    assert recording["passes"] >= 10
    plainly(monkeypatch)
    perform("decoder", data, tmp_path / "plain", **terms, **{"model.attention": "full"})
    assert max(meshes.differences(tmp_path / "recorded", tmp_path / "plain")) < ALLOWED


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_a_recorded_run_that_was_stopped_goes_on_as_if_it_had_not_been(family, tmp_path, recording):
    """With dropout, which follows from the number of the step, in a replay too."""
    data = meshes.write_data(family, tmp_path / "data")
    settings = {**HERE, "model.dropout": 0.2, "model.attention": "full"}
    perform(family, data, tmp_path / "whole", **settings)
    steps = iter(range(10))
    job = meshes.job(family, data, tmp_path / "part", settings=settings)
    ch.train(job["data"], out=job["out"], settings=job["settings"], stop=lambda: next(steps) == 3)
    ch.train(resume=tmp_path / "part")
    assert meshes.differences(tmp_path / "whole", tmp_path / "part") == (0.0, 0.0, 0.0)


def test_a_model_that_is_watched_runs_as_it_is(tmp_path, recording, monkeypatch):
    data, calls = meshes.write_data("decoder", tmp_path / "data"), []
    make = prepare.assemble

    def watching(*given, **named):
        run = make(*given, **named)
        run.model.head.register_forward_pre_hook(lambda part, given: calls.append(part.training))
        return run

    monkeypatch.setattr(prepare, "assemble", watching)
    perform("decoder", data, tmp_path / "run", **{"train.accumulate": 1})
    assert sum(calls) == 10 and recording["passes"] == 0


def test_what_cannot_be_recorded_goes_on_and_says_why(tmp_path, recording, monkeypatch):
    data, notes = meshes.write_data("encoder-decoder", tmp_path / "data"), []

    def waits(self, batch):
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(captured.CapturedStep, "_gradients", waits)
    job = meshes.job("encoder-decoder", data, tmp_path / "run", settings=HERE)
    ch.train(job["data"], out=job["out"], settings=job["settings"], on_event=notes.append)
    lines = [event.line for event in notes if isinstance(event, Note) and "recorded" in event.line]
    assert lines == ["steps are not recorded, and slower for it: called a synchronizing CUDA operation"]
    plainly(monkeypatch)
    perform("encoder-decoder", data, tmp_path / "plain")
    assert max(meshes.differences(tmp_path / "run", tmp_path / "plain")) < ALLOWED


@pytest.mark.skipif(not THERE, reason="CUDA graphs are of GPUs")
@pytest.mark.parametrize(
    ("precision", "optimizer"), [("float32", "adamw"), ("bfloat16", "adamw"), ("bfloat16", "normuon")]
)
def test_on_a_gpu_a_replay_is_the_step_itself(precision, optimizer, tmp_path, monkeypatch):
    """Dropout included: a replay draws from the seed of its step what the kernels themselves would."""
    data = meshes.write_data("encoder-decoder", tmp_path / "data")
    settings = {"train.precision": precision, "model.dropout": 0.2, "train.steps": 50}
    settings |= {"train.optimizer": optimizer, "train.lr": 1e-2 if optimizer == "adamw" else 1e-3}
    perform("encoder-decoder", data, tmp_path / "recorded", **settings)
    monkeypatch.setattr(steps.GraphRecorder, "record", lambda self, launch: launch)
    perform("encoder-decoder", data, tmp_path / "launched", **settings)
    assert max(meshes.differences(tmp_path / "recorded", tmp_path / "launched")) < 1e-6


SIZES = {"model.d_model": 64, "model.d_ff": 128, "model.attention": "full", "model.n_kv_heads": 4}
WAYS = {
    "recomputed": {"train.checkpointing": True},
    "in main memory": {"train.offload": True},
    "both": {"train.checkpointing": True, "train.offload": True},
}


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
