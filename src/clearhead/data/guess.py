"""What files hold, by their names and their first bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clearhead.data.columns import LANGUAGES, SHAPES
from clearhead.data.files import HEAD, bare, blank, expand, head, listing
from clearhead.data.plan import DataPlan, Format, Task
from clearhead.data.tables import counted
from clearhead.data.tags import cells
from clearhead.errors import InputError

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".conll": "conll",
    ".conllu": "conll",
    ".iob": "conll",
    ".iob2": "conll",
    ".bio": "conll",
    ".npz": "npz",
    **dict.fromkeys(PICTURES, "folders"),
}
IDX = re.compile(r"(.*)(images|labels)[-.]idx\d-ubyte")
_LANGUAGE = re.compile(r"\.[a-z]{2,3}([_-][A-Za-z]{2,4})?")


@dataclass(frozen=True)
class Source:
    """Files of one format."""

    format: Format
    files: tuple[Path, ...]
    said: tuple[str, ...] = ()


def find_source(plan: DataPlan, paths: Sequence[str], known: Iterable[str] = ()) -> Source:
    """The files behind the given paths and their format: what the plan says, else what they look like.

    `known` are names that may have been meant where there is no such file.
    """
    if (
        plan.format in (None, "parallel")
        and len(paths) == 1
        and (source := _stem(plan, Path(paths[0]).expanduser())) is not None
    ):
        return source
    files = expand(paths, known)
    if (
        plan.format in (None, "parallel")
        and plan.task in (None, "seq2seq")
        and (source := _two(plan, files)) is not None
    ):
        return source
    if plan.pattern is not None:
        if plan.format not in (None, "lines"):
            raise InputError(
                f'data.pattern goes with data.format "lines", not {plan.format!r}: leave one of them out'
            )
        return Source("lines", tuple(files))
    if plan.format == "lines":
        raise InputError(
            'data.format "lines" needs a data.pattern with named groups, such as (?P<source>.+)\\t(?P<target>.+)'
        )
    looks = {path: format_of(path, plan.task) for path in files}
    if plan.format is not None:
        # In a folder other files may lie beside those meant.
        fitting = [
            path
            for path, look in looks.items()
            if look == plan.format or (plan.format == "text" and look not in _UNLIKE_TEXT)
        ]
        others = len(files) - len(fitting or files)
        return Source(
            plan.format,
            tuple(fitting or files),
            (f"{counted(others, 'file')} of other formats left out",) if others else (),
        )
    first: dict[Format | Literal["binary"], Path] = {}
    for path, look in looks.items():
        if look in _UNLIKE_TEXT or not blank(path):
            first.setdefault(look, path)
    first = first or {looks[files[0]]: files[0]}
    if len(first) > 1:
        mixed = ", ".join(f"{look} ({path.name})" for look, path in first.items())
        raise InputError(
            f"the files are of several formats: {mixed}; name those of one, or choose with --set data.format={next(iter(first))}"
        )
    (look,) = first
    if look == "binary":
        raise InputError(
            f"{files[0]} is a binary file of no known kind, or UTF-16: convert it to UTF-8; text, tables, pictures, idx and npz can be read"
        )
    whole = files[0].name if len(files) == 1 else f"{len(files):,} files"
    said = [f"{whole}: read as {_WORDS.get(look, look)}"]
    if look == "text" and plan.task is None and (why := _why_not_parallel(files)):
        said.append(f"not taken as parallel files, because {why}")
    return Source(look, tuple(files), tuple(said))


_UNLIKE_TEXT = ("binary", "folders", "idx", "npz")
_WORDS = {
    "text": "plain text",
    "conll": "tagged sentences (conll)",
    "folders": "pictures, a folder for each class",
}


def format_of(path: Path, task: Task | None = None) -> Format | Literal["binary"]:
    """The format of a file, by its name, else by its first bytes; `task` lm, mlm or denoise speaks for plain text."""
    name = bare(path).name.lower()
    suffix = Path(name).suffix
    if IDX.fullmatch(name):
        return "idx"
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    data = head(path)
    if b"\0" in data:
        return "binary"
    table = suffix in (".tsv", ".tab")
    if task is not None and SHAPES[task] == "text" and not table:
        return "text"
    lines = data.decode("utf-8-sig", "replace").removesuffix("\n").split("\n")
    lines = lines[:-1] if len(data) == HEAD else lines  # the last one may be cut
    if _tagged(lines):
        return "conll"
    full = [line for line in lines if line.strip()]
    if table or (len(full) > 1 and full[0].count("\t") and len({line.count("\t") for line in full}) == 1):
        return "tsv"
    return "jsonl" if full and full[0].startswith("{") and _is_object(full[0]) else "text"


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _tagged(lines: Sequence[str]) -> bool:
    """Words with columns: empty lines between blocks, as many cells on each line, and a last column of few values."""
    full = [line for line in lines if line.strip() and not line.startswith("# ")]
    inner = [not line.strip() for line in lines]
    if len(full) < 4 or not any(inner[1 : len(lines) - 1]):
        return False
    tabs = "\t" in full[0]
    rows = [cells(line, tabs) for line in full]
    few = len({row[-1] for row in rows}) <= (len(rows) + 1) // 2
    words = all(" " not in row[0] for row in rows)
    return len(rows[0]) > 1 and len({len(row) for row in rows}) == 1 and few and words


# Parallel files ---------------------------------------------------------------------------------------------------------


@listing()
def _stem(plan: DataPlan, stem: Path) -> Source | None:
    """Files with a line for each line of the other, named by what their names have in common: train for train.en, train.de."""
    languages = {} if stem.exists() else _languages(stem)
    return _choose(plan, stem, languages) if len(languages) > 1 else None


def _two(plan: DataPlan, files: Sequence[Path]) -> Source | None:
    """Two files that differ in a language at the end of their names; any two, if the plan says so."""
    if way := way_of(files):
        return _choose(plan, files[0], dict(zip(way.values(), files)))
    if plan.format is None:
        return None
    if len(files) != 2:
        raise InputError(
            'data.format "parallel" takes two files, or what their names have in common, such as data/train for train.en, train.de'
        )
    return _source(*files)


def way_of(files: Sequence[Path]) -> dict[str, str]:
    """From which language to which two parallel files go, by their names, such as source en, target de; nothing for other files."""
    ends = [bare(path).suffix for path in files]
    if (
        len(files) != 2
        or ends[0] == ends[1]
        or bare(files[0]).stem != bare(files[1]).stem
        or not all(map(_is_language, ends))
    ):
        return {}
    return {role: end.removeprefix(".") for role, end in zip(("source", "target"), ends)}


@listing()
def way_for(files: Sequence[Path], example: Sequence[Path]) -> dict[str, str]:
    """The way of two example files, if `files` are two in the same languages, or what the names of such have in common."""
    way = way_of(example)
    there = _languages(files[0]) if len(files) == 1 and not files[0].exists() else way_of(files).values()
    return way if set(way.values()) <= set(there) else {}


def same_way(source: Source, held: Source) -> Source:
    """Parallel files to validate on, from the language that those to train on are from."""
    ends, held_ends = ([bare(path).suffix for path in each.files] for each in (source, held))
    turned = source.format == held.format == "parallel" and ends[0] != ends[1] and held_ends == ends[::-1]
    return _source(*held.files[::-1]) if turned else held


def _why_not_parallel(files: Sequence[Path]) -> str | None:
    """What keeps files from being parallel that are named by their languages; None for other files."""
    languages = [re.split("[._-]", bare(path).suffix)[1:2] for path in files]
    if len({bare(path).suffix for path in files}) < 2 or not all(
        own and own[0] in LANGUAGES for own in languages
    ):
        return None
    if len(files) > 2:
        return f"there are {len(files):,} of them: name the two that go together"
    return "their names differ before the language: if they go together, --set data.format=parallel"


def _is_language(end: str) -> bool:
    return (
        bool(_LANGUAGE.fullmatch(end))
        and end not in SUFFIXES
        and end not in (".txt", ".tsv", ".tab", ".md", ".py", ".rst")
    )


def _languages(stem: Path) -> dict[str, Path]:
    """The files `stem.xx` and `stem.xx.gz` by their ending."""
    if not stem.parent.is_dir():
        return {}
    beside = sorted(
        path for path in stem.parent.iterdir() if path.is_file() and path.name.startswith(f"{stem.name}.")
    )
    found: dict[str, Path] = {}
    for path in beside:
        found.setdefault(
            bare(path).name.removeprefix(f"{stem.name}."), path
        )  # train.en comes before train.en.gz
    return {language: path for language, path in found.items() if _is_language(f".{language}")}


def _choose(plan: DataPlan, stem: Path, languages: dict[str, Path]) -> Source:
    wanted = [plan.columns.get(role) for role in ("source", "target")]
    for language in wanted:
        if language is not None and language not in languages:
            raise InputError(f"{stem} is not there in {language!r}: there are {', '.join(languages)}")
    left = [language for language in languages if language not in wanted]
    if len(languages) > 2 and None in wanted:
        example = f'{{source = "{left[0]}", target = "{left[-1]}"}}'
        raise InputError(
            f"{stem} is there in {', '.join(languages)}: choose two, such as --set data.columns='{example}'"
        )
    source, target = (language or left.pop(0) for language in wanted)
    return _source(languages[source], languages[target])


def _source(source: Path, target: Path) -> Source:
    return Source("parallel", (source, target), (f"parallel files: from {source.name} to {target.name}",))
