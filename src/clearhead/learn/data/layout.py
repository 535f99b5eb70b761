"""Decide how the files of a source are read: which format, whether a header, which column plays which role.

Columns are found by name where there are names, by content where there are none. The first file that is not
blank decides; tables may differ in having a header.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from clearhead.errors import InputError, nearest, refuse
from clearhead.learn.data import tables
from clearhead.learn.data.chats import CHATS, PREFERENCES
from clearhead.learn.data.examples import IMAGES, LABELS, PAIRS, QUESTIONS, TAGS, TEXT, Example, Shape
from clearhead.learn.data.files import blank, read_pieces
from clearhead.learn.data.formats import LANGUAGES, Source
from clearhead.learn.data.given import read_arrow
from clearhead.learn.data.headers import (
    IDS,
    MOST_CLASSES,
    NAMES,
    UNNAMED,
    all_numbers,
    has_header,
    may_name_columns,
    numbers_rows,
    repeats_a_label,
)
from clearhead.learn.data.plan import DataPlan

SAMPLE = 1000  # rows from which columns are guessed
GUESSED = (
    PREFERENCES,
    CHATS,
    QUESTIONS,
    TAGS,
    LABELS,
    PAIRS,
    TEXT,
)  # shapes in the order in which they are looked for
_FIXED = {"text": TEXT, "conll": TAGS, "parallel": PAIRS}  # formats that have one shape


Row = TypeVar("Row")


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
    bad: tables.BadRows = tables.REFUSE
    encoding: str | None = None  # of the files; None: each is in its own

    def documents(self, files: Sequence[Path]) -> Iterator[Iterable[str]]:
        """Yield the documents of text files, each in pieces: a file is one, else a record is one."""
        if self.format == "text":
            return (read_pieces(path, self.encoding) for path in files)
        return ((text,) for _, text in self._read(files, lambda record: record.text(self.roles["text"])))

    def examples(self, files: Sequence[Path]) -> Iterator[tuple[str, Example | None]]:
        """Yield the examples with their places; None where a text is empty."""
        assert self.shape.row is not None
        read = self.shape.row.read
        return self._read(files, lambda record: read(record, self.roles))

    def _read(self, files: Sequence[Path], read: Callable[[tables.Record], Row]) -> Iterator[tuple[str, Row]]:
        for record in self._records(files):
            try:
                row = read(record)
            except InputError as error:
                self.bad(error)
            else:
                yield record.place, row

    def _records(self, files: Sequence[Path]) -> Iterator[tables.Record]:
        if self.format == "parallel":
            yield from tables.read_parallel(files, self.encoding)
            return
        for path in files:
            if self.tags is not None:
                records = tables.read_tagged(path, self.tags, self.bad, self.encoding)
            elif self.pattern is not None:
                records = tables.read_matches(path, self.pattern, self.bad, self.encoding)
            elif self.format == "jsonl":
                records = tables.read_json(path, self.bad, self.encoding)
            elif self.format == "arrow":
                records = (tables.Record(place, tables.flat(row, place)) for place, row in read_arrow(path))
            else:
                unlike = self.unlike(path)
                names = self.names if unlike else ()
                records = tables.read_table(
                    path, self.format, self.header != unlike, names, self.bad, self.encoding
                )
            for number, record in enumerate(records):
                for column in self.roles.values() if number == 0 and self.header else ():
                    find_column(column, list(record.cells), f"{path}")
                yield record

    def unlike(self, path: Path) -> bool:
        """Return True if a table surely differs from the first in having a header, or in having none."""
        rows = _sample(path, self.format, SAMPLE, self.encoding) if self.names else []
        if not rows or len(rows[0]) != len(self.names):
            return False
        if not self.header:
            return has_header(rows, {})
        known = set(self.names) & set(tables.column_names(rows[0], header=True))
        return not known and (not may_name_columns(rows[0]) or repeats_a_label(rows))


def lay_out(
    plan: DataPlan,
    source: Source,
    wanted: Shape | None = None,
    validation: Sequence[Path] = (),
    bad: tables.BadRows = tables.REFUSE,
) -> tuple[Layout, list[str]]:
    """Decide how files are read -> the layout, and a note for each guess, also about `validation` files."""
    notes, format = list(source.notes), source.format
    first = next((path for path in source.files if not blank(path, plan.encoding)), source.files[0])
    if format in _FIXED:
        shape = _FIXED[format]
        roles = {} if shape is TEXT else {role: role for role in shape.needed}
        unused = [role for role in plan.columns if role not in roles]
        if unused:
            notes.append(f"data.columns is not used for {', '.join(unused)}, as the format is {format}")
        tags, *more = tables.tag_columns(first, plan.columns, plan.encoding) if shape is TAGS else (None,)
        return Layout(format, shape, roles, tags=tags, bad=bad, encoding=plan.encoding), [*notes, *more]
    table = format in ("tsv", "csv")
    rows = _sample(first, format, SAMPLE, plan.encoding) if table else []
    header = table and bool(has_header(rows, plan.columns) if plan.header is None and rows else plan.header)
    names = tables.column_names(rows[0], header) if rows and plan.header is None else ()
    pattern = None if plan.pattern is None else _pattern(plan.pattern)
    draft = Layout(format, TEXT, {}, header, names, pattern, bad=bad, encoding=plan.encoding)
    records = list(islice(draft._records(source.files), SAMPLE))
    bad.notes(records)
    refuse(not records, f"{first} is empty: there is no row in it" + (" below the header" if header else ""))
    refuse(
        wanted is IMAGES,
        f"task {plan.task} needs pictures: a folder for each class, an idx pair or an npz file"
        f"; {first} is {format}",
    )
    shape, roles = choose_columns(records, plan.columns, wanted, named=header or not table)
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


def _sample(path: Path, format: str, most: int, encoding: str | None) -> list[list[str]]:
    return [row for _, row in islice(tables.read_rows(path, format, encoding), most)]


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


# Roles -----------------------------------------------------------------------------------------------------


def check_roles(columns: Mapping[str, str]) -> None:
    """Refuse roles that no shape has."""
    for role in columns:
        refuse(
            role not in NAMES,
            f"data.columns knows no role {role!r}{nearest(role, NAMES)}; roles are {', '.join(NAMES)}",
        )


def choose_columns(
    records: Sequence[tables.Record], columns: Mapping[str, str], wanted: Shape | None, named: bool
) -> tuple[Shape, dict[str, str]]:
    """Return the shape of the data and the column of each role.

    Args:
        records: the first rows.
        columns: role = column, as far as the user chose.
        wanted: the shape that the task needs; None: guessed.
        named: whether the columns have names.
    """
    names, place = list(dict.fromkeys(name for record in records for name in record.cells)), records[0].place
    cells = {name: [str(record.cells.get(name)) for record in records] for name in names}
    refuse(not names, f"{place} has no field, nor have those after it: there is nothing to learn from")
    given = {role: find_column(column, names, place) for role, column in columns.items()}
    wanted = wanted or _shape_of_roles(given)
    find = _by_name if named else _by_content
    for shape in (wanted,) if wanted else GUESSED:
        if set(given) <= set(shape.roles):
            alone = shape is TEXT and not given and len(names) == 1
            found = {"text": names[0]} if alone else find(shape, cells, given)
            if shape.complete(found):
                return shape, {role: found[role] for role in shape.roles if role in found}
    unnamed = any(map(UNNAMED.fullmatch, names))
    for shape in (wanted or LABELS, PAIRS) if named and not unnamed and not given else ():
        found = _by_content(shape, cells, _by_name(shape, cells, given))
        clear = shape is not PAIRS or sum(not all_numbers(some) for some in cells.values()) == 2
        if wanted in (None, shape) and clear and shape.complete(found):
            return shape, {role: found[role] for role in shape.roles if role in found}
    shape = wanted or LABELS
    found = _by_content(shape, cells, given)
    if not shape.complete(found):
        found = {role: names[min(i, len(names) - 1)] for i, role in enumerate(shape.needed)}
    need = wanted.asks if wanted else "text, text and label, or source and target"
    example = ", ".join(f'{role} = "{tables.listed([found[role]])}"' for role in shape.roles if role in found)
    raise InputError(
        f"{place}: which columns hold {need}? There are {tables.listed(names)}; say it, such as "
        f"--set data.columns='{{{example}}}'"
    )


def find_column(column: str, names: Sequence[str], place: str) -> str:
    """Return the column of this name, or the only one that ends in it after a dot."""
    inner = [name for name in names if name.endswith(f".{column}")]
    refuse(
        column not in names and len(inner) != 1,
        f"{place}: no column {column!r}{nearest(column, names)}; there are {tables.listed(names)}",
    )
    return column if column in names else inner[0]


def _shape_of_roles(given: Mapping[str, str]) -> Shape | None:
    """Return the shape that the given roles belong to, if there is no doubt."""
    partly = [shape for shape in GUESSED if set(given) <= set(shape.roles)]
    whole = [shape for shape in partly if shape.complete(given)]
    refuse(given and not partly, f"data.columns names roles that do not go together: {', '.join(given)}")
    certain = whole or (partly if len(partly) == 1 else [])
    return certain[0] if given and certain else None


def _by_name(shape: Shape, cells: Mapping[str, Sequence[str]], given: Mapping[str, str]) -> dict[str, str]:
    low, roles = {name.lower(): name for name in reversed(list(cells))}, dict(given)
    # Roles with few names of their own choose first: `text` would take almost anything.
    for role in sorted(set(shape.roles) - set(given), key=lambda role: (len(NAMES[role]), role)):
        free = [low[name] for name in NAMES[role] if name in low and low[name] not in roles.values()]
        roles |= {role: free[0]} if free else {}
    left = [name for name in cells if name not in roles.values()]
    if shape is PAIRS and not roles:
        languages = [name for name in left if name.lower().rpartition(".")[2] in LANGUAGES]
        roles = dict(zip(shape.needed, languages)) if len(languages) == 2 else {}
    telling = [
        name
        for name in left
        if name.lower() not in IDS and not UNNAMED.fullmatch(name) and not numbers_rows(cells[name])
    ]
    if "label" in shape.needed and set(roles) == {"text"} and len(telling) == 1:
        roles |= {"label": telling[0]} if _like_labels(shape, cells[telling[0]]) else {}
    return roles


def _by_content(shape: Shape, cells: Mapping[str, Sequence[str]], given: Mapping[str, str]) -> dict[str, str]:
    """Find columns without names.

    The label is the column that looks like one, best without gaps and with few values; the text is the
    longest of the others. Pairs are the first two texts.
    """
    roles = dict(given)
    left = [name for name in cells if name not in roles.values()]
    if "label" in shape.needed and len(left) > 1 and "label" not in roles:
        values = {name: {cell.strip() for cell in cells[name]} for name in reversed(left)}
        few = [name for name in values if _like_labels(shape, cells[name])]
        if few:
            roles["label"] = min(few, key=lambda name: ("" in values[name], len(values[name])))
            left.remove(roles["label"])
    if "label" in shape.needed and left and "label" in roles and "text" not in roles:
        roles["text"] = max(left, key=lambda name: sum(map(len, cells[name])))
    if shape is PAIRS and not roles:
        texts = (name for name in left if not all_numbers(cells[name]))
        roles = dict(zip(shape.needed, texts))
    return roles


def _like_labels(shape: Shape, cells: Sequence[str]) -> bool:
    """Return True if a column looks like labels: some values, most of them more than once; or numbers."""
    few = 2 <= len(set(cells)) <= min(MOST_CLASSES, (len(cells) + 1) // 2)
    return few if shape is LABELS else all_numbers(cells)
