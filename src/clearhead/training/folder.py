"""The folder of a run: created, replaced or refused; restored if a run fails before its first checkpoint."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from shlex import quote

from clearhead.data.files import RECIPE
from clearhead.errors import CheckpointError, refuse
from clearhead.training.state import newest

CACHE = "data"  # the folder of encoded examples
PRETRAIN = "pretrain"  # the folder of the first stage, where there are two
OWN = (  # what a run writes
    *(RECIPE, CACHE, PRETRAIN, "checkpoints", "best", "last", "log.jsonl", "loss.png", "tensorboard", ".*"),
    *("*.safetensors", "*.index.json", "*config.json", "tokenizer.json", "modules.json", "1_Pooling"),
)
CACHED = ("fingerprint", "*-train-*", "*-validation-*", ".*")  # what it writes into its cache


@contextmanager
def new_folder(folder: Path, overwrite: bool, needed: Iterable[Path] = ()) -> Iterator[Callable[[], None]]:
    """Create the folder of a new run.

    The folder must not exist, be empty or, with `overwrite`, hold nothing but an earlier run and none of the
    files `needed`. The function that is yielded keeps the new run; an error before it is called restores what
    was there.
    """
    folder = folder.resolve()
    _check(folder, overwrite, needed)
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    before: Path | None = None  # where an earlier run waits
    try:
        if folder.is_dir() and any(folder.iterdir()):
            before = Path(tempfile.mkdtemp(prefix=f".{folder.name}.before-", dir=folder.parent))
            os.replace(folder, before)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {folder}: {error.strerror}") from None
    with ExitStack() as undo:
        undo.callback(_put_back, folder, before, created)

        def keep() -> None:
            undo.pop_all()
            if before is not None:
                shutil.rmtree(before, ignore_errors=True)

        yield keep


def _put_back(folder: Path, before: Path | None, created: list[Path]) -> None:
    """Remove the new run, and restore what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        if before is not None:
            os.replace(before, folder)
        elif not created:
            folder.mkdir(exist_ok=True)
        for place in created[1:]:
            place.rmdir()


def resumable(folder: Path) -> bool:
    """Return True if the folder holds a run with a checkpoint."""
    return newest(folder) is not None or newest(folder / PRETRAIN) is not None


def _check(folder: Path, overwrite: bool, needed: Iterable[Path]) -> None:
    refuse(
        folder.exists() and not folder.is_dir(),
        f"{folder} is a file: name a folder to write to",
        CheckpointError,
    )
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    refuse(
        not (folder / RECIPE).exists(),
        f"{folder} is not empty and holds no run: name another folder with --out",
        CheckpointError,
    )
    if not overwrite and resumable(folder):
        resume = f"go on with clearhead train --resume {quote(str(folder))}"
        raise CheckpointError(f"{folder} holds another run: {resume}, or add --overwrite or another --out")
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
