"""Read TSV, CSV, JSON, matched lines, parallel files and CoNLL as records: rows of named cells, with their
place for messages.

TSV is split at tabs and has no quoting, as benchmark data sets are written. CSV follows the quoting of the
`csv` module, with a comma, semicolon or tab between cells.
"""

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.errors import InputError, nearest, refuse
from clearhead.learn.data.files import bare, read_lines, read_pieces

SHOWN = 60  # characters of a faulty line in a message
MOST = 12  # names in a message
_QUOTED = re.compile('"[^"]*("|$)')  # a cell of CSV, or its beginning
CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
SAMPLE = 1000  # lines among which the first with words is looked for
_NUMBER = re.compile(r"\d+([-.]\d+)?")  # 8; 8-9: a word written together; 8.1: a word left out


class BadRows:
    """What is done with a row that cannot be read: its error is raised or, with `skip`, kept."""

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.lines: dict[str, None] = {}  # each once: texts are read again and again

    def __call__(self, error: InputError) -> None:
        """Raise an error, or keep its line."""
        if not self.skip:
            raise error
        self.lines[str(error)] = None

    def notes(self, found: object) -> list[str]:
        """Return a note on the rows that were skipped; refuse data in which nothing else was `found`."""
        count, first = counted(len(self.lines), "bad row"), next(iter(self.lines), "")
        refuse(self.lines and not found, f"there is no row but {count}; the first: {first}")
        return [f"{count} skipped; the first: {first}"] if self.lines else []


REFUSE = BadRows()


class Record(NamedTuple):
    """One row of a table."""

    place: str  # such as "train.tsv, line 3"
    cells: dict[str, Any]  # by name of the column; text, except for JSON

    def value(self, column: str) -> Any:
        """Return a cell; raise where the record has no such column."""
        if column not in self.cells:
            raise InputError(
                f"{self.place} has no field {column!r}"
                f"{nearest(column, self.cells)}; it has {listed(self.cells) or 'none'}"
            )
        return self.cells[column]

    def text(self, column: str) -> str:
        """Return a cell that must be text."""
        value = self.value(column)
        if not isinstance(value, str):
            raise InputError(f"{self.place}: `{column}` must be text, not {shorten(str(value))}")
        return value

    def words(self, column: str) -> tuple[str, ...]:
        """Return a cell that must be a list of words, or words between spaces."""
        value = self.value(column)
        if isinstance(value, tuple):  # words of CoNLL, which may hold blanks of other kinds
            return value
        items = value.split() if isinstance(value, str) else value
        words = isinstance(items, list) and all(isinstance(item, str | int) for item in items)
        if not words or not all(str(item).strip() for item in items):
            raise InputError(f"{self.place}: `{column}` must be a list of words, not {shorten(str(value))}")
        return tuple(str(item).strip() for item in items)


def shorten(text: str) -> str:
    """Return the beginning of a line, quoted."""
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


def listed(names: Iterable[str]) -> str:
    """Return names joined by commas, on one line; of many names only the first."""
    tidy = [" ".join(name.split())[:SHOWN] for name in names]
    return ", ".join(tidy[:MOST]) + (f" and {len(tidy) - MOST:,} more" if len(tidy) > MOST else "")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: '1 column', '2 columns', '3 classes'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


# TSV and CSV -----------------------------------------------------------------------------------------------


def read_rows(path: Path, format: str, encoding: str | None = None) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a TSV or CSV file with their line numbers; empty lines are left out."""
    if format == "tsv":
        yield from (
            (number, line.split("\t")) for number, line in read_lines(path, encoding=encoding) if line.strip()
        )
        return
    csv.field_size_limit(sys.maxsize)  # a cell may be a long document; the limit is one for the whole process
    first = next((line for _, line in read_lines(path, encoding=encoding) if line.strip()), "")
    delimiter = max(",;\t", key=_QUOTED.sub("", first).count)
    ended = (line for _, line in read_lines(path, ends=True, encoding=encoding))
    rows = csv.reader(ended, delimiter=delimiter, strict=True)
    begin = 1  # of the record, which may go over several lines
    try:
        for row in rows:
            if any(cell.strip() for cell in row):
                yield begin, row
            begin = rows.line_num + 1
    except csv.Error as error:
        why = f"{error} (in line {rows.line_num})"
        why = "a quote is opened and not closed" if "end of data" in str(error) else why
        why = "a carriage return stands outside quotes" if "new-line" in str(error) else why
        raise InputError(f"{path}, line {begin} is not CSV: {why}") from None


def column_names(first: Sequence[str], header: bool) -> tuple[str, ...]:
    """Return the names of the columns: those of the header, or 1, 2, 3; an empty name becomes "unnamed 1"."""
    named = [" ".join(cell.split()) or f"unnamed {number}" for number, cell in enumerate(first, 1)]
    return tuple(named) if header else tuple(str(number) for number in range(1, len(first) + 1))


def read_table(
    path: Path,
    format: str,
    header: bool,
    names: Sequence[str] = (),
    bad: BadRows = REFUSE,
    encoding: str | None = None,
) -> Iterator[Record]:
    """Yield the rows of a TSV or CSV file; `names` replace those that `column_names` gives."""
    first = 0  # the line with the first row
    for number, row in read_rows(path, format, encoding):
        if not first:
            names, first = names or column_names(row, header), number
            refuse(
                len(set(names)) < len(names),
                f"{path}, line {number} names a column twice: {listed(names)}; rename one of them",
            )
            if header:
                continue
        if len(row) == len(names):
            yield Record(f"{path}, line {number}", dict(zip(names, row)))
        else:
            width = counted(len(row), "column")
            bad(InputError(f"{path}, line {number} has {width} and line {first} has {len(names)}"))


# JSON ------------------------------------------------------------------------------------------------------


def read_json(path: Path, bad: BadRows = REFUSE, encoding: str | None = None) -> Iterator[Record]:
    """Yield the objects of JSON lines, of a JSON list, or of questions laid out as in SQuAD."""
    if bare(path).suffix.lower() == ".json":
        text = "".join(read_pieces(path, encoding))
        try:
            whole = _parse(text, str(path))
        except InputError as error:
            if text.strip() and "Extra data" not in str(error):
                raise
        else:
            return _objects(path, whole, bad)
    return _json_lines(path, bad, encoding)  # many files of JSON lines are called .json


def _json_lines(path: Path, bad: BadRows, encoding: str | None) -> Iterator[Record]:
    for number, line in read_lines(path, encoding=encoding):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                record = Record(place, flat(_parse(line, place), place))
            except InputError as error:
                bad(error)
            else:
                yield record


def _parse(text: str, place: str) -> Any:
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character
        return value
    except UnicodeEncodeError:
        raise InputError(
            f"{place} holds half of a surrogate pair, which is no character: {shorten(text)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{place} is not JSON ({str(error).splitlines()[0][:80]}): {shorten(text)}"
        ) from None


def flat(value: Any, place: str) -> dict[str, Any]:
    """Return the cells of an object; those of an object inside it are named `outer.inner`."""
    refuse(
        not isinstance(value, dict),
        f"{place} holds a {type(value).__name__}, not an object with named fields",
    )
    cells: dict[str, Any] = {}
    for name, cell in value.items():
        nested = isinstance(cell, dict)
        cells |= {f"{name}.{own}": item for own, item in cell.items()} if nested else {name: cell}
    return cells


def _objects(path: Path, whole: Any, bad: BadRows) -> Iterator[Record]:
    """Yield the records of a JSON file; SQuAD has articles of paragraphs, each with its questions."""
    rows = whole.get("data", [whole]) if isinstance(whole, dict) else whole
    refuse(not isinstance(rows, list), f"{path} holds no list of objects")
    for number, row in enumerate(rows, 1):
        try:
            records = list(_object_records(row, f"{path}, record {number}"))
        except InputError as error:
            bad(error)
        else:
            yield from records


def _object_records(row: Any, place: str) -> Iterator[Record]:
    if not (isinstance(row, dict) and isinstance(row.get("paragraphs"), list)):
        yield Record(place, flat(row, place))
        return
    for position, paragraph in enumerate(row["paragraphs"], 1):
        within = f"{place}, paragraph {position}"
        refuse(
            not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list),
            f"{within} must be an object with `context` and a list `qas`",
        )
        for count, question in enumerate(paragraph["qas"], 1):
            own = f"{within}, question {count}"
            yield Record(own, {"context": paragraph.get("context")} | flat(question, own))


# Lines -----------------------------------------------------------------------------------------------------


def read_matches(
    path: Path, pattern: re.Pattern[str], bad: BadRows = REFUSE, encoding: str | None = None
) -> Iterator[Record]:
    """Yield the named groups of a pattern that must match each whole line; empty lines are left out."""
    for number, line in read_lines(path, encoding=encoding):
        if line.strip():
            place, match = f"{path}, line {number}", pattern.fullmatch(line)
            if match is not None:
                yield Record(place, {name: text or "" for name, text in match.groupdict().items()})
            else:
                bad(InputError(f"{place} does not match the pattern {pattern.pattern!r}: {shorten(line)}"))


def read_parallel(files: Sequence[Path], encoding: str | None = None) -> Iterator[Record]:
    """Yield the lines of the first file, each with the line of the same number in the second."""
    source, target = files
    both = (read_lines(path, encoding=encoding) for path in files)
    for number, (left, right) in enumerate(zip_longest(*both), 1):
        if left is None or right is None:
            counts = [sum(1 for _ in read_lines(path, encoding=encoding)) for path in files]
            raise InputError(
                f"{source} has {counted(counts[0], 'line')} and {target} has {counts[1]:,}: "
                "parallel files need a "
                "line for each line of the other; to read each as a text, --set data.format=text"
            )
        yield Record(f"{source}, line {number}", {"source": left[1], "target": right[1]})


# CoNLL: one word and its columns per line, an empty line between sentences ----------------------------------


class TagColumns(NamedTuple):
    """How the lines of a CoNLL file are split, and which cells hold words and tags."""

    n_cells: int
    tabs: bool  # between cells; otherwise any white space
    universal: bool  # CoNLL-U
    words: int
    tags: int
    guess: str  # which columns these are, with an example of each

    def skips(self, line: str, row: list[str], first: bool) -> bool:
        """Return True for comments, document separators and lines of CoNLL-U that hold no word.

        `first`: no word of the sentence has been read yet. Later lines may begin with a word such as #tag.
        """
        whole = len(row) == self.n_cells
        if self.universal:
            return line.startswith("#") or (whole and ("-" in row[0] or "." in row[0]))
        return row[0] == "-DOCSTART-" or (line.startswith("#" if first else "# ") and not whole)


def tag_columns(
    path: Path, columns: Mapping[str, str], encoding: str | None = None
) -> tuple[TagColumns, str]:
    """Find the columns of a file from its first line with words -> the columns, and a note on the choice."""
    lines = islice((line for _, line in read_lines(path, encoding=encoding) if line.strip()), SAMPLE)
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
    note = f"words from column `{names[words]}` ({row[words]}), tags from `{names[tags]}` ({row[tags]})"
    note = f"{'CoNLL-U' if universal else f'{len(row)} columns'}: {note}"
    return TagColumns(len(row), tabs, universal, words, tags, note), note


def cells(line: str, tabs: bool) -> list[str]:
    """Split a line at tabs, or at blanks.

    Other white space, such as a no-break space, may stand in a word.
    """
    return [cell.strip() for cell in line.split("\t")] if tabs else re.split("[ \t]+", line.strip())


def read_tagged(
    path: Path, columns: TagColumns, bad: BadRows = REFUSE, encoding: str | None = None
) -> Iterator[Record]:
    """Yield the words and tags of each sentence, with the place of its first word."""
    for full, block in groupby(
        read_lines(path, encoding=encoding), lambda numbered: bool(numbered[1].strip())
    ):
        try:
            records = list(_sentence(path, block, columns)) if full else []
        except InputError as error:
            bad(error)
        else:
            yield from records


def _sentence(path: Path, block: Iterable[tuple[int, str]], columns: TagColumns) -> Iterator[Record]:
    pairs: list[tuple[str, str]] = []
    place = ""
    for number, line in block:
        row = cells(line, columns.tabs)
        if columns.skips(line, row, first=not pairs):
            continue
        if len(row) != columns.n_cells:
            width = f"{counted(len(row), 'column')} in place of {columns.n_cells}"
            raise InputError(f"{path}, line {number} has {width}: {shorten(line)}")
        word, tag = row[columns.words], row[columns.tags]
        if not word or not tag:
            raise InputError(f"{path}, line {number} has no {'tag' if word else 'word'}: {shorten(line)}")
        place = place or f"{path}, line {number}"
        pairs.append((word, tag))
    if pairs:
        yield Record(place, dict(zip(("words", "tags"), zip(*pairs))))
