"""A run leaves nothing if it never began, the earlier run if it was to replace one, the best if it ended."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.learn.losses import batch_loss
from clearhead.learn.training import machine
from clearhead.learn.training.events import read_log
from clearhead.learn.training.faults import find_fault
from clearhead.learn.training.machine import Precision
from clearhead.learn.training.state import State
from clearhead.learn.training.weights import average
from clearhead.run.kernels.training import join_projections
from tests.harness import build, some_ids
from tests.training.test_run import TEXT, StopAt, run, same, weights


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and what it holds."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# Folders ----------------------------------------------------------------------------------------------------


@pytest.mark.ledger("H8")
@pytest.mark.parametrize(
    "bad", [["train.freeze=foo"], ["data.max_length=0"], ["model.base=nowhere"], ["train.pretrain=3"]]
)
def test_a_run_that_cannot_begin_leaves_nothing(text, tmp_path, bad):
    with pytest.raises(ch.ClearheadError):
        run(text, tmp_path / "new" / "run", *bad)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ch.ClearheadError):
        run(text, tmp_path / "empty", *bad)
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.ledger("H8")
def test_an_earlier_run_is_given_up_only_for_one_that_begins(text, tmp_path):
    out = tmp_path / "run"
    run(text, out)
    before = tree(out)
    for data, more in [
        (tmp_path / "typo.txt", []),
        (text, ["train.freeze=foo"]),
        (text, [f"model.base={out}"]),
    ]:
        with pytest.raises(ch.ClearheadError):
            run(data, out, *more, overwrite=True)
        assert tree(out) == before
    with pytest.raises(ch.ClearheadError, match=r"lies in .* which would be overwritten: name another --out"):
        run(text, out, f"model.base={out / 'best'}", overwrite=True)
    with pytest.raises(ch.ClearheadError, match="holds another run"):
        run(text, out)
    run(text, out, "train.seed=1", overwrite=True)
    assert tree(out)["model.safetensors"] != before["model.safetensors"]
    link = tmp_path / "link"
    link.symlink_to(out)
    run(text, link, overwrite=True)
    assert link.is_symlink() and tree(out)["model.safetensors"] == before["model.safetensors"]


def test_nothing_but_a_run_is_ever_removed(text, tmp_path):
    out = tmp_path / "mine"
    for name in ("train.toml", "data/words.txt", "thesis.tex"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("[train]\n")
    with pytest.raises(ch.ClearheadError, match=r"thesis.tex is no part of a run, and would be lost"):
        run(text, out, overwrite=True)
    (out / "thesis.tex").unlink()
    with pytest.raises(ch.ClearheadError, match=r"words.txt is no part of a run"):
        run(text, out, overwrite=True)
    with pytest.raises(ch.ClearheadError, match="holds a run that never began: add --overwrite"):
        run(text, out)
    (out / "data" / "words.txt").unlink()
    assert run(text, out, overwrite=True).reason == "done"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_copied_checkpoint_does_no_harm(text, tmp_path):
    part = run(text, tmp_path / "run", stop=StopAt(5)).folder
    shutil.copytree(part / "checkpoints" / "step-5", part / "checkpoints" / "step-mine")
    assert ch.train(resume=part).step == 12 and (part / "checkpoints" / "step-mine").is_dir()


def test_what_has_no_effect_is_said(text, tmp_path):
    base = run(text, tmp_path / "base").folder
    said: list[str] = []
    settings = [
        f"model.base={base}",
        "tokens.kind=bpe",
        "data.max_length=1000",
        "train.steps=2",
        "train.samples=0",
    ]
    ch.train(
        text,
        out=tmp_path / "run",
        settings=settings,
        on_event=lambda event: said.append(getattr(event, "line", "")),
    )
    run(
        text,
        tmp_path / "sizes",
        "model.vocab_size=3",
        on_event=lambda event: said.append(getattr(event, "line", "")),
    )
    wanted = ("rows have 16 tokens at most", "tokens.kind bpe has no effect", "by the data, not 3")
    assert all(any(part in line for line in said) for part in wanted)


def test_folders_that_hold_runs_are_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    first = run(".", None)
    assert first.folder == Path("runs") / tmp_path.name
    assert not ch.train(resume=first.folder).metrics["loss"] > first.metrics["loss"]
    again = run("*.txt", None, overwrite=True)  # named by the folder, not by the star
    assert again.folder == first.folder and same(weights(first.folder), weights(again.folder))


def test_resume_takes_nothing_else(text, tmp_path):
    run(text, tmp_path / "run")
    for more in ({"out": tmp_path / "other"}, {"overwrite": True}):
        with pytest.raises(ch.ClearheadError, match="leave data, recipe, out and overwrite out"):
            ch.train(resume=tmp_path / "run", **more)


def test_a_run_stopped_in_its_first_stage_goes_on_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "films.tsv").write_text(
        "text\tlabel\n" + "".join(f"{'good' if i % 2 else 'bad'} film {i}\t{i % 2}\n" for i in range(80))
    )
    monkeypatch.chdir(tmp_path)
    settings = [
        "model.d_model=16",
        "model.n_layers=1",
        "model.n_heads=2",
        "train.pretrain=6",
        "train.steps=6",
        "train.validate_every=3",
    ]
    ch.train("films.tsv", out=tmp_path / "whole", settings=settings)
    ch.train("films.tsv", out=tmp_path / "part", settings=settings, stop=StopAt(4))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ch.train(resume=tmp_path / "part")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))


# What is kept -----------------------------------------------------------------------------------------------


@pytest.mark.ledger("H7")
def test_the_best_is_saved_when_it_is_found(text, tmp_path):
    """It gets worse after the first validations; checkpoints by plan come too late for them."""
    wild = [
        "train.lr=3",
        "train.clip=0",
        "train.warmup=29",
        "train.steps=30",
        "train.validate_every=3",
        "train.save_every=30",
    ]
    done = run(text, tmp_path / "run", *wild)
    best = min(
        (row["metrics"]["loss"], row["step"])
        for row in read_log(tmp_path / "run")
        if row["event"] == "validated"
    )
    assert (done.metrics["loss"], done.metrics["step"]) == best and best[1] < 30
    assert same(weights(tmp_path / "run"), weights(tmp_path / "run" / "checkpoints" / f"step-{best[1]}"))
    assert ch.evaluate(done.model, text).metrics["loss"] < 10
    run(text, tmp_path / "three", *wild, "train.keep_best=3")
    order = sorted(
        (row["metrics"]["loss"], row["step"])
        for row in read_log(tmp_path / "three")
        if row["event"] == "validated"
    )
    there = {path.name for path in (tmp_path / "three" / "checkpoints").iterdir()}
    assert {f"step-{step}" for _, step in order[:3]} <= there
    impatient = run(text, tmp_path / "impatient", *wild, "train.patience=2")
    assert impatient.reason == "patience" and impatient.metrics["step"] == best[1]
    again = ch.train(resume=tmp_path / "impatient")
    assert (again.reason, again.step) == ("patience", impatient.step) and same(
        weights(tmp_path / "run"), weights(tmp_path / "impatient")
    )


@pytest.mark.ledger("H7")
def test_the_average_is_over_planned_checkpoints_alone(text, tmp_path):
    settings = ["train.average=5", "train.steps=12", "train.validate_every=4", "train.keep_last=9"]
    run(text, tmp_path / "whole", *settings)
    steps = [
        ch.load(tmp_path / "whole" / "checkpoints" / f"step-{step}").model.state_dict() for step in (4, 8, 12)
    ]
    # There are three checkpoints; the untrained step 0 does not count.
    assert same(weights(tmp_path / "whole"), average(iter(steps)))
    run(text, tmp_path / "part", *settings, stop=StopAt(10))
    ch.train(resume=tmp_path / "part")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))


def test_where_nothing_was_saved_by_plan_the_best_stays(text, tmp_path):
    wild = [
        "train.lr=3",
        "train.clip=0",
        "train.warmup=29",
        "train.steps=30",
        "train.validate_every=3",
        "train.save_every=30",
    ]
    done = run(text, tmp_path / "run", *wild, "train.patience=2", "train.average=5")
    assert done.reason == "patience" and same(weights(tmp_path / "run"), weights(tmp_path / "run" / "best"))


def test_of_equals_the_lower_loss_and_never_what_is_not_a_number():
    rows = [
        {"step": 1, "loss": math.nan, "accuracy": 0.5},
        {"step": 2, "loss": 0.8, "accuracy": 0.5},
        {"step": 3, "loss": 0.7, "accuracy": 0.5},
    ]
    state = State(validations=rows)
    assert state.best("accuracy", True, 3) == [3, 2, 1] and state.best("loss", False, 3) == [3, 2, 1]


# What is shown and written ----------------------------------------------------------------------------------


def test_no_run_ends_for_a_sample_that_is_too_long(tmp_path, text):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text(
        "source\ttarget\n" + "".join(f"{'a long way to the sea ' * 4}{i}\tway {i}\n" for i in range(40))
    )
    settings = [
        "model.d_model=16",
        "model.n_layers=1",
        "model.n_heads=2",
        "model.max_positions=48",
        "train.steps=4",
    ]
    assert ch.train(pairs, out=tmp_path / "pairs", settings=settings).reason == "done"
    assert run(text, tmp_path / "run", "model.max_positions=8", "train.samples=2").reason == "done"
    for folder in ("pairs", "run"):
        shown = [line["samples"] for line in read_log(tmp_path / folder) if line["event"] == "validated"]
        assert all(
            len(samples) >= 1 and not sample.startswith("(") for samples in shown for sample in samples
        )


def test_the_log_is_json_whatever_the_numbers(text, tmp_path, monkeypatch):
    from clearhead.learn.training import loop

    monkeypatch.setattr(loop, "validate", lambda *given: ({"loss": math.nan, "perplexity": math.inf}, ""))
    run(text, tmp_path / "run", "train.steps=4")
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    judged = [
        line
        for line in (json.loads(line, parse_constant=pytest.fail) for line in lines)
        if line["event"] == "validated"
    ]
    assert [line["metrics"]["loss"] for line in judged] == [None] and not any(line["best"] for line in judged)


def test_a_warm_up_longer_than_the_run_is_cut_and_said(text, tmp_path):
    said: list[str] = []
    run(
        text,
        tmp_path / "run",
        "train.warmup=50",
        on_event=lambda event: said.append(getattr(event, "line", "")),
    )
    assert "warm-up of 1 steps: 50 would be the whole run" in said


# Numbers that are not finite --------------------------------------------------------------------------------


@pytest.mark.ledger("H10")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_scaled_loss_that_is_not_finite_ends_the_run(text, tmp_path, monkeypatch):
    monkeypatch.setattr(
        machine,
        "choose_precision",
        lambda *given, **more: Precision(torch.device("cpu"), torch.float16, "float16"),
    )
    with pytest.raises(ch.ClearheadError, match="float16"):
        run(text, tmp_path / "run", "train.lr=1e6", "train.steps=40")


@pytest.mark.ledger("H10")
def test_a_fault_has_the_same_name_where_projections_are_joined():
    from clearhead.learn.batches.batch import Batch

    model = build()
    with torch.no_grad():
        model.decoder.blocks[0].attention.k.weight[0, 0] = math.nan
    batch = Batch(some_ids(2, 6), some_ids(2, 6, seed=2))
    plain = find_fault(model, batch, lambda model, batch: batch_loss(model, batch)[0])
    join_projections(model)
    joined = find_fault(model, batch, lambda model, batch: batch_loss(model, batch)[0])
    assert plain == joined and joined.weight == "decoder.blocks.0.attention.k.weight"


def test_parallel_files_are_found_again_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for side in ("en", "de"):
        for name in ("train", "val"):
            (tmp_path / f"{name}.{side}").write_text(
                "".join(f"{name} {word} {side}\n" for word in "abcdefgh")
            )
    settings = [
        "data.validation=val",
        "model.d_model=16",
        "model.n_heads=2",
        "model.n_layers=1",
        "tokens.kind=char",
        "train.steps=4",
    ]
    ch.train("train", out=tmp_path / "run", settings=settings, stop=lambda: True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert ch.train(resume=tmp_path / "run").step == 4
