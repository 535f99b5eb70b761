"""Writing results line by line: to stdout at once, or to a file that is complete or absent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from clearhead.errors import ClearheadError, InputError, refuse


def check_apart(output: Path | None, inputs: Iterable[Path]) -> None:
    """Refuse an output that is one of the inputs."""
    for path in inputs:
        refuse(
            output is not None and output.exists() and path.exists() and output.samefile(path),
            f"--output {output} is the file that is read, {path}: name another",
        )


@contextmanager
def writing(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Give a function that writes a line: to stdout at once, or to a file that appears when all is done.

    After a mistake in the input, the file holds what came before it. A link stays, and its target is written.
    A pipe or a device, which no file can replace, gets each line at once.
    """
    if path is None:
        yield lambda text: print(text, flush=True)
        return
    if path.exists() and not path.is_file():
        with _create(path, path) as file:
            yield lambda text: print(text, file=file, flush=True)
        return
    target = Path(os.path.realpath(path))
    work = target.with_name(f".{target.name}.{os.getpid()}")
    file = _create(work, path)
    try:
        with file:
            try:
                yield lambda text: print(text, file=file)
            finally:
                file.flush()
                os.fsync(file.fileno())
    except ClearheadError:
        work.replace(target)
        raise
    except BaseException:
        work.unlink(missing_ok=True)
        raise
    work.replace(target)


def _create(path: Path, asked: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{asked} cannot be written: {error.strerror}") from None
