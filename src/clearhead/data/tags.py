"""Tagged sentences in the manner of CoNLL: a word and its columns on a line, an empty line between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from clearhead.data.examples import Tagged
from clearhead.data.files import read_lines
from clearhead.data.tables import counted, shorten
from clearhead.errors import InputError, nearest

CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
SAMPLE = 1000  # lines among which the first with words is looked for
_NUMBER = re.compile(r"\d+([-.]\d+)?")  # 8; 8-9: a word written together; 8.1: a word left out


@dataclass(frozen=True)
class TagColumns:
    """How the lines of a CoNLL file are cut, and which cells are wanted."""

    count: int
    tabs: bool  # between cells; otherwise any white space
    universal: bool  # CoNLL-U
    words: int
    tags: int


def tag_columns(path: Path, columns: Mapping[str, str]) -> tuple[TagColumns, str]:
    """The columns of a file, judged by its first line with words, and a sentence that says so."""
    full = [
        line
        for line in islice((line for _, line in read_lines(path) if line.strip()), SAMPLE)
        if not line.startswith("# ")
    ]
    first = next(
        (line for line in full if not line.startswith("#")), full[0] if full else None
    )  # #word may be one too
    if first is None:
        raise InputError(f"{path} is empty: there is no tagged word in it")
    tabs = "\t" in first
    row = cells(first, tabs)
    universal = len(row) == len(CONLLU) and tabs and bool(_NUMBER.fullmatch(row[0]))
    names = CONLLU if universal else tuple(str(i) for i in range(1, len(row) + 1))
    if len(row) < 2:
        raise InputError(
            f"{path} has one column: a word and its tag are needed on each line, not {shorten(first)}"
        )
    words = _find(path, columns.get("words", names[1 if universal else 0]), names)
    tags = _find(path, columns.get("tags", "upos" if universal else names[-1]), names)
    kind = "CoNLL-U" if universal else f"{len(row)} columns"
    return TagColumns(
        len(row), tabs, universal, words, tags
    ), f"{kind}: words from column `{names[words]}`, tags from `{names[tags]}`"


def _find(path: Path, name: str, names: tuple[str, ...]) -> int:
    if name.lower() not in names:
        raise InputError(f"{path} has no column {name!r}{nearest(name, names)}; it has {', '.join(names)}")
    return names.index(name.lower())


def cells(line: str, tabs: bool) -> list[str]:
    """The cells of a line, between tabs or blanks; other white space, such as a space that does not break, may stand in a word."""
    return [cell.strip() for cell in line.split("\t")] if tabs else re.split("[ \t]+", line.strip())


def read_tagged(path: Path, columns: TagColumns) -> Iterator[tuple[str, Tagged]]:
    """The sentences of a file, each with the place of its first word."""
    words: list[str] = []
    tags: list[str] = []
    begins = 0
    for number, line in read_lines(path):
        if not line.strip():
            if words:
                yield f"{path}, line {begins}", Tagged(tuple(words), tuple(tags))
            words, tags = [], []
            continue
        row = cells(line, columns.tabs)
        if _skipped(line, row, columns, begins=not words):
            continue
        if len(row) != columns.count:
            raise InputError(
                f"{path}, line {number} has {counted(len(row), 'column')} in place of {columns.count}: {shorten(line)}"
            )
        word, tag = row[columns.words], row[columns.tags]
        if not word or not tag:
            raise InputError(f"{path}, line {number} has no {'tag' if word else 'word'}: {shorten(line)}")
        begins = begins if words else number
        words.append(word)
        tags.append(tag)
    if words:
        yield f"{path}, line {begins}", Tagged(tuple(words), tuple(tags))


def _skipped(line: str, row: list[str], columns: TagColumns, begins: bool) -> bool:
    """Comments, marks between documents, and in CoNLL-U lines that are no word; `begins`: no word of the sentence came before."""
    if columns.universal:
        return line.startswith("#") or (len(row) == columns.count and ("-" in row[0] or "." in row[0]))
    return row[0] == "-DOCSTART-" or (line.startswith("#" if begins else "# ") and len(row) != columns.count)
