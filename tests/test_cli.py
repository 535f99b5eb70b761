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
from clearhead.app.views import ROWS, imported
from clearhead.core.cache import GrowingKeys
from clearhead.inside.pruning import HeadTable
from clearhead.learn.recipe import Recipe, recipe_names
from clearhead.learn.tasks.task import sampled
from clearhead.learn.training import events, loop
from clearhead.learn.training.events import Validated, read_log
from clearhead.learn.training.rehearsal import rehearse
from tests.test_use_commands import byte_tokenizer


def run(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "clearhead.app.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, **options)


def inside(*arguments, capsys):
    """The same without a new process: exit code, stdout, stderr."""
    try:
        cli.main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def folder(tmp_path):
    ch.Model(ch.Transformer(ch.preset("micro-decoder"))).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_examples_and_its_options_are_known(command, capsys):
    code, out, _ = inside(command, "--help", capsys=capsys)
    assert code in (0, None)
    assert f"clearhead {command}" in out.split("For example:")[1]
    listed = set(
        re.findall(r"(?m)^[│ ]*(?:-h, |--data \w+, )?(--[a-z][a-z-]*)", re.sub(r"\x1b\[[0-9;]*m", "", out))
    )
    target = f"clearhead.app.{cli.COMMANDS[command].target}"
    described = command_of(command) if command in ROWS else imported(target)
    assert listed | ({"--data"} if "--data " in out else set()) == {"--help", *cli._options(described)}


@pytest.mark.ledger("I1")
def test_cost_as_json_and_as_a_table(capsys, folder):
    code, out, _ = inside("cost", "gpt2", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["parameters"]["total"] == 124_439_808
    code, out, _ = inside("cost", folder, capsys=capsys)
    assert code == 0
    assert f"{sum(p.numel() for p in ch.load(folder).model.parameters()):,}" in out


def test_cost_of_a_config_file(capsys, tmp_path):
    (tmp_path / "config.json").write_text(ch.preset("nano").to_json())
    code, out, _ = inside("cost", tmp_path / "config.json", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["parameters"]["total"] == ch.cost("nano").parameters.total


@pytest.mark.usefixtures("short_pieces")
def test_check_passes_and_fails(capsys, folder, monkeypatch):
    code, out, _ = inside("check", folder, "--json", capsys=capsys)
    body = json.loads(out)
    assert code == 0
    assert body["passed"]
    assert len(body["checks"]) >= 10
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = inside("check", folder, capsys=capsys)
    head, *lines = out.splitlines()[1:]
    assert head.split() == ["check", "difference", "allowed", "verdict", "ms"]
    assert [line[:42].split("  ")[0] for line in lines[:-1]] == [row["name"] for row in body["checks"]]
    assert max(map(len, lines[:-1])) <= 80  # one line for each row
    right = GrowingKeys.update

    def backwards(self, k, v):  # a cache whose values come back in the wrong order
        k, v = right(self, k, v)
        return k, v.flip(2)

    monkeypatch.setattr(GrowingKeys, "update", backwards)
    code, out, _ = inside("check", folder, "--json", capsys=capsys)
    failed = [row["name"] for row in json.loads(out)["checks"] if not row["passed"]]
    assert code == 1
    assert failed
    assert all("cached" in name for name in failed)
    _, out, _ = inside("check", folder, capsys=capsys)
    said = [line for line in out.splitlines() if "1 token at a time through the cache" in line]
    assert [line.split(":")[0] for line in said] == ["cached = recomputed (growing, 1)"]  # it failed


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_fits_a_terminal_of_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = inside(command, "--help", capsys=capsys)
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith(f"usage: clearhead {command} ")
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.usefixtures("short_pieces")
def test_lists_and_titles_fit_a_terminal_of_80_columns(capsys, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = inside("train", capsys=capsys)[1]
    out += inside("check", folder, capsys=capsys)[1]
    grid = HeadTable("loss increase", ("0", "encoder.11"), np.arange(-16.0, 16.0).reshape(2, 16))
    show_result({}, False, _grid_tables(grid))  # of all heads beside each other it would be 180 columns wide
    out += (numbers := capsys.readouterr().out)
    assert [line for line in out.splitlines() if len(line) > 80] == []
    assert all(f"head {head} " in numbers and f"{head:+.4f} " in numbers for head in range(16))
    made = table(
        "a title that is wider than its table", ("a", "b"), [("1", "2")], "and a caption that is too"
    )
    show_result({}, False, [made])
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("a title that is wider than its table", "and a caption that is too")


@pytest.mark.ledger("L2")
@pytest.mark.usefixtures("short_pieces")
@pytest.mark.slow
def test_check_against_the_reference(capsys, tmp_path):
    sizes = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_positions": 64}
    for name, config in {
        "gpt2": ch.ModelConfig(**sizes, activation="gelu_tanh"),
        "bart": ch.preset("bart-base").replace(**sizes, d_ff=64),
        "mbart": ch.preset("bart-base").replace(**sizes, d_ff=64, norm_position="pre"),
    }.items():
        ch.Model(ch.Transformer(config), special={"bos": 0, "pad": 1, "eos": 2}).save(tmp_path / name)
        code, out, _ = inside("check", tmp_path / name, "--reference", "--json", capsys=capsys)
        rows = {row["name"]: row for row in json.loads(out)["checks"]}
        assert code == 0, rows
        assert rows["clearhead = transformers"]["difference"] <= 1e-4
        assert rows["greedy tokens = transformers"]["difference"] == 0


def test_convert(capsys, folder, tmp_path):
    code, out, _ = inside(
        "convert", folder, tmp_path / "half", "--dtype", "bfloat16", "--shard-size", "20KB", capsys=capsys
    )
    assert code == 0
    assert "saved" in out
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    model = ch.load(tmp_path / "half").model
    assert next(model.parameters()).dtype == torch.bfloat16
    code, _, err = inside("convert", folder, tmp_path / "half", capsys=capsys)
    assert code == 2
    assert "--overwrite" in err


def test_convert_explains_why_nothing_is_exact(capsys, tmp_path):
    ch.Model(ch.Transformer(ch.preset("micro-decoder").replace(positions="alibi", activation="relu2"))).save(
        tmp_path / "own"
    )
    code, out, _ = inside("convert", tmp_path / "own", tmp_path / "out", "--json", capsys=capsys)
    body = json.loads(out)
    assert code == 0
    assert body["architecture"] == "clearhead"
    assert "alibi" in body["note"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cost", "gpt22"], "gpt2"),
        (["cost", "gpt2", "--length", "5000"], "1024"),
        (["check", "/nowhere/at/all"], "directory"),
        (["convert", "MODEL", "OUT", "--shard-size", "many"], "500MB"),
    ],
    ids=["unknown preset", "too long", "no directory", "size"],
)
def test_a_mistake_is_one_line_and_code_2(arguments, words, capsys, folder, tmp_path):
    given = [str(folder) if a == "MODEL" else str(tmp_path / "out") if a == "OUT" else a for a in arguments]
    code, out, err = inside(*given, capsys=capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.slow
def test_a_real_process(folder):
    done = run("cost", folder, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["length"]
    shutil.rmtree(folder)
    done = run("check", folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert run("nonsense").returncode == 2


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.slow
def test_the_tour_does_what_it_says(capsys, tmp_path, monkeypatch):
    for settings in (tour.PROSE, tour.DATES):  # a short tour, of little data
        monkeypatch.setitem(settings, "data.max_examples", 40)
        monkeypatch.setitem(settings, "data.batch_size", 4)
        monkeypatch.setitem(settings, "model.n_layers", 1)
    code, out, _ = inside("demo", "--steps", "12", "--out", str(tmp_path), capsys=capsys)
    assert code == 0
    assert "28 of 28 equal" in out
    assert "the 3rd of May 2011  becomes  " in out
    assert out.count("validation  loss") == 4
    for name in ("writer", "reader"):
        losses = [line["loss"] for line in read_log(tmp_path / name) if line["event"] == "stepped"]
        assert losses[-1] < losses[0]
        assert f"{tmp_path / name}" in out.replace("\n", "")


def test_a_mistyped_command_is_one_line(capsys):
    code, out, said = inside("trian", "my.txt", capsys=capsys)
    assert (code, out, said.count("\n")) == (2, "", 1)
    assert said.startswith('clearhead: no command is called "trian" (did you mean "train"?): ')
    code, out, said = inside("--version", capsys=capsys)
    assert (code, out, said) == (0, f"clearhead {ch.__version__}\n", "")


def test_the_list_of_recipes_is_whole(capsys):
    code, out, _ = inside("train", capsys=capsys)
    assert code == 0 and "name its directory in [model] base" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--temprature", "0.5"], ["--temprature", '"--temperature"']),
        (["eval", "--outptu", "x"], ["--outptu", '"--output"']),
        (["train", "--recpie=char-gpt"], ["--recpie", '"--recipe"']),
        (["cost", "--lenght", "5", "gpt2"], ["--lenght", '"--length"']),
        (["convert", "--overwrit"], ["--overwrit", '"--overwrite"']),
        (["attention", "--qqqqqq"], ["--qqqqqq"]),
    ],
)
def test_a_misspelt_option_is_named_before_what_is_missing(arguments, words, capsys):
    code, out, err = inside(*arguments, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"clearhead: {arguments[0]} has no option")
    for word in words:
        assert word in err


def test_other_mistakes_and_the_help_are_shown_once(capsys):
    code, out, err = inside("generate", capsys=capsys)
    assert code == 2 and err.count("DIR") == 1
    code, out, err = inside("eval", "a", "b", "--beams", "two", capsys=capsys)
    assert code == 2 and err.count("Value error") == 1
    code, out, _ = inside("cost", "--help", capsys=capsys)
    assert code == 0 and out.count("usage: clearhead cost") == 1
    code, out, _ = inside("cost", "gpt2", "--batch", 2, "--json", capsys=capsys)
    assert code == 0 and out.count("\n") == 1 and json.loads(out)["batch"] == 2


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


def test_convert_takes_a_tokenizer_from_elsewhere(capsys, folder, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = ["--tokenizer", tmp_path / "tokenizer.json"]
    code, _, _ = inside("convert", folder, tmp_path / "out", *flags, capsys=capsys)
    assert code == 0
    assert ch.load(tmp_path / "out").encode(["abc"]) == [tokenizer.encode("abc").ids]


def test_texts_that_are_cut_are_said_once(capsys, tmp_path):
    config = ch.preset("micro-encoder").replace(
        head="classifier", n_classes=2, vocab_size=257, max_positions=8
    )
    ch.Model(ch.Transformer(config), byte_tokenizer(), special={"pad": 0}).save(tmp_path / "m")
    (tmp_path / "in.txt").write_text("short\n" + "a text that is too long\n" * 3)
    flags = ["--file", tmp_path / "in.txt", "--batch-size", 1]
    for command in ("classify", "embed"):
        code, out, err = inside(command, tmp_path / "m", *flags, capsys=capsys)
        assert (code, len(out.splitlines())) == (0, 4)
        assert err.startswith("warning: a text is longer than the 8 tokens that the model takes: ")
        assert err.count("\n") == 1
        assert inside(command, tmp_path / "m", "short", capsys=capsys)[2] == ""
    with pytest.warns(UserWarning, match="longer than the 8 tokens"):
        ch.load(tmp_path / "m").classify(("a pair of", "texts"))


def test_a_dry_run_decides_all_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"a {word} film {number}\t{word}\n" for number in range(30) for word in ("good", "bad"))
    (tmp_path / "r.tsv").write_text(rows)
    flags = ["train", "r.tsv", "--set", "train.steps=3", "--set", "train.device=cpu"]
    code, out, err = inside(*flags, "--dry-run", "--json", capsys=capsys)
    assert code == 0 and out.count("\n") == 1 and "2 classes: bad, good" in err
    assert [path.name for path in tmp_path.iterdir()] == ["r.tsv"]
    found = json.loads(out)
    assert inside(*flags, "--out", "run", capsys=capsys)[0] == 0
    recipe = ch.read_recipe(tmp_path / "run" / "train.toml")
    decided = found["recipe"]
    assert decided == json.loads(json.dumps(dataclasses.asdict(recipe)))
    m = ch.load(tmp_path / "run")
    assert found["parameters"] == sum(one.numel() for one in m.model.parameters())
    assert (found["task"], found["steps"], found["folder"]) == ("classify", 3, "runs/r")
    code, out, _ = inside(*flags, "--dry-run", capsys=capsys)
    assert code == 0 and f"parameters: {found['parameters']:,}" in out and "[train]" in out
    disk, ready = out.splitlines()[-2:]
    assert disk.startswith("disk: ") and " at most, and " in disk
    ready_line = f"ready: 3 steps of classify with {found['parameters']:,} parameters on cpu"
    assert ready == f"{ready_line}; nothing was trained or written"


@pytest.mark.parametrize("recipe", list(recipe_names()))
def test_the_keys_of_a_recipe_are_shown(recipe, capsys):
    code, out, _ = inside("train", "--recipe", recipe, "--show", "--set", "train.seed=7", capsys=capsys)
    shown = Recipe.from_tables(tomllib.loads(out))
    assert code == 0 and shown == ch.read_recipe(recipe, ["train.seed=7"])


@pytest.mark.parametrize(
    "more",
    [(), ("train.ema=0.9",), ("train.optimizer=muon", "train.average=2"), ("train.keep_last=3",)],
    ids=["plain", "ema", "muon, averaged", "three kept"],
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
