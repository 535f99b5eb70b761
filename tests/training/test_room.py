"""A run leaves nothing if it never began, the earlier run if it was to replace one, the best if it ended."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.learn.batches.batch import Batch
from clearhead.learn.losses import batch_loss
from clearhead.learn.training import machine
from clearhead.learn.training.events import read_log
from clearhead.learn.training.faults import find_fault
from clearhead.learn.training.machine import Precision
from clearhead.learn.training.state import State
from clearhead.learn.training.weights import average
from clearhead.run.kernels.training import join_projections
from tests.harness import Notes, build, some_ids
from tests.training.test_run import SIZE, TEXT, StopAt, run, same, weights

pytestmark = pytest.mark.ledger("H10", "H7", "H8")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and what it holds."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def validations(folder: Path) -> list[tuple[float, int]]:
    """The loss and the step of each validation."""
    rows = [row for row in read_log(folder) if row["event"] == "validated"]
    return [(row["metrics"]["loss"], row["step"]) for row in rows]


# Folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", ["train.freeze=foo", "data.max_length=0", "model.base=nowhere", "train.pretrain=3"]
)
def test_a_run_that_cannot_begin_leaves_nothing(text, tmp_path, bad):
    with pytest.raises(ch.ClearheadError):
        run(text, tmp_path / "new" / "run", bad)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ch.ClearheadError):
        run(text, tmp_path / "empty", bad)
    assert list((tmp_path / "empty").iterdir()) == []


def test_an_earlier_run_is_given_up_only_for_one_that_begins(text, tmp_path):
    out = tmp_path / "run"
    run(text, out)
    before = tree(out)
    for data, more in [(tmp_path / "typo.txt", ""), (text, "train.freeze=foo"), (text, f"model.base={out}")]:
        with pytest.raises(ch.ClearheadError):
            run(data, out, more, overwrite=True)
        assert tree(out) == before
    with pytest.raises(ch.ClearheadError, match=r"lies in .* which would be overwritten: name another --out"):
        run(text, out, f"model.base={out / 'best'}", overwrite=True)
    with pytest.raises(ch.ClearheadError, match="holds another run: go on with clearhead train --resume"):
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
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(ch.CheckpointError, match="is not empty and holds no run"):
        run(text, tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "thesis.txt").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_copied_checkpoint_does_no_harm(text, tmp_path):
    part = run(text, tmp_path / "run", stop=StopAt(5)).folder
    shutil.copytree(part / "checkpoints" / "step-5", part / "checkpoints" / "step-mine")
    assert ch.train(resume=part).step == 12 and (part / "checkpoints" / "step-mine").is_dir()


def test_what_has_no_effect_is_said(text, tmp_path):
    base = run(text, tmp_path / "base").folder
    said = Notes()
    settings = f"model.base={base} tokens.kind=bpe data.max_length=1000 train.steps=2 train.samples=0"
    ch.train(text, out=tmp_path / "run", settings=settings.split(), on_event=said)
    run(text, tmp_path / "sizes", "model.vocab_size=3 train.warmup=50", on_event=said)
    wanted = ("rows have 16 tokens at most", "tokens.kind bpe has no effect", "by the data, not 3")
    wanted += ("warm-up of 1 steps: 50 would be the whole run",)
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
    rows = [f"{'good' if i % 2 else 'bad'} film {i}\t{i % 2}\n" for i in range(80)]
    (tmp_path / "films.tsv").write_text("".join(["text\tlabel\n", *rows]))
    monkeypatch.chdir(tmp_path)
    settings = f"{SIZE} train.pretrain=6 train.steps=6 train.validate_every=3".split()
    ch.train("films.tsv", out=tmp_path / "whole", settings=settings)
    ch.train("films.tsv", out=tmp_path / "part", settings=settings, stop=StopAt(4))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ch.train(resume=tmp_path / "part")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))


# What is kept -----------------------------------------------------------------------------------------------


WILD = "train.lr=3 train.clip=0 train.warmup=29 train.steps=30 train.validate_every=3 train.save_every=30"


def test_the_best_is_saved_when_it_is_found(text, tmp_path):
    """It gets worse after the first validations; checkpoints by plan come too late for them."""
    done = run(text, tmp_path / "run", WILD)
    best = min(validations(tmp_path / "run"))
    assert (done.metrics["loss"], done.metrics["step"]) == best and best[1] < 30
    assert same(weights(tmp_path / "run"), weights(tmp_path / "run" / "checkpoints" / f"step-{best[1]}"))
    assert ch.evaluate(done.model, text).metrics["loss"] < 10
    run(text, tmp_path / "three", f"{WILD} train.keep_best=3")
    order = sorted(validations(tmp_path / "three"))
    there = {path.name for path in (tmp_path / "three" / "checkpoints").iterdir()}
    assert {f"step-{step}" for _, step in order[:3]} <= there
    impatient = run(text, tmp_path / "impatient", f"{WILD} train.patience=2 train.keep_best=2")
    assert impatient.reason == "patience" and impatient.metrics["step"] == best[1]
    assert impatient.step - best[1] == 2 * 3
    assert (impatient.folder / "best").resolve().name == f"step-{best[1]}"
    assert len(list((impatient.folder / "checkpoints").iterdir())) <= 3
    again = ch.train(resume=tmp_path / "impatient")
    assert (again.reason, again.step) == ("patience", impatient.step)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "impatient"))


def test_the_average_is_over_planned_checkpoints_alone(text, tmp_path):
    settings = "train.average=5 train.validate_every=4 train.keep_last=9"
    run(text, tmp_path / "whole", settings)
    steps = [weights(tmp_path / "whole" / "checkpoints" / f"step-{step}") for step in (4, 8, 12)]
    # There are three checkpoints; the untrained step 0 does not count.
    assert same(weights(tmp_path / "whole"), average(iter(steps)))
    run(text, tmp_path / "part", settings, stop=StopAt(10))
    ch.train(resume=tmp_path / "part")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))


def test_where_nothing_was_saved_by_plan_the_best_stays(text, tmp_path):
    done = run(text, tmp_path / "run", f"{WILD} train.patience=2 train.average=5")
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
    rows = [f"{'a long way to the sea ' * 4}{i}\tway {i}\n" for i in range(40)]
    pairs.write_text("".join(["source\ttarget\n", *rows]))
    settings = f"{SIZE} model.max_positions=48 train.steps=4".split()
    assert ch.train(pairs, out=tmp_path / "pairs", settings=settings).reason == "done"
    assert run(text, tmp_path / "run", "model.max_positions=8 train.samples=2").reason == "done"
    for folder in ("pairs", "run"):
        shown = [line["samples"] for line in read_log(tmp_path / folder) if line["event"] == "validated"]
        assert all(shown) and not any(sample.startswith("(") for samples in shown for sample in samples)


def test_the_log_is_json_whatever_the_numbers(text, tmp_path, monkeypatch):
    from clearhead.learn.training import loop

    monkeypatch.setattr(loop, "validate", lambda *given: ({"loss": math.nan, "perplexity": math.inf}, ""))
    run(text, tmp_path / "run", "train.steps=4")
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    read = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    judged = [line for line in read if line["event"] == "validated"]
    assert [line["metrics"]["loss"] for line in judged] == [None] and not any(line["best"] for line in judged)


# Numbers that are not finite --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_scaled_loss_that_is_not_finite_ends_the_run(text, tmp_path, monkeypatch):
    half = Precision(torch.device("cpu"), torch.float16, "float16")
    monkeypatch.setattr(machine, "choose_precision", lambda *given, **more: half)
    with pytest.raises(ch.ClearheadError, match="float16"):
        run(text, tmp_path / "run", "train.lr=1e6 train.steps=40")


def test_a_fault_has_the_same_name_where_projections_are_joined():
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
            lines = [f"{name} {word} {side}\n" for word in "abcdefgh"]
            (tmp_path / f"{name}.{side}").write_text("".join(lines))
    settings = f"{SIZE} data.validation=val tokens.kind=char train.steps=4".split()
    ch.train("train", out=tmp_path / "run", settings=settings, stop=lambda: True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert ch.train(resume=tmp_path / "run").step == 4
