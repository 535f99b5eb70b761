"""The folder of a run: made, cleared or refused; and left as it was where a run fails before its first checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clearhead.data.files import RECIPE
from clearhead.errors import CheckpointError, InputError
from clearhead.train.state import newest

PRETRAIN = "pretrain"  # the folder of the first stage, where there are two
BEFORE = ".before"  # what a folder held, while a new run has no checkpoint yet


@contextmanager
def room(folder: Path, overwrite: bool, needed: Iterable[Path] = ()) -> Iterator[Callable[[], None]]:
    """A folder for a new run.

    It must be new, empty, or hold a run that is given up (`overwrite`) and nothing that is `needed`. Until the function
    that is handed out has been called, a fault brings back what was there.
    """
    if (folder / BEFORE).is_dir() and newest(folder) is None:
        _bring_back(folder)  # its run was killed before the first checkpoint
    _check(folder, overwrite, needed)
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _put_aside(folder)
    except OSError as error:
        raise CheckpointError(f"cannot make {folder}: {error.strerror}") from None
    kept = False

    def keep() -> None:
        nonlocal kept
        kept = True
        shutil.rmtree(folder / BEFORE, ignore_errors=True)

    try:
        yield keep
    except BaseException:
        if not kept:
            with suppress(OSError):
                _bring_back(folder)
                for place in new:
                    place.rmdir()
        raise


def resumable(folder: Path) -> bool:
    """Does the folder hold a run that can be gone on with?"""
    return newest(folder) is not None or newest(folder / PRETRAIN) is not None


def _check(folder: Path, overwrite: bool, needed: Iterable[Path]) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: name a folder to write to")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / RECIPE).exists():
        raise CheckpointError(f"{folder} is not empty and holds no run: name another folder with --out")
    if not overwrite:
        if not resumable(folder):
            raise CheckpointError(f"{folder} holds a run that never began: add --overwrite, or name another --out")
        raise CheckpointError(f"{folder} holds another run: add --resume {folder} to go on with it, --overwrite, or another --out")
    inside = next((path for path in needed if path.resolve().is_relative_to(folder.resolve())), None)
    if inside is not None:
        raise InputError(f"{inside} lies in {folder}, which would be overwritten: name another --out")


def _put_aside(folder: Path) -> None:
    held = list(folder.iterdir())
    if held:
        (folder / BEFORE).mkdir()
    for path in held:
        os.replace(path, folder / BEFORE / path.name)


def _bring_back(folder: Path) -> None:
    """Remove all but what was put aside, and put that in its place."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name != BEFORE:
            shutil.rmtree(path)
        elif path.name != BEFORE:
            path.unlink()
    if (folder / BEFORE).is_dir():
        for path in (folder / BEFORE).iterdir():
            os.replace(path, folder / path.name)
        (folder / BEFORE).rmdir()
