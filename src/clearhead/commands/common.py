"""What the commands share: the model's argument, JSON or a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

Json = Annotated[bool, arg(help="print one JSON object instead of a table")]
Folder = Annotated[Positional[Path], arg(metavar="DIR", help="a model directory, clearhead's or Hugging Face's")]


def show_result(body: dict[str, Any], as_json: bool, show: Any) -> None:
    """One JSON object on stdout, or what `show` makes of a console."""
    if as_json:
        print(json.dumps(body, indent=2))
        return
    from rich.console import Console

    show(Console())
