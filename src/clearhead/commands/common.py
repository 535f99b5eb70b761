"""What the commands share: the model's argument, JSON or a table, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

Json = Annotated[bool, arg(help="print one JSON object instead of a table")]
Folder = Annotated[
    Positional[Path], arg(metavar="DIR", help="a model directory, clearhead's or Hugging Face's")
]


def show_result(body: dict[str, Any], as_json: bool, show: Any) -> None:
    """One JSON object on stdout, or what `show` makes of a console."""
    if as_json:
        print(json.dumps(body, indent=2))
        return
    from rich.console import Console

    show(Console())


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for each stage, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bar:
        bars: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = bar.add_task(stage, total=total)
            bar.update(bars[stage], completed=done)

        yield show
