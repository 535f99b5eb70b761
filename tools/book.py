"""Run the pages of the book, and write into them what they print, draw and list.

    python tools/book.py                    every page
    python tools/book.py docs/training.md   these pages alone; a chapter of the tutorial needs those before it
    python tools/book.py --tables           only the tables of every page: nothing is run

A page is Markdown. Its python blocks run in order in one namespace; in the tutorial, bash blocks that begin
with `clearhead` run too, and all chapters run in one folder, as for a reader who types them in. A text block
that follows a block of code directly is what it prints; "text sample" marks what differs between machines.
A table between `<!-- table: NAME -->` and `<!-- end -->` comes from the code (`book_tables.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TUTORIAL = sorted((DOCS / "tutorial").glob("[0-9]*.md"))
FENCE = re.compile(r"^```(\w+)[ \t]*([\w-]*)[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(images/([\w-]+\.png)\)")
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
TABLE = re.compile(r"(<!-- table: ([\w -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Block(NamedTuple):
    """A block of code or output: its language, the word after it, its text, and where that stands."""

    language: str
    note: str
    text: str
    start: int
    end: int
    line: int


class Printed(NamedTuple):
    """What a block of code printed, and the output block that follows it, if any."""

    code: Block
    shown: Block | None
    printed: str


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page that name a language, in order."""
    text = page.read_text()
    return [
        Block(found[1], found[2], found[3], found.start(3), found.end(3), text.count("\n", 0, found.start(3)))
        for found in FENCE.finditer(text)
    ]


def run_page(page: Path, commands: bool = False) -> Iterator[Printed]:
    """Run the code of a page in the current folder; with `commands`, its command lines too."""
    text, found = page.read_text(), blocks(page)
    namespace: dict[str, Any] = {"__name__": page.stem}
    for number, block in enumerate(found):
        runs = block.language == "python" or (commands and block.language == "bash")
        if not runs or block.note == "no-run":
            continue
        after = found[number + 1] if number + 1 < len(found) else None
        direct = after is not None and after.language == "text"
        between = text[block.end : after.start].strip("`\n ") if direct and after is not None else ""
        shown = after if direct and between in ("text", "text sample") else None
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if block.language == "bash":
                run_commands(block.text)
            else:  # the empty lines make a traceback point into the page
                exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        yield Printed(block, shown, "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines()))


def run_commands(text: str) -> None:
    """Run lines that begin with `clearhead` as the command would; a mistake in one is an error here."""
    from clearhead.app.cli import main

    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] != "clearhead":
            raise ValueError(f'"{line}" does not begin with clearhead: mark the block "bash no-run"')
        try:
            main(words[1:])
        except SystemExit as end:
            if end.code:
                raise ValueError(f"{line} ended with exit code {end.code}") from None


def agree(printed: str, shown: str, share: float = 0.02) -> bool:
    """Whether two outputs have the same words, and numbers within a share of each other."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown))
    values = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs]
    return all(abs(a - b) <= share * max(abs(a), abs(b)) + 1e-9 for a, b in values)


def with_outputs(page: Path, run: list[Printed]) -> str:
    """Return the text of a page with what its blocks have printed, and its tables."""
    text = page.read_text()
    for one in reversed(run):
        if one.shown is not None and (one.shown.note or not agree(one.printed, one.shown.text)):
            text = text[: one.shown.start] + one.printed + text[one.shown.end :]
    return with_tables(text)


def with_tables(text: str) -> str:
    """Return the text of a page with its tables made anew."""
    if not TABLE.search(text):
        return text
    from tools.book_tables import table

    return TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", text)


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make a folder the current one, and lines of output 100 columns wide."""
    before, width = Path.cwd(), os.environ.get("COLUMNS")
    os.chdir(folder)
    os.environ["COLUMNS"] = "100"
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width


def main() -> None:
    """Rewrite every page whose outputs or tables have changed, and say which."""
    parser = argparse.ArgumentParser(description="Write into the pages of the book what their code prints.")
    parser.add_argument("pages", nargs="*", type=Path, help="these alone; default: all")
    parser.add_argument("--tables", action="store_true", help="rewrite tables only, and run nothing")
    asked = parser.parse_args()
    chosen = {page.resolve() for page in asked.pages} or {*DOCS.rglob("*.md")}
    tutorial = [page for page in TUTORIAL if page in chosen]
    for pages in (tutorial, *([page] for page in sorted(chosen.difference(TUTORIAL)))):
        with tempfile.TemporaryDirectory() as name, working_in(Path(name)):
            for page in pages:
                shows = not asked.tables and any(block.language == "text" for block in blocks(page))
                old, run = page.read_text(), list(run_page(page, page in TUTORIAL)) if shows else []
                new = with_outputs(page, run)
                for picture in PICTURE.findall(new) if page in TUTORIAL and run else ():
                    shutil.copy(picture, DOCS / "tutorial" / "images" / picture)
                if new != old:
                    page.write_text(new)
                    print(f"{page.relative_to(ROOT)} rewritten", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
