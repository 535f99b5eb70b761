"""Passages: cut from files, found with a score, put before a prompt.

Of JSON lines each object is a passage; paragraphs of other text are joined up to some words.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.errors import InputError, refuse
from clearhead.learn.data.files import NAME_ENCODING, UTF8, encoding_of, read_blocks

WORDS = 150  # of a passage of plain text, at most


@dataclass(frozen=True)
class IndexedPassage:
    """A passage of a file."""

    text: str
    file: str
    line: int  # its first one, from 1
    name: str = ""  # the id that a JSON object gives it

    @property
    def place(self) -> str:
        """Where it stands, for a citation."""
        return f"{self.file} line {self.line}" + (f" ({self.name})" if self.name else "")


@dataclass(frozen=True)
class Hit:
    """A passage that was found, and its score: of vectors, BM25, or the sum of 1 / (60 + rank)."""

    passage: IndexedPassage
    score: float

    @property
    def text(self) -> str:
        """The passage itself."""
        return self.passage.text

    @property
    def name(self) -> str:
        """The id that a JSON object gave the passage, else where it stands: file and line."""
        return self.passage.name or self.passage.place

    @property
    def file(self) -> str:
        """The file that it is of."""
        return self.passage.file

    @property
    def line(self) -> int:
        """Its first line in the file, from 1."""
        return self.passage.line


@dataclass(frozen=True)
class IndexedFile:
    """A file as it was when it was read."""

    file: str
    digest: str  # of its bytes
    size: int
    changed: int  # nanoseconds

    def is_current(self) -> bool:
        """Return True if the file still holds the same bytes."""
        path = Path(self.file)
        try:
            stat = path.stat()
            if (stat.st_size, stat.st_mtime_ns) == (self.size, self.changed):
                return True
            return stat.st_size == self.size and _digest(path.read_bytes()) == self.digest
        except OSError:
            return False


def find_files(given: Sequence[str | Path]) -> list[Path]:
    """Return the files that are named, and those in the folders that are, hidden ones left out."""
    paths: dict[Path, None] = {}
    for path in map(Path, given):
        refuse(not path.exists(), f"{path} does not exist: name files or folders of text")
        inside = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        paths |= {file: None for file in inside if not path.is_dir() or not file.name.startswith(".")}
    refuse(not paths, f"there is no file in {', '.join(map(str, given)) or 'nothing'}: name files of text")
    return list(paths)


def read_passages(path: Path, words: int = WORDS) -> tuple[IndexedFile, list[IndexedPassage]]:
    """Read a file of text in any encoding that is recognised, .gz as well.

    A line of .jsonl is a JSON object with `text` and perhaps `title`.
    """
    try:
        raw, stat, encoding = path.read_bytes(), path.stat(), encoding_of(path)
        text = "".join(read_blocks(path, encoding))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except InputError as error:  # an index has no setting for it
        raise InputError(str(error).removesuffix(NAME_ENCODING)) from None
    if encoding != UTF8:
        warnings.warn(f"{path} is not UTF-8: read as {encoding}", stacklevel=2)
    jsonl = ".jsonl" in path.suffixes
    passages = _objects(path, text) if jsonl else _paragraphs(path, text, words)
    return IndexedFile(str(path), _digest(raw), len(raw), stat.st_mtime_ns), list(passages)


def _objects(path: Path, text: str) -> Iterator[IndexedPassage]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            body = " ".join(part for part in (row.get("title", ""), row["text"]) if part.strip())
            name = str(row.get("_id", row.get("id", "")))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InputError(f'{path} line {number} is no JSON object with a "text": {line:.60}') from None
        if body.strip():
            yield IndexedPassage(body, str(path), number, name)


def _paragraphs(path: Path, text: str, words: int) -> Iterator[IndexedPassage]:
    """Give paragraphs, joined while they have `words` words or less; a longer one is cut."""
    kept, first = list[str](), 1
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        blank, mine = not line.strip(), line.split()
        if kept and ((blank and len(kept) > words / 2) or len(kept) + len(mine) > words):
            yield IndexedPassage(" ".join(kept), str(path), first)
            kept = []
        first = first if kept else number
        kept += mine
        while len(kept) > words:
            yield IndexedPassage(" ".join(kept[:words]), str(path), first)
            kept = kept[words:]
    if kept:
        yield IndexedPassage(" ".join(kept), str(path), first)


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


# Before a prompt --------------------------------------------------------------------------------------------


def cited(hit: Hit) -> dict[str, Any]:
    """Return a passage that was found as JSON has it."""
    return {"score": hit.score, **vars(hit.passage)}


def before_prompt(
    prompt: str, hits: list[Hit], tokens: Callable[[str], int], most: int
) -> tuple[str, list[Hit]]:
    """Return a prompt after as many numbered passages as there is room for, the nearest last, and these.

    Args:
        prompt: what the passages stand before.
        hits: the passages, nearest first.
        tokens: counts those that the model reads for a prompt.
        most: how many it may read, so that there is room for its answer.
    """
    for count in range(len(hits), 0, -1):
        shown = [f"[{number}] {hit.passage.text}\n\n" for number, hit in enumerate(hits[:count], start=1)]
        whole = "".join([*reversed(shown), prompt])
        if tokens(whole) <= most:
            return whole, hits[:count]
    refuse(
        hits,
        f"no passage fits before the prompt: there is room for {max(most, 0)} tokens next to the answer: "
        "shorten the prompt or the answer (max new tokens), or index with fewer --words",
    )
    return prompt, []
