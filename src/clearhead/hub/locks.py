"""Locks of folders: one process at a time writes there.

The lock is the operating system's (`flock`) on a file in the folder. It ends with the process that holds it,
however that ends, so what a killed process leaves behind locks nothing.
"""

import fcntl
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clearhead.errors import CheckpointError
from clearhead.hub.files import refuse

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
