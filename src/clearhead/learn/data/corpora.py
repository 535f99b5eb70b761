"""Corpora that every machine has.

Made from the Python installation, the same each time for a given version.
"""

import ast
import datetime
import functools
import importlib
import inspect
import random
import re
import sysconfig
import tokenize
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from clearhead.errors import MissingExtraError, nearest, refuse
from clearhead.learn.data.examples import Chunk, Labelled, Pair, Picture, RowType
from clearhead.learn.data.files import listing
from clearhead.learn.data.pictures import Pictures
from clearhead.learn.data.plan import DataPlan

Documents: TypeAlias = Callable[[], Iterable[Iterable[str]]]  # each document in chunks
Content: TypeAlias = Documents | list[Pair] | list[Labelled] | Pictures


class Embedded(NamedTuple):
    """A corpus that needs no files."""

    name: str
    sentence: str  # what it is
    row: RowType
    load: Callable[[], Content]


# The standard library --------------------------------------------------------------------------------------

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}


def library_files() -> list[Path]:
    """Return the modules of the standard library, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    # Modules named _sysconfigdata describe one machine.
    return [
        root / path
        for path in files
        if not _LEFT_OUT & set(path.parts) and not path.name.startswith(("_sysconfigdata", "test_"))
    ]


def _sources(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        try:
            with tokenize.open(path) as file:
                yield file.read()
        except (SyntaxError, UnicodeDecodeError, OSError):  # not for this version of Python
            continue


def _library_code() -> Documents:
    files = library_files()
    return lambda: ((text,) for text in _sources(files))


@functools.cache  # parsing the library takes seconds
def _library_docs() -> Documents:
    """Return a document for each module: its docstrings, each once in the whole library."""
    seen: dict[str, int] = {}  # of each docstring: the module it is first met in
    for number, text in enumerate(_sources(library_files())):
        seen |= {doc: number for doc in _docstrings(text) if doc not in seen}
    modules = groupby(seen, key=seen.__getitem__)
    documents = [("\n\n".join(docs) + "\n",) for _, docs in modules]
    return lambda: documents


def _docstrings(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node, clean=False)
            if doc and doc.strip():
                yield inspect.cleandoc(doc)
        # Definitions stand among statements: visiting expressions too would take twice the time.
        inner = [
            child
            for part in ("body", "handlers", "orelse", "finalbody", "cases")
            for child in getattr(node, part, ())
        ]
        waiting += reversed(inner)


# Names, dates, digits --------------------------------------------------------------------------------------


def _character_names() -> list[Labelled]:
    """Return the names of characters and their general category, without names that are only a number."""
    named = ((char, unicodedata.name(char, "")) for char in map(chr, range(0x110000)))
    return [
        Labelled(name, unicodedata.category(char))
        for char, name in named
        if name and not re.search(r"-[0-9A-F]{4,6}$|^HANGUL SYLLABLE ", name)
    ]


_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_FORMS = (
    "{d} {month} {y}",
    "{d} {mon} {y}",
    "{d}{th} {month} {y}",
    "{d}{th} of {month} {y}",
    "{d}{th} of {month}, {y}",
    "the {d}{th} of {month} {y}",
    "{month} {d}, {y}",
    "{month} {d}{th}, {y}",
    "{mon} {d}, {y}",
    "{mon}. {d}, {y}",
    "{month} the {d}{th}, {y}",
    "{weekday}, {d} {month} {y}",
    "{weekday}, {month} {d}, {y}",
    "{day} {d} {mon} {y}",
    "{day}, {d} {mon} {y}",
    "{weekday} the {d}{th} of {month} {y}",
    "{y} {month} {d}",
    "{y}, {month} {d}{th}",
    "{y}-{mon}-{d:02}",
    "{d:02}-{mon}-{y}",
    "{d:02}{MON}{y}",
    "{d}. {month} {y}",
    "{y}/{m:02}/{d:02}",
    "{y}.{m}.{d}",
)


def _dates(count: int = 20_000) -> list[Pair]:
    """Return dates of two centuries in many written forms, all unambiguous, and as ISO 8601."""
    draw = random.Random(0)
    first, last = datetime.date(1900, 1, 1).toordinal(), datetime.date(2099, 12, 31).toordinal()
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        date = datetime.date.fromordinal(draw.randint(first, last))
        pairs.setdefault(write_date(date, draw.choice(_FORMS)), date.isoformat())
    return [Pair(source, target) for source, target in pairs.items()]


def write_date(date: datetime.date, form: str) -> str:
    """Write a date in words; names are English whatever the locale."""
    month, weekday = _MONTHS[date.month - 1], _DAYS[date.weekday()]
    th = "th" if date.day in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(date.day % 10, "th")
    return form.format(
        d=date.day, m=date.month, y=date.year, th=th,
        month=month, mon=month[:3], MON=month[:3].upper(), weekday=weekday, day=weekday[:3],
    )  # fmt: skip


def _digits() -> Pictures:
    try:
        digits = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise MissingExtraError(
            "the corpus digits needs scikit-learn: pip install 'clearhead[train]'"
        ) from None
    pixels = np.rint(digits.images[..., None] * (255 / 16)).astype(np.uint8)  # N H W C; given from 0 to 16
    sources = [f"digit {number}" for number in range(len(pixels))]
    return Pictures(pixels, list(map(str, digits.target)), sources)


CORPORA: dict[str, Embedded] = {
    corpus.name: corpus
    for corpus in (
        Embedded(
            "stdlib-docs", "English prose: the docstrings of Python's standard library", Chunk, _library_docs
        ),
        Embedded("stdlib-code", "Python: the source of the standard library", Chunk, _library_code),
        Embedded(
            "unicode-names", "names of characters and their general category", Labelled, _character_names
        ),
        Embedded("dates", "dates in many written forms, to be written as ISO 8601", Pair, _dates),
        Embedded("digits", "handwritten digits of 8 x 8 pixels, from scikit-learn", Picture, _digits),
    )
}


@listing()
def embedded_corpus(plan: DataPlan) -> Embedded | None:
    """Return the embedded corpus a plan names.

    A file or folder of that name comes first, unless the plan differs.
    """
    name = plan.paths[0]
    refuse(
        plan.format == "corpus" and name not in CORPORA,
        f"there is no embedded corpus {name!r}{nearest(name, CORPORA)}; there are {', '.join(CORPORA)}",
    )
    free = plan.format is None and not Path(name).expanduser().exists()
    return CORPORA.get(name) if len(plan.paths) == 1 and (free or plan.format == "corpus") else None
