"""What starting costs: help and usage errors need no torch, and public names are imported when first used."""

from __future__ import annotations

import json
import pkgutil
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import clearhead as ch
from clearhead.app import cli
from clearhead.app.views import GROUPS
from tests import fresh

# Command lines, and the libraries that they may import: those of the list of commands none.
LINES = [
    *[(line, []) for line in (["--help"], ["--version"], ["trian"], ["--wrong"], [])],
    *[(line.split(" "), ["tyro"]) for line in (
        "generate DIR --tempreture 1", "classify", "cost gpt2 --length many", "geometry DIR nonsense",
        "tokens ", "check /nowhere", "classify /nowhere text", "lens /nowhere text", "geometry / analogy man",
    )],
    *[([command, "--help"], ["tyro"]) for command in cli.COMMANDS],
]  # fmt: skip
LOADED = """
import contextlib, io, json, sys
from clearhead.app.cli import main
found = []
for line in json.loads(sys.argv[1]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(line)
    heavy = ("torch", "numpy", "tokenizers", "rich", "tyro")
    found.append([name for name in heavy if name in sys.modules])
print(json.dumps(found))
"""


def python(script: str, *arguments: str) -> str:
    """What a new process prints."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_help_and_usage_errors_need_no_library():
    """One process for all of them: what a line has imported is still there at the next."""
    found = json.loads(python(LOADED, json.dumps([line for line, _ in LINES])))
    assert [(line, heavy) for (line, _), heavy in zip(LINES, found, strict=True)] == LINES


def test_help_is_quick():
    """Processor time, with room for a slow machine; benchmarks/run.py startup holds the measured figures."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "clearhead", "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_the_list_of_commands_fits_a_terminal(clearhead):
    out = clearhead("--help").out
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)
    assert [line for line in out.splitlines() if line in GROUPS] == list(GROUPS)
    assert len(cli.COMMANDS) == sum(map(len, GROUPS.values()))
    code, out, err = clearhead()
    assert (code, out) == (2, "") and "generate" in err


@pytest.mark.parametrize("command", ["classify", "embed", "score", "generate", "rerank", "heads", "long"])
def test_files_of_texts_are_data_in_every_command(command, tmp_path, clearhead):
    assert "--data" in clearhead(command, "--help").out
    texts, words = tmp_path / "texts.txt", ["a query"] if command == "rerank" else []
    texts.write_text("a text\n")
    _, _, err = clearhead(command, tmp_path / "nowhere", *words, f"--data {texts}")
    assert "nowhere is not a directory" in err  # it is understood, and the directory is what is wrong


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
def test_names_do_not_depend_on_what_was_imported_before(tmp_path_factory):
    found = fresh.found(tmp_path_factory)
    assert found["train"].startswith("<function") and found["cost"].startswith("<function")
    assert not found["compiler"], "the compiler takes two seconds to load: not before it is used"
    assert found["modules"] == ["clearhead.inside", "clearhead.core"]  # without importing them first


@pytest.mark.slow
def test_an_old_name_warns_once_and_works(tmp_path_factory):
    (warned,) = fresh.found(tmp_path_factory)["warned"]
    assert warned.startswith("DeprecationWarning: ch.Loaded is now ch.Model;")


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(AttributeError, match=r"no attribute 'trian' \(did you mean \"train\"\?\)"):
        _ = ch.trian
    with pytest.raises(ImportError):
        exec("from clearhead import nonsense")


def test_the_types_are_shipped():
    """A wheel takes the whole package folder, so the stub and the marker must lie in it."""
    assert {"__init__.pyi", "py.typed"} <= {path.name for path in Path(ch.__file__).parent.iterdir()}
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/clearhead"]
    assert project["project"]["version"] == ch.__version__
