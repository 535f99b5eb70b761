"""What tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_run import TEXT


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A file of a small text."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path
