"""Files: JSON, refusals in one line, writes that are whole or not at all, and locks of folders."""

import fcntl
import functools
import json
import os
import platform
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from clearhead import errors
from clearhead.errors import CheckpointError, first_line

MODEL = "model"  # the files of its weights begin with it


def index_of(stem: str) -> str:
    """Return the file that says in which of several safetensors files each tensor is."""
    return f"{stem}.safetensors.index.json"


WEIGHTS, INDEX = f"{MODEL}.safetensors", index_of(MODEL)
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
refuse = functools.partial(errors.refuse, error=CheckpointError)  # refuses a checkpoint in one line


def refuse_key(
    mistake: object, key: str, value: object, reason: str, source: str | Path = "config.json"
) -> None:
    """Refuse what a file states under a key."""
    refuse(mistake, f"{source} has {key} {value!r:.60}: {reason}")


ALL_WEIGHTS = (WEIGHTS, INDEX, "model-*-of-*.safetensors", PICKLED, PICKLED_INDEX, "pytorch_model-*-of-*.bin")


@contextmanager
def reading(path: Path, otherwise: str) -> Iterator[None]:
    """Refuse a file in one line: with the system's reason, or with `otherwise` for what it holds."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error):
        raise CheckpointError(f"{path} {otherwise}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number too long, too deep
        raise CheckpointError(f"{path} is not readable JSON: {first_line(error)}") from None
    refuse(not isinstance(value, dict), f"{path} must hold a JSON object, not {type(value).__name__}")
    return dict(value)


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one where there is no such file."""
    return read_json(path) if path.exists() else {}


# Writing ----------------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Write JSON that people can read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    """Write a whole file of text; if that fails, leave the file as it was."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file; if that fails, leave the file as it was."""
    with whole_file(path) as new:
        new.write_bytes(data)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a new file, which replaces the one at `path` when the block ends well; else nothing is left."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield new
        _sync(new)
        os.replace(new, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or first_line(error)}") from None
    finally:
        with suppress(OSError):
            new.unlink()


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill, whose files move into `target` when the block ends well; else nothing is left.

    Other files of `target` stay, save for weights: one directory holds one model.
    """
    refuse(target.exists() and not target.is_dir(), f"{target} is a file: name a directory to write to")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write next to {target}: {error.strerror}") from None
    try:
        yield work
        new = sorted(path.relative_to(work) for path in work.rglob("*") if path.is_file())
        for name in new:
            (work / name).chmod(0o644)
            _sync(work / name)
        if target.exists():
            _replace_all(work, target, new)
        else:
            work.chmod(0o755)
            os.replace(work, target)
        _sync(target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _replace_all(work: Path, target: Path, new: list[Path]) -> None:
    """Move files into place, config.json last, and remove old weights; on failure put the old files back."""
    stale = {path.relative_to(target) for pattern in ALL_WEIGHTS for path in target.glob(pattern)} - {*new}
    old = work / ".old"
    done: list[Path] = []
    try:
        for name in [*sorted(new, key=lambda name: name.name == "config.json"), *stale]:
            done.append(name)
            if (target / name).exists():
                _keep(target / name, old / name)
            (target / name).parent.mkdir(exist_ok=True)
            if name in new:
                os.replace(work / name, target / name)
            else:
                (target / name).unlink()
    except OSError:
        for name in done:
            if (old / name).exists():
                os.replace(old / name, target / name)
            elif name in new and not (work / name).exists():
                (target / name).unlink(missing_ok=True)
        raise


def _keep(path: Path, copy: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, copy, follow_symlinks=False)
    except OSError:
        shutil.copy2(path, copy, follow_symlinks=False)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


# Locks ------------------------------------------------------------------------------------------------------


LOCK = ".lock"


@contextmanager
def locked_folder(folder: Path, writer: str, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a folder, a file in it; refuse where another process holds it.

    A folder that was made for the lock and stays empty is removed.

    Args:
        folder: made where it is missing.
        writer: what writes to the folder, for the refusal.
        note: told where the file system has no locks.
    """
    path, created = folder / LOCK, [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with os.fdopen(_lock(path, writer, note)):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # a folder with something in it stays
            for place in created:
                place.rmdir()


def _lock(path: Path, writer: str, note: Callable[[str], None]) -> int:
    """Make and lock a file; return its descriptor, whose end is that of the lock."""
    folder = path.parent
    refuse(folder.exists() and not folder.is_dir(), f"{folder} is a file: name a folder to write to")
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(f"cannot make {folder}: {error.strerror}") from None
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(number, 200, 0).decode(errors="replace")
            os.close(number)
            raise CheckpointError(
                f"another {writer} is writing to {folder}{f' ({owner})' if owner else ''}: "
                "wait for its end, stop it, or name another folder with --out"
            ) from None
        except OSError as error:  # some network file systems have no locks
            note(f"{folder} cannot be locked ({error.strerror}): start no second {writer} in it")
            return number
        with suppress(OSError):
            if os.path.samestat(os.fstat(number), path.stat()):  # else its owner removed it just now
                os.truncate(number, 0)
                os.pwrite(number, f"process {os.getpid()} on {platform.node()}".encode(), 0)
                return number
        os.close(number)
