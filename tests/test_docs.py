"""The book: code runs, prints what the page shows and draws its pictures; tables follow the code."""

import codeop
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
from tools import book

import clearhead as ch
from clearhead.hub.registry import ARCHITECTURES

ROOT = book.ROOT
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALONE = [page for page in PAGES if page not in book.TUTORIAL]


def runs(page: pathlib.Path) -> bool:
    """Whether a page has code. "```python no-run" is for what needs a user's files."""
    return any(block.language == "python" and not block.note for block in book.blocks(page))


def shown_as_printed(run: list[book.Printed], share: float = 0.02) -> None:
    for one in run:
        if one.shown is not None and not one.shown.note:
            assert book.agree(one.printed, one.shown.text, share), (
                f"printed:\n{one.printed}shown:\n{one.shown.text}"
            )


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    "page", [page for page in ALONE if runs(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
@pytest.mark.slow
def test_the_code_of_a_page_runs(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with book.working_in(tmp_path):
        shown_as_printed(list(book.run_page(page)), 0.0 if page.stem == "worked-numbers" else 0.02)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.slow
def test_the_tutorial_runs_from_its_first_chapter_to_its_last(tmp_path: pathlib.Path) -> None:
    with book.working_in(tmp_path):
        for page in book.TUTORIAL:
            shown_as_printed(list(book.run_page(page, commands=True)))
            for picture in book.PICTURE.findall(page.read_text()):
                assert (tmp_path / picture).is_file(), f"{page.name} does not draw {picture}"
                assert (page.parent / "images" / picture).is_file()


@pytest.mark.parametrize("page", book.TUTORIAL, ids=lambda page: page.stem)
def test_a_chapter_can_be_pasted_into_the_prompt(page: pathlib.Path) -> None:
    """There an empty line ends an indented block, and nothing else does."""
    for block in book.blocks(page):
        if block.language != "python":
            continue
        typed: list[str] = []
        for line in [*block.text.splitlines(), ""]:
            typed.append(line)
            if codeop.compile_command("\n".join(typed), symbol="single") is not None:
                typed = []
        assert typed == [], f"{page.name}, line {block.line}: not ended"


def test_blocks_are_found_and_outputs_belong_to_the_code_before_them(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```python\na = 1\nprint(a, 2.5)\n```\n\n```text\n1 2.5\n```\n"
        "```python no-run\nb\n```\n```\nc\n```\n"
        "```python\nprint('x')\n```\nwords between\n```text\nnot printed\n```\n"
    )
    run = list(book.run_page(page))
    assert [(one.code.line, one.printed) for one in run] == [(2, "1 2.5\n"), (16, "x\n")]
    assert [one.shown and one.shown.text for one in run] == ["1 2.5\n", None]
    page.write_text(page.read_text().replace("1 2.5\n```\n```python no", "3 2.5\n```\n```python no"))
    assert "\n1 2.5\n" in book.with_outputs(page, list(book.run_page(page)))


@pytest.mark.parametrize(
    ("printed", "shown", "same"),
    [("loss 1.00", "loss 1.01", True), ("loss 1.0", "loss 1.1", False), ("a 1", "b 1", False)],
)
def test_outputs_agree_by_words_and_nearly_by_numbers(printed: str, shown: str, same: bool) -> None:
    assert book.agree(printed, shown) == same


def test_tables_of_the_book_are_those_of_the_code() -> None:
    stale = [page.name for page in PAGES if book.with_tables(page.read_text()) != page.read_text()]
    assert stale == [], "run python tools/book.py"


def test_every_field_and_key_is_explained() -> None:
    from dataclasses import fields

    from tools.book_tables import SECTIONS, config_fields, described
    from tools.config_pictures import FOLDER, PICTURES

    page = (ROOT / "docs" / "config.md").read_text()
    for field in fields(ch.ModelConfig):
        assert config_fields()[field.name], f"{field.name} has no comment in config/fields.py"
        assert f"| `{field.name}` |" in page
    shown = [name for picture in PICTURES.values() for name in picture.shown]
    assert sorted(shown) == sorted(field.name for field in fields(ch.ModelConfig)), "each has one picture"
    for name in PICTURES:  # which stands above the table of its fields
        assert f"(images/config/{name}.png)\n\n<!-- table: config {name} -->" in page
        assert (FOLDER / f"{name}.png").is_file()
    page = (ROOT / "docs" / "recipes.md").read_text()
    for section, cls in SECTIONS.items():
        for field in fields(cls) if section != "model" else ():
            assert described(cls)[field.name], f"[{section}] {field.name} has no comment"
            assert f"| `{field.name}` |" in page


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^::: clearhead\.(\w+)$", pages, re.MULTILINE)
    assert sorted(named) == sorted(ch.__all__)


def test_every_page_is_in_the_site_and_none_twice() -> None:
    listed = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    made = "contributing.md"  # by tools/site.py, of CONTRIBUTING.md
    assert sorted(listed) == sorted([made, *(page for page in pages if not page.startswith("lab/"))])
    lab = (ROOT / "docs" / "lab.md").read_text()  # links the reports
    assert all(f"({page})" in lab for page in pages if page.startswith("lab/"))


def test_the_site_builds_without_warnings(tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra docs is not installed: make docs builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ModelConfig" in (tmp_path / "site" / "reference" / "model.html").read_text()
    contributing = (tmp_path / "site" / "contributing.html").read_text()
    assert 'href="drills/task.patch"' in contributing
    assert (tmp_path / "site" / "drills" / "task.patch").is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_notebook_runs_and_is_stored_without_outputs(
    path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFORT", "0.005")  # of a ladder that takes minutes
    cells = json.loads(path.read_text())["cells"]
    namespace: dict[str, object] = {"__name__": path.stem}
    with book.working_in(tmp_path):
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                assert (cell["outputs"], cell["execution_count"]) == ([], None)
                exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)


def test_the_readme_claims_what_the_results_say() -> None:
    readme, results = (ROOT / "README.md").read_text(), (ROOT / "docs" / "results.md").read_text()
    ratios = re.findall(r"\d\.\d+ ×", readme)
    assert ratios
    for ratio in ratios:
        assert ratio.removesuffix(" ×") in results
    for page in (
        readme,
        *((ROOT / "docs" / name).read_text() for name in ("coming-from.md", "tutorial/8-handing-on.md")),
    ):
        assert f"{len(ARCHITECTURES)} architectures" in page
    assert len(readme.splitlines()) <= 120


def test_version_and_changelog_agree() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == ch.__version__
