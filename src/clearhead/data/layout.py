"""How the files of a source are read: judged by the first that is not blank, then the same for all; a table may lack its header."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from clearhead.data.cells import Row, make_row, text_of
from clearhead.data.columns import choose_columns, find_column, has_header, may_name_columns
from clearhead.data.examples import Shape
from clearhead.data.files import blank, read_pieces
from clearhead.data.guess import Source
from clearhead.data.plan import DataPlan
from clearhead.data.tables import (
    Record,
    column_names,
    counted,
    listed,
    read_csv,
    read_json,
    read_matches,
    read_parallel,
    read_table,
    read_tsv,
)
from clearhead.data.tags import TagColumns, read_tagged, tag_columns
from clearhead.errors import InputError

SAMPLE = 1000  # rows that guesses about columns look at
_TAKES = {
    "text": (),
    "conll": ("words", "tags"),
    "parallel": ("source", "target"),
}  # formats whose columns have roles already


@dataclass(frozen=True)
class Layout:
    """How the files of a source are read."""

    format: str
    shape: Shape
    roles: dict[str, str]
    header: bool = False
    names: tuple[
        str, ...
    ] = ()  # columns of the first table, for those that differ from it in having a header; none: no table may
    pattern: re.Pattern[str] | None = None
    tags: TagColumns | None = None


def lay_out(plan: DataPlan, source: Source, held: Sequence[Path] = ()) -> tuple[Layout, list[str]]:
    """Judge the first file that is not blank; a sentence for each guess, also about the files `held` for validation."""
    said = list(source.said)
    unused = [role for role in plan.columns if source.format in _TAKES and role not in _TAKES[source.format]]
    if unused:
        said.append(f"data.columns is not used for {', '.join(unused)}, as the format is {source.format}")
    format, first = source.format, next((path for path in source.files if not blank(path)), source.files[0])
    if format == "text":
        return Layout(format, "text", {}), said
    if format == "conll":
        columns, sentence = tag_columns(first, plan.columns)
        return Layout(format, "tags", {}, tags=columns), [*said, sentence]
    if format == "parallel":
        return Layout(format, "pairs", {"source": "source", "target": "target"}), said
    table = format in ("tsv", "csv")
    rows = _first_rows(format, first) if table else []
    header = table and (
        plan.header or (plan.header is None and bool(rows) and has_header(rows, plan.columns))
    )
    names = column_names(rows[0], header) if rows and plan.header is None else ()
    draft = Layout(format, "text", {}, header, names, _pattern(plan))
    records = list(islice(_records(draft, source.files), SAMPLE))
    if not records:
        raise InputError(f"{first} is empty: there is no row in it" + (" below the header" if header else ""))
    named = header or format in ("jsonl", "lines")
    shape, roles = choose_columns(records, plan.columns, plan.task, named)
    columns_said = counted(len(records[0].cells), "column" if format != "jsonl" else "field")
    header_said = "" if not table else " with a header" if header else " without a header"
    where = listed(f"{role} from `{column}`" for role, column in roles.items())
    said.append(f"{columns_said}{header_said}: {where}")
    unlike = [path.name for path in (*source.files, *held) if _unlike_first(draft, path)]
    if unlike:
        said.append(
            f"{'no' if header else 'a'} header in {listed(unlike)}: columns taken in the order of {first.name}"
        )
    return dataclasses.replace(draft, shape=shape, roles=roles), said


def _first_rows(format: str, path: Path, most: int = SAMPLE) -> list[list[str]]:
    return [row for _, row in islice((read_tsv if format == "tsv" else read_csv)(path), most)]


def _unlike_first(layout: Layout, path: Path) -> bool:
    """Has a table beyond doubt no header, where the first has one, or one where the first has none?"""
    rows = _first_rows(layout.format, path, 1 if layout.header else SAMPLE) if layout.names else []
    if not rows or len(rows[0]) != len(layout.names):
        return False
    if layout.header:
        return not may_name_columns(rows[0]) and not set(layout.names) & set(
            column_names(rows[0], header=True)
        )
    return has_header(rows, {})


def _pattern(plan: DataPlan) -> re.Pattern[str] | None:
    if plan.pattern is None:
        return None
    try:
        pattern = re.compile(plan.pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"the pattern {plan.pattern!r} is no regular expression: {error}") from None
    if not pattern.groupindex:
        raise InputError(
            f"the pattern {plan.pattern!r} has no named groups: write them as (?P<source>...) and (?P<target>...)"
        )
    return pattern


def _records(layout: Layout, files: Sequence[Path]) -> Iterator[Record]:
    if layout.format == "parallel":
        yield from read_parallel(files)
        return
    for path in files:
        if layout.pattern is not None:
            records: Iterable[Record] = read_matches(path, layout.pattern)
        elif layout.format == "jsonl":
            records = read_json(path)
        else:
            unlike = _unlike_first(layout, path)
            records = read_table(path, layout.format, layout.header != unlike, layout.names if unlike else ())
        for number, record in enumerate(records):
            if number == 0 and layout.header:
                for column in layout.roles.values():
                    find_column(column, list(record.cells), f"{path}")
            yield record


def read_documents(layout: Layout, files: Sequence[Path]) -> Iterator[Iterable[str]]:
    """The documents of a source of text, each in pieces: a file is one, else a record is one."""
    if layout.format == "text":
        return (read_pieces(path) for path in files)
    return ((text_of(record, layout.roles["text"]),) for record in _records(layout, files))


def read_examples(layout: Layout, files: Sequence[Path]) -> Iterator[tuple[str, Row | None]]:
    """Examples with their places; None where a text is empty."""
    if layout.tags is not None:
        for path in files:
            yield from read_tagged(path, layout.tags)
    else:
        for record in _records(layout, files):
            yield record.place, make_row(layout.shape, layout.roles, record)
