"""Decide how the files of a source are read, from the first that is not blank.

Tables may differ in having a header.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from clearhead.data import columns, tables
from clearhead.data.examples import IMAGES, PAIRS, TAGS, TEXT, Example, Shape
from clearhead.data.files import blank, read_pieces
from clearhead.data.formats import Source
from clearhead.data.plan import DataPlan
from clearhead.errors import InputError, refuse

SAMPLE = 1000  # rows from which columns are guessed
_FIXED = {"text": TEXT, "conll": TAGS, "parallel": PAIRS}  # formats that have one shape


class Layout(NamedTuple):
    """How the files of a source are read."""

    format: str
    shape: Shape
    roles: Mapping[str, str]
    header: bool = False
    # Columns of the first table, for tables that differ in having a header; (): none may.
    names: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    tags: tables.TagColumns | None = None

    def documents(self, files: Sequence[Path]) -> Iterator[Iterable[str]]:
        """Yield the documents of text files, each in pieces: a file is one, else a record is one."""
        if self.format == "text":
            return (read_pieces(path) for path in files)
        return ((record.text(self.roles["text"]),) for record in self._records(files))

    def examples(self, files: Sequence[Path]) -> Iterator[tuple[str, Example | None]]:
        """Yield the examples with their places; None where a text is empty."""
        assert self.shape.row is not None
        read = self.shape.row.read
        return ((record.place, read(record, self.roles)) for record in self._records(files))

    def _records(self, files: Sequence[Path]) -> Iterator[tables.Record]:
        if self.format == "parallel":
            yield from tables.read_parallel(files)
            return
        for path in files:
            if self.tags is not None:
                records = tables.read_tagged(path, self.tags)
            elif self.pattern is not None:
                records = tables.read_matches(path, self.pattern)
            elif self.format == "jsonl":
                records = tables.read_json(path)
            else:
                unlike = self.unlike(path)
                records = tables.read_table(
                    path, self.format, self.header != unlike, self.names if unlike else ()
                )
            for number, record in enumerate(records):
                for column in self.roles.values() if number == 0 and self.header else ():
                    columns.find_column(column, list(record.cells), f"{path}")
                yield record

    def unlike(self, path: Path) -> bool:
        """Return True if a table surely differs from the first in having a header, or in having none."""
        rows = _sample(path, self.format, 1 if self.header else SAMPLE) if self.names else []
        if not rows or len(rows[0]) != len(self.names):
            return False
        known = set(self.names) & set(tables.column_names(rows[0], header=True))
        return (
            not known and not columns.may_name_columns(rows[0])
            if self.header
            else columns.has_header(rows, {})
        )


def lay_out(
    plan: DataPlan, source: Source, wanted: Shape | None = None, validation: Sequence[Path] = ()
) -> tuple[Layout, list[str]]:
    """Decide how files are read -> the layout, and a note for each guess, also about `validation` files."""
    notes, format = list(source.notes), source.format
    first = next((path for path in source.files if not blank(path)), source.files[0])
    if format in _FIXED:
        shape = _FIXED[format]
        roles = {} if shape is TEXT else {role: role for role in shape.needed}
        unused = [role for role in plan.columns if role not in roles]
        if unused:
            notes.append(f"data.columns is not used for {', '.join(unused)}, as the format is {format}")
        tags, *more = tables.tag_columns(first, plan.columns) if shape is TAGS else (None,)
        return Layout(format, shape, roles, tags=tags), [*notes, *more]
    table = format in ("tsv", "csv")
    rows = _sample(first, format, SAMPLE) if table else []
    header = table and bool(
        columns.has_header(rows, plan.columns) if plan.header is None and rows else plan.header
    )
    names = tables.column_names(rows[0], header) if rows and plan.header is None else ()
    pattern = None if plan.pattern is None else _pattern(plan.pattern)
    draft = Layout(format, TEXT, {}, header, names, pattern)
    records = list(islice(draft._records(source.files), SAMPLE))
    refuse(not records, f"{first} is empty: there is no row in it" + (" below the header" if header else ""))
    refuse(
        wanted is IMAGES,
        f"task {plan.task} needs pictures: a folder for each class, an idx pair or an npz file"
        f"; {first} is {format}",
    )
    shape, roles = columns.choose_columns(records, plan.columns, wanted, named=header or not table)
    width = tables.counted(len(records[0].cells), "field" if format == "jsonl" else "column")
    headed = f" {'with' if header else 'without'} a header" if table else ""
    notes.append(
        f"{width}{headed}: {tables.listed(f'{role} from `{column}`' for role, column in roles.items())}"
    )
    unlike = [path.name for path in (*source.files, *validation) if draft.unlike(path)]
    if unlike:
        notes.append(
            f"{'no' if header else 'a'} header in {tables.listed(unlike)}"
            f": columns taken in the order of {first.name}"
        )
    return draft._replace(shape=shape, roles=roles), notes


def _sample(path: Path, format: str, most: int) -> list[list[str]]:
    return [row for _, row in islice(tables.read_rows(path, format), most)]


def _pattern(written: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(written)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"the pattern {written!r} is no regular expression: {error}") from None
    refuse(
        not pattern.groupindex,
        f"the pattern {written!r} has no named groups: write them as (?P<source>...) and (?P<target>...)",
    )
    return pattern
