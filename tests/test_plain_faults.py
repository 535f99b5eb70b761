"""Tell a user's fault in one clear line: outputs that are inputs, unknown tokens, absurd sizes, stops."""

from __future__ import annotations

import os
import threading

import pytest

import clearhead as ch
from clearhead.app.cli import main
from clearhead.app.commands.common import writing
from clearhead.errors import ConfigError
from clearhead.learn.recipe import Recipe
from clearhead.learn.training.build import build
from tests.harness import Notes, split
from tests.test_tasks import saved
from tests.training.test_refusals import words

TINY = split("model.d_model=16 model.n_layers=1 model.n_heads=2 train.steps=2 train.device=cpu")


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit, match="2"):
        main([*map(str, arguments)])
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


# Output -----------------------------------------------------------------------------------------------------


def test_an_output_that_is_the_input_is_refused(tmp_path, capsys):
    model = saved(tmp_path / "model", "BertForSequenceClassification", num_labels=2)
    data = tmp_path / "data.tsv"
    data.write_text("".join(f"rain\t{number % 2}\n" for number in range(8)))
    before = data.read_text()
    (tmp_path / "link.tsv").symlink_to("data.tsv")
    os.link(data, tmp_path / "hard.tsv")
    capsys.readouterr()
    for name in ("data.tsv", "link.tsv", "hard.tsv"):
        assert "is the file that is read" in refused(capsys, "eval", model, data, "--output", tmp_path / name)
        assert "is the file that is read" in refused(
            capsys, "classify", model, "--file", data, "--output", tmp_path / name
        )
    assert data.read_text() == before


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to("real")
    for text in ("first", "second"):  # the file is not there, then it is
        with writing(tmp_path / "link") as write:
            write(text)
        assert (tmp_path / "real").read_text() == f"{text}\n"
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
        and (tmp_path / "link").is_symlink()
    )


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    with writing(pipe) as write:
        write("a line")
    reader.join(timeout=10)
    assert got == ["a line\n"] and pipe.is_fifo()


# Unknown tokens ---------------------------------------------------------------------------------------------


def test_unknown_tokens_are_said_and_leave_no_bits_per_byte(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five six seven eight\n" * 40)
    (tmp_path / "greek.txt").write_text("αβγδ εζηθ ικλμ\n" * 40)
    said = Notes()
    settings = [*TINY, "tokens.kind=char", f"data.validation={tmp_path}/greek.txt"]
    made = ch.train(tmp_path / "text.txt", out=tmp_path / "char", settings=settings, on_event=said)
    assert [line for line in said if "unknown to the tokenizer" in line and "validation: " in line]
    assert not [line for line in said if "unknown to the tokenizer" in line and "train: " in line]
    known, unknown = (ch.evaluate(made.model, tmp_path / name) for name in ("text.txt", "greek.txt"))
    assert "bits_per_byte" in known.metrics and not [line for line in known.notes if "unknown" in line]
    assert "bits_per_byte" not in unknown.metrics
    assert "80.0% of the tokens are unknown to the tokenizer" in " ".join(unknown.notes)
    assert "no bits per byte: 480 of 600 tokens are unknown" in " ".join(unknown.notes)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_bytes_spell_everything(kind, tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five six seven eight\n" * 40)
    (tmp_path / "greek.txt").write_text("αβγδ εζηθ ικλμ\n" * 40)
    made = ch.train(tmp_path / "text.txt", out=tmp_path / "run", settings=[*TINY, f"tokens.kind={kind}"])
    found = ch.evaluate(made.model, tmp_path / "greek.txt")
    assert "bits_per_byte" in found.metrics and not [line for line in found.notes if "unknown" in line]


# Sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            {"d_model": 1_000_000, "n_heads": 1000},
            r"the model has 48,000,\d+,\d+,\d+ parameters, training it takes 768,\d+ GB, and this",
        ),
        ({"n_layers": 100_000}, "n_layers 100,000 is more than any model has: 10,000 is the most"),
        (
            {"d_model": 10**9, "n_heads": 7},
            "d_model 1,000,000,000 is more than any model has: 16,777,216 is the most",
        ),
        ({"init_std": -1.0}, "init_std -1.0 must be 0 or more"),
    ],
)
def test_an_absurd_size_is_refused_at_once(model, line):
    with pytest.raises(ConfigError, match=line):
        build(Recipe(model=model), "lm", words(13), {})


# Folders and texts ------------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_names_the_way_on(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "train.toml").write_text("")
    assert f"the run in {run} is not finished: go on with clearhead train --resume {run}" in refused(
        capsys, "generate", run, "a"
    )
    (run / "last").symlink_to("checkpoints/step-1")
    assert f"is not finished: use {run / 'last'}, or go on with" in refused(capsys, "generate", run, "a")


def test_a_name_of_the_hub_is_told_how_to_be_fetched(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "hf download some/model --local-dir DIR" in refused(capsys, "generate", "some/model", "a")


def test_an_empty_text_has_no_tokens(capsys):
    assert "the text is empty" in refused(capsys, "tokens", "")
