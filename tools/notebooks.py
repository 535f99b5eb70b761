"""Run the notebooks and write each as a page of the book, with what its cells print, return and draw.

    python tools/notebooks.py [NAME ...]

The notebooks are stored without outputs, so that a change of one can be read; `docs/notebooks/NAME.md` shows
them as Jupyter does. `EFFORT` below 1 shortens the runs of the scaling law.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
PAGES = ROOT / "docs" / "notebooks"
PICTURES = ROOT / "docs" / "images" / "notebooks"
CODE, OUTPUT = "```python no-run\n", "```text no-run\n"


def cells(name: str) -> list[tuple[str, str]]:
    """Return the kind and the text of each cell of a notebook."""
    stored = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in stored]


def shown() -> list[str]:
    """Return the names of the notebooks that have a page."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> tuple[str, Any]:
    """Run a cell; return what it printed and the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    out, value = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return out.getvalue(), value


def page(name: str) -> str:
    """Run a notebook in the current folder; return it as Markdown, and save its pictures."""
    namespace: dict[str, Any] = {"__name__": name}
    parts: list[str] = []
    for number, (kind, source) in enumerate(cells(name)):
        if kind == "markdown":
            parts.append(source if number else f"# {source.lstrip('# ')}")
            continue
        parts.append(f"{CODE}{source}\n```")
        printed, value = run_cell(source, f"{name}, cell {number}", namespace)
        if hasattr(value, "savefig"):  # a figure of matplotlib
            PICTURES.mkdir(parents=True, exist_ok=True)
            value.savefig(PICTURES / f"{name}-{number}.png", dpi=80)
            parts.append(f"![Output of the cell above](../images/notebooks/{name}-{number}.png)")
        elif value is not None:
            printed += f"{value!r}\n"
        if printed.strip():
            lines = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
            parts.append(f"{OUTPUT}{lines}```")
    source = f"This page shows `notebooks/{name}.ipynb` and the output of its cells."
    if "EFFORT" in namespace and namespace["EFFORT"] < 1:
        source += f" It was run with `EFFORT={namespace['EFFORT']}`, so its numbers are less exact."
    return "\n\n".join([parts[0], source, *parts[1:]]) + "\n"


def shown_code(name: str) -> list[str]:
    """Return the code of the page of a notebook, cell by cell."""
    return [part.split("\n```", 1)[0] for part in (PAGES / f"{name}.md").read_text().split(CODE)[1:]]


def main() -> None:
    """Write the pages of the notebooks that are named, or of all but those that are shown elsewhere."""
    from tools.book import working_in

    PAGES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or shown():
        with tempfile.TemporaryDirectory() as folder, working_in(Path(folder)):
            text = page(name)
        (PAGES / f"{name}.md").write_text(text)
        print(f"docs/notebooks/{name}.md written", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
