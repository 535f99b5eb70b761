"""Every python block of the docs runs: in order, in one namespace for each page."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# "```python no-run" is for what needs a user's files.
BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def blocks(page: pathlib.Path) -> list[tuple[int, str]]:
    """The code of each block and the line on which it begins."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in BLOCK.finditer(text)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_code_of_a_page_runs(
    page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for line, code in blocks(page):
        # The empty lines make a traceback point into the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_blocks_are_found_and_no_run_is_left_out(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```python\na = 1\n```\n```python no-run\nb = 2\n```\n```\nc = 3\n```\n```python\nd = 4\n```\n"
    )
    assert blocks(page) == [(2, "a = 1\n"), (11, "d = 4\n")]
