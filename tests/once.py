"""Set up what several workers of one test run share, once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` has filled: of the workers of a run the first fills it, and others wait."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    folder = (factory.getbasetemp() if alone else factory.getbasetemp().parent) / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".done").exists():
            make(folder)
            (folder / ".done").touch()
    return folder
