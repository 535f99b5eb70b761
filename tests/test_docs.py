"""The book: code runs, prints what the page shows and draws its pictures; tables follow the code.

Every benchmark that a page names is there, and so is every row of the ledger that a test names.
"""

import ast
import codeop
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
from benchmarks.run import CASES

import clearhead as ch
from clearhead.hub.registry import ARCHITECTURES
from tools import book, claims, ledger, notebooks

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
        run = list(book.run_page(page))
        assert run, "a page with code runs some"
        shown_as_printed(run, 0.0 if page.stem == "worked-numbers" else 0.02)


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
    page = (ROOT / "docs" / "reference" / "recipes.md").read_text()
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


def anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown's table of contents makes them."""
    prose = re.sub(r"^```.*?^```[ \t]*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"[^\w\s-]", "", title) for title in re.findall(r"^#+ (.*)$", prose, re.MULTILINE))
    return {re.sub(r"[-\s]+", "-", title.strip().lower()) for title in titles}


def test_links_between_pages_lead_somewhere() -> None:
    """To a file that is there, and to one of its headings."""
    linked = [*PAGES, ROOT / "CONTRIBUTING.md"]
    for page in linked:
        prose = re.sub(r"^```.*?^```[ \t]*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", prose):
            path, _, anchor = link.partition("#")
            target = page if not path else page.parent / path
            if "://" in link or path == "contributing.md":
                continue
            assert target.exists(), f"{page.name} links {link}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{page.name} links {link}"


def test_the_site_builds_without_warnings(tmp_path: pathlib.Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra docs is not installed: make docs builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ModelConfig" in (tmp_path / "site" / "reference" / "api.html").read_text()
    contributing = (tmp_path / "site" / "contributing.html").read_text()
    assert 'href="drills/task.patch"' in contributing
    assert (tmp_path / "site" / "drills" / "task.patch").is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.slow
def test_a_notebook_runs_and_is_stored_without_outputs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("EFFORT", "0.005")  # of a ladder that takes minutes
    cells = json.loads(path.read_text())["cells"]
    namespace: dict[str, object] = {"__name__": path.stem}
    with book.working_in(tmp_path):
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                assert (cell["outputs"], cell["execution_count"]) == ([], None)
                exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)


@pytest.mark.parametrize("name", notebooks.shown())
def test_the_site_shows_each_notebook_as_it_is_with_its_outputs(name):
    assert notebooks.shown_code(name) == [source for kind, source in notebooks.cells(name) if kind == "code"]
    page = (notebooks.PAGES / f"{name}.md").read_text()
    assert all(source in page for kind, source in notebooks.cells(name)[1:] if kind == "markdown")
    assert notebooks.OUTPUT in page


USER_PAGES = [page for page in PAGES if page.parent.name != "decisions"]  # those are dated notes


def test_numbers_of_pages_are_those_of_records() -> None:
    """Tables that name a record hold its numbers; a paragraph that states a speed names where it is from."""
    for page in USER_PAGES:
        text = page.read_text()
        assert claims.without_record(text) == [], page.name
        for words, named, lacking in claims.measured(text):
            assert named and not lacking, f'{page.name}, "{words}": {lacking or "names no record"}'


def test_a_number_that_its_record_does_not_hold_is_found() -> None:
    page = (
        "| workload | clearhead | compared with | record |\n| --- | --- | --- | --- |\n"
        "| decoding | 56.5 / 178.4 tok/s | transformers 2.50 × | `benchmarks/results/cpu_decode.json` |\n"
    )
    assert claims.without_record(page) == []
    assert len(claims.without_record(page.replace("56.5", "57.5").replace("2.50", "2.90"))) == 2
    assert list(claims.measured("It is 3.1 × as fast.")) == [("It is 3.1 × as fast.", False, [])]


def test_counts_of_the_readme_and_of_pages_are_those_of_the_code() -> None:
    readme = (ROOT / "README.md").read_text()
    names = ("index.md", "faq.md", "coming-from.md", "models.md", "tutorial/9-sharing.md")
    for page in (readme, *((ROOT / "docs" / name).read_text() for name in names)):
        assert f"{len(ARCHITECTURES)} architectures" in page
    assert len(readme.splitlines()) <= 110
    rows = list(claims.rows(readme))
    assert len(rows) >= 6 and {"Arm", "Xeon"} <= set(re.findall(r"Arm|Xeon", "".join(row[0] for row in rows)))


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path: pathlib.Path) -> None:
    """The commands of README and quickstart are the same; here with fewer steps, and the page as a file."""
    starts = [
        next(block.text for block in book.blocks(page) if "--recipe char-gpt-cpu" in block.text)
        for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
    ]
    first, second = ([line.split("  #")[0].strip() for line in start.splitlines()] for start in starts)
    assert first == second
    short = {
        "train": " --set train.steps=3 --set data.max_examples=20 --set train.samples=0",
        "explore": " --text 'Return the' --export page.html",
    }
    with book.working_in(tmp_path):
        for line in first:
            book.run_commands(line + short.get(line.split()[1], ""))
        assert "<script" in (tmp_path / "page.html").read_text()


def test_every_option_name_and_key_stands_on_one_reference_page() -> None:
    """Options of commands on the CLI reference, public names on the API reference, keys on theirs."""
    from dataclasses import fields

    from tools.book_reference import flags
    from tools.book_tables import SECTIONS

    from clearhead.app.commands.common import command_of
    from clearhead.app.views import COMMANDS

    names = (
        "reference/cli.md",
        "reference/api.md",
        "reference/recipes.md",
        "config.md",
        "attention.md",
        "models.md",
    )
    pages = {name: (ROOT / "docs" / name).read_text() for name in names}

    def on(pattern: str) -> list[str]:
        return [name for name, page in pages.items() if re.search(pattern, page, re.MULTILINE)]

    for name in COMMANDS:
        assert on(f"^### clearhead {name}$") == ["reference/cli.md"]
        section = pages["reference/cli.md"].split(f"### clearhead {name}\n")[1].split("\n### ")[0]
        for flag in flags(command_of(name)):
            shown = flag.names[0].replace("|", "\\|")
            assert f"\n| `{shown}`" in section, flag
            assert flag.positional or on(rf"^\| `{flag.names[0]}`") == ["reference/cli.md"]
    for name in ch.__all__:
        assert on(rf"^::: clearhead\.{name}$") == ["reference/api.md"]
    for section, cls in SECTIONS.items():
        stated = pages["config.md" if section == "model" else "reference/recipes.md"]
        for field in fields(cls) if section != "model" else ():
            table = stated.split(f"<!-- table: recipe {section} -->")[1].split("<!-- end -->")[0]
            assert table.count(f"| `{field.name}` |") == 1


def test_version_and_changelog_agree() -> None:
    newest = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == ch.__version__


# Benchmarks, and the ledger ---------------------------------------------------------------------------------


def test_cases_and_the_commands_of_pages_are_there():
    for name, target in CASES.items():
        module, function = target.split(":")
        tree = ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
    pages = [*ROOT.glob("*.md"), ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"benchmarks/run\.py\s+(\w+)", page.read_text())}
    assert len(named) > 40
    assert named <= CASES.keys()
    assert not [
        page.name for page in pages if re.search(r"python benchmarks/(?!run\.py)\w+\.py", page.read_text())
    ]


def test_an_unknown_case_lists_those_that_are_there():
    ended = subprocess.run(
        [sys.executable, "benchmarks/run.py", "none"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert 'no benchmark is called "none"' in ended.stderr and "gpu_decode" in ended.stdout


def ids(path: pathlib.Path) -> list[str]:
    return [row for rows in ledger.sections(path.read_text()).values() for row in rows]


def test_the_committed_ledger_has_every_row(shared: pathlib.Path) -> None:
    if not (shared / "ledger.md").is_file():
        pytest.skip("no ledger.md in the shared folder")
    assert ids(ROOT / "docs" / "ledger.md") == ids(shared / "ledger.md")


def test_tests_name_known_rows_only() -> None:
    assert set(ledger.coverage(ROOT / "tests")) <= set(ids(ROOT / "docs" / "ledger.md"))


def test_rows_are_found_in_marks_and_comments() -> None:
    # In capitals, so that this file itself names no row.
    source = (
        '@pytest.mark.LEDGER("C4", "M5")\npytestmark = pytest.mark.LEDGER(\n    "H10",\n)\n'
        'x = 1  # LEDGER: A1, B2\ny = "K1"\n'
    )
    assert ledger.rows_named(source.replace("LEDGER", "ledger")) == {"C4", "M5", "H10", "A1", "B2"}
