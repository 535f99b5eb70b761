"""Read tagged sentences in CoNLL format.

One word and its columns per line, an empty line between sentences.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

from clearhead.data.files import read_lines
from clearhead.data.tables import Record, counted, shorten
from clearhead.errors import InputError, nearest, refuse

CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
SAMPLE = 1000  # lines among which the first with words is looked for
_NUMBER = re.compile(r"\d+([-.]\d+)?")  # 8; 8-9: a word written together; 8.1: a word left out


@dataclass(frozen=True)
class TagColumns:
    """How the lines of a CoNLL file are split, and which cells hold words and tags."""

    count: int
    tabs: bool  # between cells; otherwise any white space
    universal: bool  # CoNLL-U
    words: int
    tags: int

    def skips(self, line: str, row: list[str], first: bool) -> bool:
        """Return True for comments, document separators and lines of CoNLL-U that hold no word.

        `first`: no word of the sentence has been read yet. Later lines may begin with a word such as #tag.
        """
        whole = len(row) == self.count
        if self.universal:
            return line.startswith("#") or (whole and ("-" in row[0] or "." in row[0]))
        return row[0] == "-DOCSTART-" or (line.startswith("#" if first else "# ") and not whole)


def tag_columns(path: Path, columns: Mapping[str, str]) -> tuple[TagColumns, str]:
    """Find the columns of a file from its first line with words -> the columns, and a note on the choice."""
    lines = islice((line for _, line in read_lines(path) if line.strip()), SAMPLE)
    full = [line for line in lines if not line.startswith("# ")]
    refuse(not full, f"{path} is empty: there is no tagged word in it")
    first = next((line for line in full if not line.startswith("#")), full[0])  # #word may be a word
    tabs = "\t" in first
    row = cells(first, tabs)
    universal = len(row) == len(CONLLU) and tabs and bool(_NUMBER.fullmatch(row[0]))
    names = CONLLU if universal else tuple(str(number) for number in range(1, len(row) + 1))
    refuse(len(row) < 2, f"{path} has one column: each line needs a word and its tag, not {shorten(first)}")
    usual = {"words": "form", "tags": "upos"} if universal else {"words": names[0], "tags": names[-1]}
    chosen = {role: columns.get(role, name) for role, name in usual.items()}
    for name in chosen.values():
        refuse(
            name.lower() not in names,
            f"{path} has no column {name!r}{nearest(name, names)}; it has {', '.join(names)}",
        )
    words, tags = (names.index(name.lower()) for name in chosen.values())
    note = f"words from column `{names[words]}`, tags from `{names[tags]}`"
    note = f"{'CoNLL-U' if universal else f'{len(row)} columns'}: {note}"
    return TagColumns(len(row), tabs, universal, words, tags), note


def cells(line: str, tabs: bool) -> list[str]:
    """Split a line at tabs, or at blanks.

    Other white space, such as a no-break space, may stand in a word.
    """
    return [cell.strip() for cell in line.split("\t")] if tabs else re.split("[ \t]+", line.strip())


def read_tagged(path: Path, columns: TagColumns) -> Iterator[Record]:
    """Yield the words and tags of each sentence, with the place of its first word."""
    for full, block in groupby(read_lines(path), lambda numbered: bool(numbered[1].strip())):
        pairs: list[tuple[str, str]] = []
        place = ""
        for number, line in block if full else ():
            row = cells(line, columns.tabs)
            if columns.skips(line, row, first=not pairs):
                continue
            if len(row) != columns.count:
                raise InputError(
                    f"{path}, line {number} has {counted(len(row), 'column')} in place of {columns.count}"
                    f": {shorten(line)}"
                )
            word, tag = row[columns.words], row[columns.tags]
            if not word or not tag:
                raise InputError(f"{path}, line {number} has no {'tag' if word else 'word'}: {shorten(line)}")
            place = place or f"{path}, line {number}"
            pairs.append((word, tag))
        if pairs:
            yield Record(place, dict(zip(("words", "tags"), zip(*pairs))))
