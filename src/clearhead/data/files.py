"""Find files, open them through gzip where needed, read them as UTF-8 in bounded memory.

Errors name the file.
"""

import codecs
import glob
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from clearhead.errors import InputError, nearest, refuse

BLOCK = 1 << 20  # bytes read at a time
HEAD = 1 << 16  # bytes looked at to guess what a file holds
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
    """Return the files behind files, folders and globs, each once.

    Those of a folder or a glob are sorted by name, without hidden files and training runs. `known` are names
    that may have been meant where there is no such file.
    """
    found: dict[Path, None] = {}
    for name in paths:
        path = Path(name).expanduser()
        if path.exists():
            found |= dict.fromkeys(_files(path))
        elif glob.has_magic(name):
            fixed = next(parent for parent in path.parents if not glob.has_magic(str(parent)))
            if fixed.is_dir():  # glob silently leaves out what it cannot read
                list(_below(fixed) if "**" in name else fixed.iterdir())
            there = map(Path, sorted(glob.glob(str(path), recursive=True)))
            matches = [file for match in there if not _in_run(match, fixed) for file in _files(match)]
            refuse(not matches, f"no file matches {name}")
            found |= dict.fromkeys(matches)
        else:
            raise missing(path, known)
    return list(found)


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
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return InputError(f"there is no file or folder {path}{nearest(path.name, [*known, *beside])}")


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


def blank(path: Path) -> bool:
    """Return True if a file begins with nothing but white space, and so does not show its format."""
    return not read_bytes(path, HEAD).removeprefix(codecs.BOM_UTF8).strip()


def read_pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file in pieces of about a million characters, without its byte order mark."""
    with reading(path) as file:
        offset, rest = 0, b""
        while True:
            block = file.read(BLOCK)
            text, used = _decode(path, rest + block, offset, final=not block)
            if text:
                yield text
            if not block:
                return
            offset, rest = offset + used, (rest + block)[used:]


def read_lines(path: Path, ends: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file, numbered from 1, without a byte order mark; with their ends if `ends`."""
    with reading(path) as file:
        offset = 0
        for number, line in enumerate(file, 1):
            refuse(
                number == 1 and not line.endswith(b"\n") and b"\r" in line.rstrip(),
                f"{path} ends its lines with carriage returns alone: convert them to line feeds",
            )
            text, _ = _decode(path, line, offset, final=True)
            offset += len(line)
            yield number, text if ends else text.removesuffix("\n").removesuffix("\r")


def _decode(path: Path, data: bytes, offset: int, final: bool) -> tuple[str, int]:
    """Decode bytes that begin at `offset` of the file -> the text, and how many bytes it took.

    A byte order mark at the beginning of the file is left out.
    """
    start = len(codecs.BOM_UTF8) if offset == 0 and data.startswith(codecs.BOM_UTF8) else 0
    if (position := data.find(0)) >= 0:
        raise InputError(
            f"{path} is no text: byte {offset + position} is zero (a binary file, or UTF-16: "
            "convert it to UTF-8)"
        )
    try:
        text, used = codecs.utf_8_decode(data[start:], "strict", final)
    except UnicodeDecodeError as error:
        at = start + error.start
        raise InputError(
            f"{path} is not UTF-8: byte {offset + at} is {data[at]:#04x}; convert it to UTF-8"
        ) from None
    return text, start + used


def digest(paths: Iterable[Path], *more: str) -> str:
    """Return a SHA-256 over the contents of files, in order, and over the strings given."""
    total = hashlib.sha256()
    for path in paths:
        with listing(path), path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    for text in more:
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()
