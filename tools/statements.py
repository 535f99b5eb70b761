"""Count the statements of the package by folder, here and in another checkout.

python tools/statements.py [BEFORE] [--save]
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def statements(checkout: Path) -> Counter[str]:
    """The statements of each folder of the package; files beside the folders count by their own names."""
    source, counts = checkout / "src" / "clearhead", Counter[str]()
    for path in source.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        counts[path.relative_to(source).parts[0]] += sum(
            isinstance(node, ast.stmt) for node in ast.walk(tree)
        )
    return counts


def main() -> None:
    """Print a table, and with --save write it to benchmarks/results/statements.json."""
    others = [Path(name) for name in sys.argv[1:] if not name.startswith("-")]
    tables = [statements(checkout) for checkout in (*others, HERE)]
    for part in sorted(set().union(*tables)):
        print(f"{part:<16}" + "".join(f"{table[part]:>8,}" for table in tables))
    print(f"{'total':<16}" + "".join(f"{table.total():>8,}" for table in tables))
    if "--save" in sys.argv:
        names = ["before", "now"][-len(tables) :]
        body = {
            name: {"total": table.total(), **dict(sorted(table.items()))}
            for name, table in zip(names, tables)
        }
        command = "python tools/statements.py BEFORE --save"
        path = HERE / "benchmarks" / "results" / "statements.json"
        path.write_text(
            json.dumps({"command": command, "date": date.today().isoformat(), **body}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
