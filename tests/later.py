"""Libraries that some tests compare with, imported when such a test runs: to collect the tests needs none."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import pytest


class Later:
    """A module that is imported when one of its names is first asked for."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest asks all in a file whether it is a test
            raise AttributeError(name)
        return getattr(importlib.import_module(self._module), name)


def later(module: str, reason: str | None = None) -> Any:
    """Return a module that is imported at its first use; a file whose library is missing is skipped."""
    library = module.partition(".")[0]
    if find_spec(library) is None:
        pytest.skip(reason or f"could not import '{library}'", allow_module_level=True)
    return Later(module)
