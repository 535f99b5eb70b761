"""Read TSV, CSV, JSON, matched lines and parallel files as records: rows of named cells, with their place for
messages.

TSV is split at tabs and has no quoting, as benchmark data sets are written. CSV follows the quoting of the
`csv` module, with a comma, semicolon or tab between cells.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from clearhead.errors import InputError, nearest, refuse
from clearhead.learn.data.files import bare, full_lines, read_blocks, read_lines

SHOWN = 60  # characters of a faulty line in a message
MOST = 12  # names in a message
Item = TypeVar("Item")
Row = TypeVar("Row")
_QUOTED = re.compile('"[^"]*("|$)')  # a cell of CSV, or its beginning


class Reading:
    """How files are read: their encoding, and what is done with a row that cannot be read.

    Its error is raised or, with `skip`, kept. `encoding` None: each file is in its own.
    """

    def __init__(self, encoding: str | None = None, skip: bool = False) -> None:
        self.encoding, self.skip = encoding, skip
        self.lines: dict[str, None] = {}  # each once: texts are read again and again

    def refuse(self, error: InputError) -> None:
        """Raise the error of a row, or keep its line."""
        if not self.skip:
            raise error
        self.lines[str(error)] = None

    def sift(self, items: Iterable[Item], read: Callable[[Item], Iterable[Row]]) -> Iterator[Row]:
        """Yield the rows of each item; where one cannot be read, none of its rows."""
        for item in items:
            try:
                rows = list(read(item))
            except InputError as error:
                self.refuse(error)
            else:
                yield from rows

    def notes(self, rows: object) -> list[str]:
        """Return a note on the rows that were skipped; refuse data in which nothing else was `found`."""
        count, first = counted(len(self.lines), "bad row"), next(iter(self.lines), "")
        refuse(self.lines and not rows, f"there is no row but {count}; the first: {first}")
        return [f"{count} skipped; the first: {first}"] if self.lines else []


STRICT = Reading()


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
        yield from ((number, line.split("\t")) for number, line in full_lines(path, encoding))
        return
    csv.field_size_limit(sys.maxsize)  # a cell may be a long document; the limit is one for the whole process
    first = next((line for _, line in full_lines(path, encoding)), "")
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
    path: Path, format: str, header: bool, names: Sequence[str] = (), how: Reading = STRICT
) -> Iterator[Record]:
    """Yield the rows of a TSV or CSV file; `names` replace those that `column_names` gives."""
    first = 0  # the line with the first row
    for number, row in read_rows(path, format, how.encoding):
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
            how.refuse(InputError(f"{path}, line {number} has {width} and line {first} has {len(names)}"))


# JSON ------------------------------------------------------------------------------------------------------


def read_json(path: Path, how: Reading = STRICT) -> Iterator[Record]:
    """Yield the objects of JSON lines, of a JSON list, or of questions laid out as in SQuAD."""
    if bare(path).suffix.lower() == ".json":
        text = "".join(read_blocks(path, how.encoding))
        try:
            whole = _parse(text, str(path))
        except InputError as error:
            if text.strip() and "Extra data" not in str(error):
                raise
        else:
            return _objects(path, whole, how)
    return _json_lines(path, how)  # many files of JSON lines are called .json


def _json_lines(path: Path, how: Reading) -> Iterator[Record]:
    def records(numbered: tuple[int, str]) -> Iterator[Record]:
        place = f"{path}, line {numbered[0]}"
        yield Record(place, flat(_parse(numbered[1], place), place))

    return how.sift(full_lines(path, how.encoding), records)


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


def _objects(path: Path, whole: Any, how: Reading) -> Iterator[Record]:
    """Yield the records of a JSON file; SQuAD has articles of paragraphs, each with its questions."""
    rows = whole.get("data", [whole]) if isinstance(whole, dict) else whole
    refuse(not isinstance(rows, list), f"{path} holds no list of objects")
    return how.sift(
        enumerate(rows, 1), lambda numbered: _object_records(numbered[1], f"{path}, record {numbered[0]}")
    )


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


def read_matches(path: Path, pattern: re.Pattern[str], how: Reading = STRICT) -> Iterator[Record]:
    """Yield the named groups of a pattern that must match each whole line; empty lines are left out."""

    def records(numbered: tuple[int, str]) -> Iterator[Record]:
        place, line = f"{path}, line {numbered[0]}", numbered[1]
        match = pattern.fullmatch(line)
        if match is None:
            raise InputError(f"{place} does not match the pattern {pattern.pattern!r}: {shorten(line)}")
        yield Record(place, {name: text or "" for name, text in match.groupdict().items()})

    return how.sift(full_lines(path, how.encoding), records)


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
