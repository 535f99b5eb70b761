"""Folders, links and globs that cannot be read: said, never left out; and files that look parallel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clearhead.app import cli
from clearhead.errors import InputError
from clearhead.learn.data.files import RECIPE, expand
from clearhead.learn.data.plan import DataPlan
from clearhead.learn.tasks.table import open_data


@pytest.fixture
def locked(tmp_path, monkeypatch) -> Path:
    """A folder beside others that may not be listed, whoever runs the tests."""
    for name in ("open", "locked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("text")
    real_scandir, real_listdir = os.scandir, os.listdir

    def refuse(path, real):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", lambda path=".": refuse(path, real_scandir))
    monkeypatch.setattr(os, "listdir", lambda path=".": refuse(path, real_listdir))
    return tmp_path / "locked"


@pytest.mark.parametrize("name", ["", "locked", "locked/*.txt", "*", "**/*.txt", "locked/b.txt"])
def test_folders_without_permission(locked, name):
    with pytest.raises(InputError, match=r"locked cannot be read: Permission denied"):
        open_data(DataPlan(paths=(str(locked.parent / name),)))


def test_a_glob_beside_a_locked_folder_reads_on(locked):
    assert expand([str(locked.parent / "op*/*.txt")]) == [locked.parent / "open" / "a.txt"]


def test_runs_and_hidden_files_are_left_out(tmp_path):
    for name in ("b/2.txt", "a/1.txt", ".git/x.txt", "a/.hidden", f"run/{RECIPE}", "run/deep/data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    assert expand([str(tmp_path)]) == [tmp_path / "a" / "1.txt", tmp_path / "b" / "2.txt"]
    assert expand([str(tmp_path / "**")]) == expand([str(tmp_path / "**/*.txt")]) == expand([str(tmp_path)])
    assert expand([str(tmp_path / "run" / "deep" / "*.txt")]) == [tmp_path / "run" / "deep" / "data.txt"]
    assert expand([str(tmp_path / "run")]) == [
        tmp_path / "run" / "deep" / "data.txt",
        tmp_path / "run" / RECIPE,
    ]


@pytest.mark.parametrize("target", ["link", "nowhere"])
@pytest.mark.parametrize("name", ["link", "l*"])
def test_broken_links(tmp_path, target, name):
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(InputError, match=f"link is a broken link: it leads to {target}, which is not there$"):
        expand([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("a.en", "a.de", "a.fr"), "there are 3 of them: name the two that go together"),
        (
            ("a.en", "b.de"),
            "their names differ before the language: if they go together, --set data.format=parallel",
        ),
        (("a.en", "b.en"), None),
        (("a.log", "b.cfg"), None),
    ],
)
def test_files_that_look_parallel_and_are_not_taken_so(tmp_path, names, why):
    for name in names:
        (tmp_path / name).write_text("a line of text\n")
    said = open_data(DataPlan(paths=tuple(str(tmp_path / name) for name in names)), split=False).notes
    assert [line for line in said if "parallel" in line] == (
        [f"not taken as parallel files, because {why}"] if why else []
    )


def test_a_fault_of_the_disk_is_one_line(monkeypatch, capsys):
    def fail() -> None:
        raise PermissionError(13, "Permission denied", "out/log.json")

    monkeypatch.setattr("clearhead.app.commands.models.demo", fail)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "clearhead: out/log.json: Permission denied\n"
