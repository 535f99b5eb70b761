"""Data that is not a text file: rows in memory, frames of pandas and polars, datasets, Arrow and Parquet.

None of those libraries is imported unless a file of theirs is read: their objects are known by what they can
do. Rows in memory are written to JSON lines, so that a run can be resumed and its recipe repeats it.
"""

import datetime
import decimal
import importlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from clearhead.errors import InputError, MissingExtraError, refuse
from clearhead.learn.data.corpora import CORPORA
from clearhead.learn.data.files import listing

LOOKED_AT = 100  # elements of a list by which texts are told from paths
_FILE_NAME = re.compile(r"[!-~]{1,80}|.*\.[A-Za-z0-9]{1,7}")  # one word of few letters, or it has an ending
# Parts of a data set that are validated on, the first that is there.
VALIDATION = ("validation", "valid", "dev", "test")
WRITTEN = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)  # as text
ROWS = {"paths": "rows.jsonl", "validation": "validation-rows.jsonl"}  # by the key of [data] that names them


@dataclass(frozen=True)
class Given:
    """Rows in memory, to train on and to validate on."""

    paths: Iterable[Any]
    validation: Iterable[Any] | None = None
    notes: tuple[str, ...] = ()

    def write(self, folder: Path) -> dict[str, tuple[str, ...]]:
        """Write the rows into a folder; return the keys of `[data]` that name the files."""
        written: dict[str, tuple[str, ...]] = {}
        for key, name in ROWS.items():
            rows = getattr(self, key)
            if rows is not None:
                path = folder.absolute() / name
                with listing(path), path.open("w", encoding="utf-8") as file:
                    for number, row in enumerate(rows, 1):
                        file.write(json.dumps(_record(row, f"row {number} of the data")) + "\n")
                written[key] = (str(path),)
        return written


def given_or_paths(data: Any) -> Given | tuple[str, ...]:
    """Tell rows in memory from the names of files, folders, globs and corpora.

    A list of strings names files, unless none of them exists and most could not be a file's name.
    """
    if isinstance(data, str | os.PathLike):
        return (os.fspath(data),)
    if isinstance(data, Mapping):
        return _of_mapping(data)
    if (rows := _of_frame(data)) is not None:  # of these, Arrow's and lazy ones cannot be iterated over
        return Given(rows)
    refuse(
        not isinstance(data, Iterable),
        f"data is a {type(data).__name__}: give paths, texts, rows, a frame or a data set",
    )
    elements = iter(data)
    first = list(islice(elements, LOOKED_AT))
    strings = [element for element in first if isinstance(element, str)]
    if any(isinstance(element, os.PathLike) for element in first) or (
        len(strings) == len(first) and not _texts(strings)
    ):
        return tuple(map(os.fspath, chain(first, elements)))
    return Given(_named(data, chain(first, elements)))


def _texts(strings: list[str]) -> bool:
    """Return True if strings are texts rather than paths."""
    if len(strings) < 2 or any(text in CORPORA or os.path.exists(text) for text in strings):
        return False
    return sum("\n" in text or not _FILE_NAME.fullmatch(text) for text in strings) * 2 > len(strings)


def _of_mapping(data: Mapping[str, Any]) -> Given:
    """Return the rows of columns, or the parts of a data set."""
    if "train" in data and not isinstance(next(iter(data["train"]), None), str):
        validation = next((name for name in VALIDATION if name in data), None)
        unused = [name for name in data if name not in ("train", validation)]
        notes = [f"the part {validation} is validated on"] if validation else []
        notes += [f"parts that are not used: {', '.join(unused)}"] if unused else []
        return Given(_rows(data["train"]), _rows(data[validation]) if validation else None, tuple(notes))
    lengths = {name: len(column) if hasattr(column, "__len__") else None for name, column in data.items()}
    refuse(
        len(set(lengths.values())) != 1
        or None in lengths.values()
        or any(isinstance(column, str) for column in data.values()),
        "a dictionary must hold columns of one length, or the parts train and validation of a data set: "
        f"this one has {', '.join(f'{name} ({size})' for name, size in lengths.items()) or 'nothing'}",
    )
    return Given(dict(zip(data, row)) for row in zip(*data.values()))


def _rows(data: Any) -> Iterable[Any]:
    rows = _of_frame(data)
    return _named(data, iter(data)) if rows is None else rows


def _of_frame(data: Any) -> Iterator[Any] | None:
    """Return the rows of a frame of pandas or polars, or of an Arrow table; None for anything else."""
    if hasattr(data, "collect") and hasattr(data, "collect_schema"):  # a lazy frame of polars
        data = data.collect()
    if hasattr(data, "iter_rows"):  # polars
        return (row for row in data.iter_rows(named=True))
    if hasattr(data, "to_batches"):  # Arrow
        return (row for batch in data.to_batches() for row in batch.to_pylist())
    if hasattr(data, "to_pylist"):
        return (row for row in data.to_pylist())
    if hasattr(data, "itertuples") and hasattr(data, "columns"):  # pandas
        names = [str(name) for name in data.columns]
        return (dict(zip(names, row)) for row in data.itertuples(index=False, name=None))
    return None


def _named(data: Any, rows: Iterator[Any]) -> Iterator[Any]:
    """Give the classes of a Hugging Face data set their names in place of numbers."""
    features = getattr(data, "features", None)
    names = {
        column: feature.names
        for column, feature in (features.items() if isinstance(features, Mapping) else ())
        if isinstance(getattr(feature, "names", None), list)
    }
    for row in rows:
        changed = {
            column: listed[row[column]]
            for column, listed in names.items()
            if type(row.get(column)) is int and 0 <= row[column] < len(listed)
        }
        yield {**row, **changed} if changed else row


def _record(row: Any, place: str) -> dict[str, Any]:
    """Return a row as named plain cells: a text alone is `text`, the cells of a tuple are 1, 2, 3."""
    if isinstance(row, str):
        return {"text": row}
    if hasattr(row, "_asdict"):
        row = row._asdict()
    elif hasattr(row, "tolist"):
        row = row.tolist()
    if isinstance(row, list | tuple):
        row = {str(number): cell for number, cell in enumerate(row, 1)}
    refuse(
        not isinstance(row, Mapping), f"{place} is a {type(row).__name__}: give texts, dictionaries or tuples"
    )
    return {str(name): plain_cell(cell, f"{place}, `{name}`") for name, cell in row.items()}


def plain_cell(value: Any, place: str) -> Any:
    """Return a cell as JSON has it; a missing value is None."""
    if (
        value is None
        or type(value).__name__ in ("NAType", "NaTType")
        or (isinstance(value, float) and value != value)
    ):
        return None
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, WRITTEN):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain_cell(cell, place) for name, cell in value.items()}
    if isinstance(value, list | tuple):
        return [plain_cell(cell, place) for cell in value]
    if hasattr(value, "tolist"):  # of NumPy: an array, or one number
        return plain_cell(value.tolist(), place)
    raise InputError(
        f"{place} is a {type(value).__name__}: only text, numbers, dates, lists and tables are read"
    )


def read_arrow(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and cells of each row of a Parquet, Arrow or Feather file."""
    try:
        arrow, ipc = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.ipc")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtraError(f"{path} needs pyarrow: pip install 'clearhead[arrow]'") from None
    number = 0
    try:
        if path.suffix.lower() == ".parquet":
            batches = parquet.ParquetFile(path).iter_batches()
        else:
            try:
                file = ipc.open_file(path)
                batches = map(file.get_batch, range(file.num_record_batches))
            except arrow.ArrowInvalid:  # written as a stream
                batches = ipc.open_stream(path)
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                place = f"{path}, row {number}"
                yield place, {name: plain_cell(cell, place) for name, cell in row.items()}
    except (arrow.ArrowException, OSError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{path} is no Arrow or Parquet file that can be read: {first}") from None
