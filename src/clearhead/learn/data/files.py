"""Find files, open them through gzip where needed, read them as text in bounded memory.

Text is UTF-8, unless a byte order mark or the bytes themselves say otherwise. Errors name the file.
"""

import codecs
import functools
import glob
import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from clearhead.errors import InputError, nearest, refuse

BLOCK = 1 << 20  # bytes read at a time
HEAD = 1 << 16  # bytes looked at to tell what a file holds
# Byte order marks, the longest first: UTF-32 in one order begins as UTF-16 does.
MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
UTF8, WESTERN = "utf-8", "cp1252"  # the second is Windows' superset of Latin-1
HIGH = bytes(range(128, 256))
NAME_ENCODING = ", or name its encoding with --set data.encoding=NAME"
# Bytes that cp1252 does not define, and control characters that no text has.
_NO_WESTERN = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\x81\x8d\x8f\x90\x9d]")
RECIPE = "train.toml"  # marks the folder of a training run, whose files are no data


@contextmanager
def listing(path: Path | None = None) -> Iterator[None]:
    """Turn the error of a folder, or of this file, that cannot be read into one clear line."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path or error.filename} cannot be read: {error.strerror}") from None


@listing()
def expand(paths: Iterable[str], known: Iterable[str] = ()) -> list[Path]:
    """Return the files that files, folders and globs name, each once.

    Those of a folder or a glob are sorted by name, without hidden files and training runs. `known` are names
    that may have been meant where there is no such file.
    """
    files: dict[Path, None] = {}
    for name in paths:
        path = Path(name).expanduser()
        if path.exists():
            files |= dict.fromkeys(_files(path))
        elif glob.has_magic(name):
            fixed = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
            if fixed.is_dir():  # glob silently leaves out what it cannot read
                list(_below(fixed) if "**" in name else fixed.iterdir())
            there = map(Path, sorted(glob.glob(str(path), recursive=True)))
            matches = [file for match in there if not _in_run(match, fixed) for file in _files(match)]
            refuse(not matches, f"no file matches {name}")
            files |= dict.fromkeys(matches)
        else:
            raise missing(path, known)
    return list(files)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise missing(path)
    refuse(not path.is_file() and not path.is_dir(), f"{path} is neither a file nor a folder")
    files = [path] if path.is_file() else sorted(file for file in _below(path) if file.is_file())
    refuse(not files, f"the folder {path} holds no files")
    return files


def _below(top: Path) -> Iterator[Path]:
    """Yield the files of a folder and of those below it, without hidden ones and training runs."""

    def fail(error: OSError) -> None:
        raise error

    seen: set[str] = set()  # a link may lead back to a folder above it
    for folder, folders, names in os.walk(top, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or (RECIPE in names and Path(folder) != top):
            folders.clear()
        else:
            seen.add(real)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (Path(folder, name) for name in names if not name.startswith("."))


def _in_run(path: Path, top: Path) -> bool:
    """Return True if a path is, or lies in, the folder of a training run below `top`."""
    return any(
        (folder / RECIPE).is_file()
        for folder in (path, *path.parents)
        if folder != top and folder.is_relative_to(top)
    )


def missing(path: Path, known: Iterable[str] = ()) -> InputError:
    """Return the error for a path that does not exist, with the nearest name that does."""
    if path.is_symlink():
        return InputError(f"{path} is a broken link: it leads to {path.readlink()}, which is not there")
    others = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return InputError(f"there is no file or folder {path}{nearest(path.name, [*known, *others])}")


def bare(path: Path) -> Path:
    """Return the path without `.gz`."""
    return path.with_suffix("") if path.suffix.lower() == ".gz" else path


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed if its name ends in `.gz`."""
    try:
        with cast(BinaryIO, gzip.open(path)) if path != bare(path) else path.open("rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} is a damaged gzip file: {error}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None


def read_bytes(path: Path, most: int = -1) -> bytes:
    """Return the bytes of a file, or at most so many of the first."""
    with reading(path) as file:
        return file.read(most)


class Head(NamedTuple):
    """The beginning of a file of text."""

    text: str
    cut: bool  # whether the file goes on


def read_head(path: Path, encoding: str | None = None) -> Head | None:
    """Return the beginning of a file as text; None for a binary file."""
    data = read_bytes(path, HEAD)
    encoding = encoding or marked(data)
    if encoding is None and b"\0" in data:
        return None
    text = codecs.getincrementaldecoder(encoding or UTF8)("replace").decode(data)
    return Head(text.removeprefix("\ufeff").replace("\r\n", "\n"), len(data) == HEAD)


def blank(path: Path, encoding: str | None = None) -> bool:
    """Return True if a file begins with nothing but white space, and so does not show its format."""
    head = read_head(path, encoding)
    return head is not None and not head.text.strip()


def marked(data: bytes) -> str | None:
    """Return the encoding that the byte order mark of a file says; None where it has none."""
    return next((encoding for mark, encoding in MARKS if data.startswith(mark)), None)


def encoding_of(path: Path) -> str:
    """Return the encoding of a file of text: UTF-8, what its byte order mark says, or cp1252.

    cp1252 is what Western editors and spreadsheets write. A file is taken for it if it is not UTF-8 and its
    bytes beyond ASCII are few, as in Western languages. What looks like damaged UTF-8, or like another
    alphabet, is refused: read in a wrong encoding, it would teach a model nonsense.
    """
    with listing(path):
        stat = path.stat()
    return _encoding(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=65_536)
def _encoding(path: Path, size: int, changed: int) -> str:
    """Look at a whole file, once for each `size` and time of change."""
    with reading(path) as file:
        named = marked(file.read(len(MARKS[0][0])))
    if named is not None:
        return named
    try:
        for _ in _texts(path, UTF8):
            pass
    except InputError as error:
        refuse(not _is_western(path), f"{error}{NAME_ENCODING}")
        return WESTERN
    return UTF8


def _is_western(path: Path) -> bool:
    """Return True if a file that is not UTF-8 looks like cp1252."""
    letters = high = sequences = broken = 0
    with reading(path) as file:
        while block := file.read(BLOCK):
            if _NO_WESTERN.search(block):
                return False
            written = block.decode("utf-8", "replace")
            beyond = len(block) - len(block.translate(None, HIGH))
            wrong = written.count("\ufffd")
            broken, sequences = broken + wrong, sequences + len(written) - wrong - (len(block) - beyond)
            high, letters = high + beyond, letters + len(block.translate(None, b" \t\r\n"))
    return sequences < broken and high * 3 <= letters


def _texts(path: Path, encoding: str) -> Iterator[str]:
    """Yield the text of a file in blocks, without its byte order mark."""
    with reading(path) as file:
        decoder, offset = codecs.getincrementaldecoder(encoding)(), 0
        while True:
            block, pending = file.read(BLOCK), len(decoder.getstate()[0])
            zero = block.find(0) if encoding in (UTF8, WESTERN) else -1
            refuse(zero >= 0, f"{path} is no text: byte {offset + zero} is zero (a binary file)")
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeError as error:
                at = getattr(error, "start", 0)
                wrong = getattr(error, "object", b"")[at : at + 1].hex() or "the end"
                name = "UTF-8" if encoding == UTF8 else encoding
                place = f"byte {offset - pending + at} is 0x{wrong}"
                raise InputError(f"{path} is not {name}: {place}; convert it to UTF-8") from None
            text = text.removeprefix("\ufeff") if not offset else text
            if text:
                yield text
            if not block:
                return
            offset += len(block)


def read_blocks(path: Path, encoding: str | None = None) -> Iterator[str]:
    """Yield the text of a file in blocks of about a million characters, every line ended by a line feed.

    `encoding` None: the one that the file is in.
    """
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    for text in _texts(path, encoding or encoding_of(path)):
        yield lines.decode(text)
    if rest := lines.decode("", final=True):
        yield rest


def read_lines(path: Path, ends: bool = False, encoding: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file, numbered from 1, without a byte order mark; with their ends if `ends`."""
    number, rest = 0, ""
    for text in _texts(path, encoding or encoding_of(path)):
        *lines, rest = (rest + text).split("\n")
        refuse(
            not number and not lines and "\r" in rest.rstrip(),
            f"{path} ends its lines with carriage returns alone: convert them to line feeds",
        )
        for line in lines:
            number += 1
            yield number, f"{line}\n" if ends else line.removesuffix("\r")
    if rest:
        yield number + 1, rest if ends else rest.removesuffix("\r")


def full_lines(path: Path, encoding: str | None = None) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a file that are more than white space."""
    return ((number, line) for number, line in read_lines(path, encoding=encoding) if line.strip())


def encoding_notes(files: Iterable[Path], encoding: str | None) -> list[str]:
    """Return a note on files that are not UTF-8, where the user did not name their encoding."""
    encodings = {} if encoding else {path: encoding_of(path) for path in files}
    others = {path: own for path, own in encodings.items() if own != UTF8}
    if not others:
        return []
    first, own = next(iter(others.items()))
    more = f" (and {len(others) - 1:,} more)" if len(others) > 1 else ""
    return [f"{first}{more} is not UTF-8: read as {own}; another one: --set data.encoding=NAME"]


def digest(paths: Iterable[Path], *more: str) -> str:
    """Return a SHA-256 over the contents of files, in order, and over the strings given."""
    total = hashlib.sha256()
    for path in paths:
        with listing(path), path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    for text in more:
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()
