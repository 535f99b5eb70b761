"""What a new process finds that imports clearhead, which one process finds out for all tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import once

SCRIPT = """
import json, sys, time, warnings
import torch
start = time.process_time()
import clearhead as ch
found = {"seconds": time.process_time() - start, "imported": list(sys.modules)}
found["modules"] = [ch.inside.__name__, ch.core.__name__]
ch.show
found["imported to show"] = list(sys.modules)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert ch.Loaded is ch.Model and ch.Loaded is ch.Model
assert "Loaded" not in ch.__all__
found["warned"] = [f"{one.category.__name__}: {one.message}" for one in seen]
import clearhead.learn.training.run, clearhead.variants.costs
found |= {"train": str(ch.train), "cost": str(ch.cost), "compiler": "torch._dynamo" in sys.modules}
print(json.dumps(found))
"""


def found(factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the seconds that the import takes beyond torch, what it imports, and what an old name says."""
    return json.loads((once(factory, "fresh", _find) / "found.json").read_text())


def _find(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    (folder / "found.json").write_text(done.stdout)
