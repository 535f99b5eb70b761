"""Find the files that a plan names and their format, by names and first bytes."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from clearhead.errors import InputError, refuse
from clearhead.learn.data.conll import cells
from clearhead.learn.data.examples import Chunk, Pair, RowType
from clearhead.learn.data.files import bare, blank, expand, listing, read_head
from clearhead.learn.data.plan import DataPlan, Format
from clearhead.learn.data.tables import Record, Row, counted, read_json, read_table

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
SUFFIXES: dict[str, Format] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".conll", ".conllu", ".iob", ".iob2", ".bio"), "conll"),
    **dict.fromkeys(PICTURES, "folders"),
    ".csv": "csv",
    **dict.fromkeys((".parquet", ".arrow", ".feather"), "arrow"),
    ".npz": "npz",
}
SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".xlsb", ".ods", ".numbers")
LANGUAGES = frozenset(
    ("en", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "no", "fi", "pl", "cs", "sk", "ru", "uk")
    + ("bg", "ro", "hu", "el", "tr", "ar", "he", "fa", "hi", "zh", "ja", "ko", "vi", "id", "th")
)
IDX = re.compile(r"(.*)(images|labels)[-.]idx\d-ubyte")
_SIDES = (("src", "tgt"), ("src", "trg"), ("source", "target"), ("input", "output"))
_LANGUAGE = re.compile(r"\.[a-z]{2,3}([_-][A-Za-z]{2,4})?")
_NO_LANGUAGES = (".txt", ".tsv", ".tab", ".md", ".py", ".rst", *SUFFIXES)
_UNLIKE_DATA = ("binary", "folders")  # pictures, too, unless most files are
_UNLIKE_TEXT = ("binary", "arrow", "folders", "idx", "npz")
_WORDS = {
    "text": "plain text",
    "conll": "tagged sentences (conll)",
    "folders": "pictures, a folder for each class",
}


Look = Format | Literal["binary"]
Looks = dict[Path, Look]


class Source(NamedTuple):
    """Files of one format."""

    format: Format
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def find_source(
    plan: DataPlan, paths: Sequence[str], wanted: RowType | None = None, known: Iterable[str] = ()
) -> Source:
    """Return the files of the given paths and their format: the plan's, else the one they look like.

    `wanted` is the class of examples that the task needs, where there is a task; `known` are names that may
    have been meant where there is no such file.
    """
    parallel = plan.format in (None, "parallel")
    if parallel and len(paths) == 1 and (source := _by_stem(plan, Path(paths[0]).expanduser())):
        return source
    files = expand(paths, known)
    if parallel and wanted in (None, Pair) and (source := _two_files(plan, files)):
        return source
    refuse(
        plan.pattern is not None and plan.format not in (None, "lines"),
        f'data.pattern goes with data.format "lines", not {plan.format!r}: leave one of them out',
    )
    refuse(
        plan.format == "lines" and plan.pattern is None,
        'data.format "lines" needs a data.pattern with named groups, such as '
        r"(?P<source>.+)\t(?P<target>.+)",
    )
    if plan.pattern is not None:
        return Source("lines", tuple(files))
    sheet = next((path for path in files if path.suffix.lower() in SPREADSHEETS), None)
    refuse(
        sheet is not None and (plan.format is None or len(files) == 1),
        f"{sheet} is a spreadsheet, which is not read: save its sheet as CSV in UTF-8, "
        "or give a pandas frame to clearhead.train",
    )
    looks: Looks = {path: format_of(path, wanted, plan.encoding) for path in files}
    if plan.format is not None:  # in a folder, files of other formats may lie next to those meant
        texts = set(looks.values()).difference(_UNLIKE_TEXT) if plan.format == "text" else {plan.format}
        fitting = [path for path, look in looks.items() if look in texts] or files
        return Source(plan.format, tuple(fitting), _left_out(files, fitting, "of another format"))
    full = {path: look for path, look in looks.items() if not blank(path, plan.encoding)} or looks
    empty = _left_out(files, list(full), "without content")
    fitting = _without_strays(full)
    strays = _left_out(list(full), fitting, "of another format")
    files, look = fitting, looks[fitting[0]]
    if look == "binary":
        raise InputError(
            f"{files[0]} is a binary file of no known kind: "
            "text, tables, Parquet, pictures, idx and npz can be read"
        )
    whole = files[0].name if len(files) == 1 else f"{len(files):,} files"
    why = _why_not_parallel(files) if look == "text" and wanted is None else None
    more = (f"not taken as parallel files, because {why}",) if why else ()
    notes = (f"{whole}: read as {_WORDS.get(look, look)}", *more, *empty, *strays)
    return Source(look, tuple(files), notes)


def _left_out(files: Sequence[Path], kept: Sequence[Path], why: str) -> tuple[str, ...]:
    """Return a note on files that are left out; () if there are none."""
    others = [path for path in files if path not in set(kept)]
    many = f", the first {others[0]}" if len(others) > 1 else f": {others[0]}" if others else ""
    return (f"{counted(len(others), 'file')} {why} left out{many}",) if others else ()


def _without_strays(looks: Looks) -> list[Path]:
    """Return the files of the format that most are of; refuse files of which none is clearly meant.

    Pictures and binary files lie among texts by accident, and texts among pictures. Two formats of data may
    both be meant, so that of the second there may be one file, or a tenth.
    """
    counts = Counter(looks.values())
    (main, most), *others = counts.most_common()
    accidents = _UNLIKE_DATA if main != "folders" else {"binary", "text", "csv", "tsv", "jsonl", "conll"}
    rivals = sum(count for look, count in others if look not in accidents)
    few = rivals <= max(1, len(looks) // 10) and all(count < most for _, count in others)
    first = {look: next(path for path in looks if looks[path] == look) for look in looks.values()}
    data = next((look for look in first if look != "binary"), "text")
    mixed = ", ".join(f"{look} ({path.name})" for look, path in first.items())
    refuse(
        others and (not few or main == "binary"),
        f"the files are of several formats: {mixed}; "
        f"name those of one, or choose with --set data.format={data}",
    )
    return [path for path, look in looks.items() if look == main]


def format_of(path: Path, wanted: RowType | None = None, encoding: str | None = None) -> Look:
    """Return the format of a file by its name, else by its first bytes; plain text where text is `wanted`."""
    name = bare(path).name.lower()
    suffix = Path(name).suffix
    if IDX.fullmatch(name) or suffix in SUFFIXES:
        return SUFFIXES.get(suffix, "idx")
    head, table = read_head(path, encoding), suffix in (".tsv", ".tab")
    if head is None or (wanted is Chunk and not table):
        return "binary" if head is None else "text"
    lines = head.text.removesuffix("\n").split("\n")
    lines = lines[:-1] if head.cut else lines  # the last one may be cut
    full = [line for line in lines if line.strip()]
    tabs = len(full) > 1 and full[0].count("\t") and len({line.count("\t") for line in full}) == 1
    looks: dict[Format, object] = {
        "conll": _tagged(lines),
        "tsv": table or tabs,
        "jsonl": full and full[0].startswith("{") and _is_object(full[0]),
    }
    return next((format for format, fits in looks.items() if fits), "text")


def rows_of(
    path: str | Path, row: Callable[[Record, Path], Row], *, absent: str, other: str, empty: str
) -> list[Row]:
    """Read a file of rows with named columns: TSV or CSV with a header, or JSON lines.

    `row` is given each record and the folder of the file. `absent`, `other` and `empty` end the lines that
    refuse a file that is not there, one of another format, and one without rows.
    """
    source = Path(path)
    refuse(not source.is_file(), f"{source} is no file: {absent}")
    kind = format_of(source)
    refuse(kind not in ("tsv", "csv", "json", "jsonl"), f"{source} looks like {kind}: {other}")
    records = read_table(source, kind, header=True) if kind in ("tsv", "csv") else read_json(source)
    rows = [row(record, source.parent) for record in records]
    refuse(not rows, f"{source} holds {empty}")
    return rows


def _is_object(line: str) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(line), dict)
    return False


def _tagged(lines: Sequence[str]) -> bool:
    """Return True for words with columns.

    There are empty lines between blocks, as many cells on each line, and a last column of few values.
    """
    full = [line for line in lines if line.strip() and not line.startswith("# ")]
    if len(full) < 4 or all(line.strip() for line in lines[1:-1]):
        return False
    rows = [cells(line, "\t" in full[0]) for line in full]
    if len(rows[0]) < 2 or len({len(row) for row in rows}) > 1 or any(" " in row[0] for row in rows):
        return False
    return len({row[-1] for row in rows}) <= (len(rows) + 1) // 2


# Parallel files --------------------------------------------------------------------------------------------


@listing()
def _by_stem(plan: DataPlan, stem: Path) -> Source | None:
    """Find parallel files by what their names have in common: train for train.en and train.de."""
    languages = {} if stem.exists() else _languages(stem)
    return _choose(plan, stem, languages) if len(languages) > 1 else None


def _two_files(plan: DataPlan, files: Sequence[Path]) -> Source | None:
    """Return two files whose names say their languages or sides; any two, if the plan says so."""
    if way := way_of(files):
        return _choose(plan, files[0], dict(zip(_ends(files), files)), way)
    refuse(
        plan.format is not None and len(files) != 2,
        'data.format "parallel" takes two files, or what their names have in common, such as data/train for '
        "train.en, train.de",
    )
    return None if plan.format is None else _parallel(*files)


def way_of(files: Sequence[Path]) -> dict[str, str]:
    """Return the languages of two parallel files by their names, {source: en, target: de}, or {}.

    The names of sides, such as src and tgt, say which is the source; languages are in the order of the files.
    """
    ends = _ends(files)
    return dict(zip(Pair.NEEDED, ends[::-1] if ends[::-1] in _SIDES else ends))


def _ends(files: Sequence[Path]) -> tuple[str, ...]:
    """Return what tells the names of two parallel files apart: (en, de) of train.en and train.de; else ()."""
    names = [bare(path) for path in files]
    if len(names) != 2:
        return ()
    ends = [name.suffix for name in names]
    if names[0].stem == names[1].stem and ends[0] != ends[1] and all(map(_is_language, ends)):
        return ends[0][1:], ends[1][1:]
    parts = [re.split(r"([._-])", name.name) for name in names]  # src-train.txt, train_en.txt
    apart = [pair for pair in zip(*parts) if pair[0] != pair[1]]
    if len(parts[0]) != len(parts[1]) or len(apart) != 1:
        return ()
    pair: tuple[str, str] = apart[0]
    known = pair in _SIDES or pair[::-1] in _SIDES or {*pair} <= LANGUAGES
    return pair if known else ()


@listing()
def way_for(files: Sequence[Path], example: Sequence[Path]) -> dict[str, str]:
    """Return the languages of two example files, if `files` or files that begin so are in the same ones."""
    way = way_of(example)
    there = _languages(files[0]) if len(files) == 1 and not files[0].exists() else way_of(files).values()
    return way if set(way.values()) <= set(there) else {}


def same_way(source: Source, validation: Source) -> Source:
    """Return parallel validation files in the direction of the training files."""
    ends, other = (_ends(each.files) for each in (source, validation))
    swapped = source.format == validation.format == "parallel" and ends and other == ends[::-1]
    return _parallel(*validation.files[::-1]) if swapped else validation


def _why_not_parallel(files: Sequence[Path]) -> str | None:
    """Return why files named by their languages are not parallel; None for other files."""
    ends = {bare(path).suffix for path in files}
    if len(ends) < 2 or not all(re.split("[._-]", f"{end}.")[1] in LANGUAGES for end in ends):
        return None
    if len(files) > 2:
        return f"there are {len(files):,} of them: name the two that go together"
    return "their names differ before the language: if they go together, --set data.format=parallel"


def _is_language(end: str) -> bool:
    return bool(_LANGUAGE.fullmatch(end)) and end not in _NO_LANGUAGES


def _languages(stem: Path) -> dict[str, Path]:
    """Return the files `stem.xx` and `stem.xx.gz` by their ending."""
    files: dict[str, Path] = {}
    for path in sorted(stem.parent.iterdir()) if stem.parent.is_dir() else ():
        end = bare(path).name.removeprefix(f"{stem.name}.")
        if path.name.startswith(f"{stem.name}.") and path.is_file() and _is_language(f".{end}"):
            files.setdefault(end, path)  # train.en comes before train.en.gz
    return files


def _choose(
    plan: DataPlan, stem: Path, languages: dict[str, Path], way: Mapping[str, str] = MappingProxyType({})
) -> Source:
    wanted = [plan.columns.get(role) for role in Pair.NEEDED]
    if wanted == [None, None]:
        wanted = [way.get(role) for role in Pair.NEEDED]
    for language in wanted:
        refuse(
            language is not None and language not in languages,
            f"{stem} is not there in {language!r}: there are {', '.join(languages)}",
        )
    left = [language for language in languages if language not in wanted]
    if len(languages) > 2 and None in wanted:
        example = f'{{source = "{left[0]}", target = "{left[-1]}"}}'
        raise InputError(
            f"{stem} is there in {', '.join(languages)}: choose two, such as --set data.columns='{example}'"
        )
    source, target = (language or left.pop(0) for language in wanted)
    return _parallel(languages[source], languages[target])


def _parallel(source: Path, target: Path) -> Source:
    return Source("parallel", (source, target), (f"parallel files: from {source.name} to {target.name}",))
