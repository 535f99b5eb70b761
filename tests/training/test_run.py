"""Whole runs: stopped and resumed, killed at any moment, on a full disk, with a loss that is not finite."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import clearhead as ch
from clearhead.app.cli import main
from clearhead.errors import CheckpointError
from clearhead.learn.batches.windows import FixedRows
from clearhead.learn.training import loop
from clearhead.learn.training.events import Saved, Stepped, read_log
from clearhead.learn.training.state import newest
from tests.harness import Notes, worst

pytestmark = pytest.mark.ledger("H5", "H7", "H8")
TEXT = "the quick brown fox jumps over the lazy dog while it sings of the sea\n" * 60
SIZE = "model.d_model=16 model.n_layers=1 model.n_heads=2 "
TINY = (
    f"{SIZE} model.max_positions=16 model.dropout=0.1 data.batch_size=4 train.validate_every=4 "
    "train.log_every=1 train.samples=0 train.lr=1e-2"
).split()


def run(data, out, *settings: str, **more):
    """Train a tiny model for 12 steps; several settings may stand in one text, apart by spaces."""
    changes = [setting for text in settings for setting in text.split()]
    return ch.train(data, out=out, settings=[*TINY, "train.steps=12", *changes], **more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return ch.load(folder).model.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class StopAt:
    """Asks for a stop when the run has taken some number of steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def resumed(
    data, place: Path, *settings: str, stops: Sequence[int] = (5, 2)
) -> tuple[ch.Trained, ch.Trained]:
    """Train in one go and with stops after so many steps; weights, metrics and log must be the same."""
    whole = run(data, place / "whole", *settings)
    first, *later = stops
    part = run(data, place / "part", *settings, stop=StopAt(first))
    assert (part.reason, part.step) == ("stopped", first)
    for count in later:
        step = part.step
        part = ch.train(resume=place / "part", stop=StopAt(count))
        assert part.step == step + count
    done = ch.train(resume=place / "part")
    assert (done.reason, done.step, done.metrics) == ("done", whole.step, whole.metrics)
    for folder in ("", "last"):
        assert same(weights(place / "whole" / folder), weights(place / "part" / folder))
    logs = [
        [(line["step"], line.get("loss"), line.get("metrics")) for line in read_log(place / name)]
        for name in ("whole", "part")
    ]
    assert logs[0] == logs[1]
    return whole, done


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "train.ema=0.9 train.accumulate=3",
        "train.optimizer=adafactor data.packing=isolated",
        "tokens.kind=bpe tokens.vocab_size=280 data.bpe_dropout=0.5 model.max_positions=64",
        "train.optimizer=normuon train.cautious_decay=true train.average=2 train.accumulate_schedule=1,2 "
        "train.window_schedule=4 train.future_tokens=0.5 train.z_loss=1e-3",
    ],
)
def test_a_stopped_run_goes_on_as_if_it_never_had_been(text, tmp_path, settings, monkeypatch):
    seen: dict[str, list[tuple[int, ...]]] = {"whole": [], "part": []}
    build = FixedRows.at

    def at(self, index):
        batch = build(self, index)
        if self.training and batch.numbers is not None:
            side = "part" if (tmp_path / "part").exists() else "whole"
            seen[side].append((index, *batch.numbers.flatten().tolist()))
        return batch

    monkeypatch.setattr(FixedRows, "at", at)
    resumed(text, tmp_path, settings)
    # The batch that was made ready when the stop came is made again.
    assert list(dict.fromkeys(seen["part"])) == seen["whole"]


def test_a_stopped_run_of_numbers_and_of_pairs_goes_on_too(tmp_path):
    """Numbers in a column without a header; pairs with the reference that their run began with."""
    rows = [f"{' '.join('abcdefg'[: 1 + i % 7])}\t{(1 + i % 7) / 2}" for i in range(200)]
    (tmp_path / "numbers.tsv").write_text("\n".join(rows) + "\n")
    words = ("red", "blue", "green", "black")
    pairs = [
        {"prompt": f"say {words[n % 4]}", "chosen": f"{words[n % 4]}!", "rejected": f"not {words[n % 3]}"}
        for n in range(12)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    for name, settings, stop in (
        ("numbers.tsv", "data.task=regress model.d_model=32 data.batch_size=32", 6),
        ("pairs.jsonl", "data.task=prefer model.max_positions=64", 4),
    ):
        whole, done = resumed(tmp_path / name, tmp_path / f"of-{name}", settings, stops=(stop,))
        assert done.step == whole.step > stop and done.metrics == whole.metrics


@pytest.mark.parametrize("tokens", ["tokens.kind=char", "tokens.kind=bpe tokens.vocab_size=300"])
def test_a_prompt_begins_as_documents_begin_in_isolated_packing(tmp_path, tokens):
    stories, story = tmp_path / "stories.jsonl", tmp_path / "story.txt"
    stories.write_text('{"text": "the cat sat"}\n{"text": "a dog ran far"}\n' * 30)
    story.write_text("the cat sat")
    base = run(stories, tmp_path / "base", f"{tokens} train.steps=1").model
    bos, plain = base.special["bos"], base.encode(["the cat sat"])[0]
    starts = {"new": tokens, "tuned": f"model.base={base.folder}", "twice": f"model.base={tmp_path}/new"}
    for out, start in starts.items():
        run(stories, tmp_path / out, f"{start} data.packing=isolated train.steps=1")
        made = ch.load(tmp_path / out)
        assert made.prompt_ids("the cat sat") == [bos, *plain]
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / out)("the cat sat").input_ids == [
            bos,
            *plain,
        ]
        # A document packed as in training, and the same as a prompt: one probability.
        packed = ch.evaluate(made, story)
        assert packed.targets == len(plain)
        assert -made.score("the cat sat").total == pytest.approx(
            packed.metrics["loss"] * len(plain), abs=1e-5
        )


def test_lora_and_frozen_layers_resume_too(text, tmp_path):
    base = run(text, tmp_path / "base").folder
    resumed(text, tmp_path, f"model.base={base} train.lora=2", stops=(1, 3))
    before, after = weights(base), weights(tmp_path / "whole")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.endswith(("attention.q.weight", "attention.v.weight")) for name in changed)


def child(action, said=os.devnull) -> int:
    """Run an action in a forked process, which ends with its code; what it says goes into a file."""
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        torch.set_num_threads(1)
        sys.stderr = open(said, "w", buffering=1)  # noqa: SIM115
        action()
        code = 0
    except SystemExit as stop:
        code = stop.code
    finally:
        os._exit(code)


def dying(action, folder: Path, left: int):
    """An action whose process kills itself when it is about to touch something in the folder once more."""

    def watch(event: str, given: tuple) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink"):
            left -= str(given[0]).startswith(str(folder))
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    def started() -> None:
        sys.addaudithook(watch)
        action()

    return started


@pytest.mark.slow
def test_killed_at_ten_moments(text, tmp_path):
    """Kill ten times, each before a file is opened, moved or removed; the end is bit for bit the same."""
    torch.set_num_threads(1)
    often = "train.save_every=1 train.steps=24 train.keep_last=2"
    run(text, tmp_path / "whole", often)
    folder, moments, steps = tmp_path / "part", random.Random(0), set()
    for _ in range(10):
        ready = newest(folder) is not None
        if not ready:
            shutil.rmtree(folder, ignore_errors=True)
        action = (lambda: ch.train(resume=folder)) if ready else (lambda: run(text, folder, often))
        number = child(dying(action, folder, moments.randint(15, 100)))
        assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == -signal.SIGKILL
        if newest(folder) is not None:
            assert ch.load(newest(folder)).config.d_model == 16
            steps.add(newest(folder).name)
    assert len(steps) >= 5 and "step-24" not in steps, steps
    ch.train(resume=folder)
    assert same(weights(tmp_path / "whole"), weights(folder))
    assert same(weights(tmp_path / "whole" / "last"), weights(folder / "last"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_saves_and_says_how_to_go_on(text, tmp_path, number, code):
    out = tmp_path / "run"
    settings = [part for setting in [*TINY, "train.steps=100000"] for part in ("--set", setting)]
    command = ["train", str(text), "--out", str(out), *settings]
    process = child(lambda: main(command), tmp_path / "said")
    while newest(out) is None or newest(out).name == "step-0":
        assert os.waitpid(process, os.WNOHANG)[0] == 0
        time.sleep(0.05)
    os.kill(process, number)
    end = time.monotonic() + 60
    while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == code
    said = (tmp_path / "said").read_text()
    assert f"--resume {out}" in said and "Traceback" not in said
    assert newest(out).name.startswith("step-")


@pytest.mark.parametrize(("size", "step"), [(9000, 4), (5000, 24)], ids=["checkpoint", "log"])
def test_a_full_disk_leaves_what_was_written_earlier(text, tmp_path, size, step):
    """A limit on the size of files stands for a full disk: a write fails in the middle."""
    folder = tmp_path / "run"
    run(text, folder, "train.steps=28", stop=StopAt(step))
    before = weights(folder / "last")
    log = [line for line in read_log(folder) if line["event"] != "finished"]

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        try:
            ch.train(resume=folder)
        except ch.CheckpointError as error:
            os._exit(0 if "cannot write" in str(error) else 4)
        else:
            os._exit(3)

    assert os.waitstatus_to_exitcode(os.waitpid(child(limited), 0)[1]) == 0
    assert newest(folder).name == f"step-{step}" and same(weights(folder / "last"), before)
    assert read_log(folder)[: len(log)] == log
    assert ch.train(resume=folder).step == 28


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path):
    with pytest.raises(ch.TrainingError, match=r"^step \d+: .*(train\.lr|train\.precision)"):
        run(text, tmp_path / "run", "train.lr=1e20 train.clip=0 train.warmup=1 train.save_every=1")
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "run" / "last").values())


def test_the_reported_loss_is_the_mean_over_the_whole_validation_text_and_the_folder_has_all(text, tmp_path):
    done = run(text, tmp_path / "run")
    held = TEXT[int(len(TEXT) * 0.9) :]
    model, ids = done.model.model.double().eval(), done.model.encode([held])[0]
    total = count = 0
    for start in range(0, len(ids) - 1, 16):
        row = torch.tensor([ids[start : start + 17]])
        logits = model(row[:, :-1]).logits[0]
        total -= logits.log_softmax(-1).gather(-1, row[0, 1:, None]).sum().item()
        count += row.shape[1] - 1
    assert count == len(ids) - 1
    assert abs(total / count - done.metrics["loss"]) < 1e-5
    files = "config.json model.safetensors tokenizer.json train.toml log.jsonl checkpoints best last"
    assert {*files.split()} <= {path.name for path in done.folder.iterdir()}
    card = (done.folder / "README.md").read_text()
    assert f"| loss | {done.metrics['loss']:.4g} |" in card and "| train.steps | 12 |" in card
    assert f"clearhead {done.command}" in card and str(tmp_path) not in card.replace(done.command, "")
    again = ch.read_recipe(done.folder / "train.toml")
    assert again.train.steps == 12 and again.data.task == "lm" and again.model["d_model"] == 16
    assert [line["step"] for line in read_log(done.folder) if line["event"] == "stepped"] == [*range(1, 13)]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("model.base=gtp2", '"gtp2" is no directory, no GGUF file and no preset (did you mean "gpt2"?)'),
        ("model.base=t5-small", "has family encoder-decoder and reads tokens, and task lm needs"),
        ("tokens.vocab_size=2000000 tokens.kind=bpe", "vocab_size 2000000 must lie between 1 and"),
        ("train.freeze=encodr.*", 'train.freeze "encodr.*" names no parameter'),
        ("train.device=tpu", 'device "tpu"'),
    ],
)
def test_a_wrong_recipe_is_one_line(text, tmp_path, change, line):
    with pytest.raises(ch.ClearheadError) as caught:
        run(text, tmp_path / "run", change)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_data_that_changed_or_vanished(text, tmp_path):
    run(text, tmp_path / "run", stop=StopAt(4))
    text.write_text(TEXT + "more")
    with pytest.raises(ch.TrainingError, match="has changed since the run began"):
        ch.train(resume=tmp_path / "run")
    text.unlink()
    with pytest.raises(ch.ClearheadError, match=r"text\.txt"):
        ch.train(resume=tmp_path / "run")
    text.write_text(TEXT)
    assert ch.train(resume=tmp_path / "run").step == 12


def refuse_to_compile(graph, inputs):
    raise RuntimeError("there is no compiler here\nand more")


@pytest.mark.parametrize("backend", ["eager", refuse_to_compile])
@pytest.mark.slow
def test_where_compiling_fails_a_run_does_without(tmp_path, monkeypatch, backend):
    """A run that cannot be compiled learns exactly what a plain one does; a compiled one nearly the same.

    The difference comes from the slope of GELU, which the compiler computes in another way.
    """
    data = tmp_path / "data.tsv"
    data.write_text("".join(f"{'good' if i % 2 else 'bad'} film {i}\t{i % 2}\n" for i in range(40)))
    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: plain(model, backend=backend))
    said = Notes()
    run(data, tmp_path / "a", "train.compile=true train.steps=4", on_event=said)
    run(data, tmp_path / "b", "train.compile=false train.steps=4")
    found, reference = weights(tmp_path / "a"), weights(tmp_path / "b")
    if callable(backend):
        assert same(found, reference)
    assert max(worst(found[name], reference[name]) for name in found) < 1e-4
    assert "compiling the model, which takes a moment" in said
    refused = [line for line in said if line.startswith("not compiled, and slower for it: ")]
    assert len(refused) == (backend != "eager") and not any("\n" in line for line in refused)


# Longer runs ------------------------------------------------------------------------------------------------


def test_a_finished_run_made_longer_is_a_run_that_long(text, tmp_path):
    """Bit for bit, where the rate of a step does not depend on the number of steps; otherwise it is said."""
    constant = "train.schedule=constant train.warmup=2 train.ema=0.9"
    run(text, tmp_path / "whole", constant)
    run(text, tmp_path / "part", f"{constant} train.steps=8")
    notes = Notes()
    done = ch.train(resume=tmp_path / "part", settings=["train.steps=12"], on_event=notes)
    assert (done.reason, done.step) == ("done", 12) and "in place of" not in " ".join(notes)
    assert same(weights(tmp_path / "whole" / "last"), weights(tmp_path / "part" / "last"))
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "part"))
    toml = [(tmp_path / name / "train.toml").read_text() for name in ("whole", "part")]
    assert toml[0] == toml[1]
    with pytest.raises(ch.InputError, match=r"train.steps 3 is less than the 12 steps that are done"):
        ch.train(resume=tmp_path / "part", settings={"train.steps": 3})
    assert (tmp_path / "part" / "train.toml").read_text() == toml[0]
    run(text, tmp_path / "cosine", "train.steps=4")
    ch.train(resume=tmp_path / "cosine", settings=["train.steps=6"], on_event=notes)
    assert any("6 steps in place of 4: the cosine rate of steps" in line for line in notes), notes


def test_what_is_divided_by_the_steps_keeps_them_and_normuon_stays_normuon(text, tmp_path):
    out = run(
        text, tmp_path / "run", "train.steps=4 train.optimizer=normuon train.accumulate_schedule=1,2"
    ).folder
    with pytest.raises(ch.ConfigError, match=r"steps 6, and the run began with 4: train.accumulate_schedule"):
        ch.train(resume=out, settings={"train.steps": 6})
    recipe = (out / "train.toml").read_text()
    (out / "train.toml").write_text(recipe.replace('"normuon"', '"muon"'))
    with pytest.raises(ch.CheckpointError, match=r"train.optimizer has changed since"):
        ch.train(resume=out)


@pytest.mark.slow
def test_a_short_run_validates_once_and_keeps_one_optimizer(text, tmp_path):
    """Its folder takes four times the model; five where the best model is not the last."""
    settings = ["model.d_model=64", "model.n_heads=2", "model.n_layers=2", "train.samples=0"]
    seen: list[str] = []
    for steps in (3, 20):
        out = tmp_path / str(steps)
        ch.train(
            text,
            out=out,
            settings=[*settings, "data.batch_size=8", f"train.steps={steps}"],
            on_event=lambda event: seen.append(type(event).__name__),
        )
        assert (seen.count("Validated"), seen.count("Saved")) == (1, 1)
        seen.clear()
        size = sum(path.stat().st_size for path in out.rglob("*.safetensors") if not path.is_symlink())
        assert size < 4.1 * (out / "model.safetensors").stat().st_size
    out = tmp_path / "worse"
    diverging = ["train.steps=3", "train.validate_every=1", "train.lr=0.9", "train.warmup=0"]
    done = ch.train(text, out=out, settings=[*settings, *diverging])
    files = {str(path.relative_to(out)) for path in out.glob("checkpoints/*/training.*")}
    assert files == {"checkpoints/step-3/training.safetensors", "checkpoints/step-3/training.json"}
    assert done.metrics["step"] < 3 and ch.train(resume=out).step == 3


SETTINGS = {
    **{"model.d_model": 8, "model.n_layers": 1, "model.n_heads": 2, "train.steps": 6, "train.save_every": 2},
    **{"train.samples": 0, "train.log_every": 1, "train.validate_every": 6, "train.device": "cpu"},
}


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The checkpoint of step 2 is held up until step 3 is done, and holds the weights of step 2."""
    (tmp_path / "a.txt").write_text("one two three four five\n" * 60)
    real, go_on, events = loop.save_checkpoint, threading.Event(), []

    def held_up(folder: Path, taken: Any, group: Any) -> Path:
        assert taken.state.step != 2 or go_on.wait(60)
        return real(folder, taken, group)

    def on_event(event: object) -> None:
        events.append(event)
        if isinstance(event, Stepped) and event.step == 3:
            go_on.set()

    monkeypatch.setattr(loop, "save_checkpoint", held_up)
    settings = {**SETTINGS, "train.keep_last": 9, "train.schedule": "constant", "train.warmup": 0}
    ch.train(tmp_path / "a.txt", out=tmp_path / "long", settings=settings, on_event=on_event)
    order = [(type(one).__name__, one.step) for one in events if isinstance(one, Saved | Stepped)]
    assert order.index(("Stepped", 3)) < order.index(("Saved", 2)) < order.index(("Saved", 4))
    ch.train(tmp_path / "a.txt", out=tmp_path / "short", settings={**settings, "train.steps": 2})
    short, long = (ch.load(tmp_path / name / "checkpoints" / "step-2").model for name in ("short", "long"))
    assert all(a.equal(b) for a, b in zip(short.parameters(), long.parameters()))


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one two three four five\n" * 60)
    real = loop.save_checkpoint

    def full(folder: Path, taken: Any, group: Any) -> Path:
        if taken.state.step == 4:
            raise CheckpointError("no space left")
        return real(folder, taken, group)

    monkeypatch.setattr(loop, "save_checkpoint", full)
    with pytest.raises(CheckpointError, match="no space left"):
        ch.train(tmp_path / "a.txt", out=tmp_path / "run", settings=SETTINGS)
    found = newest(tmp_path / "run")
    assert found is not None and found.name == "step-2"
