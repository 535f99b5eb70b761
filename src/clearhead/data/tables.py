"""Records: what TSV, CSV, JSONL, matched lines and parallel files have in common, a table of named cells read row by row.

TSV is cut at tabs and knows no quotes, as benchmark sets are written; CSV follows the quoting of the `csv` module, with
comma, semicolon or tab between cells. Records come with their place, for messages.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.data.files import bare, read_lines, read_whole
from clearhead.errors import InputError

SHOWN = 60  # characters of a faulty line in a message
MOST = 12  # names in a message
_QUOTED = re.compile('"[^"]*("|$)')  # a cell of CSV, or its beginning


class Record(NamedTuple):
    """One row of a table."""

    place: str  # such as "train.tsv, line 3"
    cells: dict[str, Any]  # by name of the column; text, save for JSON


def shorten(text: str) -> str:
    """The beginning of a line, quoted."""
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")


def listed(names: Iterable[str]) -> str:
    """Names in a row, on one line; a few of them if there are many."""
    tidy = [" ".join(name.split())[:SHOWN] for name in names]
    return ", ".join(tidy[:MOST]) + (f" and {len(tidy) - MOST:,} more" if len(tidy) > MOST else "")


# TSV and CSV ------------------------------------------------------------------------------------------------------------


def read_tsv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file with tabs between cells; empty lines are left out."""
    return ((number, line.split("\t")) for number, line in read_lines(path) if line.strip())


def read_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows of a file in the manner of spreadsheets; empty lines are left out."""
    csv.field_size_limit(
        sys.maxsize
    )  # a cell may be a long document; the module knows only one limit for the whole process
    first = next((line for _, line in read_lines(path) if line.strip()), "")
    delimiter = max(",;\t", key=_QUOTED.sub("", first).count)
    rows = csv.reader((line for _, line in read_lines(path, ends=True)), delimiter=delimiter, strict=True)
    begin = 1  # of the record, which may go over several lines
    try:
        for row in rows:
            if any(cell.strip() for cell in row):
                yield begin, row
            begin = rows.line_num + 1
    except csv.Error as error:
        why = (
            "a quote is opened and not closed"
            if "end of data" in str(error)
            else f"{error} (in line {rows.line_num})"
        )
        why = "a carriage return stands outside quotes" if "new-line" in str(error) else why
        raise InputError(f"{path}, line {begin} is not CSV: {why}") from None


def column_names(first: Sequence[str], header: bool) -> tuple[str, ...]:
    """What the columns are called: without a header 1, 2, 3; one without a name, unnamed 1."""
    return tuple(
        " ".join(cell.split()) or f"unnamed {i}" if header else str(i) for i, cell in enumerate(first, 1)
    )


def read_table(path: Path, format: str, header: bool, called: Sequence[str] = ()) -> Iterator[Record]:
    """The rows of a TSV or CSV file, with or without a header; its columns are named by `column_names` unless `called` otherwise."""
    names: Sequence[str] = ()
    first = 0
    for number, row in (read_tsv if format == "tsv" else read_csv)(path):
        if not names:
            names, first = called or column_names(row, header), number
            if len(set(names)) < len(names):
                raise InputError(
                    f"{path}, line {number} names a column twice: {listed(names)}; rename one of them"
                )
            if header:
                continue
        if len(row) != len(names):
            raise InputError(
                f"{path}, line {number} has {counted(len(row), 'column')} and line {first} has {len(names)}"
            )
        yield Record(f"{path}, line {number}", dict(zip(names, row)))


def counted(number: int, noun: str) -> str:
    """'1 column', '2 columns'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# JSON -------------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Iterator[Record]:
    """The objects of a JSONL file, or of a JSON file that holds a list of them or questions in the manner of SQuAD."""
    if bare(path).suffix.lower() == ".json":
        text = read_whole(path)
        try:
            return _listed(path, _parse(text, str(path)))
        except InputError as error:
            if text.strip() and "Extra data" not in str(error):
                raise
    return _json_lines(path)  # many files of JSON lines are called .json


def _json_lines(path: Path) -> Iterator[Record]:
    for number, line in read_lines(path):
        if line.strip():
            place = f"{path}, line {number}"
            yield Record(place, _flat(_parse(line, place), place))


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


def _flat(value: Any, place: str) -> dict[str, Any]:
    """The cells of an object; those of an object within it are called `outer.inner`."""
    if not isinstance(value, dict):
        raise InputError(f"{place} holds a {type(value).__name__}, not an object with named fields")
    cells: dict[str, Any] = {}
    for name, cell in value.items():
        cells |= (
            {f"{name}.{inner}": own for inner, own in cell.items()}
            if isinstance(cell, dict)
            else {name: cell}
        )
    return cells


def _listed(path: Path, whole: Any) -> Iterator[Record]:
    rows = whole.get("data", [whole]) if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise InputError(f"{path} holds no list of objects")
    for number, row in enumerate(rows, 1):
        place = f"{path}, record {number}"
        if isinstance(row, dict) and isinstance(row.get("paragraphs"), list):
            yield from _questions(row["paragraphs"], place)
        else:
            yield Record(place, _flat(row, place))


def _questions(paragraphs: list[Any], place: str) -> Iterator[Record]:
    """SQuAD: articles of paragraphs, each with its questions."""
    for number, paragraph in enumerate(paragraphs, 1):
        within = f"{place}, paragraph {number}"
        if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
            raise InputError(f"{within} must be an object with `context` and a list `qas`")
        for count, question in enumerate(paragraph["qas"], 1):
            own = f"{within}, question {count}"
            yield Record(own, {"context": paragraph.get("context")} | _flat(question, own))


# Lines ------------------------------------------------------------------------------------------------------------------


def read_matches(path: Path, pattern: re.Pattern[str]) -> Iterator[Record]:
    """The named groups of a pattern that must match each line as a whole; empty lines are left out."""
    for number, line in read_lines(path):
        if line.strip():
            match = pattern.fullmatch(line)
            if match is None:
                raise InputError(
                    f"{path}, line {number} does not match the pattern {pattern.pattern!r}: {shorten(line)}"
                )
            yield Record(
                f"{path}, line {number}", {name: text or "" for name, text in match.groupdict().items()}
            )


def read_parallel(files: Sequence[Path]) -> Iterator[Record]:
    """Lines of the first file with the lines of the second that have the same number."""
    source, target = files
    for number, (left, right) in enumerate(zip_longest(read_lines(source), read_lines(target)), 1):
        if left is None or right is None:
            counts = [sum(1 for _ in read_lines(path)) for path in files]
            raise InputError(
                f"{source} has {counted(counts[0], 'line')} and {target} has {counts[1]:,}: "
                "parallel files need a line for each line of the other; to read each as a text, --set data.format=text"
            )
        yield Record(f"{source}, line {number}", {"source": left[1], "target": right[1]})
