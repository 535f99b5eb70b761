"""The folder of a run: made for one run, locked while a run writes it, given back as it was on failure."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote

from clearhead.errors import CheckpointError, refuse
from clearhead.hub.files import LOCK, locked_folder, write_text
from clearhead.learn.data.files import RECIPE
from clearhead.learn.data.given import ROWS
from clearhead.learn.parallel import launch, restarts
from clearhead.learn.training.departure import PICTURE
from clearhead.learn.training.events import CURVE, LOG, Note, OnEvent
from clearhead.learn.training.state import BEST, CACHE, CHECKPOINTS, LAST, PRETRAIN, newest

LAUNCH = ".launch"  # the name of the launch of several processes that writes the folder
BEFORE = ".before"  # an earlier run, which waits for the first checkpoint of the one that replaces it
MOVING = ".moving"  # the same on its way in or out: what it holds belongs into the folder
OWN = (  # what a run writes
    *(
        RECIPE,
        CACHE,
        PRETRAIN,
        CHECKPOINTS,
        BEST,
        LAST,
        LOG,
        CURVE,
        PICTURE,
        *ROWS.values(),
        "adapter",
        "README.md",
        "tensorboard",
        ".*",
    ),
    *(
        "*.safetensors",
        "*.index.json",
        "*config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "modules.json",
        "1_Pooling",
    ),
)
CACHED = ("fingerprint", "*-train-*", "*-validation-*", ".*")  # what it writes into its cache


@contextmanager
def new_folder(
    folder: Path, overwrite: bool, needed: Iterable[Path], on_event: OnEvent
) -> Iterator[Callable[[], None]]:
    """Create and lock the folder of a new run.

    The folder must not exist, be empty or, with `overwrite`, hold nothing but an earlier run and none of the
    files `needed`. The function that is yielded keeps the new run; an error before it is called restores what
    was there.
    """
    folder = folder.resolve()
    with locked(folder, on_event), ExitStack() as undo:
        _check(folder, overwrite, needed)
        undo.callback(_put_back, folder)
        _move_away(folder)

        def keep() -> None:
            undo.pop_all()
            shutil.rmtree(folder / BEFORE, ignore_errors=True)

        yield keep


@contextmanager
def resumed_folder(folder: Path, on_event: OnEvent) -> Iterator[Path]:
    """Lock the folder of a run that goes on."""
    none = f"{folder} holds no run that can be resumed: it needs {RECIPE} and a checkpoint"
    refuse(not folder.is_dir(), none, CheckpointError)
    with locked(folder, on_event):
        refuse(not (folder / RECIPE).is_file() or not resumable(folder), none, CheckpointError)
        yield folder


def mark(folder: Path) -> None:
    """Note which launch of several processes writes the folder: it goes on when they are restarted."""
    if (name := launch()) is not None:
        write_text(folder / LAUNCH, name)


def ours(folder: Path) -> bool:
    """Return True if these processes were restarted after a failure and have begun a run in the folder."""
    path = folder / LAUNCH
    return restarts() > 0 and path.is_file() and path.read_text() == launch() and resumable(folder)


def resumable(folder: Path) -> bool:
    """Return True if the folder holds a run with a checkpoint."""
    return newest(folder) is not None or newest(folder / PRETRAIN) is not None


# The lock ---------------------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path, on_event: OnEvent) -> Iterator[None]:
    """Hold the lock of a run's folder; refuse where another run holds it.

    A run that was killed while it took the place of an earlier one is undone, unless it has a checkpoint.
    """
    first_stage = folder.name == PRETRAIN and (folder.parent / RECIPE).is_file()
    whole = folder.parent if first_stage else folder
    with locked_folder(whole, "run", lambda line: on_event(Note(line))):
        if (whole / BEFORE).is_dir() and resumable(whole):
            shutil.rmtree(whole / BEFORE, ignore_errors=True)
        elif any((whole / name).is_dir() for name in (BEFORE, MOVING)):
            _put_back(whole)
        yield


# An earlier run ---------------------------------------------------------------------------------------------


def _move_away(folder: Path) -> None:
    """Move what is in the folder into `BEFORE`."""
    try:
        (folder / MOVING).mkdir()
        for path in _entries(folder):
            os.replace(path, folder / MOVING / path.name)
        os.replace(folder / MOVING, folder / BEFORE)
    except OSError as error:
        raise CheckpointError(f"cannot move the run in {folder}: {error.strerror}") from None


def _put_back(folder: Path) -> None:
    """Undo `_move_away`, whole or halfway, and remove what was written since; if killed, call it again."""
    with suppress(OSError):
        if (folder / BEFORE).is_dir():
            for path in _entries(folder):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            os.replace(folder / BEFORE, folder / MOVING)
        for path in (folder / MOVING).iterdir():
            os.replace(path, folder / path.name)
        (folder / MOVING).rmdir()


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in (LOCK, BEFORE, MOVING)]


def _check(folder: Path, overwrite: bool, needed: Iterable[Path]) -> None:
    if not _entries(folder):
        return
    refuse(
        not (folder / RECIPE).exists(),
        f"{folder} is not empty and holds no run: name another folder with --out",
        CheckpointError,
    )
    refuse(
        not overwrite and resumable(folder),
        f"{folder} holds another run: go on with clearhead train --resume {quote(str(folder))}, "
        "or add --overwrite or another --out",
        CheckpointError,
    )
    refuse(
        not overwrite,
        f"{folder} holds a run that never began: add --overwrite, or name another --out",
        CheckpointError,
    )
    inside = next((path for path in needed if path.resolve().is_relative_to(folder)), None)
    refuse(inside is not None, f"{inside} lies in {folder}, which would be overwritten: name another --out")
    for place, own in ((folder, OWN), (folder / CACHE, CACHED)):
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            refuse(
                not any(fnmatch(path.name, pattern) for pattern in own),
                f"{path} is no part of a run, and would be lost: move it away, or name another --out",
                CheckpointError,
            )
