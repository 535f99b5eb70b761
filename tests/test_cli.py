"""The command line as a user meets it: help, JSON, exit codes, one line for a mistake."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.app import cli, tour
from clearhead.app.commands.common import command_of, show_result
from clearhead.app.commands.parts import _grid_tables
from clearhead.app.report import table
from clearhead.core.cache import LayerKV
from clearhead.inside.pruning import HeadTable
from clearhead.learn.recipe import Recipe, recipe_names
from clearhead.learn.tasks.task import sampled
from clearhead.learn.training import events, loop
from clearhead.learn.training.events import Validated, read_log
from clearhead.learn.training.run import rehearse
from tests.harness import byte_tokenizer


def run(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "clearhead.app.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, **options)


@pytest.fixture
def folder(tmp_path):
    ch.Model(ch.Transformer(ch.preset("micro-decoder"))).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_help_of_a_command(command, clearhead, monkeypatch):
    """It has examples, fits 80 columns, lists the options that there are, and shows what to write."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = clearhead(command, "--help")
    assert code == 0 and out.startswith(f"usage: clearhead {command} ") and out.count("usage:") == 1
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert f"clearhead {command}" in out.split("For example:")[1]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    rows = [line.strip("│ ") for line in plain.splitlines()]
    first = [re.split(r"\s{2,}", row)[0] for row in rows if row.startswith("-")]
    listed = {name for column in first for name in re.findall(r"--[a-z][a-z-]*", column)}
    assert listed == {"--help", *cli._options(command_of(command))}
    assert "{None}" not in out and " STR" not in out
    words = " ".join(out[out.index("show this help") :].replace("│", " ").split())
    assert "(default: None)" not in words and "(default: )" not in words
    if "--device " in words:
        shown = words.split("--device ")[1].split(" --")[0]
        assert shown.endswith("(default: auto)"), "one default of --device everywhere"


@pytest.mark.ledger("I1")
def test_cost_as_json_and_as_a_table(clearhead, folder, tmp_path):
    found = clearhead("cost", "gpt2", "--json --batch 2").json
    assert (found["parameters"]["total"], found["batch"]) == (124_439_808, 2)
    code, out, _ = clearhead("cost", folder)
    assert code == 0
    assert f"{sum(p.numel() for p in ch.load(folder).model.parameters()):,}" in out
    (tmp_path / "config.json").write_text(ch.preset("nano").to_json())
    found = clearhead("cost", tmp_path / "config.json", "--json").json
    assert found["parameters"]["total"] == ch.cost("nano").parameters.total


@pytest.mark.usefixtures("short_pieces")
def test_check_passes_and_fails(clearhead, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    body = clearhead("check", folder, "--json").json
    assert body["passed"] and len(body["checks"]) >= 10
    code, out, _ = clearhead("check", folder)
    head, *lines = out.splitlines()[1:]
    assert code == 0 and head.split() == ["check", "difference", "allowed", "verdict", "ms"]
    assert [line[:42].split("  ")[0] for line in lines[:-1]] == [row["name"] for row in body["checks"]]
    assert max(map(len, out.splitlines())) <= 80  # one line for each row
    right = LayerKV.update

    def backwards(self, k, v):  # a cache whose values come back in the wrong order
        k, v = right(self, k, v)
        return k, v.flip(2)

    monkeypatch.setattr(LayerKV, "update", backwards)
    ran = clearhead("check", folder, "--json")
    failed = [row["name"] for row in ran.json["checks"] if not row["passed"]]
    assert ran.code == 1 and failed and all("cached" in name for name in failed)
    out = clearhead("check", folder).out
    said = [line for line in out.splitlines() if "1 token at a time through the cache" in line]
    assert [line.split(":")[0] for line in said] == ["cached = recomputed (growing, 1)"]  # it failed


def test_lists_and_titles_fit_a_terminal_of_80_columns(clearhead, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = clearhead("train").out
    assert "name its directory in [model] base" in out  # the list of recipes is whole
    grid = HeadTable("loss increase", ("0", "encoder.11"), np.arange(-16.0, 16.0).reshape(2, 16))
    show_result({}, False, _grid_tables(grid))  # of all heads beside each other it would be 180 columns wide
    out += (numbers := capsys.readouterr().out)
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert all(f"head {head} " in numbers and f"{head:+.4f} " in numbers for head in range(16))
    title, caption = "a title that is wider than its table", "and a caption that is too"
    show_result({}, False, [table(title, ("a", "b"), [("1", "2")], caption)])
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == (title, caption)


@pytest.mark.ledger("L2")
@pytest.mark.usefixtures("short_pieces")
@pytest.mark.slow
def test_check_against_the_reference(clearhead, tmp_path):
    sizes = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_positions": 64}
    for name, config in {
        "gpt2": ch.ModelConfig(**sizes, activation="gelu_tanh"),
        "bart": ch.preset("bart-base").replace(**sizes, d_ff=64),
        "mbart": ch.preset("bart-base").replace(**sizes, d_ff=64, norm_position="pre"),
    }.items():
        ch.Model(ch.Transformer(config), special={"bos": 0, "pad": 1, "eos": 2}).save(tmp_path / name)
        ran = clearhead("check", tmp_path / name, "--reference --json")
        rows = {row["name"]: row for row in ran.json["checks"]}
        assert ran.code == 0, rows
        assert rows["clearhead = transformers"]["difference"] <= 1e-4
        assert rows["greedy tokens = transformers"]["difference"] == 0


def test_convert(clearhead, folder, tmp_path):
    code, out, _ = clearhead("convert", folder, tmp_path / "half", "--dtype bfloat16 --shard-size 20KB")
    assert code == 0 and "saved" in out
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    assert next(ch.load(tmp_path / "half").model.parameters()).dtype == torch.bfloat16
    clearhead.refuses("--overwrite", "convert", folder, tmp_path / "half")
    tokenizer = byte_tokenizer()  # one from elsewhere
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert clearhead("convert", folder, tmp_path / "out", f"--tokenizer {tmp_path}/tokenizer.json").code == 0
    assert ch.load(tmp_path / "out").encode(["abc"]) == [tokenizer.encode("abc").ids]
    own = ch.preset("micro-decoder").replace(positions="alibi", activation="relu2")
    ch.Model(ch.Transformer(own)).save(tmp_path / "own")
    body = clearhead("convert", tmp_path / "own", tmp_path / "kept", "--json").json
    assert body["architecture"] == "clearhead" and "alibi" in body["note"]  # why nothing is exact


MISTAKES = {  # what is said of a command line
    "gpt2": ("cost", "gpt22"),
    "1024": ("cost", "gpt2", "--length 5000"),
    "directory": ("check", "/nowhere/at/all"),
    "500MB": ("convert", "MODEL", "OUT", "--shard-size many"),
    'no command is called "trian" (did you mean "train"?): ': ("trian", "my.txt"),
    'generate has no option "--temprature" (did you mean "--temperature"?)': ("generate", "--temprature 0.5"),
    'eval has no option "--outptu" (did you mean "--output"?)': ("eval", "--outptu x"),
    'train has no option "--recpie" (did you mean "--recipe"?)': ("train", "--recpie=char-gpt"),
    'cost has no option "--lenght" (did you mean "--length"?)': ("cost", "--lenght 5", "gpt2"),
    'convert has no option "--overwrit" (did you mean "--overwrite"?)': ("convert", "--overwrit"),
    'attention has no option "--qqqqqq"': ("attention", "--qqqqqq"),
    '--beams "two" is not allowed: it must be a whole number': ("eval", "a", "b", "--beams two"),
    '--length "abc" is not allowed: it must be a whole number': ("cost", "gpt2", "--length abc"),
    '--temperature "x" is not allowed: it must be a number': ("generate", "a", "b", "--temperature x"),
    '--bits "3" is not known: choose from 4, 8': ("quantize", "a", "b", "--bits 3"),
    "align needs DATA and --out PATH: clearhead align --help says more": ("align", "a"),
    "generate needs DIR: clearhead generate --help": ("generate",),
    "--set needs a value: clearhead train --help": ("train", "--set"),
    "generate does not take c, -x: clearhead generate --help lists": ("generate", "a", "b", "c", "-x"),
}


@pytest.mark.parametrize(("says", "arguments"), MISTAKES.items(), ids=str)
def test_a_mistake_is_one_line_and_code_2(says, arguments, clearhead, folder, tmp_path):
    places = {"MODEL": folder, "OUT": tmp_path / "out"}
    clearhead.refuses(says, *(places.get(argument, argument) for argument in arguments))


@pytest.mark.slow
def test_a_real_process(folder):
    done = run("cost", folder, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["length"]
    shutil.rmtree(folder)
    done = run("check", folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.slow
def test_the_tour_does_what_it_says(clearhead, tmp_path, monkeypatch):
    for settings in (tour.PROSE, tour.DATES):  # a short tour, of little data
        monkeypatch.setitem(settings, "data.max_examples", 40)
        monkeypatch.setitem(settings, "data.batch_size", 4)
        monkeypatch.setitem(settings, "model.n_layers", 1)
    code, out, _ = clearhead("demo", f"--steps 12 --out {tmp_path}")
    assert code == 0
    assert "37 of 37 equal" in out
    assert "the 3rd of May 2011  becomes  " in out
    assert out.count("validation  loss") == 4
    for name in ("writer", "reader"):
        losses = [line["loss"] for line in read_log(tmp_path / name) if line["event"] == "stepped"]
        assert losses[-1] < losses[0]
        assert f"{tmp_path / name}" in out.replace("\n", "")


def test_the_version(clearhead):
    assert clearhead("--version") == (0, f"clearhead {ch.__version__}\n", "")


def test_completion_in_a_real_shell(tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    script = """
        clearhead() { "$PYTHON" -m clearhead.app.cli "$@"; }
        eval "$(clearhead --completion)"
        COMP_WORDS=(clearhead ge); COMP_CWORD=1; _clearhead; echo "${COMPREPLY[@]}"
        COMP_WORDS=(clearhead generate --te); COMP_CWORD=2; _clearhead; echo "${COMPREPLY[@]}"
        COMP_WORDS=(clearhead cost conf); COMP_CWORD=2; _clearhead; echo "${COMPREPLY[@]}"
    """
    (tmp_path / "config.json").touch()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    found = subprocess.run(
        [bash, "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert found.stdout.splitlines() == ["generate geometry", "--temperature", "config.json"]


def test_texts_that_are_cut_are_said_once(clearhead, tmp_path):
    config = ch.preset("micro-encoder").replace(
        head="classifier", n_classes=2, vocab_size=257, max_positions=8
    )
    ch.Model(ch.Transformer(config), byte_tokenizer(), special={"pad": 0}).save(tmp_path / "m")
    (tmp_path / "in.txt").write_text("short\n" + "a text that is too long\n" * 3)
    for command in ("classify", "embed"):
        code, out, err = clearhead(command, tmp_path / "m", f"--file {tmp_path}/in.txt --batch-size 1")
        assert (code, len(out.splitlines())) == (0, 4)
        assert err.startswith("warning: a text is longer than the 8 tokens that the model takes: ")
        assert err.count("\n") == 1
        assert clearhead(command, tmp_path / "m", "short").err == ""
    with pytest.warns(UserWarning, match="longer than the 8 tokens"):
        ch.load(tmp_path / "m").classify(("a pair of", "texts"))


def test_a_dry_run_decides_all_and_writes_nothing(clearhead, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"a {word} film {number}\t{word}\n" for number in range(30) for word in ("good", "bad"))
    (tmp_path / "r.tsv").write_text(rows)
    flags = ["train", "r.tsv", "--set train.steps=3 --set train.device=cpu"]
    code, out, err = clearhead(*flags, "--dry-run --json")
    assert code == 0 and out.count("\n") == 1 and "2 classes: bad, good" in err
    assert [path.name for path in tmp_path.iterdir()] == ["r.tsv"]
    found = json.loads(out)
    assert clearhead(*flags, "--out run").code == 0
    recipe = ch.read_recipe(tmp_path / "run" / "train.toml")
    decided = found["recipe"]
    assert decided == json.loads(json.dumps(dataclasses.asdict(recipe)))
    m = ch.load(tmp_path / "run")
    assert found["parameters"] == sum(parameter.numel() for parameter in m.model.parameters())
    assert (found["task"], found["steps"], found["folder"]) == ("classify", 3, "runs/r")
    code, out, _ = clearhead(*flags, "--dry-run")
    assert code == 0 and f"parameters: {found['parameters']:,}" in out and "[train]" in out
    disk, ready = out.splitlines()[-2:]
    assert disk.startswith("disk: ") and " at most, and " in disk
    ready_line = f"ready: 3 steps of classify with {found['parameters']:,} parameters on cpu"
    assert ready == f"{ready_line}; nothing was trained or written"


@pytest.mark.parametrize("recipe", list(recipe_names()))
def test_the_keys_of_a_recipe_are_shown(recipe, clearhead):
    code, out, _ = clearhead("train", f"--recipe {recipe} --show --set train.seed=7")
    shown = Recipe.from_tables(tomllib.loads(out))
    assert code == 0 and shown == ch.read_recipe(recipe, ["train.seed=7"])


@pytest.mark.parametrize(
    "more",
    [("train.ema=0.9", "train.keep_last=3"), ("train.optimizer=muon", "train.average=2")],
    ids=["ema, three kept", "muon, averaged"],
)
def test_a_run_takes_no_more_disk_than_was_said_and_not_much_less(tmp_path, monkeypatch, more):
    """Looked at when a checkpoint was written and none removed yet, and at the end."""
    (tmp_path / "a.txt").write_text("some words of a text that is read again and again\n" * 100)
    sizes = ["model.d_model=160", "model.n_layers=2", "model.n_heads=2", "train.steps=9", "train.device=cpu"]
    settings = [*sizes, "train.save_every=2", "train.validate_every=3", "train.samples=0", *more]
    said = rehearse(tmp_path / "a.txt", out=tmp_path / "run", settings=settings).sizes
    held, tidy = [], loop.tidy

    def look(*given) -> None:
        held.append(sum(path.lstat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()))
        if given:
            tidy(*given)

    monkeypatch.setattr(loop, "tidy", look)
    ch.train(tmp_path / "a.txt", out=tmp_path / "run", settings=settings)
    look()
    assert 0.6 * said["bytes on disk, at most"] < max(held) <= said["bytes on disk, at most"]
    assert said["bytes free there"] > 0


def test_a_step_is_told_in_the_words_of_the_field(capsys):
    from clearhead.app.commands.train import Watcher

    step = events.Stepped(1, 9, 2.5, 1e-3, 0.5, 1234.0, 1.0, 8.0, 2**30)
    for task, unit in (("lm", "tok/s"), ("image", "pictures/s")):
        watcher = Watcher()
        watcher(events.Started(Path("run"), task, 10, 10, 9, 0, "cpu"))
        watcher(step)
        line = capsys.readouterr().err.splitlines()[-1]
        assert "loss 2.5000  lr 1.00e-03  grad norm 0.50  1,234 " + unit in line


def test_the_prediction_of_a_sample_is_never_cut(capsys):
    from clearhead.app.commands.train import Watcher

    text, said, wanted = "word " * 100, "label " * 40, "truth " * 100
    watcher = Watcher()
    watcher(Validated(1, {"loss": 1.0}, True, (sampled(text, said, wanted), f"{text}\n{said}")))
    err = capsys.readouterr().err
    assert f"word… -> {said}  (truth" in err and f"{text}⏎{said}" in err
    assert text not in err.splitlines()[1]
