"""Every benchmark that a page names is one of `benchmarks/run.py`, and every one of these is there."""

import ast
import pathlib
import re
import subprocess
import sys

from benchmarks.run import CASES

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_cases_and_the_commands_of_pages_are_there():
    for name, target in CASES.items():
        module, function = target.split(":")
        tree = ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
    pages = [*ROOT.glob("*.md"), ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"benchmarks/run\.py\s+(\w+)", page.read_text())}
    assert len(named) > 40
    assert named <= CASES.keys()
    assert not [
        page.name for page in pages if re.search(r"python benchmarks/(?!run\.py)\w+\.py", page.read_text())
    ]


def test_an_unknown_case_lists_those_that_are_there():
    ended = subprocess.run(
        [sys.executable, "benchmarks/run.py", "none"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert 'no benchmark is called "none"' in ended.stderr and "gpu_decode" in ended.stdout
