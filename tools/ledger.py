"""Which rows of docs/ledger.md have tests: `python tools/ledger.py`, or `--missing` for those that have none.

A test names its rows with `@pytest.mark.ledger("C4", "M5")` (or `pytest.mark.ledger` anywhere else a mark may
stand) or with a comment `# ledger: C4, M5`.
"""

from __future__ import annotations

import argparse
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROW = re.compile(r"^(?:- |\| )([A-Z]\d+)\b(.*)$", re.MULTILINE)
MARK = re.compile(r"mark\.ledger\(([^)]*)\)")
COMMENT = re.compile(r"#\s*ledger:(.*)")
ID = re.compile(r"\b[A-Z]\d+\b")


def sections(text: str) -> dict[str, dict[str, str]]:
    """For each heading, the rows under it: id -> what it says."""
    found: dict[str, dict[str, str]] = {}
    for piece in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        rows = {row: words.strip(" |") for row, words in ROW.findall(piece)}
        if rows:
            found[piece.split("\n", 1)[0]] = rows
    return found


def rows_named(source: str) -> set[str]:
    """The rows that the text of a test file names."""
    return {
        row
        for pattern in (MARK, COMMENT)
        for match in pattern.finditer(source)
        for row in ID.findall(match[1])
    }


def coverage(tests: pathlib.Path) -> dict[str, list[str]]:
    """For each row that some test names, the files that do."""
    found: dict[str, list[str]] = {}
    for file in sorted(tests.rglob("*.py")):
        for row in rows_named(file.read_text()):
            found.setdefault(row, []).append(file.relative_to(tests).as_posix())
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Which rows of the ledger have tests.")
    parser.add_argument("--missing", action="store_true", help="print only the rows that no test names")
    only_missing = parser.parse_args().missing
    ledger, found = sections((ROOT / "docs" / "ledger.md").read_text()), coverage(ROOT / "tests")
    missing = {row: words for rows in ledger.values() for row, words in rows.items() if row not in found}
    total = sum(map(len, ledger.values()))
    if not only_missing:
        for heading, rows in ledger.items():
            print(f"\n{heading}: {sum(row in found for row in rows)} of {len(rows)}")
            for row, words in rows.items():
                if row in found:
                    print(f"  {row:4} {words}\n       {', '.join(found[row])}")
        print(f"\nno test names {len(missing)} of {total} rows" + (":" if missing else ""))
    for row, words in missing.items():
        print(f"  {row:4} {words}")
    known = {row for rows in ledger.values() for row in rows}
    for row in sorted(set(found) - known):
        print(f"not a row of the ledger: {row}, named by {', '.join(found[row])}")


if __name__ == "__main__":
    main()
