"""The committed ledger names the same rows as the project's own, and tests name no row that is not there."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("ledger_tool", ROOT / "tools" / "ledger.py")
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


def ids(path: pathlib.Path) -> list[str]:
    return [row for rows in tool.sections(path.read_text()).values() for row in rows]


def test_the_committed_ledger_has_every_row(shared: pathlib.Path) -> None:
    if not (shared / "ledger.md").is_file():
        pytest.skip("no ledger.md in the shared folder")
    assert ids(ROOT / "docs" / "ledger.md") == ids(shared / "ledger.md")


def test_tests_name_known_rows_only() -> None:
    assert set(tool.coverage(ROOT / "tests")) <= set(ids(ROOT / "docs" / "ledger.md"))


def test_rows_are_found_in_marks_and_comments() -> None:
    # In capitals, so that this file itself names no row.
    source = (
        '@pytest.mark.LEDGER("C4", "M5")\npytestmark = pytest.mark.LEDGER(\n    "H10",\n)\n'
        'x = 1  # LEDGER: A1, B2\ny = "K1"\n'
    )
    assert tool.rows_named(source.replace("LEDGER", "ledger")) == {"C4", "M5", "H10", "A1", "B2"}
