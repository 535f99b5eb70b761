"""What starting costs: help and usage errors need no torch, and public names are imported when first used."""

from __future__ import annotations

import pkgutil
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.app import cli
from clearhead.app.commands import GROUPS
from tests import fresh

LIGHT = """
import sys
from clearhead.app.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
heavy = ("torch", "numpy", "tokenizers", "rich", "tyro")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


def loaded(*arguments: str) -> list[str]:
    """The heavy libraries that a command line has imported by its end."""
    command = [sys.executable, "-c", LIGHT.format(arguments=list(arguments))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return eval(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("trian",), ("--wrong",), ()])
def test_the_list_of_commands_needs_no_library(arguments):
    assert loaded(*arguments) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "DIR", "--tempreture", "1"),
        ("classify",),
        ("cost", "gpt2", "--length", "many"),
        ("geometry", "DIR", "nonsense"),
        ("tokens", ""),
        ("check", "/nowhere"),
        ("classify", "/nowhere", "a text"),
        ("lens", "/nowhere", "a text"),
        ("geometry", "/", "analogy", "man"),
    ],
    ids=" ".join,
)
def test_a_usage_error_needs_no_torch(arguments):
    assert loaded(*arguments) == ["tyro"]


def test_the_help_of_a_command_needs_no_torch():
    script = """
import contextlib, io, sys
from clearhead.app.cli import COMMANDS, main
for name in COMMANDS:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([name, "--help"])
    heavy = [library for library in ("torch", "numpy", "tokenizers", "rich") if library in sys.modules]
    assert not heavy, (name, heavy)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_help_is_quick():
    """Processor time, with room for a slow machine; benchmarks/run.py startup holds the measured figures."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "clearhead", "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_the_list_of_commands_fits_a_terminal(capsys):
    cli.main(["--help"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)
    assert [line for line in out.splitlines() if line in GROUPS] == list(GROUPS)
    assert len(cli.COMMANDS) == sum(map(len, GROUPS.values()))


def test_no_command_is_an_error_that_lists_them(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    written = capsys.readouterr()
    assert (stopped.value.code, written.out) == (2, "")
    assert "generate" in written.err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_options_show_what_to_write(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert "{None}" not in out and " STR" not in out
    words = " ".join(out[out.index("show this help") :].replace("│", " ").split())
    assert "(default: None)" not in words and "(default: )" not in words
    if "--device " in words:
        shown = words.split("--device ")[1].split(" --")[0]
        assert shown.endswith("(default: auto)"), "one default of --device everywhere"


@pytest.mark.parametrize("command", ["classify", "embed", "score", "generate", "rerank", "heads", "long"])
def test_files_of_texts_are_data_in_every_command(command, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "--data" in capsys.readouterr().out
    texts, words = tmp_path / "texts.txt", ["a query"] if command == "rerank" else []
    texts.write_text("a text\n")
    with pytest.raises(SystemExit) as stopped:  # it is understood, and the directory is what is wrong
        cli.main([command, str(tmp_path / "nowhere"), *words, "--data", str(texts)])
    assert stopped.value.code == 2 and "nowhere is not a directory" in capsys.readouterr().err


# The public names -----------------------------------------------------------------------------------------


def test_every_public_name_is_there():
    assert ch.__all__ == sorted(ch.__all__) and {*ch.__all__} <= {*dir(ch)}
    for name in ch.__all__:
        assert getattr(ch, name) is not None
    found: dict[str, object] = {}
    exec("from clearhead import *", found)
    assert {*ch.__all__} <= {*found}


def test_no_public_name_is_a_module_too():
    """Else importing the module would put it in the place of the name."""
    assert not {*ch.__all__} & {module.name for module in pkgutil.iter_modules(ch.__path__)}


@pytest.mark.slow
def test_names_do_not_depend_on_what_was_imported_before():
    script = """
import sys
import clearhead.learn.training.run, clearhead.variants.costs, clearhead as ch
print(ch.train, ch.cost, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("<function") == 2
    assert done.stdout.endswith(" False\n"), "the compiler takes two seconds to load: not before it is used"


@pytest.mark.slow
def test_an_old_name_warns_once_and_works(tmp_path_factory):
    (warned,) = fresh.found(tmp_path_factory)["warned"]
    assert warned.startswith("DeprecationWarning: ch.Loaded is now ch.Model;")


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(AttributeError, match=r"no attribute 'trian' \(did you mean \"train\"\?\)"):
        _ = ch.trian
    with pytest.raises(ImportError):
        exec("from clearhead import nonsense")


def test_modules_are_found_without_importing_them_first():
    script = "import clearhead as ch; print(ch.inside.__name__, ch.core.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "clearhead.inside clearhead.core\n"


def test_the_types_are_shipped():
    """A wheel takes the whole package folder, so the stub and the marker must lie in it."""
    assert {"__init__.pyi", "py.typed"} <= {path.name for path in Path(ch.__file__).parent.iterdir()}
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/clearhead"]
    assert project["project"]["version"] == ch.__version__
