"""Files as passages: the objects of JSON lines as they are, paragraphs of other text up to some words."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clearhead.errors import InputError, refuse

WORDS = 150  # of a passage of plain text, at most


@dataclass(frozen=True)
class IndexedPassage:
    """A piece of a file."""

    text: str
    file: str
    line: int  # its first one, from 1
    name: str = ""  # the id that a JSON object gives it

    @property
    def place(self) -> str:
        """Where it stands, for a citation."""
        return f"{self.file} line {self.line}" + (f" ({self.name})" if self.name else "")


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
            found = path.stat()
            if (found.st_size, found.st_mtime_ns) == (self.size, self.changed):
                return True
            return found.st_size == self.size and _digest(path.read_bytes()) == self.digest
        except OSError:
            return False


def find_files(given: Sequence[str | Path]) -> list[Path]:
    """Return the files that are named, and those in the folders that are, hidden ones left out."""
    found: dict[Path, None] = {}
    for path in map(Path, given):
        refuse(not path.exists(), f"{path} does not exist: name files or folders of text")
        inside = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        found |= {one: None for one in inside if not path.is_dir() or not one.name.startswith(".")}
    refuse(not found, f"there is no file in {', '.join(map(str, given)) or 'nothing'}: name files of text")
    return list(found)


def read_passages(path: Path, words: int = WORDS) -> tuple[IndexedFile, list[IndexedPassage]]:
    """Read a file, .gz as well; .jsonl has a JSON object with `text` and perhaps `title` on each line."""
    try:
        raw, stat = path.read_bytes(), path.stat()
        plain = gzip.decompress(raw) if path.suffix == ".gz" else raw
        text = plain.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: byte {error.start + 1} is not UTF-8") from None
    jsonl = ".jsonl" in path.suffixes
    found = _objects(path, text) if jsonl else _paragraphs(path, text, words)
    return IndexedFile(str(path), _digest(raw), len(raw), stat.st_mtime_ns), list(found)


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
