"""Train every recipe of an earlier revision there and here: the same losses and weights, bit for bit?

python tools/recipes_as_before.py REVISION

A run here reads the `train.toml` that the run there wrote. Data and sizes are those of that revision's tests.
The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
# Run with either code and the earlier tests; sys.argv: the folder of runs, that of the runs to repeat.
DRIVER = """
import sys
from pathlib import Path
from types import SimpleNamespace
import clearhead as ch
from tests.training import test_recipes

folder, before = Path(sys.argv[1]), Path(sys.argv[2])
train = ch.train
if folder != before:
    ch.train = lambda paths, out, **_: train(paths, out=out, recipe=before / Path(out).name / "train.toml")
folder.mkdir()
function = lambda fixture: getattr(fixture, "__wrapped__", None) or fixture.__pytest_wrapped__.obj
run = function(test_recipes.trained)(function(test_recipes.place)(SimpleNamespace(mktemp=lambda _: folder)))
for name in ("mlm", *test_recipes.CASES):
    run(name)
"""


def losses(run: Path) -> list[tuple[Any, Any]]:
    """Return the step and loss of each line of a run's log."""
    rows = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [(row.get("step"), row["loss"]) for row in rows if "loss" in row]


def same(before: Path, now: Path) -> bool:
    """Whether two runs have the same losses and weights, to the bit."""
    old, new = (load_file(run / "model.safetensors") for run in (before, now))
    weights = old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    return weights and losses(before) == losses(now)


def main() -> None:
    """Train with both revisions and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision")
    revision = parser.parse_args().revision
    packed = subprocess.run(["git", "-C", ROOT, "archive", revision], check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as temporary:
        tree, before, now = (Path(temporary) / name for name in ("tree", "before", "now"))
        with tarfile.open(fileobj=BytesIO(packed)) as archive:
            archive.extractall(tree, filter="data")
        for source, runs in ((tree, before), (ROOT, now)):
            path = {"PYTHONPATH": f"{source / 'src'}:{tree}", "PATH": "/usr/bin:/bin"}
            command = [sys.executable, "-c", DRIVER, runs, before]
            subprocess.run(command, check=True, cwd=tree, env=path, stdout=subprocess.DEVNULL)
        names = sorted(run.name for run in before.iterdir() if run.is_dir())
        answers = {name: same(before / name, now / name) for name in names}
    for name, equal in answers.items():
        print(f"{name:24} {'same bits' if equal else 'DIFFERS'}")
    sys.exit(not all(answers.values()))


if __name__ == "__main__":
    main()
