"""Numbers of the documentation and the records that hold them.

A row of a table that names a record (`benchmarks/results/NAME.json`) may hold only numbers of that record,
rounded as they are shown, their ratios, and what stands in its text. A paragraph that states a speed names
its record or the benchmark that repeats it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECORD = re.compile(r"benchmarks/results/([\w.-]+\.json)")
NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-])")
SCALES = (1, 100, 1e3, 1e6, 1e-3, 1e-6, 1e-9, 1 / 2**20, 1 / 2**30)
UNITS = r"×(?! ?\d)|times as|tok/s|tokens a second|tokens/s|texts/s|% MFU|BLEU"
MEASURED = re.compile(rf"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?) ?(?:{UNITS})")


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record, each with its key; of texts, those that stand in them."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, key)
    elif isinstance(value, str):
        yield from ((key, float(number.replace(",", ""))) for number in NUMBER.findall(value))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, float(value)


class Record(NamedTuple):
    """The numbers of a record, and the ratios of those that are measured in the same way."""

    values: frozenset[float]
    ratios: frozenset[float]


@cache
def numbers_of(record: str) -> Record:
    """Return the numbers of a record."""
    found = list(leaves(json.loads((RESULTS / record).read_text(encoding="utf-8"))))
    values = {value for _, value in found} | {1 - value for _, value in found if 0 < value < 1}
    by_key = [
        {value for name, value in found if name == key and value > 0} for key in {key for key, _ in found}
    ]
    same = (group for group in by_key if len(group) <= 12)
    ratios = (a / b for group in same for a, b in itertools.permutations(group, 2))
    return Record(frozenset(values), frozenset(ratios))


def shows(text: str, value: float, scales: tuple[float, ...] = SCALES) -> bool:
    """Return whether a number that is shown is this value, rounded, in some unit."""
    shown, _, decimals = text.replace(",", "").partition(".")
    half = 0.5001 * 10 ** -len(decimals)
    if not decimals and len(shown) > 3:  # 544,000: thousands that are rounded
        half *= 10 ** (len(shown) - len(shown.rstrip("0")))
    number = float(text.replace(",", ""))
    return any(abs(value * scale - number) <= half for scale in scales)


def missing(text: str, records: list[str]) -> list[str]:
    """Return the numbers of a text that none of these records holds."""
    values = [value for record in records for value in numbers_of(record).values]
    ratios = [value for record in records for value in numbers_of(record).ratios]
    return [
        number
        for number in NUMBER.findall(text)
        if not any(shows(number, value) for value in values)
        and not any(shows(number, ratio, (1,)) for ratio in ratios)
    ]


def rows(page: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the table rows that name a record: the row, its cells of results, and the records."""
    heading: list[str] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("| ---"):
            continue
        if line.startswith("|") and (records := RECORD.findall(line)):
            stated = [
                cell
                for name, cell in zip(heading, cells)
                if name in ("clearhead", "compared with", "time", "result")
            ]
            yield line, stated, records
        elif line.startswith("|"):
            heading = cells


def without_record(page: str) -> list[str]:
    """Return the numbers of a page's tables that their own records do not hold."""
    plain = re.compile(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)")
    return [
        f"{number} in {line[:80]}"
        for line, cells, records in rows(page)
        for number in missing(" ".join(plain.sub(r"\1", cell) for cell in cells), records)
    ]


@cache
def records_by_case() -> dict[str, list[str]]:
    """Return the records that each case of `benchmarks/run.py` has written, by the command that they hold."""
    found: dict[str, list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        head = json.loads(path.read_text(encoding="utf-8"))
        command = str(head.get("command", "")) if isinstance(head, dict) else ""
        for name in re.findall(r"benchmarks/(?:run\.py )?(\w+)", command):
            found.setdefault(name, []).append(path.name)
    return found


def sources(paragraph: str) -> list[str]:
    """Return the records that a paragraph names, itself or by the command of a benchmark."""
    cases = re.findall(r"benchmarks/run\.py\s+(\w+)", paragraph)
    return [*RECORD.findall(paragraph), *(name for case in cases for name in records_by_case().get(case, []))]


def measured(page: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Yield the paragraphs that state a speed: first words, whether they name a source, what that lacks."""
    prose = re.sub(r"^```.*?^```[ \t]*$", "", page, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", prose):
        stated = [match[1] for match in MEASURED.finditer(re.sub(r"`[^`]*`", "", paragraph))]
        if not stated or paragraph.lstrip().startswith("|"):
            continue
        records = [name for name in sources(paragraph) if (RESULTS / name).is_file()]
        named = bool(records) or "benchmarks/run.py" in paragraph or "clearhead bench" in paragraph
        yield paragraph.split("\n")[0][:70], named, missing(" ".join(stated), records) if records else []


def main() -> None:
    """Print what has no record, by page."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for line in without_record(text):
            print(f"{path.relative_to(ROOT)}: {line}")
        for words, named, lacking in measured(text):
            if not named or lacking:
                told = (
                    f"not in its record: {', '.join(lacking)}"
                    if named
                    else "names no record and no benchmark"
                )
                print(f"{path.relative_to(ROOT)}: {words} ({told})")


if __name__ == "__main__":
    main()
