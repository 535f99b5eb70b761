"""The end of a run says what was left out and how to get it."""

from __future__ import annotations

import pathlib
import re

from tests.skipped import GROUPS, summary

HERE = pathlib.Path(__file__).parent


def test_skipped_tests_are_counted_by_group_with_the_way_to_get_them():
    reasons = ["Skipped: chromium is not on this machine"] * 3
    reasons += ["could not import 'peft': No module named 'peft'", "Skipped: no bash"]
    assert summary(reasons) == [
        "    3 the page in a browser: install Chromium (Debian: apt-get install chromium)",
        "    1 other libraries: pip install -e '.[all,dev]' ray",
        "    1 no bash",
    ]


def test_every_group_has_a_test_that_is_skipped_for_it():
    sources = "\n".join(path.read_text() for path in HERE.rglob("*.py") if path.name != "skipped.py")
    calls = "\n".join(re.findall(r"(?:skip|skipif|importorskip)\([^#]*?\n\s*\)|skip\w*\([^\n]*", sources))
    assert [what for pattern, what, _ in GROUPS if not re.search(pattern, calls, re.IGNORECASE)] == []


def test_every_test_that_ci_and_make_name_is_there():
    root = HERE.parent
    numeric = re.search(r"NUMERIC := ((?:.*\\\n)*.*)", (root / "Makefile").read_text())
    named = re.findall(r"tests/[\w/]+\.py", (root / ".ci/run").read_text())
    named += [f"tests/{name}" for name in numeric[1].replace("\\", "").split()] if numeric else []
    assert len(named) > 10
    assert [name for name in named if not (root / name).exists()] == []
